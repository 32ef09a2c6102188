//! Progress bars: on rank 0, on a terminal (or where asked for), on standard error.

use std::io::{self, IsTerminal, Write};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

use super::output;
use super::values::ProgressChoice;

/// Draws so often where standard error is a pipe, whose other end may be slow.
const PIPE_DRAWS_PER_S: u8 = 4;

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
        let is_terminal = io::stderr().is_terminal();
        let target = match (rank, choice, is_terminal) {
            (0, ProgressChoice::Auto | ProgressChoice::Always, true) => ProgressDrawTarget::stderr(),
            (0, ProgressChoice::Always, false) => {
                ProgressDrawTarget::term_like_with_hz(Box::new(Pipe), PIPE_DRAWS_PER_S)
            }
            _ => return Self { bars: None },
        };
        let bars = MultiProgress::with_draw_target(target);
        output::write_around(&bars);
        Self { bars: Some(bars) }
    }

    /// A bar over `total_bytes`, with rate and time left.
    #[must_use]
    pub fn bytes(&self, label: &str, total_bytes: u64) -> Bar {
        self.bar(label, total_bytes, "{msg:<20} {wide_bar} {bytes:>10} of {total_bytes}, {bytes_per_sec}, {eta} left")
    }

    /// A bar over `total` of something, named by `unit`.
    #[must_use]
    pub fn steps(&self, label: &str, total: u64, unit: &str) -> Bar {
        self.bar(label, total, &format!("{{msg:<20}} {{wide_bar}} {{pos}} of {{len}} {unit}, {{eta}} left"))
    }

    fn bar(&self, label: &str, total: u64, template: &str) -> Bar {
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

    /// Sets what is done.
    pub fn set(&self, position: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(position);
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

/// Standard error as a terminal of fixed size behind a pipe: `mpirun` hands what ranks write to its own terminal.
#[derive(Debug)]
struct Pipe;

impl Pipe {
    fn put(&self, text: &str) -> io::Result<()> {
        io::stderr().lock().write_all(text.as_bytes())
    }

    fn move_cursor(&self, n: usize, direction: char) -> io::Result<()> {
        if n == 0 { Ok(()) } else { self.put(&format!("\x1b[{n}{direction}")) }
    }
}

impl TermLike for Pipe {
    fn width(&self) -> u16 {
        79
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'A')
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'B')
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'C')
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.put(&format!("{text}\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.put(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.put("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        io::stderr().lock().flush()
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
        bar.finish();
    }

    #[test]
    fn templates_are_valid() {
        for template in [
            "{msg:<20} {wide_bar} {bytes:>10} of {total_bytes}, {bytes_per_sec}, {eta} left",
            "{msg:<20} {wide_bar} {pos} of {len} layers, {eta} left",
        ] {
            ProgressStyle::with_template(template).expect("a template");
        }
    }
}
