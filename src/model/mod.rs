//! What a model's MoE layers are: geometry, routing, activation, quantisation per module.
//!
//! Made from `config.json` and `hf_quant_config.json` texts. Pure: opens no file and knows no rank.

use crate::numerics::activation::Activation;
use crate::routing::RoutingMethod;

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
