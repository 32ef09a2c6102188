//! The ways in which tokens may travel, beside each other: what each costs on the links, and its floors.

use serde::Serialize;

use crate::config::{Levels, Payload, Transport};
use crate::dispatch::capacity::{BufferPlan, ForwardSizes};
use crate::dispatch::combine::CombineMode;
use crate::dispatch::region::tagged_plan_bytes;
use crate::dispatch::travel::{buffer_sizes, combine_mode, row_form, token_layout};
use crate::ids::Rank;
use crate::select::{LayerDecision, SelectError, decide};

use super::floor::{Floors, Work};
use super::ranks::{RankStep, Ranks};
use super::traffic::{ByLink, Flow};
use super::{Basis, PlanError, StoredLayer};

/// Layers that are stored alike.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerGroup {
    /// Which.
    pub layers: Vec<u32>,
    /// Their numeric contract.
    pub quant: &'static str,
    /// How their tokens may travel.
    pub ways: Vec<Way>,
}

/// One way for the tokens of a layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Way {
    /// The form of a travelling token's values.
    pub payload: &'static str,
    /// Whether the deployment chooses it.
    pub is_chosen: bool,
    /// Bytes of a token to one destination: all of what follows.
    pub token_bytes: usize,
    /// Its values, or their codes.
    pub values_bytes: usize,
    /// The codes' block scales.
    pub scales_bytes: usize,
    /// Expert ids and weights of its slots.
    pub slots_bytes: usize,
    /// Where routing weights are applied.
    pub combine: &'static str,
    /// The form of a row that comes back.
    pub combine_dtype: &'static str,
    /// Bytes of a row that comes back.
    pub row_bytes: usize,
    /// The least time of one layer.
    pub floors: Floors,
}

/// A step of all layers in which tokens travel in one form, wherever layers allow it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepWay {
    /// The form.
    pub payload: &'static str,
    /// Whether the deployment chooses it for some layer.
    pub is_chosen: bool,
    /// The most bytes that a rank sends for dispatch over scale-up links.
    pub dispatch_scale_up_bytes: u64,
    /// The same over scale-out links.
    pub dispatch_scale_out_bytes: u64,
    /// The most bytes that a rank sends back for combine over scale-up links.
    pub combine_scale_up_bytes: u64,
    /// The same over scale-out links.
    pub combine_scale_out_bytes: u64,
    /// The least time.
    pub floors: Floors,
}

/// Layers that are stored alike, and how they may run.
pub(super) struct Decided<'a> {
    pub layers: Vec<&'a StoredLayer>,
    /// As the deployment has it.
    pub chosen: LayerDecision,
    /// Every way, the chosen one among them.
    pub ways: Vec<LayerDecision>,
}

/// What a rank sends and receives, in bytes, for one token of every rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moved {
    pub dispatch_sent: ByLink,
    pub dispatch_received: ByLink,
    pub combine_sent: ByLink,
    pub combine_received: ByLink,
}

/// The payloads that are shown beside the chosen one.
const COMPARED: [Payload; 2] = [Payload::Bf16, Payload::Nvfp4];

pub(super) fn groups<'a>(basis: &Basis<'a>) -> Result<Vec<Decided<'a>>, PlanError> {
    let mut groups: Vec<Decided<'a>> = Vec::new();
    for layer in basis.layers {
        match groups.iter_mut().find(|group| group.layers[0].is_like(layer)) {
            Some(group) => group.layers.push(layer),
            None => groups.push(Decided::new(basis, layer)?),
        }
    }
    Ok(groups)
}

impl<'a> Decided<'a> {
    fn new(basis: &Basis<'a>, layer: &'a StoredLayer) -> Result<Self, PlanError> {
        let decide_as = |payload| {
            let mut deployment = basis.deployment.clone();
            deployment.dispatch.payload = payload;
            decide(&layer.facts, basis.geometry, &deployment, true)
        };
        let chosen = decide_as(basis.deployment.dispatch.payload)?;
        let mut ways = Vec::new();
        for payload in COMPARED {
            match decide_as(payload) {
                Ok(decision) => ways.push(decision),
                Err(SelectError::PayloadNeedsQuantised { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if !ways.contains(&chosen) {
            ways.push(chosen);
        }
        Ok(Self { layers: vec![layer], chosen, ways })
    }

    /// The way with this payload, or the chosen one where the layer has no such.
    pub fn way(&self, basis: &Basis<'_>, payload: &str) -> &LayerDecision {
        let is_so = |way: &&LayerDecision| token_layout(basis.geometry, way).payload.name() == payload;
        self.ways.iter().find(is_so).unwrap_or(&self.chosen)
    }
}

/// The payloads of all groups, each once.
pub(super) fn payloads(basis: &Basis<'_>, groups: &[Decided<'_>]) -> Vec<&'static str> {
    let mut names = Vec::new();
    for way in groups.iter().flat_map(|group| &group.ways) {
        let name = token_layout(basis.geometry, way).payload.name();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

impl Basis<'_> {
    /// Buffers of `rank` with `num_local_experts` in a layer that runs so.
    pub(super) fn buffers(&self, decision: &LayerDecision, (rank, num_local_experts): (Rank, usize)) -> BufferPlan {
        let forwards = (self.levels == Levels::Two).then(|| ForwardSizes::new(&self.nodes, rank));
        let sizes = buffer_sizes(self.geometry, decision, (self.flows.len(), num_local_experts), forwards);
        let mut plan = BufferPlan::new(&sizes, self.num_buffered);
        if self.deployment.dispatch.transport == Transport::Nvlink {
            plan.receive_bytes += tagged_plan_bytes(&sizes, self.tokens_at_once);
        }
        plan
    }

    pub(super) fn moved(&self, flow: &Flow, decision: &LayerDecision) -> Moved {
        let token_bytes = token_layout(self.geometry, decision).row_bytes() as f64;
        let row = row_form(self.geometry, decision);
        let row_bytes = row.form.row_bytes(row.hidden) as f64;
        let (rows_sent, rows_received) = match combine_mode(decision) {
            CombineMode::Slot => (flow.slots_sent, flow.slots_received),
            CombineMode::Rank => (flow.tokens_sent, flow.tokens_received),
        };
        Moved {
            dispatch_sent: flow.dispatch_sent.times(token_bytes),
            dispatch_received: flow.dispatch_received.times(token_bytes),
            // Rows go the way back: what was received is answered.
            combine_sent: rows_received.times(row_bytes),
            combine_received: rows_sent.times(row_bytes),
        }
    }

    /// What a rank has to do for one layer.
    fn work(&self, layer: &StoredLayer, decision: &LayerDecision, rank: &Ranks) -> Work {
        let tokens = self.num_tokens as f64;
        let moved = self.moved(&rank.flow, decision);
        let one_way =
            |sent: [f64; 2], received: [f64; 2]| (sent[0].max(received[0]) + sent[1].max(received[1])) * tokens;
        let travelling: f64 =
            [moved.dispatch_sent, moved.dispatch_received, moved.combine_sent, moved.combine_received]
                .iter()
                .map(ByLink::total)
                .sum();
        let local_bytes = layer.local_expert_bytes(self.geometry, rank.experts.clone()) as f64;
        let replicated = if self.num_tokens == 0 { 0.0 } else { layer.replicated_bytes(self.geometry) as f64 };
        Work {
            memory_bytes: local_bytes * self.expert_reads() + replicated + travelling * tokens,
            flops: (rank.flow.slots_received.total() * self.row_flops() + self.token_flops()) * tokens,
            scale_up_bytes: one_way(
                [moved.dispatch_sent.scale_up, moved.combine_sent.scale_up],
                [moved.dispatch_received.scale_up, moved.combine_received.scale_up],
            ),
            scale_out_bytes: one_way(
                [moved.dispatch_sent.scale_out, moved.combine_sent.scale_out],
                [moved.dispatch_received.scale_out, moved.combine_received.scale_out],
            ),
        }
    }

    /// How often an expert's weights are read: in every chunk in which it has a row.
    fn expert_reads(&self) -> f64 {
        let num_ranks = self.flows.len() as f64;
        let used =
            |chunk: usize| self.reach.is_used(num_ranks * self.chunks.tokens(chunk, self.num_tokens).len() as f64);
        let last = self.chunks.num_chunks - 1;
        used(0) * last as f64 + used(last)
    }

    /// Operations of a routed row.
    fn row_flops(&self) -> f64 {
        6.0 * self.geometry.expert_hidden as f64 * self.geometry.intermediate as f64
    }

    /// Operations of a token on its own rank: router, latent projections, shared experts.
    fn token_flops(&self) -> f64 {
        let hidden = self.geometry.hidden as f64;
        let latent = if self.geometry.latent.is_some() { 4.0 * self.geometry.expert_hidden as f64 } else { 0.0 };
        let shared = self.geometry.shared.map_or(0.0, |shared| 6.0 * shared.intermediate as f64);
        hidden * (2.0 * self.geometry.num_experts as f64 + latent + shared)
    }
}

pub(super) fn layers(basis: &Basis<'_>, groups: &[Decided<'_>], ranks: &[Ranks]) -> Vec<LayerGroup> {
    let of_group = |group: &Decided<'_>| LayerGroup {
        layers: group.layers.iter().map(|layer| layer.facts.layer.0).collect(),
        quant: group.chosen.quant.name(),
        ways: group.ways.iter().map(|way| self::way(basis, group, way, ranks)).collect(),
    };
    groups.iter().map(of_group).collect()
}

fn way(basis: &Basis<'_>, group: &Decided<'_>, decision: &LayerDecision, ranks: &[Ranks]) -> Way {
    let layout = token_layout(basis.geometry, decision);
    let (values_bytes, scales_bytes) = layout.payload.parts(layout.hidden);
    let row = row_form(basis.geometry, decision);
    let floors = ranks
        .iter()
        .map(|rank| basis.work(group.layers[0], decision, rank).floors(&basis.deployment.links))
        .reduce(|slowest, floors| slowest.slower(&floors));
    Way {
        payload: layout.payload.name(),
        is_chosen: *decision == group.chosen,
        token_bytes: layout.row_bytes(),
        values_bytes,
        scales_bytes,
        slots_bytes: layout.row_bytes() - values_bytes - scales_bytes,
        combine: combine_mode(decision).name(),
        combine_dtype: row.form.name(),
        row_bytes: row.form.row_bytes(row.hidden),
        floors: floors.unwrap_or(Floors::ZERO),
    }
}

pub(super) fn steps(layers: &[LayerGroup], ranks: &[Ranks]) -> Vec<StepWay> {
    let Some(first) = ranks.first() else { return Vec::new() };
    let of_payload = |(at, step): (usize, &RankStep)| {
        let most = |bytes: fn(&RankStep) -> u64| {
            ranks.iter().map(|rank| bytes(&rank.group.step[at])).max().unwrap_or_default()
        };
        let chosen = |group: &LayerGroup| group.ways.iter().any(|way| way.is_chosen && way.payload == step.payload);
        StepWay {
            payload: step.payload,
            is_chosen: layers.iter().any(chosen),
            dispatch_scale_up_bytes: most(|step| step.dispatch_scale_up_bytes),
            dispatch_scale_out_bytes: most(|step| step.dispatch_scale_out_bytes),
            combine_scale_up_bytes: most(|step| step.combine_scale_up_bytes),
            combine_scale_out_bytes: most(|step| step.combine_scale_out_bytes),
            floors: layers.iter().fold(Floors::ZERO, |sum, group| {
                let of_layer = group.floors_of(step.payload);
                group.layers.iter().fold(sum, |sum, _| sum.then(&of_layer))
            }),
        }
    };
    first.group.step.iter().enumerate().map(of_payload).collect()
}

impl LayerGroup {
    /// The floors of a layer whose tokens travel so, or as the deployment chooses where it can't.
    fn floors_of(&self, payload: &str) -> Floors {
        let with = |is_it: &dyn Fn(&Way) -> bool| self.ways.iter().find(|way| is_it(way)).map(|way| way.floors);
        with(&|way| way.payload == payload).or_else(|| with(&|way| way.is_chosen)).unwrap_or(Floors::ZERO)
    }
}
