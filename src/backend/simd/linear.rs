//! One matrix times rows, written to row-major outputs: FC2 and dense projections.

use std::cell::RefCell;
use std::sync::Arc;

use rayon::prelude::*;

use super::Shared;
use super::gemm::{MAX_PANELS, Scratch};
use super::kernels::{LANES, Panel, RowBlocks};
use super::pack::PackedMatrix;
use super::plan::{self, Chunks, UNTUNED};
use super::rows::{OutputTask, Source, deal, gather, unit_blocks};
use crate::backend::Linear;

thread_local! {
    /// Decoded weights and sums of this thread.
    pub(super) static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// A matrix and what its sums are multiplied by.
#[derive(Clone, Copy)]
pub(super) struct Scaled<'a> {
    pub(super) matrix: &'a PackedMatrix,
    pub(super) scale: f32,
}

impl Scaled<'_> {
    /// `out[row] = scale * sums` for the outputs of a task.
    pub(super) fn run(self, shared: &Shared, chunks: Chunks, rows: RowBlocks<'_>, out: &mut OutputTask<'_>) {
        SCRATCH.with_borrow_mut(|scratch| {
            let range = out.task.panels.clone();
            for first in range.clone().step_by(MAX_PANELS) {
                let panels = first..range.end.min(first + MAX_PANELS);
                let column = (first - range.start) * LANES;
                let panels: Vec<Panel<'_>> = panels.map(|panel| self.matrix.panel(panel)).collect();
                let sums = scratch.products(&*shared.kernels, chunks, &panels, rows);
                for (panel, sums) in sums.chunks_exact(rows.num_rows()).enumerate() {
                    let column = column + panel * LANES;
                    for (sums, out) in sums.iter().zip(&mut out.rows) {
                        for (out, sum) in out[column..].iter_mut().zip(sums.0) {
                            *out = sum * self.scale;
                        }
                    }
                }
            }
        });
    }
}

/// A packed dense projection.
pub(super) struct PackedLinear {
    pub(super) shared: Arc<Shared>,
    pub(super) matrix: PackedMatrix,
    pub(super) in_features: usize,
    pub(super) out_features: usize,
}

impl Linear for PackedLinear {
    fn forward(&self, x: &[f32], out: &mut [f32]) {
        let num_rows = x.len() / self.in_features;
        assert_eq!(x.len(), num_rows * self.in_features, "x is [num_rows, in_features]");
        assert_eq!(out.len(), num_rows * self.out_features, "out is [num_rows, out_features]");
        let shared = &*self.shared;
        let source = Source { values: x, width: self.in_features, row_of: None };
        let scaled = Scaled { matrix: &self.matrix, scale: self.matrix.global_scale };
        shared.pool.install(|| {
            shared.workspace.lend(|buffers| {
                let mut out = out;
                for units in plan::waves(&[0, num_rows]) {
                    let num_rows: usize = units.iter().map(|unit| unit.num_rows).sum();
                    let (wave_out, rest) = out.split_at_mut(num_rows * self.out_features);
                    out = rest;
                    let (input, _) = buffers.get(num_rows * self.matrix.num_blocks(), 0);
                    gather(source, &units, input);
                    let inputs = unit_blocks(&units, self.matrix.num_blocks(), input);
                    let tasks = plan::tasks(UNTUNED, &units, self.matrix.num_panels(), shared.num_threads);
                    let work = deal(&units, tasks, self.out_features, wave_out);
                    work.into_par_iter().with_max_len(1).for_each(|mut out| {
                        scaled.run(shared, UNTUNED.chunks, inputs[out.task.unit], &mut out);
                    });
                }
            });
        });
    }

    fn weight_bytes(&self) -> u64 {
        self.matrix.bytes()
    }
}
