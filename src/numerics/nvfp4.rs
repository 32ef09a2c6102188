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

/// The smallest `input_scale` at which the arithmetic of [`quantise_row`] does not overflow: 2^-118.
pub const MIN_INPUT_SCALE: f32 = f32::from_bits((127 - 118) << 23);

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

/// Blocks whose scales are computed side by side: alone, a block's two divisions and its maximum are a chain of scalar
/// operations that costs more than its values (release build, SSE2: 1.7 ns a value one by one, 0.6 in groups).
const GROUP: usize = 32;

/// The scales of a group of blocks.
struct GroupScales {
    /// The e4m3 scales, as floats.
    values: [f32; GROUP],
    /// What a block's values are multiplied by before they are rounded to e2m1; 0 where the scale is 0.
    factors: [f32; GROUP],
}

impl GroupScales {
    /// The scales of up to [`GROUP`] blocks, counting what happened to them.
    #[inline(always)]
    fn new(blocks: &[[f32; BLOCK]], inverse_scale: f32, counts: &mut QuantCounts) -> Self {
        let mut amaxes = [0.0; GROUP];
        for (amax, block) in amaxes.iter_mut().zip(blocks) {
            *amax = block_amax(block);
        }
        let (mut values, mut factors) = ([0.0; GROUP], [0.0; GROUP]);
        let (mut num_saturated, mut num_zeroed) = (0_u32, 0_u32);
        for ((&amax, value), factor) in amaxes.iter().zip(&mut values).zip(&mut factors) {
            let wanted = (amax / e2m1::MAX) * inverse_scale;
            let scale = e4m3::round(wanted);
            // No branches: `&` and a division that may be thrown away keep the loop in vectors.
            num_saturated += u32::from(wanted > LARGEST_UNCLIPPED_SCALE);
            num_zeroed += u32::from((scale == 0.0) & (amax > 0.0));
            let quotient = inverse_scale / scale;
            *value = scale;
            *factor = if scale == 0.0 { 0.0 } else { quotient };
        }
        counts.num_blocks += blocks.len() as u64;
        counts.num_saturated += u64::from(num_saturated);
        counts.num_zeroed += u64::from(num_zeroed);
        Self { values, factors }
    }
}

/// The largest magnitude, or NaN if there is one.
#[inline(always)]
fn block_amax(x: &[f32; BLOCK]) -> f32 {
    // As integers: magnitudes order like their bits, and NaN lies above infinity, so it wins instead of being skipped.
    let mut amax = 0;
    for v in x {
        let bits = v.abs().to_bits();
        amax = if bits > amax { bits } else { amax };
    }
    f32::from_bits(amax)
}

/// Quantises `x` `[n]`, n a multiple of 16, into codes `packed` `[n / 2]` and e4m3 bits `scales` `[n / 16]`.
///
/// With `gs = 1 / input_scale`: a block's scale is `e4m3((max|x| / 6) * gs)`, a code is `e2m1(x * (gs / scale))`; where
/// the scale is 0 a code is 0 with the sign of its value. The value it stands for is `code * scale * input_scale`.
/// `input_scale` is finite and at least [`MIN_INPUT_SCALE`].
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
    for ((blocks, packed), scales) in blocks.chunks(GROUP).zip(packed.chunks_mut(GROUP)).zip(scales.chunks_mut(GROUP)) {
        let group = GroupScales::new(blocks, inverse_scale, &mut counts);
        for (bits, &value) in scales.iter_mut().zip(&group.values) {
            *bits = e4m3::encode(value);
        }
        for ((x, packed), &factor) in blocks.iter().zip(packed).zip(&group.factors) {
            let mut codes = [0; BLOCK];
            for (code, v) in codes.iter_mut().zip(x) {
                *code = e2m1::encode(v * factor);
            }
            *packed = pack_block(&codes);
        }
    }
    counts
}

/// `dequantise_unscaled` of `quantise_row` in one pass, bit for bit: `x` and `out` are `[n]`, n a multiple of 16.
///
/// # Panics
/// If the lengths do not fit together.
// Always inlined, so that a caller compiled for wider vectors gets them. Rows of 3072 in L1, release build, one core of a
// shared AMD EPYC (Zen 4), 2026-11-30: 0.62 ns a value with SSE2, 0.34 with AVX2.
#[inline(always)]
pub fn quantise_unscaled(x: &[f32], input_scale: f32, out: &mut [f32]) -> QuantCounts {
    let (blocks, rest) = x.as_chunks::<BLOCK>();
    assert!(rest.is_empty(), "a row of {} values is not made of blocks of {BLOCK}", x.len());
    assert_eq!(out.len(), x.len(), "a value out for each value in");
    let inverse_scale = 1.0 / input_scale;
    let mut counts = QuantCounts::default();
    let out = out.as_chunks_mut::<BLOCK>().0;
    for (blocks, out) in blocks.chunks(GROUP).zip(out.chunks_mut(GROUP)) {
        let group = GroupScales::new(blocks, inverse_scale, &mut counts);
        for (((x, out), &factor), &scale) in blocks.iter().zip(out).zip(&group.factors).zip(&group.values) {
            for (out, v) in out.iter_mut().zip(x) {
                *out = e2m1::round(v * factor) * scale;
            }
        }
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
    for (packed, codes) in packed.as_chunks_mut::<4>().0.iter_mut().zip(codes.as_chunks().0) {
        // Eight codes in eight bytes become eight nibbles: pairs into every other byte, then bytes together.
        let codes = u64::from_le_bytes(*codes);
        let pairs = (codes | (codes >> 4)) & 0x00ff_00ff_00ff_00ff;
        let quads = (pairs | (pairs >> 8)) & 0x0000_ffff_0000_ffff;
        let [a, b, _, _, c, d, _, _] = quads.to_le_bytes();
        *packed = [a, b, c, d];
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
