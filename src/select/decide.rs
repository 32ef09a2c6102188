//! From a layer's facts and the deployment to what the layer runs: one value that everything after follows.

use super::{Identity, Quant};
use crate::config::{self, Activations, BackendFamily, Deployment, Device, Transport};
use crate::exit::{Classify, Exit};
use crate::ids::LayerIdx;
use crate::model::MoeGeometry;
use crate::numerics::activation::Activation;

/// Why a layer can't run as asked.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum SelectError {
    /// `activations: quantised` without what it needs.
    #[error(
        "{layer} can't run with quantised activations: {reason}; run it with `--activations bf16` or `--activations checkpoint`"
    )]
    NotQuantisable {
        /// The layer.
        layer: LayerIdx,
        /// What is missing.
        reason: &'static str,
    },
    /// A payload that only quantised layers have.
    #[error(
        "{layer} runs with bf16 activations, so its tokens can't travel as nvfp4; set dispatch.payload to auto, bf16 or f32"
    )]
    PayloadNeedsQuantised {
        /// The layer.
        layer: LayerIdx,
    },
    /// A family that this build does not have.
    #[error(
        "backend {family} needs a GPU, and this build of lockstep runs on CPUs only; use auto, cpu, simd or reference"
    )]
    NoGpu {
        /// What was asked for.
        family: &'static str,
    },
    /// A transport that this build does not have.
    #[error("transport nccl needs GPUs, and this build of lockstep runs on CPUs only; use auto or host")]
    NoNccl,
    /// A pin that matches nothing.
    #[error("implementation {wanted:?} is none of {offered}; pin one of these or leave moe.implementation out")]
    UnknownImplementation {
        /// What was asked for.
        wanted: String,
        /// What there is.
        offered: String,
    },
    /// A pin that does not serve a layer.
    #[error(
        "implementation {wanted} does not serve {layer}, which runs as {quant}; pin {technique}.grouped_gemm.{quant} or leave it out"
    )]
    PinDoesNotServe {
        /// The pin.
        wanted: Identity,
        /// The layer.
        layer: LayerIdx,
        /// The layer's contract.
        quant: &'static str,
        /// The pin's technique with its provider.
        technique: String,
    },
    /// A part that the model does not have.
    #[error("{layer} has no shared experts, so there is no part `shared`; use routed or block")]
    NoShared {
        /// The layer.
        layer: LayerIdx,
    },
}

impl Classify for SelectError {
    fn exit(&self) -> Exit {
        match self {
            Self::NoGpu { .. } | Self::NoNccl => Exit::Environment,
            _ => Exit::BadInput,
        }
    }
}

/// What a checkpoint says of one layer, as far as decisions need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerFacts {
    /// The layer.
    pub layer: LayerIdx,
    /// Experts stored as NVFP4.
    pub num_nvfp4: usize,
    /// Experts stored unquantised.
    pub num_bf16: usize,
    /// Every routed projection has an `input_scale`.
    pub has_input_scales: bool,
    /// The checkpoint asks for quantised activations.
    pub wants_quantised: bool,
    /// The shared expert, where the layer has one.
    pub shared: Option<SharedFacts>,
}

/// What a checkpoint says of a shared expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedFacts {
    /// It is stored as NVFP4.
    pub is_nvfp4: bool,
    /// Its projections have an `input_scale`.
    pub has_input_scales: bool,
    /// The checkpoint asks for its activations to be quantised.
    pub wants_quantised: bool,
}

/// The form in which tokens travel, before the scale is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenForm {
    /// As computed.
    F32,
    /// Exact where the values are bf16.
    Bf16,
    /// Quantised by the sender.
    Nvfp4,
}

/// What a layer runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerDecision {
    /// The layer.
    pub layer: LayerIdx,
    /// The contract of the layer: the one of its NVFP4 experts, or `none` where it has no such.
    pub quant: Quant,
    /// FC1 and FC2 inputs of the routed experts go through NVFP4.
    pub quantise_activations: bool,
    /// So do those of the shared expert.
    pub quantise_shared: bool,
    /// The gated activation.
    pub activation: Activation,
    /// How tokens travel.
    pub token_form: TokenForm,
    /// Weights are applied at the token's home, slot by slot.
    pub combine_at_home: bool,
    /// Rows come back rounded to bf16.
    pub combine_bf16: bool,
}

/// Decides how `facts`' layer runs under `deployment`. `input_is_bf16`: the hidden states are.
///
/// # Errors
/// If the deployment asks for what the layer can't do: nothing is replaced silently.
pub fn decide(
    facts: &LayerFacts,
    geometry: &MoeGeometry,
    deployment: &Deployment,
    input_is_bf16: bool,
) -> Result<LayerDecision, SelectError> {
    let layer = facts.layer;
    let quantise_activations = match deployment.moe.activations {
        Activations::Bf16 => false,
        Activations::Checkpoint => facts.wants_quantised,
        Activations::Quantised => {
            let reason = if facts.num_bf16 > 0 {
                Some("it has unquantised experts")
            } else if !facts.has_input_scales {
                Some("its experts have no input_scale")
            } else if facts.shared.is_some_and(|shared| shared.is_nvfp4 && !shared.has_input_scales) {
                Some("its shared expert has no input_scale")
            } else {
                None
            };
            if let Some(reason) = reason {
                return Err(SelectError::NotQuantisable { layer, reason });
            }
            true
        }
    };
    let quantise_shared = facts.shared.is_some_and(|shared| match deployment.moe.activations {
        Activations::Bf16 => false,
        Activations::Checkpoint => shared.wants_quantised,
        Activations::Quantised => shared.is_nvfp4,
    });
    // A latent is computed in fp32 on every rank's own tokens: it is never bf16 before it travels.
    let travels_as_bf16 = input_is_bf16 && geometry.latent.is_none();
    let token_form = match deployment.dispatch.payload {
        config::Payload::Auto if travels_as_bf16 => TokenForm::Bf16,
        config::Payload::Auto | config::Payload::F32 => TokenForm::F32,
        config::Payload::Bf16 => TokenForm::Bf16,
        config::Payload::Nvfp4 if quantise_activations => TokenForm::Nvfp4,
        config::Payload::Nvfp4 => return Err(SelectError::PayloadNeedsQuantised { layer }),
    };
    let quant = match (facts.num_nvfp4, quantise_activations) {
        (0, _) => Quant::None,
        (_, true) => Quant::Nvfp4,
        (_, false) => Quant::W4a16Nvfp4,
    };
    Ok(LayerDecision {
        layer,
        quant,
        quantise_activations,
        quantise_shared,
        activation: deployment.moe.activation.unwrap_or(geometry.activation),
        token_form,
        combine_at_home: deployment.moe.combine != config::Combine::Rank,
        combine_bf16: deployment.dispatch.combine_dtype == config::CombineDtype::Bf16,
    })
}

/// The technique that serves all `decisions`, from the family or the pin.
///
/// # Errors
/// If the family or transport is not in this build, or the pin matches nothing or not every layer.
pub fn choose_technique(
    deployment: &Deployment,
    techniques: &[&'static str],
    decisions: &[LayerDecision],
) -> Result<&'static str, SelectError> {
    if deployment.dispatch.transport == Transport::Nccl {
        return Err(SelectError::NoNccl);
    }
    if deployment.cluster.device == Device::Gpu {
        return Err(SelectError::NoGpu { family: "auto (cluster.device: gpu)" });
    }
    let family = match deployment.moe.backend {
        BackendFamily::Auto | BackendFamily::Cpu | BackendFamily::Simd => "simd",
        BackendFamily::Reference => "reference",
        BackendFamily::MmaSync => return Err(SelectError::NoGpu { family: "mma_sync" }),
        BackendFamily::Wgmma => return Err(SelectError::NoGpu { family: "wgmma" }),
    };
    match &deployment.moe.implementation {
        Some(wanted) => pinned(wanted, techniques, decisions),
        None => Ok(family),
    }
}

fn pinned(wanted: &str, techniques: &[&'static str], decisions: &[LayerDecision]) -> Result<&'static str, SelectError> {
    let quants = [Quant::Nvfp4, Quant::W4a16Nvfp4, Quant::None];
    let offered: Vec<Identity> = techniques
        .iter()
        .flat_map(|technique| quants.iter().map(|quant| Identity { technique, quant: *quant }))
        .collect();
    let Some(pin) = offered.iter().copied().find(|identity| identity.to_string() == wanted) else {
        let offered: Vec<String> = offered.iter().map(Identity::to_string).collect();
        return Err(SelectError::UnknownImplementation { wanted: wanted.to_owned(), offered: offered.join(", ") });
    };
    match decisions.iter().find(|decision| decision.quant != pin.quant) {
        Some(decision) => Err(SelectError::PinDoesNotServe {
            wanted: pin,
            layer: decision.layer,
            quant: decision.quant.name(),
            technique: format!("lockstep.{}", pin.technique),
        }),
        None => Ok(pin.technique),
    }
}
