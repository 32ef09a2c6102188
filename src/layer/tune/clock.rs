//! How long tactics take on this rank.

use std::time::{Duration, Instant};

use crate::backend::BackendError;
use crate::select::tactics::Tactic;

/// Rounds at most: the best of a few is steady, and a small model's tuning stays within a blink.
const MAX_ROUNDS: usize = 5;

/// No further round is begun after this, so that wide layers cost each tactic a warm-up and a round.
const BUDGET: Duration = Duration::from_millis(20);

/// The best time of each tactic in nanoseconds, or why it can't run.
///
/// Each runs once to fill caches, uncounted; then all run in turns, so that what else the machine does hits all alike.
pub fn time_tactics(
    num_tactics: usize,
    mut run: impl FnMut(Tactic) -> Result<(), BackendError>,
) -> Vec<Result<u64, BackendError>> {
    let mut best: Vec<Result<u64, BackendError>> =
        (0..num_tactics).map(|idx| run(Tactic::new(idx)).map(|()| u64::MAX)).collect();
    let begin = Instant::now();
    for _ in 0..MAX_ROUNDS {
        for (idx, best) in best.iter_mut().enumerate() {
            let Ok(least) = best else { continue };
            let start = Instant::now();
            let ran = run(Tactic::new(idx));
            let ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
            let least = ns.min(*least);
            *best = ran.map(|()| least);
        }
        if begin.elapsed() > BUDGET {
            break;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tactic_is_warmed_up_and_timed() {
        let mut calls = [0; 3];
        let times = time_tactics(3, |tactic| {
            calls[tactic.index()] += 1;
            match tactic.index() {
                1 => Err(BackendError::Technique { technique: "x".to_owned() }),
                _ => Ok(()),
            }
        });
        assert_eq!(calls, [1 + MAX_ROUNDS, 1, 1 + MAX_ROUNDS]);
        assert!(times[0].as_ref().is_ok_and(|ns| *ns < u64::MAX) && times[1].is_err(), "{times:?}");
    }

    #[test]
    fn slow_tactics_get_one_round() {
        let mut calls = 0;
        let times = time_tactics(1, |_| {
            calls += 1;
            let begin = Instant::now();
            while begin.elapsed() <= BUDGET {
                std::hint::spin_loop();
            }
            Ok(())
        });
        assert_eq!(calls, 2);
        assert!(times[0].as_ref().is_ok_and(|ns| u128::from(*ns) >= BUDGET.as_nanos()), "{times:?}");
    }
}
