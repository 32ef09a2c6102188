//! Dispatch and combine between hosts: packed and unpacked on the host's cores, carried by MPI. Carries out plans, decides
//! nothing.

use std::time::Instant;

use crate::dispatch::capacity::{Capacity, CapacityError, Chunks};
use crate::dispatch::combine::{self, CombineMode};
use crate::dispatch::layout::TokenLayout;
use crate::dispatch::nodes::Nodes;
use crate::dispatch::packing::{local_id, pack};
use crate::dispatch::passing::{ChunkTag, ForwardError, StepTag};
use crate::dispatch::plan::{ComputePlan, DispatchPlan, NOT_HERE, Slots};
use crate::dispatch::travel::Travel;
use crate::dispatch::two_level::{ArrivalPlan, TwoLevelPlan};
use crate::exit::{Classify, Exit};
use crate::ids::{LayerIdx, Rank};
use crate::numerics::nvfp4::QuantCounts;
use crate::world::{Cargo, Group, Parts, World};

mod forward;

/// Errors of a step's exchange, equal on all ranks.
#[derive(Debug, thiserror::Error)]
pub enum DispatchError {
    /// Ranks are not at the same layer and step, or their tokens have other numbers of slots.
    #[error(
        "{rank} is at {found}, while rank 0 is at {wanted}: every rank must call the same layers in the same order with \
         the same top-k"
    )]
    Drift {
        /// The lowest rank that differs from rank 0.
        rank: Rank,
        /// Where rank 0 is.
        wanted: StepTag,
        /// Where the other is.
        found: StepTag,
    },
    /// The sizes do not fit what was declared.
    #[error(transparent)]
    Capacity(#[from] CapacityError),
}

impl Classify for DispatchError {
    fn exit(&self) -> Exit {
        match self {
            Self::Drift { .. } => Exit::Disagreement,
            Self::Capacity(error) => error.exit(),
        }
    }
}

/// Learns every rank's token count and cuts the step into chunks; collective. The tag rides along: one exchange, not two.
///
/// # Errors
/// If ranks are at different steps or a count is over the capacity: on all ranks alike.
pub fn exchange_sizes(
    group: &impl Group,
    tag: StepTag,
    num_tokens: usize,
    capacity: Capacity,
) -> Result<Chunks, DispatchError> {
    let records = group.all_gather_u64([u64::from(tag.layer.0), tag.step, tag.num_topk as u64, num_tokens as u64]);
    let as_usize = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
    let tag_of = |record: &[u64; 4]| StepTag {
        layer: LayerIdx::from_index(as_usize(record[0])),
        step: record[1],
        num_topk: as_usize(record[2]),
    };
    let wanted = tag_of(&records[0]);
    if let Some(rank) = records.iter().position(|record| tag_of(record) != wanted) {
        return Err(DispatchError::Drift { rank: Rank::from_index(rank), wanted, found: tag_of(&records[rank]) });
    }
    let num_tokens: Vec<usize> = records.iter().map(|record| as_usize(record[3])).collect();
    Ok(capacity.chunks(&num_tokens)?)
}

/// Carries the tokens of one layer.
#[derive(Debug, Clone, Copy)]
pub struct TokenTransport<'a> {
    /// How they travel.
    pub travel: Travel,
    /// The nodes, where tokens go in two levels.
    pub nodes: Option<&'a Nodes>,
}

/// What arrived, and all that combine needs to send it back.
#[derive(Debug)]
pub struct Handle {
    dispatch: DispatchPlan,
    /// `[num_ranks]` tokens received from each rank.
    num_received: Vec<usize>,
    /// Weights of the rows, in return order.
    weights: Vec<f32>,
    /// The rows to compute.
    pub compute: ComputePlan,
    /// `[num_received, hidden]` values; NVFP4 without the global scale.
    pub tokens: Vec<f32>,
    /// What quantising for the way out did.
    pub sent_quant: QuantCounts,
    /// Tokens sent to other ranks.
    pub num_sent_remote: u64,
}

/// What came to a rank.
struct Came {
    /// Tokens as they came.
    bytes: Vec<u8>,
    /// `[num_ranks]` tokens of each source.
    num_received: Vec<usize>,
    /// Where each source's are; absent: in rank order.
    arrival: Option<ArrivalPlan>,
    sent_quant: QuantCounts,
    num_sent_remote: u64,
}

impl TokenTransport<'_> {
    /// Sends this rank's tokens `[num_tokens, hidden]` to their experts' ranks and receives those that come here;
    /// collective. `chunk_tokens` bounds every rank's tokens and is, as `tag`, equal on all.
    ///
    /// # Errors
    /// In two levels, if a rank of this node is at another chunk: on all ranks of the node, which then has to end the job.
    pub fn dispatch(
        &self,
        world: &World,
        (values, slots): (&[f32], Slots<'_>),
        (tag, chunk_tokens): (ChunkTag, usize),
    ) -> Result<Handle, ForwardError> {
        let (placement, rank) = (self.travel.placement, world.rank());
        let dispatch = DispatchPlan::new(placement, slots);
        let came = match self.nodes {
            None => self.go(world, &dispatch, (values, slots), chunk_tokens),
            Some(nodes) => {
                let plans = TwoLevelPlan { placement, nodes, rank };
                self.go_in_two_levels(world, plans, (values, slots), (tag, chunk_tokens))?
            }
        };
        let layout = self.travel.layout(slots.num_topk);
        let Came { bytes, num_received, arrival, sent_quant, num_sent_remote } = came;
        let by_source = match &arrival {
            None => vec![bytes.as_slice()],
            Some(arrival) => arrival.by_source(&bytes, layout.row_bytes()),
        };
        let (compute, weights, tokens) = self.unpack(&layout, &by_source, rank);
        Ok(Handle { dispatch, num_received, weights, compute, tokens, sent_quant, num_sent_remote })
    }

    /// Sends tokens straight to their experts' ranks; collective.
    fn go(
        &self,
        world: &World,
        plan: &DispatchPlan,
        (values, slots): (&[f32], Slots<'_>),
        chunk_tokens: usize,
    ) -> Came {
        let layout = self.travel.layout(slots.num_topk);
        let (bytes, sent_quant) = pack(&layout, (plan, slots), values, local_id(self.travel.placement));
        let (bytes, num_received) = exchange(world, plan, &bytes, (layout.row_bytes(), chunk_tokens));
        let num_sent_remote = quantity(plan.num_remote(world.rank()));
        Came { bytes, num_received, arrival: None, sent_quant, num_sent_remote }
    }

    /// Sends the computed rows `[num_rows, hidden]` back and adds what comes home into `out` `[num_tokens, hidden]`,
    /// which starts at zero; collective. `slots` and `chunk_tokens` are those of the dispatch.
    pub fn combine(
        &self,
        world: &World,
        handle: &Handle,
        rows: &[f32],
        (slots, chunk_tokens): (Slots<'_>, usize),
        out: &mut [f32],
    ) {
        let Travel { placement, mode, row_form, .. } = self.travel;
        let row_bytes = row_form.form.row_bytes(row_form.hidden);
        let (bytes, num_back) = match mode {
            CombineMode::Slot => (combine::return_slots(rows, &handle.compute, row_form), handle.rows_of_sources()),
            CombineMode::Rank => {
                (combine::return_sums(rows, &handle.compute, &handle.weights, row_form), handle.num_received.clone())
            }
        };
        let max_rows = chunk_tokens * mode.max_rows(slots.num_topk);
        let num_home = scaled(&mode.rows_from(&handle.dispatch), row_bytes);
        let send = Parts { bytes: &bytes, counts: &scaled(&num_back, row_bytes) };
        let home = carry(world, Cargo::Rows, send, &num_home, max_rows * row_bytes);
        let returned: Vec<&[u8]> = runs(&home, &num_home);
        match mode {
            CombineMode::Slot => combine::add_slots(&returned, placement, slots, row_form, out),
            CombineMode::Rank => combine::add_sums(&returned, &handle.dispatch, row_form, out),
        }
    }

    /// Rows to compute, their weights in return order, and the tokens' values, of runs in the order of their sources.
    fn unpack(&self, layout: &TokenLayout, received: &[&[u8]], rank: Rank) -> (ComputePlan, Vec<f32>, Vec<f32>) {
        let TokenLayout { hidden, num_topk, .. } = *layout;
        let rows = || received.iter().flat_map(|run| run.chunks_exact(layout.row_bytes()));
        let mut tokens = vec![0f32; rows().count() * hidden];
        for (row, values) in rows().zip(tokens.chunks_exact_mut(hidden)) {
            layout.decode_values(row, values);
        }
        let local_idx: Vec<i32> = rows().flat_map(|row| layout.local_idx(row)).collect();
        let slot_weights = rows().flat_map(|row| layout.weights(row));
        let weights = local_idx.iter().zip(slot_weights).filter(|(id, _)| **id != NOT_HERE).map(|(_, w)| w).collect();
        let num_local_experts = self.travel.placement.local_experts(rank).len();
        (ComputePlan::new(num_local_experts, num_topk, &local_idx), weights, tokens)
    }
}

impl Handle {
    /// Tokens that arrived here, from all ranks.
    #[must_use]
    pub fn num_received_tokens(&self) -> usize {
        self.num_received.iter().sum()
    }

    /// `[num_ranks]` rows that go back to each rank in `slot` mode.
    fn rows_of_sources(&self) -> Vec<usize> {
        let mut first = 0;
        self.num_received
            .iter()
            .map(|&count| {
                let rows = self.compute.token_offsets[first + count] - self.compute.token_offsets[first];
                first += count;
                rows
            })
            .collect()
    }
}

/// Sizes, then the packed tokens of `plan`; what came, and how many from each rank; collective.
fn exchange(
    world: &World,
    plan: &DispatchPlan,
    bytes: &[u8],
    (row_bytes, chunk_tokens): (usize, usize),
) -> (Vec<u8>, Vec<usize>) {
    let num_sent = plan.num_tokens_to();
    let counts: Vec<u64> = num_sent.iter().map(|&n| quantity(n)).collect();
    let num_received: Vec<usize> =
        world.all_to_all_u64(&counts).iter().map(|&n| usize::try_from(n).unwrap_or(usize::MAX)).collect();
    let send = Parts { bytes, counts: &scaled(&num_sent, row_bytes) };
    let num_coming = scaled(&num_received, row_bytes);
    (carry(world, Cargo::Tokens, send, &num_coming, chunk_tokens * row_bytes), num_received)
}

/// The bytes of all ranks to where they belong, timed for the log.
fn carry(world: &World, cargo: Cargo, send: Parts<'_>, recv_counts: &[usize], max_run_bytes: usize) -> Vec<u8> {
    let (begin, before) = (Instant::now(), world.exchanged().sent_bytes);
    let received = world.all_to_all_bytes(send, recv_counts, max_run_bytes);
    world.count_carried_to(cargo, send.counts);
    let (sent_bytes, us) = (world.exchanged().sent_bytes - before, begin.elapsed().as_secs_f64() * 1e6);
    tracing::debug!(carrier = "host", sent_bytes, us, "carried");
    received
}

fn quantity(count: usize) -> u64 {
    count as u64
}

fn scaled(counts: &[usize], bytes: usize) -> Vec<usize> {
    counts.iter().map(|&n| n * bytes).collect()
}

fn runs<'a>(mut bytes: &'a [u8], counts: &[usize]) -> Vec<&'a [u8]> {
    counts
        .iter()
        .map(|&count| {
            let (run, rest) = bytes.split_at(count);
            bytes = rest;
            run
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::overlap::Cut;
    use crate::world::Traffic;
    use crate::world::simulated::simulate;

    const CAPACITY: Capacity = Capacity { num_max_tokens_per_rank: 64, chunk_tokens: None, cut: Cut::Never };

    fn tag(step: u64) -> StepTag {
        StepTag { layer: LayerIdx(3), step, num_topk: 8 }
    }

    /// What tells ranks apart in a step costs no message of its own: 32 bytes in the exchange of sizes.
    #[test]
    fn the_tag_rides_with_the_sizes() {
        for (chunks, traffic) in simulate(256, |rank| exchange_sizes(rank, tag(7), rank.rank().index() % 65, CAPACITY))
        {
            assert!(chunks.is_ok(), "{chunks:?}");
            assert_eq!(traffic, Traffic::all_gather(256, 32));
        }
    }

    #[test]
    fn drift_of_one_rank_is_an_error_of_that_step_on_all() {
        let tag_of = |rank: usize| tag(if rank == 200 { 8 } else { 7 });
        for (ended, traffic) in simulate(256, |rank| exchange_sizes(rank, tag_of(rank.rank().index()), 1, CAPACITY)) {
            let error = ended.expect_err("rank 200 is a step ahead");
            insta::allow_duplicates! {
                insta::assert_snapshot!(error.to_string(), @"rank 200 is at layer 3, step 8, top-8, while rank 0 is at layer 3, step 7, top-8: every rank must call the same layers in the same order with the same top-k");
            }
            assert_eq!((error.exit(), traffic.collectives), (Exit::Disagreement, 1));
        }
    }
}
