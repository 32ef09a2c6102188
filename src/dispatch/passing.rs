//! What the ranks of a node tell each other before they pass tokens on in it, on hosts and between GPUs.

use std::fmt;

use crate::dispatch::two_level::{ArrivalPlan, TwoLevelPlan};
use crate::exit::{Classify, Exit, Known};
use crate::fault::{Action, Injected, Stage};
use crate::ids::{LayerIdx, Rank};
use crate::world::World;

/// Where in a run a dispatch belongs; travels with the sizes, so that drift is an error of that step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTag {
    /// The layer.
    pub layer: LayerIdx,
    /// Counts the steps of a run.
    pub step: u64,
    /// Slots of a token, which decide the size of a travelling token.
    pub num_topk: usize,
}

impl fmt::Display for StepTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, step {}, top-{}", self.layer, self.step, self.num_topk)
    }
}

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

/// Tells the ranks of the node how many tokens of each source come to them; the tag rides along, so that a rank that passes on
/// another step's tokens is found before they are read; collective.
///
/// `num_tokens` `[num_peers, num_sources]` is what this rank passes on: [`crate::dispatch::two_level::ForwardPlan::num_tokens`].
///
/// # Errors
/// If ranks of the node are at different chunks: on all of them.
pub fn tell_node(
    world: &World,
    plans: TwoLevelPlan<'_>,
    num_tokens: &[Vec<u32>],
    mut tag: ChunkTag,
) -> Result<ArrivalPlan, ForwardError> {
    let (nodes, peers) = (plans.nodes, plans.nodes.peers(plans.rank));
    tag.step.step += u64::from(world.has_fault(Stage::Forward, &Action::Drift));
    let tag_words = tag.words();
    let messages: Vec<u32> = num_tokens.iter().flat_map(|counts| tag_words.iter().chain(counts)).copied().collect();
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
