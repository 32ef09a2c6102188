//! Dispatch in two levels on pretended nodes (`cluster.scale_up_ranks`): the bits of one level, a token once a node, and the
//! cases that hold in one level.

use std::time::Duration;

use crate::bits::{assert_same_file, tokens};
use crate::support::compare::{Tolerance, assert_rows};
use crate::support::directed;
use crate::support::fixtures;
use crate::support::launch::{Outcome, mpirun};
use crate::support::made::{Choice, Random, S, S_ANSWER_W4A16, random_checkpoint};
use crate::support::report::Report;
use crate::support::run::{Done, Run, Work};
use crate::support::scene::Scene;
use crate::support::{checkpoint::Geometry, tensor::Tensor};

/// A world: ranks, and how many in a row stand for a node.
type World = (usize, usize);

/// Two nodes of two; two and one; three and two, where the third has no equal; one rank a node.
const WORLDS: [World; 4] = [(4, 2), (3, 2), (5, 3), (3, 1)];

fn on<'a>(run: &Run<'a>, (ranks, scale_up_ranks): World, levels: &str) -> Run<'a> {
    let run = run.clone().ranks(ranks).key("cluster", "scale_up_ranks", &scale_up_ranks.to_string());
    run.key("dispatch", "levels", levels)
}

fn in_two<'a>(run: &Run<'a>, world: World) -> Run<'a> {
    on(run, world, "two")
}

/// Runs in both levels and compares: the same file. Gives the run in one, and in two.
#[track_caller]
fn same_in_both(run: &Run<'_>, world: World, what: &str) -> [Done; 2] {
    let [one, two] = ["one", "two"].map(|levels| on(run, world, levels).succeed());
    assert_eq!(two.report.at("/decided/layers/0/levels"), "two", "{what}");
    assert_same_file(&two, &one, &format!("{what} on {world:?}"));
    for field in ["rows_received", "links/combine_scale_up_bytes", "links/combine_scale_out_bytes"] {
        assert_eq!(two.report.by_rank(field), one.report.by_rank(field), "{what} on {world:?}: {field}");
    }
    [one, two]
}

/// Every layer of a fixture, in both ways to combine, on pretended nodes.
fn fixture_gives_the_bits_of_one_level(name: &str) {
    let work = Work::new();
    let fixture = fixtures::named(name);
    let run = Run::new(&work, &fixtures::checkpoint(name), &tokens(&fixture)).without("activation");
    let run = run.option("part", "block").backend("simd");
    for combine in ["slot", "rank"] {
        for world in [(4, 2), (3, 2)] {
            same_in_both(&run.clone().key("moe", "combine", combine), world, &format!("{name}, combine {combine}"));
        }
    }
}

#[test]
fn dsv3_tiny_gives_the_bits_of_one_level() {
    fixture_gives_the_bits_of_one_level("modelopt-dsv3-tiny");
}

#[test]
fn dsv3_mixed_gives_the_bits_of_one_level() {
    fixture_gives_the_bits_of_one_level("modelopt-dsv3-mixed");
}

#[test]
fn qwen3_tiny_gives_the_bits_of_one_level() {
    fixture_gives_the_bits_of_one_level("modelopt-qwen3-tiny");
}

#[test]
fn k3_tiny_gives_the_bits_of_one_level() {
    fixture_gives_the_bits_of_one_level("k3-tiny");
}

/// Other worlds, payloads, chunks and rows in bf16 on one fixture.
#[test]
fn every_way_to_travel_gives_the_bits_of_one_level() {
    let work = Work::new();
    let fixture = fixtures::named("modelopt-qwen3-tiny");
    let run = Run::new(&work, &fixtures::checkpoint(fixture.name), &tokens(&fixture)).without("activation");
    let run = run.backend("simd").activations("quantised");
    for world in WORLDS {
        same_in_both(&run, world, "quantised");
    }
    for payload in ["f32", "bf16", "nvfp4"] {
        let run = run.clone().key("dispatch", "payload", payload).key("moe", "combine", "rank");
        let chunked = run.key("dispatch", "chunk_tokens", "3").key("dispatch", "combine_dtype", "bf16");
        same_in_both(&chunked.split(&[30, 0, 1, 5, 1]), (5, 3), &format!("payload {payload} in chunks"));
    }
    let rounds = in_two(&run, (5, 3)).env("LOCKSTEP_FAULT", "*:start:round_bytes=1000").succeed();
    assert_same_file(&rounds, &on(&run, (5, 3), "one").succeed(), "in many rounds");
    // With `slot` the bits do not depend on the ranks either.
    assert_same_file(&rounds, &run.succeed(), "one rank alone");
}

/// Eight ranks on four nodes.
#[test]
fn eight_ranks_on_four_nodes_give_the_bits_of_one_level() {
    let work = Work::new();
    let fixture = fixtures::named("modelopt-dsv3-mixed");
    let run = Run::new(&work, &fixtures::checkpoint(fixture.name), &tokens(&fixture)).without("activation");
    for combine in ["slot", "rank"] {
        let run = run.clone().backend("simd").key("moe", "combine", combine);
        let [one, two] = same_in_both(&run, (8, 2), &format!("combine {combine}"));
        let crossed = |done: &Done| done.report.by_rank("links/dispatch_scale_out_bytes").iter().sum::<u64>();
        assert!(crossed(&two) < crossed(&one), "tokens cross to fewer places");
    }
}

/// The rank that owns an expert: blocks as even as can be.
fn owner(expert: usize, num_experts: usize, num_ranks: usize) -> usize {
    let mut end = 0;
    (0..num_ranks)
        .find(|rank| {
            end += num_experts / num_ranks + usize::from(*rank < num_experts % num_ranks);
            expert < end
        })
        .expect("every expert is owned")
}

/// What goes over each kind of link is what the ids say: to other nodes once a node, within them once a rank.
#[test]
fn bytes_over_links_are_counted_from_the_ids() {
    let work = Work::new();
    let geometry = Geometry { num_experts: 22, hidden: 64, intermediate: 32, num_topk: 4, num_layers: 1 };
    let checkpoint = work.checkpoint(&random_checkpoint(geometry, 5));
    let num_tokens = 90;
    let run = Run::new(&work, &checkpoint, &Random::new(3).matrix(num_tokens, 64, 1.0)).export_topk();
    let run = run.backend("simd").activations("bf16").key("dispatch", "payload", "bf16").key("moe", "combine", "slot");
    for (ranks, per_node) in [(4, 2), (5, 3), (3, 1), (8, 2)] {
        let done = in_two(&run, (ranks, per_node)).succeed();
        // bf16 values, an id and a weight a slot, in 16s.
        let token_bytes = (64u64 * 2 + 4 * 8).next_multiple_of(16);
        let ids = done.exported["layers.0.topk_idx"].integers();
        let node = |rank: usize| rank / per_node;
        let (mut scale_up, mut scale_out) = (vec![0; ranks], vec![0; ranks]);
        for (token, slots) in ids.chunks_exact(4).enumerate() {
            let home = owner(token, num_tokens, ranks);
            let unique = |places: &mut dyn Iterator<Item = usize>| -> Vec<usize> {
                let mut places: Vec<usize> = places.collect();
                places.sort_unstable();
                places.dedup();
                places
            };
            let owners = || slots.iter().map(|id| owner(usize::try_from(*id).expect("an expert"), 22, ranks));
            for reached in unique(&mut owners().map(node)) {
                scale_out[home] += token_bytes * u64::from(reached != node(home));
            }
            for rank in unique(&mut owners()) {
                // Whoever is in the home's place there, or a rank that takes its turn.
                let (place, size) = (home % per_node, (ranks - node(rank) * per_node).min(per_node));
                let place = if place < size { place } else { (place + node(home)) % size };
                let forwarder = node(rank) * per_node + place;
                scale_up[forwarder] += token_bytes * u64::from(rank != forwarder);
            }
        }
        let links = |field: &str| done.report.by_rank(&format!("links/dispatch_{field}_bytes"));
        assert_eq!(links("scale_out"), scale_out, "{ranks} ranks, {per_node} a node: to other nodes");
        assert_eq!(links("scale_up"), scale_up, "{ranks} ranks, {per_node} a node: within nodes");
        assert!(scale_out.iter().sum::<u64>() > 0, "or this test sees nothing");
        let sent: u64 = done.report.by_rank("rows_sent").iter().sum();
        let tokens = (scale_up.iter().sum::<u64>() + scale_out.iter().sum::<u64>()) / token_bytes;
        assert_eq!(sent, tokens, "{ranks} ranks, {per_node} a node: tokens that were sent");
        assert!(done.outcome.stdout.contains("nodes: dispatch") || done.outcome.stderr.contains("nodes: dispatch"));
    }
}

/// `auto` takes two levels where several nodes hold several ranks, and says so.
#[test]
fn auto_follows_the_nodes() {
    let work = Work::new();
    let s = S::new(4, 128, 128);
    let run = Run::new(&work, &work.checkpoint(&s.checkpoint()), &s.tokens(6, 1.0))
        .choice(&Choice::single((0..6).map(|token| token % 4)));
    for (world, levels) in [((3, 2), "two"), ((3, 1), "one"), ((3, 3), "one")] {
        let done = on(&run, world, "auto").succeed();
        assert_eq!(done.report.at("/decided/layers/0/levels"), levels, "{world:?}");
        let said = done.outcome.stderr.contains("over host in two levels, preferred by");
        assert_eq!(said, levels == "two", "{world:?}: {}", done.outcome.printed());
    }
    let host = run.clone().ranks(2).succeed();
    assert_eq!(host.report.at("/decided/layers/0/levels"), "one", "ranks of one host");
    assert_eq!(host.report.count("/decided/num_nodes"), 1);
    // Buffers of those that pass on are planned.
    let planned = |levels: &str| on(&run, (4, 2), levels).succeed().report.by_rank("planned_bytes");
    for (one, two) in planned("one").into_iter().zip(planned("two")) {
        assert!(two > one, "{two} bytes planned in two levels, {one} in one");
    }
}

#[track_caller]
fn assert_s(done: &Done, layer: usize, factors: &[f64], what: &str) {
    let wanted: Vec<f64> = factors.iter().map(|factor| factor * S_ANSWER_W4A16).collect();
    assert_rows(done.layer(layer), 0, &wanted, Tolerance::Relative(1e-6), what);
}

fn s_run<'a>(work: &'a Work, s: S, num_tokens: usize) -> Run<'a> {
    let checkpoint = work.checkpoint(&s.checkpoint());
    Run::new(work, &checkpoint, &s.tokens(num_tokens, 1.0)).backend("simd").activations("bf16")
}

#[test]
fn a1_ranks_without_tokens() {
    let work = Work::new();
    for (num_experts, split) in [(8, &[0, 7, 0, 1][..]), (8, &[0, 0, 0, 0]), (8, &[5, 0, 0, 0]), (6, &[0, 3, 0])] {
        let num_tokens: usize = split.iter().sum();
        let choice = Choice::uniform(num_tokens, &[0, 1], &[0.5, 0.5]);
        let run = s_run(&work, S::new(num_experts, 128, 128).topk(2), num_tokens).choice_tensors(&choice.tensors_of(2));
        let done = in_two(&run, (split.len(), 2)).split(split).steps(50).succeed();
        let what = format!("E={num_experts} T={split:?}");
        assert_eq!(done.layer(0).shape, [num_tokens, 128], "{what}");
        assert_s(&done, 0, &vec![1.5; num_tokens], &what);
        let mut rows = vec![0; num_experts];
        rows[..2].fill(50 * num_tokens as u64);
        assert_eq!(done.report.rows_per_expert(0), rows, "{what}: no padding is counted");
    }
}

/// One way only, all to one rank, and nothing at all, in turn.
#[test]
fn a3_one_sided_traffic() {
    let (work, steps) = (Work::new(), 1000);
    let s = S::new(3, 128, 128).layers(3);
    let choices = directed::alternating_steps(12, 2, 1);
    let run = s_run(&work, s, 12).choice_tensors(&choices).split(&[4, 4, 4]);
    let done = in_two(&run, (3, 2)).steps(steps).succeed();
    assert_s(&done, 0, &[4.0; 12], "all to expert 2");
    assert_s(&done, 1, &[2.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "only rank 0 to expert 1");
    assert_s(&done, 2, &[0.0; 12], "no traffic at all");
    assert_eq!(done.report.count("/steps/count"), steps as u64);
}

#[test]
fn a4_everything_to_one_expert_and_over_the_capacity() {
    let work = Work::new();
    let num_tokens = 4 * 2304;
    let run = s_run(&work, S::new(4, 128, 128), num_tokens).choice(&Choice::single(vec![3; num_tokens]));
    let done = in_two(&run, (4, 2)).succeed();
    assert_s(&done, 0, &vec![8.0; num_tokens], "everything to expert 3");
    assert_eq!(done.report.rows_per_expert(0), [0, 0, 0, 9216]);

    let run = s_run(&work, S::new(4, 128, 128), 1028).choice(&Choice::single((0..1028).map(|token| token % 4)));
    let run = in_two(&run, (4, 2)).split(&[1025, 1, 1, 1]).key("dispatch", "num_max_tokens_per_rank", "1024");
    run.fails(&["1025", "1024", "rank 0", "num_max_tokens_per_rank"]);
    let done = run.key("dispatch", "chunk_tokens", "512").succeed();
    let factors: Vec<f64> = (0..1028).map(|token| f64::from(1 << (token % 4))).collect();
    assert_s(&done, 0, &factors, "chunks of 512");
    assert_eq!(done.report.layer(0)["chunks"], 3);
}

#[test]
fn b1_experts_do_not_divide_by_ranks_or_nodes() {
    let work = Work::new();
    for (num_experts, world) in [(5, (4, 2)), (7, (3, 2)), (2, (4, 2)), (1, (5, 3))] {
        let experts: Vec<usize> = std::iter::repeat_n(num_experts - 1, world.0).chain(0..num_experts).collect();
        let factors: Vec<f64> = experts.iter().map(|&expert| f64::from(1 << expert)).collect();
        let run = s_run(&work, S::new(num_experts, 128, 128), experts.len()).choice(&Choice::single(experts));
        let done = in_two(&run, world).succeed();
        let what = format!("E={num_experts} on {world:?}");
        assert_s(&done, 0, &factors, &what);
        assert_eq!(done.report.rows_per_expert(0).iter().sum::<u64>(), factors.len() as u64, "{what}");
    }
}

#[test]
fn b6_repeated_expert() {
    let work = Work::new();
    for (ids, weights, factor) in [(&[3, 3][..], &[0.25, 0.75][..], 8.0), (&[0, 3, 0], &[0.25, 0.5, 0.25], 4.5)] {
        let run = s_run(&work, S::new(4, 128, 128).topk(ids.len()), 4).choice(&Choice::uniform(4, ids, weights));
        for combine in ["slot", "rank"] {
            let done = in_two(&run, (4, 2)).key("moe", "combine", combine).succeed();
            assert_s(&done, 0, &[factor; 4], &format!("ids {ids:?}, combine {combine}"));
        }
    }
}

#[test]
fn b7_masked_slots_and_ids_out_of_range() {
    let work = Work::new();
    let s = S::new(4, 128, 128).topk(2);
    let half = [0.5, 0.5];
    let choice = Choice::new(&[(&[-1, 2], &half), (&[-1, -1], &half), (&[2, -1], &half), (&[-1, -1], &half)]);
    let done = in_two(&s_run(&work, s, 4).choice(&choice), (3, 2)).succeed();
    assert_s(&done, 0, &[2.0, 0.0, 2.0, 0.0], "masked slots");
    assert_eq!(done.report.rows_per_expert(0), [0, 0, 2, 0]);
    let live = Choice::uniform(40, &[-1, 2], &half);
    let mut among = Choice::default();
    (0..400).for_each(|token| among.push(if token % 10 == 0 { &[-1, 2] } else { &[-1, -1] }, &half));
    let counters = |choice: &Choice, num_tokens: usize| {
        let report = in_two(&s_run(&work, s, num_tokens).choice(choice), (4, 2)).succeed().report;
        ["rows_sent", "rows_received", "dispatch_bytes_sent"].map(|field| report.by_rank(field).iter().sum::<u64>())
    };
    assert_eq!(counters(&among, 400), counters(&live, 40), "masked tokens add no rows and no bytes");
    let mut bad = Choice::uniform(5, &[0, 1], &half);
    bad.push(&[4, 0], &half);
    in_two(&s_run(&work, s, 6).choice(&bad), (4, 2)).fails(&["token", "slot 0", "4"]);
}

#[test]
fn h1_sums_follow_the_slots_and_repeat() {
    let work = Work::new();
    let (s, checkpoint, choice) = directed::cancelling_slots();
    let checkpoint = work.checkpoint(&checkpoint);
    let run = Run::new(&work, &checkpoint, &s.tokens(5, 1.0)).choice(&choice).backend("simd").activations("bf16");
    for world in WORLDS {
        let done = in_two(&run, world).key("moe", "combine", "slot").steps(20).succeed();
        assert_s(&done, 0, &[1.0; 5], &format!("{world:?}"));
    }
    let geometry = Geometry { num_experts: 8, hidden: 256, intermediate: 128, num_topk: 8, num_layers: 1 };
    let random = work.checkpoint(&random_checkpoint(geometry, 7));
    let batch: Tensor = Random::new(11).matrix(50, 256, 1.0);
    let run = in_two(&Run::new(&work, &random, &batch).backend("simd").split(&[33, 17, 0, 0]), (4, 2));
    let first = run.succeed();
    for steps in [1, 50] {
        assert_same_file(&run.clone().steps(steps).succeed(), &first, &format!("{steps} steps"));
    }
    assert!(first.layer(0).floats().iter().any(|&value| value != 0.0), "an output of zeros says nothing");
}

/// Rank 2 of four on two nodes with a fault.
fn faulty(fault: &str) -> Outcome {
    let scene = Scene::new(
        "cluster: {scale_up_ranks: 2}\ndispatch: {levels: two}\ntimeouts: {step_s: 4, start_s: 10, load_s: 4}",
    );
    let outcome = scene.run(mpirun(4)).env("LOCKSTEP_FAULT", fault).env("LOCKSTEP_START_S", "10").run();
    assert_ne!(outcome.code, 0, "{fault}: {}", outcome.printed());
    assert_eq!(scene.left_over(), Vec::<String>::new(), "{fault}: {}", outcome.printed());
    assert!(outcome.elapsed < Duration::from_secs(30), "{fault}: {}", outcome.printed());
    outcome
}

/// A rank that dies, fails or is stuck on either side of a hop takes all with it.
#[test]
fn g5_a_rank_ends_in_mid_step() {
    for stage in ["dispatch", "forward", "experts", "combine"] {
        faulty(&format!("2:{stage}:error")).fails_clearly(3, &["rank 2", stage, "LOCKSTEP_FAULT"]);
        let panicked = faulty(&format!("2:{stage}:panic"));
        assert_eq!((panicked.code, panicked.error_messages().len()), (101, 1), "{}", panicked.printed());
        assert!(panicked.error_messages()[0].contains("rank 2"), "{}", panicked.printed());
        assert_eq!(faulty(&format!("2:{stage}:kill")).code, 137, "{stage}");
    }
    faulty("2:forward:hang").fails_clearly(5, &["rank 2", "timeouts.step_s"]);
}

/// Drift is an error of that step in the first hop, for all, and in the second, within a node.
#[test]
fn g5_a_rank_drifts_in_either_hop() {
    faulty("2:dispatch:drift").fails_clearly(4, &["rank 2 is at", "step 1"]);
    for (rank, said) in [(2, "rank 3 passes on tokens of"), (3, "rank 3 passes on tokens of"), (0, "rank 1 passes on")]
    {
        let outcome = faulty(&format!("{rank}:forward:drift"));
        outcome.fails_clearly(4, &[said, "of its node", "step 1", "step 0", "chunk 0"]);
    }
}

/// What stores tokens straight where they are read can't pass them on, and refuses to.
#[test]
fn two_levels_over_nvlink_are_refused() {
    let work = Work::new();
    let s = S::new(4, 128, 128);
    let run = in_two(&s_run(&work, s, 4), (2, 2)).key("cluster", "device", "auto").backend("mma_sync");
    let (outcome, output) = run.key("dispatch", "transport", "nvlink").choice(&Choice::single(0..4)).attempt();
    let said = "for transport nvlink: stores tokens straight where they are read; dispatch.levels is two: set it to auto or one";
    assert!(output.is_none() && outcome.stderr.contains(said), "{}", outcome.printed());
}

/// Checked once: what the report says of a rank's links adds up to what it says of its ranks.
#[test]
fn links_add_up_to_what_was_sent() {
    let work = Work::new();
    let run = s_run(&work, S::new(4, 128, 128), 8).choice(&Choice::single((0..8).map(|token| token / 2)));
    let report: Report = in_two(&run, (4, 2)).succeed().report;
    let fields = ["dispatch_scale_up", "dispatch_scale_out", "combine_scale_up", "combine_scale_out"];
    let links = fields.map(|field| report.by_rank(&format!("links/{field}_bytes")));
    for (rank, sent) in report.by_rank("dispatch_bytes_sent").into_iter().enumerate() {
        assert_eq!(links.iter().map(|of_ranks| of_ranks[rank]).sum::<u64>(), sent, "rank {rank}");
    }
}
