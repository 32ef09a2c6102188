//! Dispatch in two levels between devices, by the plans of [`crate::dispatch::two_level`]: tokens are carried once to each node,
//! and passed on in it as they came. Bit for bit what [`crate::dispatch::packing`] packs.

use std::rc::Rc;

use super::stages::{LeavingKernels, narrow, num_tiles};
use super::{Buffers, DeviceHandle, DeviceTokens, DeviceTransport, Forms, Stages, scaled};
use crate::cuda::{DeviceBuffer, PinnedBuffer};
use crate::dispatch::carrier::{Carrier, CarryError};
use crate::dispatch::counts::SentCounts;
use crate::dispatch::crossing::ToldCrossing;
use crate::dispatch::nodes::Nodes;
use crate::dispatch::passing::{ChunkTag, ForwardError, StepTag, tell_node};
use crate::dispatch::placement::Placement;
use crate::dispatch::region::MAX_PEERS;
use crate::dispatch::two_level::{ArrivalPlan, TwoLevelPlan};
use crate::fault::Stage;
use crate::gpu::{Gpu, GpuError, grow};
use crate::ids::Rank;
use crate::jit::kernels::dispatch::DispatchArgs;
use crate::jit::kernels::nvlink::Run;
use crate::select::registry::MAX_FORWARDING_GPUS;
use crate::world::{Cargo, World};

const _: () = assert!(MAX_FORWARDING_GPUS == MAX_PEERS, "what arrives is read in a run a source");

/// What a rank has for two levels beside what it has for one.
#[derive(Debug)]
pub struct TwoLevels {
    gpu: Gpu,
    nodes: Rc<Nodes>,
    placement: Placement,
    rank: Rank,
    /// `[num_ranks]` the rank through which this one's tokens come to each.
    entries: DeviceBuffer<u32>,
    passing_on: LeavingKernels,
}

impl TwoLevels {
    /// Loads the kernels that pass tokens of `forms` on, and the table of who does.
    ///
    /// # Errors
    /// If they were not prepared or don't load.
    pub fn new(gpu: &Gpu, forms: Forms, (rank, nodes): (Rank, Rc<Nodes>)) -> Result<Self, GpuError> {
        let placement = forms.travel.placement;
        let entry = |to| nodes.forwarder(rank, nodes.of(Rank::from_index(to))).0;
        let entries: Vec<u32> = (0..nodes.num_ranks()).map(entry).collect();
        let entries = DeviceBuffer::from_slice(gpu.stream(), &entries)?;
        let passing_on = LeavingKernels::new(gpu, forms.kernels().forward(gpu.arch()), placement.num_ranks())?;
        Ok(Self { gpu: gpu.clone(), nodes, placement, rank, entries, passing_on })
    }

    fn plans(&self) -> TwoLevelPlan<'_> {
        TwoLevelPlan { placement: self.placement, nodes: &self.nodes, rank: self.rank }
    }

    /// Counts what leaves in the first hop, and, as in one level, what goes to which rank and where rows come home; the host has
    /// the counts at the next mark.
    ///
    /// # Errors
    /// If there is no memory or the driver fails.
    pub fn count(&self, stages: &Stages, buffers: &mut Buffers, tokens: &DeviceTokens<'_>) -> Result<(), GpuError> {
        let num_ranks = self.nodes.num_ranks();
        if buffers.host_entering.len() != num_ranks {
            buffers.host_entering = PinnedBuffer::zeroed(self.gpu.device(), num_ranks)?;
        }
        stages.count(buffers, tokens)?;
        grow(&mut buffers.home_rows, tokens.tokens.len() * tokens.num_topk)?;
        // Rows come home in one level. Behind this the same buffers hold the counts of the first hop.
        let homes = DispatchArgs { packed: 0, ..stages.dispatch_args(buffers, tokens)? };
        stages.queue_pack(&stages.leaving, &homes)?;
        let args = self.crossing_args(stages, buffers, tokens)?;
        stages.queue_counts(&stages.leaving, &args, Some(&buffers.host_entering))
    }

    /// Packs the first hop's tokens into `buffers.packed`.
    ///
    /// # Errors
    /// If there is no memory or the driver fails.
    pub fn pack(&self, stages: &Stages, buffers: &mut Buffers, tokens: &DeviceTokens<'_>) -> Result<(), GpuError> {
        let num_nodes = tokens.num_topk.min(self.nodes.num_nodes());
        let row_bytes = stages.forms().travel.layout(tokens.num_topk).row_bytes();
        // As many as there can be: the host does not know how many there are.
        grow(&mut buffers.packed, tokens.tokens.len() * num_nodes * row_bytes)?;
        let args = self.crossing_args(stages, buffers, tokens)?;
        stages.queue_pack(&stages.leaving, &args)
    }

    fn crossing_args(
        &self,
        stages: &Stages,
        buffers: &Buffers,
        tokens: &DeviceTokens<'_>,
    ) -> Result<DispatchArgs, GpuError> {
        Ok(DispatchArgs { entries: self.entries.address(), home_rows: 0, ..stages.dispatch_args(buffers, tokens)? })
    }

    /// Packs the second hop's tokens, of what came in the first as `told`, from `buffers.entered` into `buffers.passed_on`.
    ///
    /// # Errors
    /// If there is no memory or the driver fails.
    pub fn pass_on(
        &self,
        stages: &Stages,
        buffers: &mut Buffers,
        (tokens, told): (&DeviceTokens<'_>, &ToldCrossing),
    ) -> Result<(), GpuError> {
        let layout = stages.forms().travel.layout(tokens.num_topk);
        let row_bytes = layout.row_bytes();
        let num_entered: usize = told.num_entering.iter().sum();
        let num_passed_on: usize = told.num_tokens_to(self.plans()).iter().sum();
        stages.grow_for_counts(buffers, (num_entered, tokens.num_topk))?;
        grow(&mut buffers.passed_on, num_passed_on * row_bytes)?;
        let entered = buffers.entered.address();
        let args = DispatchArgs {
            values: entered,
            ids: entered + layout.idx_at() as u64,
            weights: entered + layout.weights_at() as u64,
            packed: buffers.passed_on.address(),
            home_rows: 0,
            value_bytes: row_bytes as u64,
            slot_stride: (row_bytes / size_of::<u32>()) as u64,
            num_tokens: narrow(num_entered),
            num_tiles: narrow(num_tiles(num_entered).max(1)),
            ..stages.dispatch_args(buffers, tokens)?
        };
        stages.queue_counts(&self.passing_on, &args, None)?;
        stages.queue_pack(&self.passing_on, &args)
    }

    /// Where the tokens of each source lie, of what arrives in the second hop at `arrived`.
    #[must_use]
    pub fn arrived(arrival: &ArrivalPlan, arrived: u64, row_bytes: usize) -> [Run; MAX_PEERS] {
        let at = |source: usize| arrived + (arrival.starts[source] * row_bytes) as u64;
        Run::of(&arrival.num_tokens_of, row_bytes, at)
    }
}

impl DeviceTransport {
    /// As [`DeviceTransport::dispatch`], in two levels.
    pub(super) fn dispatch_in_two_levels(
        &self,
        world: &World,
        buffers: &mut Buffers,
        (tokens, levels): (&DeviceTokens<'_>, &TwoLevels),
        (carrier, chunk_tokens): (&dyn Carrier, usize),
    ) -> Result<DeviceHandle, CarryError> {
        let (plans, num_topk) = (levels.plans(), tokens.num_topk);
        let row_bytes = self.stages.forms().travel.layout(num_topk).row_bytes();
        self.count_step(buffers, tokens)?;
        levels.count(&self.stages, buffers, tokens)?;
        self.gpu.move_mark(&mut buffers.counted)?;
        levels.pack(&self.stages, buffers, tokens)?;
        self.gpu.wait(world, "count of what leaves", &buffers.counted)?;
        let size = (tokens.tokens.len(), num_topk);
        let sent = SentCounts::new(plans.placement, &buffers.host_totals, size)?;
        let rows_of_step = self.tell_step(world, buffers, tokens)?;
        let crossing = plans.sent_crossing(&sent, &buffers.host_entering, size)?;
        let [to, from] = plans.crossing_lens();
        let told = world.all_to_all_u32(&plans.crossing_messages(&sent, &crossing), &to, &from);
        let told = plans.told_crossing(&told);

        // Once to each node
        let counts = [scaled(&crossing.num_tokens, row_bytes), scaled(&told.num_entering, row_bytes)];
        world.count_carried_to(Cargo::Tokens, &counts[0]);
        grow(&mut buffers.entered, counts[1].iter().sum())?;
        let max_run_bytes = chunk_tokens * row_bytes;
        self.carry(world, (carrier, &buffers.packed, &mut buffers.entered), &counts, max_run_bytes)?;
        world.fault(Stage::Forward).map_err(ForwardError::from)?;

        // Once to each rank of the node
        levels.pass_on(&self.stages, buffers, (tokens, &told))?;
        let step = StepTag { layer: self.layer, step: tokens.step, num_topk };
        let arrival = tell_node(world, plans, &told.num_passed_on, ChunkTag { step, chunk: tokens.chunk })?;
        let num_passed_on = told.num_tokens_to(plans);
        let counts = [scaled(&num_passed_on, row_bytes), scaled(&arrival.num_tokens_from, row_bytes)];
        world.count_carried_to(Cargo::Tokens, &counts[0]);
        grow(&mut buffers.arrived, counts[1].iter().sum())?;
        // Whoever passes on for the most ranks may have as many chunks for one of its node.
        let max_run_bytes = plans.nodes.max_sources() * max_run_bytes;
        self.carry(world, (carrier, &buffers.passed_on, &mut buffers.arrived), &counts, max_run_bytes)?;
        let runs = TwoLevels::arrived(&arrival, buffers.arrived.address(), row_bytes);
        self.stages.unpack(buffers, &told.received, num_topk, runs)?;

        let of_others = |counts: &[usize]| counts.iter().sum::<usize>() - counts[world.rank().index()];
        Ok(DeviceHandle {
            num_packed: crossing.num_tokens.iter().sum(),
            num_sent_remote: of_others(&crossing.num_tokens) + of_others(&num_passed_on),
            sent,
            received: told.received,
            rows_of_step,
            pushed: None,
        })
    }
}
