//! Who compiles which kernel and who sends it to whom: pure, from what every rank has.

use crate::ids::Rank;

/// Where a kernel comes from, for the ranks that lack it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    /// This rank has it.
    Held {
        /// The lowest rank that has it.
        rank: Rank,
        /// Ranks that lack it.
        lacking: Vec<Rank>,
    },
    /// Nobody has it.
    Compiled {
        /// The rank that compiles it.
        rank: Rank,
        /// All others.
        lacking: Vec<Rank>,
    },
}

impl Source {
    pub(super) fn rank(&self) -> Rank {
        match self {
            Self::Held { rank, .. } | Self::Compiled { rank, .. } => *rank,
        }
    }

    pub(super) fn lacking(&self) -> &[Rank] {
        match self {
            Self::Held { lacking, .. } | Self::Compiled { lacking, .. } => lacking,
        }
    }
}

/// The sources of all kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    sources: Vec<Source>,
    /// `[rank]` kernels that it compiles at once.
    at_once: Vec<usize>,
}

impl Plan {
    /// From `[rank][kernel]`, who has what, and `[rank]`, how many kernels it can compile at once: 0 without a compiler. Kernels that nobody has are dealt to those
    /// with a compiler in turn, the lowest rank first; if there is none, rank 0 is to find out.
    pub(super) fn new(has: &[Vec<bool>], at_once: &[usize]) -> Self {
        let ranks = |of: &dyn Fn(usize) -> bool| -> Vec<Rank> {
            (0..has.len()).filter(|&rank| of(rank)).map(Rank::from_index).collect()
        };
        let mut compilers = ranks(&|rank| at_once[rank] > 0);
        if compilers.is_empty() {
            compilers.push(Rank(0));
        }
        let mut turns = compilers.iter().cycle();
        let num_kernels = has.first().map_or(0, Vec::len);
        let source = |kernel: usize| {
            let lacking = ranks(&|rank| !has[rank][kernel]);
            if let Some(&rank) = ranks(&|rank| has[rank][kernel]).first() {
                return Source::Held { rank, lacking };
            }
            let rank = turns.next().copied().unwrap_or(Rank(0));
            Source::Compiled { rank, lacking: lacking.into_iter().filter(|other| *other != rank).collect() }
        };
        Self { sources: (0..num_kernels).map(source).collect(), at_once: at_once.to_vec() }
    }

    /// Every kernel with its source.
    pub(super) fn sources(&self) -> impl Iterator<Item = (usize, &Source)> {
        self.sources.iter().enumerate()
    }

    /// Kernels that have to be compiled.
    pub(super) fn compiled(&self) -> impl Iterator<Item = usize> {
        self.sources().filter(|(_, source)| matches!(source, Source::Compiled { .. })).map(|(idx, _)| idx)
    }

    /// The round of every kernel that is compiled: each rank takes its own in their order, as many at once as it can.
    fn rounds(&self) -> Vec<(usize, Rank, usize)> {
        let mut taken = vec![0; self.at_once.len()];
        let round = |idx: usize| {
            let rank = self.sources[idx].rank();
            taken[rank.index()] += 1;
            ((taken[rank.index()] - 1) / self.at_once[rank.index()].max(1), rank, idx)
        };
        self.compiled().map(round).collect()
    }

    /// Until every rank has compiled what is its own.
    pub(super) fn num_rounds(&self) -> usize {
        self.rounds().into_iter().map(|(round, ..)| round + 1).max().unwrap_or(0)
    }

    /// Who compiles what in a round.
    pub(super) fn round(&self, round: usize) -> Vec<(Rank, usize)> {
        self.rounds().into_iter().filter(|(of, ..)| *of == round).map(|(_, rank, idx)| (rank, idx)).collect()
    }
}

/// Of `[rank]` texts with a line a kernel and on it the compilers of what the rank has, the newest compiler of which every
/// kernel is on some rank.
pub(super) fn newest_for_all(known: &[String], num_kernels: usize) -> Option<String> {
    let on_line = |rank: &str, kernel: usize| -> Vec<String> {
        let line = rank.split('\n').nth(kernel).unwrap_or_default();
        line.split('\t').filter(|id| !id.is_empty()).map(str::to_owned).collect()
    };
    let of_kernel = |kernel: usize| -> Vec<String> { known.iter().flat_map(|rank| on_line(rank, kernel)).collect() };
    let mut ids = of_kernel(0);
    ids.retain(|id| (1..num_kernels).all(|kernel| of_kernel(kernel).contains(id)));
    ids.into_iter().max_by(|a, b| numbers(a).cmp(&numbers(b)).then_with(|| a.cmp(b)))
}

/// The numbers in a text, so that 13.10 is newer than 13.9.
fn numbers(text: &str) -> Vec<u64> {
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_rank_has_is_sent_and_what_none_has_is_dealt() {
        let has = [vec![true, false, false, false], vec![false; 4], vec![true, false, false, false]];
        let plan = Plan::new(&has, &[1, 0, 1]);
        let sources: Vec<Source> = plan.sources().map(|(_, source)| source.clone()).collect();
        assert_eq!(sources[0], Source::Held { rank: Rank(0), lacking: vec![Rank(1)] });
        assert_eq!(sources[1], Source::Compiled { rank: Rank(0), lacking: vec![Rank(1), Rank(2)] });
        assert_eq!(sources[2], Source::Compiled { rank: Rank(2), lacking: vec![Rank(0), Rank(1)] });
        assert_eq!(sources[3].rank(), Rank(0));
        assert_eq!(plan.compiled().collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(plan.num_rounds(), 2);
        assert_eq!(plan.round(0), [(Rank(0), 1), (Rank(2), 2)]);
        assert_eq!(plan.round(1), [(Rank(0), 3)]);
        let wide = Plan::new(&has, &[2, 0, 1]);
        assert_eq!((wide.num_rounds(), wide.round(0)), (1, vec![(Rank(0), 1), (Rank(2), 2), (Rank(0), 3)]));
    }

    #[test]
    fn warm_worlds_compile_nothing_and_empty_ones_do_not_break() {
        let plan = Plan::new(&[vec![true], vec![true]], &[0, 0]);
        assert_eq!((plan.num_rounds(), plan.compiled().count()), (0, 0));
        assert!(plan.sources().all(|(_, source)| source.lacking().is_empty()));
        assert_eq!(Plan::new(&[vec![], vec![]], &[1, 1]).num_rounds(), 0);
    }

    #[test]
    fn the_newest_compiler_that_made_everything_is_taken() {
        let ranks = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let known = ranks(&["13.9 (a)\t13.10 (b)\n13.9 (a)", "13.0 (c)\n13.10 (b)\t13.0 (c)"]);
        assert_eq!(newest_for_all(&known, 2).as_deref(), Some("13.10 (b)"));
        assert_eq!(newest_for_all(&ranks(&["13.9 (a)\n", "\n13.0 (c)"]), 2), None);
        assert_eq!(newest_for_all(&ranks(&["", ""]), 2), None);
    }
}
