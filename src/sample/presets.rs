//! The models whose layouts a sample can take, with their published sizes.

use clap::ValueEnum;

/// A model family: its tensor names, config keys and formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Geometry {
    /// Kimi K3: latent experts, SiTU, sigmoid routing over one group.
    KimiK3,
    /// DeepSeek-V3 and R1: SwiGLU, sigmoid routing over groups.
    #[value(name = "deepseek-v3")]
    DeepseekV3,
    /// Qwen3-235B-A22B: SwiGLU, softmax routing, no shared expert.
    #[value(name = "qwen3-235b")]
    Qwen3,
}

/// The sizes of a model's MoE layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Preset {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the routed experts' latent; absent: they read `hidden`.
    pub latent: Option<usize>,
    /// Width between FC1 and FC2 of one expert.
    pub intermediate: usize,
    /// Routed experts of a layer.
    pub num_experts: usize,
    /// Slots a token.
    pub num_topk: usize,
    /// Shared experts, side by side.
    pub num_shared: usize,
    /// Routing groups; 1 where the model has none.
    pub num_groups: usize,
    /// Groups kept.
    pub topk_group: usize,
    /// Multiplies the routing weights.
    pub scaling: f64,
    /// Leading layers without experts.
    pub num_dense: usize,
    /// Decoder layers, the dense ones included.
    pub num_layers: usize,
}

impl Geometry {
    /// The published sizes.
    #[must_use]
    pub const fn preset(self) -> Preset {
        match self {
            Self::KimiK3 => Preset {
                hidden: 7168,
                latent: Some(3584),
                intermediate: 3072,
                num_experts: 896,
                num_topk: 16,
                num_shared: 2,
                num_groups: 1,
                topk_group: 1,
                scaling: 1.0,
                num_dense: 1,
                num_layers: 93,
            },
            Self::DeepseekV3 => Preset {
                hidden: 7168,
                latent: None,
                intermediate: 2048,
                num_experts: 256,
                num_topk: 8,
                num_shared: 1,
                num_groups: 8,
                topk_group: 4,
                scaling: 2.5,
                num_dense: 3,
                num_layers: 61,
            },
            Self::Qwen3 => Preset {
                hidden: 4096,
                latent: None,
                intermediate: 1536,
                num_experts: 128,
                num_topk: 8,
                num_shared: 0,
                num_groups: 1,
                topk_group: 1,
                scaling: 1.0,
                num_dense: 0,
                num_layers: 94,
            },
        }
    }

    /// The name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::KimiK3 => "kimi-k3",
            Self::DeepseekV3 => "deepseek-v3",
            Self::Qwen3 => "qwen3-235b",
        }
    }
}
