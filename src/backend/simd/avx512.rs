//! The kernels for AVX-512 F, BW and VL. The only place that calls these instructions.
//!
//! Sixteen lanes are one register, and sixteen NVFP4 values are one table.

use std::arch::x86_64::*;

use super::kernels::{Decoded, Kernels, LANES, Lane, Panel, RowBlocks, ScaledActivation};
use super::math::{self, activation_kernels};
use super::pack::Order;
use super::products::{each_pair, multiply_block, product_kernels};
use crate::numerics::activation::Activation;
use crate::numerics::nvfp4::{self, QuantCounts};

/// Proof that the machine has AVX-512 F, BW and VL: only [`Avx512::detect`] makes one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// The proof, where the machine has the instructions.
    pub(super) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        found.then_some(Self(()))
    }
}

/// Registers of sums: an fma takes four cycles, and up to two start in each.
const PEAK_CHAINS: usize = 12;

type F = __m512;
type Mask = __mmask16;

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn splat(value: f32) -> F {
    _mm512_set1_ps(value)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn load(from: &Lane) -> F {
    // SAFETY: sixteen values behind the reference.
    unsafe { _mm512_loadu_ps(from.0.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn store(to: &mut Lane, value: F) {
    // SAFETY: sixteen values behind the reference.
    unsafe { _mm512_storeu_ps(to.0.as_mut_ptr(), value) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn mul(a: F, b: F) -> F {
    _mm512_mul_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn fma(a: F, b: F, c: F) -> F {
    _mm512_fmadd_ps(a, b, c)
}

/// e4m3 bits shifted into an f16 stand for the value / 256: exponents are biased by 7 there, by 15 here.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn nvfp4_scale(bits: &[u8; LANES]) -> F {
    // SAFETY: sixteen bytes behind the reference.
    let bytes = unsafe { _mm_loadu_si128(bits.as_ptr().cast()) };
    _mm512_cvtph_ps(_mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(bytes)))
}

/// What decoding needs in registers all the time.
#[derive(Clone, Copy)]
struct Decoder {
    values: __m512i,
    upper_halves: __m512i,
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn decoder() -> Decoder {
    // bf16 of 0, .5, 1, 1.5, 2, 3, 4, 6, each * 256, and their negatives.
    let values = _mm256_setr_epi16(
        0x0000, 0x4300, 0x4380, 0x43C0, 0x4400, 0x4440, 0x4480, 0x44C0, -0x8000, -0x3D00, -0x3C80, -0x3C40, -0x3C00,
        -0x3BC0, -0x3B80, -0x3B40,
    );
    Decoder {
        // Twice, so that the fifth bit of an index, which is a neighbour's, does not matter.
        values: _mm512_broadcast_i64x4(values),
        upper_halves: _mm512_set1_epi32(std::hint::black_box(-0x1_0000)),
    }
}

/// How many bytes ahead codes are fetched: the hardware stops at the end of each page.
const FETCH_AHEAD: usize = 2048;

/// Starts fetching the codes that lie [`FETCH_AHEAD`] after these.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn fetch(codes: &[u8; 128]) {
    let ahead = codes.as_ptr().wrapping_add(FETCH_AHEAD).cast::<i8>();
    _mm_prefetch::<_MM_HINT_T0>(ahead);
    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64));
}

/// The values * 256 of sixteen outputs at k and k + 1.
///
/// A 32-bit element holds eight k of an output, the even ones in its low half. A look-up by 16-bit elements gives two
/// bf16, which a shift and a mask make f32: fewer shuffles than a look-up of f32 for each k.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn nvfp4_pair(decoder: Decoder, codes: &[u8; 128], k: usize) -> [F; 2] {
    let half: &[u8; 64] = &codes.as_chunks().0[k / 8];
    // SAFETY: sixty-four bytes behind the reference.
    let elements = unsafe { _mm512_loadu_si512(half.as_ptr().cast()) };
    #[expect(clippy::cast_possible_truncation, reason = "at most 12")]
    let shift = _mm512_set1_epi16((k % 8 * 2) as i16);
    split_bf16(decoder, _mm512_permutexvar_epi16(_mm512_srlv_epi16(elements, shift), decoder.values))
}

/// The values of sixteen outputs at k and k + 1: an output's two values are neighbours.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn bf16_pair(decoder: Decoder, pair: &[u8; 64]) -> [F; 2] {
    // SAFETY: sixty-four bytes behind the reference.
    let pairs = unsafe { _mm512_loadu_si512(pair.as_ptr().cast()) };
    split_bf16(decoder, pairs)
}

/// Sixteen pairs of bf16, the first of each in the low half, to two registers of f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn split_bf16(decoder: Decoder, pairs: __m512i) -> [F; 2] {
    let first = _mm512_slli_epi32::<16>(pairs);
    let second = _mm512_and_si512(pairs, decoder.upper_halves);
    [_mm512_castsi512_ps(first), _mm512_castsi512_ps(second)]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn add(a: F, b: F) -> F {
    _mm512_add_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn sub(a: F, b: F) -> F {
    _mm512_sub_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn div(a: F, b: F) -> F {
    _mm512_div_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn abs(a: F) -> F {
    _mm512_abs_ps(a)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn with_sign(a: F, of: F) -> F {
    let sign = _mm512_set1_epi32(i32::MIN);
    let sign = _mm512_and_si512(_mm512_castps_si512(of), sign);
    _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a), sign))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn less(a: F, b: F) -> Mask {
    _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn select(mask: Mask, yes: F, no: F) -> F {
    _mm512_mask_blend_ps(mask, no, yes)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn exp2_int(n: F) -> F {
    let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
}

product_kernels!(
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fused: 1 x 4, 2 x 4, 3 x 4, 4 x 1, 5 x 1, 6 x 1, 7 x 1, 8 x 1,
        9 x 1, 10 x 1, 11 x 1, 12 x 1, 13 x 1, 14 x 1, 15 x 1, 16 x 1;
    tile: 1 x 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16, at most 16
);
activation_kernels!(#[target_feature(enable = "avx512f,avx512bw,avx512vl")]);

impl Kernels for Avx512 {
    fn order(&self) -> Order {
        Order::NeighbouringK
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
