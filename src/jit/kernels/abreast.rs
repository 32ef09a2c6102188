//! Whether a batch's two launches, of few rows and of many, run at once, and how many multiprocessors each then has. Pure; it
//! changes no bit, since any number of blocks takes all tiles in any order.
//!
//! One behind the other, each has the whole machine, and its last tiles leave most of it idle: one hot expert beside many that
//! have a row or two is a dozen tiles, one on each of a dozen multiprocessors, behind a launch that reads all other weights.

use super::cost::{SMALL, TileCost, TileTimes};
use super::grouped_gemm::GroupedGemm;

/// Rows of a batch whose launches may run at once: each has an input of FC2, and of more rows each fills the machine.
pub const MAX_ROWS_AT_ONCE: usize = 1 << 12;
/// Before and behind what a launch streams: its start, tokens, the barrier between both products.
const SMALL_FIXED_NS: u64 = 12_000;
/// Of a launch of tiles.
const LARGE_FIXED_NS: u64 = 6_000;
/// Bytes a nanosecond that the memory gives at most.
const MEMORY_BYTES_PER_NS: u64 = 4_600;
/// Picoseconds that one multiprocessor takes for a byte of weights in the first of [`SMALL`]'s tiles.
const SMALL_PS_PER_BYTE: u64 = 26;
const SMALL_TILE_NS: u64 = SMALL[0].tile_ns as u64;
/// The width that costs of tiles of many rows were measured with.
const MEASURED_WIDTH: u64 = 3_584;
/// What tiles of many rows take more beside a launch that reads weights on almost all multiprocessors, in per cent; on fewer, as
/// much less. It says where the machine is divided, and not whether it is: that had been right without.
const BESIDE_PERCENT: u64 = 32;
/// Both at once have to take less than so many per cent of one behind the other: the model is not better than that.
const MIN_GAIN_PERCENT: u64 = 92;
/// Multiprocessors by which a division moves.
const GRAIN: u32 = 4;

/// One of a batch's two launches: its tiles, and the rows of each of its experts.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// Of its schedule.
    pub cost: TileCost,
    /// Rows, more than none.
    pub counts: &'a [usize],
}

/// How many of `num_multiprocessors` the launch of many rows gets, where both are to run at once.
#[must_use]
pub fn multiprocessors_of_large(
    gemm: &GroupedGemm,
    small: Part<'_>,
    large: Part<'_>,
    num_multiprocessors: u32,
) -> Option<u32> {
    let few = SmallTime::of(gemm, small);
    let many = LargeTime::of(gemm, large);
    let in_turn = few.on(num_multiprocessors) + many.on(num_multiprocessors);
    let at_once = |of_large: u32, beside_percent: u64| {
        let of_small = num_multiprocessors - of_large;
        let per_cent = 100 + beside_percent * u64::from(of_small) / u64::from(num_multiprocessors);
        few.on(of_small).max(many.on(of_large) * per_cent / 100)
    };
    let divisions = (GRAIN..num_multiprocessors).step_by(GRAIN as usize);
    let best = divisions.min_by_key(|&of_large| at_once(of_large, BESIDE_PERCENT))?;
    (at_once(best, 0) * 100 < in_turn * MIN_GAIN_PERCENT).then_some(best)
}

/// What the launch of few rows takes.
struct SmallTime {
    /// To read its weights once.
    memory_ns: u64,
    /// Over all multiprocessors.
    tiles_ns: u64,
}

impl SmallTime {
    fn of(gemm: &GroupedGemm, part: Part<'_>) -> Self {
        let expert_bytes = gemm.expert_bytes();
        let TileTimes { all_ns, .. } = part.cost.tiles(part.counts.iter().copied());
        Self {
            memory_ns: part.counts.len() as u64 * expert_bytes / MEMORY_BYTES_PER_NS,
            tiles_ns: all_ns * expert_bytes / SMALL_TILE_NS * SMALL_PS_PER_BYTE / 1000,
        }
    }

    fn on(&self, num_multiprocessors: u32) -> u64 {
        SMALL_FIXED_NS + self.memory_ns.max(self.tiles_ns / u64::from(num_multiprocessors))
    }
}

/// What the launch of many rows takes.
struct LargeTime {
    /// Over all multiprocessors, of both products.
    tiles_ns: u64,
    /// FC1's longest tile.
    longest_fc1_ns: u64,
    longest_fc2_ns: u64,
}

impl LargeTime {
    fn of(gemm: &GroupedGemm, part: Part<'_>) -> Self {
        let TileTimes { all_ns, longest_ns } = part.cost.tiles(part.counts.iter().copied());
        let weight_rows = part.cost.schedule.weight_rows();
        let of_width = |ns: u64, width: u32| ns * u64::from(width) / MEASURED_WIDTH;
        let fc1 = of_width(all_ns, gemm.hidden) * u64::from(gemm.fc1_weight_rows().div_ceil(weight_rows));
        let fc2 = of_width(all_ns, gemm.intermediate) * u64::from(gemm.hidden.div_ceil(weight_rows));
        Self {
            tiles_ns: fc1 + fc2,
            longest_fc1_ns: of_width(longest_ns, gemm.hidden),
            longest_fc2_ns: of_width(longest_ns, gemm.intermediate),
        }
    }

    /// As [`TileCost::takes_ns`] has it: FC2's tiles wait for FC1's.
    fn on(&self, num_multiprocessors: u32) -> u64 {
        let chain = self.longest_fc1_ns + self.longest_fc2_ns;
        LARGE_FIXED_NS + chain.max(self.tiles_ns / u64::from(num_multiprocessors) + self.longest_fc1_ns / 2)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::grouped_gemm::Weights;
    use super::super::schedule::{Chooser, ExpertRows, Family};
    use super::*;
    use crate::numerics::activation::Activation;

    fn gemm(hidden: u32, intermediate: u32) -> GroupedGemm {
        let (activation, weights) = (Activation::Swiglu, Weights::Nvfp4);
        GroupedGemm { hidden, intermediate, activation, weights, quantise: false }
    }

    /// What a batch of such rows is given; none where one launch does, or both go one behind the other.
    fn division(gemm: &GroupedGemm, counts: &[usize], num_multiprocessors: u32) -> Option<u32> {
        let chooser = Chooser { family: Family::Wgmma, batch_invariant: false };
        let rows: Vec<ExpertRows> = counts.iter().copied().map(ExpertRows::alone).collect();
        chooser.batch_of_many(gemm, &rows).multiprocessors_of_large(gemm, &rows, num_multiprocessors)
    }

    /// One H200 was fastest with 32, 32 and 20 of those that were tried (docs/measurements/2026-12-01-h200-at-once.md).
    #[test]
    fn a_hot_expert_runs_beside_the_others() {
        let one_hot = |num_others, rows, hot| {
            let mut counts = vec![rows; num_others];
            counts.push(hot);
            counts
        };
        for (gemm, counts, best) in [
            (gemm(4096, 1536), one_hot(15, 2, 32), 24..=40),
            (gemm(3584, 3072), one_hot(55, 8, 448), 24..=36),
            (gemm(7168, 2048), one_hot(31, 2, 64), 16..=28),
        ] {
            let of_large = division(&gemm, &counts, 132);
            assert!(of_large.is_some_and(|of_large| best.contains(&of_large)), "{of_large:?}, not in {best:?}");
        }
    }

    #[test]
    fn equal_experts_are_one_launch() {
        for rows in [1, 16, 64, 1024] {
            assert_eq!(division(&gemm(3584, 3072), &[rows; 56], 132), None, "{rows}");
        }
    }

    #[test]
    fn what_fills_the_machine_goes_in_turn() {
        let mut counts = vec![2; 56];
        counts.extend([60; 56]);
        assert_eq!(division(&gemm(3584, 3072), &counts, 132), None);
    }

    #[test]
    fn many_rows_go_in_turn() {
        let counts = |hot| [[2; 15].as_slice(), &[hot]].concat();
        let of_large = |hot| division(&gemm(4096, 1536), &counts(hot), 132);
        assert!(of_large(100).is_some());
        assert_eq!(of_large(MAX_ROWS_AT_ONCE), None);
    }

    proptest! {
        /// Both parts have multiprocessors, on any machine.
        #[test]
        fn both_have_some(
            counts in proptest::collection::vec(0_usize..2000, 1..200),
            num_multiprocessors in 1_u32..200,
            (hidden, intermediate) in (1_u32..500, 1_u32..300),
        ) {
            let gemm = gemm(16 * hidden, 16 * intermediate);
            if let Some(of_large) = division(&gemm, &counts, num_multiprocessors) {
                prop_assert!((1..num_multiprocessors).contains(&of_large));
                prop_assert!(counts.iter().any(|rows| *rows > 16) && counts.iter().any(|rows| (1..=16).contains(rows)));
            }
        }
    }

    /// The model beside what one H200 took (docs/measurements/2026-12-01-h200-peers.md).
    #[test]
    fn the_model_is_near_what_was_measured() {
        let near = |model_ns: u64, measured_us: u64| {
            let per_cent = model_ns / (10 * measured_us);
            assert!((85..=115).contains(&per_cent), "{model_ns} ns for {measured_us} us");
        };
        let k3 = gemm(3584, 3072);
        for (num_experts, measured) in [(56, 241), (112, 466)] {
            let counts = vec![1; num_experts];
            near(SmallTime::of(&k3, Part { cost: SMALL[0], counts: &counts }).on(132), measured);
        }
        let large = |gemm: &GroupedGemm, rows: usize, num_experts: usize| {
            let counts = vec![rows; num_experts];
            let chooser = Chooser { family: Family::Wgmma, batch_invariant: false };
            let schedule = chooser.batch(gemm, &counts).of(rows);
            let cost = *super::super::cost::WGMMA.iter().find(|cost| cost.schedule == schedule).unwrap();
            LargeTime::of(gemm, Part { cost, counts: &counts }).on(132)
        };
        near(large(&k3, 128, 56), 681);
        near(large(&k3, 256, 56), 1400);
        near(large(&gemm(7168, 2048), 128, 32), 515);
        near(large(&gemm(4096, 1536), 128, 16), 144);
    }
}
