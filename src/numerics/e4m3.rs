//! e4m3, the eight-bit float of NVFP4's block scales: no infinity, one NaN a sign, largest value 448.
//!
//! Knows nothing of blocks, which are [`nvfp4`](super::nvfp4)'s.

/// The largest finite value.
pub const MAX: f32 = 448.0;

/// The smallest normal value, 2^-6; below it values are multiples of 2^-9.
pub const MIN_POSITIVE_NORMAL: f32 = 0.015_625;

/// The code that NaN encodes to.
pub const NAN: u8 = 0x7f;

const EXPONENT_BITS: u32 = 0x7f80_0000;
const SIGN_BIT: u32 = 0x8000_0000;
/// Exponents of f32 and e4m3 differ by 127 - 7.
const REBIAS: u32 = 120;

/// Whether the code is one of the two NaN, 0x7F and 0xFF.
#[must_use]
#[inline]
pub const fn is_nan(bits: u8) -> bool {
    bits & 0x7f == 0x7f
}

/// The value of a code, exactly.
#[must_use]
#[inline]
pub fn decode(bits: u8) -> f32 {
    VALUES[usize::from(bits)]
}

/// The code of the nearest value, ties to the even code, saturating at 448. Zero keeps its sign; NaN becomes 0x7F.
#[must_use]
#[inline(always)]
pub fn encode(x: f32) -> u8 {
    if x.is_nan() {
        return NAN;
    }
    let aligned = Aligned::new(x);
    let binade = (aligned.binade.to_bits() >> 23) - (REBIAS + 1);
    let magnitude = (aligned.sum.to_bits() & 0x1f) + 8 * binade;
    (magnitude | ((x.to_bits() >> 24) & 0x80)).to_le_bytes()[0]
}

/// `decode(encode(x))`, without a table or a branch. NaN stays NaN.
#[inline(always)]
pub(crate) fn round(x: f32) -> f32 {
    let aligned = Aligned::new(x);
    let magnitude = aligned.sum - aligned.magic;
    // The magnitude's sign bit is clear, but for a NaN's: an `or` where `copysign` would also mask.
    f32::from_bits(magnitude.to_bits() | (x.to_bits() & SIGN_BIT))
}

/// A magnitude added to a number whose last mantissa bit weighs one step of e4m3, so that the addition rounds.
///
/// A step is an eighth of the power of two at or below the value, but never under 2^-9. The low bits of the sum then
/// count steps.
struct Aligned {
    /// The power of two at or below the magnitude, at least 2^-6.
    binade: f32,
    magic: f32,
    sum: f32,
}

impl Aligned {
    #[inline(always)]
    fn new(x: f32) -> Self {
        let magnitude = x.abs();
        let magnitude = if magnitude > MAX { MAX } else { magnitude };
        let normal = if magnitude > MIN_POSITIVE_NORMAL { magnitude } else { MIN_POSITIVE_NORMAL };
        let binade = f32::from_bits(normal.to_bits() & EXPONENT_BITS);
        // 1.5 * 2^20: the last bit of a float in [2^20, 2^21) weighs an eighth.
        let magic = binade * 1_572_864.0;
        Self { binade, magic, sum: magnitude + magic }
    }
}

static VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = value_of(code);
        code += 1;
    }
    values
};

#[expect(clippy::cast_possible_truncation, reason = "the code is below 256")]
const fn value_of(code: usize) -> f32 {
    let bits = code as u32;
    let sign = (bits & 0x80) << 24;
    let exponent = (bits >> 3) & 0x0f;
    let mantissa = bits & 7;
    if is_nan(code as u8) {
        return f32::from_bits(sign | 0x7fc0_0000);
    }
    if exponent == 0 {
        // Subnormal: mantissa * 2^-9, exact in f32.
        let magnitude = mantissa as f32 / 512.0;
        return f32::from_bits(sign | magnitude.to_bits());
    }
    f32::from_bits(sign | ((exponent + REBIAS) << 23) | (mantissa << 20))
}

#[cfg(test)]
mod tests {
    use float8::F8E4M3;
    use proptest::prelude::*;

    use super::*;
    use crate::numerics::fixtures;

    #[test]
    fn values_match_the_expected_table() {
        let table = fixtures::formats_optional_u32(&["e4m3_decode"]);
        assert_eq!(table.len(), 256);
        for (code, bits) in (0_u8..=255).zip(table) {
            match bits {
                Some(bits) => assert_eq!(decode(code).to_bits(), bits, "code {code}"),
                None => assert!(is_nan(code) && decode(code).is_nan(), "code {code} is NaN"),
            }
            assert_eq!(is_nan(code), bits.is_none(), "code {code}");
        }
    }

    #[test]
    fn encode_matches_the_expected_table() {
        let inputs = fixtures::formats_u32(&["e4m3_encode_saturating", "in"]);
        let codes = fixtures::formats_u32(&["e4m3_encode_saturating", "code"]);
        assert!(inputs.len() > 100 && inputs.len() == codes.len());
        for (i, (bits, code)) in inputs.into_iter().zip(codes).enumerate() {
            let x = f32::from_bits(bits);
            assert_eq!(u32::from(encode(x)), code, "entry {i}: {x:e}");
        }
    }

    #[test]
    fn signs_ends_and_nan() {
        assert_eq!((encode(0.0), encode(-0.0)), (0, 0x80));
        assert_eq!((encode(f32::INFINITY), encode(f32::NEG_INFINITY), encode(464.1)), (0x7e, 0xfe, 0x7e));
        assert_eq!((encode(f32::NAN), encode(f32::NAN.copysign(-1.0))), (0x7f, 0x7f));
        // Half the smallest value is a tie with zero, whose code is even.
        assert_eq!((encode(0.000_976_562_5), encode(0.000_976_562_6)), (0, 1));
    }

    #[test]
    fn decode_agrees_with_float8_for_every_code() {
        for code in 0..=255_u8 {
            let theirs = F8E4M3::from_bits(code).to_f32();
            assert!(decode(code).to_bits() == theirs.to_bits() || (is_nan(code) && theirs.is_nan()), "code {code}");
        }
    }

    fn check_against_float8(bits: u32) {
        let x = f32::from_bits(bits);
        // float8 keeps the sign of a NaN; here NaN is 0x7F.
        let theirs = if x.is_nan() { NAN } else { F8E4M3::from_f32(x).to_bits() };
        assert_eq!(encode(x), theirs, "{x:e} ({bits:#010x})");
        if !x.is_nan() {
            assert_eq!(round(x).to_bits(), decode(theirs).to_bits(), "round of {x:e} ({bits:#010x})");
        }
    }

    #[test]
    fn encode_agrees_with_float8_for_every_bf16_and_its_neighbours() {
        for high in 0..=u32::from(u16::MAX) {
            let bits = high << 16;
            for bits in [bits, bits.wrapping_add(1), bits.wrapping_sub(1)] {
                check_against_float8(bits);
            }
        }
    }

    #[test]
    #[ignore = "walks all 2^32 floats, half a minute; run by name after a change to encode"]
    fn encode_agrees_with_float8_for_every_f32() {
        (0..=u32::MAX).for_each(check_against_float8);
    }

    #[test]
    fn round_keeps_nan() {
        assert!(round(f32::NAN).is_nan());
    }

    proptest! {
        #[test]
        fn encode_agrees_with_float8(bits: u32) {
            check_against_float8(bits);
        }

        #[test]
        fn a_value_encodes_to_itself(code: u8) {
            let expected = if is_nan(code) { NAN } else { code };
            prop_assert_eq!(encode(decode(code)), expected);
        }

        #[test]
        fn encode_is_monotone(a in -500.0_f32..500.0, b in -500.0_f32..500.0) {
            let (low, high) = if a <= b { (a, b) } else { (b, a) };
            prop_assert!(decode(encode(low)) <= decode(encode(high)));
        }
    }
}
