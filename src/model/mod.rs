//! What a model's MoE layers are: geometry, routing, activation, quantisation per module.
//!
//! Made from `config.json` and `hf_quant_config.json` texts. Pure: opens no file and knows no rank.

mod activation;
mod error;
mod fields;
mod geometry;
mod layers;
pub mod patterns;
mod quant_config;
pub mod quantisation;
mod router;
#[cfg(test)]
mod tests;

pub use error::{ModelError, ModelWarning};
pub use layers::LayerRule;
pub use quantisation::{Declared, Quantisation};

use crate::numerics::activation::Activation;
use crate::routing::{self, RoutingMethod};

/// A model's MoE layers, as far as its config files describe them.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelDescription {
    /// `model_type`, the outer one where configs are nested.
    pub model_type: String,
    /// What all MoE layers share.
    pub geometry: MoeGeometry,
    /// Whether the router adds an `e_score_correction_bias`; then every MoE layer must have that tensor.
    pub router_has_bias: bool,
    /// Which layers are MoE layers.
    pub layers: LayerRule,
    /// How modules are declared to be stored.
    pub quantisation: Quantisation,
    /// What is odd about the config files.
    pub warnings: Vec<ModelWarning>,
}

/// The texts of a checkpoint's config files.
#[derive(Debug, Clone, Copy)]
pub struct ConfigTexts<'a> {
    /// `config.json`
    pub config: &'a str,
    /// `hf_quant_config.json`, where there is one.
    pub hf_quant_config: Option<&'a str>,
}

/// What the tensors say about the router's correction bias, which decides between routing methods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CorrectionBias {
    /// A layer has one.
    Present,
    /// No layer has one.
    Absent,
    /// Only config files are at hand.
    Unknown,
}

/// How the router chooses, and whether a bias steers it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RouterModel {
    method: RoutingMethod,
    has_bias: bool,
}

impl ModelDescription {
    /// Reads the config files of a checkpoint.
    ///
    /// # Errors
    /// If a file is malformed, if a quantity is missing or out of range (top-k outside `1..=num_experts`), or if the model
    /// needs what Lockstep does not run: expert biases, hash layers, other activations, other quantisations.
    pub fn from_texts(texts: ConfigTexts<'_>, bias: CorrectionBias) -> Result<Self, ModelError> {
        let fields = fields::Fields::parse(texts.config)?;
        geometry::refuse_out_of_scope(&fields)?;
        let mut warnings = Vec::new();
        let quantisation = quant_config::quantisation(&fields, texts.hf_quant_config, &mut warnings)?;
        let (geometry, router_has_bias) = geometry::geometry(&fields, bias)?;
        routing::validate(geometry.routing, geometry.num_experts, geometry.num_topk)?;
        Ok(Self {
            model_type: fields.model_types().first().map_or("unnamed", |name| name).to_owned(),
            geometry,
            router_has_bias,
            layers: layers::layer_rule(&fields)?,
            quantisation,
            warnings,
        })
    }
}

/// The geometry that all MoE layers of a model share.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeGeometry {
    /// Width of the residual stream, which the router reads.
    pub hidden: usize,
    /// Width the routed experts read and write: the latent's where the model has one, else `hidden`.
    pub expert_hidden: usize,
    /// Width between FC1 and FC2 of one routed expert.
    pub intermediate: usize,
    /// Routed experts of a layer.
    pub num_experts: usize,
    /// Slots a token.
    pub num_topk: usize,
    /// The always-on experts, side by side as one wide expert.
    pub shared: Option<SharedGeometry>,
    /// Kimi K3's projections around the routed experts.
    pub latent: Option<LatentGeometry>,
    /// How the router chooses.
    pub routing: RoutingMethod,
    /// The gated activation of routed and shared experts.
    pub activation: Activation,
}

/// The shared expert of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedGeometry {
    /// Width of all shared experts together.
    pub intermediate: usize,
}

/// Kimi K3's latent: `up(rmsnorm(sum over experts of down(x)))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentGeometry {
    /// Epsilon of the norm after the routed sum; absent where the model has no such norm.
    pub norm_eps: Option<f32>,
}
