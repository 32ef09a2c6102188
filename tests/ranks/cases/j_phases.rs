//! One rank that takes long: every phase has its own limit, and who waits is told who is at what.
//!
//! Lines come every 10 s, or a quarter of a limit that is below 40 s: these tests shorten limits.

use crate::support::launch::{Outcome, mpirun};
use crate::support::scene::Scene;

fn run(scene: &Scene, fault: &str) -> Outcome {
    scene.run(mpirun(2)).env("LOCKSTEP_FAULT", fault).run()
}

/// Lines about work that takes long, from the rank that speaks.
fn progress(outcome: &Outcome) -> Vec<&str> {
    outcome.stderr.lines().filter(|line| line.contains(" still ") && line.contains(" INFO rank=0 ")).collect()
}

#[test]
fn j1_whoever_is_late_is_named_while_the_others_wait() {
    let scene = Scene::new("timeouts: {load_s: 8, compile_s: 8, step_s: 2}");
    for (stage, doing) in [("load", "loading layer 0 of "), ("compile", "building its kernels")] {
        // Longer than a step may take: the phase has a limit of its own.
        let outcome = run(&scene, &format!("1:{stage}:delay=5")).expect_code(0);
        let lines = progress(&outcome);
        assert!((1..=3).contains(&lines.len()), "one line every 2 s: {}", outcome.printed());
        for line in lines {
            assert!(line.contains(&format!("rank 1 still {doing}")), "{line}");
            assert!(line.contains(&format!("at most 8 s (timeouts.{stage}_s)")), "{line}");
        }
    }
    assert!(scene.sha256().is_some());
}

/// A rank that works itself can't wait and see: a thread of it speaks.
#[test]
fn j1_rank_0_says_what_it_is_at_itself() {
    let scene = Scene::new("timeouts: {load_s: 8}");
    let outcome = run(&scene, "0:load:delay=5").expect_code(0);
    let lines = progress(&outcome);
    assert!((1..=3).contains(&lines.len()), "one line every 2 s: {}", outcome.printed());
    assert!(lines.iter().all(|line| line.contains("rank 0 still loading layer 0 of ")), "{}", outcome.printed());
}

#[test]
fn j1_a_limit_that_passes_names_the_rank_and_what_it_is_at() {
    let scene = Scene::new("timeouts: {load_s: 3, compile_s: 2, start_s: 2}");
    for (fault, needles) in [
        ("1:load:hang", ["rank 1 still loading layer 0 of ", "after 3 s", "raise timeouts.load_s"]),
        ("0:load:hang", ["rank 0 still loading layer 0 of ", "where rank 1 waits", "raise timeouts.load_s"]),
        ("1:compile:hang", ["rank 1 still building its kernels", "after 2 s", "raise timeouts.compile_s"]),
        ("1:start:hang", ["rank 1 still starting", "after 2 s", "raise timeouts.start_s"]),
        ("0:publish:hang", ["rank 0 still writing ", "after 3 s", "raise timeouts.load_s"]),
    ] {
        let outcome = run(&scene, fault).fails_clearly(5, &needles);
        assert!(!outcome.stderr.contains("communication"), "{fault}: {}", outcome.printed());
        assert_eq!(scene.left_over(), Vec::<String>::new(), "{fault}: {}", outcome.printed());
    }
}

/// MPI's own start has no limit: a process that never comes there would be waited for for ever.
#[test]
fn j1_a_rank_that_does_not_come_to_mpi() {
    let scene = Scene::new("");
    for rank in [0, 1] {
        let job = scene.run(mpirun(3)).env("LOCKSTEP_START_S", "3");
        let outcome = job.env("LOCKSTEP_FAULT", &format!("{rank}:init:hang")).run();
        outcome.fails_clearly(5, &["has waited 3 s for MPI to start", "raise LOCKSTEP_START_S"]);
    }
}
