//! Activations to NVFP4: `kernels/quantise.cu`.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::KernelRequest;
use super::super::source::{KernelSource, NVFP4};

const SOURCE: KernelSource =
    KernelSource { name: "quantise", main: include_str!("../../../kernels/quantise.cu"), headers: &[NVFP4] };

/// The kernel's one argument. Rows may lie inside larger ones, such as a travelling token's.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct QuantiseArguments {
    /// Address of the first row: bf16 or f32, as the variant says.
    pub input: u64,
    /// Address of the first row's codes: two a byte, the even element in the low nibble.
    pub packed: u64,
    /// Address of the first row's e4m3 scales, one a block of 16.
    pub scales: u64,
    /// Address of two u64, which the kernel adds to: blocks with a clipped scale, and blocks that vanished.
    pub counts: u64,
    /// From row to row of the input, in bytes; a multiple of 16, as is its address.
    pub input_stride: u64,
    /// From row to row of the codes, in bytes; a multiple of 8, as is their address.
    pub packed_stride: u64,
    /// From row to row of the scales, in bytes.
    pub scales_stride: u64,
    /// Rows.
    pub num_rows: u64,
    /// Blocks of 16 values a row.
    pub num_blocks: u32,
    /// The activations' global scale, a multiplier.
    pub input_scale: f32,
}

const _: () = assert!(size_of::<QuantiseArguments>() == 72, "kernels/quantise.cu has the same struct");

/// What the rows are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantiseVariant {
    /// f32: K3's latent, FC2's input.
    F32,
    /// bf16: hidden states.
    Bf16,
}

impl QuantiseVariant {
    /// Both.
    pub const ALL: [Self; 2] = [Self::F32, Self::Bf16];

    /// The kernel's name in its module.
    pub const FUNCTION: &'static str = "quantise";

    /// Threads of a block.
    pub const NUM_THREADS: u32 = 256;

    /// What to compile.
    #[must_use]
    pub fn request(self, arch: Arch) -> KernelRequest {
        KernelRequest::new(SOURCE, arch).with_arguments::<QuantiseArguments>().with("INPUT_BF16", self == Self::Bf16)
    }
}
