//! The parts of a layer that run on a token's own rank, with weights that every rank holds.

use crate::backend::cuda::GatedDense;
use crate::backend::{BackendError, ExpertBatch, Experts, ForwardStats, Linear};
use crate::numerics::nvfp4::{self, QuantCounts};
use crate::routing::{self, RoutingError, RoutingMethod, TopK};
use crate::select::tactics::Tactic;

/// What of a layer is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The weighted sum of the routed experts; of a latent model the sum before the norm.
    Routed,
    /// The shared experts alone.
    Shared,
    /// All of it.
    Block,
}

impl Part {
    /// The name of `--part`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Routed => "routed",
            Self::Shared => "shared",
            Self::Block => "block",
        }
    }
}

/// Hidden states to top-k.
pub(super) struct Router {
    /// Absent where the device routes.
    pub gate: Option<Box<dyn Linear>>,
    pub bias: Option<Vec<f32>>,
    pub method: RoutingMethod,
    pub num_experts: usize,
    pub num_topk: usize,
    pub hidden: usize,
}

impl Router {
    /// Logits in fp32, then the model's method.
    pub fn route(&self, hidden: &[f32]) -> Result<TopK, RoutingError> {
        let mut logits = vec![0f32; hidden.len() / self.hidden * self.num_experts];
        on_host(&self.gate).forward(hidden, &mut logits);
        routing::route(self.method, self.num_experts, self.num_topk, &logits, self.bias.as_deref())
    }
}

/// Kimi K3's projections around the routed experts.
pub(super) struct Latent {
    /// Absent where the device projects.
    pub down: Option<Box<dyn Linear>>,
    /// Likewise.
    pub up: Option<Box<dyn Linear>>,
    pub norm: Option<Norm>,
    pub hidden: usize,
    pub latent: usize,
}

fn on_host(linear: &Option<Box<dyn Linear>>) -> &dyn Linear {
    linear.as_deref().unwrap_or_else(|| unreachable!("a layer whose dense parts lie on the device runs them there"))
}

/// RMS norm: `x * weight / sqrt(mean(x^2) + eps)`.
pub(super) struct Norm {
    pub weight: Vec<f32>,
    pub eps: f32,
}

impl Latent {
    /// `[num_tokens, hidden]` to `[num_tokens, latent]`, fp32.
    pub fn down(&self, hidden: &[f32]) -> Vec<f32> {
        let mut latent = vec![0f32; hidden.len() / self.hidden * self.latent];
        on_host(&self.down).forward(hidden, &mut latent);
        latent
    }

    /// `[num_tokens, latent]` sums to `[num_tokens, hidden]`.
    pub fn up(&self, mut sums: Vec<f32>) -> Vec<f32> {
        if let Some(norm) = &self.norm {
            sums.chunks_exact_mut(self.latent).for_each(|row| norm.apply(row));
        }
        let mut hidden = vec![0f32; sums.len() / self.latent * self.hidden];
        on_host(&self.up).forward(&sums, &mut hidden);
        hidden
    }
}

impl Norm {
    fn apply(&self, row: &mut [f32]) {
        // The mean in f64: its order of addition then doesn't show in the f32 result.
        let sum: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let mean = sum / row.len() as f64;
        let scale = 1.0 / libm::sqrt(mean + f64::from(self.eps));
        for (x, weight) in row.iter_mut().zip(&self.weight) {
            #[expect(clippy::cast_possible_truncation, reason = "rounds to f32, the working precision")]
            let normed = (f64::from(*x) * scale) as f32;
            *x = normed * weight;
        }
    }
}

/// The shared experts, as one wide expert.
pub(super) struct Shared {
    pub by: SharedBy,
    /// FC1's own global scale with quantised activations.
    pub input_scale: Option<f32>,
    /// The per-tensor scales of its projections, to compare with other ranks'.
    pub scales: Vec<f32>,
}

/// What computes the shared experts.
pub(super) enum SharedBy {
    /// The backend of the routed ones.
    Backend(Box<dyn Experts>),
    /// cublasLt, in a layer whose dense parts lie on the device.
    Library(Box<GatedDense>),
}

impl SharedBy {
    /// Bytes of the weights.
    pub fn weight_bytes(&self) -> u64 {
        match self {
            Self::Backend(experts) => experts.weight_bytes(),
            Self::Library(expert) => expert.weight_bytes(),
        }
    }
}

impl Shared {
    /// `[num_tokens, hidden]` through the shared expert.
    ///
    /// # Errors
    /// If a device fails.
    pub fn forward(&self, hidden: &[f32], width: usize) -> Result<(Vec<f32>, ForwardStats, QuantCounts), BackendError> {
        let num_tokens = hidden.len() / width;
        let row_token: Vec<u32> = (0..u32::try_from(num_tokens).unwrap_or(u32::MAX)).collect();
        let mut rows = vec![0f32; hidden.len()];
        let mut counts = QuantCounts::default();
        let quantised = self.input_scale.map(|input_scale| {
            let mut tokens = hidden.to_vec();
            counts = quantise_in_place(&mut tokens, width, input_scale);
            tokens
        });
        let batch = ExpertBatch {
            tokens: quantised.as_deref().unwrap_or(hidden),
            token_scale: self.input_scale.unwrap_or(1.0),
            row_token: &row_token,
            expert_offsets: &[0, num_tokens],
            // Its rows are this rank's own tokens: their number is no ground for a choice that all ranks share.
            tactic: Tactic::UNTUNED,
        };
        let SharedBy::Backend(experts) = &self.by else {
            unreachable!("a layer whose dense parts lie on the device runs them there")
        };
        let stats = experts.forward(&batch, &mut rows)?;
        Ok((rows, stats, counts))
    }
}

/// Replaces rows `[_, width]` by their NVFP4 values without the global scale.
pub(super) fn quantise_in_place(rows: &mut [f32], width: usize, input_scale: f32) -> QuantCounts {
    let mut counts = QuantCounts::default();
    let mut quantised = vec![0f32; width];
    for row in rows.chunks_exact_mut(width) {
        counts += nvfp4::quantise_unscaled(row, input_scale, &mut quantised);
        row.copy_from_slice(&quantised);
    }
    counts
}
