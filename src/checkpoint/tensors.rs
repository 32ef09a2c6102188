//! Tensors as they come from a checkpoint, typed and checked, before a backend packs them.

use std::ops::{Deref, Range};
use std::sync::Arc;

/// The bytes of one tensor: a range of a private mapping, or memory (tests, samples).
///
/// Dropping it and its neighbours unmaps them, so that a packed weight is not resident twice. The bytes of multi-byte values
/// need not be aligned: a header may have any length.
#[derive(Debug, Clone)]
pub enum TensorBytes {
    /// Mapped from a file.
    Mapped {
        /// What is mapped, which neighbours in the file share.
        window: Arc<memmap2::Mmap>,
        /// The tensor's part.
        range: Range<usize>,
    },
    /// Held in memory.
    Owned(Arc<[u8]>),
}

impl Deref for TensorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped { window, range } => &window[range.clone()],
            Self::Owned(bytes) => bytes,
        }
    }
}

/// A projection `[out_features, in_features]`, row-major: `y = W x`.
#[derive(Debug, Clone)]
pub struct Projection {
    /// Rows.
    pub out_features: usize,
    /// Columns, the summed dimension.
    pub in_features: usize,
    /// The numbers.
    pub data: ProjectionData,
}

/// How a projection's numbers are stored.
#[derive(Debug, Clone)]
pub enum ProjectionData {
    /// value = e2m1(code) * e4m3(block scale) * global_scale
    Nvfp4 {
        /// `[out, in / 2]`, the even element in the low nibble.
        packed: TensorBytes,
        /// `[out, in / 16]` e4m3 bits; checked: no NaN, not negative.
        block_scales: TensorBytes,
        /// `weight_scale_2`; checked: finite, > 0.
        global_scale: f32,
        /// `input_scale`; checked where present: finite, > 0.
        input_scale: Option<f32>,
    },
    /// `[out, in]` bf16, little-endian.
    Bf16(TensorBytes),
    /// `[out, in]` f32, little-endian.
    F32(TensorBytes),
}

/// The three projections of one expert (or of the shared expert).
#[derive(Debug, Clone)]
pub struct ExpertTensors {
    /// `[intermediate, hidden]`
    pub gate: Projection,
    /// `[intermediate, hidden]`
    pub up: Projection,
    /// `[hidden, intermediate]`
    pub down: Projection,
}

/// The router of a layer.
#[derive(Debug, Clone)]
pub struct RouterTensors {
    /// `[num_experts, hidden]` in bf16 or f32.
    pub weight: Projection,
    /// `[num_experts]` the correction bias, where the method adds one; finite.
    pub bias: Option<Vec<f32>>,
}

/// Kimi K3's projections around the routed experts.
#[derive(Debug, Clone)]
pub struct LatentTensors {
    /// `[expert_hidden, hidden]` in bf16 or f32.
    pub down: Projection,
    /// `[hidden, expert_hidden]` in bf16 or f32.
    pub up: Projection,
    /// `[expert_hidden]` the weight of the norm after the routed sum, where there is one; finite.
    pub norm: Option<Vec<f32>>,
}
