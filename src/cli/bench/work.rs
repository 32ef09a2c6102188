//! What a bench times: made-up experts and tokens, and the machine itself.

use std::sync::Arc;
use std::time::Instant;

use crate::backend::simd::{ReadBuffer, Simd};
use crate::backend::{Backend, BackendError, ExpertBatch, Experts, ExpertsSpec};
use crate::checkpoint::tensors::{ExpertTensors, Projection, ProjectionData, TensorBytes};
use crate::layer::tune::time_tactics;
use crate::numerics::nvfp4::{self, BLOCK};
use crate::select::InstructionSet;
use crate::select::tactics::{Ballot, Tactic, Timing, choose};

use super::BenchError;

/// What one measurement of the FMA peak should last.
const PEAK_SECONDS: f64 = 0.02;

/// FC1's `input_scale` of the made-up tokens, whose sigma is 1.
pub(super) const TOKEN_SCALE: f32 = 5.0 / 2688.0;

/// xorshift64: the numbers do not matter, but that no two experts are alike does.
pub(super) struct Noise(pub(super) u64);

impl Noise {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Even over 0 to 1.
    pub(super) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| self.bits().to_le_bytes()).collect();
        bytes.truncate(len);
        bytes
    }

    /// Even over -1.7 to 1.7, which is sigma 1, with the eight bits of a bf16.
    pub(super) fn value(&mut self) -> f32 {
        f32::from((self.bits() >> 56) as u8) / 75.0 - 1.7
    }

    /// Weights that give products of sigma near 1.5.
    fn projection(&mut self, out_features: usize, in_features: usize) -> Projection {
        let elements = out_features * in_features;
        // 2^-2 to just under 2^2; with codes drawn evenly a value's root mean square is near 4.6.
        let block_scales: Vec<u8> = self.bytes(elements / BLOCK).into_iter().map(|byte| 0x28 + byte % 0x20).collect();
        Projection {
            out_features,
            in_features,
            data: ProjectionData::Nvfp4 {
                packed: TensorBytes::Owned(self.bytes(elements / 2).into()),
                block_scales: TensorBytes::Owned(block_scales.into()),
                global_scale: 1.5 / 4.6 / (in_features as f32).sqrt(),
                input_scale: Some(TOKEN_SCALE),
            },
        }
    }
}

impl Noise {
    pub(super) fn expert(&mut self, spec: &ExpertsSpec) -> ExpertTensors {
        ExpertTensors {
            gate: self.projection(spec.intermediate, spec.hidden),
            up: self.projection(spec.intermediate, spec.hidden),
            down: self.projection(spec.hidden, spec.intermediate),
        }
    }
}

/// Packs experts, one at a time.
pub(super) fn pack(
    backend: &Arc<dyn Backend>,
    spec: ExpertsSpec,
    num_experts: usize,
    noise: &mut Noise,
) -> Result<Box<dyn Experts>, BackendError> {
    let builder = backend.experts(spec, num_experts)?;
    for local in 0..num_experts {
        builder.put(local, &noise.expert(&spec))?;
    }
    builder.finish()
}

/// The batch of one line: every expert computes the same tokens.
pub(super) struct Work {
    pub(super) rows_per_expert: usize,
    pub(super) flops: f64,
    tokens: Vec<f32>,
    token_scale: f32,
    row_token: Vec<u32>,
    expert_offsets: Vec<usize>,
    out: Vec<f32>,
    pub(super) tactic: Tactic,
    /// The best time of each tactic by name, of a backend that has several, where they were timed.
    pub(super) tactics_us: Vec<(&'static str, f64)>,
    pub(super) times_us: Vec<f64>,
}

impl Work {
    pub(super) fn new(spec: &ExpertsSpec, num_experts: usize, rows_per_expert: usize, noise: &mut Noise) -> Self {
        let num_rows = num_experts * rows_per_expert;
        let mut tokens: Vec<f32> = (0..rows_per_expert * spec.hidden).map(|_| noise.value()).collect();
        let mut token_scale = 1.0;
        if spec.quantise_activations {
            token_scale = TOKEN_SCALE;
            let values = tokens.clone();
            nvfp4::quantise_unscaled(&values, token_scale, &mut tokens);
        }
        #[expect(clippy::cast_possible_truncation, reason = "tokens of one call fit in memory")]
        let row_token = (0..num_rows).map(|row| (row % rows_per_expert) as u32).collect();
        Self {
            rows_per_expert,
            flops: 2.0 * 3.0 * spec.hidden as f64 * spec.intermediate as f64 * num_rows as f64,
            tokens,
            token_scale,
            row_token,
            expert_offsets: (0..=num_experts).map(|expert| expert * rows_per_expert).collect(),
            out: vec![0.0; num_rows * spec.hidden],
            tactic: Tactic::UNTUNED,
            tactics_us: Vec::new(),
            times_us: Vec::new(),
        }
    }

    /// Times every tactic and keeps the one that a session of this rank alone would choose.
    pub(super) fn tune(&mut self, experts: &dyn Experts) -> Result<(), BenchError> {
        let names = experts.tactics();
        let mut timings = Vec::new();
        for timed in time_tactics(names.len(), |tactic| self.run_with(experts, tactic).map(drop)) {
            timings.push(Timing::Took(timed?));
        }
        let shape = format!("{} rows an expert", self.rows_per_expert);
        let choice = choose(&shape, names, &[Ballot::new(0, Some(&timings))], &[])?;
        self.tactic = choice.tactic;
        let us = |ns: &Option<u64>| ns.map_or(0.0, |ns| ns as f64 / 1e3);
        self.tactics_us = names.iter().copied().zip(choice.slowest_ns.iter().map(us)).collect();
        Ok(())
    }

    /// Runs once; returns the identity that ran.
    ///
    /// # Errors
    /// If a device fails.
    pub(super) fn run(&mut self, experts: &dyn Experts) -> Result<String, BackendError> {
        self.run_with(experts, self.tactic)
    }

    fn run_with(&mut self, experts: &dyn Experts, tactic: Tactic) -> Result<String, BackendError> {
        let batch = ExpertBatch {
            tokens: &self.tokens,
            token_scale: self.token_scale,
            row_token: &self.row_token,
            expert_offsets: &self.expert_offsets,
            tactic,
        };
        let stats = experts.forward(&batch, &mut self.out)?;
        Ok(stats.rows_by_identity.first().map_or_else(String::new, |(identity, _)| identity.to_string()))
    }
}

/// The machine at its best.
pub(super) struct Machine {
    pub(super) simd: Simd,
    buffer: ReadBuffer,
    rounds: u64,
}

impl Machine {
    pub(super) fn new(num_threads: usize, isa: InstructionSet, read_bytes: usize) -> Result<Self, BackendError> {
        let mut machine = Self { simd: Simd::new(num_threads, isa)?, buffer: ReadBuffer::new(read_bytes)?, rounds: 64 };
        loop {
            let start = Instant::now();
            let _ = machine.simd.fma_flops(machine.rounds);
            if start.elapsed().as_secs_f64() >= PEAK_SECONDS {
                return Ok(machine);
            }
            machine.rounds *= 2;
        }
    }

    pub(super) fn fma_gflops(&self) -> f64 {
        let start = Instant::now();
        let flops = self.simd.fma_flops(self.rounds);
        flops as f64 / start.elapsed().as_secs_f64() / 1e9
    }

    pub(super) fn read_gbyte_per_s(&self) -> f64 {
        let start = Instant::now();
        let bytes = self.simd.read_bytes(&self.buffer);
        bytes as f64 / start.elapsed().as_secs_f64() / 1e9
    }
}
