//! What each rank holds and sends; ranks in a row that are alike stand as one group.

use std::ops::Range;

use serde::Serialize;

use crate::dispatch::capacity::BufferPlan;
use crate::ids::Rank;

use super::Basis;
use super::traffic::Flow;
use super::ways::{self, Decided};

/// Ranks in a row that are alike.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankGroup {
    /// The first.
    pub first_rank: u32,
    /// The last.
    pub last_rank: u32,
    /// Experts of a layer.
    pub num_experts: usize,
    /// Bytes of their weights over all layers.
    pub expert_weight_bytes: u64,
    /// Bytes of what every rank holds over all layers: routers, latent projections, shared experts.
    pub replicated_weight_bytes: u64,
    /// Dispatch buffers of the layer that needs the most.
    pub buffers: BufferPlan,
    /// All of them.
    pub buffer_bytes: u64,
    /// Weights and buffers.
    pub needed_bytes: u64,
    /// What it sends in a step of all layers, by how tokens travel.
    pub step: Vec<RankStep>,
}

/// What one rank sends to others in a step of all layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RankStep {
    /// The form of a travelling token's values.
    pub payload: &'static str,
    /// Tokens, within the node.
    pub dispatch_scale_up_bytes: u64,
    /// Tokens, to other nodes.
    pub dispatch_scale_out_bytes: u64,
    /// Rows going back, within the node.
    pub combine_scale_up_bytes: u64,
    /// Rows going back to other nodes.
    pub combine_scale_out_bytes: u64,
    /// All of it.
    pub sent_bytes: u64,
}

/// A group, and what it was computed from.
pub(super) struct Ranks {
    pub group: RankGroup,
    pub flow: Flow,
    /// Of the first rank.
    pub experts: Range<usize>,
}

pub(super) fn groups(basis: &Basis<'_>, decided: &[Decided<'_>]) -> Vec<Ranks> {
    let payloads = ways::payloads(basis, decided);
    let replicated = basis.layers.iter().map(|layer| layer.replicated_bytes(basis.geometry)).sum();
    let mut groups: Vec<Ranks> = Vec::new();
    for (rank, flow) in basis.flows.iter().enumerate() {
        let rank = Rank::from_index(rank);
        let experts = basis.placement.local_experts(rank);
        let of_layer = |group: &Decided<'_>| {
            group.layers[0].local_expert_bytes(basis.geometry, experts.clone()) * group.layers.len() as u64
        };
        let bytes = decided.iter().map(of_layer).sum();
        if let Some(Ranks { group, flow: known, .. }) = groups.last_mut()
            && (group.num_experts, group.expert_weight_bytes, &*known) == (experts.len(), bytes, flow)
        {
            group.last_rank = rank.0;
            continue;
        }
        let buffers = decided.iter().map(|group| basis.buffers(&group.chosen, (rank, experts.len())));
        let buffers = buffers.max_by_key(BufferPlan::total_bytes).unwrap_or_default();
        groups.push(Ranks {
            group: RankGroup {
                first_rank: rank.0,
                last_rank: rank.0,
                num_experts: experts.len(),
                expert_weight_bytes: bytes,
                replicated_weight_bytes: replicated,
                buffers,
                buffer_bytes: buffers.total_bytes(),
                needed_bytes: bytes + replicated + buffers.total_bytes(),
                step: payloads.iter().map(|payload| step(basis, decided, payload, flow)).collect(),
            },
            flow: *flow,
            experts,
        });
    }
    groups
}

fn step(basis: &Basis<'_>, decided: &[Decided<'_>], payload: &'static str, flow: &Flow) -> RankStep {
    let mut sent = [0.0; 4];
    for group in decided {
        let moved = basis.moved(flow, group.way(basis, payload));
        let times = group.layers.len() as f64 * basis.num_tokens as f64;
        let of_layer = [
            moved.dispatch_sent.scale_up,
            moved.dispatch_sent.scale_out,
            moved.combine_sent.scale_up,
            moved.combine_sent.scale_out,
        ];
        sent.iter_mut().zip(of_layer).for_each(|(sum, bytes)| *sum += bytes * times);
    }
    let [dispatch_scale_up, dispatch_scale_out, combine_scale_up, combine_scale_out] = sent.map(whole);
    RankStep {
        payload,
        dispatch_scale_up_bytes: dispatch_scale_up,
        dispatch_scale_out_bytes: dispatch_scale_out,
        combine_scale_up_bytes: combine_scale_up,
        combine_scale_out_bytes: combine_scale_out,
        sent_bytes: whole(sent.iter().sum()),
    }
}

/// An expectation as a count of bytes.
#[expect(clippy::cast_possible_truncation, reason = "a conversion from f64 saturates, far above any traffic")]
fn whole(bytes: f64) -> u64 {
    bytes.round() as u64
}
