//! A few tokens between devices that store into each other's memory, in one launch: from values at home to rows as experts read
//! them. What [`Stages`] do in several, with no buffer between.

use super::stages::narrow;
use super::{Buffers, DeviceTokens, DeviceTransport, Stages};
use crate::cuda::LaunchShape;
use crate::dispatch::carrier::CarryError;
use crate::dispatch::combine::CombineMode;
use crate::dispatch::nvlink::{Nvlink, Push};
use crate::dispatch::region::{are_tagged, tagged_shared_bytes};
use crate::dispatch::travel::Travel;
use crate::gpu::{GpuError, grow};
use crate::jit::kernels::few::{FewArgs, NUM_THREADS, num_send_blocks, num_take_blocks};
use crate::world::World;

/// What a launch is of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Few {
    /// Tokens that any rank brings, at most.
    pub max_tokens: usize,
    /// Address of the numbers of a step that no host follows; else 0.
    pub live: u64,
    /// Address of what leaves in the whole step, counted, where this is its first chunk and the rest follow; else 0.
    pub of_step: u64,
}

/// Which of its sides are in a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sides {
    /// What sends, which waits for nothing.
    Send,
    /// What takes, which waits for what all ranks send.
    Take,
    /// Either.
    Both,
}

impl DeviceTransport {
    /// Whether a chunk of so many tokens a rank, of so many slots, goes so: the same on all ranks.
    pub(super) fn are_tagged(&self, size: (usize, usize)) -> bool {
        are_tagged(size, self.stages.forms().travel.placement, self.takes_turns)
    }

    /// Queues the way of `tokens` to their experts' ranks and of those that come here; collective. The host has the counts of both
    /// at the next mark.
    pub(super) fn dispatch_few(
        &self,
        (world, nvlink): (&World, &Nvlink),
        buffers: &mut Buffers,
        tokens: &DeviceTokens<'_>,
        (push, few): (&Push, Few),
    ) -> Result<(), CarryError> {
        if nvlink.shares_gpus() {
            self.queue_few(buffers, tokens, (nvlink, push), (few, Sides::Send))?;
            nvlink.meet((world, &self.gpu))?;
            self.queue_few(buffers, tokens, (nvlink, push), (few, Sides::Take))?;
        } else {
            self.queue_few(buffers, tokens, (nvlink, push), (few, Sides::Both))?;
        }
        Ok(())
    }

    /// Queues one launch of it.
    pub(super) fn queue_few(
        &self,
        buffers: &mut Buffers,
        tokens: &DeviceTokens<'_>,
        (nvlink, push): (&Nvlink, &Push),
        of: (Few, Sides),
    ) -> Result<(), GpuError> {
        self.stages.queue_few(buffers, tokens, nvlink.few(push), of)
    }
}

impl Stages {
    /// Queues a launch, of whose argument `region` has what the memory that ranks share decides.
    pub(super) fn queue_few(
        &self,
        buffers: &mut Buffers,
        tokens: &DeviceTokens<'_>,
        region: FewArgs,
        (few, sides): (Few, Sides),
    ) -> Result<(), GpuError> {
        let Travel { placement, payload, row_form, .. } = self.forms().travel;
        let (num_tokens, max_received) = (tokens.tokens.len(), few.max_tokens * placement.num_ranks());
        self.room_for_totals(buffers)?;
        self.room_for_rows(buffers, (max_received, max_received * tokens.num_topk), tokens.num_topk)?;
        grow(&mut buffers.home_rows, num_tokens * tokens.num_topk)?;
        grow(&mut buffers.expert_offsets, self.num_experts() + 1)?;
        let shared_bytes = narrow(tagged_shared_bytes((few.max_tokens, tokens.num_topk), placement));
        self.few.allow_dynamic_shared(shared_bytes)?;
        // Those that take wait for those that send, which have to have a place beside them.
        let most = self.gpu().device().facts().num_multiprocessors - 1;
        let arriving = (payload, self.forms().quantise.is_some());
        let num_send_blocks = num_send_blocks(narrow(num_tokens), row_form.hidden, payload);
        let num_take_blocks = num_take_blocks(narrow(max_received), row_form.hidden, arriving, most);
        let args = FewArgs {
            num_send_blocks: if sides == Sides::Take { 0 } else { num_send_blocks },
            num_take_blocks: if sides == Sides::Send { 0 } else { num_take_blocks },
            ..self.few_args(buffers, tokens, region, few)?
        };
        let shape = LaunchShape::rows(args.num_send_blocks + args.num_take_blocks, NUM_THREADS);
        self.launch(&self.few, LaunchShape { shared_bytes, ..shape }, &args)
    }

    fn few_args(
        &self,
        buffers: &Buffers,
        tokens: &DeviceTokens<'_>,
        region: FewArgs,
        few: Few,
    ) -> Result<FewArgs, GpuError> {
        let Travel { placement, payload, mode, row_form } = self.forms().travel;
        let DeviceTokens { values, ids, weights, tokens, num_topk, live_tokens, .. } = tokens;
        let of_tokens = |width: usize| tokens.start * width..tokens.end * width;
        Ok(FewArgs {
            values: values.address_of(of_tokens(row_form.hidden))?,
            ids: ids.address_of(of_tokens(*num_topk))?,
            weights: weights.address_of(of_tokens(*num_topk))?,
            live_tokens: *live_tokens,
            totals: buffers.totals.address(),
            host_totals: buffers.host_totals.address(),
            of_step: few.of_step,
            home_rows: buffers.home_rows.address(),
            counts: buffers.counts.address(),
            live: few.live,
            expert_offsets: buffers.expert_offsets.address(),
            tokens: buffers.tokens.address(),
            received_weights: buffers.weights.address(),
            row_token: buffers.row_token.address(),
            return_rows: buffers.return_rows.address(),
            slot_row: buffers.slot_row.address(),
            row_bytes: self.forms().travel.layout(*num_topk).row_bytes() as u64,
            return_bytes: row_form.form.row_bytes(row_form.hidden) as u64,
            num_tokens: narrow(tokens.len()),
            max_tokens: narrow(few.max_tokens),
            num_topk: narrow(*num_topk),
            num_experts: narrow(placement.num_experts()),
            num_local_experts: narrow(self.num_experts()),
            per_slot: u32::from(mode == CombineMode::Slot),
            input_scale: payload.input_scale(),
            arrived_scale: self.forms().quantise.unwrap_or(1.0),
            ..region
        })
    }
}
