//! The bytes of a travelling token and of a row that comes back: written once, for both sides.

use half::bf16;
use half::slice::HalfFloatSliceExt;

use crate::numerics::nvfp4::{self, BLOCK, QuantCounts};

/// The form of a travelling token's values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PayloadForm {
    /// As computed.
    F32,
    /// Rounded to bf16 (exact where the values are bf16).
    Bf16,
    /// e2m1 codes and block scales, quantised by the sender with FC1's `input_scale`.
    Nvfp4 {
        /// FC1's global scale, equal on all ranks.
        input_scale: f32,
    },
}

impl PayloadForm {
    /// The name of `payload:`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Nvfp4 { .. } => "nvfp4",
        }
    }

    /// Bytes of `hidden` values: of the values or codes, and of their block scales.
    #[must_use]
    pub const fn parts(self, hidden: usize) -> (usize, usize) {
        match self {
            Self::F32 => (hidden * 4, 0),
            Self::Bf16 => (hidden * 2, 0),
            Self::Nvfp4 { .. } => (hidden / 2, hidden / BLOCK),
        }
    }

    /// Bytes of `hidden` values, all of them.
    #[must_use]
    pub const fn bytes(self, hidden: usize) -> usize {
        let (values, scales) = self.parts(hidden);
        values + scales
    }

    /// The global scale that values are quantised with; 1 where they are not.
    #[must_use]
    pub const fn input_scale(self) -> f32 {
        if let Self::Nvfp4 { input_scale } = self { input_scale } else { 1.0 }
    }

    /// Writes `values` in this form.
    fn encode(self, values: &[f32], out: &mut [u8]) -> QuantCounts {
        match self {
            Self::F32 => encode_f32(values, out),
            Self::Bf16 => encode_bf16(values, out),
            Self::Nvfp4 { input_scale } => {
                let (packed, scales) = out.split_at_mut(values.len() / 2);
                return nvfp4::quantise_row(values, input_scale, packed, scales);
            }
        }
        QuantCounts::default()
    }

    /// Reads values in this form; NVFP4 without the global scale.
    fn decode(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => decode_f32(bytes, out),
            Self::Bf16 => decode_bf16(bytes, out),
            Self::Nvfp4 { .. } => {
                let (packed, scales) = bytes.split_at(out.len() / 2);
                nvfp4::dequantise_unscaled(packed, scales, out);
            }
        }
    }
}

/// Tokens begin at multiples of this, so that GPUs copy whole words of theirs.
const ALIGN: usize = 16;

/// A token on its way: payload, then `num_topk` local expert ids (i32, -1: not hosted there), then as many weights (f32), then
/// zeros up to the next token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLayout {
    /// The values' form.
    pub payload: PayloadForm,
    /// Values of a token.
    pub hidden: usize,
    /// Slots of a token.
    pub num_topk: usize,
}

impl TokenLayout {
    /// Bytes of a token.
    #[must_use]
    pub const fn row_bytes(&self) -> usize {
        (self.weights_at() + 4 * self.num_topk).next_multiple_of(ALIGN)
    }

    /// Where its ids begin, in bytes from its own begin.
    #[must_use]
    pub const fn idx_at(&self) -> usize {
        self.payload.bytes(self.hidden).next_multiple_of(4)
    }

    /// Where its weights begin, likewise.
    #[must_use]
    pub const fn weights_at(&self) -> usize {
        self.idx_at() + 4 * self.num_topk
    }

    /// Writes one token; `slots` yields its local expert id and weight in slot order.
    pub fn encode(&self, values: &[f32], slots: impl Iterator<Item = (i32, f32)>, row: &mut [u8]) -> QuantCounts {
        let counts = self.payload.encode(values, &mut row[..self.payload.bytes(self.hidden)]);
        self.encode_slots(slots, row);
        counts
    }

    /// Writes the ids and weights of a token whose values are there.
    pub fn encode_slots(&self, slots: impl Iterator<Item = (i32, f32)>, row: &mut [u8]) {
        for (slot, (local_idx, weight)) in slots.enumerate() {
            let (idx_at, weight_at) = (self.idx_at() + 4 * slot, self.weights_at() + 4 * slot);
            row[idx_at..idx_at + 4].copy_from_slice(&local_idx.to_le_bytes());
            row[weight_at..weight_at + 4].copy_from_slice(&weight.to_le_bytes());
        }
    }

    /// Reads a token's values; NVFP4 without the global scale.
    pub fn decode_values(&self, row: &[u8], out: &mut [f32]) {
        self.payload.decode(&row[..self.payload.bytes(self.hidden)], out);
    }

    /// Reads a token's local expert ids in slot order.
    pub fn local_idx<'a>(&self, row: &'a [u8]) -> impl Iterator<Item = i32> + use<'a> {
        words(&row[self.idx_at()..self.weights_at()]).map(i32::from_le_bytes)
    }

    /// Reads a token's weights in slot order.
    pub fn weights<'a>(&self, row: &'a [u8]) -> impl Iterator<Item = f32> + use<'a> {
        words(&row[self.weights_at()..self.weights_at() + 4 * self.num_topk]).map(f32::from_le_bytes)
    }
}

/// The form of a row that comes back. Its rounding applies to rows that stay local too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CombineForm {
    /// Exact.
    F32,
    /// Rounded to bf16.
    Bf16,
}

impl CombineForm {
    /// The name of `combine_dtype:`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes of `hidden` values.
    #[must_use]
    pub const fn row_bytes(self, hidden: usize) -> usize {
        match self {
            Self::F32 => hidden * 4,
            Self::Bf16 => hidden * 2,
        }
    }

    /// Writes a row.
    pub fn encode(self, values: &[f32], out: &mut [u8]) {
        match self {
            Self::F32 => encode_f32(values, out),
            Self::Bf16 => encode_bf16(values, out),
        }
    }

    /// Reads a row.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => decode_f32(bytes, out),
            Self::Bf16 => decode_bf16(bytes, out),
        }
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes.as_chunks::<4>().0.iter().copied()
}

fn encode_f32(values: &[f32], out: &mut [u8]) {
    for (value, bytes) in values.iter().zip(out.as_chunks_mut::<4>().0) {
        *bytes = value.to_le_bytes();
    }
}

fn decode_f32(bytes: &[u8], out: &mut [f32]) {
    for (value, bytes) in out.iter_mut().zip(words(bytes)) {
        *value = f32::from_le_bytes(bytes);
    }
}

fn encode_bf16(values: &[f32], out: &mut [u8]) {
    for (value, bytes) in values.iter().zip(out.as_chunks_mut::<2>().0) {
        *bytes = bf16::from_f32(*value).to_le_bytes();
    }
}

fn decode_bf16(bytes: &[u8], out: &mut [f32]) {
    for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *value = bf16::from_le_bytes(*bytes).to_f32();
    }
}

/// Whether every value is a bf16, so that a bf16 payload is exact.
#[must_use]
pub fn is_bf16(values: &[f32]) -> bool {
    let mut rounded = vec![bf16::ZERO; values.len().min(4096)];
    values.chunks(4096).all(|chunk| {
        let rounded = &mut rounded[..chunk.len()];
        rounded.convert_from_f32_slice(chunk);
        chunk.iter().zip(&*rounded).all(|(value, rounded)| value.to_bits() == rounded.to_f32().to_bits())
    })
}
