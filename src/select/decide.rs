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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Combine, CombineDtype, Payload};
    use crate::model::LatentGeometry;
    use crate::select::tests::worlds::small_geometry as geometry;

    /// A layer of eight calibrated NVFP4 experts.
    fn facts() -> LayerFacts {
        LayerFacts {
            layer: LayerIdx(5),
            num_nvfp4: 8,
            num_bf16: 0,
            has_input_scales: true,
            wants_quantised: true,
            shared: Some(SharedFacts { is_nvfp4: true, has_input_scales: true, wants_quantised: true }),
        }
    }

    fn with(facts: &LayerFacts, change: impl Fn(&mut Deployment)) -> Result<LayerDecision, SelectError> {
        let mut deployment = Deployment::default();
        change(&mut deployment);
        decide(facts, &geometry(), &deployment, true)
    }

    fn activations(facts: &LayerFacts, asked: Activations) -> Result<LayerDecision, SelectError> {
        with(facts, |deployment| deployment.moe.activations = asked)
    }

    #[test]
    fn the_checkpoint_decides_unless_the_deployment_does() {
        let (calibrated, weights_only) = (facts(), LayerFacts { wants_quantised: false, ..facts() });
        for (facts, asked, quant) in [
            (&calibrated, Activations::Checkpoint, Quant::Nvfp4),
            (&calibrated, Activations::Bf16, Quant::W4a16Nvfp4),
            (&calibrated, Activations::Quantised, Quant::Nvfp4),
            (&weights_only, Activations::Checkpoint, Quant::W4a16Nvfp4),
            (&weights_only, Activations::Bf16, Quant::W4a16Nvfp4),
            (&weights_only, Activations::Quantised, Quant::Nvfp4),
        ] {
            let decision = activations(facts, asked).unwrap();
            assert_eq!((decision.quant, decision.layer), (quant, LayerIdx(5)), "{asked}");
            assert_eq!(decision.quantise_activations, quant == Quant::Nvfp4, "{asked}");
            assert!(!decision.kept_unquantised, "{asked}");
        }
    }

    #[test]
    fn unquantised_experts_stay_so_and_it_is_said() {
        let facts = LayerFacts {
            num_nvfp4: 0,
            num_bf16: 8,
            has_input_scales: false,
            wants_quantised: false,
            shared: None,
            ..facts()
        };
        for (asked, kept) in
            [(Activations::Checkpoint, false), (Activations::Bf16, false), (Activations::Quantised, true)]
        {
            let decision = activations(&facts, asked).unwrap();
            assert_eq!((decision.quant, decision.kept_unquantised), (Quant::None, kept), "{asked}");
            assert!(!decision.quantise_activations);
        }
    }

    #[test]
    fn what_can_not_be_quantised_is_refused_with_the_reason() {
        let uncalibrated = LayerFacts { has_input_scales: false, ..facts() };
        let mixed = LayerFacts { num_bf16: 1, ..facts() };
        let shared = SharedFacts { is_nvfp4: true, has_input_scales: false, wants_quantised: false };
        let uncalibrated_shared = LayerFacts { shared: Some(shared), ..facts() };
        for (facts, reason) in [
            (uncalibrated, "its experts have no input_scale"),
            (mixed, "it has unquantised experts"),
            (uncalibrated_shared, "its shared expert has no input_scale"),
        ] {
            let error = activations(&facts, Activations::Quantised).unwrap_err();
            assert_eq!(error, SelectError::NotQuantisable { layer: LayerIdx(5), reason });
            assert_eq!(error.exit(), Exit::BadInput);
            let text = error.to_string();
            assert!(text.contains("layer 5") && text.contains(reason) && text.contains("--activations bf16"), "{text}");
            // Nobody asked for it otherwise.
            assert!(activations(&facts, Activations::Bf16).is_ok());
        }
    }

    #[test]
    fn shared_experts_follow_their_own_format() {
        let of_shared = |is_nvfp4, wants_quantised, asked| {
            let shared = Some(SharedFacts { is_nvfp4, has_input_scales: is_nvfp4, wants_quantised });
            activations(&LayerFacts { shared, ..facts() }, asked).unwrap().quantise_shared
        };
        assert!(of_shared(true, true, Activations::Checkpoint));
        assert!(!of_shared(true, false, Activations::Checkpoint));
        assert!(!of_shared(true, true, Activations::Bf16));
        assert!(of_shared(true, false, Activations::Quantised));
        assert!(!of_shared(false, false, Activations::Quantised), "Kimi K3 keeps its shared experts in bf16");
        let none = LayerFacts { shared: None, ..facts() };
        assert!(!activations(&none, Activations::Quantised).unwrap().quantise_shared);
    }

    #[test]
    fn tokens_travel_as_what_loses_nothing_unless_asked_otherwise() {
        let latent = MoeGeometry { latent: Some(LatentGeometry { norm_eps: None }), ..geometry() };
        let form = |geometry: &MoeGeometry, payload, input_is_bf16| {
            let mut deployment = Deployment::default();
            deployment.dispatch.payload = payload;
            decide(&facts(), geometry, &deployment, input_is_bf16).unwrap().token_form
        };
        assert_eq!(form(&geometry(), Payload::Auto, true), TokenForm::Bf16);
        assert_eq!(form(&geometry(), Payload::Auto, false), TokenForm::F32);
        assert_eq!(form(&latent, Payload::Auto, true), TokenForm::F32, "a latent is never bf16 before it travels");
        assert_eq!(form(&latent, Payload::Bf16, true), TokenForm::Bf16);
        assert_eq!(form(&geometry(), Payload::F32, true), TokenForm::F32);
        assert_eq!(form(&geometry(), Payload::Nvfp4, true), TokenForm::Nvfp4);
        let error = with(&facts(), |deployment| {
            (deployment.dispatch.payload, deployment.moe.activations) = (Payload::Nvfp4, Activations::Bf16);
        });
        assert_eq!(error, Err(SelectError::PayloadNeedsQuantised { layer: LayerIdx(5) }));
    }

    #[test]
    fn rows_come_back_by_slot_in_f32_unless_asked_otherwise() {
        let decision = with(&facts(), |_| {}).unwrap();
        assert!(decision.combine_at_home && !decision.combine_bf16);
        assert!(with(&facts(), |deployment| deployment.moe.combine = Combine::Slot).unwrap().combine_at_home);
        assert!(!with(&facts(), |deployment| deployment.moe.combine = Combine::Rank).unwrap().combine_at_home);
        assert!(with(&facts(), |d| d.dispatch.combine_dtype = CombineDtype::Bf16).unwrap().combine_bf16);
    }

    #[test]
    fn an_activation_that_is_asked_for_stands_for_the_checkpoints() {
        let asked = Activation::Situ { beta: 4.0, linear_beta: Some(25.0) };
        assert_eq!(with(&facts(), |_| {}).unwrap().activation, Activation::Swiglu);
        assert_eq!(with(&facts(), |deployment| deployment.moe.activation = Some(asked)).unwrap().activation, asked);
    }
}
