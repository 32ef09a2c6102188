//! Chunks that travel while others are computed: the bits of one after the other, whole steps and declared chunks, in buffers of
//! rubbish, and the ends that such a step can come to. Ranks share a GPU, over MPI or storing into each other's memory; over two
//! GPUs NCCL carries the same, or nothing does.

use super::{answer, assert_answers, with_exact_rows};
use crate::bits::{assert_same_file, tokens};
use crate::support::checkpoint::Geometry;
use crate::support::compare::{Tolerance, assert_rows};
use crate::support::fixtures;
use crate::support::gpu::{GPU_BACKENDS, on_gpus};
use crate::support::launch::{FAILURE_LIMIT, Outcome};
use crate::support::made::{Choice, Random, S, random_checkpoint};
use crate::support::run::{Done, Run, Work};

/// Ranks on one GPU, over MPI.
fn sharing<'a>(run: &Run<'a>) -> Run<'a> {
    run.clone().key("cluster", "share_gpus", "true").option("transport", "host")
}

/// Ranks on one GPU, which store into each other's memory.
fn storing<'a>(run: &Run<'a>) -> Run<'a> {
    run.clone().key("cluster", "share_gpus", "true").option("transport", "nvlink")
}

/// A GPU a rank, over NVLink.
fn storing_apart<'a>(run: &Run<'a>) -> Run<'a> {
    run.clone().option("transport", "nvlink")
}

/// A GPU a rank, over NCCL.
fn apart<'a>(run: &Run<'a>) -> Run<'a> {
    run.clone().option("transport", "nccl")
}

fn overlapping<'a>(run: &Run<'a>, asked: &str) -> Run<'a> {
    run.clone().key("dispatch", "overlap", asked)
}

/// Runs with chunks that overlap and with chunks that don't, and compares: the same file, and the same rows and bytes. Gives the
/// one that overlaps, of `num_chunks` chunks a step.
#[track_caller]
fn same_in_both(run: &Run<'_>, num_chunks: u64, what: &str) -> Done {
    let [off, on] = ["off", "on"].map(|asked| overlapping(run, asked).succeed());
    assert!(on.report.at("/decided/layers/0/no_overlap").is_null(), "{what}");
    assert_eq!(off.report.at("/decided/layers/0/no_overlap"), "dispatch.overlap: off", "{what}");
    assert_same_file(&on, &off, what);
    for field in ["rows_sent", "rows_received", "dispatch_bytes_sent", "links/combine_scale_up_bytes"] {
        assert_eq!(on.report.by_rank(field), off.report.by_rank(field), "{what}: {field}");
    }
    assert_eq!(on.report.count("/layers/0/chunks"), num_chunks, "{what}");
    on
}

/// Whole steps that are cut: experts of many rows, and experts whose few rows are more than a chunk's order over K is for. Ranks
/// bring different numbers of tokens, one none.
fn cut_steps(split: &[usize], backends: &[&str], prepare: for<'a> fn(&Run<'a>) -> Run<'a>) {
    const HIDDEN: usize = 256;
    let work = Work::new();
    let geometry = Geometry { num_experts: 8, hidden: HIDDEN, intermediate: 128, num_topk: 2, num_layers: 1 };
    let checkpoint = work.checkpoint(&random_checkpoint(geometry, 7));
    let num_tokens: usize = split.iter().sum();
    // Expert 5 has about 20 rows of a step of 700 tokens, and 10 of its half.
    let mut choice = Choice::default();
    for token in 0..num_tokens {
        let few = if token % 37 == 0 { 5 } else { -1 };
        choice.push(&[(token % 5) as i64, few], &[0.5, 0.25]);
    }
    let run = Run::new(&work, &checkpoint, &Random::new(11).matrix(num_tokens, HIDDEN, 1.0)).choice(&choice);
    let run = run.ranks(split.len()).split(split).steps(3);
    for backend in backends {
        for (activations, combine) in [("bf16", "rank"), ("quantised", "slot")] {
            let run = prepare(&on_gpus(&run, backend)).activations(activations).option("combine", combine);
            same_in_both(&run, 3 * 2, &format!("{backend} {activations} {combine} {split:?}"));
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_overlap_of_cut_steps_gives_the_bits_of_whole_ones() {
    cut_steps(&[700, 0, 513], &["mma_sync"], sharing);
    cut_steps(&[17, 700], &["wgmma"], sharing);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_overlap_over_nvlink_of_cut_steps_gives_the_bits_of_whole_ones() {
    cut_steps(&[17, 700], &["wgmma"], storing);
    cut_steps(&[700, 0, 513], &["mma_sync"], storing);
    cut_steps(&[0, 600, 513, 1], &["mma_sync"], storing);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_overlap_of_cut_steps_gives_the_bits_of_whole_ones() {
    for split in [[700, 513], [700, 0]] {
        cut_steps(&split, &GPU_BACKENDS, apart);
        cut_steps(&split, &GPU_BACKENDS, storing_apart);
    }
}

/// The whole block of a fixture in chunks that were declared; the last with rubbish in the buffers before each.
fn declared_chunks(name: &str, backend: &str, ranks: usize, prepare: for<'a> fn(&Run<'a>) -> Run<'a>) {
    let work = Work::new();
    let run = Run::new(&work, &fixtures::checkpoint(name), &tokens(&fixtures::named(name)));
    let run = prepare(&on_gpus(&run.option("part", "block").without("activation"), backend)).ranks(ranks).steps(2);
    for (activations, combine, chunk_tokens) in [("bf16", "rank", "5"), ("quantised", "slot", "1")] {
        let run = run.clone().activations(activations).option("combine", combine).option("chunk-tokens", chunk_tokens);
        let what = format!("{name} {backend} {activations} {combine} R={ranks}");
        let chunks = 37_u64.div_ceil(ranks as u64).div_ceil(chunk_tokens.parse().expect("a number"));
        let done = same_in_both(&run, 2 * chunks, &what);
        let poisoned = overlapping(&run, "on").env("LOCKSTEP_FAULT", "*:experts:poison").succeed();
        assert_same_file(&poisoned, &done, &format!("{what}, poisoned"));
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_overlap_of_declared_chunks_changes_no_bit_k3_tiny() {
    declared_chunks("k3-tiny", "mma_sync", 3, sharing);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_overlap_of_declared_chunks_changes_no_bit_dsv3_mixed() {
    declared_chunks("modelopt-dsv3-mixed", "wgmma", 2, sharing);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_overlap_over_nvlink_of_declared_chunks_changes_no_bit() {
    declared_chunks("k3-tiny", "mma_sync", 3, storing);
    declared_chunks("modelopt-dsv3-mixed", "wgmma", 2, storing);
    declared_chunks("k3-tiny", "mma_sync", 5, storing);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_overlap_of_declared_chunks_changes_no_bit() {
    for prepare in [apart, storing_apart] {
        declared_chunks("k3-tiny", "mma_sync", 2, prepare);
        declared_chunks("modelopt-qwen3-tiny", "wgmma", 2, prepare);
    }
}

/// Chunks over nvlink give the file of whole steps over MPI.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_overlap_over_nvlink_gives_the_file_of_mpi() {
    let work = Work::new();
    let run = Run::new(&work, &fixtures::checkpoint("k3-tiny"), &tokens(&fixtures::named("k3-tiny")));
    let run = on_gpus(&run.option("part", "block").without("activation"), "mma_sync").ranks(4).steps(3);
    let run = run.activations("quantised").option("combine", "slot");
    let wanted = overlapping(&sharing(&run), "off").succeed();
    let found = overlapping(&storing(&run).option("chunk-tokens", "2"), "on").succeed();
    assert!(found.report.at("/decided/layers/0/no_overlap").is_null());
    assert_same_file(&found, &wanted, "nvlink in chunks, MPI whole");
}

/// Tokens that are passed on in a node, in either hop beside experts.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_overlap_in_two_levels_changes_no_bit() {
    let work = Work::new();
    let run = Run::new(&work, &fixtures::checkpoint("k3-tiny"), &tokens(&fixtures::named("k3-tiny")));
    let run = sharing(&on_gpus(&run.option("part", "block").without("activation"), "mma_sync")).ranks(3);
    let run = run.key("cluster", "scale_up_ranks", "2").key("dispatch", "levels", "two").option("chunk-tokens", "4");
    same_in_both(&run.activations("bf16"), 4, "two levels");
}

/// Cases A1 and A3: ranks that bring nothing, and experts that get nothing. A4: everything to one expert. B6 and B7: an expert
/// twice, and masked slots.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_overlap_of_uneven_steps() {
    uneven_steps(sharing);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_overlap_over_nvlink_of_uneven_steps() {
    uneven_steps(storing);
}

fn uneven_steps(prepare: for<'a> fn(&Run<'a>) -> Run<'a>) {
    let work = Work::new();
    let s = S::new(4, 128, 128).topk(2);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let half = [0.5, 0.5];
    let cases: [(&str, &[i64], f64); 4] =
        [("A3", &[3, -1], 4.0), ("A4", &[0, -1], 0.5), ("B6", &[1, 1], 2.0), ("B7", &[-1, -1], 0.0)];
    for (case, ids, factor) in cases {
        for split in [[40, 0, 9], [0, 0, 20]] {
            let num_tokens = split.iter().sum();
            let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0));
            let run = run.choice(&Choice::uniform(num_tokens, ids, &half)).ranks(3).split(&split);
            let run = with_exact_rows(&prepare(&on_gpus(&run, "mma_sync"))).activations("bf16");
            let run = overlapping(&run.option("chunk-tokens", "7"), "on");
            assert_answers(run.succeed().layer(0), 0, "bf16", &vec![factor; num_tokens], case);
        }
    }
    // Past the smallest step that is cut, with `auto`, which cuts where experts keep enough rows.
    let num_tokens = 2048;
    let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0)).choice(&Choice::single(vec![0; num_tokens]));
    let run = overlapping(&prepare(&on_gpus(&run.ranks(2), "wgmma")), "auto").activations("quantised");
    let done = with_exact_rows(&run).succeed();
    assert_eq!(done.report.count("/layers/0/chunks"), 2);
    assert_rows(done.layer(0), 0, &vec![answer("quantised"); num_tokens], Tolerance::Relative(1e-6), "auto");
}

/// A run that a fault breaks.
fn broken(fault: &str, prepare: for<'a> fn(&Run<'a>) -> Run<'a>) -> Outcome {
    broken_of(3, fault, prepare)
}

fn broken_of(ranks: usize, fault: &str, prepare: for<'a> fn(&Run<'a>) -> Run<'a>) -> Outcome {
    let work: &'static Work = Box::leak(Box::new(Work::new()));
    let run = Run::new(work, &fixtures::checkpoint("k3-tiny"), &tokens(&fixtures::named("k3-tiny")));
    let run =
        prepare(&on_gpus(&run.without("activation"), "mma_sync")).ranks(ranks).steps(20).option("chunk-tokens", "5");
    let run = overlapping(&run, "on").key("timeouts", "step_s", "8").env("LOCKSTEP_FAULT", fault);
    let (outcome, output) = run.attempt();
    assert!(output.is_none() && outcome.elapsed < FAILURE_LIMIT, "{fault}: {}", outcome.printed());
    outcome
}

/// A rank that dies, fails, hangs or drifts in mid-step takes all with it.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_overlap_a_rank_ends_in_mid_step() {
    for stage in ["dispatch", "experts", "combine"] {
        assert_eq!(broken(&format!("1:{stage}:kill"), sharing).code, 137, "{stage}");
    }
    broken("2:combine:error", sharing).fails_clearly(3, &["rank 2", "combine", "LOCKSTEP_FAULT"]);
    broken("1:dispatch:hang", sharing).fails_clearly(5, &["rank 1", "timeouts.step_s"]);
    broken("2:dispatch:drift", sharing).fails_clearly(4, &["rank 2 is at", "step 1"]);
}

/// The same where ranks store into each other's memory; devices that are at different steps say so by their flags.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_overlap_over_nvlink_a_rank_ends_in_mid_step() {
    assert_eq!(broken("1:combine:kill", storing).code, 137);
    broken("2:combine:error", storing).fails_clearly(3, &["rank 2", "combine", "LOCKSTEP_FAULT"]);
    broken("1:experts:hang", storing).fails_clearly(5, &["rank 1", "timeouts.step_s"]);
    let drifted = broken("1:combine:drift", storing).expect_code(4);
    assert!(drifted.stderr.contains("but that rank is at layer"), "{}", drifted.printed());
}

/// A rank that hangs in mid-step is named by the device that waits for it.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_overlap_over_nvlink_a_rank_that_hangs_is_named() {
    for stage in ["dispatch", "experts", "combine"] {
        let outcome = broken_of(2, &format!("1:{stage}:hang"), storing_apart);
        assert!(outcome.code == 5 && outcome.stderr.contains("rank 1"), "{stage}: {}", outcome.printed());
    }
}
