//! Which schedule computes an expert's rows: a pure choice from facts that all ranks share.
//!
//! Schedules that add K in one order have equal bits, whatever the rows of a tile. Which order serves an expert follows from
//! its own number of rows, which is the world's, since an expert lives on one rank: how experts or tokens are split changes
//! nothing. Where bits may depend on nothing but token and expert, one order serves all row counts. Among the tiles of an
//! order a batch takes the one that is fastest for all of its experts together: one launch an order, and no launch waits for
//! another one's last tiles.

use super::deal::Candidates;
use super::grouped_gemm::{GroupedGemm, Schedule, Weights};

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

/// Schedules of one order over K with what a tile of theirs takes, in any unit: measured on one H200 with Kimi K3's experts
/// (docs/measurements/2026-11-30-h200-kernels-2.md).
type Tiles = &'static [(u32, f64)];

const MMA_SYNC: Tiles = &[(8, 296.0), (16, 348.0), (32, 484.0), (64, 792.0)];
const SMALL: Tiles = &[(8, 250.0), (16, 310.0)];
const WGMMA: Tiles = &[(16, 340.0), (32, 380.0), (64, 500.0), (128, 780.0), (256, 1400.0)];

/// The schedules of a batch: one an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSchedules {
    /// Of experts with up to `max_small_rows`.
    small: Schedule,
    max_small_rows: usize,
    large: Schedule,
}

impl BatchSchedules {
    /// The schedule for an expert of `num_rows` rows.
    #[must_use]
    pub fn of(&self, num_rows: usize) -> Schedule {
        if num_rows <= self.max_small_rows { self.small } else { self.large }
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

/// The tile that takes least for all counts together; of equals the smallest.
fn fastest(tiles: &[(u32, f64)], counts: impl Iterator<Item = usize> + Clone) -> u32 {
    let took = |&(rows, per_tile): &(u32, f64)| {
        let num_tiles: usize = counts.clone().map(|count| count.div_ceil(rows as usize)).sum();
        (rows, num_tiles as f64 * per_tile)
    };
    tiles.iter().map(took).min_by(|a, b| a.1.total_cmp(&b.1)).map_or(64, |(rows, _)| rows)
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
        let max_small_rows = if self.family == Family::MmaSync { 0 } else { self.max_small_rows(gemm) };
        let counts = |is_small: bool| {
            rows.iter().filter(move |rows| (rows.in_all <= max_small_rows) == is_small).map(|rows| rows.here)
        };
        if self.family == Family::MmaSync {
            let large = Schedule::MmaSync { block_rows: fastest(MMA_SYNC, counts(false)) };
            return BatchSchedules { small: large, max_small_rows, large };
        }
        BatchSchedules {
            small: small(fastest(&self.small(gemm), counts(true))),
            max_small_rows,
            large: Schedule::Wgmma { block_rows: fastest(&self.wgmma(gemm), counts(false)) },
        }
    }

    /// The small schedules to choose from. They stream the weights of few rows faster, and add K in slices.
    fn small(self, gemm: &GroupedGemm) -> Vec<(u32, f64)> {
        let exists = |rows: u32| !self.batch_invariant && gemm.weights == Weights::Nvfp4 && small(rows).serves(gemm);
        SMALL.iter().copied().filter(|(rows, _)| exists(*rows)).collect()
    }

    /// Rows that fit one tile of a small schedule: two would read weights twice.
    fn max_small_rows(self, gemm: &GroupedGemm) -> usize {
        self.small(gemm).last().map_or(0, |(rows, _)| *rows as usize)
    }

    /// The wgmma schedules to choose from.
    fn wgmma(self, gemm: &GroupedGemm) -> Vec<(u32, f64)> {
        let max_small_rows = self.max_small_rows(gemm);
        WGMMA.iter().copied().filter(|(rows, _)| *rows as usize > max_small_rows).collect()
    }

    /// What [`Chooser::batch`] chooses from, where the device chooses.
    #[must_use]
    pub fn candidates(self, gemm: &GroupedGemm) -> Candidates {
        let weights = gemm.weights;
        if self.family == Family::MmaSync {
            let large = MMA_SYNC.iter().map(|&(block_rows, took)| (Schedule::MmaSync { block_rows }, took)).collect();
            return Candidates { weights, max_small_rows: 0, small: Vec::new(), large };
        }
        let max_small_rows = u32::try_from(self.max_small_rows(gemm)).unwrap_or(u32::MAX);
        let smalls = self.small(gemm).into_iter().map(|(rows, took)| (small(rows), took));
        let larges = self.wgmma(gemm).into_iter().map(|(block_rows, took)| (Schedule::Wgmma { block_rows }, took));
        Candidates { weights, max_small_rows, small: smalls.collect(), large: larges.collect() }
    }

    /// Every schedule that [`Chooser::batch`] may give.
    #[must_use]
    pub fn all(self, gemm: &GroupedGemm) -> Vec<Schedule> {
        if self.family == Family::MmaSync {
            return MMA_SYNC.iter().map(|&(block_rows, _)| Schedule::MmaSync { block_rows }).collect();
        }
        let smalls = self.small(gemm).into_iter().map(|(rows, _)| small(rows));
        smalls.chain(self.wgmma(gemm).into_iter().map(|(block_rows, _)| Schedule::Wgmma { block_rows })).collect()
    }
}

const fn small(block_rows: u32) -> Schedule {
    Schedule::Small { block_rows }
}

#[cfg(test)]
mod tests {
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
        let is_small = |schedule| matches!(schedule, Schedule::Small { .. });
        for others in [&[][..], &[1; 50], &[16; 3], &[1000], &[17, 3, 300_000]] {
            for num_rows in 1..100 {
                let counts: Vec<usize> = others.iter().copied().chain([num_rows]).collect();
                assert_eq!(
                    is_small(free.batch(&GEMM, &counts).of(num_rows)),
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
                let is_small = |schedule| matches!(schedule, Schedule::Small { .. });
                assert_eq!(is_small(part), is_small(one(free, &GEMM, in_all)), "{here} of {in_all}");
                assert!(part.serves(&GEMM));
            }
        }
        let rows = [ExpertRows { here: 20, in_all: 300 }];
        assert_eq!(free.batch_of_many(&GEMM, &rows).of(300), Schedule::Wgmma { block_rows: 32 }, "the tile of 20 rows");
    }

    #[test]
    fn a_batch_takes_the_tile_that_is_fastest_for_all() {
        let free = Chooser { family: Family::Wgmma, batch_invariant: false };
        let rows = |num_rows| one(free, &GEMM, num_rows);
        assert_eq!([8, 16].map(rows), [8, 16].map(small));
        let wgmma = |block_rows| Schedule::Wgmma { block_rows };
        assert_eq!([17, 64, 128, 256, 1024].map(rows), [32, 64, 128, 256, 256].map(wgmma));
        assert_eq!(free.batch(&GEMM, &[60; 50]).of(60), wgmma(64));
        assert_eq!(free.batch(&GEMM, &[40, 40, 40, 8000]).of(40), wgmma(256), "one hot expert has most tiles");
        let wide = GroupedGemm { hidden: 7168, ..GEMM };
        assert_eq!(one(free, &wide, 8), small(8));
        assert_eq!(one(free, &wide, 16), wgmma(16), "registers do not hold 16 such rows");
    }
}
