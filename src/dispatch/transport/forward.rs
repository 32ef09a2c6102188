//! The two hops of a dispatch in two levels, over MPI: sizes, then tokens, in either.

use super::{Came, Cargo, Slots, StepTag, TokenTransport, carry, exchange, quantity, scaled};
use crate::dispatch::layout::TokenLayout;
use crate::dispatch::plan::NOT_HERE;
use crate::dispatch::two_level::{ArrivalPlan, ForwardPlan, TwoLevelPlan};
use crate::exit::{Classify, Exit, Known};
use crate::fault::{Action, Injected, Stage};
use crate::ids::{ExpertIdx, LayerIdx, Rank};
use crate::world::{Parts, World};

/// Where in a run a chunk belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkTag {
    /// The step.
    pub step: StepTag,
    /// The chunk.
    pub chunk: usize,
}

/// Errors between the hops.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// Ranks of a node are not at the same chunk. All of them come to this, the lowest of them says it and ends the job.
    #[error(
        "{rank} passes on tokens of {}, chunk {}, while {first} of its node passes on those of {}, chunk {}: every rank must \
         call the same layers in the same order",
        found.step, found.chunk, wanted.step, wanted.chunk
    )]
    Drift {
        /// The lowest rank of the node.
        first: Rank,
        /// Where it is.
        wanted: ChunkTag,
        /// The lowest rank of the node that is elsewhere.
        rank: Rank,
        /// Where that is.
        found: ChunkTag,
        /// Whether this rank is `first`.
        speaks: bool,
    },
    /// A fault on purpose.
    #[error(transparent)]
    Fault(#[from] Injected),
}

impl Classify for ForwardError {
    fn exit(&self) -> Exit {
        match self {
            Self::Drift { .. } => Exit::Disagreement,
            Self::Fault(error) => error.exit(),
        }
    }

    fn known(&self) -> Known {
        match self {
            // Other nodes know nothing of it: the one that speaks has to end the job.
            Self::Drift { speaks: false, .. } => Known::Everywhere { speaks: false },
            Self::Drift { speaks: true, .. } | Self::Fault(_) => Known::Here,
        }
    }
}

impl ChunkTag {
    const NUM_WORDS: usize = 5;

    fn words(self) -> [u32; Self::NUM_WORDS] {
        let bytes = self.step.step.to_le_bytes();
        let [low, high] = [[bytes[0], bytes[1], bytes[2], bytes[3]], [bytes[4], bytes[5], bytes[6], bytes[7]]];
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let (num_topk, chunk) = (count(self.step.num_topk), count(self.chunk));
        [self.step.layer.0, u32::from_le_bytes(low), u32::from_le_bytes(high), num_topk, chunk]
    }

    /// Of the first words of a message.
    fn of(words: &[u32]) -> Self {
        let step = u64::from(words[1]) | u64::from(words[2]) << 32;
        let step = StepTag { layer: LayerIdx(words[0]), step, num_topk: words[3] as usize };
        Self { step, chunk: words[4] as usize }
    }
}

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
        let (bytes, sent_quant) = self.pack(&layout, (&crossing, slots), values, id_of);
        let (entered, num_entered) = exchange(world, &crossing, &bytes, (row_bytes, chunk_tokens));
        drop(bytes);
        world.fault(Stage::Forward)?;
        let (forward, bytes) = self.pack_forward(plans, &layout, &entered, &num_entered);
        drop(entered);
        let arrival = tell_node(world, plans, &forward, tag)?;
        let send = Parts { bytes: &bytes, counts: &scaled(&forward.plan.num_tokens_to(), row_bytes) };
        let num_arriving = scaled(&arrival.num_tokens_from, row_bytes);
        // Whoever passes on for the most ranks may have as many chunks for one of its node.
        let max_run_bytes = plans.nodes.max_sources() * chunk_tokens * row_bytes;
        let bytes = carry(world, Cargo::Tokens, send, &num_arriving, max_run_bytes);
        let num_sent_remote = quantity(crossing.num_remote(rank) + forward.plan.num_remote(rank));
        let num_received = arrival.num_tokens_of.clone();
        Ok(Came { bytes, num_received, arrival: Some(arrival), sent_quant, num_sent_remote })
    }

    /// The second hop's plan and bytes: the values as they came, the ids as their receivers number them.
    fn pack_forward(
        &self,
        plans: TwoLevelPlan<'_>,
        layout: &TokenLayout,
        entered: &[u8],
        num_entered: &[usize],
    ) -> (ForwardPlan, Vec<u8>) {
        let row_bytes = layout.row_bytes();
        let rows = || entered.chunks_exact(row_bytes);
        let idx: Vec<i32> = rows().flat_map(|row| layout.local_idx(row)).collect();
        let weights: Vec<f32> = rows().flat_map(|row| layout.weights(row)).collect();
        let slots = Slots { num_topk: layout.num_topk, idx: &idx, weights: &weights };
        let forward = plans.forward(slots, num_entered);
        let mut bytes = vec![0; forward.plan.tokens.len() * row_bytes];
        let mut out = bytes.chunks_exact_mut(row_bytes);
        for rank in plans.nodes.peers(plans.rank).iter().map(|peer| peer.index()) {
            for (&token, out) in forward.plan.tokens_to(rank).iter().zip(&mut out) {
                let token = token as usize;
                out.copy_from_slice(&entered[token * row_bytes..][..row_bytes]);
                layout.encode_slots(slots_for(slots, token, |expert| self.local_id(rank, expert)), out);
            }
        }
        (forward, bytes)
    }
}

/// The slots of a token under the ids of whoever it goes to; what is not there is masked and weighs nothing.
pub(super) fn slots_for<'a, F: Fn(ExpertIdx) -> Option<u32>>(
    slots: Slots<'a>,
    token: usize,
    id_of: F,
) -> impl Iterator<Item = (i32, f32)> + use<'a, F> {
    slots.of(token).map(move |(expert, weight)| match expert.and_then(&id_of) {
        Some(id) => (i32::try_from(id).unwrap_or(NOT_HERE), weight),
        None => (NOT_HERE, 0.0),
    })
}

/// Tells the ranks of the node how many tokens of each source come to them; the tag rides along, so that a rank that passes on
/// another step's tokens is found before they are read; collective.
fn tell_node(
    world: &World,
    plans: TwoLevelPlan<'_>,
    forward: &ForwardPlan,
    mut tag: ChunkTag,
) -> Result<ArrivalPlan, ForwardError> {
    let (nodes, peers) = (plans.nodes, plans.nodes.peers(plans.rank));
    tag.step.step += u64::from(world.has_fault(Stage::Forward, &Action::Drift));
    let tag_words = tag.words();
    let messages: Vec<u32> =
        forward.num_tokens.iter().flat_map(|counts| tag_words.iter().chain(counts)).copied().collect();
    let (mut to_counts, mut from_counts) = (vec![0; world.size()], vec![0; world.size()]);
    for peer in peers {
        to_counts[peer.index()] = ChunkTag::NUM_WORDS + nodes.num_sources(plans.rank);
        from_counts[peer.index()] = ChunkTag::NUM_WORDS + nodes.num_sources(*peer);
    }
    let told = world.all_to_all_u32(&messages, &to_counts, &from_counts);
    let (mut rest, mut tags, mut counts) = (told.as_slice(), Vec::new(), Vec::new());
    for peer in peers {
        let (message, others) = rest.split_at(from_counts[peer.index()]);
        tags.push(ChunkTag::of(message));
        counts.push(&message[ChunkTag::NUM_WORDS..]);
        rest = others;
    }
    let elsewhere = tags.iter().position(|found| *found != tags[0]);
    if let Some(place) = elsewhere {
        let (first, wanted) = (peers[0], tags[0]);
        return Err(ForwardError::Drift {
            first,
            wanted,
            rank: peers[place],
            found: tags[place],
            speaks: first == plans.rank,
        });
    }
    Ok(plans.arrive(&counts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_travel_as_words() {
        let step = StepTag { layer: LayerIdx(92), step: (7 << 32) + 9, num_topk: 16 };
        let tag = ChunkTag { step, chunk: 3 };
        assert_eq!(ChunkTag::of(&tag.words()), tag);
    }

    #[test]
    fn drift_is_said_by_one_rank_of_its_node() {
        let wanted = ChunkTag { step: StepTag { layer: LayerIdx(3), step: 7, num_topk: 8 }, chunk: 0 };
        let found = ChunkTag { chunk: 1, ..wanted };
        let error = |speaks| ForwardError::Drift { first: Rank(2), wanted, rank: Rank(3), found, speaks };
        insta::assert_snapshot!(error(true), @"rank 3 passes on tokens of layer 3, step 7, top-8, chunk 1, while rank 2 of its node passes on those of layer 3, step 7, top-8, chunk 0: every rank must call the same layers in the same order");
        assert_eq!((error(true).known(), error(true).exit()), (Known::Here, Exit::Disagreement));
        assert_eq!(error(false).known(), Known::Everywhere { speaks: false });
    }
}
