//! The same bits for the same input, whatever else is in the batch.

use super::answer;
use crate::support::checkpoint::Geometry;
use crate::support::compare::{Tolerance, assert_rows, assert_same_bits};
use crate::support::directed;
use crate::support::made::{Choice, Random, S, random_checkpoint};
use crate::support::run::{ACTIVATIONS, BACKENDS, Run, Work};
use crate::support::safetensors::Tensors;
use crate::support::tensor::Tensor;

/// Repeats within a process, in other processes, and of the same token in one batch give one answer.
#[test]
fn h1_same_input_same_bits() {
    let work = Work::new();
    for num_topk in [1, 2, 8] {
        let geometry = Geometry { num_experts: 8, hidden: 512, intermediate: 1024, num_topk, num_layers: 1 };
        let checkpoint = work.checkpoint(&random_checkpoint(geometry, 7));
        let batch = Random::new(11).matrix(50, 512, 1.0);
        let twice = Tensor::stack(&[&batch, &batch]);
        let run = |input: &Tensor| Run::new(&work, &checkpoint, input).ranks(2).activations("quantised");
        let simd = run(&batch).backend("simd").split(&[33, 17]);
        let first = simd.succeed();
        assert!(
            first.layer(0).floats().iter().any(|&value| value != 0.0),
            "k={num_topk}: an output of zeros says nothing"
        );
        for process in 0..4 {
            let steps = if process == 0 { 20 } else { 1 };
            let again = simd.clone().steps(steps).succeed();
            assert_same_bits(again.layer(0), first.layer(0), &format!("k={num_topk} process {process}"));
            assert_eq!(again.sha256, first.sha256, "k={num_topk}: equal bits are equal files");
        }
        let both = run(&twice).backend("simd").split(&[33, 67]).succeed();
        for half in [both.layer(0).rows(0, 50), both.layer(0).rows(50, 100)] {
            assert_same_bits(&half, first.layer(0), &format!("k={num_topk} the batch twice"));
        }
    }
    let geometry = Geometry { num_experts: 8, hidden: 512, intermediate: 1024, num_topk: 2, num_layers: 1 };
    let checkpoint = work.checkpoint(&random_checkpoint(geometry, 7));
    let reference = Run::new(&work, &checkpoint, &Random::new(11).matrix(20, 512, 1.0)).ranks(2).backend("reference");
    let first = reference.succeed();
    assert_same_bits(reference.clone().steps(3).succeed().layer(0), first.layer(0), "reference");
}

/// Slots that give c * 2^25, c, -c * 2^25 and c with weight 1: in their order the sum is c. Backwards it is 0, by expert
/// or by rank about 2 c.
#[test]
fn h1_sums_follow_the_slots() {
    let work = Work::new();
    let (s, checkpoint, choice) = directed::cancelling_slots();
    let checkpoint = work.checkpoint(&checkpoint);
    for backend in BACKENDS {
        for activations in ACTIVATIONS {
            for ranks in 1..=4 {
                let run = Run::new(&work, &checkpoint, &s.tokens(5, 1.0)).choice(&choice).ranks(ranks);
                let done = run.backend(backend).activations(activations).key("moe", "combine", "slot").succeed();
                let what = format!("{backend} {activations} R={ranks}");
                assert_rows(done.layer(0), 0, &[answer(activations); 5], Tolerance::Relative(1e-6), &what);
            }
        }
    }
    assert!(answer("bf16") * 2f64.powi(25) + answer("bf16") > 2f64.powi(24), "beyond what f32 holds to the unit");
}

/// A token's bits do not depend on the others, their number, its place, or their rank.
#[test]
fn h3_neighbours_do_not_matter() {
    let work = Work::new();
    let geometry = Geometry { num_experts: 2, hidden: 256, intermediate: 128, num_topk: 1, num_layers: 1 };
    let checkpoint = work.checkpoint(&random_checkpoint(geometry, 3));
    let probe = Random::new(5).matrix(1, 256, 1.0);
    let others = Random::new(6).matrix(1023, 256, 1.0);
    for backend in BACKENDS {
        for activations in ACTIVATIONS {
            let run = |input: &Tensor, ranks| {
                let choice = Choice::single(vec![0; input.shape[0]]);
                Run::new(&work, &checkpoint, input)
                    .choice(&choice)
                    .ranks(ranks)
                    .backend(backend)
                    .activations(activations)
            };
            let alone = run(&probe, 1).succeed();
            for num_others in [0, 1, 15, 16, 63, 64, 127, 128, 1023] {
                // First, in the middle and last at once.
                let middle = num_others / 2;
                let parts = [&probe, &others.rows(0, middle), &probe, &others.rows(middle, num_others), &probe];
                let input = Tensor::stack(&parts);
                let num_tokens = input.shape[0];
                let split = if num_others % 2 == 0 { vec![1, num_tokens - 1] } else { vec![num_tokens - 2, 2] };
                let done = run(&input, 2).split(&split).succeed();
                for place in [0, 1 + middle, num_tokens - 1] {
                    let what = format!("{backend} {activations}: row {place} among {num_others} others");
                    assert_same_bits(&done.layer(0).rows(place, place + 1), alone.layer(0), &what);
                }
            }
        }
    }
}

/// H3's race: every row's answer is known, and a neighbour's scales would be out by a power of two.
fn h3_race(num_tokens: usize, steps: usize) {
    let work = Work::new();
    let s = S::new(64, 128, 128).topk(6).unit_scales();
    let mut checkpoint = s.checkpoint();
    let factor = |expert: usize| 2f32.powi(i32::try_from(expert % 8).expect("small"));
    for expert in 0..64 {
        checkpoint.set_scalar(expert, "down_proj", "weight_scale_2", factor(expert));
    }
    let checkpoint = work.checkpoint(&checkpoint);
    let mut random = Random::new(9);
    let mut choice = Choice::default();
    let mut wanted = Vec::new();
    for _ in 0..num_tokens {
        let mut experts: Vec<usize> = Vec::new();
        while experts.len() < 6 {
            let expert = usize::try_from(random.bits() % 64).expect("small");
            if !experts.contains(&expert) {
                experts.push(expert);
            }
        }
        let ids: Vec<i64> = experts.iter().map(|&expert| i64::try_from(expert).expect("small")).collect();
        choice.push(&ids, &[0.25, 0.25, 0.125, 0.125, 0.125, 0.125]);
        let weights = [0.25, 0.25, 0.125, 0.125, 0.125, 0.125];
        let sum: f64 = experts.iter().zip(weights).map(|(&expert, p)| p * f64::from(factor(expert))).sum();
        wanted.push(sum * answer("bf16"));
    }
    for backend in BACKENDS {
        let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0)).choice(&choice).ranks(2).backend(backend);
        let done = run.activations("bf16").env("LOCKSTEP_THREADS", "2").steps(steps).succeed();
        assert_rows(done.layer(0), 0, &wanted, Tolerance::Relative(1e-6), &format!("{backend}, {steps} steps"));
    }
}

#[test]
fn h3_experts_keep_their_own_scales() {
    h3_race(512, 10);
}

#[test]
#[ignore = "2,000 repeats of 8,192 tokens take hours on two cores; run it by name on a large machine"]
fn h3_experts_keep_their_own_scales_soak() {
    h3_race(8192, 2000);
}

/// The router's own choice, exported and fed back, gives the router's bits.
#[test]
fn h1_the_routers_choice_fed_back() {
    let work = Work::new();
    let geometry = Geometry { num_experts: 8, hidden: 256, intermediate: 128, num_topk: 3, num_layers: 2 };
    let checkpoint = work.checkpoint(&random_checkpoint(geometry, 21));
    let run = Run::new(&work, &checkpoint, &Random::new(22).matrix(23, 256, 1.0)).ranks(3);
    for activations in ACTIVATIONS {
        let run = run.clone().activations(activations);
        let routed = run.clone().export_topk().succeed();
        let exported: Tensors = routed.exported.clone();
        assert_eq!(exported["layers.1.topk_idx"].shape, [23, 3]);
        let fed = run.choice_tensors(&exported).ranks(2).succeed();
        assert_eq!(fed.sha256, routed.sha256, "{activations}: the file of the router's bits");
    }
}
