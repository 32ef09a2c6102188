//! A rank that dies, fails or is stuck takes all with it, within the limit and with one cause.
//!
//! Faults are provoked by `LOCKSTEP_FAULT`. That no process remains is checked by the launcher of these tests itself.

use std::time::Duration;

use crate::support::fixtures;
use crate::support::launch::Outcome;
use crate::support::made::{Choice, S};
use crate::support::run::{Run, Work};
use crate::support::safetensors;

/// Gone within this when a rank fails; twice as long after `kill -9`.
const LIMIT: Duration = Duration::from_secs(30);

/// S on four ranks with a fault; waits of a step are cut to a few seconds.
fn faulty(fault: &str) -> Outcome {
    let work = Work::new();
    let s = S::new(4, 128, 128);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let run = Run::new(&work, &checkpoint, &s.tokens(8, 1.0)).choice(&Choice::single((0..8).map(|token| token % 4)));
    let (outcome, _) = run
        .ranks(4)
        .steps(3)
        .key("timeouts", "step_s", "4")
        .key("timeouts", "start_s", "10")
        .key("timeouts", "load_s", "4")
        .env("LOCKSTEP_FAULT", fault)
        .attempt();
    assert_ne!(outcome.code, 0, "{fault}: {}", outcome.printed());
    outcome
}

#[test]
fn g5_a_rank_panics() {
    for stage in ["start", "load", "dispatch", "experts", "combine"] {
        for action in ["panic", "panic_thread"] {
            let outcome = panics(stage, action);
            assert!(outcome.stderr.contains("rank 2"), "{stage}:{action}: {}", outcome.printed());
        }
    }
}

/// Before MPI starts a process may not know its rank, but it has to say what happened.
#[test]
fn g5_a_rank_panics_before_mpi() {
    panics("init", "panic");
}

fn panics(stage: &str, action: &str) -> Outcome {
    let outcome = faulty(&format!("2:{stage}:{action}"));
    assert!(outcome.elapsed < LIMIT, "{stage}:{action}: {}", outcome.printed());
    let cause = format!("LOCKSTEP_FAULT at {stage}");
    assert_eq!(outcome.stderr.matches(&cause).count(), 1, "{stage}:{action}: one cause: {}", outcome.printed());
    outcome
}

#[test]
fn g5_a_rank_fails() {
    for stage in ["load", "dispatch", "experts", "combine"] {
        let outcome = faulty(&format!("2:{stage}:error"));
        outcome.fails_clearly(3, &["rank 2", stage, "LOCKSTEP_FAULT"]);
    }
}

#[test]
fn g5_the_writer_fails() {
    faulty("0:write:error").fails_clearly(3, &["rank 0", "write"]);
}

#[test]
fn g5_a_rank_is_killed() {
    for (stage, action) in [("load", "kill"), ("dispatch", "kill"), ("experts", "segv")] {
        let fault = format!("2:{stage}:{action}");
        let outcome = faulty(&fault);
        assert!(outcome.elapsed < 2 * LIMIT, "{fault}: {}", outcome.printed());
        assert!(outcome.stderr.contains("rank 2") || outcome.stderr.contains("signal"), "{}", outcome.printed());
    }
}

#[test]
fn g5_a_rank_is_stuck() {
    for (stage, phase) in [("load", "load"), ("dispatch", "step"), ("combine", "step")] {
        let fault = format!("2:{stage}:hang");
        let outcome = faulty(&fault);
        assert!(outcome.elapsed < LIMIT, "{fault}: {}", outcome.printed());
        assert_eq!(outcome.code, 5, "{fault}: {}", outcome.printed());
        for needle in ["rank 2", phase, &format!("timeouts.{phase}_s")] {
            assert!(outcome.stderr.contains(needle), "{fault}: no {needle:?}: {}", outcome.printed());
        }
    }
}

/// A rank that is in another step is an error of that step, on all ranks, and never wrong numbers.
#[test]
fn g5_a_rank_drifts() {
    let outcome = faulty("2:dispatch:drift");
    outcome.fails_clearly(4, &["rank 2", "step"]);
}

/// Exchanges in many small rounds, as past 2^31 elements, change no bit.
#[test]
fn a4_exchanges_in_rounds() {
    let work = Work::new();
    let fixture = fixtures::named("k3-tiny");
    let x = safetensors::read(&fixture.layers[0].file)[&fixture.layers[0].tensor("x")].clone();
    let run =
        Run::new(&work, &fixtures::checkpoint("k3-tiny"), &x).without("activation").option("part", "block").ranks(3);
    let whole = run.succeed();
    for round_bytes in [1000, 4096] {
        let rounds = run.clone().env("LOCKSTEP_FAULT", &format!("*:start:round_bytes={round_bytes}")).succeed();
        assert_eq!(rounds.sha256, whole.sha256, "rounds of {round_bytes} bytes");
    }
}
