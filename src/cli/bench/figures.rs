//! What benches make of what they have measured, and how they show it.

use std::fmt::Display;
use std::time::Duration;

use serde::Serialize;

use crate::cli::failure::Failure;
use crate::cli::output::{self, OutputError};
use crate::world::World;

/// In microseconds.
pub(super) fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The median; of an even number of times halfway between the two in the middle.
///
/// # Panics
/// If there are none: [`super::repeats`] refuses that.
pub(super) fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) { f64::midpoint(sorted[middle - 1], sorted[middle]) } else { sorted[middle] }
}

/// The least of them.
pub(super) fn fastest(times: &[f64]) -> f64 {
    times.iter().copied().fold(f64::INFINITY, f64::min)
}

/// The largest of all ranks' values, none below 0; collective.
pub(super) fn slowest(world: &World, value: f64) -> f64 {
    world.all_gather_u64([value.to_bits()]).into_iter().map(|[bits]| f64::from_bits(bits)).fold(0.0, f64::max)
}

/// Prints a report: its table, or one JSON object.
pub(super) fn show(report: &(impl Serialize + Display), as_json: bool) -> Result<(), OutputError> {
    if as_json { output::json(report) } else { output::line(report.to_string().trim_end()) }
}

/// The same of a report that all ranks have: rank 0 prints; collective.
pub(super) fn show_at_root(world: &World, report: &(impl Serialize + Display), as_json: bool) -> Result<(), Failure> {
    Ok(world.agree(if world.is_root() { show(report, as_json) } else { Ok(()) })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_times() {
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0, 2.0, 3.0])), (2.0, 2.5));
        assert_eq!((fastest(&[3.0, 1.0, 2.0]), us(Duration::from_millis(3))), (1.0, 3000.0));
    }
}
