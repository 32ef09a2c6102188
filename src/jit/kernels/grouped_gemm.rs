//! Grouped GEMM over experts: `kernels/grouped_gemm_{mma,wgmma,small,ranges}.cu`.

use std::fmt;

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::{Define, KernelRequest};
use super::super::source::{
    ACTIVATION, BASE, EXPERT, EXPERTS, GATHER, HOPPER, Header, IMAGE, KernelSource, NVFP4, RANGES_FEED, RANGES_ROWS,
    REQUANTISE, SMALL_FEED, SMALL_PLAN, STORE, TURNS, WEIGHTS, WGMMA_EPILOGUE, WGMMA_TILES,
};
use crate::numerics::activation::Activation;

const MMA: KernelSource = KernelSource {
    name: "grouped_gemm_mma",
    main: include_str!("../../../kernels/grouped_gemm_mma.cu"),
    headers: &[ACTIVATION, BASE, EXPERT, EXPERTS, NVFP4, REQUANTISE, STORE, WEIGHTS],
};
const WGMMA_HEADERS: &[Header] = &[
    ACTIVATION,
    BASE,
    EXPERT,
    EXPERTS,
    GATHER,
    HOPPER,
    IMAGE,
    NVFP4,
    REQUANTISE,
    STORE,
    TURNS,
    WEIGHTS,
    WGMMA_EPILOGUE,
    WGMMA_TILES,
];
const WGMMA: KernelSource = KernelSource {
    name: "grouped_gemm_wgmma",
    main: include_str!("../../../kernels/grouped_gemm_wgmma.cu"),
    headers: WGMMA_HEADERS,
};
const SMALL: KernelSource = KernelSource {
    name: "grouped_gemm_small",
    main: include_str!("../../../kernels/grouped_gemm_small.cu"),
    headers: &[
        ACTIVATION, BASE, EXPERT, EXPERTS, HOPPER, NVFP4, REQUANTISE, SMALL_FEED, SMALL_PLAN, STORE, TURNS, WEIGHTS,
    ],
};
const RANGES_HEADERS: &[Header] = &[
    ACTIVATION,
    BASE,
    EXPERT,
    EXPERTS,
    HOPPER,
    NVFP4,
    RANGES_FEED,
    RANGES_ROWS,
    REQUANTISE,
    SMALL_PLAN,
    STORE,
    TURNS,
    WEIGHTS,
];
const RANGES: KernelSource = KernelSource {
    name: "grouped_gemm_ranges",
    main: include_str!("../../../kernels/grouped_gemm_ranges.cu"),
    headers: RANGES_HEADERS,
};
/// Bytes of a step of 64 of K of a unit of 32 weight rows in NVFP4: codes and scales.
pub const NVFP4_STEP_BYTES: u32 = 1152;
/// The same in bf16.
pub const BF16_STEP_BYTES: u32 = 4096;
/// K of a step.
pub const STEP_K: u32 = 64;
/// Bytes of a row of one step.
pub const ROW_STEP_BYTES: u32 = STEP_K * 2;
/// Rows of a group of the image that FC1 gathers: an expert's rows are rounded up to it.
pub const IMAGE_GROUP_ROWS: u32 = 8;

/// One local expert, as `struct Expert` of `kernels/expert.cuh`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct ExpertEntry {
    /// Address of the image of gate with up; 0: the kernel leaves this expert's rows alone.
    pub fc1: u64,
    /// Address of the image of down.
    pub fc2: u64,
    /// Global scale of gate.
    pub gate_scale: f32,
    /// Global scale of up.
    pub up_scale: f32,
    /// Global scale of down.
    pub down_scale: f32,
    /// `input_scale` of down, where FC2's input goes through NVFP4.
    pub input_scale: f32,
}

const _: () = assert!(size_of::<ExpertEntry>() == 32, "kernels/expert.cuh has the same struct");

/// The one argument of all kernels here.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub struct GroupedGemmArgs {
    /// Address of `[num_experts]` entries.
    pub experts: u64,
    /// Address of `[num_experts + 1]` u32: where each expert's rows start.
    pub expert_offsets: u64,
    /// Address of `[num_rows]` u32: the token that each row reads.
    pub row_token: u64,
    /// Address of `[num_tokens, hidden]` bf16.
    pub tokens: u64,
    /// Address of the image of all rows, of schedules that gather one.
    pub image: u64,
    /// Address of a u32 for each group of [`IMAGE_GROUP_ROWS`] rows, each expert's rounded up; zero before and after: how much of
    /// the image, or of FC2's input, is there.
    pub gathered: u64,
    /// Address of FC2's input.
    pub inner: u64,
    /// Address of `[num_rows, hidden]` f32.
    pub out: u64,
    /// Address of three u64, which are added to: block scales that saturated, that became 0, rows stored.
    pub counts: u64,
    /// Address of [`Schedule::parts_bytes`] for each block: what its warps leave to each other.
    pub parts: u64,
    /// Address of a u32, zero before and after: tiles that wgmma schedules have given out.
    pub given_out: u64,
    /// Address of a [`Dealt`](super::deal::Dealt): what this launch does, where only the device knows that; 0 elsewhere.
    pub dealt: u64,
    /// Multiplies every token value.
    pub token_scale: f32,
    /// Local experts.
    pub num_experts: u32,
}

/// How an expert's weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Weights {
    /// Codes and block scales.
    Nvfp4,
    /// Values.
    Bf16,
}

/// What is computed; everything but how.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupedGemm {
    /// Width in and out; a multiple of 16.
    pub hidden: u32,
    /// Width between FC1 and FC2; a multiple of 16.
    pub intermediate: u32,
    /// Between them.
    pub activation: Activation,
    /// How weights are stored.
    pub weights: Weights,
    /// FC2's input goes through NVFP4.
    pub quantise: bool,
}

/// How it is computed, for so many rows a tile. The rows of one schedule have equal bits whatever `block_rows` is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Schedule {
    /// `grouped_gemm_mma.cu`: 8, 16, 32 or 64 rows.
    MmaSync {
        /// Rows a tile.
        block_rows: u32,
    },
    /// `grouped_gemm_wgmma.cu`: 64, 128 or 256 rows.
    Wgmma {
        /// Rows a tile.
        block_rows: u32,
    },
    /// `grouped_gemm_small.cu`: 8 or 16 rows.
    Small {
        /// Rows a tile.
        block_rows: u32,
    },
    /// `grouped_gemm_ranges.cu`, whose bits are those of `grouped_gemm_small.cu`: 16 rows, where slices of K are long.
    Ranges {
        /// Rows a tile.
        block_rows: u32,
    },
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MmaSync { block_rows } => write!(f, "mma-{block_rows}"),
            Self::Wgmma { block_rows } => write!(f, "wgmma-{block_rows}"),
            Self::Small { block_rows } => write!(f, "small-{block_rows}"),
            Self::Ranges { block_rows } => write!(f, "ranges-{block_rows}"),
        }
    }
}

/// How a kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Threads of a block.
    pub num_threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Blocks that a multiprocessor is given.
    pub blocks_per_multiprocessor: u32,
}

impl GroupedGemm {
    fn steps(width: u32) -> u32 {
        width.div_ceil(STEP_K)
    }

    /// Steps of FC1's K.
    #[must_use]
    pub fn fc1_steps(&self) -> u32 {
        Self::steps(self.hidden)
    }

    /// Steps of FC2's K.
    #[must_use]
    pub fn fc2_steps(&self) -> u32 {
        Self::steps(self.intermediate)
    }

    /// Rows of FC1's weights, gate and up.
    pub(super) fn fc1_weight_rows(&self) -> u32 {
        2 * self.intermediate
    }

    /// Bytes of an expert's weights, as they are stored.
    pub(super) fn expert_bytes(&self) -> u64 {
        let values = 3 * u64::from(self.hidden) * u64::from(self.intermediate);
        match self.weights {
            Weights::Nvfp4 => values * 9 / 16,
            Weights::Bf16 => values * 2,
        }
    }

    fn weight_step_bytes(&self) -> u32 {
        match self.weights {
            Weights::Nvfp4 => NVFP4_STEP_BYTES,
            Weights::Bf16 => BF16_STEP_BYTES,
        }
    }
}

/// Slices of K in the small schedules.
const SMALL_SLICES: u32 = 8;

/// How many warps of a small schedule have rings of slots, and how many steps one copies at once.
#[derive(Debug, Clone, Copy)]
struct SmallShape {
    warps: u32,
    most_slot_steps: u32,
}

impl SmallShape {
    /// Of `grouped_gemm_small.cu`: a slice a warp.
    const SLICES: Self = Self { warps: SMALL_SLICES, most_slot_steps: 7 };
    /// Of `grouped_gemm_ranges.cu`, whose rows lie in shared memory too: the first that leaves room for them.
    const RANGES: [Self; 2] = [Self { warps: 12, most_slot_steps: 4 }, Self { warps: 12, most_slot_steps: 3 }];
    /// What a block may have of dynamic shared memory there: a multiprocessor's, less 4 KB that the source declares.
    const MOST_BYTES: u32 = 227 * 1024 - 4096;

    /// One warp's slot.
    fn slot_bytes(self, gemm: &GroupedGemm) -> u32 {
        let slot_steps = |steps: u32| {
            let slice = steps.div_ceil(SMALL_SLICES);
            slice.div_ceil(slice.div_ceil(self.most_slot_steps))
        };
        slot_steps(gemm.fc1_steps()).max(slot_steps(gemm.fc2_steps())) * NVFP4_STEP_BYTES
    }

    /// Rows and rings of a block of `grouped_gemm_ranges.cu`.
    fn ranges_bytes(self, gemm: &GroupedGemm, block_rows: u32, stages: u32) -> u32 {
        let row_bytes = gemm.fc1_steps().max(gemm.fc2_steps()) * ROW_STEP_BYTES + 16;
        block_rows * row_bytes + self.warps * stages * self.slot_bytes(gemm)
    }
}

impl Schedule {
    /// FC1, where each product is a launch of its own.
    pub const FC1: &'static str = "fc1";
    /// FC2 likewise.
    pub const FC2: &'static str = "fc2";
    /// Both products in one launch, which is cooperative.
    pub const FC1_FC2: &'static str = "fc1_fc2";

    fn num_stages(self, gemm: &GroupedGemm) -> u32 {
        match (self, gemm.weights) {
            (Self::MmaSync { .. }, Weights::Nvfp4) => 4,
            // Two, so that consumer parts have the shared memory too.
            (Self::MmaSync { .. }, Weights::Bf16) => 2,
            (Self::Wgmma { block_rows: 64 | 256 }, Weights::Nvfp4) => 5,
            (Self::Wgmma { .. }, Weights::Nvfp4) => 7,
            (Self::Wgmma { block_rows: 128 | 256 }, Weights::Bf16) => 4,
            (Self::Wgmma { .. }, Weights::Bf16) => 5,
            (Self::Ranges { .. }, _) => 2,
            (Self::Small { .. }, _) => 3,
        }
    }

    /// Whether it gathers rows into an image, and writes FC2's input as one; others read tokens.
    #[must_use]
    pub const fn gathers(self) -> bool {
        matches!(self, Self::Wgmma { .. })
    }

    /// Rows of a tile.
    #[must_use]
    pub fn block_rows(self) -> u32 {
        match self {
            Self::MmaSync { block_rows }
            | Self::Wgmma { block_rows }
            | Self::Small { block_rows }
            | Self::Ranges { block_rows } => block_rows,
        }
    }

    /// Weight rows of a tile of a wgmma schedule.
    pub(super) fn weight_rows(self) -> u32 {
        if matches!(self, Self::Wgmma { block_rows: 256 }) { 128 } else { 256 }
    }

    /// The widths that a tile may be computed as: bit i is `16 (i + 1)` rows.
    ///
    /// NOTE: a tile of fewer rows takes less, and full ones hardly more for it. With one width more for 128 or 256 rows the
    /// compiler runs out of registers: it serialises wgmma, or spills.
    pub(super) fn width_bits(self) -> u32 {
        let widths: &[u32] = match self {
            Self::Wgmma { block_rows: 64 } => &[16, 32, 48, 64],
            Self::Wgmma { block_rows: 256 } => &[64, 96, 128, 160, 192, 256],
            _ => &[self.block_rows().next_multiple_of(16)],
        };
        widths.iter().fold(0, |bits, width| bits | 1 << (width / 16 - 1))
    }

    /// How it is launched; the sources assert the same.
    #[must_use]
    pub fn launch(self, gemm: &GroupedGemm) -> Launch {
        let stages = self.num_stages(gemm);
        let step_bytes = gemm.weight_step_bytes();
        match self {
            Self::MmaSync { block_rows } => {
                let warps = if block_rows == 64 && gemm.weights == Weights::Nvfp4 { 12 } else { 8 };
                Launch {
                    num_threads: warps * 32,
                    shared_bytes: stages * (warps * step_bytes + block_rows * ROW_STEP_BYTES),
                    blocks_per_multiprocessor: if block_rows == 64 { 1 } else { 2 },
                }
            }
            Self::Wgmma { block_rows } => {
                let tiles = if block_rows == 256 { 1 } else { 2 };
                let is_even = gemm.fc1_steps().is_multiple_of(2) && gemm.fc2_steps().is_multiple_of(2);
                let two_steps = gemm.weights == Weights::Nvfp4 && block_rows <= 64 && is_even;
                let stage_steps = if two_steps { 2 } else { 1 };
                let rows_bytes = block_rows * ROW_STEP_BYTES;
                let amax_bytes = if gemm.quantise && tiles == 1 { 8 * block_rows * 4 } else { 0 };
                let ring = stages * stage_steps * (rows_bytes + 4 * tiles * step_bytes);
                let shared_bytes = ring + tiles * rows_bytes + amax_bytes + 1024;
                let warpgroups = if block_rows == 256 { 3 } else { 4 };
                Launch { num_threads: warpgroups * 128, shared_bytes, blocks_per_multiprocessor: 1 }
            }
            Self::Small { block_rows } => {
                let shape = SmallShape::SLICES;
                let sums = shape.warps * block_rows * 32 * 4;
                let shared_bytes = shape.warps * stages * shape.slot_bytes(gemm) + 2 * sums;
                Launch { num_threads: shape.warps * 32, shared_bytes, blocks_per_multiprocessor: 1 }
            }
            Self::Ranges { block_rows } => {
                let shape = self.ranges_shape(gemm);
                let shared_bytes = shape.ranges_bytes(gemm, block_rows, stages);
                Launch { num_threads: shape.warps * 32, shared_bytes, blocks_per_multiprocessor: 1 }
            }
        }
    }

    fn ranges_shape(self, gemm: &GroupedGemm) -> SmallShape {
        let [first, last] = SmallShape::RANGES;
        let bytes = first.ranges_bytes(gemm, self.block_rows(), self.num_stages(gemm));
        if bytes <= SmallShape::MOST_BYTES { first } else { last }
    }

    /// Whether it is of few rows, whose K is cut into slices: an order over K of its own.
    #[must_use]
    pub fn is_small(self) -> bool {
        matches!(self, Self::Small { .. } | Self::Ranges { .. })
    }

    /// What each block's warps leave to each other: sums of as many slices as they could all have of units that several share.
    #[must_use]
    pub fn parts_bytes(self, gemm: &GroupedGemm) -> u32 {
        let sums = self.block_rows() * 32 * 4;
        if matches!(self, Self::Ranges { .. }) { self.ranges_shape(gemm).warps * SMALL_SLICES * sums } else { 0 }
    }

    /// Whether there is such a kernel: the small ones keep a slice of a row's values in registers, or all rows in shared memory.
    ///
    /// NOTE: measured on one H200 (docs/measurements/2026-12-01-h200-kernels-5.md): ranges are worse where slices of either
    /// product are short, and for 8 rows.
    #[must_use]
    pub fn serves(self, gemm: &GroupedGemm) -> bool {
        const LEAST_SLICE_STEPS: u32 = 5;
        let slices = [gemm.fc1_steps(), gemm.fc2_steps()].map(|steps| steps.div_ceil(SMALL_SLICES));
        let is_small =
            |block_rows: u32| gemm.weights == Weights::Nvfp4 && slices[0].max(slices[1]) * (block_rows / 8) <= 16;
        match self {
            Self::Small { block_rows } => is_small(block_rows),
            Self::Ranges { block_rows } => is_small(block_rows) && slices[0].min(slices[1]) >= LEAST_SLICE_STEPS,
            Self::MmaSync { .. } | Self::Wgmma { .. } => true,
        }
    }

    /// What to compile.
    #[must_use]
    pub fn request(self, gemm: &GroupedGemm, arch: Arch) -> KernelRequest {
        let source = match self {
            Self::MmaSync { .. } => MMA,
            Self::Wgmma { .. } => WGMMA,
            Self::Ranges { .. } => RANGES,
            Self::Small { .. } => SMALL,
        };
        let launch = self.launch(gemm);
        let weight_bits = match gemm.weights {
            Weights::Nvfp4 => 4_u32,
            Weights::Bf16 => 16,
        };
        let mut request = KernelRequest::new(source, arch)
            .with_arguments::<GroupedGemmArgs>()
            .with("HIDDEN", gemm.hidden)
            .with("INTERMEDIATE", gemm.intermediate)
            .with("QUANTISE", gemm.quantise)
            .with("OUTPUT_BITS", 32_u32)
            .with("BLOCK_ROWS", self.block_rows())
            .with("NUM_STAGES", self.num_stages(gemm))
            .with("NUM_THREADS", launch.num_threads)
            .with("SHARED_BYTES", launch.shared_bytes);
        if !self.is_small() {
            request = request.with("WEIGHT_BITS", weight_bits);
        }
        if matches!(self, Self::Ranges { .. }) {
            let slot_steps = self.ranges_shape(gemm).most_slot_steps;
            request = request.with("SLOT_STEPS", slot_steps).with("PARTS_BYTES", self.parts_bytes(gemm));
        }
        if matches!(self, Self::Wgmma { .. }) {
            request = request.with("WIDTHS", self.width_bits());
        }
        with_activation(request, gemm.activation)
    }
}

/// Adds the activation with exactly the constants that it has.
pub(super) fn with_activation(request: KernelRequest, activation: Activation) -> KernelRequest {
    match activation {
        Activation::Swiglu => request.with("ACTIVATION", 0_u32),
        Activation::SwigluClamp { limit } => request.with("ACTIVATION", 1_u32).with("LIMIT_BITS", Define::float(limit)),
        Activation::Situ { beta, linear_beta: None } => {
            request.with("ACTIVATION", 2_u32).with("BETA_BITS", Define::float(beta))
        }
        Activation::Situ { beta, linear_beta: Some(linear_beta) } => request
            .with("ACTIVATION", 3_u32)
            .with("BETA_BITS", Define::float(beta))
            .with("LINEAR_BETA_BITS", Define::float(linear_beta)),
    }
}

/// Kimi K3's experts through every schedule that an architecture has, and odd widths through one.
pub(super) fn all(arch: Arch) -> Vec<KernelRequest> {
    let k3 = GroupedGemm {
        hidden: 3584,
        intermediate: 3072,
        activation: Activation::Situ { beta: 4.0, linear_beta: Some(25.0) },
        weights: Weights::Nvfp4,
        quantise: true,
    };
    let bf16 = GroupedGemm { weights: Weights::Bf16, quantise: false, ..k3 };
    let odd = GroupedGemm { hidden: 48, intermediate: 80, activation: Activation::Swiglu, quantise: false, ..k3 };
    let mut all = Vec::new();
    for block_rows in [8, 16, 32, 64] {
        all.extend([k3, bf16].map(|gemm| Schedule::MmaSync { block_rows }.request(&gemm, arch)));
    }
    all.push(Schedule::MmaSync { block_rows: 64 }.request(&GroupedGemm { quantise: false, ..k3 }, arch));
    all.push(Schedule::MmaSync { block_rows: 64 }.request(&odd, arch));
    if arch == Arch::Sm90a {
        for block_rows in [64, 128, 256] {
            let unquantised = GroupedGemm { quantise: false, ..k3 };
            all.extend([k3, unquantised, bf16].map(|gemm| Schedule::Wgmma { block_rows }.request(&gemm, arch)));
        }
        let qwen3 = GroupedGemm { hidden: 4096, intermediate: 1536, ..k3 };
        for gemm in [k3, qwen3, GroupedGemm { intermediate: 4096, ..qwen3 }] {
            let small = [8, 16].map(|block_rows| Schedule::Small { block_rows });
            let few = small.into_iter().chain([Schedule::Ranges { block_rows: 16 }]);
            all.extend(few.filter(|schedule| schedule.serves(&gemm)).map(|schedule| schedule.request(&gemm, arch)));
        }
        all.push(Schedule::Wgmma { block_rows: 256 }.request(&odd, arch));
        all.push(Schedule::Small { block_rows: 8 }.request(&odd, arch));
    }
    all
}
