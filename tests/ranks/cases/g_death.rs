//! A rank that dies, fails or is stuck takes all with it, within the limit and with one cause.
//!
//! Faults are provoked by `LOCKSTEP_FAULT`. That no process remains is checked by the launcher of these tests itself.
//!
//! | case G5, on rank 2 of 4 | test |
//! |---|---|
//! | (a) panic before MPI | `g5_a_rank_panics`, stage `init` |
//! | (b) panic between MPI and set-up | the same, stages `start` and `compile` |
//! | (c) panic while reading weights | the same, stage `load` |
//! | (d) panic in mid-dispatch | the same, stages `dispatch`, `experts`, `combine` |
//! | (e) panic in a worker thread | the same, `panic_thread` |
//! | (f) an `Err` is returned | `g5_a_rank_fails` |
//! | `kill -9`, `kill -SEGV` | `g5_a_rank_is_killed`; over and over, `g5_a_hundred_kills_*` |
//! | (g) a libcuda that lacks a symbol, on one rank | `g5_g_a_driver_that_lacks_a_function_on_one_rank` |

use std::time::Duration;

use crate::support::driver::Driver;
use crate::support::fixtures;
use crate::support::launch::{Outcome, launcher, mpirun};
use crate::support::run::{Run, Work};
use crate::support::safetensors;
use crate::support::scene::Scene;

/// Gone within this when a rank fails; twice as long after `kill -9`.
const LIMIT: Duration = Duration::from_secs(30);

const RANKS: usize = 4;

/// Rank 2 of four with a fault; limits are cut to a few seconds.
fn faulty(fault: &str) -> Outcome {
    let scene = Scene::new("timeouts: {step_s: 4, start_s: 10, load_s: 4, compile_s: 4}");
    let job = scene.run(mpirun(RANKS)).env("LOCKSTEP_FAULT", fault).env("LOCKSTEP_START_S", "10");
    let outcome = job.run();
    assert_ne!(outcome.code, 0, "{fault}: {}", outcome.printed());
    assert_eq!(scene.sha256(), None, "{fault}: {}", outcome.printed());
    assert_eq!(scene.left_over(), Vec::<String>::new(), "{fault}: {}", outcome.printed());
    outcome
}

/// One message, and no rank in it but the one at fault.
#[track_caller]
fn assert_blamed(outcome: &Outcome, rank: usize) {
    let messages = outcome.error_messages();
    assert_eq!(messages.len(), 1, "want one message: {}", outcome.printed());
    let cause = messages[0].lines().next().unwrap_or_default();
    let named: Vec<usize> = (0..RANKS).filter(|other| cause.contains(&format!("rank {other}"))).collect();
    assert_eq!(named, [rank], "{}", outcome.printed());
}

#[test]
fn g5_a_rank_panics() {
    for stage in ["init", "start", "compile", "load", "dispatch", "experts", "combine", "write"] {
        for action in ["panic", "panic_thread"] {
            let outcome = faulty(&format!("2:{stage}:{action}"));
            assert!(outcome.elapsed < LIMIT, "{stage}:{action}: {}", outcome.printed());
            assert_eq!(outcome.code, 101, "{stage}:{action}: {}", outcome.printed());
            assert_blamed(&outcome, 2);
            let messages = outcome.error_messages();
            assert!(messages[0].contains(&format!("LOCKSTEP_FAULT at {stage}")), "{}", outcome.printed());
        }
    }
}

#[test]
fn g5_a_rank_fails() {
    for stage in ["init", "start", "compile", "load", "dispatch", "experts", "combine", "write"] {
        let outcome = faulty(&format!("2:{stage}:error"));
        assert_blamed(&outcome, 2);
        outcome.fails_clearly(3, &["rank 2", stage, "LOCKSTEP_FAULT"]);
    }
}

#[test]
fn g5_the_writer_fails() {
    faulty("0:write:error").fails_clearly(3, &["rank 0", "write"]);
    faulty("0:publish:error").fails_clearly(2, &["rank 0", "output.safetensors", "publish"]);
}

/// A killed process says nothing: the launcher names it, and nobody else is blamed.
#[test]
fn g5_a_rank_is_killed() {
    for action in ["kill", "segv"] {
        for stage in ["init", "load", "dispatch", "experts"] {
            let fault = format!("2:{stage}:{action}");
            let outcome = faulty(&fault);
            assert!(outcome.elapsed < 2 * LIMIT, "{fault}: {}", outcome.printed());
            assert_eq!(outcome.code, if action == "kill" { 137 } else { 139 }, "{fault}: {}", outcome.printed());
            // mpirun's last message, which names the rank, is sometimes lost; its first is not.
            let is_said = ["process rank 2 with PID", "Primary job"].iter().any(|said| outcome.stderr.contains(said));
            assert!(is_said, "{fault}: {}", outcome.printed());
            assert_eq!(outcome.error_messages(), Vec::<String>::new(), "{fault}: {}", outcome.printed());
        }
    }
}

/// A hundred times: no job hangs, keeps a process (the launcher of these tests looks for them) or writes an output, and the
/// run behind them starts as if nothing had been.
fn a_hundred_kills(stage: &str) {
    let scene = Scene::new("timeouts: {step_s: 4}");
    for number in 0..100 {
        let outcome = scene.run(mpirun(2)).env("LOCKSTEP_FAULT", &format!("{}:{stage}:kill", number % 2)).run();
        let printed = || format!("kill {number}: {}", outcome.printed());
        assert!(outcome.elapsed < LIMIT, "{}", printed());
        assert_eq!(outcome.code, 137, "{}", printed());
        assert_eq!(scene.sha256(), None, "{}", printed());
        assert_eq!(scene.left_over(), Vec::<String>::new(), "{}", printed());
    }
    scene.run(mpirun(2)).run().expect_code(0);
    assert!(scene.sha256().is_some());
}

#[test]
fn g5_a_hundred_kills_in_mid_dispatch() {
    a_hundred_kills("dispatch");
}

#[test]
fn g5_a_hundred_kills_in_mid_combine() {
    a_hundred_kills("combine");
}

/// The launcher passes on how its ranks ended.
#[test]
fn g5_the_launcher_ends_as_its_ranks_do() {
    let scene = Scene::new("");
    for (action, code) in [("panic", 101), ("error", 3), ("kill", 137)] {
        let job = scene.run(launcher(3)).env("LOCKSTEP_FAULT", &format!("2:dispatch:{action}"));
        let outcome = job.run().expect_code(code);
        // Told to end by mpirun because another has failed, a rank has nothing to add.
        assert!(!outcome.stderr.contains("half-written"), "{}", outcome.printed());
        assert_eq!(outcome.error_messages().len(), usize::from(action != "kill"), "{}", outcome.printed());
    }
}

#[test]
fn g5_a_rank_is_stuck() {
    for (stage, phase) in [("load", "load"), ("dispatch", "step"), ("combine", "step")] {
        let fault = format!("2:{stage}:hang");
        let outcome = faulty(&fault);
        assert!(outcome.elapsed < LIMIT, "{fault}: {}", outcome.printed());
        outcome.fails_clearly(5, &["rank 2", phase, &format!("timeouts.{phase}_s")]);
    }
}

/// A fault that can't be read is said once, however many ranks were given it.
#[test]
fn g5_a_fault_that_is_none() {
    let scene = Scene::new("");
    let outcome = scene.run(mpirun(RANKS)).env("LOCKSTEP_FAULT", "2:lunch:panic").run();
    outcome.fails_clearly(2, &["2:lunch:panic", "RANK:STAGE:ACTION", "unset it"]);
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

/// An older driver on one host: that rank says so, and all end before anything is compiled.
#[test]
fn g5_g_a_driver_that_lacks_a_function_on_one_rank() {
    let without = "cuDeviceGetUuid_v2";
    let defines = ["DEVICES=2", "INIT=0", "MAJOR=9"];
    let (whole, old) = (Driver::new(&defines, None), Driver::new(&defines, Some(without)));
    let path = |driver: &Driver| driver.dir().display().to_string();
    let work = Work::new();
    let job = mpirun(RANKS).args(["warmup", "--model", "kimi-k3", "--into", "ranks", "--cache-dir"]);
    let job = job.args([&work.path("cache")]).env("LOCKSTEP_NVRTC", "/nowhere").env("LD_LIBRARY_PATH", &path(&whole));
    let outcome = job.env_of(2, "LD_LIBRARY_PATH", &path(&old)).run();
    let outcome = outcome.fails_clearly(3, &["too old", without]);
    assert_blamed(&outcome, 2);
}
