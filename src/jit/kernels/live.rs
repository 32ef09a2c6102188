//! Numbers of a step that only the device knows, and what finds them: `kernels/settle.cuh`.

use bytemuck::{Pod, Zeroable};

use super::nvlink::Run;
use crate::dispatch::region::MAX_PEERS;

/// What lies on the device; see the struct of that name in `kernels/live.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernels' header says what each is")]
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
#[expect(missing_docs, reason = "the kernels' header says what each is")]
pub struct FromHost {
    pub word: u64,
    pub num_tokens: u32,
    pub unused: u32,
}

/// Where what comes is told and settled; see the struct of that name in `kernels/settle.cuh`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernels' header says what each is")]
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

impl SettleArgs {
    /// Nothing is settled.
    #[must_use]
    pub fn none() -> Self {
        Self::zeroed()
    }
}
