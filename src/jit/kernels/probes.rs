//! Parts of the grouped GEMM's epilogue alone, for tests: `kernels/probes.cu`.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::KernelRequest;
use super::super::source::{ACTIVATION, BASE, KernelSource, NVFP4, REQUANTISE};
use super::grouped_gemm::with_activation;
use crate::numerics::activation::Activation;

const SOURCE: KernelSource = KernelSource {
    name: "probes",
    main: include_str!("../../../kernels/probes.cu"),
    headers: &[ACTIVATION, BASE, NVFP4, REQUANTISE],
};

/// The one argument of either kernel.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct ProbeArgs {
    /// Address of gate values, or of what is quantised: f32.
    pub x: u64,
    /// Address of up values.
    pub up: u64,
    /// Address of activations, or of `e2m1 * e4m3` products: f32.
    pub out: u64,
    /// Address of two u64, which are added to: block scales that saturated, and that became 0.
    pub counts: u64,
    /// Values, or blocks of 16.
    pub num_threads: u32,
    /// The global scale that values are quantised with.
    pub input_scale: f32,
}

/// The kernels of an activation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProbeVariant(pub Activation);

impl ProbeVariant {
    /// The activation of each value.
    pub const ACTIVATE: &'static str = "activate_values";
    /// Each block through NVFP4 and back.
    pub const REQUANTISE: &'static str = "requantise_blocks";

    /// What to compile.
    #[must_use]
    pub fn request(self, arch: Arch) -> KernelRequest {
        with_activation(KernelRequest::new(SOURCE, arch).with_arguments::<ProbeArgs>(), self.0)
    }
}

pub(super) fn all(arch: Arch) -> Vec<KernelRequest> {
    let activations = [
        Activation::Swiglu,
        Activation::SwigluClamp { limit: 10.0 },
        Activation::Situ { beta: 4.0, linear_beta: None },
        Activation::Situ { beta: 4.0, linear_beta: Some(25.0) },
    ];
    activations.map(|activation| ProbeVariant(activation).request(arch)).to_vec()
}
