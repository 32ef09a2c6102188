//! Which ranks share a node, and which of them passes on what comes from other nodes.
//!
//! A node is a host, or as many ranks as `cluster.scale_up_ranks` says. Nodes need not be of one size, nor their ranks lie
//! in a row: a node whose GPU has died is as good as any.

use crate::ids::Rank;

/// The nodes of a world, numbered in the order in which ranks meet them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nodes {
    /// `[num_ranks]`
    node_of_rank: Vec<usize>,
    /// `[num_ranks]` the place of each among the ranks of its node.
    local_idx: Vec<usize>,
    /// `[num_nodes]` the ranks of each, ascending.
    ranks: Vec<Vec<Rank>>,
    /// The most ranks whose tokens any rank passes on.
    max_sources: usize,
}

impl Nodes {
    /// Of ranks whose nodes are numbered from 0 without a gap.
    #[must_use]
    pub fn new(node_of_rank: &[u32]) -> Self {
        let node_of_rank: Vec<usize> = node_of_rank.iter().map(|&node| node as usize).collect();
        let mut ranks: Vec<Vec<Rank>> = vec![Vec::new(); node_of_rank.iter().max().map_or(0, |last| last + 1)];
        let mut local_idx = Vec::new();
        for (rank, &node) in node_of_rank.iter().enumerate() {
            local_idx.push(ranks[node].len());
            ranks[node].push(Rank::from_index(rank));
        }
        let mut nodes = Self { node_of_rank, local_idx, ranks, max_sources: 0 };
        let of_rank = |rank| nodes.num_sources(Rank::from_index(rank));
        nodes.max_sources = (0..nodes.num_ranks()).map(of_rank).max().unwrap_or_default();
        nodes
    }

    /// Of `num_ranks` in blocks of `ranks_per_node`, the last of which may be smaller.
    #[must_use]
    pub fn blocks(num_ranks: usize, ranks_per_node: usize) -> Self {
        let node_of = |rank: usize| Rank::from_index(rank / ranks_per_node.max(1)).0;
        Self::new(&(0..num_ranks).map(node_of).collect::<Vec<_>>())
    }

    /// Ranks of the world.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.node_of_rank.len()
    }

    /// Nodes of the world.
    #[must_use]
    pub fn num_nodes(&self) -> usize {
        self.ranks.len()
    }

    /// The node of `rank`.
    #[must_use]
    pub fn of(&self, rank: Rank) -> usize {
        self.node_of_rank[rank.index()]
    }

    /// The ranks of `node`, ascending.
    #[must_use]
    pub fn ranks(&self, node: usize) -> &[Rank] {
        &self.ranks[node]
    }

    /// The ranks that share `rank`'s node, itself included, ascending.
    #[must_use]
    pub fn peers(&self, rank: Rank) -> &[Rank] {
        self.ranks(self.of(rank))
    }

    /// Whether a token that goes once a node crosses to fewer places than one that goes once a rank: there are other nodes,
    /// and one of them holds several ranks.
    #[must_use]
    pub fn are_worth_two_levels(&self) -> bool {
        self.num_nodes() > 1 && self.ranks.iter().any(|ranks| ranks.len() > 1)
    }

    /// The rank through which the tokens of `source` enter `node`: the one of equal local index; where the node has fewer
    /// ranks, they take turns. In its own node a rank is its own.
    #[must_use]
    pub fn forwarder(&self, source: Rank, node: usize) -> Rank {
        let ranks = self.ranks(node);
        ranks[entry(self.local_idx[source.index()], self.of(source), ranks.len())]
    }

    /// The ranks whose tokens `forwarder` passes on in its node, itself included, ascending.
    pub fn sources(&self, forwarder: Rank) -> impl Iterator<Item = Rank> + Clone {
        let node = self.of(forwarder);
        (0..self.num_ranks()).map(Rank::from_index).filter(move |source| self.forwarder(*source, node) == forwarder)
    }

    /// How many those are, counted by nodes.
    #[must_use]
    pub fn num_sources(&self, forwarder: Rank) -> usize {
        let (place, num_here) = (self.local_idx[forwarder.index()], self.peers(forwarder).len());
        let from_node = |(node, ranks): (usize, &Vec<Rank>)| {
            let turns = (num_here..ranks.len()).filter(|&local_idx| entry(local_idx, node, num_here) == place).count();
            usize::from(place < ranks.len()) + turns
        };
        self.ranks.iter().enumerate().map(from_node).sum()
    }

    /// The most ranks whose tokens any rank passes on.
    #[must_use]
    pub fn max_sources(&self) -> usize {
        self.max_sources
    }
}

/// The place, in a node of `num_ranks`, of the rank that takes the tokens of a rank with `local_idx` in `node`. Those without
/// an equal are spread by their node as well, or one rank would take them from all nodes.
fn entry(local_idx: usize, node: usize, num_ranks: usize) -> usize {
    if local_idx < num_ranks { local_idx } else { (local_idx + node) % num_ranks }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Worlds of 2 to 64 ranks on 1 to 16 nodes of any sizes, in blocks or dealt in turn.
    pub(crate) fn any_nodes() -> impl Strategy<Value = Nodes> {
        let sizes = prop::collection::vec(1usize..=16, 1..=16).prop_map(|mut sizes| {
            while sizes.iter().sum::<usize>() > 64 {
                sizes.pop();
            }
            if sizes == [1] { vec![2] } else { sizes }
        });
        (sizes, any::<bool>()).prop_map(|(sizes, in_turn)| {
            let mut node_of_rank = Vec::new();
            let rounds = if in_turn { *sizes.iter().max().unwrap() } else { 1 };
            for round in 0..rounds {
                for (node, &size) in sizes.iter().enumerate() {
                    let num = if in_turn { usize::from(round < size) } else { size };
                    node_of_rank.extend(std::iter::repeat_n(u32::try_from(node).unwrap(), num));
                }
            }
            Nodes::new(&node_of_rank)
        })
    }

    fn forwarders(nodes: &Nodes, node: usize) -> Vec<u32> {
        (0..nodes.num_ranks()).map(|source| nodes.forwarder(Rank::from_index(source), node).0).collect()
    }

    #[test]
    fn tokens_enter_at_the_rank_of_equal_local_index() {
        let even = Nodes::new(&[0, 0, 1, 1]);
        assert_eq!((forwarders(&even, 0), forwarders(&even, 1)), (vec![0, 1, 0, 1], vec![2, 3, 2, 3]));
        // Three ranks and two: the third of the first node has no equal in the second.
        let uneven = Nodes::new(&[0, 0, 0, 1, 1]);
        assert_eq!(forwarders(&uneven, 1), [3, 4, 3, 3, 4]);
        assert_eq!(forwarders(&uneven, 0), [0, 1, 2, 0, 1]);
        let in_turn = Nodes::new(&[0, 1, 0, 1]);
        assert_eq!(forwarders(&in_turn, 1), [1, 1, 3, 3]);
    }

    /// A dead GPU in one node of sixteen: the ranks without an equal there are not all one rank's.
    #[test]
    fn a_smaller_node_shares_out_who_has_no_equal() {
        let nodes = Nodes::new(&(0..127).map(|rank| if rank < 7 { 0 } else { (rank + 1) / 8 }).collect::<Vec<u32>>());
        let of_small: Vec<usize> = nodes.ranks(0).iter().map(|rank| nodes.num_sources(*rank)).collect();
        assert_eq!((of_small.iter().sum::<usize>(), nodes.ranks(0).len()), (127, 7));
        assert!(of_small.iter().all(|&num| (18..=19).contains(&num)), "{of_small:?}");
        assert_eq!(nodes.max_sources(), 19);
    }

    #[test]
    fn two_levels_are_worth_it_where_a_node_has_several_ranks_and_is_not_alone() {
        let worth = |nodes: &[u32]| Nodes::new(nodes).are_worth_two_levels();
        assert!(worth(&[0, 0, 1, 1]) && worth(&[0, 1, 1]));
        assert!(!worth(&[0, 0, 0]) && !worth(&[0, 1, 2]) && !worth(&[0]));
    }

    proptest! {
        /// Every token has one way into every node; no rank passes on for more than its share, rounded up in every node.
        #[test]
        fn the_work_of_forwarding_is_balanced(nodes in any_nodes()) {
            for node in 0..nodes.num_nodes() {
                let ranks = nodes.ranks(node);
                let mut all: Vec<Rank> = ranks.iter().flat_map(|rank| nodes.sources(*rank)).collect();
                all.sort_unstable();
                prop_assert_eq!(all, (0..nodes.num_ranks()).map(Rank::from_index).collect::<Vec<_>>());
                let most: usize = (0..nodes.num_nodes()).map(|from| nodes.ranks(from).len().div_ceil(ranks.len())).sum();
                for rank in ranks {
                    prop_assert!(nodes.sources(*rank).any(|source| source == *rank));
                    let num_sources = nodes.sources(*rank).count();
                    prop_assert_eq!(num_sources, nodes.num_sources(*rank));
                    prop_assert!(num_sources <= most && num_sources <= nodes.max_sources());
                }
            }
        }

        /// Where nodes are of one size, every rank passes on for exactly one rank of each node.
        #[test]
        fn even_nodes_forward_evenly(num_nodes in 1usize..=16, ranks_per_node in 1usize..=4) {
            let nodes = Nodes::blocks(num_nodes * ranks_per_node, ranks_per_node);
            for rank in (0..nodes.num_ranks()).map(Rank::from_index) {
                let of_nodes: Vec<usize> = nodes.sources(rank).map(|source| nodes.of(source)).collect();
                prop_assert_eq!(of_nodes, (0..num_nodes).collect::<Vec<_>>());
            }
        }
    }
}
