//! How much is sent at once and what that needs: decided from numbers that are equal on all ranks.

use std::ops::Range;

use crate::config;
use crate::dispatch::nodes::Nodes;
use crate::dispatch::overlap::Cut;
use crate::exit::{Classify, Exit};
use crate::ids::Rank;

/// Errors of capacity.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CapacityError {
    /// More tokens than declared.
    #[error(
        "{rank} brings {num_tokens} tokens, over dispatch.num_max_tokens_per_rank = {limit}; \
         raise it, or set dispatch.chunk_tokens to dispatch in chunks"
    )]
    TooManyTokens {
        /// The rank with the most tokens.
        rank: Rank,
        /// Its tokens.
        num_tokens: usize,
        /// The declared limit.
        limit: usize,
    },
    /// A chunk larger than the buffers.
    #[error("dispatch.chunk_tokens = {chunk_tokens} is over dispatch.num_max_tokens_per_rank = {limit}; lower it")]
    ChunkOverLimit {
        /// The chunk.
        chunk_tokens: usize,
        /// The declared limit.
        limit: usize,
    },
    /// The planned buffers do not fit a GPU.
    #[error(
        "the dispatch buffers need up to {needed_bytes} bytes on each of the {num_sharing} ranks that drive {gpu}, which has \
         {free_bytes} bytes free before weights are loaded; set dispatch.chunk_tokens (now {chunk_tokens} tokens a rank go at \
         once)"
    )]
    DeviceMemory {
        /// Planned bytes of a rank.
        needed_bytes: u64,
        /// Ranks that may share the GPU.
        num_sharing: usize,
        /// The GPU.
        gpu: String,
        /// Free on the GPU.
        free_bytes: u64,
        /// Tokens a rank that travel at once.
        chunk_tokens: usize,
    },
    /// The planned buffers do not fit.
    #[error(
        "the dispatch buffers need up to {needed_bytes} bytes on each of the {local_size} ranks of host {host}, \
         which has {free_bytes} bytes free; set dispatch.chunk_tokens (now {chunk_tokens} tokens a rank go at once)"
    )]
    Memory {
        /// Planned bytes of a rank.
        needed_bytes: u64,
        /// Ranks that share the host.
        local_size: usize,
        /// The host.
        host: String,
        /// Free on the host.
        free_bytes: u64,
        /// Tokens a rank that travel at once.
        chunk_tokens: usize,
    },
}

impl Classify for CapacityError {
    fn exit(&self) -> Exit {
        match self {
            Self::TooManyTokens { .. } | Self::ChunkOverLimit { .. } => Exit::BadInput,
            Self::Memory { .. } | Self::DeviceMemory { .. } => Exit::Environment,
        }
    }
}

/// The declared limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Tokens of a rank that buffers are planned for.
    pub num_max_tokens_per_rank: usize,
    /// Tokens of a rank that go at once; absent: all.
    pub chunk_tokens: Option<usize>,
    /// How steps are cut that need not be.
    pub cut: Cut,
}

/// The chunks of a step: as many on every rank, though a rank may have no tokens left in the last ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunks {
    /// Number of chunks.
    pub num_chunks: usize,
    /// Tokens of a rank in a chunk, at most.
    pub chunk_tokens: usize,
    /// Tokens of the rank that brings most, in all chunks.
    pub max_tokens: usize,
    /// Tokens of all ranks in the first chunk, which is the fullest.
    pub first_chunk_tokens: usize,
    /// Whether the declared sizes would have made one chunk of it, whose bits all of them have to have.
    pub is_one_cut: bool,
}

impl Chunks {
    /// The tokens of chunk `chunk` of a rank with `num_tokens`.
    #[must_use]
    pub fn tokens(&self, chunk: usize, num_tokens: usize) -> Range<usize> {
        let start = (chunk * self.chunk_tokens).min(num_tokens);
        start..(start + self.chunk_tokens).min(num_tokens)
    }
}

impl From<&config::Dispatch> for Capacity {
    fn from(dispatch: &config::Dispatch) -> Self {
        let config::Dispatch { num_max_tokens_per_rank, chunk_tokens, .. } = *dispatch;
        Self { num_max_tokens_per_rank, chunk_tokens, cut: Cut::Never }
    }
}

impl Capacity {
    /// Refuses limits that contradict each other.
    ///
    /// # Errors
    /// If a chunk is larger than the buffers.
    pub fn validate(&self) -> Result<(), CapacityError> {
        match self.chunk_tokens {
            Some(chunk_tokens) if chunk_tokens > self.num_max_tokens_per_rank => {
                Err(CapacityError::ChunkOverLimit { chunk_tokens, limit: self.num_max_tokens_per_rank })
            }
            _ => Ok(()),
        }
    }

    /// Tokens a rank that can be under way at once.
    #[must_use]
    pub fn max_tokens_at_once(&self) -> usize {
        self.chunk_tokens.unwrap_or(self.num_max_tokens_per_rank)
    }

    /// The chunks of a step in which rank `r` brings `num_tokens[r]`. Every rank computes the same from the same list.
    ///
    /// # Errors
    /// If a rank brings more than declared and no chunking was asked for.
    pub fn chunks(&self, num_tokens: &[usize]) -> Result<Chunks, CapacityError> {
        let (rank, most) =
            num_tokens.iter().enumerate().fold((0, 0), |best, (rank, &n)| if n > best.1 { (rank, n) } else { best });
        let cut = |num_chunks, chunk_tokens| Chunks {
            num_chunks,
            chunk_tokens,
            max_tokens: most,
            first_chunk_tokens: num_tokens.iter().map(|n| (*n).min(chunk_tokens)).sum(),
            is_one_cut: false,
        };
        let whole = match self.chunk_tokens {
            Some(chunk_tokens) => {
                let chunk_tokens = chunk_tokens.max(1);
                cut(most.div_ceil(chunk_tokens).max(1), chunk_tokens)
            }
            None if most > self.num_max_tokens_per_rank => {
                let (rank, limit) = (Rank::from_index(rank), self.num_max_tokens_per_rank);
                return Err(CapacityError::TooManyTokens { rank, num_tokens: most, limit });
            }
            None => cut(1, most.max(1)),
        };
        let num_chunks = self.cut.num_chunks(most, num_tokens.iter().sum());
        if whole.num_chunks > 1 || num_chunks == 1 {
            return Ok(whole);
        }
        let chunk_tokens = most.div_ceil(num_chunks);
        Ok(Chunks { is_one_cut: true, ..cut(most.div_ceil(chunk_tokens), chunk_tokens) })
    }

    /// The same limits for steps that are cut so.
    #[must_use]
    pub fn with_cut(self, cut: Cut) -> Self {
        Self { cut, ..self }
    }
}

/// The sizes that decide a rank's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferSizes {
    /// Ranks of the world.
    pub num_ranks: usize,
    /// Experts of this rank.
    pub num_local_experts: usize,
    /// Slots of a token.
    pub num_topk: usize,
    /// Width of a travelling token.
    pub hidden: usize,
    /// Width between FC1 and FC2.
    pub intermediate: usize,
    /// Bytes of a travelling token with its ids and weights.
    pub token_bytes: usize,
    /// Bytes of a row that comes back.
    pub return_bytes: usize,
    /// Whether each slot's row comes back by itself.
    pub per_slot: bool,
    /// What the rank passes on to others, where tokens go in two levels.
    pub forwards: Option<ForwardSizes>,
}

/// What of the nodes decides the buffers of a rank that passes tokens on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardSizes {
    /// Nodes of the world.
    pub num_nodes: usize,
    /// Ranks of this node.
    pub num_peers: usize,
    /// Ranks whose tokens this one passes on, itself included.
    pub num_sources: usize,
}

impl ForwardSizes {
    /// Of `rank`.
    #[must_use]
    pub fn new(nodes: &Nodes, rank: Rank) -> Self {
        Self { num_nodes: nodes.num_nodes(), num_peers: nodes.peers(rank).len(), num_sources: nodes.num_sources(rank) }
    }
}

/// Bytes of a rank's dispatch buffers when `tokens_at_once` tokens of every rank travel, at worst: every token reaches
/// every rank, and as many of its slots as the rank has experts (at most `num_topk`) are here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct BufferPlan {
    /// Tokens leaving: `tokens * min(ranks, topk) * token_bytes`, in two levels with nodes for ranks.
    pub send_bytes: u64,
    /// In two levels, tokens that came to be passed on, and those that are:
    /// `tokens * sources * (1 + min(ranks of the node, topk)) * token_bytes`.
    pub forward_bytes: u64,
    /// Tokens arriving: `tokens * ranks * token_bytes`, and over nvlink a second place for few of them.
    pub receive_bytes: u64,
    /// Their f32 values: `tokens * ranks * hidden * 4`.
    pub token_values_bytes: u64,
    /// Computed rows, between FC1 and FC2 and after: `rows * (intermediate + hidden) * 4`.
    pub rows_bytes: u64,
    /// Rows going back and coming home.
    pub return_bytes: u64,
}

impl BufferPlan {
    /// Plans for `tokens_at_once` tokens of each rank.
    #[must_use]
    pub fn new(sizes: &BufferSizes, tokens_at_once: usize) -> Self {
        let tokens = tokens_at_once as u64;
        let received = tokens * sizes.num_ranks as u64;
        let slots_here = sizes.num_topk.min(sizes.num_local_experts) as u64;
        let rows = received * slots_here;
        let home_rows =
            tokens * if sizes.per_slot { sizes.num_topk } else { sizes.num_topk.min(sizes.num_ranks) } as u64;
        let back_rows = if sizes.per_slot { rows } else { received };
        let num_destinations = sizes.forwards.map_or(sizes.num_ranks, |forwards| forwards.num_nodes);
        let passed_on = |ForwardSizes { num_peers, num_sources, .. }| {
            tokens * num_sources as u64 * (1 + sizes.num_topk.min(num_peers) as u64) * sizes.token_bytes as u64
        };
        Self {
            send_bytes: tokens * sizes.num_topk.min(num_destinations) as u64 * sizes.token_bytes as u64,
            forward_bytes: sizes.forwards.map_or(0, passed_on),
            receive_bytes: received * sizes.token_bytes as u64,
            token_values_bytes: received * sizes.hidden as u64 * 4,
            rows_bytes: rows * (sizes.intermediate + sizes.hidden) as u64 * 4,
            return_bytes: (back_rows + home_rows) * sizes.return_bytes as u64,
        }
    }

    /// All of it.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.send_bytes
            + self.forward_bytes
            + self.receive_bytes
            + self.token_values_bytes
            + self.rows_bytes
            + self.return_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn sizes(num_ranks: usize, num_topk: usize) -> BufferSizes {
        BufferSizes {
            num_ranks,
            num_local_experts: 32,
            num_topk,
            hidden: 7168,
            intermediate: 2048,
            token_bytes: 7168 * 2 + 8 * num_topk,
            return_bytes: 7168 * 4,
            per_slot: false,
            forwards: None,
        }
    }

    #[test]
    fn case_a4_over_the_declared_capacity_names_rank_count_limit_and_key() {
        let capacity = Capacity { num_max_tokens_per_rank: 1024, chunk_tokens: None, cut: Cut::Never };
        let message = capacity.chunks(&[1, 1025, 1, 1]).unwrap_err().to_string();
        for part in ["rank 1", "1025", "1024", "num_max_tokens_per_rank", "chunk_tokens"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn case_j3_receive_buffers_grow_with_ranks_and_not_with_their_square() {
        let plan = |ranks, topk| BufferPlan::new(&sizes(ranks, topk), 8192);
        // 8192 tokens x 8 ranks x 7168 x 2 bytes = 896 MiB, and the ids and weights beside them.
        let ids = 8192 * 8 * 8 * 8;
        assert_eq!(plan(8, 8).receive_bytes, 896 * MIB + ids);
        assert_eq!(plan(8, 1).receive_bytes, 896 * MIB + ids / 8);
        assert_eq!(plan(2, 8).receive_bytes * 4, plan(8, 8).receive_bytes);
        assert!(plan(64, 8).total_bytes() < 9 * plan(8, 8).total_bytes());
    }

    /// A rank passes on for one rank of each node: that takes as much again as it receives, and no more with more ranks a node.
    #[test]
    fn case_j3_what_is_passed_on_grows_with_nodes() {
        let plan = |num_nodes, ranks_per_node| {
            let nodes = Nodes::blocks(num_nodes * ranks_per_node, ranks_per_node);
            let forwards = Some(ForwardSizes::new(&nodes, Rank(1)));
            BufferPlan::new(&BufferSizes { forwards, ..sizes(nodes.num_ranks(), 8) }, 8192)
        };
        let token_bytes = (7168 * 2 + 8 * 8) as u64;
        assert_eq!(plan(2, 8).forward_bytes, 8192 * 2 * (1 + 8) * token_bytes);
        assert_eq!(plan(2, 8).send_bytes, 8192 * 2 * token_bytes);
        assert_eq!(plan(4, 8).forward_bytes, 2 * plan(2, 8).forward_bytes);
        assert_eq!(plan(2, 16).forward_bytes, plan(2, 8).forward_bytes);
        let in_one_level = BufferPlan::new(&sizes(16, 8), 8192);
        assert_eq!((in_one_level.forward_bytes, in_one_level.receive_bytes), (0, plan(2, 8).receive_bytes));
        assert_eq!(in_one_level.send_bytes, 8192 * 8 * token_bytes);
    }

    proptest! {
        #[test]
        fn chunks_cover_every_token_once(num_tokens in prop::collection::vec(0usize..50, 1..5), chunk in 1usize..20) {
            let capacity = Capacity { num_max_tokens_per_rank: 64, chunk_tokens: Some(chunk), cut: Cut::Never };
            let chunks = capacity.chunks(&num_tokens).unwrap();
            for &n in &num_tokens {
                let covered: Vec<usize> = (0..chunks.num_chunks).flat_map(|c| chunks.tokens(c, n)).collect();
                prop_assert_eq!(covered, (0..n).collect::<Vec<_>>());
            }
        }
    }
}
