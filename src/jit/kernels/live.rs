//! Numbers of a step that only the device knows, and the kernel that finds them: `kernels/settle.cu`.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::KernelRequest;
use super::super::source::{BASE, KernelSource, PEERS};
use super::nvlink::Run;
use crate::cuda::LaunchShape;
use crate::dispatch::region::MAX_PEERS;

const SOURCE: KernelSource =
    KernelSource { name: "settle", main: include_str!("../../../kernels/settle.cu"), headers: &[BASE, PEERS] };

/// What lies on the device; see the struct of that name in `kernels/settle.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct Live {
    pub from_host: FromHost,
    pub num_received: u32,
    pub num_rows: u32,
    pub is_over: u32,
    pub padding: u32,
    pub arrived: [Run; MAX_PEERS],
    pub homes: [Run; MAX_PEERS],
}

/// Its beginning, which the host writes before every step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct FromHost {
    pub word: u64,
    pub num_tokens: u32,
    pub unused: u32,
}

/// The kernel's one argument; see the struct of that name in `kernels/settle.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct SettleArgs {
    pub homes: [u64; MAX_PEERS],
    pub told: u64,
    pub live: u64,
    pub expert_offsets: u64,
    pub arrived_at: u64,
    pub room_bytes: u64,
    pub row_bytes: u64,
    pub return_bytes: u64,
    pub num_words: u32,
    pub num_ranks: u32,
    pub num_experts: u32,
    pub per_slot: u32,
    pub max_tokens: u32,
    pub max_rows: u32,
}

/// The kernel, which all layers share.
#[derive(Debug, Clone, Copy)]
pub struct Settle;

impl Settle {
    /// Its name in its module.
    pub const FUNCTION: &'static str = "settle";
    /// How it is launched.
    pub const SHAPE: LaunchShape = LaunchShape::rows(1, 1024);

    /// What to compile.
    #[must_use]
    pub fn request(self, arch: Arch) -> KernelRequest {
        KernelRequest::new(SOURCE, arch).with_arguments::<SettleArgs>()
    }
}
