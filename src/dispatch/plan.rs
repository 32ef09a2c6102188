//! Who gets which token, and in which order rows are computed and come back. Pure: from ids to index lists.
//!
//! A token goes once to each rank that hosts one of its experts. Rows are computed in the order (expert, source rank,
//! token, slot), so that their bits and their order do not depend on the number of ranks.

use crate::dispatch::placement::Placement;
use crate::ids::{ExpertIdx, Rank};

/// Marks a slot that is masked, or not hosted by the rank that reads it.
pub const NOT_HERE: i32 = -1;

/// Top-k ids and weights of some tokens of one rank, validated: every id is -1 or an expert.
#[derive(Debug, Clone, Copy)]
pub struct Slots<'a> {
    /// Slots of a token.
    pub num_topk: usize,
    /// `[num_tokens, num_topk]`
    pub idx: &'a [i32],
    /// `[num_tokens, num_topk]`
    pub weights: &'a [f32],
}

impl<'a> Slots<'a> {
    /// Number of tokens.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.idx.len() / self.num_topk
    }

    /// The slots of tokens `range`.
    #[must_use]
    pub fn tokens(&self, range: std::ops::Range<usize>) -> Self {
        let slots = range.start * self.num_topk..range.end * self.num_topk;
        Slots { num_topk: self.num_topk, idx: &self.idx[slots.clone()], weights: &self.weights[slots] }
    }

    /// `(expert or None, weight)` of one token's slots.
    pub fn of(&self, token: usize) -> impl Iterator<Item = (Option<ExpertIdx>, f32)> + use<'a> {
        let slots = token * self.num_topk..(token + 1) * self.num_topk;
        let expert = |&id: &i32| u32::try_from(id).ok().map(ExpertIdx);
        self.idx[slots.clone()].iter().map(expert).zip(self.weights[slots].iter().copied())
    }
}

/// What one rank sends: for each destination, its tokens in ascending order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DispatchPlan {
    /// `[num_ranks + 1]` where each destination's tokens start in `tokens`.
    pub offsets: Vec<usize>,
    /// Token positions, by destination.
    pub tokens: Vec<u32>,
    /// `[num_ranks]` slots of this rank's tokens that each destination hosts: rows that come back in slot combine.
    pub num_slots: Vec<usize>,
}

impl DispatchPlan {
    /// Plans the dispatch of `slots` to the ranks that own their experts.
    #[must_use]
    pub fn new(placement: Placement, slots: Slots<'_>) -> Self {
        Self::by(placement.num_ranks(), slots, |expert| placement.owner(expert).rank)
    }

    /// Plans the way of `slots` to those of `num_ranks` that `rank_of` names for their experts, whoever owns them.
    #[must_use]
    pub fn by(num_ranks: usize, slots: Slots<'_>, rank_of: impl Fn(ExpertIdx) -> Rank) -> Self {
        let mut by_rank: Vec<Vec<u32>> = vec![Vec::new(); num_ranks];
        let mut num_slots = vec![0; num_ranks];
        for token in 0..slots.num_tokens() {
            let token_idx = ExpertIdx::from_index(token).0;
            for (expert, _) in slots.of(token) {
                let Some(expert) = expert else { continue };
                let rank = rank_of(expert).index();
                num_slots[rank] += 1;
                // Tokens come in ascending order, so a token that is already there is the last one.
                if by_rank[rank].last() != Some(&token_idx) {
                    by_rank[rank].push(token_idx);
                }
            }
        }
        let mut offsets = vec![0];
        for tokens in &by_rank {
            offsets.push(offsets[offsets.len() - 1] + tokens.len());
        }
        Self { offsets, tokens: by_rank.concat(), num_slots }
    }

    /// Tokens that go to `rank`.
    #[must_use]
    pub fn tokens_to(&self, rank: usize) -> &[u32] {
        &self.tokens[self.offsets[rank]..self.offsets[rank + 1]]
    }

    /// `[num_ranks]` number of tokens for each destination.
    #[must_use]
    pub fn num_tokens_to(&self) -> Vec<usize> {
        self.offsets.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Tokens for ranks other than `rank`.
    #[must_use]
    pub fn num_remote(&self, rank: Rank) -> usize {
        self.tokens.len() - self.tokens_to(rank.index()).len()
    }
}

/// What one rank computes: its rows in expert-major order, and where each goes back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComputePlan {
    /// `[num_local_experts + 1]` where each expert's rows start.
    pub expert_offsets: Vec<usize>,
    /// `[num_rows]` the received token that each row reads.
    pub row_token: Vec<u32>,
    /// `[num_rows]` the computed row at each place of the return order (received token, slot).
    pub return_rows: Vec<u32>,
    /// `[num_received + 1]` where each received token's rows start in `return_rows`.
    pub token_offsets: Vec<usize>,
}

impl ComputePlan {
    /// Plans from the local ids `[num_received, num_topk]` of the tokens received, ordered by (source rank, token).
    ///
    /// # Panics
    /// If a local id is not below `num_local_experts`, which senders that share the placement can't cause.
    #[must_use]
    pub fn new(num_local_experts: usize, num_topk: usize, local_idx: &[i32]) -> Self {
        // (expert, received token) in the order (received token, slot).
        let mut hosted: Vec<(usize, u32)> = Vec::new();
        let mut token_offsets = vec![0];
        for (token, slots) in local_idx.chunks_exact(num_topk.max(1)).enumerate() {
            let token = ExpertIdx::from_index(token).0;
            hosted.extend(slots.iter().filter_map(|&id| usize::try_from(id).ok()).map(|expert| (expert, token)));
            token_offsets.push(hosted.len());
        }
        let mut expert_offsets = vec![0; num_local_experts + 1];
        for &(expert, _) in &hosted {
            expert_offsets[expert + 1] += 1;
        }
        for expert in 0..num_local_experts {
            expert_offsets[expert + 1] += expert_offsets[expert];
        }
        // A stable counting sort: within an expert the order of arrival stays, which is (source rank, token, slot).
        let mut next = expert_offsets.clone();
        let mut row_token = vec![0; hosted.len()];
        let mut return_rows = Vec::with_capacity(hosted.len());
        for (expert, token) in hosted {
            let row = next[expert];
            next[expert] += 1;
            row_token[row] = token;
            return_rows.push(ExpertIdx::from_index(row).0);
        }
        Self { expert_offsets, row_token, return_rows, token_offsets }
    }

    /// Rows to compute.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.row_token.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slots<'a>(num_topk: usize, idx: &'a [i32], weights: &'a [f32]) -> Slots<'a> {
        Slots { num_topk, idx, weights }
    }

    #[test]
    fn a_token_goes_once_to_each_rank_and_masked_tokens_nowhere() {
        let idx = [0, 1, 3, 3, -1, -1, -1, 2, 2, 0];
        let plan = DispatchPlan::new(Placement::new(4, 2), slots(2, &idx, &[0.5; 10]));
        assert_eq!(plan.tokens_to(0), [0, 4]);
        assert_eq!(plan.tokens_to(1), [1, 3, 4]);
        assert_eq!(plan.num_slots, [3, 4]);
    }

    #[test]
    fn case_b6_a_repeated_expert_makes_two_rows() {
        let plan = ComputePlan::new(2, 2, &[1, 1, 0, 1]);
        assert_eq!(plan.expert_offsets, [0, 1, 4]);
        assert_eq!(plan.row_token, [1, 0, 0, 1]);
        assert_eq!(plan.return_rows, [1, 2, 0, 3]);
    }

    proptest! {
        /// The rows of all ranks, joined in rank order, are the rows of one rank alone.
        #[test]
        fn rows_do_not_depend_on_the_number_of_ranks(
            tokens in prop::collection::vec(prop::collection::vec(-1i32..7, 3), 0..20),
            num_ranks in 1usize..6,
            cut in 0usize..20,
        ) {
            let rows = |num_ranks: usize, cut: usize| -> Vec<(usize, usize)> {
                let placement = Placement::new(7, num_ranks);
                let homes = [&tokens[..cut.min(tokens.len())], &tokens[cut.min(tokens.len())..]];
                (0..num_ranks).flat_map(|rank| rows_of(placement, &homes, rank)).collect()
            };
            prop_assert_eq!(rows(num_ranks, cut), rows(1, 0));
        }
    }

    /// `(expert, global token)` of each row that `rank` computes, in order.
    fn rows_of(placement: Placement, homes: &[&[Vec<i32>]], rank: usize) -> Vec<(usize, usize)> {
        let local = placement.local_experts(Rank::from_index(rank));
        let (mut local_idx, mut received) = (Vec::new(), Vec::new());
        let mut first_token = 0;
        for home in homes {
            let idx = home.concat();
            let weights = vec![1.0; idx.len()];
            let slots = slots(3, &idx, &weights);
            for &token in DispatchPlan::new(placement, slots).tokens_to(rank) {
                received.push(first_token + token as usize);
                local_idx.extend(slots.of(token as usize).map(|(expert, _)| match expert {
                    Some(expert) if placement.owner(expert).rank.index() == rank => {
                        i32::try_from(placement.owner(expert).local_idx).unwrap()
                    }
                    _ => NOT_HERE,
                }));
            }
            first_token += home.len();
        }
        let plan = ComputePlan::new(local.len(), 3, &local_idx);
        (0..local.len())
            .flat_map(|expert| {
                (plan.expert_offsets[expert]..plan.expert_offsets[expert + 1]).map(move |row| (expert, row))
            })
            .map(|(expert, row)| (local.start + expert, received[plan.row_token[row] as usize]))
            .collect()
    }
}
