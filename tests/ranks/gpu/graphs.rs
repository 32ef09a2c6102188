//! Whole layers that are recorded once and replayed: the same file as of steps that hosts follow, and where there are none.

use super::backends_and_modes;
use crate::bits::{assert_same_file, tokens};
use crate::support::fixtures;
use crate::support::gpu::on_gpus;
use crate::support::made::{Choice, S};
use crate::support::run::{Done, Run, Work};

const STEPS: usize = 5;

fn with_graphs<'a>(run: &Run<'a>, asked: &str) -> Run<'a> {
    run.clone().key("moe", "cuda_graph", asked)
}

/// Every layer of a run was recorded, at most twice, as memory of later layers may move it, and replayed in all other steps.
#[track_caller]
fn assert_replayed(done: &Done, what: &str) {
    let layers = done.report.at("/layers").as_array().expect("layers").len();
    for layer in 0..layers {
        let count = |field: &str| done.report.count(&format!("/layers/{layer}/graph_{field}"));
        let (captures, replays) = (count("captures"), count("replays"));
        assert!((1..=2).contains(&captures), "{what}: layer {layer} was recorded {captures} times");
        assert_eq!(replays + captures, STEPS as u64, "{what}: layer {layer} was replayed {replays} times");
        assert!(done.report.at(&format!("/decided/layers/{layer}/no_cuda_graph")).is_null(), "{what}");
    }
}

/// The block of a fixture, both modes, both combines.
fn give_the_file(name: &str, (ranks, split): (usize, &[usize]), prepare: fn(&Run<'static>) -> Run<'static>) {
    let work: &'static Work = Box::leak(Box::new(Work::new()));
    let base = Run::new(work, &fixtures::checkpoint(name), &tokens(&fixtures::named(name)));
    let base = base.option("part", "block").without("activation").ranks(ranks).steps(STEPS);
    let base = if split.is_empty() { base } else { base.split(split) };
    for (backend, activations) in backends_and_modes() {
        for combine in ["rank", "slot"] {
            let run = prepare(&on_gpus(&base, backend)).activations(activations).option("combine", combine);
            let wanted = with_graphs(&run, "off").succeed();
            assert_eq!(wanted.report.count("/layers/0/graph_replays"), 0);
            let found = with_graphs(&run, "on").succeed();
            let what = format!("{name} {backend} {activations} {combine} R={ranks} {split:?}");
            assert_same_file(&found, &wanted, &what);
            assert_replayed(&found, &what);
            let same =
                |field: &str| assert_eq!(found.report.by_rank(field), wanted.report.by_rank(field), "{what}: {field}");
            ["rows_sent", "rows_received", "dispatch_bytes_sent"].into_iter().for_each(same);
        }
    }
}

fn over_nvlink(run: &Run<'static>) -> Run<'static> {
    run.clone().option("transport", "nvlink")
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_graphs_give_the_file_of_steps_that_hosts_follow_k3_tiny() {
    give_the_file("k3-tiny", (1, &[]), Run::clone);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_graphs_give_the_file_of_steps_that_hosts_follow_dsv3_mixed() {
    give_the_file("modelopt-dsv3-mixed", (1, &[]), Run::clone);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_graphs_give_the_file_of_steps_that_hosts_follow_qwen3_tiny() {
    give_the_file("modelopt-qwen3-tiny", (1, &[]), Run::clone);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_graphs_over_nvlink_give_the_file_of_steps_that_hosts_follow() {
    for split in [&[][..], &[37, 0], &[1, 36]] {
        give_the_file("k3-tiny", (2, split), over_nvlink);
    }
    give_the_file("modelopt-dsv3-mixed", (2, &[]), over_nvlink);
}

/// `num_tokens` that all choose `ids`.
fn give_the_same_rows(num_tokens: usize, ids: [i64; 2]) {
    let work = Work::new();
    let s = S::new(8, 128, 128).topk(2);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let weights = ids.map(|id| if id < 0 { 0.0 } else { 0.5 });
    let choice = Choice::uniform(num_tokens, &ids, &weights);
    let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0)).choice_tensors(&choice.tensors_of(2));
    for (backend, activations) in backends_and_modes() {
        let run = on_gpus(&run.clone().steps(STEPS), backend).activations(activations);
        let [wanted, found] = ["off", "on"].map(|asked| with_graphs(&run, asked).succeed());
        let what = format!("{num_tokens} tokens to {ids:?}, {backend} {activations}");
        assert_same_file(&found, &wanted, &what);
        assert_replayed(&found, &what);
        assert_eq!(found.report.rows_per_expert(0), wanted.report.rows_per_expert(0), "{what}");
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_graphs_a1_no_tokens() {
    give_the_same_rows(0, [0, 1]);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_graphs_b6_repeated_expert() {
    give_the_same_rows(5, [3, 3]);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_graphs_b7_masked_slots() {
    give_the_same_rows(5, [2, -1]);
    give_the_same_rows(5, [-1, -1]);
}

/// A step that is cut into chunks is one that hosts follow.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_graphs_leave_chunks_to_hosts() {
    let work = Work::new();
    let run = Run::new(&work, &fixtures::checkpoint("k3-tiny"), &tokens(&fixtures::named("k3-tiny")));
    let run = on_gpus(&run.option("part", "block").without("activation").steps(STEPS), "mma_sync");
    let run = run.option("chunk-tokens", "7");
    let [wanted, found] = ["off", "on"].map(|asked| with_graphs(&run, asked).succeed());
    assert_same_file(&found, &wanted, "chunks of 7");
    assert_eq!(found.report.count("/layers/0/graph_replays"), 0);
    assert_eq!(found.report.count("/layers/0/chunks"), 6 * STEPS as u64);
}

/// Ranks that share a GPU wait for each other on their hosts, and those that tell each other counts over MPI do too.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_graphs_are_refused_where_hosts_take_part() {
    let work = Work::new();
    let run = Run::new(&work, &fixtures::checkpoint("k3-tiny"), &tokens(&fixtures::named("k3-tiny"))).ranks(3);
    let run =
        on_gpus(&run.option("part", "block").without("activation"), "mma_sync").key("cluster", "share_gpus", "true");
    for (transport, told) in [("host", "travel over host"), ("nvlink", "ranks share a GPU")] {
        let run = run.clone().option("transport", transport);
        with_graphs(&run, "on").fails_with(2, &["moe.cuda_graph: on", told, "moe.cuda_graph: off"]);
        let done = with_graphs(&run, "auto").succeed();
        let why = done.report.at("/decided/layers/0/no_cuda_graph").as_str().expect("a reason").to_owned();
        assert!(why.contains(told), "{why}");
        assert!(done.outcome.stdout.contains("no CUDA graph"), "{}", done.outcome.printed());
    }
}
