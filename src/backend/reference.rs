//! The oracle: what every other backend is judged by. Plain loops, fp32 sums, the activation in f64.
//!
//! Keeps the checkpoint's bytes as they are and decodes one weight row at a time.

use std::sync::{Arc, OnceLock};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::checks::{self, add_counts};
use super::{Backend, BackendError, ExpertBatch, Experts, ExpertsBuilder, ExpertsSpec, ForwardStats, Linear};
use crate::checkpoint::tensors::{ExpertTensors, Projection, ProjectionData};
use crate::numerics::nvfp4::{self, BLOCK, QuantCounts};

/// The technique of this backend's identities.
pub const TECHNIQUE: &str = "reference";

/// Rows of one expert that are computed at a time, which bounds the buffers.
const MAX_ROWS: usize = 256;

/// The backend, with threads of its own.
pub struct Reference {
    pool: Arc<ThreadPool>,
}

impl Reference {
    /// Starts `num_threads` threads (0: one a core).
    ///
    /// # Errors
    /// If the threads cannot be started.
    pub fn new(num_threads: usize) -> Result<Self, BackendError> {
        let pool = ThreadPoolBuilder::new()
            .num_threads(num_threads)
            .thread_name(|index| format!("reference-{index}"))
            .build()
            .map_err(|source| BackendError::Threads { num_threads, source })?;
        Ok(Self { pool: Arc::new(pool) })
    }
}

impl Backend for Reference {
    fn technique(&self) -> &'static str {
        TECHNIQUE
    }

    fn experts(&self, spec: ExpertsSpec, num_local_experts: usize) -> Result<Box<dyn ExpertsBuilder>, BackendError> {
        checks::spec(&spec)?;
        let experts = (0..num_local_experts).map(|_| OnceLock::new()).collect();
        Ok(Box::new(Builder { pool: self.pool.clone(), spec, experts }))
    }

    fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    fn linear(&self, weight: &Projection) -> Result<Box<dyn Linear>, BackendError> {
        checks::linear(weight)?;
        Ok(Box::new(Dense { pool: self.pool.clone(), weight: weight.clone() }))
    }
}

/// Experts as the checkpoint has them.
struct Group {
    pool: Arc<ThreadPool>,
    spec: ExpertsSpec,
    experts: Vec<ExpertTensors>,
}

/// Experts that are still coming.
struct Builder {
    pool: Arc<ThreadPool>,
    spec: ExpertsSpec,
    experts: Vec<OnceLock<ExpertTensors>>,
}

impl ExpertsBuilder for Builder {
    fn put(&self, local: usize, expert: &ExpertTensors) -> Result<(), BackendError> {
        checks::expert(&self.spec, expert)?;
        checks::put(&self.experts, local, expert.clone());
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Box<dyn Experts>, BackendError> {
        let Self { pool, spec, experts } = *self;
        Ok(Box::new(Group { pool, spec, experts: checks::all(experts) }))
    }
}

impl Experts for Group {
    fn forward(&self, batch: &ExpertBatch<'_>, out: &mut [f32]) -> Result<ForwardStats, BackendError> {
        checks::batch(&self.spec, self.experts.len(), batch, out);
        let mut stats = ForwardStats::default();
        checks::count_rows(&mut stats, batch, |expert| checks::identity(TECHNIQUE, &self.spec, &self.experts[expert]));
        for (expert, offsets) in self.experts.iter().zip(batch.expert_offsets.windows(2)) {
            for start in (offsets[0]..offsets[1]).step_by(MAX_ROWS) {
                let end = offsets[1].min(start + MAX_ROWS);
                let token = |token: &u32| &batch.tokens[*token as usize * self.spec.hidden..][..self.spec.hidden];
                let x: Vec<&[f32]> = batch.row_token[start..end].iter().map(token).collect();
                let out = &mut out[start * self.spec.hidden..end * self.spec.hidden];
                let counts = self.pool.install(|| self.forward_rows(expert, &x, batch.token_scale, out));
                add_counts(&mut stats.fc2_input, counts);
            }
        }
        Ok(stats)
    }

    fn weight_bytes(&self) -> u64 {
        let bytes =
            |expert: &ExpertTensors| [&expert.gate, &expert.up, &expert.down].map(weight_bytes).iter().sum::<u64>();
        self.experts.iter().map(bytes).sum()
    }

    fn workspace_bytes(&self, num_rows: usize) -> u64 {
        let width = 4 * self.spec.intermediate + self.spec.hidden;
        (num_rows.min(MAX_ROWS) * width * size_of::<f32>()) as u64
    }
}

impl Group {
    /// `out[row] = down(activation(gate(x[row]), up(x[row])))`
    fn forward_rows(&self, expert: &ExpertTensors, x: &[&[f32]], token_scale: f32, out: &mut [f32]) -> QuantCounts {
        let ExpertsSpec { hidden, intermediate, activation, quantise_activations, .. } = self.spec;
        let num_rows = x.len();
        let gate_scale = token_scale * global_scale(&expert.gate);
        let up_scale = token_scale * global_scale(&expert.up);
        let gate = sums(&expert.gate, x);
        let up = sums(&expert.up, x);

        let mut inner = vec![0.0; num_rows * intermediate];
        inner.par_chunks_mut(intermediate).enumerate().for_each(|(row, inner)| {
            for (i, value) in inner.iter_mut().enumerate() {
                let at = i * num_rows + row;
                *value = activation.apply(gate[at] * gate_scale, up[at] * up_scale);
            }
        });

        let mut counts = QuantCounts::default();
        let mut down_scale = global_scale(&expert.down);
        if quantise_activations {
            let input_scale = input_scale(&expert.down).expect("checked when pushed");
            down_scale *= input_scale;
            let mut quantised = vec![0.0; inner.len()];
            for (x, out) in inner.chunks(intermediate).zip(quantised.chunks_mut(intermediate)) {
                add_counts(&mut counts, nvfp4::quantise_unscaled(x, input_scale, out));
            }
            inner = quantised;
        }

        let inner: Vec<&[f32]> = inner.chunks(intermediate).collect();
        let down = sums(&expert.down, &inner);
        for (row, out) in out.chunks_mut(hidden).enumerate() {
            for (i, value) in out.iter_mut().enumerate() {
                *value = down[i * num_rows + row] * down_scale;
            }
        }
        counts
    }
}

/// A dense projection as it came.
struct Dense {
    pool: Arc<ThreadPool>,
    weight: Projection,
}

impl Linear for Dense {
    fn forward(&self, x: &[f32], out: &mut [f32]) {
        let Projection { in_features, out_features, .. } = self.weight;
        let num_rows = x.len() / in_features;
        assert_eq!(x.len(), num_rows * in_features, "x is [num_rows, in_features]");
        assert_eq!(out.len(), num_rows * out_features, "out is [num_rows, out_features]");
        let scale = global_scale(&self.weight);
        for (x, out) in x.chunks(MAX_ROWS * in_features).zip(out.chunks_mut(MAX_ROWS * out_features)) {
            let x: Vec<&[f32]> = x.chunks(in_features).collect();
            let sums = self.pool.install(|| sums(&self.weight, &x));
            for (row, out) in out.chunks_mut(out_features).enumerate() {
                for (i, value) in out.iter_mut().enumerate() {
                    *value = sums[i * x.len() + row] * scale;
                }
            }
        }
    }

    fn weight_bytes(&self) -> u64 {
        weight_bytes(&self.weight)
    }
}

/// `[out_features, num_rows]`: the products of every weight row, without the global scale, with every row of `x`.
fn sums(weight: &Projection, x: &[&[f32]]) -> Vec<f32> {
    let mut sums = vec![0.0; weight.out_features * x.len()];
    if x.is_empty() {
        return sums;
    }
    sums.par_chunks_mut(x.len()).enumerate().for_each_init(
        || vec![0.0; weight.in_features],
        |w, (i, sums)| {
            decode_row(weight, i, w);
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum = dot(x, w);
            }
        },
    );
    sums
}

/// Sixteen running sums, one for each place in a block, added at the end in order.
fn dot(x: &[f32], w: &[f32]) -> f32 {
    let mut sums = [0.0_f32; BLOCK];
    for (x, w) in x.chunks(BLOCK).zip(w.chunks(BLOCK)) {
        for ((sum, x), w) in sums.iter_mut().zip(x).zip(w) {
            *sum += x * w;
        }
    }
    sums.iter().sum()
}

/// The values of a weight row, without the global scale.
fn decode_row(weight: &Projection, row: usize, out: &mut [f32]) {
    let width = weight.in_features;
    match &weight.data {
        ProjectionData::Nvfp4 { packed, block_scales, .. } => {
            let packed = &packed[row * width / 2..][..width / 2];
            let scales = &block_scales[row * width / BLOCK..][..width / BLOCK];
            nvfp4::dequantise_unscaled(packed, scales, out);
        }
        ProjectionData::Bf16(bytes) => {
            let values = &bytes.as_chunks().0[row * width..][..width];
            for (out, value) in out.iter_mut().zip(values) {
                *out = half::bf16::from_le_bytes(*value).to_f32();
            }
        }
        ProjectionData::F32(bytes) => {
            let values = &bytes.as_chunks().0[row * width..][..width];
            for (out, value) in out.iter_mut().zip(values) {
                *out = f32::from_le_bytes(*value);
            }
        }
    }
}

fn global_scale(weight: &Projection) -> f32 {
    match weight.data {
        ProjectionData::Nvfp4 { global_scale, .. } => global_scale,
        ProjectionData::Bf16(_) | ProjectionData::F32(_) => 1.0,
    }
}

fn input_scale(weight: &Projection) -> Option<f32> {
    match weight.data {
        ProjectionData::Nvfp4 { input_scale, .. } => input_scale,
        ProjectionData::Bf16(_) | ProjectionData::F32(_) => None,
    }
}

fn weight_bytes(weight: &Projection) -> u64 {
    let bytes = match &weight.data {
        ProjectionData::Nvfp4 { packed, block_scales, .. } => packed.len() + block_scales.len(),
        ProjectionData::Bf16(bytes) | ProjectionData::F32(bytes) => bytes.len(),
    };
    bytes as u64
}
