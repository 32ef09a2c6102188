//! Weights packed once, at load, into the order that the kernels stream: panels of sixteen outputs.
//!
//! A panel holds blocks of sixteen k. Codes stay codes: packed weights take the bytes of the raw ones, but for outputs
//! and k rounded up to sixteen and each matrix to whole pages.

use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;
use rayon::prelude::*;

use super::kernels::{LANES, Lane, Panel};
use crate::backend::BackendError;
use crate::checkpoint::tensors::{Projection, ProjectionData};

/// How codes lie in a panel's block, and bf16 values in a pair of k.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// NVFP4: a 32-bit element holds eight k of an output, the even ones in its low half. bf16: an output's two k are
    /// neighbours.
    NeighbouringK,
    /// NVFP4: 32 bytes hold four k, k and k + 1 in the low nibbles; the bytes of an output pair (i, i + 8) are
    /// neighbours. bf16: 32 bytes a k, the pair (i, i + 8) neighbours.
    SplitHalves,
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// A projection in panels.
#[derive(Debug)]
pub(super) struct PackedMatrix {
    num_blocks: usize,
    num_panels: usize,
    format: Format,
    /// `weight_scale_2`, 1 where the format has none.
    pub(super) global_scale: f32,
    /// `input_scale`, where there is one.
    pub(super) input_scale: Option<f32>,
}

#[derive(Debug)]
enum Format {
    Nvfp4 { codes: Pages, scales: Pages },
    Bf16(Pages),
    F32(Pages),
}

/// Zeroed memory of its own mapping, in huge pages where the system gives them: a panel is read once, from end to end.
#[derive(Debug)]
pub(super) struct Pages(MmapMut);

impl Pages {
    pub(super) fn new(bytes: usize) -> Result<Self, BackendError> {
        let map = MmapMut::map_anon(bytes).map_err(|source| BackendError::Memory { bytes, source })?;
        #[cfg(target_os = "linux")]
        if let Err(error) = map.advise(memmap2::Advice::HugePage) {
            tracing::debug!(%error, "no huge pages for weights");
        }
        Ok(Self(map))
    }

    fn chunks<const N: usize>(&self) -> &[[u8; N]] {
        self.as_chunks().0
    }
}

impl PackedMatrix {
    /// Packs on the current thread pool. Outputs and k are padded with zeros to multiples of sixteen.
    pub(super) fn new(projection: &Projection, order: Order) -> Result<Self, BackendError> {
        let num_panels = projection.out_features.div_ceil(LANES);
        let num_blocks = projection.in_features.div_ceil(LANES);
        let num_elements = num_panels * num_blocks * LANES * LANES;
        let mut global_scale = 1.0;
        let mut input_scale = None;
        let format = match &projection.data {
            ProjectionData::Nvfp4 { packed, block_scales, global_scale: global, input_scale: input } => {
                global_scale = *global;
                input_scale = *input;
                let mut codes = Pages::new(num_elements / 2)?;
                let mut scales = Pages::new(num_elements / LANES)?;
                let raw = Raw { bytes: packed, row_bytes: projection.in_features / 2 };
                pack_panels(&mut codes, num_panels, |panel, out| pack_codes(&raw, panel, order, out));
                let raw = Raw { bytes: block_scales, row_bytes: num_blocks };
                pack_panels(&mut scales, num_panels, |panel, out| pack_scales(&raw, panel, out));
                Format::Nvfp4 { codes, scales }
            }
            ProjectionData::Bf16(bytes) => {
                let mut pages = Pages::new(num_elements * 2)?;
                let raw = Raw { bytes, row_bytes: projection.in_features * 2 };
                pack_panels(&mut pages, num_panels, |panel, out| pack_bf16(&raw, panel, order, out));
                Format::Bf16(pages)
            }
            ProjectionData::F32(bytes) => {
                let mut pages = Pages::new(num_elements * 4)?;
                let raw = Raw { bytes, row_bytes: projection.in_features * 4 };
                pack_panels(&mut pages, num_panels, |panel, out| pack_f32(&raw, panel, out));
                Format::F32(pages)
            }
        };
        Ok(Self { num_blocks, num_panels, format, global_scale, input_scale })
    }

    /// Panels of sixteen outputs.
    pub(super) fn num_panels(&self) -> usize {
        self.num_panels
    }

    /// Blocks of sixteen k.
    pub(super) fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// The panel of the outputs from `16 * panel`.
    pub(super) fn panel(&self, panel: usize) -> Panel<'_> {
        let blocks = panel * self.num_blocks..(panel + 1) * self.num_blocks;
        match &self.format {
            Format::Nvfp4 { codes, scales } => {
                Panel::Nvfp4 { codes: &codes.chunks()[blocks.clone()], scales: &scales.chunks()[blocks] }
            }
            Format::Bf16(pages) => Panel::Bf16(&pages.chunks::<64>().as_chunks().0[blocks]),
            Format::F32(pages) => {
                let lanes: &[Lane] = bytemuck::cast_slice(pages);
                Panel::F32(&lanes[blocks.start * LANES..blocks.end * LANES])
            }
        }
    }

    /// Bytes of the packed numbers.
    pub(super) fn bytes(&self) -> u64 {
        let pages = match &self.format {
            Format::Nvfp4 { codes, scales } => codes.len() + scales.len(),
            Format::Bf16(pages) | Format::F32(pages) => pages.len(),
        };
        pages as u64
    }
}

/// Rows as they lie in the checkpoint.
struct Raw<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
}

impl Raw<'_> {
    /// The rows of a panel, each with its lane; fewer than sixteen at the end.
    fn lanes(&self, panel: usize) -> impl Iterator<Item = (usize, &[u8])> {
        self.bytes.chunks_exact(self.row_bytes).skip(panel * LANES).take(LANES).enumerate()
    }
}

fn pack_panels(pages: &mut Pages, num_panels: usize, pack: impl Fn(usize, &mut [u8]) + Sync) {
    let panel_bytes = pages.len() / num_panels;
    pages.par_chunks_mut(panel_bytes).enumerate().for_each(|(panel, out)| pack(panel, out));
}

fn pack_codes(raw: &Raw<'_>, panel: usize, order: Order, out: &mut [u8]) {
    let (blocks, _) = out.as_chunks_mut::<128>();
    for (lane, row) in raw.lanes(panel) {
        for (block, out) in row.as_chunks::<8>().0.iter().zip(&mut *blocks) {
            match order {
                Order::NeighbouringK => {
                    for (half, four) in block.as_chunks::<4>().0.iter().enumerate() {
                        let even = |a: u8, b: u8| a & 15 | b << 4;
                        let odd = |a: u8, b: u8| a >> 4 | b & 0xF0;
                        let [a, b, c, d] = *four;
                        let element = [even(a, b), even(c, d), odd(a, b), odd(c, d)];
                        out[64 * half + 4 * lane..][..4].copy_from_slice(&element);
                    }
                }
                Order::SplitHalves => {
                    let position = lane / 4 % 2 * 16 + lane % 4 * 2 + lane / 8;
                    for (quarter, two) in block.as_chunks::<2>().0.iter().enumerate() {
                        let start = 32 * quarter + position;
                        out[start] = two[0] & 15 | two[1] << 4;
                        out[start + 8] = two[0] >> 4 | two[1] & 0xF0;
                    }
                }
            }
        }
    }
}

fn pack_scales(raw: &Raw<'_>, panel: usize, out: &mut [u8]) {
    for (lane, row) in raw.lanes(panel) {
        for (scale, out) in row.iter().zip(out.as_chunks_mut::<LANES>().0) {
            debug_assert!(*scale <= 0x80 && *scale != 0x7F, "block scales are checked when they are read");
            // Kernels read the bits as an f16 of another bias, and -0 would not be zero there.
            out[lane] = scale & 0x7F;
        }
    }
}

fn pack_bf16(raw: &Raw<'_>, panel: usize, order: Order, out: &mut [u8]) {
    let (values, _) = out.as_chunks_mut::<2>();
    for (lane, row) in raw.lanes(panel) {
        for (k, value) in row.as_chunks::<2>().0.iter().enumerate() {
            let position = match order {
                Order::NeighbouringK => k / 2 * 32 + 2 * lane + k % 2,
                Order::SplitHalves => k * 16 + lane % 8 * 2 + lane / 8,
            };
            values[position] = *value;
        }
    }
}

fn pack_f32(raw: &Raw<'_>, panel: usize, out: &mut [u8]) {
    let lanes: &mut [Lane] = bytemuck::cast_slice_mut(out);
    for (lane, row) in raw.lanes(panel) {
        for (value, out) in row.as_chunks::<4>().0.iter().zip(&mut *lanes) {
            out.0[lane] = f32::from_le_bytes(*value);
        }
    }
}
