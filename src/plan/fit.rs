//! Whether a rank's weights and buffers fit its device, and what would make them.

use std::fmt;

use crate::dispatch::capacity::{BufferPlan, ForwardSizes};
use crate::dispatch::nodes::Nodes;
use crate::dispatch::placement::Placement;
use crate::dispatch::travel::buffer_sizes;
use crate::ids::Rank;
use crate::model::MoeGeometry;
use crate::select::LayerDecision;

use super::units::gigabytes;
use super::{RankGroup, StoredLayer};

/// A rank that needs more than there is.
#[derive(Debug, Clone, PartialEq)]
pub struct Misfit {
    /// The rank that needs the most.
    pub rank: u32,
    /// Its experts.
    pub expert_weight_bytes: u64,
    /// What every rank holds.
    pub replicated_weight_bytes: u64,
    /// Its dispatch buffers, at most.
    pub buffer_bytes: u64,
    /// What the device has.
    pub device_memory_bytes: u64,
    /// Ranks planned for.
    pub num_ranks: usize,
    /// Tokens of a rank that go at once.
    pub tokens_at_once: usize,
    /// What would fit.
    pub cure: Cure,
}

/// What would fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cure {
    /// Fewer tokens at once.
    Chunk {
        /// So many at most.
        max_tokens: u64,
    },
    /// Fewer experts a rank.
    Ranks {
        /// The fewest that do.
        num_ranks: usize,
        /// Tokens at once that fit there, where those planned for do not.
        max_tokens: Option<u64>,
    },
    /// What every rank holds, or one expert of each layer, is too much.
    None,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let needed = self.expert_weight_bytes + self.replicated_weight_bytes + self.buffer_bytes;
        write!(
            f,
            "rank {} needs {} ({needed} bytes): {} of experts, {} that every rank holds, up to {} of buffers; its device has \
             {} ({} bytes); ",
            self.rank,
            gigabytes(needed),
            gigabytes(self.expert_weight_bytes),
            gigabytes(self.replicated_weight_bytes),
            gigabytes(self.buffer_bytes),
            gigabytes(self.device_memory_bytes),
            self.device_memory_bytes
        )?;
        match self.cure {
            Cure::Chunk { max_tokens } => {
                write!(f, "set dispatch.chunk_tokens to {max_tokens} or less (now {} go at once)", self.tokens_at_once)
            }
            Cure::Ranks { num_ranks, max_tokens } => {
                write!(
                    f,
                    "spread the experts over {num_ranks} ranks (now {}; cluster.nodes, cluster.ranks_per_node)",
                    self.num_ranks
                )?;
                max_tokens.map_or(Ok(()), |tokens| write!(f, ", with dispatch.chunk_tokens of {tokens} or less"))
            }
            Cure::None => write!(f, "no number of ranks is enough: devices with more memory are"),
        }
    }
}

/// Sizes of a model over any number of ranks.
pub(super) struct Sizes<'a> {
    pub geometry: &'a MoeGeometry,
    pub layers: &'a [StoredLayer],
    /// Of the layer whose buffers are the largest.
    pub decision: &'a LayerDecision,
    pub device_memory_bytes: u64,
    /// Ranks of a node, where tokens go in two levels.
    pub ranks_per_node: Option<usize>,
    /// Sets of buffers.
    pub num_sets: u64,
}

impl Sizes<'_> {
    /// Why `most`, the group of ranks that need the most, does not fit.
    pub fn misfit(&self, most: &RankGroup, num_ranks: usize, tokens_at_once: usize) -> Option<Misfit> {
        (most.needed_bytes > self.device_memory_bytes).then(|| Misfit {
            rank: most.first_rank,
            expert_weight_bytes: most.expert_weight_bytes,
            replicated_weight_bytes: most.replicated_weight_bytes,
            buffer_bytes: most.buffer_bytes,
            device_memory_bytes: self.device_memory_bytes,
            num_ranks,
            tokens_at_once,
            cure: self.cure(num_ranks, tokens_at_once),
        })
    }

    fn cure(&self, num_ranks: usize, tokens_at_once: usize) -> Cure {
        let ends = self.expert_ends();
        if let Some(max_tokens) = self.max_tokens(&ends, num_ranks) {
            return Cure::Chunk { max_tokens };
        }
        // More ranks hold fewer experts each, and plan for more tokens that arrive: at best nothing else has to change.
        let candidates: Vec<(usize, u64)> = (num_ranks + 1..=self.geometry.num_experts)
            .filter_map(|num_ranks| Some((num_ranks, self.max_tokens(&ends, num_ranks)?)))
            .collect();
        let is_enough = |tokens: u64| tokens >= tokens_at_once as u64;
        match candidates.iter().find(|(_, tokens)| is_enough(*tokens)).or(candidates.first()) {
            Some(&(num_ranks, tokens)) => Cure::Ranks { num_ranks, max_tokens: (!is_enough(tokens)).then_some(tokens) },
            None => Cure::None,
        }
    }

    /// Tokens at once whose buffers fit beside the weights of every rank; absent where none do.
    fn max_tokens(&self, ends: &[u64], num_ranks: usize) -> Option<u64> {
        let placement = Placement::new(self.geometry.num_experts, num_ranks);
        let replicated: u64 = self.layers.iter().map(|layer| layer.replicated_bytes(self.geometry)).sum();
        let nodes = self.ranks_per_node.map(|ranks_per_node| Nodes::blocks(num_ranks, ranks_per_node));
        let of_rank = |rank| {
            let local = placement.local_experts(Rank::from_index(rank));
            let forwards = nodes.as_ref().map(|nodes| ForwardSizes::new(nodes, Rank::from_index(rank)));
            let sizes = buffer_sizes(self.geometry, self.decision, (num_ranks, local.len()), forwards);
            let weights = ends[local.end] - ends[local.start] + replicated;
            // Buffers grow in proportion to the tokens.
            let of_token = self.num_sets * BufferPlan::new(&sizes, 1).total_bytes();
            self.device_memory_bytes.checked_sub(weights).map(|free| free / of_token)
        };
        let all: Option<Vec<u64>> = (0..num_ranks).map(of_rank).collect();
        all?.into_iter().min().filter(|&tokens| tokens > 0)
    }

    /// `[num_experts + 1]` bytes of the experts before each one, over all layers.
    fn expert_ends(&self) -> Vec<u64> {
        let mut ends = vec![0];
        for expert in 0..self.geometry.num_experts {
            let of_layer = |layer: &StoredLayer| layer.local_expert_bytes(self.geometry, expert..expert + 1);
            ends.push(ends[expert] + self.layers.iter().map(of_layer).sum::<u64>());
        }
        ends
    }
}
