//! Tokens to experts and rows back, on the device: `kernels/dispatch.cu`, `kernels/receive.cu`, `kernels/combine.cu`.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::KernelRequest;
use super::super::source::{
    BASE, HEAR, KernelSource, LIVE, NVFP4, PACK_VALUES, PAYLOAD, PEERS, PLACEMENT, REQUANTISE, SETTLE, TILES,
    UNPACK_VALUES,
};
use super::few;
use super::live::SettleArgs;
use super::nvlink::{Hear, Raise, Run, Tell};
use crate::cuda::LaunchShape;
use crate::dispatch::combine::CombineMode;
use crate::dispatch::layout::{CombineForm, PayloadForm};
use crate::dispatch::region::MAX_PEERS;

const DISPATCH: KernelSource = KernelSource {
    name: "dispatch",
    main: include_str!("../../../kernels/dispatch.cu"),
    headers: &[BASE, HEAR, NVFP4, PACK_VALUES, PAYLOAD, PEERS, PLACEMENT, REQUANTISE, TILES],
};
const RECEIVE: KernelSource = KernelSource {
    name: "receive",
    main: include_str!("../../../kernels/receive.cu"),
    headers: &[BASE, HEAR, LIVE, NVFP4, PAYLOAD, PEERS, REQUANTISE, SETTLE, TILES, UNPACK_VALUES],
};
const COMBINE: KernelSource = KernelSource {
    name: "combine",
    main: include_str!("../../../kernels/combine.cu"),
    headers: &[BASE, HEAR, PEERS, TILES],
};

/// Threads of a block, at most.
pub const NUM_THREADS: u32 = 256;
/// Threads of a warp.
const WARP: u32 = 32;
/// Words of shared memory that need not be asked for.
const SHARED_WORDS: u32 = 40 << 10 >> 2;
/// Dynamic shared memory of `pack_tokens`, for each slot of a token.
pub const PACK_BYTES_PER_SLOT: u32 = 40;

/// `kPieceColumns` and `kBlocks` of `kernels/combine.cu`.
const PIECE_COLUMNS: usize = 128;
const COMBINE_BLOCKS: usize = 2;

/// The launch of a kernel of `kernels/combine.cu` for up to `num_rows` tokens or rows on so many multiprocessors: a piece of a token
/// for a warp of each block, as far as blocks run at once. `least` blocks at least.
#[must_use]
pub fn combine_shape((num_rows, hidden): (usize, usize), num_multiprocessors: usize, least: usize) -> LaunchShape {
    let num_pieces = num_rows.saturating_mul(hidden.div_ceil(PIECE_COLUMNS));
    let num_blocks = num_pieces.min(num_multiprocessors * COMBINE_BLOCKS).max(least);
    LaunchShape::rows(u32::try_from(num_blocks).unwrap_or(u32::MAX), NUM_THREADS)
}

/// A block that walks a tile: each warp a part, with so many words for its counts, and so many for all.
fn tile_block(of_warp: u32, of_all: u32) -> (u32, u32) {
    // Two at least: a thread for each rank that is heard.
    let num_warps = (SHARED_WORDS.saturating_sub(of_all) / of_warp.max(1)).clamp(2, NUM_THREADS / WARP);
    (num_warps * WARP, 4 * (num_warps * of_warp + of_all))
}

/// Threads of a block of `count_tokens`, and its dynamic shared memory, in bytes.
#[must_use]
pub fn count_block(num_ranks: u32) -> (u32, u32) {
    tile_block(3 * num_ranks, 4 * num_ranks)
}

/// The same of `index_slots`.
#[must_use]
pub fn index_block(num_experts: u32) -> (u32, u32) {
    tile_block(num_experts + 1, 0)
}

/// The argument of `count_tokens` and `pack_tokens`; see the struct of that name in `kernels/dispatch.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct DispatchArgs {
    pub rooms: [u64; MAX_PEERS],
    pub raise: Raise,
    pub hear: Hear,
    pub tell: Tell,
    pub values: u64,
    pub ids: u64,
    pub weights: u64,
    pub entries: u64,
    pub totals: u64,
    pub host_totals: u64,
    pub starts: u64,
    pub tiles: u64,
    pub scratch: u64,
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
    pub num_tiles: u32,
    pub num_host_words: u32,
    pub per_slot: u32,
    pub input_scale: f32,
}

/// The argument of `index_slots` and `unpack_tokens`; see the struct of that name in `kernels/receive.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct ReceiveArgs {
    pub packed: [Run; MAX_PEERS],
    pub hear: Hear,
    pub settle: SettleArgs,
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
    pub totals: u64,
    pub host_totals: u64,
    pub host_told: u64,
    pub row_bytes: u64,
    pub num_tokens: u32,
    pub num_topk: u32,
    pub num_experts: u32,
    pub num_tiles: u32,
    pub num_totals: u32,
    pub num_told: u32,
    pub input_scale: f32,
    pub padding: u32,
}

/// The argument of the kernels of `kernels/combine.cu`; see the struct of that name there.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct CombineArgs {
    pub owner: Half,
    pub home: Half,
    pub home_rows: u64,
    pub sums: u64,
    pub out: [Run; MAX_PEERS],
    pub live_out: u64,
    pub raise: Raise,
    pub hear: Hear,
    pub num_topk: u32,
    pub padding: u32,
}

/// A part of it; see the struct of that name there.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct Half {
    pub rows: u64,
    pub slot_row: u64,
    pub weights: u64,
    pub live_tokens: u64,
    pub num_tokens: u64,
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
    /// How rows come back, each by itself or added up.
    pub form: CombineForm,
    /// Which of the two.
    pub mode: CombineMode,
}

impl TravelKernels {
    /// Numbers what leaves, inside tiles of tokens, and tells of it.
    pub const COUNT: &'static str = "count_tokens";
    /// Packs what leaves.
    pub const PACK: &'static str = "pack_tokens";
    /// Numbers what has arrived, inside tiles of tokens.
    pub const INDEX: &'static str = "index_slots";
    /// Unpacks what has arrived.
    pub const UNPACK: &'static str = "unpack_tokens";
    /// Rows of slots, or sums of tokens, on their way back.
    pub const GIVE_BACK: &'static str = "give_back";
    /// Rows of slots, or sums of ranks, at home.
    pub const ADD: &'static str = "add";
    /// Both in one, between ranks that store into each other's memory.
    pub const EXCHANGE: &'static str = "exchange";
    /// Both in one, of a rank alone.
    pub const ADD_OWN: &'static str = "add_own";

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
        KernelRequest::new(RECEIVE, arch)
            .with_arguments::<ReceiveArgs>()
            .with("HIDDEN", self.hidden)
            .with("PAYLOAD_BITS", self.payload_bits())
            .with("QUANTISE", self.quantises_arrived())
    }

    /// Whether values go through NVFP4 where they arrive, not having travelled in it.
    fn quantises_arrived(&self) -> bool {
        self.quantise && !matches!(self.payload, PayloadForm::Nvfp4 { .. })
    }

    /// The kernel of a few tokens between devices that store into each other's memory.
    #[must_use]
    pub fn few(&self, arch: Arch) -> KernelRequest {
        few::request(arch)
            .with("HIDDEN", self.hidden)
            .with("PAYLOAD_BITS", self.payload_bits())
            .with("QUANTISE", self.quantises_arrived())
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
            .with("PER_SLOT", self.mode == CombineMode::Slot)
    }

    /// All of them that one level has.
    #[must_use]
    pub fn requests(&self, arch: Arch) -> [KernelRequest; 4] {
        [self.dispatch(arch), self.receive(arch), self.combine(arch), self.few(arch)]
    }
}

/// Every form in which tokens and rows travel, for Kimi K3's latent and an odd width.
pub(super) fn all(arch: Arch) -> Vec<KernelRequest> {
    let nvfp4 = PayloadForm::Nvfp4 { input_scale: 1.0 };
    let forms = [
        (PayloadForm::F32, false, CombineForm::F32, CombineMode::Slot),
        (PayloadForm::F32, true, CombineForm::Bf16, CombineMode::Rank),
        (PayloadForm::Bf16, false, CombineForm::F32, CombineMode::Rank),
        (PayloadForm::Bf16, true, CombineForm::Bf16, CombineMode::Slot),
        (nvfp4, true, CombineForm::F32, CombineMode::Slot),
    ];
    let mut all: Vec<KernelRequest> = Vec::new();
    for hidden in [3584, 48] {
        let of_form = |(payload, quantise, form, mode)| {
            let kernels = TravelKernels { hidden, payload, quantise, form, mode };
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
