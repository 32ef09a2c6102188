//! The steps of a run: how long they took, and whether each gave what the one before gave.

use serde::Serialize;

use super::{Check, RankReport};

/// Times of the steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepReport {
    /// Steps run.
    pub count: usize,
    /// Half of the steps took less.
    pub median_us: f64,
    /// 99 of 100 steps took less.
    pub p99_us: f64,
}

impl StepReport {
    /// Sorts and reads the quantiles.
    #[must_use]
    pub fn new(mut step_us: Vec<f64>) -> Self {
        step_us.sort_by(f64::total_cmp);
        let at = |num: usize, den: usize| {
            let last = step_us.len().saturating_sub(1);
            step_us.get((step_us.len() * num / den).min(last)).copied().unwrap_or_default()
        };
        Self { count: step_us.len(), median_us: at(1, 2), p99_us: at(99, 100) }
    }
}

/// One input gives one output, however often.
pub(super) fn check_steps(ranks: &[RankReport]) -> Check {
    let of_rank = |rank: &RankReport| rank.layers.iter().map(|share| share.num_steps_off).sum::<u64>();
    let off: Vec<String> = ranks
        .iter()
        .filter(|rank| of_rank(rank) > 0)
        .map(|rank| format!("{} on rank {}", of_rank(rank), rank.rank))
        .collect();
    Check {
        name: "every step gave the same bits".to_owned(),
        pass: off.is_empty(),
        detail: if off.is_empty() { "no step differs from the one before".to_owned() } else { off.join(", ") },
    }
}

#[cfg(test)]
mod tests {
    use super::super::RunReport;
    use super::super::tests::report;
    use super::*;
    use crate::exit::Exit;

    /// A step that gives other bits is a wrong result; of one step there is nothing to say.
    #[test]
    fn a_step_with_other_bits_fails() {
        let mut once = report(&[]);
        once.ranks[0].layers[0].num_steps_off = 1;
        let join = |steps| RunReport::join(once.decided.clone(), once.ranks.clone(), StepReport::new(steps));
        assert_eq!(join(vec![1.0]).exit(), Exit::Fine);
        let twice = join(vec![1.0, 1.0]);
        assert_eq!(twice.exit(), Exit::WrongResult);
        assert!(twice.to_string().contains("1 on rank 0"), "{twice}");
    }

    #[test]
    fn quantiles_of_steps() {
        let report = StepReport::new((0..100).rev().map(f64::from).collect());
        assert_eq!((report.count, report.median_us, report.p99_us), (100, 50.0, 99.0));
        assert_eq!(StepReport::new(vec![7.0]).p99_us, 7.0);
    }
}
