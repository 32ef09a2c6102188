//! Which schedule computes an expert's rows: a pure choice from facts that all ranks share.
//!
//! An expert lives on one rank, so its number of rows is the world's: the choice does not depend on how experts or tokens
//! are split. Where bits may depend on nothing but token and expert, one schedule serves all row counts.

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

impl Chooser {
    /// The schedule for an expert of `num_rows` rows, at least 1.
    #[must_use]
    pub fn schedule(self, gemm: &GroupedGemm, num_rows: usize) -> Schedule {
        let fitting = |sizes: &[u32]| {
            let fits = |size: &&u32| num_rows <= **size as usize;
            *sizes.iter().find(fits).or(sizes.last()).unwrap_or(&64)
        };
        if self.family == Family::MmaSync {
            return Schedule::MmaSync { block_rows: fitting(&[8, 16, 32, 64]) };
        }
        // Rows that fit one block of 8 or 16 stream weights faster through the small schedule, which adds K in slices.
        let small = Schedule::Small { block_rows: fitting(&[8, 16]) };
        if num_rows <= 16 && !self.batch_invariant && small.serves(gemm) && gemm.weights == Weights::Nvfp4 {
            return small;
        }
        Schedule::Wgmma { block_rows: fitting(&[16, 32, 64, 128, 256]) }
    }

    /// Every schedule that [`Chooser::schedule`] may give.
    #[must_use]
    pub fn all(self, gemm: &GroupedGemm) -> Vec<Schedule> {
        let mut all: Vec<Schedule> = [1, 9, 17, 33, 65, 129].map(|num_rows| self.schedule(gemm, num_rows)).to_vec();
        all.dedup();
        all
    }
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

    #[test]
    fn every_row_count_gets_a_schedule_that_was_compiled() {
        for family in [Family::MmaSync, Family::Wgmma] {
            for batch_invariant in [false, true] {
                let chooser = Chooser { family, batch_invariant };
                for weights in [Weights::Nvfp4, Weights::Bf16] {
                    let gemm = GroupedGemm { weights, ..GEMM };
                    let all = chooser.all(&gemm);
                    for num_rows in (1..600).chain([300_000]) {
                        let schedule = chooser.schedule(&gemm, num_rows);
                        assert!(all.contains(&schedule) && schedule.serves(&gemm), "{num_rows} rows: {schedule:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn one_order_over_k_where_it_is_asked_for() {
        let of = |family, num_rows| Chooser { family, batch_invariant: true }.schedule(&GEMM, num_rows);
        for num_rows in 1..300 {
            assert!(matches!(of(Family::Wgmma, num_rows), Schedule::Wgmma { .. }));
            assert!(matches!(of(Family::MmaSync, num_rows), Schedule::MmaSync { .. }));
        }
        let free = Chooser { family: Family::Wgmma, batch_invariant: false };
        assert_eq!(free.schedule(&GEMM, 8), Schedule::Small { block_rows: 8 });
        assert_eq!(free.schedule(&GEMM, 17), Schedule::Wgmma { block_rows: 32 });
        let wide = GroupedGemm { hidden: 7168, ..GEMM };
        assert_eq!(free.schedule(&wide, 16), Schedule::Wgmma { block_rows: 16 }, "registers do not hold 16 such rows");
    }
}
