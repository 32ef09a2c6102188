//! Tactics that are timed: whatever a rank measures, all ranks run the same, and its bits are those of an untuned run.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::compare::assert_same_bits;
use crate::support::made::{Choice, S};
use crate::support::report::Report;
use crate::support::run::{Done, Run, Work};

/// Experts of the fixture, and the names of the backend's tactics.
const NUM_EXPERTS: usize = 8;
const EVEN: &str = "even";
const COARSE: &str = "coarse";
const LONG_CHUNKS: &str = "long_chunks";

/// S with two experts a token.
fn fixture() -> S {
    S::new(NUM_EXPERTS, 128, 128).topk(2)
}

/// A run of so many tokens a rank, dealt over all experts.
fn run<'a>(work: &'a Work, checkpoint: &Path, ranks: usize, tokens: usize) -> Run<'a> {
    let mut choice = Choice::default();
    for token in 0..ranks * tokens {
        let [one, other] = [token, token + 3].map(|at| i64::try_from(at % NUM_EXPERTS).expect("few experts"));
        choice.push(&[one, other], &[0.5, 0.5]);
    }
    Run::new(work, checkpoint, &fixture().tokens(ranks * tokens, 1.0)).ranks(ranks).choice(&choice).backend("simd")
}

fn tuned(run: Run<'_>) -> Run<'_> {
    run.option("tuning", "on")
}

fn faults<'a>(run: Run<'a>, faults: &[&str]) -> Run<'a> {
    run.env("LOCKSTEP_FAULT", &faults.join(";"))
}

/// What was decided for every number of rows, fewest first.
#[track_caller]
fn decided(report: &Report) -> Vec<Value> {
    let tactics = report.at("/decided/tactics").as_array().expect("a list").clone();
    assert!(!tactics.is_empty(), "nothing was tuned");
    tactics
}

#[track_caller]
fn names(report: &Report) -> Vec<String> {
    decided(report).iter().map(|tuned| tuned["tactic"].as_str().expect("a name").to_owned()).collect()
}

/// The tactic of the most rows is what every rank that computed has run, and nothing else.
#[track_caller]
fn ran_alike(report: &Report) -> String {
    let last = names(report).pop().expect("checked");
    for rank in 0..report.num_ranks() {
        let ran = report.at(&format!("/ranks/{rank}/layers/0/tactics")).as_array().expect("a list");
        let ran: Vec<&str> = ran.iter().map(|ran| ran[0].as_str().expect("a name")).collect();
        assert_eq!(ran, [last.as_str()], "rank {rank}: {}", report.0);
    }
    last
}

#[track_caller]
fn timed_by(report: &Report) -> String {
    let mut by: Vec<String> =
        decided(report).iter().map(|tuned| tuned["timed_by"].as_str().expect("a word").to_owned()).collect();
    by.dedup();
    assert_eq!(by.len(), 1, "one vote a shape, and all alike here: {}", report.0);
    by.remove(0)
}

/// One rank on which the best tactic is the worst turns the choice on all of them, and no bit of the output.
#[test]
fn hazard_06_a_tactic_that_one_rank_times_otherwise() {
    let work = Work::new();
    let checkpoint = work.checkpoint(&fixture().checkpoint());
    for ranks in [2, 4] {
        let untuned = run(&work, &checkpoint, ranks, 8).succeed();
        assert_eq!(untuned.report.at("/decided/tactics"), &Value::Array(Vec::new()));
        assert_eq!(untuned.report.at("/ranks/1/layers/0/tactics/0/0"), EVEN, "the first runs untuned");
        for (slow, wanted) in [([0, 1], LONG_CHUNKS), ([0, 2], COARSE), ([1, 2], EVEN)] {
            let slow = slow.map(|tactic| format!("1:tune:tactic_time={tactic},100000"));
            let done = faults(tuned(run(&work, &checkpoint, ranks, 8)), &[&slow[0], &slow[1]]).succeed();
            assert_eq!(ran_alike(&done.report), wanted, "{ranks} ranks");
            assert!(names(&done.report).iter().all(|name| name == wanted), "{}", done.report.0);
            assert_eq!(done.sha256, untuned.sha256, "{ranks} ranks: {wanted} gives other bits");
        }
    }
}

/// Noise of a rank, up or down, for every number of tokens.
#[test]
fn e1_each_rank_times_alone_and_all_run_one_tactic() {
    let work = Work::new();
    let checkpoint = work.checkpoint(&fixture().checkpoint());
    for (tokens, noise) in [(1, 105), (8, 95), (16, 105), (256, 95), (4096, 105)] {
        let noise = [0, 1]
            .map(|tactic| format!("3:tune:tactic_time={tactic},{}", if tactic == 0 { noise } else { 200 - noise }));
        let done = faults(tuned(run(&work, &checkpoint, 4, tokens)), &[&noise[0], &noise[1]]).succeed();
        ran_alike(&done.report);
        let rows = done.report.at(&format!("/decided/tactics/{}/rows", decided(&done.report).len() - 1)).as_u64();
        assert_eq!(rows, Some([1, 4, 16, 64, 256].into_iter().find(|rows| *rows >= tokens as u64).unwrap_or(256)));
        let untuned = run(&work, &checkpoint, 4, tokens).succeed();
        assert_same_bits(done.layer(0), untuned.layer(0), &format!("{tokens} tokens a rank"));
    }
}

#[test]
fn e1_a_tactic_that_fails_on_one_rank_is_dropped_on_all() {
    let work = Work::new();
    let checkpoint = work.checkpoint(&fixture().checkpoint());
    // Without the failure this would be everyone's choice.
    let favourite = ["*:tune:tactic_time=0,100000", "*:tune:tactic_time=2,100000"];
    let favoured = faults(tuned(run(&work, &checkpoint, 4, 16)), &favourite).succeed();
    assert_eq!(ran_alike(&favoured.report), COARSE);
    let done = faults(tuned(run(&work, &checkpoint, 4, 16)), &[favourite[0], "2:tune:tactic_fails=1"]).succeed();
    assert_eq!(ran_alike(&done.report), LONG_CHUNKS);
    for tuned in decided(&done.report) {
        assert!(
            tuned["dropped"][0].as_str().is_some_and(|text| text.starts_with("coarse failed on rank 2")),
            "{tuned}"
        );
        assert!(tuned["slowest_us"][1][1].is_null() && tuned["slowest_us"][2][1].is_number(), "{tuned}");
    }
    let said = done.outcome.stderr.matches("a tactic is dropped on all ranks: coarse failed on rank 2").count();
    assert_eq!(said, 1, "{}", done.outcome.printed());
    assert_eq!(done.sha256, favoured.sha256);
}

#[test]
fn e1_no_tactic_is_left() {
    let work = Work::new();
    let checkpoint = work.checkpoint(&fixture().checkpoint());
    let all_on_one = faults(tuned(run(&work, &checkpoint, 4, 8)), &["2:tune:tactic_fails=all"]);
    let needles = ["no tactic for lockstep.simd.grouped_gemm", "even failed on rank 2", "LOCKSTEP_FAULT", "--backend"];
    all_on_one.fails_with(3, &needles);
    let one_on_each = ["0:tune:tactic_fails=0", "1:tune:tactic_fails=1", "*:tune:tactic_fails=2"];
    let needles =
        ["even failed on rank 0", "coarse failed on rank 1", "long_chunks failed on ranks 0-1", "moe.tuning: off"];
    faults(tuned(run(&work, &checkpoint, 2, 8)), &one_on_each).fails_with(4, &needles);
}

/// A rank that takes another tactic than all have chosen is found before the first token travels.
#[test]
fn e1_a_rank_that_takes_another_tactic() {
    let work = Work::new();
    let checkpoint = work.checkpoint(&fixture().checkpoint());
    let stray = faults(tuned(run(&work, &checkpoint, 4, 8)), &["*:tune:tactic_fails=1", "2:tune:tactic=1"]);
    // Nothing is decided by which of the others won.
    stray.fails_with(
        4,
        &["the tactics that they chose", "tactics.lockstep.simd.", "coarse on rank 2", "on ranks 0-1, 3"],
    );
}

#[test]
fn e1_one_saved_choice_gives_equal_runs() {
    let work = Work::new();
    let checkpoint = work.checkpoint(&fixture().checkpoint());
    let cache = work.path("cache");
    let run = || tuned(run(&work, &checkpoint, 4, 16)).key("jit", "cache_dir", &cache.display().to_string());
    let first = run().succeed();
    assert_eq!(timed_by(&first.report), "this_session");
    for again in [run().succeed(), faults(run(), &["1:tune:tactic_time=0,100000"]).succeed()] {
        assert_eq!(timed_by(&again.report), "an_earlier_session", "{}", again.outcome.printed());
        assert_eq!(again.report.at("/decided/session"), first.report.at("/decided/session"));
        assert_eq!(names(&again.report), names(&first.report));
        assert_eq!(again.sha256, first.sha256);
    }
}

/// Timings that hold on three of four ranks are not used on any.
#[test]
fn e1_a_stale_timing_on_one_rank_makes_all_time_anew() {
    let work = Work::new();
    let checkpoint = work.checkpoint(&fixture().checkpoint());
    let cache = work.path("cache");
    let run = || -> Done {
        tuned(run(&work, &checkpoint, 4, 8)).key("jit", "cache_dir", &cache.display().to_string()).succeed()
    };
    let bits = run().sha256;
    let file = file_of_rank(&cache, 1);
    type Spoil = fn(&Path, &str);
    let spoilt: [(&str, Spoil); 3] = [
        ("another build", |file, text| fs::write(file, text.replace("build ", "build 0")).expect("written")),
        ("half a file", |file, text| fs::write(file, &text[..text.len() / 2]).expect("written")),
        ("no file", |file, _| fs::remove_file(file).expect("removed")),
    ];
    for (what, spoil) in spoilt {
        spoil(&file, &fs::read_to_string(&file).expect("timings were kept"));
        let anew = run();
        assert_eq!(timed_by(&anew.report), "this_session", "{what}: {}", anew.outcome.printed());
        let said = anew.outcome.stderr.matches("holds no timings of tactics").count();
        assert_eq!(said, usize::from(what == "half a file"), "{what}: {}", anew.outcome.printed());
        let again = run();
        assert_eq!(timed_by(&again.report), "an_earlier_session", "{what}: it was written anew");
        assert_eq!((anew.sha256, again.sha256), (bits.clone(), bits.clone()), "{what}");
    }
}

/// The timings that a rank of this host keeps.
fn file_of_rank(cache: &Path, local_rank: usize) -> PathBuf {
    let host = fs::read_dir(cache).expect("timings were kept").next().expect("of this host").expect("an entry");
    host.path().join(format!("rank{local_rank}/tactics.json"))
}

/// A rank that is late is waited for, one that never comes is named, and one that fails ends all.
#[test]
fn e1_a_rank_that_does_not_finish_tuning() {
    let work = Work::new();
    let checkpoint = work.checkpoint(&fixture().checkpoint());
    let run = || tuned(run(&work, &checkpoint, 3, 8));
    ran_alike(&faults(run(), &["1:tune:delay=2"]).succeed().report);
    let stuck = faults(run(), &["1:tune:hang"]).key("timeouts", "compile_s", "2");
    stuck.fails_with(5, &["rank 1 has not come", "phase tune", "timeouts.compile_s"]);
    faults(run(), &["1:tune:error"]).fails_with(3, &["(rank 1 of 3)", "at tune"]);
}

/// More ranks than experts: who has nothing to time has no say, and stops nobody.
#[test]
fn tuning_with_ranks_that_hold_no_experts() {
    let work = Work::new();
    let s = S::new(2, 128, 128).unit_scales();
    let checkpoint = work.checkpoint(&s.checkpoint());
    let of = || Run::new(&work, &checkpoint, &s.tokens(8, 1.0)).ranks(4).choice(&Choice::single((0..8).map(|t| t % 2)));
    let done = tuned(of().backend("simd")).succeed();
    assert!(!names(&done.report).is_empty());
    assert_eq!(done.sha256, of().backend("simd").succeed().sha256);
    // The reference has one way to compute, and nothing to tune.
    let reference = tuned(of().backend("reference")).succeed();
    assert_eq!(reference.report.at("/decided/tactics"), &Value::Array(Vec::new()));
}
