//! The packed weight image that all grouped GEMM kernels read, as a host makes it: what `kernels/pack.cu`, which makes it at
//! load, is held to, and what benches of made-up weights use.
//!
//! A *unit* is 32 weight rows, a *step* 64 of K; an image is `[unit][step]`, zero beyond the matrix. A step is laid out by
//! lanes of a warp, so that each reads its tensor core fragments in 16-byte pieces: lane `4 g + t` of tile `j` holds the
//! rows `(j, half, g)` of both halves at K `16 t .. 16 t + 16`, in the order in which `kernels/weights.cuh` decodes them.
//!
//! Knows nothing of devices: bytes in, bytes out.

use rayon::prelude::*;

use crate::checkpoint::tensors::{Projection, ProjectionData};
use crate::exit::{Classify, Exit};
use crate::numerics::e4m3;
use crate::numerics::nvfp4::BLOCK;

/// Weight rows of a unit.
pub const UNIT_ROWS: usize = 32;

/// K of a step.
pub const STEP_K: usize = 64;

/// Bytes of a step of NVFP4 weights: two tiles of 32 lanes x 16 bytes of codes, then 32 lanes x 4 scales.
pub const NVFP4_STEP_BYTES: usize = 2 * TILE_BYTES + 128;

/// Bytes of a step of bf16 weights: two tiles of four fragments of 32 lanes x 16 bytes.
pub const BF16_STEP_BYTES: usize = 8 * TILE_BYTES;

const TILE_BYTES: usize = 32 * 16;

/// Why weights do not pack.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// Gate and up, which one unit interleaves, are of two formats.
    #[error(
        "gate is stored as {gate} and up as {up}; the GPU kernels want one format for both: run this layer on a CPU backend"
    )]
    Mixed {
        /// gate's.
        gate: &'static str,
        /// up's.
        up: &'static str,
    },
    /// Weights in f32, which would have to be rounded.
    #[error(
        "the weights are stored as f32, and GPU kernels multiply bf16 or NVFP4: store them as bf16, or run this layer on a CPU backend"
    )]
    F32,
    /// NVFP4 where no checkpoint has it.
    #[error("a dense projection is stored as NVFP4; store it as bf16 or f32")]
    Dense,
    /// A scale that is no number.
    #[error("the scale of row {row}, block {block} is NaN: calibrate and export again")]
    NanScale {
        /// The weight row.
        row: usize,
        /// The block along it.
        block: usize,
    },
}

impl Classify for PackError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

/// How an image's weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Codes and block scales.
    Nvfp4,
    /// Values.
    Bf16,
}

impl Format {
    /// Bytes of a step of a unit.
    #[must_use]
    pub const fn step_bytes(self) -> usize {
        match self {
            Self::Nvfp4 => NVFP4_STEP_BYTES,
            Self::Bf16 => BF16_STEP_BYTES,
        }
    }
}

/// A packed matrix, or gate and up together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// How its weights are stored.
    pub format: Format,
    /// Units of 32 rows.
    pub num_units: usize,
    /// Steps of 64 of K.
    pub num_steps: usize,
    /// `[num_units][num_steps][format.step_bytes()]`
    pub bytes: Vec<u8>,
}

/// Packs FC1: a unit is 16 rows of gate and the same 16 of up, so that a thread meets both values of a column.
///
/// # Errors
/// If the two are of different formats, in f32, or hold a NaN scale.
///
/// # Panics
/// If their shapes differ, or 16 does not divide their rows: the backend's checks refuse both before.
pub fn pack_fc1(gate: &Projection, up: &Projection) -> Result<Image, PackError> {
    assert_eq!(
        (gate.out_features, gate.in_features),
        (up.out_features, up.in_features),
        "gate and up are of one shape"
    );
    assert!(gate.out_features.is_multiple_of(UNIT_ROWS / 2), "16 divides the rows of gate and up");
    let format = format_fc1(gate, up)?;
    let num_units = gate.out_features / (UNIT_ROWS / 2);
    pack(format, num_units, gate.in_features, |unit, tile, half, g| {
        (if half == 0 { gate } else { up }, 16 * unit + 2 * g + tile)
    })
}

/// Packs FC2: a thread meets four adjacent columns of a unit's 32.
///
/// # Errors
/// If the weights are in f32, or hold a NaN scale.
pub fn pack_fc2(down: &Projection) -> Result<Image, PackError> {
    let num_units = down.out_features.div_ceil(UNIT_ROWS);
    pack(format(down)?, num_units, down.in_features, |unit, tile, half, g| {
        (down, UNIT_ROWS * unit + 4 * g + 2 * tile + half)
    })
}

/// How FC1's image stores weights.
///
/// # Errors
/// If gate and up are of different formats, or in f32.
pub fn format_fc1(gate: &Projection, up: &Projection) -> Result<Format, PackError> {
    let (gate_format, up_format) = (format(gate)?, format(up)?);
    if gate_format != up_format {
        return Err(PackError::Mixed { gate: name(gate), up: name(up) });
    }
    Ok(gate_format)
}

/// How an image stores weights.
///
/// # Errors
/// If they are in f32.
pub fn format(projection: &Projection) -> Result<Format, PackError> {
    match projection.data {
        ProjectionData::Nvfp4 { .. } => Ok(Format::Nvfp4),
        ProjectionData::Bf16(_) => Ok(Format::Bf16),
        ProjectionData::F32(_) => Err(PackError::F32),
    }
}

fn name(projection: &Projection) -> &'static str {
    match projection.data {
        ProjectionData::Nvfp4 { .. } => "NVFP4",
        ProjectionData::Bf16(_) => "bf16",
        ProjectionData::F32(_) => "f32",
    }
}

/// `row_of(unit, tile, half, g)` is the matrix and its row that a place in a unit holds; beyond the matrix it is zero.
fn pack<'a>(
    format: Format,
    num_units: usize,
    in_features: usize,
    row_of: impl Fn(usize, usize, usize, usize) -> (&'a Projection, usize) + Sync,
) -> Result<Image, PackError> {
    let num_steps = in_features.div_ceil(STEP_K);
    let unit_bytes = num_steps * format.step_bytes();
    let mut bytes = vec![0; num_units * unit_bytes];
    bytes.par_chunks_mut(unit_bytes).enumerate().try_for_each(|(unit, out)| {
        for (tile, g) in (0..2).flat_map(|tile| (0..8).map(move |g| (tile, g))) {
            let rows = [row_of(unit, tile, 0, g), row_of(unit, tile, 1, g)];
            if rows[0].1 >= rows[0].0.out_features {
                continue; // 16 divides the rows: both halves lie beyond the end
            }
            match format {
                Format::Nvfp4 => pack_nvfp4_rows(rows, tile, g, out)?,
                Format::Bf16 => pack_bf16_rows(rows, tile, g, out),
            }
        }
        Ok(())
    })?;
    Ok(Image { format, num_units, num_steps, bytes })
}

/// Two rows, those of both halves, into their lanes of every step of a unit.
fn pack_nvfp4_rows(rows: [(&Projection, usize); 2], tile: usize, g: usize, unit: &mut [u8]) -> Result<(), PackError> {
    let num_blocks = rows[0].0.in_features / BLOCK;
    let halves = rows.map(|(projection, row)| match &projection.data {
        ProjectionData::Nvfp4 { packed, block_scales, .. } => {
            let codes = &packed.as_chunks::<8>().0[row * num_blocks..][..num_blocks];
            (codes, &block_scales[row * num_blocks..][..num_blocks])
        }
        ProjectionData::Bf16(_) | ProjectionData::F32(_) => unreachable!("the formats of one image are alike"),
    });
    for block in 0..num_blocks {
        let (step, t) = (block / 4, block % 4);
        let lane = 4 * g + t;
        let out = &mut unit[step * NVFP4_STEP_BYTES..][..NVFP4_STEP_BYTES];
        let mut codes = [0; 2];
        for (half, (row_codes, row_scales)) in halves.iter().enumerate() {
            let scale = row_scales[block];
            if e4m3::is_nan(scale) {
                return Err(PackError::NanScale { row: rows[half].1, block });
            }
            // A scale's sign moves to its codes; where it is zero there is no code for it, and the codes become zero.
            let flip = if scale & 0x80 == 0 { 0 } else { 0x8888_8888_8888_8888 };
            let magnitude = scale & 0x7f;
            codes[half] = if magnitude == 0 { 0 } else { u64::from_le_bytes(row_codes[block]) ^ flip };
            out[2 * TILE_BYTES + 4 * lane + 2 * tile + half] = device_scale(magnitude);
        }
        let out = &mut out[tile * TILE_BYTES + 16 * lane..][..16];
        for (q, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *out = fragment_words(codes.map(|codes| codes >> (32 * q))).to_le_bytes();
        }
    }
    Ok(())
}

/// Two rows into their lanes of every step of a unit: MMA q's fragment of 16 bytes holds K `4 q .. 4 q + 4` of each
/// lane's 16, of both halves.
fn pack_bf16_rows(rows: [(&Projection, usize); 2], tile: usize, g: usize, unit: &mut [u8]) {
    for (half, (projection, row)) in rows.into_iter().enumerate() {
        let ProjectionData::Bf16(bytes) = &projection.data else { unreachable!("the formats of one image are alike") };
        let pairs = &bytes.as_chunks::<4>().0[row * projection.in_features / 2..][..projection.in_features / 2];
        for (index, pair) in pairs.iter().enumerate() {
            let k = 2 * index;
            let (step, t, q, pair_of_q) = (k / STEP_K, k % STEP_K / 16, k % 16 / 4, k % 4 / 2);
            let at =
                step * BF16_STEP_BYTES + (4 * tile + q) * TILE_BYTES + 16 * (4 * g + t) + 4 * (half + 2 * pair_of_q);
            unit[at..][..4].copy_from_slice(pair);
        }
    }
}

/// A finite, non-negative e4m3 as an unsigned e5m3 of bias 9, which has no subnormals: exact, but for zero, which becomes
/// 2^-9 and needs codes of zero.
fn device_scale(bits: u8) -> u8 {
    let (exponent, mantissa) = (bits >> 3, bits & 7);
    match (exponent, mantissa) {
        (0, 4..) => (2 << 3) | ((mantissa - 4) * 2),
        (0, 2..) => (1 << 3) | ((mantissa - 2) * 4),
        (0, _) => 0,
        _ => ((exponent + 2) << 3) | mantissa,
    }
}

/// Eight codes of each half, K ascending from the lowest nibble, as the two words that `decode16` takes apart: those of
/// MMA q (`a`) and q + 1 (`b`), register r holding half `r % 2` at K `2 (r / 2) + {0, 1}`.
fn fragment_words(halves: [u64; 2]) -> u64 {
    let code = |mma: usize, register: usize, e: usize| -> u32 {
        let k = 4 * mma + 2 * (register / 2) + e;
        // The mask leaves four bits.
        u32::from((halves[register % 2] >> (4 * k)).to_le_bytes()[0] & 15)
    };
    let (mut w0, mut w1) = (0, 0);
    for e in 0..2 {
        let a = |register| code(0, register, e);
        let b = |register| code(1, register, e);
        let place =
            |code: u32, sign_at: u32, magnitude_at: u32| ((code >> 3) << sign_at) | ((code & 7) << magnitude_at);
        let bit = |code: u32, bit: u32, at: u32| ((code >> bit) & 1) << at;
        // Signs that a rotation brings in from the other half of the word.
        let (a1_of_other, b3_of_other) = (code(0, 1, 1 - e), code(1, 3, 1 - e));
        let h0 = place(a(0), 15, 6)
            | ((a(1) & 7) << 11)
            | bit(a1_of_other, 3, 4)
            | place(a(2), 9, 0)
            | bit(a(3), 3, 10)
            | bit(a(3), 2, 3)
            | bit(b(3), 2, 14)
            | bit(b3_of_other, 3, 5);
        let h1 = place(b(0), 15, 6)
            | place(b(1), 12, 3)
            | place(b(2), 9, 0)
            | bit(a(3), 1, 14)
            | bit(a(3), 0, 13)
            | bit(b(3), 1, 11)
            | bit(b(3), 0, 10);
        w0 |= h0 << (16 * e);
        w1 |= h1 << (16 * e);
    }
    u64::from(w0) | u64::from(w1) << 32
}

#[cfg(test)]
mod tests;
