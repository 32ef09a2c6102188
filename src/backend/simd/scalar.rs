//! The kernels without named vector instructions: what the others must agree with, and what any machine can run.

use super::kernels::{Decoded, Kernels, LANES, Lane, Panel, RowBlocks, ScaledActivation};
use super::math::{self, activation_kernels};
use super::pack::Order;
use super::products::{each_pair, multiply_block, product_kernels};
use crate::numerics::activation::Activation;
use crate::numerics::nvfp4::{self, QuantCounts};

/// The kernels that every machine has.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scalar;

/// Sums that are enough to keep a core busy.
const PEAK_CHAINS: usize = 1;

type F = [f32; LANES];
type Mask = [bool; LANES];

#[inline]
fn splat(value: f32) -> F {
    [value; LANES]
}

#[inline]
fn load(from: &Lane) -> F {
    from.0
}

#[inline]
fn store(to: &mut Lane, value: F) {
    to.0 = value;
}

#[inline]
fn mul(a: F, b: F) -> F {
    std::array::from_fn(|i| a[i] * b[i])
}

#[inline]
fn fma(a: F, b: F, c: F) -> F {
    std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
}

/// The value / 256, as the vector kernels read an e4m3 as an f16 of another bias.
fn nvfp4_scale(bits: &[u8; LANES]) -> F {
    std::array::from_fn(|i| half::f16::from_bits(u16::from(bits[i]) << 7).to_f32())
}

/// Decoding needs nothing.
#[derive(Clone, Copy)]
struct Decoder;

fn decoder() -> Decoder {
    Decoder
}

/// The hardware's own fetching is enough.
fn fetch(_codes: &[u8; 128]) {}

/// The values * 256 of sixteen outputs at k and k + 1.
fn nvfp4_pair(_decoder: Decoder, codes: &[u8; 128], k: usize) -> [F; 2] {
    const VALUES: [f32; 16] = [
        0.0, 128.0, 256.0, 384.0, 512.0, 768.0, 1024.0, 1536.0, -0.0, -128.0, -256.0, -384.0, -512.0, -768.0, -1024.0,
        -1536.0,
    ];
    let elements: &[[u8; 4]; LANES] = codes.as_chunks().0[k / 8 * LANES..].first_chunk().expect("64 bytes");
    std::array::from_fn(|pair| {
        std::array::from_fn(|i| {
            let code = u32::from_le_bytes(elements[i]) >> (k % 8 * 2 + pair * 16) & 15;
            VALUES[code as usize]
        })
    })
}

/// The values of sixteen outputs at k and k + 1.
fn bf16_pair(_decoder: Decoder, pair: &[u8; 64]) -> [F; 2] {
    let values: &[[u8; 2]] = pair.as_chunks().0;
    std::array::from_fn(|k| std::array::from_fn(|i| half::bf16::from_le_bytes(values[2 * i + k]).to_f32()))
}

#[inline]
fn add(a: F, b: F) -> F {
    std::array::from_fn(|i| a[i] + b[i])
}

#[inline]
fn sub(a: F, b: F) -> F {
    std::array::from_fn(|i| a[i] - b[i])
}

#[inline]
fn div(a: F, b: F) -> F {
    std::array::from_fn(|i| a[i] / b[i])
}

#[inline]
fn abs(a: F) -> F {
    a.map(f32::abs)
}

#[inline]
fn with_sign(a: F, of: F) -> F {
    std::array::from_fn(|i| a[i].copysign(of[i]))
}

#[inline]
fn less(a: F, b: F) -> Mask {
    std::array::from_fn(|i| a[i] < b[i])
}

#[inline]
fn select(mask: Mask, yes: F, no: F) -> F {
    std::array::from_fn(|i| if mask[i] { yes[i] } else { no[i] })
}

#[inline]
#[expect(
    clippy::cast_possible_truncation,
    reason = "an integer between -126 and 127, or NaN, which stays NaN elsewhere"
)]
fn exp2_int(n: F) -> F {
    n.map(|n| f32::from_bits((n as i32 + 127).cast_unsigned() << 23))
}

product_kernels!(
    fused: 1 x 1;
    tile: 1 x 1 2, at most 2
);
activation_kernels!();

impl Kernels for Scalar {
    fn order(&self) -> Order {
        Order::NeighbouringK
    }

    fn fuses(&self, num_rows: usize) -> bool {
        fuses(num_rows)
    }

    fn fused(&self, panels: &[Panel<'_>], rows: RowBlocks<'_>, acc: &mut [Lane]) {
        fused(panels, rows, acc)
    }

    fn decode(&self, panel: Panel<'_>, values: &mut [Lane], scales: &mut [Lane]) {
        decode(panel, values, scales)
    }

    fn multiply(&self, panels: &[Decoded<'_>], rows: RowBlocks<'_>, acc: &mut [Lane]) {
        multiply(panels, rows, acc)
    }

    fn activate(&self, scaled: &ScaledActivation, gate: &mut [Lane], up: &[Lane]) {
        activate(scaled, gate, up)
    }

    fn quantise(&self, input_scale: f32, values: &[Lane], out: &mut [Lane]) -> QuantCounts {
        quantise(input_scale, values, out)
    }

    fn fma_peak(&self, rounds: u64) -> (u64, f32) {
        fma_peak(rounds)
    }
}
