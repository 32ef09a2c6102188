//! Dispatch in two levels between GPUs, over pretended nodes of ranks that share one, and over two that act as two nodes: the
//! bits of one level, the bytes of hosts, and the ends that a step can come to.

use super::{assert_answers, with_exact_rows};
use crate::bits::{assert_same_file, tokens};
use crate::support::fixtures;
use crate::support::gpu::{GPU_BACKENDS, on_gpus};
use crate::support::launch::{FAILURE_LIMIT, Outcome};
use crate::support::made::{Choice, S};
use crate::support::run::{Done, Run, Work};

/// Ranks, and how many in a row stand for a node.
type World = (usize, usize);

/// Two nodes of two; two and one; three and two, where the third has no equal; four nodes of two.
const WORLDS: [World; 4] = [(4, 2), (3, 2), (5, 3), (8, 2)];

/// All ranks on one GPU.
fn sharing<'a>(run: &Run<'a>) -> Run<'a> {
    run.clone().key("cluster", "share_gpus", "true")
}

fn on<'a>(run: &Run<'a>, (ranks, scale_up_ranks): World, levels: &str) -> Run<'a> {
    let run = run.clone().ranks(ranks).key("cluster", "scale_up_ranks", &scale_up_ranks.to_string());
    run.key("dispatch", "levels", levels)
}

/// Runs in both levels and compares: the same file, and the same rows home. Gives the run in two.
#[track_caller]
fn same_in_both(run: &Run<'_>, world: World, transport: &str, what: &str) -> Done {
    let [one, two] = ["one", "two"].map(|levels| {
        let done = on(run, world, levels).succeed();
        assert_eq!(done.report.at("/decided/layers/0/levels"), levels, "{what}");
        assert_eq!(done.report.at("/decided/layers/0/transport"), transport, "{what}");
        done
    });
    assert_same_file(&two, &one, &format!("{what} on {world:?}"));
    for field in ["rows_received", "links/combine_scale_up_bytes", "links/combine_scale_out_bytes"] {
        assert_eq!(two.report.by_rank(field), one.report.by_rank(field), "{what} on {world:?}: {field}");
    }
    two
}

fn of_fixture<'a>(work: &'a Work, name: &str, backend: &str) -> Run<'a> {
    let run = Run::new(work, &fixtures::checkpoint(name), &tokens(&fixtures::named(name)));
    on_gpus(&run.option("part", "block").without("activation"), backend)
}

/// Both payloads, both ways to combine, whole and in chunks.
fn every_way_gives_the_bits_of_one_level(name: &str, backend: &str, worlds: &[World]) {
    let work = Work::new();
    let run = sharing(&of_fixture(&work, name, backend));
    for &world in worlds {
        for (activations, combine) in [("bf16", "rank"), ("quantised", "slot")] {
            let run = run.clone().activations(activations).option("combine", combine).steps(2);
            let run = if combine == "slot" { run.option("chunk-tokens", "5") } else { run };
            same_in_both(&run, world, "host", &format!("{name} {backend} {activations} {combine}"));
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_two_levels_give_the_bits_of_one_level_k3_tiny() {
    every_way_gives_the_bits_of_one_level("k3-tiny", "mma_sync", &WORLDS);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_two_levels_give_the_bits_of_one_level_dsv3_mixed() {
    every_way_gives_the_bits_of_one_level("modelopt-dsv3-mixed", "mma_sync", &WORLDS[..2]);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_two_levels_give_the_bits_of_one_level_qwen3_tiny() {
    every_way_gives_the_bits_of_one_level("modelopt-qwen3-tiny", "wgmma", &WORLDS[1..3]);
}

/// The other halves of payloads and ways to combine, in buffers of rubbish, with ranks that bring nothing.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_two_levels_of_uneven_splits_give_the_bits_of_one_level() {
    let work = Work::new();
    let run = sharing(&of_fixture(&work, "modelopt-qwen3-tiny", "mma_sync"));
    for (activations, payload, combine) in [("bf16", "f32", "slot"), ("quantised", "nvfp4", "rank")] {
        let run = run.clone().activations(activations).option("combine", combine).key("dispatch", "payload", payload);
        let run = run.key("dispatch", "combine_dtype", "f32").split(&[30, 0, 1, 5, 1]).option("chunk-tokens", "3");
        let what = format!("{activations} {payload} {combine}");
        let two = same_in_both(&run, (5, 3), "host", &what);
        let poisoned = on(&run, (5, 3), "two").env("LOCKSTEP_FAULT", "*:experts:poison").succeed();
        assert_same_file(&poisoned, &two, &format!("{what}, poisoned"));
    }
}

/// GPUs count what goes over which links, and how many tokens and rows, as hosts do that send the same forms.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_two_levels_send_what_hosts_send() {
    let (work, fixture) = (Work::new(), fixtures::named("k3-tiny"));
    let run = Run::new(&work, &fixtures::checkpoint(fixture.name), &tokens(&fixture));
    let run = run.without("activation").option("chunk-tokens", "7");
    for (activations, payload, combine) in [("bf16", "bf16", "rank"), ("quantised", "nvfp4", "slot")] {
        let run = run.clone().activations(activations).option("combine", combine).key("dispatch", "payload", payload);
        let run = run.key("dispatch", "combine_dtype", "bf16");
        for world in [(5, 3), (8, 2)] {
            let hosts = on(&run.clone().backend("simd"), world, "two").succeed();
            let gpus = on(&sharing(&on_gpus(&run, "mma_sync")), world, "two").succeed();
            let of_links = |cargo: &str, links: &str| format!("links/{cargo}_{links}_bytes");
            let links = ["dispatch", "combine"].map(|cargo| ["scale_up", "scale_out"].map(|at| of_links(cargo, at)));
            let counters = ["rows_sent", "rows_received", "dispatch_bytes_sent"].map(str::to_owned);
            for field in links.as_flattened().iter().chain(&counters) {
                let (found, wanted) = (gpus.report.by_rank(field), hosts.report.by_rank(field));
                assert_eq!(found, wanted, "{payload} {combine} on {world:?}: {field}");
                assert!(wanted.iter().sum::<u64>() > 0, "{field}: or this test sees nothing");
            }
            let rows = [&gpus, &hosts].map(|done| done.report.rows_per_expert(fixture.layers[0].layer));
            assert_eq!(rows[0], rows[1], "{payload} {combine} on {world:?}");
        }
    }
}

/// Ranks that hold no tokens, over 20 steps.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_two_levels_a1_ranks_without_tokens() {
    let work = Work::new();
    for (num_experts, split) in [(8, &[0, 7, 0, 1][..]), (8, &[0, 0, 0, 0]), (6, &[0, 3, 0])] {
        let s = S::new(num_experts, 128, 128).topk(2);
        let checkpoint = work.checkpoint(&s.checkpoint());
        let num_tokens: usize = split.iter().sum();
        let choice = Choice::uniform(num_tokens, &[0, 1], &[0.5, 0.5]);
        let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0)).choice_tensors(&choice.tensors_of(2));
        let run = with_exact_rows(&sharing(&on_gpus(&run, "mma_sync"))).activations("bf16").split(split).steps(20);
        let done = on(&run, (split.len(), 2), "two").succeed();
        let what = format!("E={num_experts} T={split:?}");
        assert_eq!(done.layer(0).shape, [num_tokens, 128], "{what}");
        assert_answers(done.layer(0), 0, "bf16", &vec![1.5; num_tokens], &what);
        let mut rows = vec![0; num_experts];
        rows[..2].fill(20 * num_tokens as u64);
        assert_eq!(done.report.rows_per_expert(0), rows, "{what}: no padding is counted");
    }
}

/// The same expert twice in a token's top-k counts twice.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_two_levels_b6_repeated_expert() {
    let work = Work::new();
    for (ids, weights, factor) in [(&[3, 3][..], &[0.25, 0.75][..], 8.0), (&[0, 3, 0], &[0.25, 0.5, 0.25], 4.5)] {
        let s = S::new(4, 128, 128).topk(ids.len());
        let checkpoint = work.checkpoint(&s.checkpoint());
        let run = Run::new(&work, &checkpoint, &s.tokens(4, 1.0)).choice(&Choice::uniform(4, ids, weights));
        for combine in ["slot", "rank"] {
            let run = with_exact_rows(&sharing(&on_gpus(&run, "mma_sync"))).option("combine", combine);
            let done = on(&run.activations("quantised"), (4, 2), "two").succeed();
            assert_answers(done.layer(0), 0, "quantised", &[factor; 4], &format!("ids {ids:?}, combine {combine}"));
        }
    }
}

/// Id -1 masks a slot: nothing is computed for it, and nothing travels in either hop.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_two_levels_b7_masked_slots() {
    let work = Work::new();
    let s = S::new(4, 128, 128).topk(2);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let half = [0.5, 0.5];
    let run = |choice: &Choice, num_tokens: usize, world| {
        let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0)).choice(choice);
        on(&with_exact_rows(&sharing(&on_gpus(&run, "mma_sync"))).activations("bf16"), world, "two").succeed()
    };
    let choice = Choice::new(&[(&[-1, 2], &half), (&[-1, -1], &half), (&[2, -1], &half), (&[-1, -1], &half)]);
    let done = run(&choice, 4, (3, 2));
    assert_answers(done.layer(0), 0, "bf16", &[2.0, 0.0, 2.0, 0.0], "masked slots");
    assert_eq!(done.report.rows_per_expert(0), [0, 0, 2, 0]);
    let live = Choice::uniform(40, &[-1, 2], &half);
    let mut among = Choice::default();
    (0..400).for_each(|token| among.push(if token % 10 == 0 { &[-1, 2] } else { &[-1, -1] }, &half));
    let counters = |choice: &Choice, num_tokens: usize| {
        let report = run(choice, num_tokens, (4, 2)).report;
        ["rows_sent", "rows_received", "dispatch_bytes_sent"].map(|field| report.by_rank(field).iter().sum::<u64>())
    };
    assert_eq!(counters(&among, 400), counters(&live, 40), "masked tokens add no rows and no bytes");
}

/// A run over `world` that a fault breaks.
fn broken(world: World, fault: &str, prepare: fn(&Run<'static>) -> Run<'static>) -> Outcome {
    let work: &'static Work = Box::leak(Box::new(Work::new()));
    let run = prepare(&of_fixture(work, "k3-tiny", "mma_sync")).steps(20);
    let run = on(&run, world, "two").key("timeouts", "step_s", "8").env("LOCKSTEP_FAULT", fault);
    let (outcome, output) = run.attempt();
    assert!(output.is_none() && outcome.elapsed < FAILURE_LIMIT, "{fault}: {}", outcome.printed());
    outcome
}

/// Drift is an error of that step in the first hop, for all, and in the second, within a node.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_two_levels_a_rank_drifts_in_either_hop() {
    broken((4, 2), "2:dispatch:drift", sharing).fails_clearly(4, &["rank 2 is at", "step 1"]);
    for (rank, said) in [(3, "rank 3 passes on tokens of"), (0, "rank 1 passes on tokens of")] {
        let outcome = broken((4, 2), &format!("{rank}:forward:drift"), sharing);
        outcome.fails_clearly(4, &[said, "of its node", "step 1", "step 0", "chunk 0"]);
    }
}

/// A rank that dies, fails or is stuck between the hops takes all with it.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_two_levels_a_rank_ends_between_the_hops() {
    broken((4, 2), "2:forward:error", sharing).fails_clearly(3, &["rank 2", "forward", "LOCKSTEP_FAULT"]);
    assert_eq!(broken((4, 2), "2:forward:kill", sharing).code, 137);
    broken((4, 2), "2:forward:hang", sharing).fails_clearly(5, &["rank 2", "timeouts.step_s"]);
}

/// Two GPUs as two nodes over NCCL.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_two_levels_give_the_bits_of_one_level() {
    let work = Work::new();
    for (name, backend) in [("k3-tiny", GPU_BACKENDS[0]), ("modelopt-dsv3-mixed", GPU_BACKENDS[1])] {
        for split in [&[][..], &[37, 0], &[1, 36]] {
            for (activations, combine) in [("bf16", "rank"), ("quantised", "slot"), ("quantised", "rank")] {
                let run = of_fixture(&work, name, backend).activations(activations).option("combine", combine);
                let run = run.option("transport", "nccl").steps(3);
                let run = if split.is_empty() { run } else { run.split(split) };
                let run = if combine == "slot" { run.option("chunk-tokens", "7") } else { run };
                let what = format!("{name} {backend} {activations} {combine} {split:?}");
                let two = same_in_both(&run, (2, 1), "nccl", &what);
                // A node of one rank passes on to itself alone: nothing goes within it.
                assert_eq!(two.report.by_rank("links/dispatch_scale_up_bytes"), [0, 0], "{what}");
            }
        }
    }
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_two_levels_a_rank_that_is_killed_ends_all() {
    for stage in ["dispatch", "forward", "combine"] {
        let outcome = broken((2, 1), &format!("1:{stage}:kill"), Run::clone);
        assert_eq!(outcome.code, 137, "{stage}: {}", outcome.printed());
    }
}
