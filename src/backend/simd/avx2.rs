//! The kernels for AVX2 with FMA and F16C. The only place that calls these instructions.
//!
//! Sixteen lanes are two registers. NVFP4 codes become the two bytes of a bf16 value by table look-up; see
//! [`nvfp4_pair`] for the order that makes this cheap.

use std::arch::x86_64::*;

use super::kernels::{Decoded, Kernels, LANES, Lane, Panel, RowBlocks, ScaledActivation};
use super::math::{self, activation_kernels};
use super::pack::Order;
use super::products::{each_pair, multiply_block, product_kernels};
use crate::numerics::activation::Activation;
use crate::numerics::nvfp4::{self, QuantCounts};

/// Proof that the machine has AVX2, FMA and F16C: only [`Avx2::detect`] makes one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// The proof, where the machine has the instructions.
    pub(super) fn detect() -> Option<Self> {
        let found =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

/// 12 registers of sums: an fma takes four cycles, and two start in each.
const PEAK_CHAINS: usize = 6;

type F = [__m256; 2];
type Mask = [__m256; 2];

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn splat(value: f32) -> F {
    [_mm256_set1_ps(value); 2]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load(from: &Lane) -> F {
    // SAFETY: the first eight of the sixteen values behind the reference.
    let low = unsafe { _mm256_loadu_ps(from.0.as_ptr()) };
    // SAFETY: the last eight of the sixteen values behind the reference.
    let high = unsafe { _mm256_loadu_ps(from.0[8..].as_ptr()) };
    [low, high]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store(to: &mut Lane, value: F) {
    // SAFETY: the first eight of the sixteen values behind the reference.
    unsafe { _mm256_storeu_ps(to.0.as_mut_ptr(), value[0]) };
    // SAFETY: the last eight of the sixteen values behind the reference.
    unsafe { _mm256_storeu_ps(to.0[8..].as_mut_ptr(), value[1]) };
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn mul(a: F, b: F) -> F {
    [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fma(a: F, b: F, c: F) -> F {
    [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
}

/// e4m3 bits shifted into an f16 stand for the value / 256: exponents are biased by 7 there, by 15 here.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn nvfp4_scale(bits: &[u8; LANES]) -> F {
    // SAFETY: sixteen bytes behind the reference.
    let bytes = unsafe { _mm_loadu_si128(bits.as_ptr().cast()) };
    let halves = _mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(bytes));
    [_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves))]
}

/// What decoding needs in registers all the time.
#[derive(Clone, Copy)]
struct Decoder {
    low_bytes: __m256i,
    high_bytes: __m256i,
    nibbles: __m256i,
    upper_halves: __m256i,
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decoder() -> Decoder {
    // bf16 of 0, .5, 1, 1.5, 2, 3, 4, 6, each * 256, and their negatives.
    let low_bytes = _mm_setr_epi8(
        0x00, 0x00, -0x80, -0x40, 0x00, 0x40, -0x80, -0x40, 0x00, 0x00, -0x80, -0x40, 0x00, 0x40, -0x80, -0x40,
    );
    let high_bytes = _mm_setr_epi8(
        0x00, 0x43, 0x43, 0x43, 0x44, 0x44, 0x44, 0x44, -0x80, -0x3D, -0x3D, -0x3D, -0x3C, -0x3C, -0x3C, -0x3C,
    );
    Decoder {
        low_bytes: _mm256_broadcastsi128_si256(low_bytes),
        high_bytes: _mm256_broadcastsi128_si256(high_bytes),
        nibbles: _mm256_set1_epi8(0x0F),
        // Hidden from the compiler, which would blend with zero instead: two ports rather than four.
        upper_halves: _mm256_set1_epi32(std::hint::black_box(-0x1_0000)),
    }
}

/// How many bytes ahead codes are fetched: the hardware stops at the end of each page.
const FETCH_AHEAD: usize = 2048;

/// Starts fetching the codes that lie [`FETCH_AHEAD`] after these.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fetch(codes: &[u8; 128]) {
    let ahead = codes.as_ptr().wrapping_add(FETCH_AHEAD).cast::<i8>();
    _mm_prefetch::<_MM_HINT_T0>(ahead);
    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64));
}

/// The values * 256 of sixteen outputs at k and k + 1.
///
/// Thirty-two bytes hold four k: k and k + 1 in the low nibbles, k + 2 and k + 3 in the high ones. A look-up gives both
/// bytes of a bf16; interleaved, a 32-bit element holds two bf16, which a shift and a mask make f32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn nvfp4_pair(decoder: Decoder, codes: &[u8; 128], k: usize) -> [F; 2] {
    let quarter: &[u8; 32] = &codes.as_chunks().0[k / 4];
    // SAFETY: thirty-two bytes behind the reference.
    let bytes = unsafe { _mm256_loadu_si256(quarter.as_ptr().cast()) };
    let nibbles = if k.is_multiple_of(4) { bytes } else { _mm256_srli_epi16::<4>(bytes) };
    let nibbles = _mm256_and_si256(nibbles, decoder.nibbles);
    let low = _mm256_shuffle_epi8(decoder.low_bytes, nibbles);
    let high = _mm256_shuffle_epi8(decoder.high_bytes, nibbles);
    [split_bf16(decoder, _mm256_unpacklo_epi8(low, high)), split_bf16(decoder, _mm256_unpackhi_epi8(low, high))]
}

/// The values of sixteen outputs at k and k + 1.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn bf16_pair(decoder: Decoder, pair: &[u8; 64]) -> [F; 2] {
    // SAFETY: the first thirty-two of the bytes behind the reference.
    let first = unsafe { _mm256_loadu_si256(pair.as_ptr().cast()) };
    // SAFETY: the last thirty-two of the bytes behind the reference.
    let second = unsafe { _mm256_loadu_si256(pair[32..].as_ptr().cast()) };
    [split_bf16(decoder, first), split_bf16(decoder, second)]
}

/// Eight pairs of bf16 to two registers of f32: the low halves are outputs 0 to 7, the high halves 8 to 15.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn split_bf16(decoder: Decoder, pairs: __m256i) -> F {
    let low = _mm256_slli_epi32::<16>(pairs);
    let high = _mm256_and_si256(pairs, decoder.upper_halves);
    [_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add(a: F, b: F) -> F {
    [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sub(a: F, b: F) -> F {
    [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn div(a: F, b: F) -> F {
    [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn abs(a: F) -> F {
    let sign = _mm256_set1_ps(-0.0);
    [_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn with_sign(a: F, of: F) -> F {
    let sign = _mm256_set1_ps(-0.0);
    [_mm256_or_ps(a[0], _mm256_and_ps(sign, of[0])), _mm256_or_ps(a[1], _mm256_and_ps(sign, of[1]))]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn less(a: F, b: F) -> Mask {
    [_mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0]), _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn select(mask: Mask, yes: F, no: F) -> F {
    [_mm256_blendv_ps(no[0], yes[0], mask[0]), _mm256_blendv_ps(no[1], yes[1], mask[1])]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn exp2_int(n: F) -> F {
    let bias = _mm256_set1_epi32(127);
    n.map(|n| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), bias))))
}

product_kernels!(
    #[target_feature(enable = "avx2,fma,f16c")]
    fused: 1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1;
    tile: 1 x 1 2 3 4 5 6, at most 6
);
activation_kernels!(#[target_feature(enable = "avx2,fma,f16c")]);

impl Kernels for Avx2 {
    fn order(&self) -> Order {
        Order::SplitHalves
    }

    fn fuses(&self, num_rows: usize) -> bool {
        fuses(num_rows)
    }

    fn fused(&self, panels: &[Panel<'_>], rows: RowBlocks<'_>, acc: &mut [Lane]) {
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe { fused(panels, rows, acc) }
    }

    fn decode(&self, panel: Panel<'_>, values: &mut [Lane], scales: &mut [Lane]) {
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe { decode(panel, values, scales) }
    }

    fn multiply(&self, panels: &[Decoded<'_>], rows: RowBlocks<'_>, acc: &mut [Lane]) {
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe { multiply(panels, rows, acc) }
    }

    fn activate(&self, scaled: &ScaledActivation, gate: &mut [Lane], up: &[Lane]) {
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe { activate(scaled, gate, up) }
    }

    fn quantise(&self, input_scale: f32, values: &[Lane], out: &mut [Lane]) -> QuantCounts {
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe { quantise(input_scale, values, out) }
    }

    fn fma_peak(&self, rounds: u64) -> (u64, f32) {
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe { fma_peak(rounds) }
    }
}
