//! What a deployment will take, on paper: experts, weights and buffers of every rank, bytes on each kind of link, and the
//! floors of a step. The value that `lockstep plan` prints.
//!
//! Pure: made from a deployment, a model's geometry and what its layers hold. It opens nothing and needs no device. Sizes
//! come from [`crate::dispatch`], as those of a run do, and are never worked out again here.

mod error;
pub mod fit;
pub mod floor;
mod ranks;
pub mod reach;

pub mod traffic;
pub mod units;
mod ways;
pub mod weights;

#[cfg(test)]
mod tests;

use serde::Serialize;

use crate::config::{Choice, Combine, CombineDtype, Deployment, Device, Levels, Links, Overlap, Payload};
use crate::dispatch::capacity::{Capacity, Chunks};
use crate::dispatch::nodes::Nodes;
use crate::dispatch::overlap::{Cut, tokens_in_buffers};
use crate::dispatch::placement::Placement;
use crate::ids::Rank;
use crate::model::MoeGeometry;
use crate::select::{DeploymentFacts, LayerFacts, SelectError};

pub use error::PlanError;
pub use ranks::{RankGroup, RankStep};
pub use ways::{LayerGroup, StepWay, Way};

use fit::Sizes;
use reach::Reach;
use traffic::{ByLink, Flow};

/// What a layer holds.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredLayer {
    /// What its headers say.
    pub facts: LayerFacts,
    /// `[num_experts]` how each is stored: NVFP4, or else bf16.
    pub is_nvfp4: Vec<bool>,
    /// Bytes of router and latent projections.
    pub dense_bytes: u64,
}

impl StoredLayer {
    /// Whether another layer is stored like this one.
    fn is_like(&self, other: &Self) -> bool {
        let facts = LayerFacts { layer: other.facts.layer, ..self.facts };
        facts == other.facts && self.is_nvfp4 == other.is_nvfp4 && self.dense_bytes == other.dense_bytes
    }
}

/// What is planned.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// The model's name.
    pub model: &'a str,
    /// What its MoE layers share.
    pub geometry: &'a MoeGeometry,
    /// Its MoE layers.
    pub layers: &'a [StoredLayer],
    /// How it would run.
    pub deployment: &'a Deployment,
    /// Tokens of each rank; absent: as many as are declared.
    pub num_tokens: Option<usize>,
    /// Memory of a rank's device, where it is known.
    pub device_memory_bytes: Option<u64>,
}

/// A deployment on paper. Bytes of traffic and times are expectations under uniform routing, see [`reach`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// Free text of the deployment.
    pub deployment: String,
    /// The model.
    pub model: String,
    /// What a rank drives.
    pub device: &'static str,
    /// Hosts.
    pub num_nodes: usize,
    /// Ranks.
    pub num_ranks: usize,
    /// MoE layers.
    pub num_layers: usize,
    /// Routed experts of a layer.
    pub num_experts: usize,
    /// Slots a token.
    pub num_topk: usize,
    /// Groups that the router splits the experts into.
    pub num_groups: usize,
    /// Groups that it keeps for a token.
    pub topk_group: usize,
    /// Width that routed experts read.
    pub expert_hidden: usize,
    /// Width between FC1 and FC2.
    pub intermediate: usize,
    /// Tokens of each rank in a step.
    pub num_tokens_per_rank: usize,
    /// Chunks of a layer's dispatch.
    pub num_chunks: usize,
    /// Tokens of a rank that go at once.
    pub tokens_at_once: usize,
    /// Where a token goes once: `one`, to each rank; `two`, to each node.
    pub levels: &'static str,
    /// Ranks that a token of rank 0 goes to, its own included, by what lies between.
    pub destinations_per_token: ByLink,
    /// Tokens that rank 0 sends for each that it brings, by what lies between: in two levels its own to other nodes, and what
    /// it passes on in its own.
    pub dispatched_per_token: ByLink,
    /// Layers that are stored alike and so run alike.
    pub layers: Vec<LayerGroup>,
    /// A step of all layers, by how tokens travel.
    pub steps: Vec<StepWay>,
    /// Ranks that are alike, in order.
    pub ranks: Vec<RankGroup>,
    /// Keys of the deployment without which a floor is left out.
    pub missing: Vec<&'static str>,
    /// Memory of a rank's device, where it was given.
    pub device_memory_bytes: Option<u64>,
    /// Whether every rank fits.
    pub fits: Option<bool>,
    /// Why it does not.
    #[serde(skip)]
    misfit: Option<fit::Misfit>,
}

/// What everything is computed from.
struct Basis<'a> {
    geometry: &'a MoeGeometry,
    layers: &'a [StoredLayer],
    deployment: Deployment,
    placement: Placement,
    reach: Reach,
    nodes: Nodes,
    levels: Levels,
    flows: Vec<Flow>,
    num_tokens: usize,
    chunks: Chunks,
    tokens_at_once: usize,
    /// Tokens of a rank that its buffers hold: in two sets where chunks overlap.
    num_buffered: usize,
}

impl Plan {
    /// Plans what `asked` describes.
    ///
    /// # Errors
    /// If there is no MoE layer, if the deployment asks for what a layer can't do or declares too many ranks, or if there
    /// are more tokens than it declares. A plan that does not fit is no error yet: see [`Plan::fit`].
    pub fn new(asked: &Asked<'_>) -> Result<Self, PlanError> {
        let basis = Basis::new(asked)?;
        let groups = ways::groups(&basis)?;
        let ranks = ranks::groups(&basis, &groups);
        let layers = ways::layers(&basis, &groups, &ranks);
        let steps = ways::steps(&layers, &ranks);
        let misfit = misfit(asked, &basis, &groups, &ranks);
        let Basis { deployment, reach, levels, flows, num_tokens, chunks, tokens_at_once, .. } = basis;
        let geometry = asked.geometry;
        Ok(Self {
            missing: missing(&deployment.links, &steps),
            deployment: deployment.name,
            model: asked.model.to_owned(),
            device: deployment.cluster.device.name(),
            num_nodes: deployment.cluster.nodes as usize,
            num_ranks: flows.len(),
            num_layers: asked.layers.len(),
            num_experts: geometry.num_experts,
            num_topk: geometry.num_topk,
            num_groups: reach.num_groups,
            topk_group: reach.topk_group,
            expert_hidden: geometry.expert_hidden,
            intermediate: geometry.intermediate,
            num_tokens_per_rank: num_tokens,
            num_chunks: chunks.num_chunks,
            tokens_at_once,
            levels: levels.name(),
            destinations_per_token: flows[0].tokens_sent,
            dispatched_per_token: flows[0].dispatch_sent,
            layers,
            steps,
            ranks: ranks.into_iter().map(|rank| rank.group).collect(),
            device_memory_bytes: asked.device_memory_bytes,
            fits: asked.device_memory_bytes.map(|_| misfit.is_none()),
            misfit,
        })
    }

    /// Holds the plan against the memory of the devices, where that is known.
    ///
    /// # Errors
    /// If some rank needs more: with what it needs, what there is, and what would fit.
    pub fn fit(&self) -> Result<(), PlanError> {
        self.misfit.clone().map_or(Ok(()), |misfit| Err(PlanError::Memory(Box::new(misfit))))
    }
}

impl<'a> Basis<'a> {
    fn new(asked: &Asked<'a>) -> Result<Self, PlanError> {
        let Asked { model, geometry, layers, .. } = *asked;
        if layers.is_empty() {
            return Err(PlanError::NoLayers { model: model.to_owned() });
        }
        let deployment = settled(asked.deployment);
        let facts = DeploymentFacts::declared(&deployment).map_err(SelectError::from)?;
        let capacity = Capacity::from(&deployment.dispatch);
        capacity.validate()?;
        let num_tokens = asked.num_tokens.unwrap_or(capacity.num_max_tokens_per_rank);
        let capacity = capacity.with_cut(cut(&deployment, geometry));
        let chunks = capacity.chunks(&vec![num_tokens; facts.num_ranks()])?;
        let placement = Placement::new(geometry.num_experts, facts.num_ranks());
        let reach = Reach::new(geometry);
        let nodes = Nodes::new(&facts.node_of_rank);
        // Between GPUs `auto` means one level.
        let levels = facts.levels(deployment.cluster.device != Device::Gpu);
        let flows = traffic::flows(placement, &reach, (&nodes, levels));
        let tokens_at_once = num_tokens.min(capacity.max_tokens_at_once());
        let num_buffered = match capacity.cut {
            Cut::Never => tokens_at_once,
            _ => tokens_in_buffers(tokens_at_once, capacity.chunk_tokens.is_some()),
        };
        Ok(Self {
            geometry,
            layers,
            deployment,
            placement,
            reach,
            nodes,
            levels,
            flows,
            num_tokens,
            chunks,
            tokens_at_once,
            num_buffered,
        })
    }
}

/// How a run would cut steps, of ranks that drive GPUs and are several.
fn cut(deployment: &Deployment, geometry: &MoeGeometry) -> Cut {
    let (num_topk, num_experts) = (geometry.num_topk, geometry.num_experts);
    match deployment.dispatch.overlap {
        _ if deployment.cluster.device != Device::Gpu => Cut::Never,
        Overlap::Off => Cut::Never,
        Overlap::Auto => Cut::ByRows { num_topk, num_experts },
        Overlap::On => Cut::ByTokens,
    }
}

/// The deployment with what `auto` means between GPUs, where every rank drives one: bf16 tokens, and one bf16 row a rank.
fn settled(deployment: &Deployment) -> Deployment {
    let mut settled = deployment.clone();
    if deployment.cluster.device != Device::Gpu {
        return settled;
    }
    if deployment.dispatch.payload == Payload::Auto {
        settled.dispatch.payload = Payload::Bf16;
    }
    if deployment.dispatch.combine_dtype == CombineDtype::Auto {
        settled.dispatch.combine_dtype = CombineDtype::Bf16;
    }
    if deployment.moe.combine == Combine::Auto {
        settled.moe.combine = Combine::Rank;
    }
    settled
}

fn misfit(
    asked: &Asked<'_>,
    basis: &Basis<'_>,
    groups: &[ways::Decided<'_>],
    ranks: &[ranks::Ranks],
) -> Option<fit::Misfit> {
    let device_memory_bytes = asked.device_memory_bytes?;
    let all_experts = (Rank(0), asked.geometry.num_experts);
    let largest = |group: &&ways::Decided<'_>| basis.buffers(&group.chosen, all_experts).total_bytes();
    let decision = &groups.iter().max_by_key(largest)?.chosen;
    let most = &ranks.iter().rev().max_by_key(|rank| rank.group.needed_bytes)?.group;
    let ranks_per_node = (basis.levels == Levels::Two).then(|| basis.nodes.ranks(0).len());
    let sizes = Sizes {
        geometry: asked.geometry,
        layers: asked.layers,
        decision,
        device_memory_bytes,
        ranks_per_node,
        // What fits is declared as a chunk.
        num_sets: if basis.num_buffered > basis.tokens_at_once { 2 } else { 1 },
    };
    sizes.misfit(most, basis.flows.len(), basis.tokens_at_once)
}

/// The keys whose absence leaves out a floor.
fn missing(links: &Links, steps: &[StepWay]) -> Vec<&'static str> {
    let keys = [
        ("links.memory_gbyte_per_s", links.memory_gbyte_per_s),
        ("links.tflops_bf16", links.tflops_bf16),
        ("links.scale_up_gbyte_per_s", links.scale_up_gbyte_per_s),
        ("links.scale_out_gbyte_per_s", links.scale_out_gbyte_per_s),
    ];
    let is_wanted = |at: usize| steps.iter().any(|step| step.floors.by_resource()[at].is_none());
    keys.into_iter()
        .enumerate()
        .filter(|(at, (_, rate))| rate.is_none() && is_wanted(*at))
        .map(|(_, (key, _))| key)
        .collect()
}
