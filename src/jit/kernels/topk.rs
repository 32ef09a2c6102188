//! Router logits to experts and weights: `kernels/topk.cu`.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::{Define, KernelRequest};
use super::super::source::{BASE, KernelSource};
use crate::model::MoeGeometry;
use crate::routing::RoutingMethod;

const SOURCE: KernelSource =
    KernelSource { name: "topk", main: include_str!("../../../kernels/topk.cu"), headers: &[BASE] };

/// The kernel's one argument.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct TopkArgs {
    /// Address of `[num_tokens, num_experts]` f32.
    pub logits: u64,
    /// Address of `[num_experts]` f32; 0: no bias.
    pub bias: u64,
    /// Address of `[num_tokens, num_topk]` i32.
    pub idx: u64,
    /// Address of `[num_tokens, num_topk]` f32.
    pub weights: u64,
    /// Address of a u32: how many tokens there are, where only the device knows; 0 elsewhere.
    pub live_tokens: u64,
    /// Tokens, or the most that there may be.
    pub num_tokens: u64,
}

/// How experts are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopkVariant {
    /// The model's.
    pub method: RoutingMethod,
    /// Routed experts.
    pub num_experts: u32,
    /// Slots a token.
    pub num_topk: u32,
}

impl TopkVariant {
    /// The kernel's name in its module.
    pub const FUNCTION: &'static str = "select_topk";
    /// Threads of a block: a warp takes a token.
    pub const NUM_THREADS: u32 = 256;
    /// A lane of a warp holds a slot.
    pub const MAX_NUM_TOPK: usize = 32;

    /// More experts than this would not fit a lane's registers.
    const MAX_NUM_EXPERTS: usize = 1024;

    /// The one of a model; none where the kernel takes no so many experts or slots.
    #[must_use]
    pub fn of(geometry: &MoeGeometry) -> Option<Self> {
        let MoeGeometry { routing, num_experts, num_topk, .. } = *geometry;
        let fits = num_topk <= Self::MAX_NUM_TOPK && num_experts <= Self::MAX_NUM_EXPERTS;
        let (experts, topk) = (u32::try_from(num_experts).ok()?, u32::try_from(num_topk).ok()?);
        fits.then_some(Self { method: routing, num_experts: experts, num_topk: topk })
    }

    /// What to compile.
    #[must_use]
    pub fn request(self, arch: Arch) -> KernelRequest {
        let Self { method, num_experts, num_topk } = self;
        let score: u32 = match method {
            RoutingMethod::Default => 0,
            RoutingMethod::Renormalize | RoutingMethod::Llama4 => 1,
            RoutingMethod::DeepseekV3 { .. }
            | RoutingMethod::KimiK3 { .. }
            | RoutingMethod::MinimaxM2
            | RoutingMethod::SigmoidRenorm => 2,
            RoutingMethod::DeepseekV4 { .. } => 3,
        };
        let weight: u32 = match method {
            RoutingMethod::Default => 0,
            RoutingMethod::Renormalize => 1,
            RoutingMethod::Llama4 => 3,
            _ => 2,
        };
        let (num_groups, topk_group) = method.group_limit().unwrap_or((1, 1));
        #[expect(clippy::cast_possible_truncation, reason = "it only keeps a divisor from zero")]
        let epsilon = method.epsilon() as f32;
        let narrow = |groups: usize| u32::try_from(groups).unwrap_or(u32::MAX);
        KernelRequest::new(SOURCE, arch)
            .with_arguments::<TopkArgs>()
            .with("NUM_EXPERTS", num_experts)
            .with("NUM_TOPK", num_topk)
            .with("SCORE", score)
            .with("WEIGHT", weight)
            .with("EPSILON_BITS", Define::float(epsilon))
            .with("SCALING_BITS", Define::float(method.scaling()))
            .with("NUM_GROUPS", narrow(num_groups))
            .with("TOPK_GROUP", narrow(topk_group))
    }
}

/// Every method, with the sizes of real routers.
pub(super) fn all(arch: Arch) -> Vec<KernelRequest> {
    use RoutingMethod::{DeepseekV3, DeepseekV4, Default, KimiK3, Llama4, MinimaxM2, Renormalize, SigmoidRenorm};
    let variants = [
        (Default, 60, 4),
        (Renormalize, 128, 8),
        (DeepseekV3 { num_groups: 8, topk_group: 4, scaling: 2.5 }, 256, 8),
        (KimiK3 { scaling: 2.827 }, 896, 16),
        (DeepseekV4 { scaling: 1.5 }, 384, 6),
        (MinimaxM2, 256, 8),
        (SigmoidRenorm, 24, 6),
        (Llama4, 16, 1),
    ];
    let request = |(method, num_experts, num_topk)| TopkVariant { method, num_experts, num_topk }.request(arch);
    variants.into_iter().map(request).collect()
}
