//! A group of experts: FC1 with the activation, then FC2, wave by wave over all threads.

use std::sync::{Arc, OnceLock};

use rayon::prelude::*;

use super::gemm::{MAX_PANELS, Scratch};
use super::kernels::{LANES, Lane, Panel, RowBlocks, ScaledActivation};
use super::linear::{SCRATCH, Scaled};
use super::pack::PackedMatrix;
use super::plan::{self, CUTS, Cut, MAX_UNIT_ROWS, MAX_WAVE_ROWS, Task, Unit};
use super::rows::{Source, deal, gather, unit_blocks};
use super::{Shared, TECHNIQUE};
use crate::backend::checks::{self, add_counts};
use crate::backend::{BackendError, ExpertBatch, Experts, ExpertsBuilder, ExpertsSpec, ForwardStats};
use crate::checkpoint::tensors::ExpertTensors;
use crate::numerics::nvfp4::QuantCounts;
use crate::select::Identity;

/// Panels of gate that are computed together with the same panels of up.
const GATE_PANELS: usize = MAX_PANELS / 2;

struct PackedExpert {
    gate: PackedMatrix,
    up: PackedMatrix,
    down: PackedMatrix,
    identity: Identity,
}

/// Packs experts as they come.
pub(super) struct Builder {
    shared: Arc<Shared>,
    spec: ExpertsSpec,
    experts: Vec<OnceLock<PackedExpert>>,
}

impl Builder {
    pub(super) fn new(shared: Arc<Shared>, spec: ExpertsSpec, num_local_experts: usize) -> Self {
        Self { shared, spec, experts: (0..num_local_experts).map(|_| OnceLock::new()).collect() }
    }
}

impl ExpertsBuilder for Builder {
    fn put(&self, local: usize, expert: &ExpertTensors) -> Result<(), BackendError> {
        checks::expert(&self.spec, expert)?;
        let order = self.shared.kernels.order();
        let packed = self.shared.pool.install(|| -> Result<_, BackendError> {
            Ok(PackedExpert {
                gate: PackedMatrix::new(&expert.gate, order)?,
                up: PackedMatrix::new(&expert.up, order)?,
                down: PackedMatrix::new(&expert.down, order)?,
                identity: checks::identity(TECHNIQUE, &self.spec, expert),
            })
        })?;
        checks::put(&self.experts, local, packed);
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Box<dyn Experts>, BackendError> {
        let Self { shared, spec, experts } = *self;
        Ok(Box::new(Group { shared, spec, experts: checks::all(experts) }))
    }
}

/// Packed experts.
struct Group {
    shared: Arc<Shared>,
    spec: ExpertsSpec,
    experts: Vec<PackedExpert>,
}

impl Experts for Group {
    fn forward(&self, batch: &ExpertBatch<'_>, out: &mut [f32]) -> Result<ForwardStats, BackendError> {
        checks::batch(&self.spec, self.experts.len(), batch, out);
        let (cut, name) = (CUTS[batch.tactic.index()], plan::NAMES[batch.tactic.index()]);
        let mut stats = ForwardStats { tactic: Some(name), ..ForwardStats::default() };
        checks::count_rows(&mut stats, batch, |expert| self.experts[expert].identity);
        self.shared.pool.install(|| {
            self.shared.workspace.lend(|buffers| {
                let mut out = out;
                for units in plan::waves(batch.expert_offsets) {
                    let num_rows: usize = units.iter().map(|unit| unit.num_rows).sum();
                    let (wave_out, rest) = out.split_at_mut(num_rows * self.spec.hidden);
                    out = rest;
                    let lanes = |width: usize| num_rows * width / LANES;
                    let (input, inner) = buffers.get(lanes(self.spec.hidden), lanes(self.spec.intermediate));
                    let tokens =
                        Source { values: batch.tokens, width: self.spec.hidden, row_of: Some(batch.row_token) };
                    gather(tokens, &units, input);
                    add_counts(&mut stats.fc2_input, self.fc1(cut, &units, batch.token_scale, (input, inner)));
                    self.fc2(cut, &units, inner, wave_out);
                }
            });
        });
        Ok(stats)
    }

    fn tactics(&self) -> &'static [&'static str] {
        &plan::NAMES
    }

    fn weight_bytes(&self) -> u64 {
        self.experts.iter().map(|expert| expert.gate.bytes() + expert.up.bytes() + expert.down.bytes()).sum()
    }

    fn workspace_bytes(&self, num_rows: usize) -> u64 {
        let values = num_rows.min(MAX_WAVE_ROWS) * (self.spec.hidden + self.spec.intermediate);
        let scratch = self.shared.num_threads * Scratch::bytes(num_rows.min(MAX_UNIT_ROWS));
        // A task is at least as wide as a kernel call.
        let parts = num_rows.min(MAX_WAVE_ROWS) * (self.spec.hidden / LANES).div_ceil(MAX_PANELS);
        (values * size_of::<f32>() + scratch + parts * size_of::<&mut [f32]>()) as u64
    }
}

impl Group {
    /// `inner[unit, panel, row]`: the activation of gate and up, through NVFP4 where activations are quantised.
    fn fc1(&self, cut: Cut, units: &[Unit], token_scale: f32, (input, inner): (&[Lane], &mut [Lane])) -> QuantCounts {
        let inputs = unit_blocks(units, self.spec.hidden / LANES, input);
        let mut rest = inner;
        let mut work = Vec::new();
        for task in plan::tasks(cut, units, self.spec.intermediate / LANES, self.shared.num_threads) {
            let (part, tail) = rest.split_at_mut(task.panels.len() * units[task.unit].num_rows);
            rest = tail;
            work.push((task, part));
        }
        work.into_par_iter()
            .with_max_len(1)
            .map(|(task, inner)| {
                let expert = &self.experts[units[task.unit].expert];
                self.fc1_task((expert, token_scale), cut, &task, inputs[task.unit], inner)
            })
            .reduce(QuantCounts::default, |mut total, counts| {
                add_counts(&mut total, counts);
                total
            })
    }

    fn fc1_task(
        &self,
        (expert, token_scale): (&PackedExpert, f32),
        cut: Cut,
        task: &Task,
        rows: RowBlocks<'_>,
        inner: &mut [Lane],
    ) -> QuantCounts {
        let kernels = &*self.shared.kernels;
        let scaled = ScaledActivation {
            activation: self.spec.activation,
            gate_scale: token_scale * expert.gate.global_scale,
            up_scale: token_scale * expert.up.global_scale,
        };
        let mut counts = QuantCounts::default();
        let firsts = task.panels.clone().step_by(GATE_PANELS);
        SCRATCH.with_borrow_mut(|scratch| {
            for (first, inner) in firsts.zip(inner.chunks_mut(GATE_PANELS * rows.num_rows())) {
                let gate_panels = first..task.panels.end.min(first + GATE_PANELS);
                let mut panels: Vec<Panel<'_>> = gate_panels.clone().map(|panel| expert.gate.panel(panel)).collect();
                panels.extend(gate_panels.map(|panel| expert.up.panel(panel)));
                let sums = scratch.products(kernels, cut.chunks, &panels, rows);
                let (gate, up) = sums.split_at_mut(sums.len() / 2);
                kernels.activate(&scaled, gate, up);
                match self.input_scale(expert) {
                    Some(input_scale) => add_counts(&mut counts, kernels.quantise(input_scale, gate, inner)),
                    None => inner.copy_from_slice(gate),
                }
            }
        });
        counts
    }

    /// `out[row]`: the sums over FC1's values, times the scales that they left out.
    fn fc2(&self, cut: Cut, units: &[Unit], inner: &[Lane], out: &mut [f32]) {
        let inputs = unit_blocks(units, self.spec.intermediate / LANES, inner);
        let tasks = plan::tasks(cut, units, self.spec.hidden / LANES, self.shared.num_threads);
        deal(units, tasks, self.spec.hidden, out).into_par_iter().with_max_len(1).for_each(|mut out| {
            let unit = out.task.unit;
            let expert = &self.experts[units[unit].expert];
            let scale = self.input_scale(expert).unwrap_or(1.0) * expert.down.global_scale;
            Scaled { matrix: &expert.down, scale }.run(&self.shared, cut.chunks, inputs[unit], &mut out);
        });
    }

    /// The scale of an expert's FC2 input, where activations are quantised.
    fn input_scale(&self, expert: &PackedExpert) -> Option<f32> {
        if self.spec.quantise_activations { expert.down.input_scale } else { None }
    }
}
