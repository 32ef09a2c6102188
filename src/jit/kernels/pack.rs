//! Weight rows into the image that grouped GEMM kernels read: `kernels/pack.cu`.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::KernelRequest;
use super::super::source::{BASE, KernelSource, WEIGHTS};

const SOURCE: KernelSource =
    KernelSource { name: "pack", main: include_str!("../../../kernels/pack.cu"), headers: &[BASE, WEIGHTS] };

/// The kernels' one argument.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub struct PackArgs {
    /// Addresses of the rows of a tile's halves, aligned to 16 bytes: gate's and up's for FC1, twice the same for FC2;
    /// `[num_rows, width / 2]` codes, or `[num_rows, width]` bf16.
    pub rows: [u64; 2],
    /// Addresses of `[num_rows, width / 16]` e4m3, no NaN among them; unused for bf16.
    pub scales: [u64; 2],
    /// Address of `[num_units, ceil(width / 64), step]`, all of which is written.
    pub image: u64,
    /// Units of 32 rows.
    pub num_units: u32,
    /// Rows of each half's matrix that are there; those behind them are zero.
    pub num_rows: u32,
    /// The summed dimension; a multiple of 16.
    pub width: u32,
    /// 1: a unit takes 16 rows of each half's matrix (FC1); 0: 32 of one (FC2).
    pub is_pair: u32,
}

/// The kernels.
#[derive(Debug, Clone, Copy)]
pub struct PackKernels;

impl PackKernels {
    /// The kernel of NVFP4 weights in its module.
    pub const NVFP4: &'static str = "pack_nvfp4";
    /// The kernel of bf16 weights.
    pub const BF16: &'static str = "pack_bf16";
    /// Threads of a block; a warp takes a step of a unit at a time.
    pub const NUM_THREADS: u32 = 256;

    /// What to compile.
    #[must_use]
    pub fn request(self, arch: Arch) -> KernelRequest {
        KernelRequest::new(SOURCE, arch).with_arguments::<PackArgs>()
    }
}
