//! From a layer's facts and the deployment to what the layer runs: one value that everything after follows.

use super::deployment::DeploymentError;
use super::identity::Quant;
use super::resolve::ResolveError;
use crate::config::{self, Activations, Deployment};
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
    /// No implementation for what was asked.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// A deployment that declares an impossible world.
    #[error(transparent)]
    Deployment(#[from] DeploymentError),
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
            Self::Resolve(error) => error.exit(),
            Self::Deployment(error) => error.exit(),
            Self::NotQuantisable { .. } | Self::PayloadNeedsQuantised { .. } | Self::NoShared { .. } => Exit::BadInput,
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
    /// The checkpoint keeps the layer unquantised, which outranks the `activations: quantised` that was asked for.
    pub kept_unquantised: bool,
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
    let quantise_activations = quantise_activations(facts, deployment.moe.activations)?;
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
        kept_unquantised: facts.num_nvfp4 == 0 && deployment.moe.activations == Activations::Quantised,
        activation: deployment.moe.activation.unwrap_or(geometry.activation),
        token_form,
        combine_at_home: deployment.moe.combine != config::Combine::Rank,
        combine_bf16: deployment.dispatch.combine_dtype == config::CombineDtype::Bf16,
    })
}

/// Whether FC1's and FC2's inputs go through NVFP4.
fn quantise_activations(facts: &LayerFacts, activations: Activations) -> Result<bool, SelectError> {
    let layer = facts.layer;
    match activations {
        Activations::Bf16 => Ok(false),
        Activations::Checkpoint => Ok(facts.wants_quantised),
        Activations::Quantised if facts.shared.is_some_and(|shared| shared.is_nvfp4 && !shared.has_input_scales) => {
            Err(SelectError::NotQuantisable { layer, reason: "its shared expert has no input_scale" })
        }
        // What the checkpoint keeps unquantised stays so, whatever is asked of the other layers.
        Activations::Quantised if facts.num_nvfp4 == 0 => Ok(false),
        // One payload serves all experts of a token: here the two wishes can't both be met.
        Activations::Quantised if facts.num_bf16 > 0 => {
            Err(SelectError::NotQuantisable { layer, reason: "it has unquantised experts" })
        }
        Activations::Quantised if !facts.has_input_scales => {
            Err(SelectError::NotQuantisable { layer, reason: "its experts have no input_scale" })
        }
        Activations::Quantised => Ok(true),
    }
}
