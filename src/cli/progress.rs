//! Progress bars: on rank 0, on a terminal (or where asked for), on standard error.

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::output;
use super::values::ProgressChoice;

const BYTES: &str = "{msg:<20} {wide_bar} {bytes:>10} of {total_bytes}, {bytes_per_sec}, {eta} left";
const STEPS: &str = "{msg:<20} {wide_bar} {pos:>10} of {len}, {eta} left";

/// The bars of this process; one that draws nothing costs nothing.
#[derive(Debug, Clone)]
pub struct Progress {
    bars: Option<MultiProgress>,
}

/// One bar. Dropped unfinished, it is taken off the screen.
#[derive(Debug)]
pub struct Bar(Option<ProgressBar>);

impl Progress {
    /// The bars of rank `rank` (0 where there is no world).
    #[must_use]
    pub fn new(choice: ProgressChoice, rank: u32) -> Self {
        let target = if rank == 0 { output::bar_target(choice) } else { None };
        let bars = target.map(MultiProgress::with_draw_target);
        if let Some(bars) = &bars {
            output::write_around(bars);
        }
        Self { bars }
    }

    /// A bar over `total_bytes`, with rate and time left.
    #[must_use]
    pub fn bytes(&self, label: &str, total_bytes: u64) -> Bar {
        self.styled(label, total_bytes, BYTES)
    }

    /// A bar over steps whose number its first [`Bar::advance`] tells.
    #[must_use]
    pub fn bar(&self, label: &str) -> Bar {
        self.styled(label, 0, STEPS)
    }

    fn styled(&self, label: &str, total: u64, template: &str) -> Bar {
        Bar(self.bars.as_ref().map(|bars| {
            let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
            bars.add(ProgressBar::new(total).with_style(style)).with_message(label.to_owned())
        }))
    }
}

impl Bar {
    /// Adds to what is done.
    pub fn inc(&self, delta: u64) {
        if let Some(bar) = &self.0 {
            bar.inc(delta);
        }
    }

    /// Sets what is done, of how much.
    pub fn advance(&self, done: u64, total: u64) {
        if let Some(bar) = &self.0 {
            bar.set_length(total);
            bar.set_position(done);
        }
    }

    /// Takes the bar off the screen.
    pub fn finish(self) {
        drop(self);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_ranks_and_never_draw_nothing() {
        assert!(Progress::new(ProgressChoice::Always, 1).bars.is_none());
        assert!(Progress::new(ProgressChoice::Never, 0).bars.is_none());
        let bar = Progress::new(ProgressChoice::Never, 0).bytes("loading", 100);
        bar.inc(1);
        bar.advance(2, 100);
        bar.finish();
    }

    #[test]
    fn templates_are_valid() {
        for template in [BYTES, STEPS] {
            ProgressStyle::with_template(template).expect("a template");
        }
    }
}
