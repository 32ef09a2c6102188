//! The two hops of a dispatch in two levels, over MPI: sizes, then tokens, in either.

use super::{Came, Cargo, Slots, TokenTransport, carry, exchange, quantity, scaled};
use crate::dispatch::packing::{pack, pack_forward};
use crate::dispatch::passing::{ChunkTag, ForwardError, tell_node};
use crate::dispatch::two_level::TwoLevelPlan;
use crate::fault::Stage;
use crate::world::{Parts, World};

impl TokenTransport<'_> {
    /// Sends the tokens once to each node, and passes those on that came here for others; collective.
    pub(super) fn go_in_two_levels(
        &self,
        world: &World,
        plans: TwoLevelPlan<'_>,
        (values, slots): (&[f32], Slots<'_>),
        (tag, chunk_tokens): (ChunkTag, usize),
    ) -> Result<Came, ForwardError> {
        let (rank, layout) = (world.rank(), self.travel.layout(slots.num_topk));
        let row_bytes = layout.row_bytes();
        let crossing = plans.cross(slots);
        let id_of = |to: usize, expert| plans.id_in_node(to, expert);
        let (bytes, sent_quant) = pack(&layout, (&crossing, slots), values, id_of);
        let (entered, num_entered) = exchange(world, &crossing, &bytes, (row_bytes, chunk_tokens));
        drop(bytes);
        world.fault(Stage::Forward)?;
        let (forward, bytes) = pack_forward(plans, &layout, &entered, &num_entered);
        drop(entered);
        let arrival = tell_node(world, plans, &forward.num_tokens, tag)?;
        let send = Parts { bytes: &bytes, counts: &scaled(&forward.plan.num_tokens_to(), row_bytes) };
        let num_arriving = scaled(&arrival.num_tokens_from, row_bytes);
        // Whoever passes on for the most ranks may have as many chunks for one of its node.
        let max_run_bytes = plans.nodes.max_sources() * chunk_tokens * row_bytes;
        let bytes = carry(world, Cargo::Tokens, send, &num_arriving, max_run_bytes);
        let num_sent_remote = quantity(crossing.num_remote(rank) + forward.plan.num_remote(rank));
        let num_received = arrival.num_tokens_of.clone();
        Ok(Came { bytes, num_received, arrival: Some(arrival), sent_quant, num_sent_remote })
    }
}
