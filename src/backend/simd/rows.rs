//! Rows on their way in and out: gathered into blocks of sixteen k, and written back row by row.

use rayon::prelude::*;

use super::kernels::{LANES, Lane, RowBlocks};
use super::plan::{Task, Unit};

/// Row-major values, and which row of them each row of a batch reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source<'a> {
    /// `[_, width]`
    pub(super) values: &'a [f32],
    /// Values of a row.
    pub(super) width: usize,
    /// The row that each row of the batch reads; absent: its own.
    pub(super) row_of: Option<&'a [u32]>,
}

impl Source<'_> {
    fn row(&self, row: usize) -> &[f32] {
        let row = self.row_of.map_or(row, |row_of| row_of[row] as usize);
        &self.values[row * self.width..][..self.width]
    }
}

/// Copies the rows of all units into their blocks, one unit after the other; a last block is filled up with zeros.
pub(super) fn gather(source: Source<'_>, units: &[Unit], blocks: &mut [Lane]) {
    let num_blocks = source.width.div_ceil(LANES);
    let mut rest = blocks;
    let mut work = Vec::new();
    for unit in units {
        let (blocks, tail) = rest.split_at_mut(unit.num_rows * num_blocks);
        rest = tail;
        work.extend(blocks.chunks_mut(unit.num_rows).enumerate().map(|(block, lanes)| (unit.first_row, block, lanes)));
    }
    // Few rows are copied faster than threads wake up.
    let min_len = 1024_usize.div_ceil(units.iter().map(|unit| unit.num_rows).max().unwrap_or(1));
    work.into_par_iter().with_min_len(min_len).for_each(|(first_row, block, lanes)| {
        for (row, lane) in lanes.iter_mut().enumerate() {
            let values = &source.row(first_row + row)[block * LANES..];
            let len = values.len().min(LANES);
            lane.0[..len].copy_from_slice(&values[..len]);
            lane.0[len..].fill(0.0);
        }
    });
}

/// The blocks of every unit in a buffer that holds them one after the other.
pub(super) fn unit_blocks<'a>(units: &[Unit], num_blocks: usize, buffer: &'a [Lane]) -> Vec<RowBlocks<'a>> {
    let mut rest = buffer;
    let mut blocks = Vec::with_capacity(units.len());
    for unit in units {
        let (unit_blocks, tail) = rest.split_at(unit.num_rows * num_blocks);
        rest = tail;
        blocks.push(RowBlocks::new(unit_blocks, unit.num_rows));
    }
    blocks
}

/// A task and the parts of the output rows that it writes.
pub(super) struct OutputTask<'a> {
    pub(super) task: Task,
    /// `[num_rows]`, as wide as the task's panels, or narrower at the end of a row.
    pub(super) rows: Vec<&'a mut [f32]>,
}

/// Deals the rows of `out`, `[_, width]`, to tasks in the order of units and panels.
pub(super) fn deal<'a>(units: &[Unit], tasks: Vec<Task>, width: usize, out: &'a mut [f32]) -> Vec<OutputTask<'a>> {
    let mut rows = out.chunks_mut(width);
    let mut unit_rows: Vec<Vec<&'a mut [f32]>> =
        units.iter().map(|unit| rows.by_ref().take(unit.num_rows).collect()).collect();
    let mut dealt = Vec::with_capacity(tasks.len());
    for task in tasks {
        let columns = task.panels.len() * LANES;
        let mut parts = Vec::with_capacity(units[task.unit].num_rows);
        for row in &mut unit_rows[task.unit] {
            let whole = std::mem::take(row);
            let (part, rest) = whole.split_at_mut(columns.min(whole.len()));
            *row = rest;
            parts.push(part);
        }
        dealt.push(OutputTask { task, rows: parts });
    }
    dealt
}
