//! Tokens and rows that are stored into other ranks' memory: over two GPUs, and on one that 3, 8 and 16 ranks share.

use super::{assert_answers, with_exact_rows};
use crate::bits::{assert_same_file, tokens};
use crate::support::fixtures;
use crate::support::gpu::{GPU_BACKENDS, libraries, on_gpus};
use crate::support::launch::{FAILURE_LIMIT, Outcome, mpirun};
use crate::support::made::{Choice, S};
use crate::support::run::{Run, Work};

/// A run whose ranks store into each other's memory.
fn over_nvlink<'a>(run: &Run<'a>) -> Run<'a> {
    run.clone().option("transport", "nvlink")
}

/// All ranks on one GPU.
fn sharing<'a>(run: &Run<'a>) -> Run<'a> {
    run.clone().key("cluster", "share_gpus", "true")
}

/// Tokens in both modes and rows of both kinds: the same file over `other` and over nvlink, on each of `backends`.
fn gives_the_file_of(
    (name, other): (&str, &str),
    backends: &[&str],
    (ranks, split): (usize, &[usize]),
    prepare: fn(&Run<'static>) -> Run<'static>,
) {
    // Lives as long as the runs that borrow it.
    let work: &'static Work = Box::leak(Box::new(Work::new()));
    let base = Run::new(work, &fixtures::checkpoint(name), &tokens(&fixtures::named(name)));
    let base = base.option("part", "block").without("activation").ranks(ranks);
    let base = if split.is_empty() { base } else { base.split(split) };
    for backend in backends {
        for (activations, combine) in [("bf16", "rank"), ("bf16", "slot"), ("quantised", "rank"), ("quantised", "slot")]
        {
            let run = prepare(&on_gpus(&base, backend)).activations(activations).option("combine", combine).steps(3);
            let run = if combine == "slot" { run.option("chunk-tokens", "7") } else { run };
            let [wanted, found] = [other, "nvlink"].map(|transport| {
                let done = run.clone().option("transport", transport).succeed();
                assert_eq!(done.report.at("/decided/layers/0/transport"), transport);
                done
            });
            let what = format!("{name} {backend} {activations} {combine} R={ranks} {split:?}");
            assert_same_file(&found, &wanted, &what);
        }
    }
}

fn loopback(ranks: usize) {
    gives_the_file_of(("k3-tiny", "host"), &["mma_sync"], (ranks, &[]), sharing);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_nvlink_of_3_ranks_gives_the_bits_of_mpi() {
    loopback(3);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_nvlink_of_8_ranks_gives_the_bits_of_mpi() {
    loopback(8);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_nvlink_of_16_ranks_gives_the_bits_of_mpi() {
    loopback(16);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_nvlink_gives_the_bits_of_nccl() {
    gives_the_file_of(("k3-tiny", "nccl"), &GPU_BACKENDS, (2, &[]), Run::clone);
    for split in [[37, 0], [0, 37], [1, 36]] {
        gives_the_file_of(("k3-tiny", "nccl"), &["mma_sync"], (2, &split), Run::clone);
    }
    for name in ["modelopt-dsv3-mixed", "modelopt-qwen3-tiny"] {
        gives_the_file_of((name, "nccl"), &["wgmma"], (2, &[]), Run::clone);
    }
}

/// Random steps of 0 to 512 tokens a rank, four layers in turns: nothing differs, and no memory goes. `LOCKSTEP_TEST_STEPS` and
/// `LOCKSTEP_TEST_SEED` say otherwise how many and which.
fn random_steps(ranks: usize, num_steps: u64, transports: &str) {
    random_steps_of(ranks, (num_steps, 1), transports);
}

/// The same, each step in up to so many chunks that overlap as well.
fn random_steps_of(ranks: usize, (num_steps, chunks): (u64, usize), transports: &str) {
    let setting = |name, default| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (steps, seed) = (setting("LOCKSTEP_TEST_STEPS", num_steps), setting("LOCKSTEP_TEST_SEED", 20_261_130));
    let job = mpirun(ranks).args(["bench", "--travel", "--geometry=kimi-k3", "--json"]);
    let words = [("steps", steps.to_string()), ("seed", seed.to_string()), ("chunks", chunks.to_string())];
    let words = words.map(|(name, value)| format!("--{name}={value}"));
    let job = job.args(words);
    let words = [format!("--transports={transports}")];
    let job = libraries().into_iter().fold(job.args(words), |job, (name, value)| job.env(name, &value));
    let outcome = job.run().expect_code(0);
    let report: serde_json::Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    let compared: Vec<&str> = transports.split(',').collect();
    assert_eq!(report["max_chunks"], chunks, "{report}");
    assert_eq!(report["transports"], serde_json::json!(compared), "{report}");
    assert_eq!((&report["num_steps"], &report["num_different"]), (&steps.into(), &0.into()), "{report}");
    assert!(report["num_tokens"].as_u64().is_some_and(|tokens| tokens > 100 * steps), "{report}");
    assert_eq!(report["memory_change_bytes"], 0, "{report}");
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_nvlink_random_steps_of_3_ranks() {
    random_steps(3, 1000, "host,nvlink");
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_nvlink_random_steps_of_8_ranks() {
    random_steps(8, 300, "host,nvlink");
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_nvlink_random_steps_of_16_ranks() {
    random_steps(16, 100, "host,nvlink");
}

/// Dispatch and combine are replayed on one rank, over MPI's stages and by stores into its own memory, tagged and plain.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_nvlink_travel_of_1_rank_is_replayed() {
    travel_is_replayed(1, "host,nvlink", &["host", "nvlink"]);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_nvlink_travel_is_replayed() {
    travel_is_replayed(2, "nccl,nvlink", &["nvlink"]);
}

/// Of `transports`, those of `replayed` can do without hosts; bits are those of steps that hosts follow.
fn travel_is_replayed(ranks: usize, transports: &str, replayed: &[&str]) {
    let job = mpirun(ranks).args(["bench", "--travel", "--geometry=kimi-k3", "--json", "--repeats=3"]);
    let job = job.args(["--tokens=1,16,17,300".to_owned(), format!("--transports={transports}")]);
    let job = libraries().into_iter().fold(job, |job, (name, value)| job.env(name, &value));
    let outcome = job.run().expect_code(0);
    let report: serde_json::Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 4 * transports.split(',').count(), "{report}");
    for row in rows {
        let is_wanted = replayed.iter().any(|transport| row["transport"] == *transport);
        assert!(row["is_alike"] == true && row["replayed"].is_object() == is_wanted, "{row}");
        assert!(!is_wanted || row["replayed"]["dispatch_us"].as_f64().is_some_and(|us| us > 0.0), "{row}");
    }
}

/// One rank waits on its device, for its own stores: with no host between dispatch, experts and combine of two chunks.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_nvlink_overlapping_random_steps_of_1_rank() {
    random_steps_of(1, (300, 5), "host,nvlink");
}

/// Chunks overlap over each transport, in two lanes and memory that takes turns, and every way gives the same sums.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_nvlink_overlapping_random_steps_of_2_ranks() {
    random_steps_of(2, (300, 5), "host,nvlink");
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_nvlink_overlapping_random_steps_of_3_ranks() {
    random_steps_of(3, (300, 5), "host,nvlink");
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_nvlink_overlapping_random_steps_of_5_ranks() {
    random_steps_of(5, (150, 5), "host,nvlink");
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_nvlink_overlapping_random_steps() {
    random_steps_of(2, (3_000, 5), "nccl,nvlink");
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_nvlink_random_steps() {
    random_steps(2, 10_000, "nccl,nvlink");
}

/// More slots than the layer's top-k: what was set aside at the start is too small, and all ranks make more.
fn grows(ranks: usize, prepare: fn(&Run<'static>) -> Run<'static>) {
    let work: &'static Work = Box::leak(Box::new(Work::new()));
    let s = S::new(4, 128, 128);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let (ids, weights): (Vec<i64>, Vec<f32>) = ((0..40).map(|slot| slot % 4).collect(), vec![0.25; 40]);
    let choice = Choice::uniform(50, &ids, &weights);
    for combine in ["slot", "rank"] {
        let run = Run::new(work, &checkpoint, &s.tokens(50, 1.0)).choice(&choice).ranks(ranks);
        let run = with_exact_rows(&on_gpus(&run, "mma_sync")).option("combine", combine);
        let done = over_nvlink(&prepare(&run)).activations("bf16").steps(3).succeed();
        // 10 slots of each of 1, 2, 4 and 8.
        assert_answers(done.layer(0), 0, "bf16", &[0.25 * 150.0; 50], combine);
        assert!(done.outcome.stderr.contains("memory that other ranks store into grows"), "{}", done.outcome.printed());
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_nvlink_makes_room_for_more_slots() {
    grows(3, sharing);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_nvlink_makes_room_for_more_slots() {
    grows(2, Run::clone);
}

/// A run that a fault breaks.
fn broken(ranks: usize, fault: &str, prepare: fn(&Run<'static>) -> Run<'static>) -> Outcome {
    let work: &'static Work = Box::leak(Box::new(Work::new()));
    let run = Run::new(work, &fixtures::checkpoint("k3-tiny"), &tokens(&fixtures::named("k3-tiny")));
    let run = on_gpus(&run.without("activation").ranks(ranks).steps(20), "mma_sync");
    let run = prepare(&run).key("timeouts", "step_s", "8").env("LOCKSTEP_FAULT", fault);
    let (outcome, output) = over_nvlink(&run).attempt();
    assert!(output.is_none() && outcome.elapsed < FAILURE_LIMIT, "{}", outcome.printed());
    outcome
}

/// Flags carry layer and step: ranks whose devices are at different ones stop, whatever their hosts agreed on.
fn drifts(ranks: usize, prepare: fn(&Run<'static>) -> Run<'static>) {
    let outcome = broken(ranks, "1:combine:drift", prepare).expect_code(4);
    assert!(outcome.stderr.contains("but that rank is at layer"), "{}", outcome.printed());
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_nvlink_drift_is_an_error_of_the_step() {
    drifts(3, sharing);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_nvlink_drift_is_an_error_of_the_step() {
    drifts(2, Run::clone);
}

/// A rank that stops is named by the device that waits for it.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_nvlink_a_rank_that_hangs_is_named() {
    for (stage, flag) in [("experts", "rows"), ("combine", "rows")] {
        let outcome = broken(2, &format!("1:{stage}:hang"), Run::clone);
        let told = format!("rank 0 waited on its GPU for the {flag} of rank 1");
        outcome.fails_clearly(5, &["tokens can't travel over nvlink", &told]);
    }
}

/// A rank that is killed in mid-dispatch or mid-combine takes all with it, and the next run starts as if nothing had been.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_nvlink_a_rank_that_is_killed_ends_all() {
    for _ in 0..num_kills() {
        for stage in ["dispatch", "experts", "combine"] {
            let outcome = broken(2, &format!("1:{stage}:kill"), Run::clone);
            assert_ne!(outcome.code, 0, "{}", outcome.printed());
            assert!(outcome.stderr.contains("signal 9"), "the cause is said: {}", outcome.printed());
        }
    }
    gives_the_file_of(("modelopt-qwen3-tiny", "nccl"), &["mma_sync"], (2, &[]), Run::clone);
}

/// `LOCKSTEP_TEST_REPEATS`, at most 10.
fn num_kills() -> usize {
    std::env::var("LOCKSTEP_TEST_REPEATS").ok().and_then(|text| text.parse().ok()).map_or(10, |n: usize| n.min(10))
}

/// Hazard 3: a rank that can't show its memory, or can't open another's; all are told why, or take the next transport.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_nvlink_a_rank_that_cannot_build_it() {
    for (stage, code) in [("transport", 3), ("join", 3)] {
        let work = Work::new();
        let run = Run::new(&work, &fixtures::checkpoint("k3-tiny"), &tokens(&fixtures::named("k3-tiny")));
        let run = on_gpus(&run.without("activation").ranks(2), "mma_sync");
        let run = run.env("LOCKSTEP_FAULT", &format!("1:{stage}:error"));
        let told = format!("rank 1: rank 1 was told to fail at {stage}");
        over_nvlink(&run).fails_with(code, &["dispatch.transport is nvlink", &told]);
    }
}
