//! Quantising a weight the way ModelOpt exports one, for checkpoints that this program writes itself.

use super::{BLOCK, BLOCK_BYTES, MAX, block_amax, pack_block};
use crate::numerics::{e2m1, e4m3};

/// The smallest e4m3 value: a block with any value in it keeps a scale above zero.
const SMALLEST_SCALE: f32 = 1.0 / 512.0;

/// A projection's numbers as an NVFP4 checkpoint stores them.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantisedWeights {
    /// `weight`: `[out, in / 2]` codes, the even element in the low nibble.
    pub packed: Vec<u8>,
    /// `weight_scale`: `[out, in / 16]` e4m3 bits.
    pub block_scales: Vec<u8>,
    /// `weight_scale_2`.
    pub global_scale: f32,
}

/// Quantises `w` `[out, in_features]`, row-major, with its own global scale, `amax / 2688`.
///
/// A weight of zeros alone gets the global scale 1, because 0 is not one that a loader accepts. A weight that is not finite
/// gives a scale that is not finite, which a loader refuses.
///
/// # Panics
/// If `in_features` is 0 or no multiple of 16, or does not divide the number of weights.
#[must_use]
pub fn quantise_weights(w: &[f32], in_features: usize) -> QuantisedWeights {
    let amax =
        w.as_chunks::<BLOCK>().0.iter().map(block_amax).fold(0.0, |a, b| if a > b || a.is_nan() { a } else { b });
    let global_scale = if amax == 0.0 { 1.0 } else { amax / MAX };
    quantise_weights_with(w, in_features, global_scale)
}

/// Quantises `w` `[out, in_features]` with a given global scale: ModelOpt gives gate and up the larger of theirs.
///
/// A block's scale is `e4m3(amax_block / (6 * global))` and at least 2^-9, but 1 for a block of zeros; a code is
/// `e2m1(w / (scale * global))`, and -0 loses its sign.
///
/// # Panics
/// If `in_features` is 0 or no multiple of 16, or does not divide the number of weights.
#[must_use]
pub fn quantise_weights_with(w: &[f32], in_features: usize, global_scale: f32) -> QuantisedWeights {
    assert!(
        in_features > 0 && in_features.is_multiple_of(BLOCK) && w.len().is_multiple_of(in_features),
        "{} weights in rows of {in_features} are not made of blocks of {BLOCK}",
        w.len()
    );
    let blocks = w.as_chunks::<BLOCK>().0;
    let mut packed = vec![0; w.len() / 2];
    let mut block_scales = vec![0; blocks.len()];
    for ((w, packed), scale) in blocks.iter().zip(packed.as_chunks_mut::<BLOCK_BYTES>().0).zip(&mut block_scales) {
        let value = block_scale(block_amax(w), global_scale);
        *scale = e4m3::encode(value);
        let divisor = value * global_scale;
        // Adding +0 turns -0 into +0 and changes nothing else.
        *packed = pack_block(&w.map(|v| e2m1::encode((v + 0.0) / divisor)));
    }
    QuantisedWeights { packed, block_scales, global_scale }
}

#[inline(always)]
fn block_scale(amax: f32, global_scale: f32) -> f32 {
    let wanted = amax / (e2m1::MAX * global_scale);
    if wanted == 0.0 {
        return 1.0;
    }
    e4m3::round(if wanted < SMALLEST_SCALE { SMALLEST_SCALE } else { wanted })
}
