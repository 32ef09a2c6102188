//! Which schedule computes an expert's rows: a pure choice from facts that all ranks share.
//!
//! Schedules that add K in one order have equal bits, whatever the rows of a tile. Which order serves an expert follows from
//! its own number of rows, which is the world's, since an expert lives on one rank: how experts or tokens are split changes
//! nothing. Where bits may depend on nothing but token and expert, one order serves all row counts. Among the tiles of an
//! order a batch takes the one that is fastest for all of its experts together: one launch an order, and no launch waits for
//! another one's last tiles.

use super::abreast::{self, MAX_ROWS_AT_ONCE, Part};
use super::cost::{MMA_SYNC, SMALL, TileCost, WGMMA};
use super::deal::Candidates;
use super::grouped_gemm::{GroupedGemm, Schedule};

/// A family of schedules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Those of any GPU since Ampere.
    MmaSync,
    /// Those of Hopper.
    Wgmma,
}

/// How schedules are chosen for one group of experts.
#[derive(Debug, Clone, Copy)]
pub struct Chooser {
    /// The family to choose from.
    pub family: Family,
    /// A row's bits may not depend on the number of rows.
    pub batch_invariant: bool,
}

/// The schedules of a batch: one an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSchedules {
    /// Of experts with up to `max_small_rows`.
    small: Schedule,
    max_small_rows: u32,
    large: Schedule,
}

impl BatchSchedules {
    /// The schedule for an expert of `num_rows` rows.
    #[must_use]
    pub fn of(&self, num_rows: usize) -> Schedule {
        if num_rows <= self.max_small_rows as usize { self.small } else { self.large }
    }

    /// How many of `num_multiprocessors` the launch of experts with many rows gets, where it is to run beside that of few. None
    /// where there is one launch, or one behind the other is as fast.
    #[must_use]
    pub fn multiprocessors_of_large(
        &self,
        gemm: &GroupedGemm,
        rows: &[ExpertRows],
        num_multiprocessors: u32,
    ) -> Option<u32> {
        let counts_of = |schedule| -> Vec<usize> {
            let is_wanted = |rows: &&ExpertRows| rows.here > 0 && self.of(rows.in_all) == schedule;
            rows.iter().filter(is_wanted).map(|rows| rows.here).collect()
        };
        let cost_of = |costs: &[TileCost], schedule| costs.iter().copied().find(|cost| cost.schedule == schedule);
        let (few, many) = (counts_of(self.small), counts_of(self.large));
        if few.is_empty() || many.is_empty() || few.iter().chain(&many).sum::<usize>() > MAX_ROWS_AT_ONCE {
            return None;
        }
        let small = Part { cost: cost_of(&SMALL, self.small)?, counts: &few };
        let large = Part { cost: cost_of(&WGMMA, self.large)?, counts: &many };
        abreast::multiprocessors_of_large(gemm, small, large, num_multiprocessors)
    }
}

/// Rows of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertRows {
    /// In this batch, whose tiles they fill.
    pub here: usize,
    /// In all batches whose bits are to be those of one: the order over K follows from them.
    pub in_all: usize,
}

impl ExpertRows {
    /// Of a batch that stands for itself.
    #[must_use]
    pub fn alone(num_rows: usize) -> Self {
        Self { here: num_rows, in_all: num_rows }
    }
}

/// The schedule that takes least for all counts together; of equals the first.
fn fastest(costs: &[TileCost], counts: impl Iterator<Item = usize> + Clone) -> Option<Schedule> {
    costs.iter().min_by_key(|cost| cost.takes_ns(counts.clone())).map(|cost| cost.schedule)
}

impl Chooser {
    /// The schedules for a batch of experts with so many rows each.
    #[must_use]
    pub fn batch(self, gemm: &GroupedGemm, counts: &[usize]) -> BatchSchedules {
        self.batch_of_many(gemm, &counts.iter().copied().map(ExpertRows::alone).collect::<Vec<_>>())
    }

    /// The same for one batch of several that have the bits of one; [`BatchSchedules::of`] then takes an expert's rows in all.
    #[must_use]
    pub fn batch_of_many(self, gemm: &GroupedGemm, rows: &[ExpertRows]) -> BatchSchedules {
        let Candidates { max_small_rows, small, large, .. } = self.candidates(gemm);
        let counts = |is_small: bool| {
            let is_wanted = move |rows: &&ExpertRows| (rows.in_all <= max_small_rows as usize) == is_small;
            rows.iter().filter(is_wanted).map(|rows| rows.here)
        };
        let large = fastest(&large, counts(false));
        let large = large.unwrap_or_else(|| unreachable!("every family has schedules for any number of rows"));
        let small = fastest(&small, counts(true)).unwrap_or(large);
        BatchSchedules { small, max_small_rows, large }
    }

    /// What [`Chooser::batch`] chooses from.
    ///
    /// The small schedules stream the weights of few rows faster, and add K in slices; experts whose rows do not fit one of
    /// their tiles would be read twice.
    #[must_use]
    pub fn candidates(self, gemm: &GroupedGemm) -> Candidates {
        let weights = gemm.weights;
        if self.family == Family::MmaSync {
            return Candidates { weights, max_small_rows: 0, small: Vec::new(), large: MMA_SYNC.to_vec() };
        }
        let mut small = SMALL.to_vec();
        small.retain(|cost| !self.batch_invariant && cost.schedule.serves(gemm));
        let max_small_rows = small.last().map_or(0, |cost| cost.schedule.block_rows());
        let mut large = WGMMA.to_vec();
        large.retain(|cost| cost.schedule.block_rows() > max_small_rows);
        for cost in &mut large {
            cost.weight_blocks = gemm.fc1_weight_rows().div_ceil(cost.schedule.weight_rows());
        }
        Candidates { weights, max_small_rows, small, large }
    }

    /// Every schedule that [`Chooser::batch`] may give.
    #[must_use]
    pub fn all(self, gemm: &GroupedGemm) -> Vec<Schedule> {
        let Candidates { small, large, .. } = self.candidates(gemm);
        small.into_iter().chain(large).map(|cost| cost.schedule).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::grouped_gemm::Weights;
    use super::*;
    use crate::numerics::activation::Activation;

    const GEMM: GroupedGemm = GroupedGemm {
        hidden: 3584,
        intermediate: 3072,
        activation: Activation::Swiglu,
        weights: Weights::Nvfp4,
        quantise: false,
    };

    fn one(chooser: Chooser, gemm: &GroupedGemm, num_rows: usize) -> Schedule {
        chooser.batch(gemm, &[num_rows]).of(num_rows)
    }

    #[test]
    fn every_batch_gets_schedules_that_were_compiled() {
        for family in [Family::MmaSync, Family::Wgmma] {
            for batch_invariant in [false, true] {
                let chooser = Chooser { family, batch_invariant };
                for weights in [Weights::Nvfp4, Weights::Bf16] {
                    for quantise in [false, true] {
                        let gemm = GroupedGemm { weights, quantise, ..GEMM };
                        let all = chooser.all(&gemm);
                        for num_rows in (1..600).chain([300_000]) {
                            for schedule in [one(chooser, &gemm, num_rows), chooser.batch(&gemm, &[3, num_rows]).of(3)]
                            {
                                assert!(all.contains(&schedule) && schedule.serves(&gemm), "{num_rows}: {schedule}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_order_over_k_follows_from_an_experts_own_rows() {
        let free = Chooser { family: Family::Wgmma, batch_invariant: false };
        for others in [&[][..], &[1; 50], &[16; 3], &[1000], &[17, 3, 300_000]] {
            for num_rows in 1..100 {
                let counts: Vec<usize> = others.iter().copied().chain([num_rows]).collect();
                assert_eq!(
                    free.batch(&GEMM, &counts).of(num_rows).is_small(),
                    num_rows <= 16,
                    "{num_rows} and {others:?}"
                );
            }
        }
        for num_rows in 1..300 {
            let of = |family| one(Chooser { family, batch_invariant: true }, &GEMM, num_rows);
            assert!(matches!(of(Family::Wgmma), Schedule::Wgmma { .. }));
            assert!(matches!(of(Family::MmaSync), Schedule::MmaSync { .. }));
        }
    }

    /// Parts of a step have the order of the whole, and tiles for their own rows.
    #[test]
    fn the_order_of_a_part_is_that_of_the_whole() {
        let free = Chooser { family: Family::Wgmma, batch_invariant: false };
        for in_all in [1, 16, 17, 40, 300] {
            for here in [0, 1, 8, 16, 17, 40, 300].into_iter().filter(|here| *here <= in_all) {
                let rows = [ExpertRows { here, in_all }, ExpertRows { here: 3, in_all: 3000 }];
                let part = free.batch_of_many(&GEMM, &rows).of(in_all);
                assert_eq!(part.is_small(), one(free, &GEMM, in_all).is_small(), "{here} of {in_all}");
                assert!(part.serves(&GEMM));
            }
        }
        let rows = [ExpertRows { here: 20, in_all: 300 }; 50];
        assert_eq!(free.batch_of_many(&GEMM, &rows).of(300), Schedule::Wgmma { block_rows: 64 }, "the tile of 20 rows");
    }

    #[test]
    fn a_batch_takes_the_tile_that_is_fastest_for_all() {
        let free = Chooser { family: Family::Wgmma, batch_invariant: false };
        let rows = |num_rows| one(free, &GEMM, num_rows);
        let small = |block_rows| Schedule::Small { block_rows };
        assert_eq!([8, 16].map(rows), [8, 16].map(small));
        let wgmma = |block_rows| Schedule::Wgmma { block_rows };
        let even = |num_rows: usize| free.batch(&GEMM, &[num_rows; 50]).of(num_rows);
        assert_eq!([17, 64, 100, 128, 160].map(even), [64, 64, 128, 128, 256].map(wgmma));
        assert_ne!(free.batch(&GEMM, &[40, 40, 40, 8000]).of(40), wgmma(64), "one hot expert has most tiles");
        assert_eq!(rows(128), wgmma(256), "of one expert's few tiles the lower ones are sooner over");
        let wide = GroupedGemm { hidden: 7168, ..GEMM };
        assert_eq!(one(free, &wide, 8), small(8));
        assert_eq!(one(free, &wide, 16), wgmma(64), "registers do not hold 16 such rows");
    }
}
