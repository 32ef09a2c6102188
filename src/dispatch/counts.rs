//! What ranks tell each other before tokens travel: how many come, and how many rows each expert gets of them. Pure.
//!
//! A rank thereby knows its experts' rows before a token is there, and chooses schedules and buffers without asking its
//! device a second time.

use super::placement::Placement;
use crate::ids::Rank;

/// What one rank sends, as its device has counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SentCounts {
    /// `[num_ranks]` tokens for each rank.
    pub num_tokens: Vec<usize>,
    /// `[num_ranks]` slots that each rank hosts of them: rows that come home in slot combine.
    pub num_slots: Vec<usize>,
    /// `[num_experts]` rows of each expert.
    rows: Vec<u32>,
}

/// The device has counted what can't be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the device counted {num_rows} rows, {num_slots} slots and {num_sent} tokens to send of {num_tokens} tokens with \
     {num_topk} slots each: its results can't be trusted; report this with the GPU's name and driver"
)]
pub struct Miscount {
    num_rows: usize,
    num_slots: usize,
    num_sent: usize,
    num_tokens: usize,
    num_topk: usize,
}

impl SentCounts {
    /// Words that a device counts into.
    #[must_use]
    pub fn num_words(placement: Placement) -> usize {
        2 * placement.num_ranks() + placement.num_experts()
    }

    /// Reads what a device has counted of `num_tokens` tokens: tokens for each rank, slots for each rank, rows of each expert.
    ///
    /// # Errors
    /// If it can't be: buffers are sized by it.
    pub fn new(placement: Placement, words: &[u32], (num_tokens, num_topk): (usize, usize)) -> Result<Self, Miscount> {
        let (of_ranks, rows) = words.split_at(2 * placement.num_ranks());
        let wide = |words: &[u32]| -> Vec<usize> { words.iter().map(|&word| word as usize).collect() };
        let (to_ranks, slots) = of_ranks.split_at(placement.num_ranks());
        let counts = Self { num_tokens: wide(to_ranks), num_slots: wide(slots), rows: rows.to_vec() };
        let of_rank = |rank| -> usize {
            let experts = placement.local_experts(Rank::from_index(rank));
            rows[experts].iter().map(|&rows| rows as usize).sum()
        };
        let is_possible = (0..placement.num_ranks()).all(|rank| {
            let (sent, slots) = (counts.num_tokens[rank], counts.num_slots[rank]);
            sent <= num_tokens && sent <= slots && slots <= sent * num_topk && slots == of_rank(rank)
        });
        if is_possible && counts.num_slots.iter().sum::<usize>() <= num_tokens * num_topk {
            return Ok(counts);
        }
        Err(counts.miscount(counts.num_tokens.iter().sum(), (num_tokens, num_topk)))
    }

    /// What is said of counts that can't be, with `num_sent` tokens to send.
    pub(super) fn miscount(&self, num_sent: usize, (num_tokens, num_topk): (usize, usize)) -> Miscount {
        let num_rows = self.rows.iter().map(|&rows| rows as usize).sum();
        Miscount { num_rows, num_slots: self.num_slots.iter().sum(), num_sent, num_tokens, num_topk }
    }

    /// What each rank is told, one behind the other: how many tokens come, then the rows of each of its experts.
    #[must_use]
    pub fn messages(&self, placement: Placement) -> Vec<u32> {
        (0..placement.num_ranks()).flat_map(|rank| self.message(placement, Rank::from_index(rank))).collect()
    }

    /// What `rank` is told.
    pub fn message(&self, placement: Placement, rank: Rank) -> impl Iterator<Item = u32> {
        let tokens = u32::try_from(self.num_tokens[rank.index()]).unwrap_or(u32::MAX);
        std::iter::once(tokens).chain(self.rows[placement.local_experts(rank)].iter().copied())
    }

    /// Tokens for ranks other than `rank`.
    #[must_use]
    pub fn num_remote(&self, rank: Rank) -> usize {
        self.num_tokens.iter().sum::<usize>() - self.num_tokens[rank.index()]
    }
}

/// Words of what a rank is told.
#[must_use]
pub fn message_len(placement: Placement, rank: Rank) -> usize {
    1 + placement.local_experts(rank).len()
}

/// What one rank receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedCounts {
    /// `[num_ranks]` tokens from each rank.
    pub num_tokens: Vec<usize>,
    /// `[num_ranks]` rows computed for each rank: rows that go back in slot combine.
    pub num_rows: Vec<usize>,
    /// `[num_local_experts + 1]` where each expert's rows start.
    pub expert_offsets: Vec<usize>,
}

impl ReceivedCounts {
    /// Reads what all ranks told a rank with `num_local_experts`, in rank order.
    #[must_use]
    pub fn new(num_local_experts: usize, messages: &[u32]) -> Self {
        let mut expert_offsets = vec![0; num_local_experts + 1];
        let (mut num_tokens, mut num_rows) = (Vec::new(), Vec::new());
        for message in messages.chunks_exact(1 + num_local_experts) {
            num_tokens.push(message[0] as usize);
            let rows = message[1..].iter().map(|&rows| rows as usize);
            num_rows.push(rows.clone().sum());
            expert_offsets[1..].iter_mut().zip(rows).for_each(|(sum, rows)| *sum += rows);
        }
        for expert in 0..num_local_experts {
            expert_offsets[expert + 1] += expert_offsets[expert];
        }
        Self { num_tokens, num_rows, expert_offsets }
    }

    /// Tokens from all ranks.
    #[must_use]
    pub fn total_tokens(&self) -> usize {
        self.num_tokens.iter().sum()
    }

    /// Rows to compute.
    #[must_use]
    pub fn total_rows(&self) -> usize {
        self.num_rows.iter().sum()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::dispatch::plan::{ComputePlan, DispatchPlan, Slots};
    use proptest::prelude::*;

    /// What a device counts.
    pub(in crate::dispatch) fn words(placement: Placement, slots: Slots<'_>) -> Vec<u32> {
        let plan = DispatchPlan::new(placement, slots);
        let mut rows = vec![0; placement.num_experts()];
        slots.idx.iter().filter_map(|id| usize::try_from(*id).ok()).for_each(|expert| rows[expert] += 1);
        let counts = plan.num_tokens_to().into_iter().chain(plan.num_slots);
        counts.map(|count| u32::try_from(count).unwrap()).chain(rows).collect()
    }

    proptest! {
        /// What is told gives every rank the offsets and runs that it would find in the tokens.
        #[test]
        fn ranks_know_their_rows_before_tokens_come(
            tokens in prop::collection::vec(prop::collection::vec(-1i32..7, 3), 0..20),
            num_ranks in 1usize..9,
        ) {
            let placement = Placement::new(7, num_ranks);
            let idx = tokens.concat();
            let slots = Slots { num_topk: 3, idx: &idx, weights: &vec![1.0; idx.len()] };
            let plan = DispatchPlan::new(placement, slots);
            let sent = SentCounts::new(placement, &words(placement, slots), (tokens.len(), 3)).unwrap();
            prop_assert_eq!(&sent.num_tokens, &plan.num_tokens_to());
            let messages = sent.messages(placement);
            let mut rest = messages.as_slice();
            for rank in (0..num_ranks).map(Rank::from_index) {
                let (message, others) = rest.split_at(message_len(placement, rank));
                rest = others;
                let experts = placement.local_experts(rank);
                let local_idx: Vec<i32> = plan.tokens_to(rank.index()).iter().flat_map(|&token| {
                    tokens[token as usize].iter().map(|id| {
                        let here = usize::try_from(*id).ok().filter(|id| experts.contains(id));
                        here.map_or(-1, |id| i32::try_from(id - experts.start).unwrap())
                    })
                }).collect();
                let compute = ComputePlan::new(experts.len(), 3, &local_idx);
                let received = ReceivedCounts::new(experts.len(), message);
                prop_assert_eq!(&received.expert_offsets, &compute.expert_offsets);
                prop_assert_eq!(received.num_rows, vec![compute.num_rows()]);
                prop_assert_eq!(received.num_tokens, vec![plan.tokens_to(rank.index()).len()]);
            }
            prop_assert!(rest.is_empty());
        }
    }

    #[test]
    fn what_several_ranks_send_is_added_up() {
        let received = ReceivedCounts::new(2, &[3, 1, 4, 0, 0, 0, 2, 2, 0]);
        assert_eq!(received.num_tokens, [3, 0, 2]);
        assert_eq!(received.num_rows, [5, 0, 2]);
        assert_eq!(received.expert_offsets, [0, 3, 7]);
        assert_eq!((received.total_tokens(), received.total_rows()), (5, 7));
        let none = ReceivedCounts::new(0, &[0, 0]);
        assert_eq!((none.total_tokens(), none.expert_offsets), (0, vec![0]));
    }

    #[test]
    fn counts_that_can_not_be_are_refused() {
        let placement = Placement::new(2, 2);
        assert!(SentCounts::new(placement, &[1, 1, 1, 2, 1, 2], (1, 3)).is_ok());
        for words in [[2, 1, 2, 2, 2, 2], [1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 2], [1, 1, 0, 2, 0, 2]] {
            let error = SentCounts::new(placement, &words, (1, 3)).unwrap_err();
            assert!(error.to_string().contains("of 1 tokens with 3 slots"), "{error}");
        }
    }
}
