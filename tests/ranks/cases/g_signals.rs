//! Ctrl-C, SIGTERM and readers that have gone: a run ends in every phase, with one message, and leaves nothing.
//!
//! A phase is held open by a delay of `LOCKSTEP_FAULT`, which says when it has begun. That no process remains is checked
//! by the launcher of these tests itself.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::disturb::{Pipes, Running};
use crate::support::launch::{FAILURE_LIMIT, Outcome, alone, launcher, mpirun};
use crate::support::run::files_in;
use crate::support::scene::Scene;

/// All are gone this long after the signal.
const LIMIT: Duration = Duration::from_secs(20);

/// Stages with a rank that is held there. What is written is written by rank 0.
const HELD: [(&str, usize); 9] = [
    ("init", 1),
    ("start", 1),
    ("load", 1),
    ("compile", 0),
    ("dispatch", 1),
    ("experts", 0),
    ("combine", 1),
    ("write", 1),
    ("publish", 0),
];

fn fault(stage: &str, rank: usize) -> String {
    format!("{rank}:{stage}:delay=60")
}

/// Waits until a rank is held at `stage`; before MPI has started nothing is logged.
fn reach(job: &Running, stage: &str, ranks: usize) {
    if stage == "init" { job.wait_for_ranks(ranks) } else { job.wait_for(" strikes rank ") }
}

/// Nothing is left, and one line of standard error holds `message`.
#[track_caller]
fn assert_ended(scene: &Scene, outcome: &Outcome, message: &str) {
    let lines: Vec<&str> = outcome.stderr.lines().filter(|line| line.contains("half-written")).collect();
    assert!(lines.len() == 1 && lines[0].contains(message), "want {message:?} once: {}", outcome.printed());
    assert_eq!(outcome.error_messages(), Vec::<String>::new(), "{}", outcome.printed());
    assert!(!outcome.stderr.contains("panicked"), "{}", outcome.printed());
    assert_eq!(scene.left_over(), Vec::<String>::new(), "{}", outcome.printed());
    assert_eq!(scene.sha256(), None, "an output of a run that was ended: {}", outcome.printed());
}

#[track_caller]
fn assert_runs(scene: &Scene) {
    let outcome = scene.run(mpirun(2)).run().expect_code(0);
    assert!(scene.sha256().is_some() && scene.left_over().is_empty(), "{}", outcome.printed());
}

fn through_the_launcher(signal: &str, code: i32, message: &str) {
    let scene = Scene::new("");
    for (stage, rank) in HELD {
        let job = scene.run(launcher(2)).env("LOCKSTEP_FAULT", &fault(stage, rank));
        let mut told = Instant::now();
        let outcome = job.run_while(|job| {
            reach(job, stage, 2);
            told = Instant::now();
            job.signal(signal);
        });
        assert!(told.elapsed() < LIMIT, "{stage}: {}", outcome.printed());
        assert_eq!(outcome.code, code, "{stage}: {}", outcome.printed());
        assert_ended(&scene, &outcome, &format!("mpirun.sh: ended on {message}"));
    }
    assert_runs(&scene);
}

#[test]
fn g7_sigterm_to_the_launcher_in_every_phase() {
    through_the_launcher("TERM", 143, "SIGTERM");
}

#[test]
fn g7_ctrl_c_of_the_launcher_in_every_phase() {
    through_the_launcher("INT", 130, "Ctrl-C (SIGINT)");
}

/// The rank that was told speaks, whoever it is, and the launcher's code is the rank's.
#[test]
fn g7_a_signal_to_one_rank_in_every_phase() {
    let scene = Scene::new("");
    for (stage, rank) in HELD.into_iter().filter(|(stage, _)| *stage != "init") {
        let signals = [("TERM", 143, "SIGTERM"), ("INT", 130, "Ctrl-C (SIGINT)")];
        let num_signals = if ["start", "publish"].contains(&stage) { 2 } else { 1 };
        for (signal, code, name) in signals.into_iter().take(num_signals) {
            let job = scene.run(launcher(2)).env("LOCKSTEP_FAULT", &fault(stage, rank));
            let mut told = Instant::now();
            let outcome = job.run_while(|job| {
                reach(job, stage, 2);
                told = Instant::now();
                job.signal_rank(rank, signal);
            });
            assert!(told.elapsed() < LIMIT, "{stage}: {}", outcome.printed());
            assert_eq!(outcome.code, code, "{stage}: {}", outcome.printed());
            assert_ended(&scene, &outcome, &format!("lockstep: rank {rank} ends on {name}"));
        }
    }
    assert_runs(&scene);
}

/// Before its handlers are set a process ends as any other does, and the launcher says which.
#[test]
fn g7_a_signal_to_one_rank_before_mpi() {
    let scene = Scene::new("");
    let outcome = scene.run(launcher(2)).env("LOCKSTEP_FAULT", &fault("init", 1)).run_while(|job| {
        reach(job, "init", 2);
        job.signal_rank(1, "TERM");
    });
    assert_eq!(outcome.code, 143, "{}", outcome.printed());
    assert_eq!(scene.left_over(), Vec::<String>::new(), "{}", outcome.printed());
    assert_eq!(outcome.error_messages(), Vec::<String>::new(), "{}", outcome.printed());
    assert!(outcome.stderr.contains("rank 1") || outcome.stderr.contains(",1]"), "{}", outcome.printed());
}

/// `mpirun` alone ends with a code of its own, and says nothing: rank 0 does.
#[test]
fn g7_sigterm_to_mpirun_itself() {
    let scene = Scene::new("");
    let outcome = scene.run(mpirun(2)).env("LOCKSTEP_FAULT", &fault("dispatch", 1)).run_while(|job| {
        reach(job, "dispatch", 2);
        job.signal("TERM");
    });
    assert_ne!(outcome.code, 0, "{}", outcome.printed());
    assert_ended(&scene, &outcome, "lockstep: rank 0 is ended by its launcher, with SIGTERM");
    assert_runs(&scene);
}

/// Whoever presses Ctrl-C once more because nothing has happened yet does no harm.
#[test]
fn g7_ctrl_c_twice() {
    let scene = Scene::new("");
    let twice = |job: &Running, stage: &str| {
        reach(job, stage, 2);
        job.signal("INT");
        job.signal("INT");
    };
    for (stage, rank) in [("start", 1), ("dispatch", 1), ("publish", 0)] {
        let job = scene.run(launcher(2)).env("LOCKSTEP_FAULT", &fault(stage, rank));
        let outcome = job.run_while(|job| twice(job, stage)).expect_code(130);
        assert_ended(&scene, &outcome, "mpirun.sh: ended on Ctrl-C (SIGINT)");
    }
    let outcome = scene.run(alone()).env("LOCKSTEP_FAULT", &fault("dispatch", 0));
    let outcome = outcome.run_while(|job| twice(job, "dispatch")).expect_code(130);
    assert_ended(&scene, &outcome, "lockstep: this process ends on Ctrl-C (SIGINT)");
    assert_runs(&scene);
}

/// A script can't pass on what kills it: the system tells mpirun, where util-linux has the tool to ask it to.
#[test]
fn g7_the_launcher_is_killed_outright() {
    let help = Command::new("setpriv").arg("--help").output();
    let can_ask = help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains("--pdeathsig"));
    assert!(can_ask || !cfg!(target_os = "linux"), "install util-linux 2.33 or newer, or ranks outlive the launcher");
    let scene = Scene::new("");
    let outcome = scene.run(launcher(2)).env("LOCKSTEP_FAULT", &fault("publish", 0)).run_while(|job| {
        reach(job, "publish", 2);
        job.signal("KILL");
        job.wait_for_ranks(0);
    });
    assert_eq!(outcome.code, 137, "{}", outcome.printed());
    assert!(scene.left_over().is_empty() && scene.sha256().is_none(), "{}", outcome.printed());
}

#[test]
fn g7_a_process_without_a_launcher() {
    let scene = Scene::new("");
    for (stage, signal, code, name) in [
        ("start", "TERM", 143, "SIGTERM"),
        ("load", "INT", 130, "Ctrl-C (SIGINT)"),
        ("combine", "TERM", 143, "SIGTERM"),
        ("publish", "TERM", 143, "SIGTERM"),
        ("publish", "INT", 130, "Ctrl-C (SIGINT)"),
    ] {
        let outcome = scene.run(alone()).env("LOCKSTEP_FAULT", &fault(stage, 0)).run_while(|job| {
            reach(job, stage, 1);
            job.signal(signal);
        });
        assert_eq!(outcome.code, code, "{stage}: {}", outcome.printed());
        assert_ended(&scene, &outcome, &format!("lockstep: this process ends on {name}"));
    }
    assert_runs(&scene);
}

/// What was there before is there afterwards, also where the new one was complete but for its name.
#[test]
fn g7_an_older_output_survives() {
    let scene = Scene::new("");
    assert_runs(&scene);
    let before = scene.sha256();
    for ends in ["signal", "panic"] {
        let action = if ends == "signal" { "delay=60" } else { "panic" };
        let job = scene.run(launcher(2)).env("LOCKSTEP_FAULT", &format!("0:publish:{action}"));
        let outcome = job.run_while(|job| {
            if ends == "signal" {
                reach(job, "publish", 2);
                job.signal("TERM");
            }
        });
        assert_ne!(outcome.code, 0, "{}", outcome.printed());
        assert_eq!(scene.sha256(), before, "{ends}: {}", outcome.printed());
        assert_eq!(scene.left_over(), Vec::<String>::new(), "{ends}: {}", outcome.printed());
    }
}

#[test]
fn g7_a_sample_that_is_interrupted_leaves_nothing() {
    let scene = Scene::new("");
    let parent = scene.path("samples");
    fs::create_dir(&parent).expect("a new directory");
    let out = parent.join("k3").display().to_string();
    let job = alone().limit(FAILURE_LIMIT).args(["sample", "--geometry", "kimi-k3", "--scale", "1/16", "--out", &out]);
    let outcome = job.run_while(|job| {
        job.wait_until(|| !files_in(&parent).is_empty());
        job.signal("INT");
    });
    assert_eq!(outcome.code, 130, "{}", outcome.printed());
    assert_eq!(files_in(&parent), Vec::<String>::new(), "{}", outcome.printed());
    assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.printed());
}

/// `lockstep run | head -1`: what can't be printed is dropped, the output is whole, and nothing panics.
#[test]
fn g7_a_reader_that_has_gone() {
    let scene = Scene::new("");
    assert_runs(&scene);
    let whole = scene.sha256();
    for pipes in [Pipes::StdoutGone, Pipes::NoneRead] {
        for (job, what) in [(alone(), "alone"), (mpirun(2), "mpirun"), (launcher(2), "launcher")] {
            scene.clear();
            let outcome = scene.run(job).pipes(pipes).run();
            assert_eq!(outcome.code, 0, "{what}, {pipes:?}: {}", outcome.printed());
            assert!(!outcome.stderr.contains("panicked"), "{what}, {pipes:?}: {}", outcome.printed());
            assert_eq!(scene.sha256(), whole, "{what}, {pipes:?}: {}", outcome.printed());
            assert_eq!(scene.left_over(), Vec::<String>::new(), "{what}, {pipes:?}: {}", outcome.printed());
        }
    }
    for word in ["--help", "--version"] {
        alone().args([word]).pipes(Pipes::NoneRead).run().expect_code(0);
    }
}
