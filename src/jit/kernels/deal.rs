//! Which kernel computes which experts, where the device alone knows their rows: what the host's choice
//! ([`Chooser::batch`](super::Chooser::batch)) is, as plain data that `kernels/deal.cu` follows, and the same on the host, which
//! is its oracle.
//!
//! All kernels that may run are queued before anybody knows; a list of experts is made for each, and one whose list is empty ends
//! at once. Of two that have rows both may run at once, as the host's may (`abreast.rs`): what each list's launch does is
//! found with it ([`Dealt`]). How few may run follows from the most rows that an expert may have, hence from declared sizes alone. Which of
//! them runs changes no bits: tiles of one order have equal ones, and the order follows from an expert's own rows.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::KernelRequest;
use super::super::source::{ABREAST, BASE, EXPERT, KernelSource};
use super::abreast::{self, MAX_ROWS_AT_ONCE, Part};
use super::cost::TileCost;
use super::grouped_gemm::{GroupedGemm, Weights};
use crate::cuda::LaunchShape;

const SOURCE: KernelSource =
    KernelSource { name: "deal", main: include_str!("../../../kernels/deal.cu"), headers: &[ABREAST, BASE, EXPERT] };

/// The most kernels that may run: `kMaxPrograms` of `kernels/deal.cu`.
pub const MAX_PROGRAMS: usize = 16;

/// Formats of weights: `kFormats` there.
const NUM_FORMATS: usize = 2;

/// A kernel that may run, with its [`TileCost`]; see the struct of that name in `kernels/deal.cu`.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct Program {
    pub of_class: u32,
    pub block_rows: u32,
    pub width_bits: u32,
    pub weight_blocks: u32,
    pub fc2_blocks: u32,
    pub tile_ns: u32,
    pub rows_ns: u32,
    pub launch_ns: u32,
}

/// What the device deals to a launch; see the struct of that name in `kernels/expert.cuh`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct Dealt {
    pub num_blocks: u32,
    pub lets_next: u32,
}

/// What divisions of the machine follow from; see the struct of that name in `kernels/abreast.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct Sizes {
    pub expert_bytes: u64,
    pub hidden: u32,
    pub intermediate: u32,
    pub num_multiprocessors: u32,
    pub unused: u32,
}

impl Sizes {
    /// Of experts in NVFP4, which alone are computed by two launches at once.
    #[must_use]
    pub fn new(gemm: &GroupedGemm, num_multiprocessors: u32) -> Self {
        let nvfp4 = GroupedGemm { weights: Weights::Nvfp4, ..*gemm };
        let GroupedGemm { hidden, intermediate, .. } = *gemm;
        Self { expert_bytes: nvfp4.expert_bytes(), hidden, intermediate, num_multiprocessors, unused: 0 }
    }
}

/// The kernel's one argument; see the struct of that name in `kernels/deal.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct DealArgs {
    pub programs: [Program; MAX_PROGRAMS],
    pub expert_offsets: u64,
    pub experts: u64,
    pub formats: u64,
    pub dealt: u64,
    pub launches: u64,
    pub sizes: Sizes,
    pub num_programs: u32,
    pub num_experts: u32,
    pub max_small_rows: [u32; NUM_FORMATS],
    pub may_overlap: u32,
    pub unused: u32,
}

/// The kernel, which all layers share.
#[derive(Debug, Clone, Copy)]
pub struct DealKernel;

impl DealKernel {
    /// Its name in its module.
    pub const FUNCTION: &'static str = "deal_experts";
    /// How it is launched.
    pub const SHAPE: LaunchShape = LaunchShape::rows(1, 1024);

    /// What to compile.
    #[must_use]
    pub fn request(self, arch: Arch) -> KernelRequest {
        KernelRequest::new(SOURCE, arch).with_arguments::<DealArgs>()
    }
}

/// The number by which the kernel knows a format.
#[must_use]
pub const fn format_of(weights: Weights) -> u32 {
    match weights {
        Weights::Nvfp4 => 0,
        Weights::Bf16 => 1,
    }
}

/// The schedules that may compute the experts of one format, in the order of their tiles.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidates {
    /// The format.
    pub weights: Weights,
    /// The most rows of an expert that are few.
    pub max_small_rows: u32,
    /// For few rows.
    pub small: Vec<TileCost>,
    /// For more; never empty.
    pub large: Vec<TileCost>,
}

impl Candidates {
    /// Those that are worth while for up to `max_rows` rows an expert: a tile larger than another that holds all rows is not.
    /// What is left computes more rows too, which ids from outside that repeat an expert may bring.
    #[must_use]
    pub fn up_to(mut self, max_rows: usize) -> Self {
        for tiles in [&mut self.small, &mut self.large] {
            let rows_of_tiles = tiles.iter().map(|cost| cost.schedule.block_rows());
            let enough = rows_of_tiles.filter(|block_rows| *block_rows as usize >= max_rows).min();
            tiles.retain(|cost| enough.is_none_or(|enough| cost.schedule.block_rows() <= enough));
        }
        self
    }
}

/// A schedule that may run for experts of one format and of one class: twice the format's number, and 1 more for many rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MayRun {
    /// The format.
    pub weights: Weights,
    /// The class.
    pub of_class: u32,
    /// The schedule, and what it takes.
    pub cost: TileCost,
}

/// All that may run for a group of experts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DealTable {
    /// What may run; at most [`MAX_PROGRAMS`].
    pub programs: Vec<MayRun>,
    /// The most rows that are few, by format.
    pub max_small_rows: [u32; NUM_FORMATS],
}

impl DealTable {
    /// Of these formats.
    ///
    /// # Panics
    /// If there are more than [`MAX_PROGRAMS`], which no family has.
    #[must_use]
    pub fn new(formats: &[Candidates]) -> Self {
        let mut table = Self::default();
        for Candidates { weights, max_small_rows, small, large } in formats {
            let (weights, format) = (*weights, format_of(*weights));
            table.max_small_rows[format as usize] = *max_small_rows;
            for (of_class, costs) in [(2 * format, small), (2 * format + 1, large)] {
                table.programs.extend(costs.iter().map(|&cost| MayRun { weights, of_class, cost }));
            }
        }
        assert!(table.programs.len() <= MAX_PROGRAMS, "{} programs", table.programs.len());
        table
    }

    /// The kernel's argument without addresses, for so many experts.
    #[must_use]
    pub fn args(&self, sizes: Sizes, num_experts: u32, may_overlap: bool) -> DealArgs {
        DealArgs {
            programs: self.of_kernel(sizes.hidden),
            sizes,
            num_programs: u32::try_from(self.programs.len()).unwrap_or(u32::MAX),
            num_experts,
            max_small_rows: self.max_small_rows,
            may_overlap: u32::from(may_overlap),
            ..DealArgs::zeroed()
        }
    }

    /// As the kernel has them, for experts of a width.
    fn of_kernel(&self, hidden: u32) -> [Program; MAX_PROGRAMS] {
        let mut programs = [Program::default(); MAX_PROGRAMS];
        for (program, MayRun { of_class, cost, .. }) in programs.iter_mut().zip(&self.programs) {
            let TileCost { schedule, weight_blocks, tile_ns, rows_ns, launch_ns } = *cost;
            let (block_rows, width_bits) = (schedule.block_rows(), schedule.width_bits());
            let fc2_blocks = if weight_blocks > 0 { hidden.div_ceil(schedule.weight_rows()) } else { 0 };
            let of_class = *of_class;
            *program =
                Program { of_class, block_rows, width_bits, weight_blocks, fc2_blocks, tile_ns, rows_ns, launch_ns };
        }
        programs
    }

    /// Which of the programs computes each expert, of formats and rows as they are; none of an expert without rows.
    #[must_use]
    pub fn deal(&self, experts: impl Iterator<Item = (Weights, usize)>) -> Vec<Option<usize>> {
        let of_class: Vec<Option<(u32, usize)>> = experts
            .map(|(weights, num_rows)| {
                let format = format_of(weights);
                let is_large = num_rows > self.max_small_rows[format as usize] as usize;
                (num_rows > 0).then_some((2 * format + u32::from(is_large), num_rows))
            })
            .collect();
        let takes = |program: &MayRun| {
            let of_program = of_class.iter().flatten().filter(|(class, _)| *class == program.of_class);
            program.cost.takes_ns(of_program.map(|(_, rows)| *rows))
        };
        let takes: Vec<u64> = self.programs.iter().map(takes).collect();
        let chosen = |class: u32| {
            let of_class = (0..self.programs.len()).filter(|&at| self.programs[at].of_class == class);
            of_class.min_by_key(|&at| takes[at])
        };
        of_class.iter().map(|share| share.and_then(|(class, _)| chosen(class))).collect()
    }

    /// What each program's launch does, of experts that are dealt out so. Where launches may overlap, two that have rows run at once
    /// where the host would let them ([`BatchSchedules`](super::BatchSchedules)), and none waits for one that has nothing to do.
    #[must_use]
    pub fn launches(
        &self,
        experts: impl Iterator<Item = (Weights, usize)> + Clone,
        (gemm, num_multiprocessors): (&GroupedGemm, u32),
        may_overlap: bool,
    ) -> Vec<Dealt> {
        let mut counts = vec![Vec::new(); self.programs.len()];
        for (program, (_, num_rows)) in self.deal(experts.clone()).into_iter().zip(experts) {
            if let Some(program) = program {
                counts[program].push(num_rows);
            }
        }
        let with_rows: Vec<usize> = (0..counts.len()).filter(|&at| !counts[at].is_empty()).collect();
        let part = |at: usize| Part { cost: self.programs[at].cost, counts: &counts[at] };
        let of_large = match with_rows[..] {
            [small, large] if may_overlap && [small, large].map(|at| self.programs[at].of_class) == [0, 1] => {
                let num_rows: usize = [small, large].iter().flat_map(|at| &counts[*at]).sum();
                let divided = || abreast::multiprocessors_of_large(gemm, part(small), part(large), num_multiprocessors);
                if num_rows <= MAX_ROWS_AT_ONCE { divided() } else { None }
            }
            _ => None,
        };
        let lets_next = u32::from(may_overlap && (of_large.is_some() || with_rows.len() <= 1));
        let num_blocks = |at: usize| match of_large {
            _ if counts[at].is_empty() => 0,
            None => num_multiprocessors,
            Some(of_large) if self.programs[at].of_class == 1 => of_large,
            Some(of_large) => num_multiprocessors - of_large,
        };
        (0..counts.len()).map(|at| Dealt { num_blocks: num_blocks(at), lets_next }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::grouped_gemm::GroupedGemm;
    use super::super::{Chooser, ExpertRows, Family};
    use super::*;
    use crate::numerics::activation::Activation;
    use proptest::prelude::*;

    fn gemm(weights: Weights, hidden: u32) -> GroupedGemm {
        let activation = Activation::Swiglu;
        GroupedGemm { hidden, intermediate: 3072, activation, weights, quantise: false }
    }

    fn chooser() -> impl Strategy<Value = Chooser> {
        let family = prop_oneof![Just(Family::MmaSync), Just(Family::Wgmma)];
        (family, any::<bool>()).prop_map(|(family, batch_invariant)| Chooser { family, batch_invariant })
    }

    /// Rows of experts as routers leave them: many without any, most with few, some with very many.
    fn rows() -> impl Strategy<Value = usize> {
        prop_oneof![Just(0), 1usize..20, 20usize..300, 300usize..40_000]
    }

    proptest! {
        /// Lists are the host's: each expert with the schedule that a batch of known counts gives it.
        #[test]
        fn every_expert_is_dealt_to_the_schedule_that_the_host_chooses(
            chooser in chooser(),
            hidden in prop_oneof![Just(3584u32), Just(7168)],
            experts in prop::collection::vec((any::<bool>(), rows()), 1..60),
        ) {
            let weights = |is_bf16| if is_bf16 { Weights::Bf16 } else { Weights::Nvfp4 };
            let experts: Vec<_> = experts.into_iter().map(|(is_bf16, rows)| (weights(is_bf16), rows)).collect();
            let formats = [Weights::Nvfp4, Weights::Bf16].map(|weights| chooser.candidates(&gemm(weights, hidden)));
            let table = DealTable::new(&formats);
            let dealt = table.deal(experts.iter().copied());
            for ((weights, num_rows), program) in experts.iter().zip(&dealt) {
                let of_format = experts.iter().filter(|(known, _)| known == weights).map(|(_, rows)| *rows);
                let batch = chooser.batch(&gemm(*weights, hidden), &of_format.collect::<Vec<_>>());
                let wanted = (*num_rows > 0).then(|| (*weights, batch.of(*num_rows)));
                prop_assert_eq!(program.map(|at| (table.programs[at].weights, table.programs[at].cost.schedule)), wanted);
            }
        }

        /// Launches share the machine as the host's would; those without rows have no blocks, and hold nobody up where only one
        /// has rows.
        #[test]
        fn launches_run_at_once_where_the_host_would_let_them(
            chooser in chooser(),
            (hidden, num_multiprocessors) in (prop_oneof![Just(3584u32), Just(4096), Just(7168)], 1u32..200),
            rows in prop::collection::vec(prop_oneof![Just(0), 1usize..20, 20usize..600], 1..60),
            may_overlap in any::<bool>(),
        ) {
            let gemm = gemm(Weights::Nvfp4, hidden);
            let table = DealTable::new(&[chooser.candidates(&gemm)]);
            let experts = rows.iter().map(|rows| (Weights::Nvfp4, *rows));
            let dealt = table.deal(experts.clone());
            let launches = table.launches(experts, (&gemm, num_multiprocessors), may_overlap);
            let of_rows: Vec<ExpertRows> = rows.iter().copied().map(ExpertRows::alone).collect();
            let batch = chooser.batch(&gemm, &rows);
            let of_large = batch.multiprocessors_of_large(&gemm, &of_rows, num_multiprocessors).filter(|_| may_overlap);
            let with_rows: std::collections::BTreeSet<usize> = dealt.into_iter().flatten().collect();
            for (at, Dealt { num_blocks, lets_next }) in launches.into_iter().enumerate() {
                let is_large = table.programs[at].of_class == 1;
                let wanted = match of_large {
                    _ if !with_rows.contains(&at) => 0,
                    None => num_multiprocessors,
                    Some(of_large) => if is_large { of_large } else { num_multiprocessors - of_large },
                };
                prop_assert_eq!(num_blocks, wanted);
                prop_assert_eq!(lets_next == 1, may_overlap && (of_large.is_some() || with_rows.len() < 2));
            }
        }

        /// With fewer candidates all are still served, in the same order over K: bits stay.
        #[test]
        fn a_declared_capacity_leaves_fewer_kernels_and_no_other_order(
            chooser in chooser(),
            max_rows in 1usize..2000,
            rows in prop::collection::vec(rows(), 1..40),
        ) {
            let gemm = gemm(Weights::Nvfp4, 3584);
            let all = chooser.candidates(&gemm);
            let table = DealTable::new(&[all.clone().up_to(max_rows)]);
            let whole = DealTable::new(&[all]);
            prop_assert!(!table.programs.is_empty() && table.programs.len() <= whole.programs.len());
            let rows: Vec<usize> = rows.into_iter().map(|rows| rows % (max_rows + 1)).collect();
            let experts = || rows.iter().map(|rows| (Weights::Nvfp4, *rows));
            for ((a, b), rows) in table.deal(experts()).into_iter().zip(whole.deal(experts())).zip(&rows) {
                prop_assert_eq!(a.is_some(), *rows > 0);
                let is_small = |table: &DealTable, at: usize| table.programs[at].cost.schedule.is_small();
                prop_assert_eq!(a.map(|at| is_small(&table, at)), b.map(|at| is_small(&whole, at)));
            }
        }
    }

    #[test]
    fn few_rows_leave_few_kernels() {
        let chooser = Chooser { family: Family::Wgmma, batch_invariant: false };
        let num = |max_rows| DealTable::new(&[chooser.candidates(&gemm(Weights::Nvfp4, 3584)).up_to(max_rows)]);
        assert_eq!([1, 8, 16, 32, 64, 128, 8192].map(|rows| num(rows).programs.len()), [2, 2, 4, 4, 4, 5, 6]);
    }
}
