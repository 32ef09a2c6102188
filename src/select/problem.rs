//! What a layer asks of an implementation: formats, activation, shapes, routing. Nothing of ranks or machines.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;

use super::decide::{LayerDecision, LayerFacts};
use super::identity::Quant;
use crate::exit::{Classify, Exit};
use crate::ids::LayerIdx;
use crate::model::MoeGeometry;
use crate::numerics::activation::Activation;
use crate::routing::RoutingMethod;

/// Why a layer is no problem that could be solved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProblemError {
    /// Slots that the experts can't fill.
    #[error(
        "{layer}: top-k is {num_topk} of {num_experts} experts; it must be at least 1 and at most the number of experts"
    )]
    TopK {
        /// The layer.
        layer: LayerIdx,
        /// Slots a token.
        num_topk: usize,
        /// Experts there are.
        num_experts: usize,
    },
    /// A width of nothing.
    #[error("{layer}: {width} is 0; correct the model's config")]
    Width {
        /// The layer.
        layer: LayerIdx,
        /// hidden or intermediate
        width: &'static str,
    },
    /// No weights.
    #[error("{layer} has experts of no format; correct the model's quantisation config")]
    NoFormat {
        /// The layer.
        layer: LayerIdx,
    },
    /// One layer, two descriptions.
    #[error("{layer} is asked for twice with different facts; ask once for each layer")]
    Twice {
        /// The layer.
        layer: LayerIdx,
    },
}

impl Classify for ProblemError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

/// How weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightFormat {
    /// e2m1 codes in blocks of 16.
    Nvfp4,
    /// e2m1 codes in blocks of 32 with e8m0 scales.
    Mxfp4,
    /// e4m3 or e5m2 codes.
    Fp8,
    /// Unquantised.
    Bf16,
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp4 => "mxfp4",
            Self::Fp8 => "fp8",
            Self::Bf16 => "bf16",
        })
    }
}

/// The formats of a layer's routed experts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Quantisation {
    /// How experts are stored: one format, or bf16 for some of them beside another.
    pub weights: BTreeSet<WeightFormat>,
    /// FC1's and FC2's inputs go through NVFP4.
    pub quantised_activations: bool,
}

impl Quantisation {
    /// Experts of one format.
    #[must_use]
    pub fn uniform(weights: WeightFormat, quantised_activations: bool) -> Self {
        Self { weights: BTreeSet::from([weights]), quantised_activations }
    }
}

impl fmt::Display for Quantisation {
    /// `nvfp4 weights with quantised activations`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let activations = if self.quantised_activations { "quantised" } else { "bf16" };
        write!(f, "{} weights with {activations} activations", list(&self.weights, " and "))
    }
}

/// The gated activation, and which constants it supplies. Their values are no matter of selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationForm {
    /// `g * sigmoid(g) * u`
    Swiglu,
    /// SwiGLU of clamped branches.
    SwigluClamp,
    /// SwiGLU with a slope, an offset and a clamp (gpt-oss).
    SwigluAlpha,
    /// SiTU with a linear up branch.
    Situ,
    /// SiTU with a bounded up branch.
    SituLinear,
}

impl ActivationForm {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Swiglu, Self::SwigluClamp, Self::SwigluAlpha, Self::Situ, Self::SituLinear];
}

impl From<Activation> for ActivationForm {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::Swiglu => Self::Swiglu,
            Activation::SwigluClamp { .. } => Self::SwigluClamp,
            Activation::Situ { linear_beta: None, .. } => Self::Situ,
            Activation::Situ { linear_beta: Some(_), .. } => Self::SituLinear,
        }
    }
}

impl fmt::Display for ActivationForm {
    /// The kind, and the constants it supplies.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Swiglu => "swiglu",
            Self::SwigluClamp => "swiglu(limit)",
            Self::SwigluAlpha => "swiglu(alpha, limit, offset)",
            Self::Situ => "situ(beta)",
            Self::SituLinear => "situ(beta, linear_beta)",
        })
    }
}

/// How experts are chosen, without the constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RoutingKind {
    /// Top-k of the softmax.
    Default,
    /// Softmax over the top-k.
    Renormalize,
    /// Group-limited biased sigmoid.
    DeepseekV3,
    /// Biased sigmoid of one group.
    KimiK3,
    /// Biased square root of the softplus.
    DeepseekV4,
    /// Biased sigmoid without scaling.
    MinimaxM2,
    /// Normalised sigmoid.
    SigmoidRenorm,
    /// Sigmoid of the top-k.
    Llama4,
    /// By a table of token ids (DeepSeek-V4's first layers).
    Hash,
}

impl RoutingKind {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Default,
        Self::Renormalize,
        Self::DeepseekV3,
        Self::KimiK3,
        Self::DeepseekV4,
        Self::MinimaxM2,
        Self::SigmoidRenorm,
        Self::Llama4,
        Self::Hash,
    ];
}

impl From<RoutingMethod> for RoutingKind {
    fn from(method: RoutingMethod) -> Self {
        match method {
            RoutingMethod::Default => Self::Default,
            RoutingMethod::Renormalize => Self::Renormalize,
            RoutingMethod::DeepseekV3 { .. } => Self::DeepseekV3,
            RoutingMethod::KimiK3 { .. } => Self::KimiK3,
            RoutingMethod::DeepseekV4 { .. } => Self::DeepseekV4,
            RoutingMethod::MinimaxM2 => Self::MinimaxM2,
            RoutingMethod::SigmoidRenorm => Self::SigmoidRenorm,
            RoutingMethod::Llama4 => Self::Llama4,
        }
    }
}

impl fmt::Display for RoutingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "default",
            Self::Renormalize => "renormalize",
            Self::DeepseekV3 => "deepseek_v3",
            Self::KimiK3 => "kimi_k3",
            Self::DeepseekV4 => "deepseek_v4",
            Self::MinimaxM2 => "minimax_m2",
            Self::SigmoidRenorm => "sigmoid_renorm",
            Self::Llama4 => "llama4",
            Self::Hash => "hash",
        })
    }
}

/// What a layer asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The layer.
    #[serde(serialize_with = "layer_number")]
    pub layer: LayerIdx,
    /// Formats of the routed experts.
    pub quantisation: Quantisation,
    /// The gated activation.
    pub activation: ActivationForm,
    /// Width that routed experts read and write.
    pub hidden: usize,
    /// Width between FC1 and FC2 of a routed expert.
    pub intermediate: usize,
    /// Routed experts.
    pub num_experts: usize,
    /// Slots a token.
    pub num_topk: usize,
    /// How experts are chosen.
    pub routing: RoutingKind,
    /// Experts add biases.
    pub has_bias: bool,
    /// The always-on experts, as one.
    pub shared: Option<SharedProblem>,
}

/// What the shared expert asks for; its activation is the layer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SharedProblem {
    /// How it is stored.
    pub weights: WeightFormat,
    /// Its inputs go through NVFP4: its own matter, since its tokens don't travel.
    pub quantised_activations: bool,
    /// Width it reads and writes.
    pub hidden: usize,
    /// Width between FC1 and FC2.
    pub intermediate: usize,
}

/// A group of experts of a layer that runs under one contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Which experts.
    pub members: Members,
    /// Their contract; absent where no contract covers the format.
    pub quant: Option<Quant>,
    /// Width in and out.
    pub hidden: usize,
    /// Width between FC1 and FC2.
    pub intermediate: usize,
}

/// The experts of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Members {
    /// The routed experts, or those of them that are quantised.
    Routed,
    /// Routed experts that the checkpoint keeps in bf16 beside quantised ones.
    KeptUnquantised,
    /// The shared experts.
    Shared,
}

impl fmt::Display for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Routed => "routed experts",
            Self::KeptUnquantised => "routed experts kept in bf16",
            Self::Shared => "shared experts",
        })
    }
}

impl Problem {
    /// The problem of a decided layer.
    #[must_use]
    pub fn new(facts: &LayerFacts, decision: &LayerDecision, geometry: &MoeGeometry) -> Self {
        let formats = [(facts.num_nvfp4, WeightFormat::Nvfp4), (facts.num_bf16, WeightFormat::Bf16)];
        let shared = facts.shared.zip(geometry.shared).map(|(found, shared)| SharedProblem {
            weights: if found.is_nvfp4 { WeightFormat::Nvfp4 } else { WeightFormat::Bf16 },
            quantised_activations: decision.quantise_shared && found.is_nvfp4,
            hidden: geometry.hidden,
            intermediate: shared.intermediate,
        });
        Self {
            layer: facts.layer,
            quantisation: Quantisation {
                weights: formats.iter().filter(|(count, _)| *count > 0).map(|(_, format)| *format).collect(),
                quantised_activations: decision.quantise_activations,
            },
            activation: decision.activation.into(),
            hidden: geometry.expert_hidden,
            intermediate: geometry.intermediate,
            num_experts: geometry.num_experts,
            num_topk: geometry.num_topk,
            routing: geometry.routing.into(),
            // The model reader refuses expert biases: a layer that comes from it has none.
            has_bias: false,
            shared,
        }
    }

    /// Refuses what no implementation could run.
    ///
    /// # Errors
    /// If top-k is not in `1..=num_experts`, a width is 0, or the experts have no format.
    pub fn validate(&self) -> Result<(), ProblemError> {
        let Self { layer, num_topk, num_experts, .. } = *self;
        if num_topk == 0 || num_topk > num_experts {
            return Err(ProblemError::TopK { layer, num_topk, num_experts });
        }
        let shared = self.shared.map_or([("shared hidden", 1); 2], |shared| {
            [("shared hidden", shared.hidden), ("shared intermediate", shared.intermediate)]
        });
        let widths = [("hidden", self.hidden), ("intermediate", self.intermediate)];
        if let Some((width, _)) = widths.into_iter().chain(shared).find(|(_, value)| *value == 0) {
            return Err(ProblemError::Width { layer, width });
        }
        if self.quantisation.weights.is_empty() { Err(ProblemError::NoFormat { layer }) } else { Ok(()) }
    }

    /// Its groups of experts, the one that gives the layer its contract first.
    #[must_use]
    pub fn groups(&self) -> Vec<Group> {
        let Quantisation { weights, quantised_activations } = &self.quantisation;
        let Self { hidden, intermediate, .. } = *self;
        // bf16 sorts last, so that a mixed layer has the contract of its quantised experts.
        let mut groups: Vec<Group> = weights
            .iter()
            .enumerate()
            .map(|(idx, format)| {
                let members = if idx == 0 { Members::Routed } else { Members::KeptUnquantised };
                Group { members, quant: contract(*format, *quantised_activations), hidden, intermediate }
            })
            .collect();
        groups.extend(self.shared.map(|shared| Group {
            members: Members::Shared,
            quant: contract(shared.weights, shared.quantised_activations),
            hidden: shared.hidden,
            intermediate: shared.intermediate,
        }));
        groups
    }
}

/// The contract under which weights of a format run; none where no implementation could exist yet.
fn contract(weights: WeightFormat, quantised_activations: bool) -> Option<Quant> {
    match (weights, quantised_activations) {
        (WeightFormat::Nvfp4, true) => Some(Quant::Nvfp4),
        (WeightFormat::Nvfp4, false) => Some(Quant::W4a16Nvfp4),
        (WeightFormat::Bf16, _) => Some(Quant::None),
        (WeightFormat::Mxfp4 | WeightFormat::Fp8, _) => None,
    }
}

/// Items as people list them.
pub(super) fn list<T: fmt::Display>(items: impl IntoIterator<Item = T>, separator: &str) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(separator)
}

/// A number of things: `1 rank`, `2 ranks`.
pub(super) fn counted(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
pub(super) fn layer_number<S: serde::Serializer>(layer: &LayerIdx, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u32(layer.0)
}
