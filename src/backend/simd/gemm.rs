//! Sums of panels over all rows of a unit: fused for few rows, through decoded chunks for many. Equal bits either way.

use super::kernels::{Decoded, Kernels, LANES, Lane, Panel, RowBlocks};

/// Panels that are computed together: gate and up of 32 values, or 64 outputs.
pub(super) const MAX_PANELS: usize = 4;

/// Blocks of k whose weights are decoded at once for many rows: a panel's 256 k are 16 KiB, half of a first-level
/// cache.
const CHUNK_BLOCKS: usize = 16;

/// For few rows decoding weighs more, so that all panels' chunks should stay in the first-level cache.
const SHORT_CHUNK_BLOCKS: usize = 4;

/// Rows from which chunks are long.
const LONG_CHUNK_ROWS: usize = 32;

/// Buffers of one thread, kept between calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    decoded: Vec<Lane>,
    scales: Vec<Lane>,
    acc: Vec<Lane>,
}

impl Scratch {
    /// Bytes that units of up to `num_rows` rows need.
    pub(super) fn bytes(num_rows: usize) -> usize {
        MAX_PANELS * (CHUNK_BLOCKS * (LANES + 1) + num_rows) * size_of::<Lane>()
    }

    /// `[panel, row]` sums over all k, for up to [`MAX_PANELS`] panels.
    pub(super) fn products(&mut self, kernels: &dyn Kernels, panels: &[Panel<'_>], rows: RowBlocks<'_>) -> &mut [Lane] {
        self.acc.clear();
        self.acc.resize(panels.len() * rows.num_rows(), Lane::default());
        self.decoded.resize(MAX_PANELS * CHUNK_BLOCKS * LANES, Lane::default());
        self.scales.resize(MAX_PANELS * CHUNK_BLOCKS, Lane::default());
        let mut rest = &mut self.acc[..];
        for panels in panels.chunk_by(|a, b| a.is_like(b)) {
            let (acc, tail) = rest.split_at_mut(panels.len() * rows.num_rows());
            rest = tail;
            if kernels.fuses(rows.num_rows()) && !matches!(panels[0], Panel::F32(_)) {
                kernels.fused(panels, rows, acc);
            } else {
                chunked(kernels, panels, rows, (&mut self.decoded, &mut self.scales), acc);
            }
        }
        &mut self.acc
    }
}

/// `buffers` hold the decoded values and scales of one chunk.
fn chunked(
    kernels: &dyn Kernels,
    panels: &[Panel<'_>],
    rows: RowBlocks<'_>,
    buffers: (&mut [Lane], &mut [Lane]),
    acc: &mut [Lane],
) {
    let chunk_blocks = if rows.num_rows() < LONG_CHUNK_ROWS { SHORT_CHUNK_BLOCKS } else { CHUNK_BLOCKS };
    for start in (0..rows.num_blocks()).step_by(chunk_blocks) {
        let end = rows.num_blocks().min(start + chunk_blocks);
        let mut weights = [Decoded::default(); MAX_PANELS];
        let values = buffers.0.chunks_exact_mut((end - start) * LANES);
        let scales = buffers.1.chunks_exact_mut(end - start);
        for ((panel, weights), (values, scales)) in panels.iter().zip(&mut weights).zip(values.zip(scales)) {
            *weights = match panel.blocks(start, end) {
                Panel::F32(lanes) => Decoded { values: lanes, scales: None },
                codes => {
                    kernels.decode(codes, values, scales);
                    let scaled = matches!(codes, Panel::Nvfp4 { .. });
                    Decoded { values, scales: scaled.then_some(&*scales) }
                }
            };
        }
        kernels.multiply(&weights[..panels.len()], rows.blocks(start, end), acc);
    }
}
