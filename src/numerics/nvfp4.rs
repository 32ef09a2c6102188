//! NVFP4: e2m1 codes, one e4m3 scale a block of 16, one f32 scale a tensor.

/// Values that share a block scale.
pub const BLOCK: usize = 16;

/// What happened to the block scales of a quantisation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QuantCounts {
    /// Blocks quantised.
    pub num_blocks: u64,
    /// Blocks whose scale was clipped to 448: their values saturate.
    pub num_saturated: u64,
    /// Blocks with a non-zero value whose scale became 0: their values vanish.
    pub num_zeroed: u64,
}
