//! NVFP4: e2m1 codes, one e4m3 scale a block of 16, one f32 scale a tensor.
//!
//! A value is `e2m1(code) * e4m3(block scale) * global scale`. Two codes share a byte, the even element in the low
//! nibble; block scales lie in the order of their blocks. Every `e2m1 * e4m3` product is exact in f32, bf16 and fp16 (six
//! significant bits, 2^-10 to 2688), so a row without its global scale can be multiplied exactly in any of them.
//!
//! All arithmetic is f32, IEEE, in a fixed order, without fused operations: bits do not depend on the host or the vector
//! width. Knows nothing of checkpoints and of who multiplies the values.
//!
//! A NaN is not lost: it turns its block's scale into NaN, and with it every value of the block. An infinity saturates
//! like any large value and is counted.

mod weights;

#[cfg(test)]
mod tests;

use std::ops::AddAssign;

use super::{e2m1, e4m3};
pub use weights::{QuantisedWeights, quantise_weights, quantise_weights_with};

/// Values that share a block scale.
pub const BLOCK: usize = 16;

/// Bytes of the codes of a block.
pub const BLOCK_BYTES: usize = BLOCK / 2;

/// The largest `e2m1 * e4m3`: a global scale is the largest magnitude over this.
pub const MAX: f32 = e2m1::MAX * e4m3::MAX;

/// Above this the nearest e4m3 value would be more than 448 if there were one; up to here 448 is the nearest.
const LARGEST_UNCLIPPED_SCALE: f32 = 464.0;

/// What happened to the block scales of a quantisation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QuantCounts {
    /// Blocks quantised.
    pub num_blocks: u64,
    /// Blocks whose scale was clipped to 448: their values saturate. A scale that merely rounds to 448 is not counted, so
    /// a tensor quantised with its own `amax / 2688` counts none.
    pub num_saturated: u64,
    /// Blocks with a non-zero value whose scale became 0: their values vanish.
    pub num_zeroed: u64,
}

impl AddAssign for QuantCounts {
    fn add_assign(&mut self, other: Self) {
        self.num_blocks += other.num_blocks;
        self.num_saturated += other.num_saturated;
        self.num_zeroed += other.num_zeroed;
    }
}

/// The two scales of one block.
struct BlockScale {
    /// The e4m3 scale, as a float.
    value: f32,
    /// What a value is multiplied by before it is rounded to e2m1; 0 where the scale is 0.
    factor: f32,
}

impl BlockScale {
    #[inline(always)]
    fn new(x: &[f32; BLOCK], inverse_scale: f32, counts: &mut QuantCounts) -> Self {
        let amax = block_amax(x);
        let wanted = (amax / e2m1::MAX) * inverse_scale;
        let value = e4m3::round(wanted);
        counts.num_blocks += 1;
        counts.num_saturated += u64::from(wanted > LARGEST_UNCLIPPED_SCALE);
        counts.num_zeroed += u64::from(value == 0.0 && amax > 0.0);
        let factor = if value == 0.0 { 0.0 } else { inverse_scale / value };
        Self { value, factor }
    }
}

/// The largest magnitude, or NaN if there is one.
#[inline(always)]
fn block_amax(x: &[f32; BLOCK]) -> f32 {
    // As integers: magnitudes order like their bits, and NaN lies above infinity, so it wins instead of being skipped.
    let mut amax = 0_i32;
    for v in x {
        amax = amax.max(v.abs().to_bits().cast_signed());
    }
    f32::from_bits(amax.cast_unsigned())
}

/// Quantises `x` `[n]`, n a multiple of 16, into codes `packed` `[n / 2]` and e4m3 bits `scales` `[n / 16]`.
///
/// With `gs = 1 / input_scale`: a block's scale is `e4m3((max|x| / 6) * gs)`, a code is `e2m1(x * (gs / scale))`; where
/// the scale is 0 a code is 0 with the sign of its value. The value it stands for is `code * scale * input_scale`.
/// `input_scale` is finite and > 0, and not so small (under 2^-118) that `gs / scale` overflows.
///
/// # Panics
/// If the lengths do not fit together.
#[inline(always)]
pub fn quantise_row(x: &[f32], input_scale: f32, packed: &mut [u8], scales: &mut [u8]) -> QuantCounts {
    let (blocks, rest) = x.as_chunks::<BLOCK>();
    assert!(rest.is_empty(), "a row of {} values is not made of blocks of {BLOCK}", x.len());
    let (packed, packed_rest) = packed.as_chunks_mut::<BLOCK_BYTES>();
    assert!(packed_rest.is_empty() && packed.len() == blocks.len(), "codes hold half a byte a value");
    assert_eq!(scales.len(), blocks.len(), "one scale a block");
    let inverse_scale = 1.0 / input_scale;
    let mut counts = QuantCounts::default();
    for ((x, packed), scale) in blocks.iter().zip(packed).zip(scales) {
        let block = BlockScale::new(x, inverse_scale, &mut counts);
        *scale = e4m3::encode(block.value);
        *packed = pack_block(&x.map(|v| e2m1::encode(v * block.factor)));
    }
    counts
}

/// `dequantise_unscaled` of `quantise_row` in one pass, bit for bit: `x` and `out` are `[n]`, n a multiple of 16.
///
/// # Panics
/// If the lengths do not fit together.
// Inlined into its caller so that a caller compiled for wider vectors gets them. 0.36 ns a value with SSE2, 0.19 ns with
// AVX2 (EPYC 9R45, one core, rows of 3072 in L1).
#[inline(always)]
pub fn quantise_unscaled(x: &[f32], input_scale: f32, out: &mut [f32]) -> QuantCounts {
    let (blocks, rest) = x.as_chunks::<BLOCK>();
    assert!(rest.is_empty(), "a row of {} values is not made of blocks of {BLOCK}", x.len());
    assert_eq!(out.len(), x.len(), "a value out for each value in");
    let inverse_scale = 1.0 / input_scale;
    let mut counts = QuantCounts::default();
    for (x, out) in blocks.iter().zip(out.as_chunks_mut::<BLOCK>().0) {
        let block = BlockScale::new(x, inverse_scale, &mut counts);
        *out = x.map(|v| e2m1::round(v * block.factor) * block.value);
    }
    counts
}

/// The `e2m1 * e4m3` products of a row, without the global scale: `packed` `[n / 2]`, `scales` `[n / 16]`, `out` `[n]`.
///
/// # Panics
/// If the lengths do not fit together.
#[inline(always)]
pub fn dequantise_unscaled(packed: &[u8], scales: &[u8], out: &mut [f32]) {
    let (packed, out) = check_lengths(packed, scales, out);
    for ((packed, &scale), out) in packed.iter().zip(scales).zip(out) {
        let scale = e4m3::decode(scale);
        for (pair, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
            *pair = PAIRS[usize::from(byte)].map(|v| v * scale);
        }
    }
}

/// The values of a row, rounded once: `packed` `[n / 2]`, `scales` `[n / 16]`, `out` `[n]`.
///
/// # Panics
/// If the lengths do not fit together.
pub fn dequantise_row(packed: &[u8], scales: &[u8], global_scale: f32, out: &mut [f32]) {
    dequantise_unscaled(packed, scales, out);
    for v in out {
        *v *= global_scale;
    }
}

#[inline(always)]
fn check_lengths<'a>(
    packed: &'a [u8],
    scales: &[u8],
    out: &'a mut [f32],
) -> (&'a [[u8; BLOCK_BYTES]], &'a mut [[f32; BLOCK]]) {
    let num_values = out.len();
    let (packed, packed_rest) = packed.as_chunks();
    let (out, out_rest) = out.as_chunks_mut();
    assert!(
        packed_rest.is_empty() && out_rest.is_empty() && packed.len() == out.len() && scales.len() == out.len(),
        "{num_values} values want half as many bytes of codes and a scale each {BLOCK}, found {} and {}",
        packed.len() * BLOCK_BYTES + packed_rest.len(),
        scales.len()
    );
    (packed, out)
}

/// Two codes a byte, the even element in the low nibble.
#[inline(always)]
fn pack_block(codes: &[u8; BLOCK]) -> [u8; BLOCK_BYTES] {
    let mut packed = [0; BLOCK_BYTES];
    for (byte, [even, odd]) in packed.iter_mut().zip(codes.as_chunks::<2>().0) {
        *byte = even | (odd << 4);
    }
    packed
}

/// The two values of every byte of codes: one load instead of two.
static PAIRS: [[f32; 2]; 256] = {
    let mut pairs = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [e2m1::VALUES[byte & 0x0f], e2m1::VALUES[byte >> 4]];
        byte += 1;
    }
    pairs
};
