//! One choice from the timings of all ranks.

use std::fmt;

use super::super::ranks::RankSet;
use super::{Ballot, MAX_TACTICS, Tactic, Timing};
use crate::exit::{Classify, Exit};
use crate::ids::Rank;

/// What another tactic may take, in percent of the lowest-numbered, and still not be worth leaving it: timings differ by
/// so much from run to run, and a choice that follows noise would be another one in every session.
const WORTH_PERCENT: u128 = 95;

/// A tactic that could not run on some rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The rank.
    pub rank: Rank,
    /// The tactic.
    pub tactic: Tactic,
    /// What the backend says.
    pub cause: String,
}

/// A tactic that no rank runs, because some can't.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// Its name.
    pub name: String,
    /// The ranks on which it failed.
    pub ranks: RankSet,
    /// What the lowest of them says.
    pub cause: String,
}

impl fmt::Display for Dropped {
    /// `wide failed on rank 2: out of shared memory`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed on {}: {}", self.name, self.ranks, self.cause)
    }
}

/// The tactic that all ranks run, and how it came about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The tactic.
    pub tactic: Tactic,
    /// By tactic, the time of the slowest rank; absent where it was dropped, or no rank holds an expert.
    pub slowest_ns: Vec<Option<u64>>,
    /// Tactics that failed somewhere.
    pub dropped: Vec<Dropped>,
}

/// Why there is no choice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TacticError {
    /// Ranks have timed different things.
    #[error(
        "the ranks have timed different tactics for {shape}: {ranks} differ from rank 0; start every rank from the same \
         build of lockstep"
    )]
    Different {
        /// The shape.
        shape: String,
        /// Those that differ from rank 0.
        ranks: RankSet,
    },
    /// Each has failed somewhere.
    #[error(
        "no tactic for {shape} runs on every rank:{}\n  Give these ranks what they lack, or another --backend; with \
         moe.tuning: off the first tactic runs untried",
        dropped.iter().map(|dropped| format!("\n    {dropped}")).collect::<String>()
    )]
    NoneLeft {
        /// The shape.
        shape: String,
        /// All tactics.
        dropped: Vec<Dropped>,
        /// Whether some rank runs none: then it lacks something. Else each rank could run one, and they don't agree.
        one_runs_none: bool,
    },
}

impl Classify for TacticError {
    fn exit(&self) -> Exit {
        match self {
            Self::NoneLeft { one_runs_none: true, .. } => Exit::Environment,
            Self::Different { .. } | Self::NoneLeft { .. } => Exit::Disagreement,
        }
    }
}

/// Chooses for `shape` among the tactics of these names from one ballot a rank, in rank order.
///
/// A tactic takes as long as on its slowest rank; one that failed anywhere is out. The fastest wins, ties to the lower
/// number; the lowest number stays unless the fastest beats it by more than noise. Equal ballots give equal choices,
/// whichever rank computes them. `failures` hold the words for those that the ballots report.
///
/// # Errors
/// If the ballots are about different things, or no tactic is left.
pub fn choose(shape: &str, names: &[&str], ballots: &[Ballot], failures: &[Failure]) -> Result<Choice, TacticError> {
    let about = ballots.first().map(|ballot| ballot.about);
    let ranks_where = |test: &dyn Fn(&Ballot) -> bool| -> RankSet {
        let ranks = ballots.iter().enumerate().filter(|(_, ballot)| test(ballot));
        ranks.map(|(rank, _)| Rank::from_index(rank)).collect()
    };
    let strange = ranks_where(&|ballot| Some(ballot.about) != about);
    if !strange.is_empty() {
        return Err(TacticError::Different { shape: shape.to_owned(), ranks: strange });
    }
    let timing = |ballot: &Ballot, tactic: Tactic| ballot.timings.map_or(Timing::None, |all| all[tactic.index()]);
    let tactics = || (0..names.len().min(MAX_TACTICS)).map(Tactic::new);
    let dropped_ranks = |tactic| ranks_where(&|ballot| timing(ballot, tactic) == Timing::Failed);
    let dropped: Vec<Dropped> = tactics()
        .map(|tactic| (tactic, dropped_ranks(tactic)))
        .filter(|(_, ranks)| !ranks.is_empty())
        .map(|(tactic, ranks)| {
            let said = failures.iter().find(|failure| failure.tactic == tactic && ranks.contains(failure.rank));
            let cause = said.map_or("no cause given", |failure| &failure.cause).to_owned();
            Dropped { name: names[tactic.index()].to_owned(), ranks, cause }
        })
        .collect();
    let left: Vec<Tactic> = tactics().filter(|tactic| dropped_ranks(*tactic).is_empty()).collect();
    let slowest = |tactic| ballots.iter().map(|ballot| timing(ballot, tactic)).max().unwrap_or(Timing::None);
    let Some(lowest) = left.first().copied() else {
        let fails_all = |ballot: &Ballot| tactics().all(|tactic| timing(ballot, tactic) == Timing::Failed);
        let one_runs_none = ballots.iter().any(fails_all);
        return Err(TacticError::NoneLeft { shape: shape.to_owned(), dropped, one_runs_none });
    };
    let ns = |tactic| match slowest(tactic) {
        Timing::Took(ns) => Some(ns),
        Timing::None | Timing::Failed => None,
    };
    // The lower of equals comes first, and `min_by_key` keeps it.
    let fastest = left.iter().copied().filter(|tactic| ns(*tactic).is_some()).min_by_key(|tactic| ns(*tactic));
    let is_worth_it = |fastest| match (ns(fastest), ns(lowest)) {
        (Some(fast), Some(low)) => u128::from(fast) * 100 < u128::from(low) * WORTH_PERCENT,
        _ => false,
    };
    let tactic = fastest.filter(|fastest| is_worth_it(*fastest)).unwrap_or(lowest);
    let slowest_ns = tactics().map(|tactic| ns(tactic).filter(|_| left.contains(&tactic))).collect();
    Ok(Choice { tactic, slowest_ns, dropped })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Timing::{Failed, None as Nothing, Took};
    use super::*;

    const NAMES: [&str; 3] = ["even", "coarse", "small"];

    fn ballots(ranks: &[&[Timing]]) -> Vec<Ballot> {
        ranks.iter().map(|timings| Ballot::new(7, Some(timings))).collect()
    }

    fn chosen(ranks: &[&[Timing]]) -> usize {
        choose("s", &NAMES, &ballots(ranks), &[]).expect("a choice").tactic.index()
    }

    #[test]
    fn the_slowest_rank_counts() {
        // Rank 0 would take 1, rank 1 would take 2; over both, 0 is never worse than 100.
        let ranks: [&[Timing]; 2] = [&[Took(100), Took(10), Took(150)], &[Took(100), Took(200), Took(20)]];
        assert_eq!(chosen(&ranks[..1]), 1);
        assert_eq!(chosen(&ranks[1..]), 2);
        assert_eq!(chosen(&ranks), 0);
        let choice = choose("s", &NAMES, &ballots(&ranks), &[]).expect("a choice");
        assert_eq!(choice.slowest_ns, [Some(100), Some(200), Some(150)]);
    }

    #[test]
    fn ties_and_noise_go_to_the_lower_number() {
        assert_eq!(chosen(&[&[Took(100), Took(100), Took(100)]]), 0);
        assert_eq!(chosen(&[&[Took(1000), Took(950), Took(951)]]), 0, "5 % is noise");
        assert_eq!(chosen(&[&[Took(1000), Took(949), Took(949)]]), 1, "more is not");
        assert_eq!(chosen(&[&[Took(u64::MAX - 1), Took(1), Took(1)]]), 1);
    }

    #[test]
    fn ranks_without_experts_have_no_say() {
        assert_eq!(chosen(&[&[Nothing; 3], &[Took(100), Took(50), Took(80)]]), 1);
        assert_eq!(chosen(&[&[Nothing; 3], &[Nothing; 3]]), 0);
    }

    #[test]
    fn what_fails_anywhere_is_dropped_everywhere() {
        let failures = [Failure { rank: Rank(1), tactic: Tactic::new(1), cause: "no memory".to_owned() }];
        let ranks = ballots(&[&[Took(100), Took(10), Took(20)], &[Took(100), Failed, Took(20)]]);
        let choice = choose("s", &NAMES, &ranks, &failures).expect("a choice");
        assert_eq!(choice.tactic, Tactic::new(2));
        assert_eq!(choice.slowest_ns, [Some(100), None, Some(20)]);
        assert_eq!(choice.dropped[0].to_string(), "coarse failed on rank 1: no memory");
    }

    #[test]
    fn none_left_names_ranks_causes_and_cure() {
        let failure = |rank, tactic, cause: &str| Failure {
            rank: Rank(rank),
            tactic: Tactic::new(tactic),
            cause: cause.to_owned(),
        };
        let failures = [failure(0, 0, "a"), failure(1, 1, "b"), failure(1, 2, "c")];
        let ranks = ballots(&[&[Failed, Took(1), Took(1)], &[Took(1), Failed, Failed]]);
        let error = choose("the.shape", &NAMES, &ranks, &failures).expect_err("none is left");
        assert_eq!(
            error.to_string(),
            "no tactic for the.shape runs on every rank:\n    even failed on rank 0: a\n    coarse failed on rank 1: b\n    \
             small failed on rank 1: c\n  Give these ranks what they lack, or another --backend; with moe.tuning: off the \
             first tactic runs untried"
        );
        assert_eq!(error.exit(), Exit::Disagreement, "each rank has one that runs");
        let ranks = ballots(&[&[Took(1); 3], &[Failed; 3]]);
        let error = choose("s", &NAMES, &ranks, &failures).expect_err("none is left");
        assert_eq!(error.exit(), Exit::Environment, "rank 1 runs none");
    }

    #[test]
    fn ballots_about_other_things_are_refused() {
        let mut ranks = ballots(&[&[Took(1)], &[Took(1)], &[Took(1)]]);
        ranks[1].about = 8;
        let error = choose("s", &NAMES, &ranks, &[]).expect_err("different");
        assert!(error.to_string().contains("rank 1 differ"), "{error}");
        assert_eq!(error.exit(), Exit::Disagreement);
    }

    fn any_timing() -> impl Strategy<Value = Timing> {
        prop_oneof![4 => (1u64..1000).prop_map(Took), 1 => Just(Nothing), 1 => Just(Failed)]
    }

    proptest! {
        /// Whoever computes it, in whatever order ranks are counted, and through the words that travel.
        #[test]
        fn the_choice_is_one(
            ranks in prop::collection::vec([any_timing(), any_timing(), any_timing()], 1..6),
            swap in any::<prop::sample::Index>(),
        ) {
            let given: Vec<Ballot> = ranks.iter().map(|timings| Ballot::new(7, Some(timings))).collect();
            let travelled: Vec<Ballot> = given.iter().map(|ballot| Ballot::from_words(&ballot.words())).collect();
            let mut turned = given.clone();
            turned.rotate_left(swap.index(given.len()));
            let of = |ballots: &[Ballot]| choose("s", &NAMES, ballots, &[]).map(|choice| choice.tactic).ok();
            prop_assert_eq!(of(&given), of(&travelled));
            prop_assert_eq!(of(&given), of(&turned));
        }

        /// What is chosen failed nowhere, and nothing that failed nowhere is faster by more than noise.
        #[test]
        fn the_choice_runs_and_is_fast(ranks in prop::collection::vec([any_timing(), any_timing(), any_timing()], 1..6)) {
            let ballots: Vec<Ballot> = ranks.iter().map(|timings| Ballot::new(7, Some(timings))).collect();
            let failed = |tactic: usize| ranks.iter().any(|timings| timings[tactic] == Failed);
            let slowest = |tactic: usize| ranks.iter().map(|timings| timings[tactic]).max().unwrap_or(Nothing);
            match choose("s", &NAMES, &ballots, &[]) {
                Ok(choice) => {
                    let chosen = choice.tactic.index();
                    prop_assert!(!failed(chosen));
                    for other in (0..3).filter(|other| !failed(*other)) {
                        if let (Took(mine), Took(theirs)) = (slowest(chosen), slowest(other)) {
                            prop_assert!(theirs * 100 >= mine * 95, "{} chosen, {} is faster: {:?}", chosen, other, ranks);
                        }
                    }
                    prop_assert_eq!(choice.dropped.len(), (0..3).filter(|tactic| failed(*tactic)).count());
                }
                Err(_) => prop_assert!((0..3).all(failed)),
            }
        }
    }
}
