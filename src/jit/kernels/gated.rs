//! The activation between two dense products: `kernels/gated.cu`.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::KernelRequest;
use super::super::source::{ACTIVATION, BASE, KernelSource};
use super::grouped_gemm::with_activation;
use crate::numerics::activation::Activation;

const SOURCE: KernelSource =
    KernelSource { name: "gated", main: include_str!("../../../kernels/gated.cu"), headers: &[ACTIVATION, BASE] };

/// The kernel's one argument.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct GatedArgs {
    /// Address of f32 `[num_rows, 2, width]`: gate, then up.
    pub products: u64,
    /// Address of bf16 `[num_rows, width]`.
    pub inner: u64,
    /// Address of three u64, which are added to: two that stay as they are, and rows stored.
    pub counts: u64,
    /// Address of a u32: how many rows there are, where only the device knows; 0 elsewhere.
    pub live_rows: u64,
    /// Rows, or the most that there may be.
    pub num_rows: u64,
    /// Width between FC1 and FC2; a multiple of 4.
    pub width: u32,
    /// Fills the struct.
    pub unused: u32,
}

/// The kernel with an activation's constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gated {
    /// What it computes.
    pub activation: Activation,
}

impl Gated {
    /// The kernel's name in its module.
    pub const FUNCTION: &'static str = "activate_rows";
    /// Threads of a block.
    pub const NUM_THREADS: u32 = 256;
    /// Values that a thread takes at once.
    pub const VALUES_A_THREAD: usize = 4;

    /// What to compile.
    #[must_use]
    pub fn request(self, arch: Arch) -> KernelRequest {
        with_activation(KernelRequest::new(SOURCE, arch).with_arguments::<GatedArgs>(), self.activation)
    }
}

/// The activation of every model that there is.
pub(super) fn all(arch: Arch) -> Vec<KernelRequest> {
    let situ = Activation::Situ { beta: 4.0, linear_beta: Some(25.0) };
    [situ, Activation::Swiglu].map(|activation| Gated { activation }.request(arch)).to_vec()
}
