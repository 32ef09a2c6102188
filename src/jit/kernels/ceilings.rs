//! A reading of memory alone, beside which weights are timed: `kernels/ceilings.cu`.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::KernelRequest;
use super::super::source::{BASE, HOPPER, KernelSource};

const SOURCE: KernelSource =
    KernelSource { name: "ceilings", main: include_str!("../../../kernels/ceilings.cu"), headers: &[BASE, HOPPER] };

/// The kernel's one argument.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub struct ReadArgs {
    /// Address of what is read.
    pub data: u64,
    /// Its size, a multiple of 16.
    pub num_bytes: u64,
    /// Address of a u32, which may be written.
    pub sink: u64,
}

const _: () = assert!(size_of::<ReadArgs>() == 24, "kernels/ceilings.cu has the same struct");

/// Reads every byte of a buffer once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadAll;

impl ReadAll {
    /// The kernel's name in its module.
    pub const FUNCTION: &'static str = "read_all";
    /// Threads of a block.
    pub const NUM_THREADS: u32 = 256;

    /// Whether it copies to shared memory. Blackwell's workstation parts have too little of that.
    fn is_bulk(arch: Arch) -> bool {
        matches!(arch, Arch::Sm90a | Arch::Sm100a | Arch::Sm103a)
    }

    /// Dynamic shared memory of a block.
    #[must_use]
    pub fn shared_bytes(arch: Arch) -> u32 {
        if Self::is_bulk(arch) { 8 * 3 * 8192 } else { 0 }
    }

    /// Blocks that a multiprocessor is given.
    #[must_use]
    pub fn blocks_per_multiprocessor(arch: Arch) -> u32 {
        if Self::is_bulk(arch) { 1 } else { 8 }
    }

    /// What to compile.
    #[must_use]
    pub fn request(arch: Arch) -> KernelRequest {
        KernelRequest::new(SOURCE, arch)
            .with_arguments::<ReadArgs>()
            .with("BULK", Self::is_bulk(arch))
            .with("SHARED_BYTES", Self::shared_bytes(arch))
    }
}

pub(super) fn all(arch: Arch) -> Vec<KernelRequest> {
    vec![ReadAll::request(arch)]
}
