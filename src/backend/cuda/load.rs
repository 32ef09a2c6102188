//! Experts on their way to the device. Rows go there as the checkpoint has them and a kernel packs them: all threads copy
//! into pinned slots while the device fetches and packs the slots before. Cores could not pack as fast as they copy.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rayon::prelude::*;

use super::experts::{self, PackedExpert};
use super::pack::{self, Format, PackError};
use super::{Shared, narrow};
use crate::backend::checks;
use crate::backend::{BackendError, Experts, ExpertsBuilder, ExpertsSpec};
use crate::checkpoint::tensors::{ExpertTensors, Projection, ProjectionData};
use crate::cuda::{DeviceBuffer, Function, LaunchShape};
use crate::gpu::feed::{Feed, SLOT_BYTES};
use crate::jit::kernels::grouped_gemm::{ExpertEntry, Weights};
use crate::jit::kernels::{PackArgs, PackKernels};
use crate::numerics::e4m3;
use crate::numerics::nvfp4::BLOCK;

/// Images of so many experts lie in one piece of the device's memory: getting one takes 50 us, in which 2.5 MB are copied.
const EXPERTS_A_BLOCK: usize = 16;

/// What the device's memory is aligned to, and images too.
const ALIGN: usize = 256;

/// Packs experts as they come.
pub(super) struct Builder {
    shared: Arc<Shared>,
    spec: ExpertsSpec,
    feed: Arc<Feed>,
    pack_nvfp4: Function,
    pack_bf16: Function,
    images: Mutex<Images>,
    experts: Vec<OnceLock<PackedExpert>>,
}

impl Builder {
    pub(super) fn new(shared: Arc<Shared>, spec: ExpertsSpec, num_local_experts: usize) -> Result<Self, BackendError> {
        let module = shared.gpu.module(PackKernels.request(shared.gpu.arch()))?;
        let (pack_nvfp4, pack_bf16) = (module.function(PackKernels::NVFP4)?, module.function(PackKernels::BF16)?);
        let feed = shared.gpu.feed();
        let images = Mutex::new(Images { num_missing: num_local_experts, ..Images::default() });
        let experts = (0..num_local_experts).map(|_| OnceLock::new()).collect();
        Ok(Self { shared, spec, feed, pack_nvfp4, pack_bf16, images, experts })
    }

    /// Copies units of a matrix into a slot, and queues their way and their packing.
    fn send(&self, piece: &Piece<'_>) -> Result<(), BackendError> {
        let mut load = self.feed.take(piece.num_bytes())?;
        let places = piece.fill(load.bytes())?;
        let mut sent = load.send(places.end)?;
        let format = piece.matrix.format;
        let function = match format {
            Format::Nvfp4 => &self.pack_nvfp4,
            Format::Bf16 => &self.pack_bf16,
        };
        let num_steps = piece.matrix.num_steps();
        let at = |offset: usize| sent.address() + offset as u64;
        let args = PackArgs {
            rows: places.rows.map(at),
            scales: places.scales.map(at),
            image: piece.matrix.image + (piece.first_unit * num_steps * format.step_bytes()) as u64,
            num_units: narrow(piece.num_units),
            num_rows: narrow(piece.num_rows()),
            width: narrow(piece.matrix.width()),
            is_pair: u32::from(piece.matrix.is_pair()),
        };
        let num_blocks = (piece.num_units * num_steps).div_ceil(PackKernels::NUM_THREADS as usize / 32);
        let most = self.shared.gpu.device().facts().num_multiprocessors * 8;
        let shape = LaunchShape::rows(narrow(num_blocks).min(most), PackKernels::NUM_THREADS);
        // SAFETY: the slot holds the rows where `fill` has put them, and stays as it is until its stream has come so far; the
        // image has room for all units, in a block that goes with the experts, whose freeing waits for the device.
        unsafe { function.launch(sent.stream(), &shape, &args)? };
        Ok(())
    }
}

impl ExpertsBuilder for Builder {
    fn put(&self, local: usize, expert: &ExpertTensors) -> Result<(), BackendError> {
        checks::expert(&self.spec, expert)?;
        let packed = |projection| move |source: PackError| BackendError::Pack { projection, source };
        let format = pack::format_fc1(&expert.gate, &expert.up).map_err(packed("gate with up"))?;
        if format != pack::format(&expert.down).map_err(packed("down"))? {
            return Err(BackendError::MixedExpert);
        }
        let fc1 = Matrix { name: "gate with up", format, parts: &[&expert.gate, &expert.up], image: 0 };
        let fc2 = Matrix { name: "down", format, parts: &[&expert.down], image: 0 };
        let (fc1_bytes, fc2_bytes) = (fc1.image_bytes(), fc2.image_bytes());
        let fc2_at = fc1_bytes.next_multiple_of(ALIGN);
        let mut images = self.images.lock().unwrap_or_else(PoisonError::into_inner);
        let image = images.room(&self.shared, fc2_at + fc2_bytes)?;
        drop(images);
        let (fc1, fc2) = (Matrix { image, ..fc1 }, Matrix { image: image + fc2_at as u64, ..fc2 });
        let pieces: Vec<Piece<'_>> = fc1.pieces().chain(fc2.pieces()).collect();
        // Whichever thread finds what is wrong: the first of the pieces is reported.
        let sent: Vec<Result<(), BackendError>> =
            pieces.par_iter().with_max_len(1).map(|piece| self.send(piece)).collect();
        sent.into_iter().collect::<Result<(), _>>()?;
        let weights = match format {
            Format::Nvfp4 => Weights::Nvfp4,
            Format::Bf16 => Weights::Bf16,
        };
        let entry = ExpertEntry { fc1: fc1.image, fc2: fc2.image, ..experts::entry(expert) };
        let identity = checks::identity(self.shared.technique, &self.spec, expert);
        let num_bytes = fc1_bytes + fc2_bytes;
        checks::put(&self.experts, local, PackedExpert { entry, weights, identity, num_bytes });
        Ok(())
    }

    fn wait(&self) -> Result<(), BackendError> {
        Ok(self.feed.finish()?)
    }

    fn finish(self: Box<Self>) -> Result<Box<dyn Experts>, BackendError> {
        let Self { shared, spec, feed, images, experts, .. } = *self;
        feed.finish()?;
        let images = images.into_inner().unwrap_or_else(PoisonError::into_inner);
        experts::group(shared, spec, checks::all(experts), images.blocks)
    }
}

/// The device's memory for images.
#[derive(Default)]
struct Images {
    blocks: Vec<DeviceBuffer<u8>>,
    /// By the bytes of an expert: where the next one goes, and how many more fit.
    open: Vec<(usize, u64, usize)>,
    /// Experts that have no room yet.
    num_missing: usize,
}

impl Images {
    /// Room for an expert of `num_bytes`. Experts of one format have one size; a rank's may be of two.
    fn room(&mut self, shared: &Shared, num_bytes: usize) -> Result<u64, BackendError> {
        let num_bytes = num_bytes.next_multiple_of(ALIGN);
        let is_open = |open: &&mut (usize, u64, usize)| open.0 == num_bytes && open.2 > 0;
        if let Some((_, at, num_left)) = self.open.iter_mut().find(is_open) {
            *num_left -= 1;
            self.num_missing -= 1;
            return Ok(std::mem::replace(at, *at + num_bytes as u64));
        }
        let num_experts = self.num_missing.clamp(1, EXPERTS_A_BLOCK);
        let block = DeviceBuffer::uninitialised(shared.gpu.device(), num_experts * num_bytes)?;
        self.open.push((num_bytes, block.address(), num_experts));
        self.blocks.push(block);
        self.room(shared, num_bytes)
    }
}

/// A matrix on its way: gate with up, or down.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    name: &'static str,
    format: Format,
    /// Two of one shape, whose rows a unit interleaves, or one.
    parts: &'a [&'a Projection],
    /// Where its image goes.
    image: u64,
}

impl<'a> Matrix<'a> {
    fn is_pair(&self) -> bool {
        self.parts.len() == 2
    }

    fn width(&self) -> usize {
        self.parts[0].in_features
    }

    /// Rows of a unit that each part has.
    fn unit_rows(&self) -> usize {
        pack::UNIT_ROWS / self.parts.len()
    }

    fn num_units(&self) -> usize {
        self.parts[0].out_features.div_ceil(self.unit_rows())
    }

    fn num_steps(&self) -> usize {
        self.width().div_ceil(pack::STEP_K)
    }

    fn image_bytes(&self) -> usize {
        self.num_units() * self.num_steps() * self.format.step_bytes()
    }

    /// Bytes of a row: of its codes or values, and of its scales.
    fn row_bytes(&self) -> [usize; 2] {
        match self.format {
            Format::Nvfp4 => [self.width() / 2, self.width() / BLOCK],
            Format::Bf16 => [2 * self.width(), 0],
        }
    }

    /// All units, in pieces of about a slot.
    fn pieces(self) -> impl Iterator<Item = Piece<'a>> {
        let unit_bytes = pack::UNIT_ROWS * self.row_bytes().iter().sum::<usize>();
        let num_units = self.num_units();
        let most = (SLOT_BYTES / unit_bytes).max(1);
        let at_once = num_units.div_ceil(num_units.div_ceil(most));
        let piece =
            move |first_unit| Piece { matrix: self, first_unit, num_units: at_once.min(num_units - first_unit) };
        (0..num_units).step_by(at_once).map(piece)
    }
}

/// Some units of a matrix.
struct Piece<'a> {
    matrix: Matrix<'a>,
    first_unit: usize,
    num_units: usize,
}

/// Where a slot holds a piece, by the halves of a tile; a single matrix serves both.
struct Places {
    rows: [usize; 2],
    scales: [usize; 2],
    end: usize,
}

impl Piece<'_> {
    fn first_row(&self) -> usize {
        self.first_unit * self.matrix.unit_rows()
    }

    /// Rows of each part.
    fn num_rows(&self) -> usize {
        (self.num_units * self.matrix.unit_rows()).min(self.matrix.parts[0].out_features - self.first_row())
    }

    /// The most that [`Piece::fill`] writes.
    fn num_bytes(&self) -> usize {
        let of_part = self.matrix.row_bytes().map(|bytes| (self.num_rows() * bytes).next_multiple_of(ALIGN));
        self.matrix.parts.len() * of_part.iter().sum::<usize>()
    }

    /// Copies the rows as they are.
    fn fill(&self, slot: &mut [u8]) -> Result<Places, BackendError> {
        let mut end = 0;
        let mut copy = |bytes: &[u8]| {
            let at = end;
            slot[at..at + bytes.len()].copy_from_slice(bytes);
            end = (at + bytes.len()).next_multiple_of(ALIGN);
            at
        };
        let [row_bytes, scale_bytes] = self.matrix.row_bytes();
        let (first, num_rows) = (self.first_row(), self.num_rows());
        let (mut rows, mut scales) = ([0; 2], [0; 2]);
        for (half, part) in self.matrix.parts.iter().enumerate() {
            let of = |bytes: &'_ [u8], a_row: usize| -> std::ops::Range<usize> {
                debug_assert_eq!(bytes.len(), part.out_features * a_row, "the backend's checks have seen to it");
                first * a_row..(first + num_rows) * a_row
            };
            match &part.data {
                ProjectionData::Nvfp4 { packed, block_scales, .. } => {
                    let of_piece = &block_scales[of(block_scales, scale_bytes)];
                    if let Some(at) = first_nan(of_piece) {
                        let (row, block) = (first + at / scale_bytes, at % scale_bytes);
                        let source = PackError::NanScale { row, block };
                        return Err(BackendError::Pack { projection: self.matrix.name, source });
                    }
                    rows[half] = copy(&packed[of(packed, row_bytes)]);
                    scales[half] = copy(of_piece);
                }
                ProjectionData::Bf16(values) => rows[half] = copy(&values[of(values, row_bytes)]),
                ProjectionData::F32(_) => unreachable!("`format` refuses f32"),
            }
        }
        if !self.matrix.is_pair() {
            (rows[1], scales[1]) = (rows[0], scales[0]);
        }
        Ok(Places { rows, scales, end })
    }
}

/// The first of some e4m3 bits that is NaN. A checkpoint's are checked when they are read; nobody else's are.
fn first_nan(bits: &[u8]) -> Option<usize> {
    // Without a branch a byte: that is many bytes at a time, and there is none in files that are in order.
    let has_nan = bits.iter().fold(false, |found, bits| found | e4m3::is_nan(*bits));
    if has_nan { bits.iter().position(|bits| e4m3::is_nan(*bits)) } else { None }
}

#[cfg(test)]
mod tests;
