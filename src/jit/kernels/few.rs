//! A few tokens to experts in one launch: `kernels/few.cu`.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::KernelRequest;
use super::super::source::{
    BASE, FEW, FEW_SEND, FEW_TAKE, HEAR, KernelSource, LIVE, NVFP4, PACK_VALUES, PAYLOAD, PEERS, PLACEMENT, REQUANTISE,
    TILES, UNPACK_VALUES,
};
use super::nvlink::Hear;
use crate::dispatch::layout::PayloadForm;

const SOURCE: KernelSource = KernelSource {
    name: "few",
    main: include_str!("../../../kernels/few.cu"),
    headers: &[
        BASE,
        FEW,
        FEW_SEND,
        FEW_TAKE,
        HEAR,
        LIVE,
        NVFP4,
        PACK_VALUES,
        PAYLOAD,
        PEERS,
        PLACEMENT,
        REQUANTISE,
        TILES,
        UNPACK_VALUES,
    ],
};

/// The argument of `carry_few`; see the struct of that name in `kernels/few.cuh`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct FewArgs {
    pub hear: Hear,
    pub values: u64,
    pub ids: u64,
    pub weights: u64,
    pub live_tokens: u64,
    pub totals: u64,
    pub host_totals: u64,
    pub of_step: u64,
    pub home_rows: u64,
    pub counts: u64,
    pub live: u64,
    pub expert_offsets: u64,
    pub tokens: u64,
    pub received_weights: u64,
    pub row_token: u64,
    pub return_rows: u64,
    pub slot_row: u64,
    pub host_counts: u64,
    pub counts_at: u64,
    pub tagged_at: u64,
    pub tagged_bytes: u64,
    pub home_at: u64,
    pub row_bytes: u64,
    pub return_bytes: u64,
    pub num_tokens: u32,
    pub max_tokens: u32,
    pub num_topk: u32,
    pub num_experts: u32,
    pub num_local_experts: u32,
    pub num_words: u32,
    pub num_heard: u32,
    pub per_slot: u32,
    pub num_send_blocks: u32,
    pub num_take_blocks: u32,
    pub input_scale: f32,
    pub arrived_scale: f32,
}

/// Its name in its module.
pub const FUNCTION: &str = "carry_few";
/// `kThreads` of `kernels/few.cuh`.
pub const NUM_THREADS: u32 = 512;

/// What to compile, but for the layer's forms.
pub(super) fn request(arch: Arch) -> KernelRequest {
    KernelRequest::new(SOURCE, arch).with_arguments::<FewArgs>()
}

/// Blocks of a token's values, of which each thread has a piece, in values: `kPieceValues` of `kernels/pack_values.cuh`,
/// `kReadValues` of `kernels/unpack_values.cuh`.
fn num_parts(hidden: usize, piece_values: usize) -> u32 {
    u32::try_from((hidden / piece_values).div_ceil(NUM_THREADS as usize)).unwrap_or(u32::MAX)
}

/// Blocks that send `num_tokens` tokens: one that tells, and of each token one for its slots and those for its values.
#[must_use]
pub fn num_send_blocks(num_tokens: u32, hidden: usize, payload: PayloadForm) -> u32 {
    let piece_values = match payload {
        PayloadForm::F32 => 4,
        PayloadForm::Bf16 => 8,
        PayloadForm::Nvfp4 { .. } => 16,
    };
    1 + num_tokens * (1 + num_parts(hidden, piece_values))
}

/// Blocks that take up to `num_tokens` tokens of all ranks: one for the index, one that hands counts on, and those for values,
/// which go on to further ones where they are not to be more than `most`.
#[must_use]
pub fn num_take_blocks(num_tokens: u32, hidden: usize, (payload, quantise): (PayloadForm, bool), most: u32) -> u32 {
    let piece_values = match payload {
        PayloadForm::Nvfp4 { .. } => 16,
        _ if quantise => 16,
        PayloadForm::F32 => 4,
        PayloadForm::Bf16 => 8,
    };
    (2 + num_tokens * num_parts(hidden, piece_values)).min(most.max(3))
}
