//! What an instruction set has to offer, and the shapes its kernels work on.
//!
//! Every implementation does the same operations in the same order on every value, so their bits are equal. An output of
//! unquantised weights is one chain `acc = fma(x[k], w[k], acc)` over k ascending. One of NVFP4 weights is such a chain
//! for each block of sixteen codes, from zero, and one chain `acc = fma(sum, block_scale, acc)` over blocks ascending:
//! the scale is multiplied once for sixteen codes.

use super::pack::Order;
use crate::numerics::activation::Activation;
use crate::numerics::nvfp4::QuantCounts;

/// Outputs that a kernel computes side by side, and values that share a block scale.
pub(super) const LANES: usize = 16;

/// Sixteen f32, a cache line: the same k of a panel's outputs, or sixteen k of a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct Lane(pub(super) [f32; LANES]);

/// The weights of sixteen outputs, blocks of sixteen k, in the order that the instruction set wants.
#[derive(Debug, Clone, Copy)]
pub(super) enum Panel<'a> {
    /// Codes and block scales.
    Nvfp4 {
        /// `[k / 16]`
        codes: &'a [[u8; 128]],
        /// `[k / 16]`, a scale an output.
        scales: &'a [[u8; LANES]],
    },
    /// `[k / 16]`, pairs of k.
    Bf16(&'a [[[u8; 64]; 8]]),
    /// `[k]`
    F32(&'a [Lane]),
}

impl<'a> Panel<'a> {
    /// Whether both are of one format.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }

    /// The blocks `start..end`.
    pub(super) fn blocks(self, start: usize, end: usize) -> Self {
        match self {
            Self::Nvfp4 { codes, scales } => Self::Nvfp4 { codes: &codes[start..end], scales: &scales[start..end] },
            Self::Bf16(pairs) => Self::Bf16(&pairs[start..end]),
            Self::F32(lanes) => Self::F32(&lanes[start * LANES..end * LANES]),
        }
    }
}

/// A panel's weights as f32.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Decoded<'a> {
    /// `[k]`, NVFP4's without their block scales.
    pub(super) values: &'a [Lane],
    /// `[k / 16]`, where the format has block scales.
    pub(super) scales: Option<&'a [Lane]>,
}

/// Rows cut into blocks of sixteen k: `[k / 16, num_rows, 16]`, so that a tile of rows is contiguous in every block.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowBlocks<'a> {
    values: &'a [Lane],
    num_rows: usize,
}

impl<'a> RowBlocks<'a> {
    /// Wraps `[k / 16, num_rows, 16]`.
    pub(super) fn new(values: &'a [Lane], num_rows: usize) -> Self {
        debug_assert!(num_rows > 0 && values.len().is_multiple_of(num_rows));
        Self { values, num_rows }
    }

    /// Rows.
    pub(super) fn num_rows(self) -> usize {
        self.num_rows
    }

    /// Blocks of sixteen k.
    pub(super) fn num_blocks(self) -> usize {
        self.values.len() / self.num_rows
    }

    /// The blocks `start..end` of all rows.
    pub(super) fn blocks(self, start: usize, end: usize) -> Self {
        Self { values: &self.values[start * self.num_rows..end * self.num_rows], num_rows: self.num_rows }
    }

    /// Block `block` of the rows `row..row + R`.
    #[inline]
    pub(super) fn tile<const R: usize>(self, block: usize, row: usize) -> &'a [Lane; R] {
        let start = block * self.num_rows + row;
        self.values[start..start + R].first_chunk().expect("R rows")
    }
}

/// The kernels of one instruction set.
pub(super) trait Kernels: Send + Sync {
    /// The order in which NVFP4 codes and bf16 values lie in a panel.
    fn order(&self) -> Order;

    /// Whether so many rows are best multiplied as the weights are decoded, in registers, by [`Kernels::fused`].
    fn fuses(&self, num_rows: usize) -> bool;

    /// `acc[p, row] = sum over k` for panels of one format, not f32, and as many rows as [`Kernels::fuses`].
    fn fused(&self, panels: &[Panel<'_>], rows: RowBlocks<'_>, acc: &mut [Lane]);

    /// Decodes a panel, not of f32, into `values`, `[k]`, and an NVFP4 one's block scales into `scales`, `[k / 16]`.
    fn decode(&self, panel: Panel<'_>, values: &mut [Lane], scales: &mut [Lane]);

    /// Continues the chains `acc[p, row]` over the k of decoded panels of one format.
    fn multiply(&self, panels: &[Decoded<'_>], rows: RowBlocks<'_>, acc: &mut [Lane]);

    /// `gate[i] = activation(gate[i] * gate_scale, up[i] * up_scale)`
    fn activate(&self, activation: &ScaledActivation, gate: &mut [Lane], up: &[Lane]);

    /// Takes values through NVFP4: `out[i]` is `e2m1 * e4m3`, without `input_scale`; a lane is a block.
    fn quantise(&self, input_scale: f32, values: &[Lane], out: &mut [Lane]) -> QuantCounts;

    /// Runs `rounds` rounds of independent fused multiply-adds in registers; returns the flops done and a value that
    /// depends on all of them.
    fn fma_peak(&self, rounds: u64) -> (u64, f32);
}

/// An activation and what FC1's sums are multiplied by before it.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScaledActivation {
    /// The formula.
    pub(super) activation: Activation,
    /// Multiplies the gate's sums.
    pub(super) gate_scale: f32,
    /// Multiplies up's sums.
    pub(super) up_scale: f32,
}
