//! How many ranks a token reaches when routing is uniform.
//!
//! A token that draws k of E experts, every subset as likely, misses a rank with n of them in C(E - n, k) of C(E, k)
//! subsets (the hypergeometric distribution at zero), so it goes there with the chance 1 - C(E - n, k) / C(E, k); the sum
//! over ranks is the expected number of destinations. A router that keeps some groups of experts draws first the groups,
//! every set of them as likely, and then k experts of those: the chance is the mean of the same formula over the kept sets.
//! Real routers are not uniform: one that scores groups by their best experts, as DeepSeek's does, leaves fewer kept
//! groups out than this.

use std::ops::Range;

use crate::model::MoeGeometry;
use crate::routing::RoutingMethod;

/// What uniform routing draws from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reach {
    /// Routed experts.
    pub num_experts: usize,
    /// Slots a token, no expert twice.
    pub num_topk: usize,
    /// Groups that the experts are split into, in contiguous blocks.
    pub num_groups: usize,
    /// Groups kept for a token.
    pub topk_group: usize,
}

impl Reach {
    /// Of a model's router.
    #[must_use]
    pub fn new(geometry: &MoeGeometry) -> Self {
        let (num_groups, topk_group) = match geometry.routing {
            RoutingMethod::DeepseekV3 { num_groups, topk_group, .. } => (num_groups, topk_group),
            _ => (1, 1),
        };
        Self { num_experts: geometry.num_experts, num_topk: geometry.num_topk, num_groups, topk_group }
    }

    /// The chance that a token goes to the rank that hosts `experts`.
    #[must_use]
    pub fn chance(&self, experts: Range<usize>) -> f64 {
        if experts.is_empty() {
            return 0.0;
        }
        if self.topk_group >= self.num_groups {
            return 1.0 - self.miss(self.num_experts, experts.len());
        }
        let size = self.num_experts / self.num_groups;
        let (first, last) = (experts.start / size, (experts.end - 1) / size);
        // A contiguous block covers whole groups but for its two ends.
        let begin = experts.start - first * size;
        let ends = if first == last { [experts.len(), 0] } else { [size - begin, experts.end - last * size] };
        let num_inner = (last - first).saturating_sub(1);
        let num_outside = self.num_groups - (last - first + 1);
        let mut chance = 0.0;
        for (has_first, has_last) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            if has_last == 1 && first == last {
                continue;
            }
            for inner in 0..=num_inner.min(self.topk_group) {
                let kept = has_first + has_last + inner;
                let Some(others) = self.topk_group.checked_sub(kept).filter(|&others| others <= num_outside) else {
                    continue;
                };
                let share = (ln_choose(num_inner, inner) + ln_choose(num_outside, others)
                    - ln_choose(self.num_groups, self.topk_group))
                .exp();
                let hosted = has_first * ends[0] + has_last * ends[1] + inner * size;
                chance += share * (1.0 - self.miss(self.topk_group * size, hosted));
            }
        }
        chance
    }

    /// C(among - hosted, k) / C(among, k): the chance that none of `hosted` experts is drawn from `among`.
    fn miss(&self, among: usize, hosted: usize) -> f64 {
        (0..self.num_topk).map(|slot| (among - hosted).saturating_sub(slot) as f64 / (among - slot) as f64).product()
    }

    /// The slots of a token that `num_local_experts` host: k * n / E, whether or not groups are kept.
    #[must_use]
    pub fn slots(&self, num_local_experts: usize) -> f64 {
        self.share() * num_local_experts as f64
    }

    /// The chance that an expert has a row when `num_tokens` are routed: 1 - (1 - k / E)^tokens.
    #[must_use]
    pub fn is_used(&self, num_tokens: f64) -> f64 {
        1.0 - libm::pow(1.0 - self.share(), num_tokens)
    }

    fn share(&self) -> f64 {
        self.num_topk as f64 / self.num_experts as f64
    }
}

/// ln C(n, k), for k at most n.
fn ln_choose(n: usize, k: usize) -> f64 {
    let ln_factorial = |n: usize| libm::lgamma(n as f64 + 1.0);
    ln_factorial(n) - ln_factorial(k) - ln_factorial(n - k)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::dispatch::placement::Placement;
    use crate::dispatch::plan::{DispatchPlan, Slots};
    use crate::ids::Rank;

    /// A generator for tests (splitmix64).
    pub(in crate::plan) struct Random(pub u64);

    impl Random {
        fn below(&mut self, limit: usize) -> usize {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            usize::try_from((z ^ (z >> 31)) % limit as u64).expect("small")
        }

        /// `count` of `items`, without repetition.
        pub fn draw(&mut self, mut items: Vec<usize>, count: usize) -> Vec<usize> {
            for at in 0..count {
                let other = at + self.below(items.len() - at);
                items.swap(at, other);
            }
            items.truncate(count);
            items
        }

        /// What uniform routing chooses for one token.
        fn token(&mut self, reach: &Reach) -> Vec<usize> {
            let size = reach.num_experts / reach.num_groups;
            let groups = self.draw((0..reach.num_groups).collect(), reach.topk_group);
            self.draw(groups.into_iter().flat_map(|group| group * size..(group + 1) * size).collect(), reach.num_topk)
        }
    }

    /// Tokens for each rank of the plan that the transport follows.
    fn simulated(reach: &Reach, placement: Placement, num_tokens: usize) -> Vec<f64> {
        let mut random = Random(7);
        let idx: Vec<i32> = (0..num_tokens)
            .flat_map(|_| random.token(reach))
            .map(|expert| i32::try_from(expert).expect("small"))
            .collect();
        let weights = vec![1.0; idx.len()];
        let plan = DispatchPlan::new(placement, Slots { num_topk: reach.num_topk, idx: &idx, weights: &weights });
        plan.num_tokens_to().into_iter().map(|count| count as f64 / num_tokens as f64).collect()
    }

    #[test]
    fn chances_are_those_of_the_dispatch_plan() {
        for (reach, num_ranks) in [
            (Reach { num_experts: 896, num_topk: 16, num_groups: 1, topk_group: 1 }, 16),
            (Reach { num_experts: 128, num_topk: 8, num_groups: 1, topk_group: 1 }, 4),
            (Reach { num_experts: 128, num_topk: 8, num_groups: 1, topk_group: 1 }, 6),
            (Reach { num_experts: 256, num_topk: 8, num_groups: 8, topk_group: 4 }, 8),
            // Ranks that begin and end inside of groups, and some without an expert.
            (Reach { num_experts: 256, num_topk: 8, num_groups: 8, topk_group: 4 }, 3),
            (Reach { num_experts: 256, num_topk: 8, num_groups: 8, topk_group: 4 }, 5),
            (Reach { num_experts: 12, num_topk: 3, num_groups: 4, topk_group: 2 }, 17),
        ] {
            let placement = Placement::new(reach.num_experts, num_ranks);
            let num_tokens = 20_000;
            let found = simulated(&reach, placement, num_tokens);
            let mut sum = 0.0;
            for (rank, found) in found.iter().enumerate() {
                let chance = reach.chance(placement.local_experts(Rank::from_index(rank)));
                // Four deviations of a binomial: the seed is fixed, so this passes always or never.
                let allowed = 4.0 * (chance * (1.0 - chance) / f64::from(20_000)).sqrt() + 1e-12;
                assert!((found - chance).abs() <= allowed, "{reach:?}, rank {rank}: {found}, formula {chance}");
                sum += chance;
            }
            let destinations: f64 = found.iter().sum();
            assert!((destinations / sum - 1.0).abs() < 0.005, "{reach:?}: {destinations}, formula {sum}");
        }
    }

    #[test]
    fn bounds_are_exact() {
        let reach = Reach { num_experts: 8, num_topk: 3, num_groups: 1, topk_group: 1 };
        assert_eq!(reach.chance(0..0), 0.0);
        assert_eq!(reach.chance(0..8), 1.0);
        // Six of eight: no two experts outside can hold three slots.
        assert_eq!(reach.chance(0..6), 1.0);
        assert!((reach.chance(3..4) - 3.0 / 8.0).abs() < 1e-15, "one expert has the chance k / E");
        let grouped = Reach { num_experts: 8, num_topk: 2, num_groups: 4, topk_group: 2 };
        assert!((grouped.chance(0..8) - 1.0).abs() < 1e-12);
        assert!((grouped.chance(5..6) - 2.0 / 8.0).abs() < 1e-12);
        assert!((grouped.slots(4) - 1.0).abs() < 1e-15);
    }

    /// At two and eight ranks sending once a rank divides the rows by what hardware measurements of others found.
    #[test]
    fn sending_once_a_rank_divides_the_rows() {
        let divided = |num_experts, num_topk, num_ranks| {
            let reach = Reach { num_experts, num_topk, num_groups: 1, topk_group: 1 };
            let placement = Placement::new(num_experts, num_ranks);
            let destinations: f64 =
                (0..num_ranks).map(|rank| reach.chance(placement.local_experts(Rank::from_index(rank)))).sum();
            num_topk as f64 / destinations
        };
        for (found, wanted) in [
            (divided(896, 16, 2), 8.0),
            (divided(256, 8, 2), 4.0),
            (divided(896, 16, 8), 2.27),
            (divided(256, 8, 8), 1.5),
        ] {
            assert!((found / wanted - 1.0).abs() < 0.01, "{found}, published {wanted}");
        }
    }
}
