//! Dense products, `kernels/dense_product.cu`, and what surrounds them, `kernels/dense.cu`.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::KernelRequest;
use super::super::source::{BASE, KernelSource, NVFP4, REQUANTISE};

const SOURCE: KernelSource = KernelSource {
    name: "dense",
    main: include_str!("../../../kernels/dense.cu"),
    headers: &[BASE, NVFP4, REQUANTISE],
};

const PRODUCT: KernelSource =
    KernelSource { name: "dense_product", main: include_str!("../../../kernels/dense_product.cu"), headers: &[BASE] };

/// The one argument of all kernels of the file. What a kernel does not read is zero.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub struct DenseArgs {
    /// Address of what is read.
    pub input: u64,
    /// Address of the norm's weight, of what is added, or of two counts of block scales.
    pub other: u64,
    /// Address of what is written.
    pub out: u64,
    /// Address of a u32: how many rows there are, where only the device knows; 0 elsewhere.
    pub live_rows: u64,
    /// Rows, or the most that there may be.
    pub num_rows: u64,
    /// Values of a row.
    pub width: u32,
    /// bf16 parts of a value.
    pub num_parts: u32,
    /// The norm's epsilon, or the `input_scale` of NVFP4.
    pub constant: f32,
    /// Fills the struct.
    pub unused: u32,
}

/// The kernels of the file, which all architectures and layers share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DenseKernels;

impl DenseKernels {
    /// f32 to bf16 planes.
    pub const SPLIT_PARTS: &'static str = "split_parts";
    /// bf16 rows to f32.
    pub const WIDEN_ROWS: &'static str = "widen_rows";
    /// f32 rows through NVFP4, to bf16.
    pub const QUANTISE_ROWS: &'static str = "quantise_rows";
    /// The norm of rows, to bf16.
    pub const RMS_NORM: &'static str = "rms_norm";
    /// One row onto another.
    pub const ADD_ROWS: &'static str = "add_rows";
    /// Threads of a block.
    pub const NUM_THREADS: u32 = 256;

    /// What to compile.
    #[must_use]
    pub fn request(self, arch: Arch) -> KernelRequest {
        KernelRequest::new(SOURCE, arch).with_arguments::<DenseArgs>()
    }
}

/// The one argument of `kernels/dense_product.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct DenseProductArgs {
    /// Address of bf16 `[num_weight_parts, num_features, width]`.
    pub weights: u64,
    /// Address of bf16 `[num_x_parts, num_rows, width]`.
    pub x: u64,
    /// Address of f32 `[num_rows, num_features]`.
    pub out: u64,
    /// Address of a u32: how many rows there are, where only the device knows; 0 elsewhere.
    pub live_rows: u64,
    /// Rows of a part of `x`: as many as there are, or may be.
    pub num_rows: u64,
    /// Rows of the weight.
    pub num_features: u32,
    /// What is summed; a multiple of 8.
    pub width: u32,
    /// bf16 parts that the weight is made of.
    pub num_weight_parts: u32,
    /// bf16 parts that `x` is made of.
    pub num_x_parts: u32,
}

/// Our own product, for any weight. Both variants have one order of sums, whatever the number of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseProduct {
    /// Tiles of 16 rows.
    Few,
    /// Tiles of 64 rows.
    Many,
}

impl DenseProduct {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Few, Self::Many];
    /// The kernel's name in its module.
    pub const FUNCTION: &'static str = "dense_product";
    /// Threads of a block.
    pub const NUM_THREADS: u32 = 128;
    /// Weight rows of a tile.
    const BLOCK_FEATURES: u32 = 64;
    const NUM_STAGES: u32 = 4;

    /// The one for a number of rows.
    #[must_use]
    pub fn of(num_rows: usize) -> Self {
        if num_rows <= 16 { Self::Few } else { Self::Many }
    }

    fn block_rows(self) -> u32 {
        match self {
            Self::Few => 16,
            Self::Many => 64,
        }
    }

    /// Dynamic shared memory of a block.
    #[must_use]
    pub fn shared_bytes(self) -> u32 {
        Self::NUM_STAGES * (Self::BLOCK_FEATURES + self.block_rows()) * 128
    }

    /// Tiles of a product.
    #[must_use]
    pub fn num_tiles(self, num_rows: usize, num_features: usize) -> usize {
        num_rows.div_ceil(self.block_rows() as usize) * num_features.div_ceil(Self::BLOCK_FEATURES as usize)
    }

    /// What to compile.
    #[must_use]
    pub fn request(self, arch: Arch) -> KernelRequest {
        KernelRequest::new(PRODUCT, arch)
            .with_arguments::<DenseProductArgs>()
            .with("BLOCK_ROWS", self.block_rows())
            .with("NUM_STAGES", Self::NUM_STAGES)
            .with("SHARED_BYTES", self.shared_bytes())
    }
}
