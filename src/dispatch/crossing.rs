//! What ranks tell each other before tokens travel in two levels between GPUs: what they tell in one level ([`super::counts`]),
//! and whoever passes tokens on, how many come for that and how many of them go to each rank of its node. Pure.
//!
//! A rank thereby knows the sizes of both hops before a token is there, and asks its device no second time.

use super::counts::{Miscount, ReceivedCounts, SentCounts, message_len};
use super::two_level::TwoLevelPlan;
use crate::ids::Rank;

/// What one rank sends in the first hop, as its device has counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SentCrossing {
    /// `[num_ranks]` tokens for each rank that passes them on.
    pub num_tokens: Vec<usize>,
}

/// What one rank receives in either hop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToldCrossing {
    /// What it receives in the second, by the rank that it is of: as in one level.
    pub received: ReceivedCounts,
    /// `[num_ranks]` tokens from each rank in the first.
    pub num_entering: Vec<usize>,
    /// `[num_peers, num_sources]` how many of each source it passes on to each rank of its node, both ascending: as
    /// [`super::two_level::ForwardPlan::num_tokens`].
    pub num_passed_on: Vec<Vec<u32>>,
}

impl TwoLevelPlan<'_> {
    /// Whether the tokens of `source` come to the node of `rank` through that.
    fn enter_at(&self, source: Rank, rank: Rank) -> bool {
        self.nodes.forwarder(source, self.nodes.of(rank)) == rank
    }

    /// Words that `from` tells `to`.
    fn crossing_len(&self, from: Rank, to: Rank) -> usize {
        let extra = if self.enter_at(from, to) { 1 + self.nodes.peers(to).len() } else { 0 };
        message_len(self.placement, to) + extra
    }

    /// `[num_ranks]` words that this rank tells each, and that each tells this one.
    #[must_use]
    pub fn crossing_lens(&self) -> [Vec<usize>; 2] {
        let ranks = || (0..self.nodes.num_ranks()).map(Rank::from_index);
        let (to, from) = (ranks().map(|to| self.crossing_len(self.rank, to)), ranks());
        [to.collect(), from.map(|from| self.crossing_len(from, self.rank)).collect()]
    }

    /// Reads what a device has counted of `num_tokens` tokens: `words[r]` of them enter a node at rank `r`.
    ///
    /// # Errors
    /// If it can't be, beside what it counted for one level: buffers are sized by it.
    pub fn sent_crossing(
        &self,
        sent: &SentCounts,
        words: &[u32],
        (num_tokens, num_topk): (usize, usize),
    ) -> Result<SentCrossing, Miscount> {
        let entering: Vec<usize> = words[..self.nodes.num_ranks()].iter().map(|&word| word as usize).collect();
        let is_possible = |(rank, &num): (usize, &usize)| {
            let rank = Rank::from_index(rank);
            if !self.enter_at(self.rank, rank) {
                return num == 0;
            }
            let to_peers = || self.nodes.peers(rank).iter().map(|peer| sent.num_tokens[peer.index()]);
            // Each goes to one of them at least, and to each of them once.
            to_peers().max() <= Some(num) && num <= num_tokens.min(to_peers().sum())
        };
        if entering.iter().enumerate().all(is_possible) {
            return Ok(SentCrossing { num_tokens: entering });
        }
        Err(sent.miscount(entering.iter().sum(), (num_tokens, num_topk)))
    }

    /// What each rank is told, one behind the other.
    #[must_use]
    pub fn crossing_messages(&self, sent: &SentCounts, crossing: &SentCrossing) -> Vec<u32> {
        let mut words = Vec::new();
        for rank in (0..self.nodes.num_ranks()).map(Rank::from_index) {
            words.extend(sent.message(self.placement, rank));
            if self.enter_at(self.rank, rank) {
                let to_peers = self.nodes.peers(rank).iter().map(|peer| sent.num_tokens[peer.index()]);
                let counts = std::iter::once(crossing.num_tokens[rank.index()]).chain(to_peers);
                words.extend(counts.map(|count| u32::try_from(count).unwrap_or(u32::MAX)));
            }
        }
        words
    }

    /// Reads what all ranks told this one, in rank order.
    #[must_use]
    pub fn told_crossing(&self, mut words: &[u32]) -> ToldCrossing {
        let peers = self.nodes.peers(self.rank);
        let len = message_len(self.placement, self.rank);
        let (mut in_one_level, mut num_entering) = (Vec::new(), vec![0; self.nodes.num_ranks()]);
        let mut num_passed_on = vec![Vec::new(); peers.len()];
        for source in (0..self.nodes.num_ranks()).map(Rank::from_index) {
            let (message, rest) = words.split_at(self.crossing_len(source, self.rank));
            words = rest;
            in_one_level.extend(&message[..len]);
            if let [entering, to_peers @ ..] = &message[len..] {
                num_entering[source.index()] = *entering as usize;
                num_passed_on.iter_mut().zip(to_peers).for_each(|(to_peer, &count)| to_peer.push(count));
            }
        }
        ToldCrossing { received: ReceivedCounts::new(len - 1, &in_one_level), num_entering, num_passed_on }
    }
}

impl ToldCrossing {
    /// `[num_ranks]` tokens that are passed on to each rank: of the node alone.
    #[must_use]
    pub fn num_tokens_to(&self, plans: TwoLevelPlan<'_>) -> Vec<usize> {
        let mut to = vec![0; plans.nodes.num_ranks()];
        for (peer, counts) in plans.nodes.peers(plans.rank).iter().zip(&self.num_passed_on) {
            to[peer.index()] = counts.iter().map(|&count| count as usize).sum();
        }
        to
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::counts::tests::words;
    use crate::dispatch::placement::Placement;
    use crate::dispatch::two_level::tests::{any_step, first_hop, slots};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

        /// What is told is what whoever passes tokens on would find in them, and what is received is what one level receives.
        #[test]
        fn ranks_know_both_hops_before_tokens_come((nodes, num_experts, brought) in any_step()) {
            let placement = Placement::new(num_experts, nodes.num_ranks());
            let plans = |rank| TwoLevelPlan { placement, nodes: &nodes, rank: Rank::from_index(rank) };
            let (entered, crossed) = first_hop(placement, &nodes, &brought);
            let mut told = vec![Vec::new(); nodes.num_ranks()];
            let mut one_level = vec![Vec::new(); nodes.num_ranks()];
            for (source, brought) in brought.iter().enumerate() {
                let slots = slots(brought);
                let size = (slots.num_tokens(), slots.num_topk);
                let sent = SentCounts::new(placement, &words(placement, slots), size).unwrap();
                let of_device: Vec<u32> = crossed[source].iter().map(|&num| u32::try_from(num).unwrap()).collect();
                let crossing = plans(source).sent_crossing(&sent, &of_device, size).unwrap();
                prop_assert_eq!(&crossing.num_tokens, &crossed[source]);
                let messages = plans(source).crossing_messages(&sent, &crossing);
                let mut rest = messages.as_slice();
                for (rank, len) in plans(source).crossing_lens()[0].iter().enumerate() {
                    prop_assert_eq!(*len, plans(rank).crossing_lens()[1][source]);
                    let (message, others) = rest.split_at(*len);
                    told[rank].extend_from_slice(message);
                    one_level[rank].extend(sent.message(placement, Rank::from_index(rank)));
                    rest = others;
                }
                prop_assert!(rest.is_empty());
            }
            for rank in 0..nodes.num_ranks() {
                let found = plans(rank).told_crossing(&told[rank]);
                let num_local_experts = placement.local_experts(Rank::from_index(rank)).len();
                prop_assert_eq!(&found.received, &ReceivedCounts::new(num_local_experts, &one_level[rank]));
                let num_entering: Vec<usize> = crossed.iter().map(|of_source| of_source[rank]).collect();
                prop_assert_eq!(&found.num_entering, &num_entering);
                let (idx, weights) = entered[rank].iter().map(|token| (token.idx.clone(), token.weights.clone())).unzip();
                let (idx, weights): (Vec<Vec<i32>>, Vec<Vec<f32>>) = (idx, weights);
                let forward = plans(rank).forward(slots(&(idx.concat(), weights.concat())), &num_entering);
                prop_assert_eq!(&found.num_passed_on, &forward.num_tokens);
                prop_assert_eq!(found.num_tokens_to(plans(rank)), forward.plan.num_tokens_to());
            }
        }
    }

    /// Two nodes of two; rank 0 brings two tokens, the first for ranks 2 and 3, the second for rank 3.
    #[test]
    fn counts_that_can_not_be_are_refused() {
        let nodes = crate::dispatch::nodes::Nodes::blocks(4, 2);
        let placement = Placement::new(4, 4);
        let plans = TwoLevelPlan { placement, nodes: &nodes, rank: Rank(0) };
        let brought = (vec![2, 3, -1, 3, -1, -1], vec![1.0; 6]);
        let sent = SentCounts::new(placement, &words(placement, slots(&brought)), (2, 3)).unwrap();
        assert!(plans.sent_crossing(&sent, &[0, 0, 2, 0], (2, 3)).is_ok());
        // Fewer than go to one rank, more than there are, where none enters, for a node that hosts none.
        for words in [[0, 0, 1, 0], [0, 0, 3, 0], [0, 0, 2, 1], [1, 0, 2, 0]] {
            let error = plans.sent_crossing(&sent, &words, (2, 3)).unwrap_err();
            assert!(error.to_string().contains("of 2 tokens with 3 slots"), "{error}");
        }
    }
}
