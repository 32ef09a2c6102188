//! What the backends owe each other and themselves, on made-up experts.
#![expect(clippy::cast_possible_truncation, reason = "small numbers and test data")]

mod activation;
mod agreement;
mod bits;
mod cases;
mod fixtures;
mod gpu;
mod gpu_dense;
mod gpu_live;
mod mutations;
mod oracle;
mod refusals;

use std::sync::Arc;

use super::{Backend, ExpertBatch, Experts, ExpertsSpec, ForwardStats, Machine, best_instruction_set};
use crate::checkpoint::tensors::{ExpertTensors, Projection, ProjectionData, TensorBytes};
use crate::numerics::activation::Activation;
pub(super) use crate::random::Random;
use crate::select::InstructionSet;
use crate::select::tactics::Tactic;

/// Kimi K3's activation.
pub(super) const SITU: Activation = Activation::Situ { beta: 4.0, linear_beta: Some(25.0) };

/// The instruction sets of this machine.
pub(super) fn isas() -> impl Iterator<Item = InstructionSet> {
    InstructionSet::ALL.into_iter().filter(|isa| *isa <= best_instruction_set())
}

impl Random {
    /// About Gaussian, sigma 1.
    pub(super) fn normal(&mut self) -> f32 {
        let sum: f64 = (0..12).map(|_| (self.bits() >> 11) as f64 / (1_u64 << 53) as f64).sum();
        (sum - 6.0) as f32
    }

    pub(super) fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }
}

/// Storage of a projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Nvfp4,
    Bf16,
    F32,
}

pub(super) fn owned(bytes: Vec<u8>) -> TensorBytes {
    TensorBytes::Owned(bytes.into())
}

/// A projection whose products with inputs of sigma 1 have a sigma near 1.5.
pub(super) fn projection(rng: &mut Random, out_features: usize, in_features: usize, format: Format) -> Projection {
    let sigma = 1.5 / (in_features as f32).sqrt();
    let data = match format {
        Format::Nvfp4 => {
            let packed = (0..out_features * in_features / 2).map(|_| rng.bits() as u8).collect();
            // From 2^-2 to just under 2^2; e2m1 codes drawn evenly have a root mean square of 2.9.
            let scales: Vec<u8> = (0..out_features * in_features / 16).map(|_| 0x28 + rng.below(0x20) as u8).collect();
            ProjectionData::Nvfp4 {
                packed: owned(packed),
                block_scales: owned(scales),
                global_scale: sigma / 2.9 / 1.6 * (0.7 + rng.below(100) as f32 / 150.0),
                input_scale: Some((0.8 + rng.below(100) as f32 / 250.0) * 4.0 / 2688.0),
            }
        }
        Format::Bf16 => ProjectionData::Bf16(owned(
            rng.normals(out_features * in_features)
                .iter()
                .flat_map(|v| half::bf16::from_f32(v * sigma).to_le_bytes())
                .collect(),
        )),
        Format::F32 => ProjectionData::F32(owned(
            rng.normals(out_features * in_features).iter().flat_map(|v| (v * sigma).to_le_bytes()).collect(),
        )),
    };
    Projection { out_features, in_features, data }
}

pub(super) fn expert(rng: &mut Random, spec: &ExpertsSpec, format: Format) -> ExpertTensors {
    ExpertTensors {
        gate: projection(rng, spec.intermediate, spec.hidden, format),
        up: projection(rng, spec.intermediate, spec.hidden, format),
        down: projection(rng, spec.hidden, spec.intermediate, format),
    }
}

/// Experts and rows for them.
#[derive(Clone)]
pub(super) struct Case {
    pub(super) spec: ExpertsSpec,
    pub(super) experts: Vec<ExpertTensors>,
    pub(super) tokens: Vec<f32>,
    pub(super) token_scale: f32,
    pub(super) row_token: Vec<u32>,
    pub(super) expert_offsets: Vec<usize>,
}

impl Case {
    /// Experts of the given formats, each with the given number of rows, rows reading tokens at random.
    pub(super) fn new(seed: u64, spec: ExpertsSpec, formats: &[Format], rows: &[usize]) -> Self {
        let mut rng = Random::new(seed);
        let experts = formats.iter().map(|format| expert(&mut rng, &spec, *format)).collect();
        let num_rows: usize = rows.iter().sum();
        let num_tokens = num_rows.div_ceil(2).max(1);
        let mut tokens = rng.normals(num_tokens * spec.hidden);
        let mut token_scale = 1.0;
        if spec.quantise_activations {
            token_scale = 5.0 / 2688.0;
            let values = tokens.clone();
            crate::numerics::nvfp4::quantise_unscaled(&values, token_scale, &mut tokens);
        }
        let row_token = (0..num_rows).map(|_| rng.below(num_tokens) as u32).collect();
        let mut expert_offsets = vec![0];
        for rows in rows {
            expert_offsets.push(expert_offsets[expert_offsets.len() - 1] + rows);
        }
        Self { spec, experts, tokens, token_scale, row_token, expert_offsets }
    }

    pub(super) fn pack(&self, backend: &Arc<dyn Backend>) -> Box<dyn Experts> {
        let builder = backend.experts(self.spec, self.experts.len()).unwrap();
        for (local, expert) in self.experts.iter().enumerate() {
            builder.put(local, expert).unwrap();
        }
        builder.finish().unwrap()
    }

    pub(super) fn batch(&self) -> ExpertBatch<'_> {
        ExpertBatch {
            tokens: &self.tokens,
            token_scale: self.token_scale,
            row_token: &self.row_token,
            expert_offsets: &self.expert_offsets,
            tactic: Tactic::UNTUNED,
        }
    }

    /// The rows, and what was counted; the buffer starts as NaN, so that a row left out is seen.
    pub(super) fn run(&self, backend: &Arc<dyn Backend>) -> (Vec<f32>, ForwardStats) {
        let mut out = vec![f32::NAN; self.row_token.len() * self.spec.hidden];
        let stats = self.pack(backend).forward(&self.batch(), &mut out).unwrap();
        (out, stats)
    }
}

pub(super) fn reference() -> Arc<dyn Backend> {
    super::build("reference", &Machine { num_threads: 2, ..Machine::default() }).unwrap()
}

pub(super) fn simd(num_threads: usize, isa: InstructionSet) -> Arc<dyn Backend> {
    super::build("simd", &Machine { num_threads, isa: Some(isa), ..Machine::default() }).unwrap()
}

/// Fails at the first element whose bits differ, naming row and column.
pub(super) fn assert_same_bits(got: &[f32], expected: &[f32], width: usize, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let (row, column) = (i / width, i % width);
        assert_eq!(g.to_bits(), e.to_bits(), "{what}: row {row}, column {column} is {g:e}, expected {e:e}");
    }
}

/// Fails where a row is further than `bound` from its expectation, relative L2, naming its worst element.
///
/// Two rows and `may_differ` of a hundred may be up to 5 % off: a value within rounding of a quantisation threshold can fall
/// on either side of it. Rows that are expected to be the same, of one token at one expert, count once.
pub(super) fn assert_rows_close(got: &[f32], expected: &[f32], width: usize, may_differ: usize, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths");
    let num_rows = got.len() / width.max(1);
    let allowed = if may_differ == 0 { 0 } else { 2 + num_rows * may_differ / 100 };
    let mut off: Vec<&[f32]> = Vec::new();
    for (row, (g, e)) in got.chunks(width).zip(expected.chunks(width)).enumerate() {
        let found = crate::numerics::metrics::compare(g, e);
        if found.rel_l2 > 1e-5 && !off.contains(&e) {
            off.push(e);
        }
        let bound = if off.len() <= allowed { 0.05 } else { 1e-5 };
        let at = found.max_abs_at;
        assert!(
            found.rel_l2 <= bound,
            "{what}: row {row} is {:.2e} off; column {at} is {:e}, expected {:e}",
            found.rel_l2,
            g[at],
            e[at]
        );
    }
}
