//! e2m1, the four-bit float: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives.
//!
//! Knows nothing of scales and packing, which are [`nvfp4`](super::nvfp4)'s.

/// The value of every code. Bit 3 is the sign.
pub const VALUES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The largest value.
pub const MAX: f32 = 6.0;

const EXPONENT_BITS: u32 = 0x7f80_0000;
const SIGN_BIT: u32 = 0x8000_0000;

/// The value of a code; only its low 4 bits count.
#[must_use]
#[inline]
pub fn decode(code: u8) -> f32 {
    VALUES[usize::from(code & 0x0f)]
}

/// The code of the nearest value, ties to the even code, saturating at 6. Zero keeps its sign.
///
/// The format has no NaN: one becomes the largest value with the NaN's own sign. A caller that must not lose a NaN
/// carries it beside the code, as NVFP4 does in the block scale.
#[must_use]
#[inline(always)]
pub fn encode(x: f32) -> u8 {
    let aligned = Aligned::new(x);
    let binade = (aligned.binade.to_bits() >> 23) - 127;
    let magnitude = (aligned.sum.to_bits() & 7) + 2 * binade;
    let code = (magnitude | ((x.to_bits() >> 28) & 8)) & 0x0f;
    code.to_le_bytes()[0]
}

/// `decode(encode(x))`, without a table, so that a loop over it vectorises.
#[inline(always)]
pub(crate) fn round(x: f32) -> f32 {
    let aligned = Aligned::new(x);
    let magnitude = aligned.sum - aligned.magic;
    // The magnitude's sign bit is clear: an `or` where `copysign` would also mask.
    f32::from_bits(magnitude.to_bits() | (x.to_bits() & SIGN_BIT))
}

/// A magnitude added to a number whose last mantissa bit weighs one step of e2m1, so that the addition rounds.
///
/// A step is 0.5 below 2, 1 below 4 and 2 above: half the power of two below the value, but never under 0.5. The
/// low bits of the sum then count steps, and IEEE's ties to even are ties to the even code, because each binade starts
/// at an even one.
struct Aligned {
    /// The power of two at or below the magnitude, at least 1.
    binade: f32,
    magic: f32,
    sum: f32,
}

impl Aligned {
    #[inline(always)]
    fn new(x: f32) -> Self {
        let magnitude = x.abs();
        // Comparisons rather than `min` and `max`: they compile to one instruction, and send NaN to 6.
        let magnitude = if magnitude < MAX { magnitude } else { MAX };
        let at_least_one = if magnitude > 1.0 { magnitude } else { 1.0 };
        let binade = f32::from_bits(at_least_one.to_bits() & EXPONENT_BITS);
        // 1.5 * 2^22: the last bit of a float in [2^22, 2^23) weighs a half.
        let magic = binade * 6_291_456.0;
        Self { binade, magic, sum: magnitude + magic }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::numerics::fixtures;

    #[test]
    fn values_match_the_expected_table() {
        let bits = fixtures::formats_u32(&["e2m1_decode"]);
        assert_eq!(bits.len(), 16);
        for (code, bits) in (0_u8..).zip(bits) {
            assert_eq!(decode(code).to_bits(), bits, "code {code}");
            assert_eq!(decode(code | 0xf0).to_bits(), bits, "code {code} with its high bits set");
        }
    }

    #[test]
    fn encode_matches_the_expected_table() {
        let inputs = fixtures::formats_u32(&["e2m1_encode", "in"]);
        let codes = fixtures::formats_u32(&["e2m1_encode", "code"]);
        assert!(inputs.len() > 100 && inputs.len() == codes.len());
        for (i, (bits, code)) in inputs.into_iter().zip(codes).enumerate() {
            let x = f32::from_bits(bits);
            assert_eq!(u32::from(encode(x)), code, "entry {i}: {x:e}");
        }
    }

    #[test]
    fn ties_go_to_the_even_code() {
        for (below, tie) in (0_u8..).zip([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) {
            let even = below + below % 2;
            assert_eq!((encode(tie), encode(-tie)), (even, even | 8), "{tie}");
            assert_eq!((encode(f32::next_down(tie)), encode(f32::next_up(tie))), (below, below + 1), "beside {tie}");
        }
    }

    #[test]
    fn signs_ends_and_nan() {
        assert_eq!((encode(0.0), encode(-0.0)), (0, 8));
        assert_eq!((encode(-f32::from_bits(1)), encode(-0.2)), (8, 8));
        assert_eq!((encode(f32::INFINITY), encode(f32::NEG_INFINITY), encode(f32::MAX)), (7, 15, 7));
        assert_eq!((encode(f32::NAN.copysign(1.0)), encode(f32::NAN.copysign(-1.0))), (7, 15));
    }

    /// The definition, by brute force: the nearest value; of two at one distance the even code.
    fn nearest(x: f32) -> u8 {
        // Far beyond 6 all distances are equal in f64.
        let magnitude = f64::from(x.abs()).min(8.0);
        let distance = |code: u8| (f64::from(VALUES[usize::from(code)]) - magnitude).abs();
        let best = (0..8).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)))).unwrap();
        best | if x.is_sign_negative() { 8 } else { 0 }
    }

    #[test]
    fn encode_is_nearest_for_every_bf16_and_its_neighbours() {
        for high in 0..=u32::from(u16::MAX) {
            for bits in [high << 16, (high << 16).wrapping_add(1), (high << 16).wrapping_sub(1)] {
                let x = f32::from_bits(bits);
                if !x.is_nan() {
                    assert_eq!(encode(x), nearest(x), "{x:e} ({bits:#010x})");
                }
                assert_eq!(round(x).to_bits(), decode(encode(x)).to_bits(), "round of {x:e} ({bits:#010x})");
            }
        }
    }

    proptest! {
        #[test]
        fn encode_is_nearest(x in -8.0_f32..8.0) {
            prop_assert_eq!(encode(x), nearest(x));
        }

        #[test]
        fn a_value_encodes_to_itself(code in 0_u8..16) {
            prop_assert_eq!(encode(decode(code)), code);
        }
    }
}
