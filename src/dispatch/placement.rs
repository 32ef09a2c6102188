//! Which rank owns which experts.

use std::ops::Range;

use crate::ids::{ExpertIdx, Rank};

/// Experts in contiguous blocks by rank; where they don't divide, the first ranks own one more.
///
/// Every expert is owned once. With more ranks than experts the last ranks own none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    num_experts: usize,
    num_ranks: usize,
}

/// An expert as its owner numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// The rank that holds the expert's weights.
    pub rank: Rank,
    /// The expert's position among those of the rank.
    pub local_idx: u32,
}

impl Placement {
    /// Deals `num_experts` to `num_ranks`.
    ///
    /// # Panics
    /// If there are no ranks, which no world has.
    #[must_use]
    pub fn new(num_experts: usize, num_ranks: usize) -> Self {
        assert!(num_ranks > 0, "a world has at least one rank");
        Self { num_experts, num_ranks }
    }

    /// Experts over all ranks.
    #[must_use]
    pub fn num_experts(self) -> usize {
        self.num_experts
    }

    /// Ranks of the world.
    #[must_use]
    pub fn num_ranks(self) -> usize {
        self.num_ranks
    }

    /// The experts of `rank`, by their global index.
    #[must_use]
    pub fn local_experts(self, rank: Rank) -> Range<usize> {
        let (base, extra) = (self.num_experts / self.num_ranks, self.num_experts % self.num_ranks);
        let start = |rank: usize| rank * base + rank.min(extra);
        start(rank.index())..start(rank.index() + 1)
    }

    /// The owner of `expert`.
    ///
    /// # Panics
    /// If there is no such expert; ids are validated where they come in.
    #[must_use]
    pub fn owner(self, expert: ExpertIdx) -> Owner {
        assert!(expert.index() < self.num_experts, "{expert} of {}", self.num_experts);
        let (base, extra) = (self.num_experts / self.num_ranks, self.num_experts % self.num_ranks);
        let in_larger = extra * (base + 1);
        let expert = expert.index();
        let rank = if expert < in_larger { expert / (base + 1) } else { extra + (expert - in_larger) / base };
        let rank = Rank::from_index(rank);
        let local_idx = ExpertIdx::from_index(expert - self.local_experts(rank).start).0;
        Owner { rank, local_idx }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn case_b1_uneven_experts_are_dealt_in_blocks() {
        let sizes = |e, r| -> Vec<usize> {
            (0..r).map(|rank| Placement::new(e, r).local_experts(Rank::from_index(rank)).len()).collect()
        };
        assert_eq!(sizes(5, 2), [3, 2]);
        assert_eq!(sizes(7, 3), [3, 2, 2]);
        assert_eq!(sizes(128, 6), [22, 22, 21, 21, 21, 21]);
        assert_eq!(sizes(256, 3), [86, 85, 85]);
        assert_eq!(sizes(2, 4), [1, 1, 0, 0]);
    }

    proptest! {
        #[test]
        fn every_expert_is_owned_once_and_by_its_owner(num_experts in 1usize..900, num_ranks in 1usize..70) {
            let placement = Placement::new(num_experts, num_ranks);
            let mut next = 0;
            for rank in (0..num_ranks).map(Rank::from_index) {
                let local = placement.local_experts(rank);
                prop_assert_eq!(local.start, next);
                for (local_idx, expert) in local.clone().enumerate() {
                    let owner = placement.owner(ExpertIdx::from_index(expert));
                    prop_assert_eq!((owner.rank, owner.local_idx as usize), (rank, local_idx));
                }
                next = local.end;
            }
            prop_assert_eq!(next, num_experts);
        }
    }
}
