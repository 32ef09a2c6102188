//! Which schedule computes an expert's rows: a pure choice from facts that all ranks share.
//!
//! Schedules that add K in one order have equal bits, whatever the rows of a tile. Which order serves an expert follows from
//! its own number of rows, which is the world's, since an expert lives on one rank: how experts or tokens are split changes
//! nothing. Where bits may depend on nothing but token and expert, one order serves all row counts. Among the tiles of an
//! order a batch takes the one that is fastest for all of its experts together: one launch an order, and no launch waits for
//! another one's last tiles. Tiles of fewer rows than a schedule's take less where it is a ragged one.

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

/// What a schedule's tiles take, a tile being a block of weights times a block of an expert's rows: measured on one H200 with
/// Kimi K3's experts (docs/measurements/2026-12-01-h200-kernels-4.md). Integers, so that whoever adds them up gets the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileCost {
    /// The schedule.
    pub schedule: Schedule,
    /// Blocks of an expert's weights that go to multiprocessors one by one; 0 where they are cut into even shares.
    pub weight_blocks: u32,
    /// Of a tile, whatever its rows.
    pub tile_ns: u32,
    /// Of every 16 rows that it is computed as.
    pub rows_ns: u32,
}

/// Multiprocessors of the machine that costs were measured on: a choice is not to depend on the machine that makes it.
const NUM_MULTIPROCESSORS: u64 = 132;

const fn mma_sync(block_rows: u32, tile_ns: u32) -> TileCost {
    TileCost { schedule: Schedule::MmaSync { block_rows }, weight_blocks: 0, tile_ns, rows_ns: 0 }
}

const fn small(block_rows: u32, tile_ns: u32) -> TileCost {
    TileCost { schedule: Schedule::Small { block_rows }, weight_blocks: 0, tile_ns, rows_ns: 0 }
}

const fn wgmma(block_rows: u32, ragged: bool, [tile_ns, rows_ns]: [u32; 2]) -> TileCost {
    TileCost { schedule: Schedule::Wgmma { block_rows, ragged }, weight_blocks: 0, tile_ns, rows_ns }
}

const MMA_SYNC: [TileCost; 4] = [mma_sync(8, 296), mma_sync(16, 348), mma_sync(32, 484), mma_sync(64, 792)];
const SMALL: [TileCost; 2] = [small(8, 250), small(16, 300)];
/// Of FC1: FC2's are in proportion.
const WGMMA: [TileCost; 8] = [
    wgmma(16, false, [18_000, 3_500]),
    wgmma(32, false, [18_000, 3_500]),
    wgmma(64, false, [18_000, 3_500]),
    wgmma(64, true, [18_500, 3_550]),
    wgmma(128, false, [18_000, 3_550]),
    wgmma(128, true, [18_200, 3_550]),
    wgmma(256, false, [10_000, 2_160]),
    wgmma(256, true, [10_200, 2_160]),
];

impl TileCost {
    /// What all blocks of rows take together, and the longest tile: nothing is over before it is.
    #[must_use]
    pub fn takes_ns(&self, counts: impl Iterator<Item = usize>) -> u64 {
        let block_rows = u64::from(self.schedule.block_rows());
        let widths = self.schedule.widths();
        let (mut num_blocks, mut num_rows, mut widest) = (0, 0, 0);
        for count in counts {
            let (full, rest) = (count as u64 / block_rows, count as u64 % block_rows);
            let width = widths.iter().map(|width| u64::from(*width)).find(|width| rest <= *width).unwrap_or(block_rows);
            let rest_width = if rest == 0 { 0 } else { width };
            num_blocks += full + u64::from(rest > 0);
            num_rows += full * block_rows + rest_width;
            widest = widest.max(if full > 0 { block_rows } else { rest_width });
        }
        let [tile_ns, rows_ns] = [self.tile_ns, self.rows_ns].map(u64::from);
        let all = num_blocks * tile_ns + num_rows / 16 * rows_ns;
        if self.weight_blocks == 0 || num_blocks == 0 {
            return all;
        }
        let longest = tile_ns + widest / 16 * rows_ns;
        longest.max(all * u64::from(self.weight_blocks) / NUM_MULTIPROCESSORS + longest / 2)
    }
}

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

/// The schedule that takes least for all counts together; of equals the first.
fn fastest(costs: &[TileCost], counts: impl Iterator<Item = usize> + Clone) -> Option<Schedule> {
    costs.iter().min_by_key(|cost| cost.takes_ns(counts.clone())).map(|cost| cost.schedule)
}

impl Chooser {
    /// The schedules for a batch of experts with so many rows each.
    #[must_use]
    pub fn batch(self, gemm: &GroupedGemm, counts: &[usize]) -> BatchSchedules {
        let counts = counts.iter().copied();
        let max_small_rows = self.max_small_rows(gemm);
        let is_small = |count: &usize| *count <= max_small_rows;
        let large = fastest(&self.large(gemm), counts.clone().filter(|count| !is_small(count)));
        let large = large.unwrap_or_else(|| unreachable!("every family has schedules for any number of rows"));
        let small = fastest(&self.small(gemm), counts.filter(is_small));
        BatchSchedules { small: small.unwrap_or(large), max_small_rows, large }
    }

    /// The small schedules to choose from. They stream the weights of few rows faster, and add K in slices.
    #[must_use]
    pub fn small(self, gemm: &GroupedGemm) -> Vec<TileCost> {
        let exists = |cost: &TileCost| cost.schedule.serves(gemm);
        let is_free = self.family == Family::Wgmma && !self.batch_invariant;
        if is_free { SMALL.into_iter().filter(exists).collect() } else { Vec::new() }
    }

    /// Rows that fit one tile of a small schedule: two would read weights twice.
    fn max_small_rows(self, gemm: &GroupedGemm) -> usize {
        self.small(gemm).last().map_or(0, |cost| cost.schedule.block_rows() as usize)
    }

    /// The schedules of any number of rows to choose from.
    #[must_use]
    pub fn large(self, gemm: &GroupedGemm) -> Vec<TileCost> {
        if self.family == Family::MmaSync {
            return MMA_SYNC.to_vec();
        }
        let max_small_rows = self.max_small_rows(gemm);
        let of_this = |cost: TileCost| {
            let weight_blocks = gemm.fc1_weight_rows().div_ceil(cost.schedule.weight_rows());
            TileCost { weight_blocks, ..cost }
        };
        let is_large = |cost: &TileCost| cost.schedule.block_rows() as usize > max_small_rows;
        WGMMA.into_iter().filter(is_large).map(of_this).collect()
    }

    /// Every schedule that [`Chooser::batch`] may give.
    #[must_use]
    pub fn all(self, gemm: &GroupedGemm) -> Vec<Schedule> {
        self.small(gemm).into_iter().chain(self.large(gemm)).map(|cost| cost.schedule).collect()
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
