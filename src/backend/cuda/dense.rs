//! Dense projections on the device, bf16 rows in and f32 rows out: by our own kernel, or by cublasLt where all ranks have it,
//! it has a fitting algorithm, and sums may be cut off as tensor cores do.
//!
//! Neither lets a row's bits follow from the number of rows: a rank's own tokens are no ground for a choice. A weight in f32
//! is three bf16 ones whose sum it is, bit for bit, and so are f32 rows where they have to stay exact (the router's); our
//! kernel sums the products of all parts.

use std::sync::Arc;

use rayon::prelude::*;

use super::super::BackendError;
use super::narrow;
use super::pack::PackError;
use crate::checkpoint::tensors::{Projection, ProjectionData};
use crate::cuda::blas::{Blas, Library, Matmul, MatmulShape};
use crate::cuda::{DeviceBuffer, Function, LaunchShape, Stream};
use crate::gpu::Gpu;
use crate::jit::kernels::{DenseArgs, DenseKernels, DenseProduct, DenseProductArgs};
use crate::numerics::nvfp4::BLOCK;

/// What computes dense projections that need not be careful.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum DenseBy {
    /// Our own kernels.
    #[default]
    Kernels,
    /// cublasLt.
    Cublaslt {
        /// The library, or the directory that it lies in; absent: where the loader finds it.
        setting: Option<String>,
        /// The number of rows that algorithms are chosen for, the same on all ranks.
        num_rows: usize,
    },
}

/// What a projection's sums have to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sums {
    /// As near to f32 as sums in f32 are: a near tie between experts should fall as on the host.
    Careful,
    /// As tensor cores make them: what follows rounds to bf16.
    Fast,
}

/// How many rows there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowCount {
    /// So many; where the device counts them, the most that there may be.
    pub most: usize,
    /// Address of the device's count, a u32; 0: the host knows.
    pub live: u64,
}

/// bf16 rows on the device: `[num_parts, count.most, width]`, whose parts add up to the rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct DenseRows {
    /// Where they are.
    pub address: u64,
    /// 1, or 3 where they hold all bits of f32 values.
    pub num_parts: usize,
    /// Rows of a part. A library multiplies the most that there may be: what lies behind those that there are is of no use.
    pub count: RowCount,
}

/// What all dense projections of a session use, in the order of its GPU's stream.
pub struct DenseTools {
    gpu: Gpu,
    blas: Option<(Blas, usize)>,
    kernels: Kernels,
    /// By `DenseProduct::ALL`.
    products: [Function; 2],
}

/// `kernels/dense.cu`
struct Kernels {
    split_parts: Function,
    widen_rows: Function,
    quantise_rows: Function,
    rms_norm: Function,
    add_rows: Function,
}

impl DenseTools {
    /// Loads what computes them.
    ///
    /// # Errors
    /// If the library or a kernel can't be had, or there is no memory.
    pub fn new(gpu: &Gpu, by: &DenseBy) -> Result<Self, BackendError> {
        let device = gpu.device();
        let blas = match by {
            DenseBy::Kernels => None,
            DenseBy::Cublaslt { setting, num_rows } => {
                Some((Blas::new(&Library::load(setting.as_deref())?, device)?, *num_rows))
            }
        };
        let module = gpu.module(DenseKernels.request(gpu.arch()))?;
        let kernels = Kernels {
            split_parts: module.function(DenseKernels::SPLIT_PARTS)?,
            widen_rows: module.function(DenseKernels::WIDEN_ROWS)?,
            quantise_rows: module.function(DenseKernels::QUANTISE_ROWS)?,
            rms_norm: module.function(DenseKernels::RMS_NORM)?,
            add_rows: module.function(DenseKernels::ADD_ROWS)?,
        };
        let product = |product: DenseProduct| -> Result<Function, BackendError> {
            let function = gpu.module(product.request(gpu.arch()))?.function(DenseProduct::FUNCTION)?;
            function.allow_dynamic_shared(product.shared_bytes())?;
            Ok(function)
        };
        let products = [product(DenseProduct::Few)?, product(DenseProduct::Many)?];
        Ok(Self { gpu: gpu.clone(), blas, kernels, products })
    }

    /// Whether cublasLt was loaded.
    #[must_use]
    pub fn has_library(&self) -> bool {
        self.blas.is_some()
    }

    /// cublasLt's algorithm for bf16 weights of a shape; none where there is no library, or it has none that fits.
    pub(super) fn matmul(&self, out_features: usize, in_features: usize) -> Result<Option<Matmul>, BackendError> {
        let Some((blas, num_rows)) = &self.blas else { return Ok(None) };
        Ok(blas.matmul(MatmulShape { out_features, in_features, num_rows: *num_rows })?)
    }

    /// The GPU that it works on.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn stream(&self) -> &Stream {
        self.gpu.stream()
    }

    /// The most blocks that waiting for memory can use.
    pub(super) fn most_blocks(&self) -> u32 {
        self.gpu.device().facts().num_multiprocessors * 8
    }

    fn shape(&self, num_values: usize) -> LaunchShape {
        let num_blocks = num_values.div_ceil(DenseKernels::NUM_THREADS as usize);
        let most = self.most_blocks();
        LaunchShape::rows(u32::try_from(num_blocks).unwrap_or(most).min(most), DenseKernels::NUM_THREADS)
    }

    /// f32 `[num_rows, width]` to bf16 parts.
    ///
    /// # Safety
    /// `input` is the address of so many values, `rows` that of room for all parts, until the stream has come so far.
    pub(super) unsafe fn split(&self, input: u64, rows: DenseRows, width: usize) -> Result<(), BackendError> {
        let DenseRows { address, num_parts, count } = rows;
        let args = DenseArgs {
            input,
            out: address,
            live_rows: count.live,
            num_rows: count.most as u64,
            width: narrow(width),
            num_parts: narrow(num_parts),
            ..DenseArgs::default()
        };
        let shape = self.shape(count.most * width);
        // SAFETY: the caller answers for both addresses.
        unsafe { self.kernels.split_parts.launch(self.stream(), &shape, &args)? };
        Ok(())
    }

    /// bf16 rows of `width` values to f32.
    ///
    /// # Safety
    /// `input` and `out` are the addresses of so many values, until the stream has come so far.
    pub(super) unsafe fn widen(
        &self,
        (input, out): (u64, u64),
        (count, width): (RowCount, usize),
    ) -> Result<(), BackendError> {
        let args = DenseArgs { input, out, ..rows_of(count, width) };
        // SAFETY: the caller answers for both addresses.
        unsafe { self.kernels.widen_rows.launch(self.stream(), &self.shape(count.most * width), &args)? };
        Ok(())
    }

    /// f32 rows of `width` values, blocks of 16, through NVFP4 with a global scale: `e2m1 * e4m3`. Adds to `counts` `[2]`, the
    /// block scales that saturated and that became 0.
    ///
    /// # Safety
    /// `input` and `out` are the addresses of so many f32 and bf16 values, until the stream has come so far.
    pub(super) unsafe fn quantise(
        &self,
        (input, out): (u64, u64),
        (count, width): (RowCount, usize),
        (input_scale, counts): (f32, &DeviceBuffer<u64>),
    ) -> Result<(), BackendError> {
        let num_blocks = count.most * (width / BLOCK);
        let args = DenseArgs { input, other: counts.address(), out, constant: input_scale, ..rows_of(count, width) };
        // SAFETY: the caller answers for both addresses, and there are two counts.
        unsafe { self.kernels.quantise_rows.launch(self.stream(), &self.shape(num_blocks), &args)? };
        Ok(())
    }

    /// The RMS norm of f32 rows `[num_rows, width]`, to bf16.
    ///
    /// # Safety
    /// `input` and `out` are the addresses of so many f32 and bf16 values, until the stream has come so far.
    pub(super) unsafe fn norm(
        &self,
        (input, out): (u64, u64),
        count: RowCount,
        (weight, epsilon): (&DeviceBuffer<f32>, f32),
    ) -> Result<(), BackendError> {
        let args = DenseArgs { input, other: weight.address(), out, constant: epsilon, ..rows_of(count, weight.len()) };
        let num_blocks = u32::try_from(count.most).unwrap_or(u32::MAX).min(self.most_blocks());
        let shape = LaunchShape::rows(num_blocks, DenseKernels::NUM_THREADS);
        // SAFETY: the caller answers for both addresses; the weight is as wide as a row.
        unsafe { self.kernels.rms_norm.launch(self.stream(), &shape, &args)? };
        Ok(())
    }

    /// `out += other` of f32 rows of `width` values.
    ///
    /// # Safety
    /// Both are the addresses of so many values, until the stream has come so far.
    pub(super) unsafe fn add(
        &self,
        (out, other): (u64, u64),
        (count, width): (RowCount, usize),
    ) -> Result<(), BackendError> {
        let args = DenseArgs { other, out, ..rows_of(count, width) };
        // SAFETY: the caller answers for both addresses.
        unsafe { self.kernels.add_rows.launch(self.stream(), &self.shape(count.most * width), &args)? };
        Ok(())
    }
}

/// A projection `[out_features, in_features]` on the device.
pub(super) struct Dense {
    tools: Arc<DenseTools>,
    out_features: usize,
    in_features: usize,
    /// bf16 `[num_parts, out_features, in_features]`
    weight: DeviceBuffer<u16>,
    num_parts: usize,
    /// By cublasLt; absent: by our kernel.
    matmul: Option<Matmul>,
}

impl Dense {
    pub(super) fn new(tools: &Arc<DenseTools>, weight: &Projection, sums: Sums) -> Result<Self, BackendError> {
        let is_fast = sums == Sums::Fast && matches!(weight.data, ProjectionData::Bf16(_));
        let matmul = if is_fast { tools.matmul(weight.out_features, weight.in_features)? } else { None };
        Self::computed_with(tools, weight, matmul)
    }

    /// The same with cublasLt's algorithm for the weight, from [`DenseTools::matmul`]; none: by our kernel.
    pub(super) fn computed_with(
        tools: &Arc<DenseTools>,
        weight: &Projection,
        matmul: Option<Matmul>,
    ) -> Result<Self, BackendError> {
        let Projection { out_features, in_features, .. } = *weight;
        for (width, found) in [("out_features", out_features), ("in_features", in_features)] {
            let is_multiple = width == "out_features" || found.is_multiple_of(BLOCK);
            if found == 0 || !is_multiple || u32::try_from(found).is_err() {
                return Err(BackendError::Width { width, found });
            }
        }
        let (data, size) = match &weight.data {
            ProjectionData::Bf16(data) => (data, 2),
            ProjectionData::F32(data) => (data, 4),
            ProjectionData::Nvfp4 { .. } => {
                return Err(BackendError::Pack { projection: "linear", source: PackError::Dense });
            }
        };
        let (found, wanted) = (data.len(), out_features * in_features * size);
        if found != wanted {
            return Err(BackendError::Bytes { projection: "linear", found, wanted });
        }
        let shape = (out_features, in_features);
        if size == 2 {
            return Self::of_rows(tools, shape, &[data], matmul);
        }
        let parts = bf16_parts(data);
        let rows = parts.each_ref().map(|part| bytemuck::cast_slice(part));
        Self::of_rows(tools, shape, &rows, matmul)
    }

    /// Of a weight's bf16 rows, which lie in several places one behind the other: once, or three times where they are parts.
    pub(super) fn of_rows(
        tools: &Arc<DenseTools>,
        (out_features, in_features): (usize, usize),
        rows: &[&[u8]],
        matmul: Option<Matmul>,
    ) -> Result<Self, BackendError> {
        let num_values = rows.iter().map(|rows| rows.len()).sum::<usize>() / 2;
        let mut weight = DeviceBuffer::uninitialised(tools.gpu.device(), num_values)?;
        tools.gpu.feed().upload(&mut weight, rows)?;
        let num_parts = num_values / (out_features * in_features);
        Ok(Self { tools: tools.clone(), out_features, in_features, weight, num_parts, matmul })
    }

    /// Bytes of the weight.
    pub(super) fn weight_bytes(&self) -> u64 {
        self.weight.num_bytes() as u64
    }

    /// What computes it, for the report and for what ranks compare: a library and its algorithm, or whose kernel.
    pub(super) fn computed_by(&self) -> String {
        match &self.matmul {
            Some(matmul) => format!("cublasLt {}, algorithm {}", matmul.library().version(), matmul.algorithm()),
            None => format!("lockstep.{}", DenseProduct::FUNCTION),
        }
    }

    /// Queues the product of all rows into f32 `[num_rows, out_features]` at `out`.
    ///
    /// # Safety
    /// `x` is as wide as the weight, `out` the address of room for all rows, until the stream has come so far.
    pub(super) unsafe fn queue(&self, x: DenseRows, out: u64) -> Result<(), BackendError> {
        let DenseRows { address, num_parts, count: RowCount { most: num_rows, live } } = x;
        let stream = self.tools.stream();
        if let Some(matmul) = self.matmul.as_ref().filter(|_| num_parts == 1) {
            // SAFETY: the caller answers for both addresses, which are those of rows of whole blocks of 16.
            unsafe { matmul.queue(stream, &self.weight, address, (num_rows, out))? };
            return Ok(());
        }
        let product = DenseProduct::of(num_rows);
        let args = DenseProductArgs {
            weights: self.weight.address(),
            x: address,
            out,
            live_rows: live,
            num_rows: num_rows as u64,
            num_features: narrow(self.out_features),
            width: narrow(self.in_features),
            num_weight_parts: narrow(self.num_parts),
            num_x_parts: narrow(num_parts),
        };
        let most = self.tools.gpu.device().facts().num_multiprocessors * 4;
        let num_tiles = product.num_tiles(num_rows, self.out_features);
        let num_blocks = u32::try_from(num_tiles).unwrap_or(most).min(most);
        let shape = LaunchShape::rows(num_blocks, DenseProduct::NUM_THREADS);
        let shape = LaunchShape { shared_bytes: product.shared_bytes(), ..shape };
        let function = &self.tools.products[usize::from(product == DenseProduct::Many)];
        // SAFETY: the caller answers for both addresses, and the weight is of that shape.
        unsafe { function.launch(stream, &shape, &args)? };
        Ok(())
    }
}

/// The arguments that say which rows a kernel takes.
fn rows_of(count: RowCount, width: usize) -> DenseArgs {
    DenseArgs { live_rows: count.live, num_rows: count.most as u64, width: narrow(width), ..DenseArgs::default() }
}

/// The bf16 parts of f32 values, the largest first.
fn bf16_parts(values: &[u8]) -> [Vec<u16>; 3] {
    let parts: Vec<[u16; 3]> = values.as_chunks().0.par_iter().map(|bytes| split(f32::from_le_bytes(*bytes))).collect();
    std::array::from_fn(|part| parts.par_iter().map(|parts| parts[part]).collect())
}

/// The bits of a value cut off to bf16.
pub(super) fn upper_half(value: f32) -> u16 {
    (value.to_bits() >> 16) as u16
}

/// Three bf16 values whose sum is `value`; the first is it rounded, ties to even. As `split_parts` of `kernels/dense.cu`.
fn split(value: f32) -> [u16; 3] {
    let mut rest = value;
    std::array::from_fn(|_| {
        let mut taken = half::bf16::from_f32(rest);
        if rest.is_finite() && !taken.is_finite() {
            // The largest values would round to infinity.
            taken = half::bf16::from_bits(upper_half(rest));
        }
        rest = if taken.is_finite() { rest - taken.to_f32() } else { 0.0 };
        taken.to_bits()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_parts_hold_every_bit() {
        let mut bits = 0x1234_5678_u32;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(bits);
            // Parts of the smallest values would lie below what f32 can hold.
            if !value.is_finite() || value.abs() < 1e-30 {
                continue;
            }
            let parts = split(value).map(|part| half::bf16::from_bits(part).to_f32());
            assert_eq!(parts[2] + parts[1] + parts[0], value, "{value:e}: {parts:?}");
        }
        assert_eq!(split(f32::MAX).map(|part| half::bf16::from_bits(part).is_finite()), [true; 3]);
        assert_eq!(split(f32::INFINITY), [0x7f80, 0, 0]);
        assert!(half::bf16::from_bits(split(f32::NAN)[0]).is_nan());
        assert_eq!(split(1.0 + 1.0 / 256.0)[0], 0x3f80, "ties to even");
    }
}
