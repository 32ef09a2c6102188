//! Dispatch in two levels. Pure: from ids to who sends what in either hop, and in which order it is read.
//!
//! In the first hop a token goes once to each *node* that hosts one of its experts: to the rank there of equal local index
//! ([`Nodes::forwarder`]), with the ids of the experts of that node. In the second, that rank passes it on to each rank of its
//! node that hosts one of them, with that rank's local ids. What arrives is read in the order of its sources, so that a rank
//! computes the same rows in the same order as in one level, from the same bytes. A token of a rank's own node takes the
//! second hop alone.
//!
//! Rows go back in one level in either case: a sum on the way would be another sum, and rows that are only passed on would
//! cross to other nodes as often.

use crate::dispatch::nodes::Nodes;
use crate::dispatch::placement::Placement;
use crate::dispatch::plan::{DispatchPlan, Slots};
use crate::ids::{ExpertIdx, Rank};

/// Plans both hops for one rank.
#[derive(Debug, Clone, Copy)]
pub struct TwoLevelPlan<'a> {
    /// Who owns what.
    pub placement: Placement,
    /// Who lives where.
    pub nodes: &'a Nodes,
    /// The rank.
    pub rank: Rank,
}

/// The second hop of one rank, as the one that passes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwardPlan {
    /// Which of the tokens that came go to which rank: all of its node.
    pub plan: DispatchPlan,
    /// `[num_peers, num_sources]` how many of each source go to each rank of the node, both ascending.
    pub num_tokens: Vec<Vec<u32>>,
}

/// The second hop of one rank, as the one that receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrivalPlan {
    /// `[num_ranks]` tokens from each rank that passes on: of its node alone.
    pub num_tokens_from: Vec<usize>,
    /// `[num_ranks]` tokens of each source, whoever passed them on.
    pub num_tokens_of: Vec<usize>,
    /// `[num_ranks]` the place of each source's first token among those that arrive in rank order.
    pub starts: Vec<usize>,
}

impl TwoLevelPlan<'_> {
    /// The first hop: the tokens of this rank that enter each node, by the rank through which they do.
    #[must_use]
    pub fn cross(&self, slots: Slots<'_>) -> DispatchPlan {
        DispatchPlan::by(self.nodes.num_ranks(), slots, |expert| self.entry(expert))
    }

    /// The id under which a slot goes to `rank` in the first hop: the expert's own, where the token enters its node there.
    #[must_use]
    pub fn id_in_node(&self, rank: usize, expert: ExpertIdx) -> Option<u32> {
        (self.entry(expert).index() == rank).then_some(expert.0)
    }

    /// The rank through which this rank's tokens come to `expert`.
    fn entry(&self, expert: ExpertIdx) -> Rank {
        self.nodes.forwarder(self.rank, self.nodes.of(self.placement.owner(expert).rank))
    }

    /// The second hop, of the tokens `slots` that came in the first: `num_received[r]` from rank `r`, in rank order.
    #[must_use]
    pub fn forward(&self, slots: Slots<'_>, num_received: &[usize]) -> ForwardPlan {
        let plan = DispatchPlan::new(self.placement, slots);
        let ends = self.nodes.sources(self.rank).scan(0, |end, source| {
            *end += num_received[source.index()];
            Some(*end)
        });
        let to_peer = |peer: &Rank| {
            let tokens = plan.tokens_to(peer.index());
            let mut first = 0;
            let of_source = |end: usize| {
                let next = tokens.partition_point(|&token| (token as usize) < end);
                let count = Rank::from_index(next - first).0;
                first = next;
                count
            };
            ends.clone().map(of_source).collect()
        };
        let num_tokens = self.nodes.peers(self.rank).iter().map(to_peer).collect();
        ForwardPlan { plan, num_tokens }
    }

    /// How what arrives is read, given what the ranks of the node have told: `told[p]` is rank `p`'s row of
    /// [`ForwardPlan::num_tokens`] for this rank, by ascending ranks of the node.
    #[must_use]
    pub fn arrive(&self, told: &[&[u32]]) -> ArrivalPlan {
        let num_ranks = self.nodes.num_ranks();
        let (mut num_tokens_from, mut num_tokens_of) = (vec![0; num_ranks], vec![0; num_ranks]);
        let (mut starts, mut next) = (vec![0; num_ranks], 0);
        for (forwarder, counts) in self.nodes.peers(self.rank).iter().zip(told) {
            for (source, &count) in self.nodes.sources(*forwarder).zip(*counts) {
                let count = count as usize;
                num_tokens_from[forwarder.index()] += count;
                num_tokens_of[source.index()] = count;
                starts[source.index()] = next;
                next += count;
            }
        }
        ArrivalPlan { num_tokens_from, num_tokens_of, starts }
    }
}

impl ArrivalPlan {
    /// The tokens of each source, in rank order, of `arrived`: tokens of `row_bytes` as they came.
    #[must_use]
    pub fn by_source<'a>(&self, arrived: &'a [u8], row_bytes: usize) -> Vec<&'a [u8]> {
        let run = |(&start, &count): (&usize, &usize)| &arrived[start * row_bytes..(start + count) * row_bytes];
        self.starts.iter().zip(&self.num_tokens_of).map(run).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::dispatch::nodes::tests::any_nodes;
    use crate::dispatch::plan::NOT_HERE;
    use proptest::prelude::*;

    /// A token on its way: where it comes from, and its slots as the receiver is told.
    #[derive(Debug, Clone, PartialEq)]
    pub(in crate::dispatch) struct Token {
        source: usize,
        token: u32,
        pub idx: Vec<i32>,
        pub weights: Vec<f32>,
    }

    /// What one rank brings.
    pub(in crate::dispatch) type Brought = (Vec<i32>, Vec<f32>);

    const NUM_TOPK: usize = 3;

    pub(in crate::dispatch) fn slots((idx, weights): &Brought) -> Slots<'_> {
        Slots { num_topk: NUM_TOPK, idx, weights }
    }

    /// Worlds, numbers of experts, and up to four tokens a rank whose slots are masked, repeated and skewed.
    pub(in crate::dispatch) fn any_step() -> impl Strategy<Value = (Nodes, usize, Vec<Brought>)> {
        (any_nodes(), 1usize..100).prop_flat_map(|(nodes, num_experts)| {
            let last = i32::try_from(num_experts).unwrap() - 1;
            let id = prop_oneof![1 => Just(-1), 2 => 0..=last, 1 => 0..=last.min(1)];
            let token = prop::collection::vec((id, 0.0f32..1.0), NUM_TOPK);
            let of_rank = prop::collection::vec(token, 0..=4)
                .prop_map(|tokens| tokens.into_iter().flatten().unzip::<i32, f32, Vec<i32>, Vec<f32>>());
            let of_ranks = prop::collection::vec(of_rank, nodes.num_ranks());
            (Just(nodes), Just(num_experts), of_ranks)
        })
    }

    /// The slots of a token with the ids of the receiver; what is not its own is masked.
    fn told(slots: Slots<'_>, token: u32, id: impl Fn(ExpertIdx) -> Option<u32>) -> (Vec<i32>, Vec<f32>) {
        let told = slots.of(token as usize).map(|(expert, weight)| match expert.and_then(&id) {
            Some(id) => (i32::try_from(id).unwrap(), weight),
            None => (NOT_HERE, 0.0),
        });
        told.unzip()
    }

    fn local_id(placement: Placement, rank: usize) -> impl Fn(ExpertIdx) -> Option<u32> {
        move |expert| {
            let owner = placement.owner(expert);
            (owner.rank.index() == rank).then_some(owner.local_idx)
        }
    }

    /// What every rank receives in one level: `[num_ranks]`
    fn in_one_level(placement: Placement, brought: &[Brought]) -> Vec<Vec<Token>> {
        let mut received = vec![Vec::new(); brought.len()];
        for (source, brought) in brought.iter().enumerate() {
            let plan = DispatchPlan::new(placement, slots(brought));
            for (rank, received) in received.iter_mut().enumerate() {
                for &token in plan.tokens_to(rank) {
                    let (idx, weights) = told(slots(brought), token, local_id(placement, rank));
                    received.push(Token { source, token, idx, weights });
                }
            }
        }
        received
    }

    /// What every rank holds between the hops, and how many tokens each has sent to every other to bring that about.
    pub(in crate::dispatch) fn first_hop(
        placement: Placement,
        nodes: &Nodes,
        brought: &[Brought],
    ) -> (Vec<Vec<Token>>, Vec<Vec<usize>>) {
        let (mut entered, mut sent) = (vec![Vec::new(); brought.len()], Vec::new());
        for (source, brought) in brought.iter().enumerate() {
            let plans = TwoLevelPlan { placement, nodes, rank: Rank::from_index(source) };
            let plan = plans.cross(slots(brought));
            sent.push(plan.num_tokens_to());
            for (rank, entered) in entered.iter_mut().enumerate() {
                for &token in plan.tokens_to(rank) {
                    let (idx, weights) = told(slots(brought), token, |expert| plans.id_in_node(rank, expert));
                    entered.push(Token { source, token, idx, weights });
                }
            }
        }
        (entered, sent)
    }

    /// What every rank receives in two levels, in the order in which it reads it, and the tokens that each has passed on to
    /// every other.
    fn second_hop(placement: Placement, nodes: &Nodes, entered: &[Vec<Token>]) -> (Vec<Vec<Token>>, Vec<Vec<usize>>) {
        let ranks = || (0..nodes.num_ranks()).map(Rank::from_index);
        let of_rank = |rank: Rank| TwoLevelPlan { placement, nodes, rank };
        let flat = |tokens: &[Token]| -> Brought {
            let idx = tokens.iter().flat_map(|token| token.idx.clone()).collect();
            (idx, tokens.iter().flat_map(|token| token.weights.clone()).collect())
        };
        let brought: Vec<Brought> = entered.iter().map(|tokens| flat(tokens)).collect();
        let forwards: Vec<ForwardPlan> = ranks()
            .map(|rank| {
                let of_source = |source| entered[rank.index()].iter().filter(|token| token.source == source).count();
                let num_received: Vec<usize> = (0..nodes.num_ranks()).map(of_source).collect();
                of_rank(rank).forward(slots(&brought[rank.index()]), &num_received)
            })
            .collect();
        let received = ranks().map(|rank| {
            let peers = nodes.peers(rank);
            let place = peers.iter().position(|peer| *peer == rank).unwrap();
            let counts: Vec<&[u32]> = peers.iter().map(|peer| &*forwards[peer.index()].num_tokens[place]).collect();
            let arrival = of_rank(rank).arrive(&counts);
            let mut arrived = Vec::new();
            for peer in peers.iter().map(|peer| peer.index()) {
                let tokens = forwards[peer].plan.tokens_to(rank.index());
                assert_eq!(tokens.len(), arrival.num_tokens_from[peer]);
                for &token in tokens {
                    let (idx, weights) = told(slots(&brought[peer]), token, local_id(placement, rank.index()));
                    let Token { source, token, .. } = entered[peer][token as usize];
                    arrived.push(Token { source, token, idx, weights });
                }
            }
            // As bytes: a token's place among those that arrived.
            let places: Vec<u8> = (0..arrived.len()).map(|place| u8::try_from(place).unwrap()).collect();
            let in_order = arrival.by_source(&places, 1).concat();
            in_order.into_iter().map(|place| arrived[usize::from(place)].clone()).collect()
        });
        (received.collect(), forwards.iter().map(|forward| forward.plan.num_tokens_to()).collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

        /// Every rank reads the same tokens in the same order as in one level: the same local ids, the same weights.
        #[test]
        fn two_levels_bring_what_one_level_brings((nodes, num_experts, brought) in any_step()) {
            let placement = Placement::new(num_experts, nodes.num_ranks());
            let (entered, _) = first_hop(placement, &nodes, &brought);
            let (received, _) = second_hop(placement, &nodes, &entered);
            prop_assert_eq!(received, in_one_level(placement, &brought));
        }

        /// The first hop leaves a node once for each other node that hosts one of a token's experts, and never stays in it;
        /// the second never leaves it.
        #[test]
        fn a_token_crosses_once_a_node((nodes, num_experts, brought) in any_step()) {
            let placement = Placement::new(num_experts, nodes.num_ranks());
            let (entered, crossed) = first_hop(placement, &nodes, &brought);
            let (_, passed_on) = second_hop(placement, &nodes, &entered);
            for (source, brought) in brought.iter().enumerate() {
                let home = nodes.of(Rank::from_index(source));
                // Counted from the ids alone.
                let mut once_a_node = 0;
                for token in brought.0.chunks_exact(NUM_TOPK) {
                    let experts = token.iter().filter_map(|id| u32::try_from(*id).ok()).map(ExpertIdx);
                    let mut reached: Vec<usize> = experts.map(|expert| nodes.of(placement.owner(expert).rank)).collect();
                    reached.sort_unstable();
                    reached.dedup();
                    once_a_node += reached.iter().filter(|node| **node != home).count();
                }
                let sent = |hop: &[Vec<usize>], is_home: bool| -> usize {
                    let to = hop[source].iter().enumerate().filter(|(rank, _)| *rank != source);
                    to.filter(|(rank, _)| (nodes.of(Rank::from_index(*rank)) == home) == is_home).map(|(_, num)| num).sum()
                };
                prop_assert_eq!(sent(&crossed, false), once_a_node);
                prop_assert_eq!(sent(&crossed, true), 0);
                prop_assert_eq!(sent(&passed_on, false), 0);
            }
        }
    }

    /// Tokens of every rank to every expert: each rank of a node passes on as many as the others.
    #[test]
    fn passing_on_is_balanced_over_local_indexes() {
        for (num_nodes, ranks_per_node) in [(2, 2), (4, 4), (16, 4), (8, 8)] {
            let nodes = Nodes::blocks(num_nodes * ranks_per_node, ranks_per_node);
            let placement = Placement::new(nodes.num_ranks(), nodes.num_ranks());
            // A token for each node, whose experts are that node's alone.
            let experts = |node: usize| (0..NUM_TOPK).map(move |slot| node * ranks_per_node + slot % ranks_per_node);
            let idx: Vec<i32> = (0..num_nodes).flat_map(experts).map(|expert| i32::try_from(expert).unwrap()).collect();
            let brought = vec![(idx, vec![1.0; num_nodes * NUM_TOPK]); nodes.num_ranks()];
            let (entered, _) = first_hop(placement, &nodes, &brought);
            assert!(entered.iter().all(|tokens| tokens.len() == num_nodes), "{num_nodes} x {ranks_per_node}");
        }
    }

    #[test]
    fn one_rank_a_node_passes_everything_to_itself() {
        let nodes = Nodes::blocks(3, 1);
        let placement = Placement::new(3, 3);
        let brought = vec![(vec![0, 1, 2], vec![0.5; 3]), (vec![], vec![]), (vec![2, 2, -1], vec![0.25; 3])];
        let (entered, crossed) = first_hop(placement, &nodes, &brought);
        let (received, passed_on) = second_hop(placement, &nodes, &entered);
        assert_eq!(crossed, [[1, 1, 1], [0, 0, 0], [0, 0, 1]]);
        assert_eq!(passed_on, [[1, 0, 0], [0, 1, 0], [0, 0, 2]]);
        assert_eq!(received, in_one_level(placement, &brought));
    }
}
