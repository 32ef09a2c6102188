//! How a batch is cut: into units (rows of one expert), waves of units that share buffers, and tasks for the threads.
//!
//! Pure. The cut decides who computes a row and when, never its bits.

use std::ops::Range;

/// Rows of a unit at most: its inputs for 256 k, 384 KiB, stay in the second-level cache while all panels pass.
pub(super) const MAX_UNIT_ROWS: usize = 384;

/// How work is cut, for the threads and for the caches: the tactics of this backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    /// Tasks a thread should have: many, so that a thread which lags can be helped, or few, which cost less to hand out.
    pub(super) tasks_per_thread: usize,
    /// How many blocks of k are decoded at once.
    pub(super) chunks: Chunks,
}

/// How many blocks of k are decoded at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chunks {
    /// Few for few rows, many for many.
    ByRows,
    /// Many, whatever the rows.
    Long,
}

/// What runs untuned.
pub(super) const UNTUNED: Cut = Cut { tasks_per_thread: 12, chunks: Chunks::ByRows };

/// The tactics, by number.
pub(super) const CUTS: [Cut; 3] =
    [UNTUNED, Cut { tasks_per_thread: 3, ..UNTUNED }, Cut { chunks: Chunks::Long, ..UNTUNED }];

/// Their names.
pub(super) const NAMES: [&str; CUTS.len()] = ["even", "coarse", "long_chunks"];

/// Rows of a wave at most; the buffers between FC1 and FC2 are sized by it.
pub(super) const MAX_WAVE_ROWS: usize = 1024;

/// Decoding a panel costs about as much as multiplying it by so many rows.
const DECODE_ROWS: usize = 4;

/// Rows of one expert that are computed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unit {
    /// The local expert.
    pub(super) expert: usize,
    /// The first row, in the batch.
    pub(super) first_row: usize,
    /// How many.
    pub(super) num_rows: usize,
}

/// Cuts every expert's rows into units of even size, and units into waves.
pub(super) fn waves(expert_offsets: &[usize]) -> Vec<Vec<Unit>> {
    let mut waves = Vec::new();
    let mut wave: Vec<Unit> = Vec::new();
    let mut wave_rows = 0;
    for (expert, offsets) in expert_offsets.windows(2).enumerate() {
        let num_rows = offsets[1] - offsets[0];
        let num_units = num_rows.div_ceil(MAX_UNIT_ROWS);
        for unit in 0..num_units {
            let start = num_rows * unit / num_units;
            let end = num_rows * (unit + 1) / num_units;
            if wave_rows + (end - start) > MAX_WAVE_ROWS {
                waves.push(std::mem::take(&mut wave));
                wave_rows = 0;
            }
            wave_rows += end - start;
            wave.push(Unit { expert, first_row: offsets[0] + start, num_rows: end - start });
        }
    }
    if !wave.is_empty() {
        waves.push(wave);
    }
    waves
}

/// A part of the outputs for the rows of one unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Task {
    /// Which unit of the wave.
    pub(super) unit: usize,
    /// Panels of sixteen outputs.
    pub(super) panels: Range<usize>,
}

/// Cuts the panels of every unit so that tasks cost about the same; in the order of units and panels.
///
/// Ranges begin at multiples of four panels, so that the panels of a kernel call stay together.
pub(super) fn tasks(cut: Cut, units: &[Unit], num_panels: usize, num_threads: usize) -> Vec<Task> {
    let cost = |unit: &Unit| unit.num_rows + DECODE_ROWS;
    let total: usize = units.iter().map(|unit| cost(unit) * num_panels).sum();
    let target = total / (num_threads * cut.tasks_per_thread);
    let mut tasks = Vec::new();
    for (index, unit) in units.iter().enumerate() {
        let panels = (target / cost(unit)).next_multiple_of(4).max(4);
        for start in (0..num_panels).step_by(panels) {
            tasks.push(Task { unit: index, panels: start..num_panels.min(start + panels) });
        }
    }
    tasks
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_row_is_in_one_unit_and_waves_are_bounded(counts in prop::collection::vec(0_usize..2000, 0..12)) {
            let mut offsets = vec![0];
            for count in &counts {
                offsets.push(offsets[offsets.len() - 1] + count);
            }
            let mut next_row = 0;
            for wave in waves(&offsets) {
                let num_rows: usize = wave.iter().map(|unit| unit.num_rows).sum();
                prop_assert!(num_rows > 0 && num_rows <= MAX_WAVE_ROWS, "a wave of {} rows", num_rows);
                for unit in wave {
                    prop_assert!(unit.num_rows > 0 && unit.num_rows <= MAX_UNIT_ROWS, "{:?}", unit);
                    prop_assert_eq!(unit.first_row, next_row);
                    next_row += unit.num_rows;
                    let expert = offsets[unit.expert]..offsets[unit.expert + 1];
                    prop_assert!(expert.start <= unit.first_row, "{:?} of {:?}", unit, expert);
                    prop_assert!(next_row <= expert.end, "{:?} of {:?}", unit, expert);
                }
            }
            prop_assert_eq!(next_row, offsets[counts.len()]);
        }

        #[test]
        fn every_panel_is_in_one_task(
            rows in prop::collection::vec(1_usize..=MAX_UNIT_ROWS, 1..6),
            num_panels in 1_usize..300,
            num_threads in 1_usize..65,
            cut in prop::sample::select(CUTS.to_vec()),
        ) {
            let unit = |(expert, num_rows)| Unit { expert, first_row: 0, num_rows };
            let units: Vec<Unit> = rows.into_iter().enumerate().map(unit).collect();
            let mut next = (0, 0);
            for task in tasks(cut, &units, num_panels, num_threads) {
                prop_assert_eq!((task.unit, task.panels.start), next);
                prop_assert!(!task.panels.is_empty() && task.panels.end <= num_panels, "{:?}", task);
                next = if task.panels.end == num_panels { (task.unit + 1, 0) } else { (task.unit, task.panels.end) };
            }
            prop_assert_eq!(next, (units.len(), 0));
        }
    }
}
