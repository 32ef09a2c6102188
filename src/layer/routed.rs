//! The routed part of a layer on hosts: dispatch, experts, combine, chunk by chunk. What all ranks agree on in a step first is
//! the same for [`super::device`].

use crate::backend::{BackendError, ExpertBatch, ForwardStats};
use crate::dispatch::capacity::{Capacity, Chunks};
use crate::dispatch::layout::PayloadForm;
use crate::dispatch::overlap::Cut;
use crate::dispatch::passing::{ChunkTag, StepTag};
use crate::dispatch::plan::{ComputePlan, Slots};
use crate::dispatch::transport::{TokenTransport, exchange_sizes};
use crate::fault::{Action, Stage};
use crate::numerics::nvfp4;
use crate::routing::TopK;
use crate::select::tactics::{RowBucket, Tactic};
use crate::world::World;

use super::{LayerError, LayerStats, MoeLayer, Work, parts};

/// What a rank brings to a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Brought {
    pub num_tokens: usize,
    pub num_topk: usize,
    /// Counts the steps of a run.
    pub step: u64,
}

impl MoeLayer {
    /// Learns every rank's tokens and cuts the step into chunks; collective.
    pub(super) fn chunks(
        &self,
        world: &World,
        capacity: Capacity,
        brought: Brought,
        stats: &mut LayerStats,
    ) -> Result<Chunks, LayerError> {
        let Brought { num_tokens, num_topk, step } = brought;
        let drift = u64::from(world.has_fault(Stage::Dispatch, &Action::Drift));
        let tag = StepTag { layer: self.decision.layer, step: step + drift, num_topk };
        let cut = self.overlap.as_ref().map_or(Cut::Never, |overlap| overlap.cut(num_topk, self.geometry.num_experts));
        let capacity = capacity.with_cut(cut);
        let sizes = stats.times.dispatch(|| exchange_sizes(world, tag, num_tokens, capacity));
        let chunks = sizes.map_err(|error| world.refuse(error))?;
        stats.num_chunks = chunks.num_chunks as u64;
        Ok(chunks)
    }

    /// Dispatch, expert computation and combine of this rank's tokens; collective.
    pub(super) fn routed_on_host(
        &self,
        world: &World,
        capacity: Capacity,
        (values, topk, step): (&[f32], &TopK, u64),
        stats: &mut LayerStats,
    ) -> Result<Vec<f32>, LayerError> {
        let hidden = self.geometry.expert_hidden;
        let transport = TokenTransport { travel: self.travel, nodes: self.nodes.as_deref() };
        let all = Slots { num_topk: topk.num_topk, idx: &topk.idx, weights: &topk.weights };
        let num_tokens = all.num_tokens();
        let chunks = self.chunks(world, capacity, Brought { num_tokens, num_topk: topk.num_topk, step }, stats)?;
        // From every rank's tokens, so that all ranks run the same: a rank's own rows are no ground.
        let rows = RowBucket::of(chunks.first_chunk_tokens * topk.num_topk, self.geometry.num_experts);
        let tactic = self.tactics[rows.index()];
        let mut out = vec![0f32; num_tokens * hidden];
        let sent_bytes = || world.exchanged().sent_bytes;
        for chunk in 0..chunks.num_chunks {
            let tokens = chunks.tokens(chunk, num_tokens);
            let slots = all.tokens(tokens.clone());
            let span = tokens.start * hidden..tokens.end * hidden;
            world.fault(Stage::Dispatch)?;
            let sent_before = sent_bytes();
            let step = StepTag { layer: self.decision.layer, step, num_topk: topk.num_topk };
            let bounds = (ChunkTag { step, chunk }, chunks.chunk_tokens);
            let tokens_out = (&values[span.clone()], slots);
            let mut handle = stats.times.dispatch(|| transport.dispatch(world, tokens_out, bounds))?;
            stats.count_dispatch(&handle);
            let (chunk, num_tokens, num_rows) = (chunk as u64, tokens.len() as u64, handle.compute.num_rows() as u64);
            let work = |sent_bytes| Work { chunk, num_tokens, num_rows, sent_bytes };
            stats.times.describe(work(sent_bytes() - sent_before));
            world.fault(Stage::Experts)?;
            let poison = world.has_fault(Stage::Experts, &Action::Poison);
            let rows = stats.times.experts(|| self.compute(&mut handle.tokens, &handle.compute, (tactic, poison)));
            let (rows, forward, fc1_input) = rows?;
            stats.count_forward(forward, fc1_input);
            stats.times.describe(Work { num_tokens: handle.num_received_tokens() as u64, ..work(0) });
            world.fault(Stage::Combine)?;
            let sent_before = sent_bytes();
            stats.times.combine(|| {
                transport.combine(world, &handle, &rows, (slots, chunks.chunk_tokens), &mut out[span]);
            });
            stats.times.describe(work(sent_bytes() - sent_before));
        }
        Ok(out)
    }

    /// The received tokens through this rank's experts: `[num_rows, hidden]`.
    fn compute(
        &self,
        tokens: &mut [f32],
        plan: &ComputePlan,
        (tactic, poison): (Tactic, bool),
    ) -> Result<(Vec<f32>, ForwardStats, nvfp4::QuantCounts), BackendError> {
        let hidden = self.geometry.expert_hidden;
        let mut fc1_input = nvfp4::QuantCounts::default();
        let travelled_quantised = matches!(self.travel.payload, PayloadForm::Nvfp4 { .. });
        if let Some(input_scale) = self.input_scale
            && !travelled_quantised
        {
            fc1_input = parts::quantise_in_place(tokens, hidden, input_scale);
        }
        let batch = ExpertBatch {
            tokens,
            token_scale: self.input_scale.unwrap_or(1.0),
            row_token: &plan.row_token,
            expert_offsets: &plan.expert_offsets,
            tactic,
        };
        // A poisoned buffer shows whether every value is written: all bits set is a NaN.
        let stale = if poison { f32::from_bits(u32::MAX) } else { 0.0 };
        let mut rows = vec![stale; plan.num_rows() * hidden];
        let stats = self.experts.forward(&batch, &mut rows)?;
        Ok((rows, stats, fc1_input))
    }
}
