//! Bits that are promised on GPUs: over ranks and splits with `combine: slot`, over chunks and neighbours with
//! `batch_invariant`, over repeats and with workspaces of rubbish.

use super::{answer, backends_and_modes, with_exact_rows};
use crate::bits::{assert_same_file, tokens};
use crate::support::checkpoint::Geometry;
use crate::support::compare::{Tolerance, assert_rows, assert_same_bits};
use crate::support::directed;
use crate::support::fixtures;
use crate::support::gpu::{GPU_BACKENDS, on_gpus};
use crate::support::made::{Choice, Random, S, random_checkpoint};
use crate::support::run::{Run, Work};
use crate::support::tensor::Tensor;

/// Ranks, tokens of each (empty: even), chunks, and whether it is tried with `batch_invariant`, as chunks have to be.
type Spread = (usize, &'static [usize], Option<usize>, bool);

const ONE_GPU: [Spread; 3] = [(1, &[], Some(1), true), (1, &[], Some(5), true), (1, &[], Some(16), true)];

const TWO_GPUS: [Spread; 6] = [
    (2, &[], None, false),
    (2, &[37, 0], None, false),
    (2, &[0, 37], None, false),
    (2, &[1, 36], None, false),
    (2, &[30, 7], Some(7), true),
    (1, &[], Some(16), true),
];

/// The whole block of all layers of a fixture, in both modes.
fn every_spread_gives_one_file(name: &str, spreads: &[Spread]) {
    let work = Work::new();
    let base = Run::new(&work, &fixtures::checkpoint(name), &tokens(&fixtures::named(name)));
    let base = base.option("part", "block").without("activation").option("combine", "slot");
    for (backend, activations) in backends_and_modes() {
        for batch_invariant in [false, true] {
            let run = on_gpus(&base, backend).activations(activations);
            let run = run.option("batch-invariant", &batch_invariant.to_string());
            let promised: Vec<&Spread> = spreads.iter().filter(|spread| spread.3 == batch_invariant).collect();
            if !promised.is_empty() {
                let first = run.succeed();
                for &&(ranks, split, chunk_tokens, _) in &promised {
                    let mut run = run.clone().ranks(ranks);
                    if !split.is_empty() {
                        run = run.split(split);
                    }
                    if let Some(chunk_tokens) = chunk_tokens {
                        run = run.option("chunk-tokens", &chunk_tokens.to_string());
                    }
                    let what = format!("{name} {backend} {activations} R={ranks} {split:?} chunks {chunk_tokens:?}");
                    assert_same_file(&run.succeed(), &first, &what);
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_chunks_give_one_file_dsv3_mixed() {
    every_spread_gives_one_file("modelopt-dsv3-mixed", &ONE_GPU);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_every_spread_gives_one_file_dsv3_mixed() {
    every_spread_gives_one_file("modelopt-dsv3-mixed", &TWO_GPUS);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_chunks_give_one_file_qwen3_tiny() {
    every_spread_gives_one_file("modelopt-qwen3-tiny", &ONE_GPU);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_every_spread_gives_one_file_qwen3_tiny() {
    every_spread_gives_one_file("modelopt-qwen3-tiny", &TWO_GPUS);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_chunks_give_one_file_k3_tiny() {
    every_spread_gives_one_file("k3-tiny", &ONE_GPU);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_every_spread_gives_one_file_k3_tiny() {
    every_spread_gives_one_file("k3-tiny", &TWO_GPUS);
}

/// Buffers that start as 0xFF bytes, which no sum survives, change nothing.
fn poisoned(ranks: usize) {
    for name in ["modelopt-dsv3-mixed", "k3-tiny"] {
        let work = Work::new();
        let base = Run::new(&work, &fixtures::checkpoint(name), &tokens(&fixtures::named(name)));
        let base = base.option("part", "block").without("activation").ranks(ranks);
        for (backend, activations) in backends_and_modes() {
            let run = on_gpus(&base, backend).activations(activations);
            let poisoned = run.clone().env("LOCKSTEP_FAULT", "*:experts:poison").succeed();
            assert_same_file(&poisoned, &run.succeed(), &format!("{name} {backend} {activations} R={ranks}"));
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_poisoned_workspaces_change_nothing() {
    poisoned(1);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_poisoned_workspaces_change_nothing() {
    poisoned(2);
}

/// Case H1: repeats within a process, of which every one is compared, and in other processes.
fn h1(ranks: usize, split: &[usize]) {
    let work = Work::new();
    for num_topk in [1, 2, 8] {
        let geometry = Geometry { num_experts: 8, hidden: 512, intermediate: 1024, num_topk, num_layers: 1 };
        let checkpoint = work.checkpoint(&random_checkpoint(geometry, 7));
        let run = Run::new(&work, &checkpoint, &Random::new(11).matrix(50, 512, 1.0)).ranks(ranks).split(split);
        for (backend, activations) in backends_and_modes() {
            let run = on_gpus(&run, backend).activations(activations);
            let first = run.succeed();
            let live = first.layer(0).floats().iter().any(|&value| value != 0.0);
            assert!(live, "k={num_topk}: an output of zeros says nothing");
            for steps in [200, 1] {
                let again = run.clone().steps(steps).succeed();
                let what = format!("k={num_topk} {backend} {activations} R={ranks}, {steps} steps");
                assert_same_file(&again, &first, &what);
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_h1_same_input_same_bits() {
    h1(1, &[50]);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_h1_same_input_same_bits() {
    h1(2, &[33, 17]);
}

/// Slots that give c * 2^25, c, -c * 2^25 and c with weight 1: in their order the sum is c; any other order gives 0 or 2 c.
fn h1_directed(ranks: usize) {
    let work = Work::new();
    let (s, checkpoint, choice) = directed::cancelling_slots();
    let checkpoint = work.checkpoint(&checkpoint);
    let run = Run::new(&work, &checkpoint, &s.tokens(5, 1.0)).choice(&choice).ranks(ranks).option("combine", "slot");
    for (backend, activations) in backends_and_modes() {
        let done = with_exact_rows(&on_gpus(&run, backend)).activations(activations).succeed();
        let what = format!("{backend} {activations} R={ranks}");
        assert_rows(done.layer(0), 0, &[answer(activations); 5], Tolerance::Relative(1e-6), &what);
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_h1_sums_follow_the_slots() {
    h1_directed(1);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_h1_sums_follow_the_slots() {
    h1_directed(2);
}

/// Case H3: a token's bits do not depend on the others, their number, its place, or their rank.
fn h3(ranks: usize) {
    let work = Work::new();
    let geometry = Geometry { num_experts: 2, hidden: 256, intermediate: 128, num_topk: 1, num_layers: 1 };
    let checkpoint = work.checkpoint(&random_checkpoint(geometry, 3));
    let probe = Random::new(5).matrix(1, 256, 1.0);
    let others = Random::new(6).matrix(1023, 256, 1.0);
    for (backend, activations) in backends_and_modes() {
        let run = |input: &Tensor| {
            let run = Run::new(&work, &checkpoint, input).choice(&Choice::single(vec![0; input.shape[0]]));
            on_gpus(&run, backend).activations(activations).option("batch-invariant", "true")
        };
        let alone = run(&probe).succeed();
        for num_others in [0, 1, 15, 16, 63, 64, 127, 128, 1023] {
            // First, in the middle and last at once.
            let middle = num_others / 2;
            let parts = [&probe, &others.rows(0, middle), &probe, &others.rows(middle, num_others), &probe];
            let input = Tensor::stack(&parts);
            let num_tokens = input.shape[0];
            let mut run = run(&input).ranks(ranks);
            if ranks == 2 {
                let split = if num_others % 2 == 0 { [1, num_tokens - 1] } else { [num_tokens - 2, 2] };
                run = run.split(&split);
            }
            let done = run.succeed();
            for place in [0, 1 + middle, num_tokens - 1] {
                let what = format!("{backend} {activations} R={ranks}: row {place} among {num_others} others");
                assert_same_bits(&done.layer(0).rows(place, place + 1), alone.layer(0), &what);
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_h3_neighbours_do_not_matter() {
    h3(1);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_h3_neighbours_do_not_matter() {
    h3(2);
}

/// How often [`h3_race`] repeats; `LOCKSTEP_TEST_REPEATS` says otherwise.
const NUM_REPEATS: usize = 2000;

/// Case H3's race: each expert's scales are another power of two, so that a tile with a neighbour's scales shows as an
/// exponent. Every repeat is compared with the first, the last with what is known.
fn h3_race(ranks: usize, backend: &str) {
    let repeats = std::env::var("LOCKSTEP_TEST_REPEATS").map_or(NUM_REPEATS, |text| text.parse().expect("a count"));
    let work = Work::new();
    let num_tokens = 8192;
    let s = S::new(64, 128, 128).topk(6).unit_scales();
    let mut checkpoint = s.checkpoint();
    let factor = |expert: usize| 2f32.powi(i32::try_from(expert % 8).expect("small"));
    for expert in 0..64 {
        checkpoint.set_scalar(expert, "down_proj", "weight_scale_2", factor(expert));
    }
    let checkpoint = work.checkpoint(&checkpoint);
    let weights = [0.25, 0.25, 0.125, 0.125, 0.125, 0.125];
    let mut random = Random::new(9);
    let (mut choice, mut sums) = (Choice::default(), Vec::new());
    for _ in 0..num_tokens {
        let mut experts: Vec<usize> = Vec::new();
        while experts.len() < weights.len() {
            let expert = usize::try_from(random.bits() % 64).expect("small");
            if !experts.contains(&expert) {
                experts.push(expert);
            }
        }
        let ids: Vec<i64> = experts.iter().map(|&expert| i64::try_from(expert).expect("small")).collect();
        choice.push(&ids, &weights);
        let parts = experts.iter().zip(weights).map(|(&expert, p)| f64::from(p) * f64::from(factor(expert)));
        sums.push(parts.sum::<f64>());
    }
    let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0)).choice(&choice).ranks(ranks);
    let run = run.env("LOCKSTEP_THREADS", "4").steps(repeats);
    for activations in crate::support::run::ACTIVATIONS {
        let done = with_exact_rows(&on_gpus(&run, backend)).activations(activations).succeed();
        let wanted: Vec<f64> = sums.iter().map(|sum| sum * answer(activations)).collect();
        let what = format!("{backend} {activations} R={ranks}, {repeats} repeats");
        assert_rows(done.layer(0), 0, &wanted, Tolerance::Relative(1e-6), &what);
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_h3_experts_keep_their_own_scales_mma_sync() {
    h3_race(1, GPU_BACKENDS[0]);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_h3_experts_keep_their_own_scales_wgmma() {
    h3_race(1, GPU_BACKENDS[1]);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_h3_experts_keep_their_own_scales_wgmma() {
    h3_race(2, GPU_BACKENDS[1]);
}
