//! Tokens to experts and rows back, on the device: `kernels/dispatch.cu`, `kernels/receive.cu`, `kernels/combine.cu`.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::KernelRequest;
use super::super::source::{BASE, KernelSource, NVFP4, PAYLOAD, PEERS, REQUANTISE, TILES};
use super::nvlink::{Raise, Run};
use crate::dispatch::layout::{CombineForm, PayloadForm};
use crate::dispatch::region::MAX_PEERS;

const DISPATCH: KernelSource = KernelSource {
    name: "dispatch",
    main: include_str!("../../../kernels/dispatch.cu"),
    headers: &[BASE, NVFP4, PAYLOAD, PEERS, TILES],
};
const RECEIVE: KernelSource = KernelSource {
    name: "receive",
    main: include_str!("../../../kernels/receive.cu"),
    headers: &[BASE, NVFP4, PAYLOAD, PEERS, REQUANTISE, TILES],
};
const COMBINE: KernelSource =
    KernelSource { name: "combine", main: include_str!("../../../kernels/combine.cu"), headers: &[BASE, PEERS, TILES] };

/// Threads of a block, but for the kernels that walk tiles.
pub const NUM_THREADS: u32 = 256;
/// Threads of a block that walks a tile; columns of a block of as many threads as others are that much fewer.
pub const WARP: u32 = 32;
/// Dynamic shared memory of `count_tokens`, for each rank.
pub const COUNT_BYTES_PER_RANK: u32 = 12;
/// Dynamic shared memory of `pack_tokens`, for each slot of a token.
pub const PACK_BYTES_PER_SLOT: u32 = 40;
/// Dynamic shared memory of `index_slots`, for each local expert.
pub const INDEX_BYTES_PER_EXPERT: u32 = 4;

/// The argument of `count_tokens`, `sum_tiles` and `pack_tokens`; see the struct of that name in `kernels/dispatch.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct DispatchArgs {
    pub rooms: [u64; MAX_PEERS],
    pub raise: Raise,
    pub values: u64,
    pub ids: u64,
    pub weights: u64,
    pub entries: u64,
    pub totals: u64,
    pub tiles: u64,
    pub slot_token: u64,
    pub slot_row: u64,
    pub packed: u64,
    pub home_rows: u64,
    pub counts: u64,
    pub live_tokens: u64,
    pub row_bytes: u64,
    pub value_bytes: u64,
    pub slot_stride: u64,
    pub num_tokens: u32,
    pub num_topk: u32,
    pub num_ranks: u32,
    pub num_experts: u32,
    pub tile_tokens: u32,
    pub num_tiles: u32,
    pub per_slot: u32,
    pub input_scale: f32,
}

/// The argument of `index_slots`, `sum_tiles` and `unpack_tokens`; see the struct of that name in `kernels/receive.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct ReceiveArgs {
    pub packed: [Run; MAX_PEERS],
    pub live_packed: u64,
    pub live_tokens: u64,
    pub expert_offsets: u64,
    pub tiles: u64,
    pub slot_place: u64,
    pub slot_order: u64,
    pub tokens: u64,
    pub weights: u64,
    pub row_token: u64,
    pub return_rows: u64,
    pub slot_row: u64,
    pub counts: u64,
    pub row_bytes: u64,
    pub num_tokens: u32,
    pub num_topk: u32,
    pub num_experts: u32,
    pub tile_tokens: u32,
    pub num_tiles: u32,
    pub input_scale: f32,
}

/// The argument of the kernels of `kernels/combine.cu`; see the struct of that name there.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct CombineArgs {
    pub rows: u64,
    pub slot_row: u64,
    pub weights: u64,
    pub out: [Run; MAX_PEERS],
    pub raise: Raise,
    pub live_out: u64,
    pub live_tokens: u64,
    pub num_tokens: u64,
    pub num_topk: u32,
    pub padding: u32,
}

/// What the kernels of a layer's way to experts and back are made for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TravelKernels {
    /// Width of a token; a multiple of 16.
    pub hidden: u32,
    /// How tokens travel. The scale in it decides no kernel.
    pub payload: PayloadForm,
    /// Whether tokens that travel unquantised go through NVFP4 where they arrive.
    pub quantise: bool,
    /// How rows come back.
    pub form: CombineForm,
}

impl TravelKernels {
    /// Numbers what leaves, inside tiles of tokens.
    pub const COUNT: &'static str = "count_tokens";
    /// Sums over tiles, of either side.
    pub const SUM: &'static str = "sum_tiles";
    /// Packs what leaves.
    pub const PACK: &'static str = "pack_tokens";
    /// Numbers what has arrived, inside tiles of tokens.
    pub const INDEX: &'static str = "index_slots";
    /// Unpacks what has arrived.
    pub const UNPACK: &'static str = "unpack_tokens";
    /// Rows of slots, on their way back.
    pub const RETURN_SLOTS: &'static str = "return_slots";
    /// Sums of tokens, on their way back.
    pub const RETURN_SUMS: &'static str = "return_sums";
    /// Rows of slots, at home.
    pub const ADD_SLOTS: &'static str = "add_slots";
    /// Sums of ranks, at home.
    pub const ADD_SUMS: &'static str = "add_sums";

    fn payload_bits(&self) -> u32 {
        match self.payload {
            PayloadForm::F32 => 32,
            PayloadForm::Bf16 => 16,
            PayloadForm::Nvfp4 { .. } => 4,
        }
    }

    /// The kernels of what leaves.
    #[must_use]
    pub fn dispatch(&self, arch: Arch) -> KernelRequest {
        self.leaving(arch, false)
    }

    /// The kernels of what is passed on.
    #[must_use]
    pub fn forward(&self, arch: Arch) -> KernelRequest {
        self.leaving(arch, true)
    }

    fn leaving(&self, arch: Arch, is_encoded: bool) -> KernelRequest {
        KernelRequest::new(DISPATCH, arch)
            .with_arguments::<DispatchArgs>()
            .with("HIDDEN", self.hidden)
            .with("PAYLOAD_BITS", self.payload_bits())
            .with("ENCODED", is_encoded)
    }

    /// The kernels of what arrives.
    #[must_use]
    pub fn receive(&self, arch: Arch) -> KernelRequest {
        let is_quantised = matches!(self.payload, PayloadForm::Nvfp4 { .. });
        KernelRequest::new(RECEIVE, arch)
            .with_arguments::<ReceiveArgs>()
            .with("HIDDEN", self.hidden)
            .with("PAYLOAD_BITS", self.payload_bits())
            .with("QUANTISE", self.quantise && !is_quantised)
    }

    /// The kernels of the way back.
    #[must_use]
    pub fn combine(&self, arch: Arch) -> KernelRequest {
        let bits = match self.form {
            CombineForm::F32 => 32_u32,
            CombineForm::Bf16 => 16,
        };
        KernelRequest::new(COMBINE, arch)
            .with_arguments::<CombineArgs>()
            .with("HIDDEN", self.hidden)
            .with("RETURN_BITS", bits)
    }

    /// All of them that one level has.
    #[must_use]
    pub fn requests(&self, arch: Arch) -> [KernelRequest; 3] {
        [self.dispatch(arch), self.receive(arch), self.combine(arch)]
    }
}

/// Every form in which tokens and rows travel, for Kimi K3's latent and an odd width.
pub(super) fn all(arch: Arch) -> Vec<KernelRequest> {
    let nvfp4 = PayloadForm::Nvfp4 { input_scale: 1.0 };
    let forms = [
        (PayloadForm::F32, false, CombineForm::F32),
        (PayloadForm::F32, true, CombineForm::Bf16),
        (PayloadForm::Bf16, false, CombineForm::F32),
        (PayloadForm::Bf16, true, CombineForm::F32),
        (nvfp4, true, CombineForm::F32),
    ];
    let mut all: Vec<KernelRequest> = Vec::new();
    for hidden in [3584, 48] {
        let of_form = |(payload, quantise, form)| {
            let kernels = TravelKernels { hidden, payload, quantise, form };
            kernels.requests(arch).into_iter().chain([kernels.forward(arch)])
        };
        for request in forms.into_iter().flat_map(of_form) {
            if !all.contains(&request) {
                all.push(request);
            }
        }
    }
    all
}
