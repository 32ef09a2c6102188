//! Empty, skewed and one-sided traffic.

use super::{assert_answers, assert_bf16_answers, backends_and_modes};
use crate::support::compare::{Tolerance, assert_rows, assert_same_bits};
use crate::support::directed;
use crate::support::made::{Choice, S};
use crate::support::report::Report;
use crate::support::run::{BACKENDS, Run, Work};

/// Ranks that hold no tokens.
#[test]
fn a1_ranks_without_tokens() {
    let work = Work::new();
    for (num_experts, split) in [(8, &[0, 7, 0, 1][..]), (8, &[0, 0, 0, 0]), (8, &[5, 0, 0, 0]), (6, &[0, 3])] {
        let s = S::new(num_experts, 128, 128).topk(2);
        let checkpoint = work.sharded(&s.checkpoint(), 2);
        let num_tokens: usize = split.iter().sum();
        let choice = Choice::uniform(num_tokens, &[0, 1], &[0.5, 0.5]);
        let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0)).choice_tensors(&choice.tensors_of(2));
        for backend in BACKENDS {
            let what = format!("E={num_experts} T={split:?} {backend}");
            let run = run.clone().backend(backend).output_dtype("bf16");
            let done = run.clone().ranks(split.len()).split(split).steps(50).succeed();
            assert_eq!(done.layer(0).shape, [num_tokens, 128], "{what}");
            assert_rows(done.layer(0), 0, &vec![1.070_312_5; num_tokens], Tolerance::Ulps(0), &what);
            assert_same_bits(done.layer(0), run.succeed().layer(0), &format!("{what} against one rank"));

            // Counters run over all steps.
            let mut rows = vec![0; num_experts];
            rows[..2].fill(50 * num_tokens as u64);
            assert_eq!(done.report.rows_per_expert(0), rows, "{what}: no padding is counted");
            let tokens: Vec<u64> = split.iter().map(|&tokens| tokens as u64).collect();
            assert_eq!(done.report.by_rank("num_tokens"), tokens, "{what}");
            assert_eq!(done.report.count("/steps/count"), 50, "{what}");
        }
    }
}

/// Traffic in one direction only, and ranks whose experts get nothing.
#[test]
fn a3_one_sided_traffic() {
    let work = Work::new();
    let s = S::new(3, 128, 128);
    let checkpoint = work.checkpoint(&s.checkpoint());
    for (split, expert) in [([4, 4, 4], 2), ([4, 0, 0], 1)] {
        let num_tokens = split.iter().sum();
        let choice = Choice::single(vec![expert; num_tokens]);
        for (backend, activations) in backends_and_modes() {
            let what = format!("T={split:?} to expert {expert}, {backend}");
            let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0))
                .choice(&choice)
                .backend(backend)
                .activations(activations)
                .ranks(3)
                .split(&split);
            let done = run.succeed();
            assert_answers(done.layer(0), 0, activations, &vec![f64::from(1 << expert); num_tokens], &what);
            let mut rows = vec![0; 3];
            rows[expert] = num_tokens as u64;
            assert_eq!(done.report.computed_rows(0), rows, "{what}: rows by rank");
        }
    }
}

/// 5,000 steps that alternate: three layers stand for three kinds of step, and are applied in turn.
#[test]
fn a3_alternating_steps() {
    let steps = 5000;
    let work = Work::new();
    let s = S::new(3, 128, 128).layers(3);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let choices = directed::alternating_steps(12, 2, 1);

    let run = Run::new(&work, &checkpoint, &s.tokens(12, 1.0)).choice_tensors(&choices).ranks(3).split(&[4, 4, 4]);
    let run = run.backend("simd").activations("bf16");
    let once = run.clone().succeed();
    let done = run.steps(steps).succeed();
    assert_answers(done.layer(0), 0, "bf16", &[4.0; 12], "all to expert 2");
    let four_of_twelve = [2.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    assert_answers(done.layer(1), 0, "bf16", &four_of_twelve, "only rank 0 to expert 1");
    assert_answers(done.layer(2), 0, "bf16", &[0.0; 12], "no traffic at all");
    assert_eq!(done.report.count("/steps/count"), steps as u64);

    let peaks = |report: &Report| report.by_rank("peak_rss_bytes");
    for (rank, (after, before)) in peaks(&done.report).into_iter().zip(peaks(&once.report)).enumerate() {
        assert!(after < before + (16 << 20), "rank {rank} grew from {before} to {after} bytes over {steps} steps");
    }
}

/// Everything to one expert: no row is lost, and the count is exact.
#[test]
fn a4_everything_to_one_expert() {
    let work = Work::new();
    let s = S::new(4, 128, 128);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let num_tokens = 4 * 2304;
    let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0))
        .choice(&Choice::single(vec![0; num_tokens]))
        .output_dtype("bf16")
        .ranks(4);
    for backend in BACKENDS {
        let done = run.clone().backend(backend).succeed();
        assert_bf16_answers(done.layer(0), 0, &vec![1.0; num_tokens], 0, backend);
        assert_eq!(done.report.rows_per_expert(0), [9216, 0, 0, 0], "{backend}");
        assert_eq!(done.report.by_rank("num_tokens"), [2304; 4], "{backend}");
    }
}

/// One row over the declared capacity: refused by name on all ranks, or chunked if chunks are allowed.
#[test]
fn a4_over_the_declared_capacity() {
    let work = Work::new();
    let s = S::new(4, 128, 128);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let num_tokens = 1028;
    let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0))
        .choice(&Choice::single((0..num_tokens).map(|token| token % 4)))
        .ranks(4)
        .split(&[1025, 1, 1, 1])
        .activations("bf16")
        .key("dispatch", "num_max_tokens_per_rank", "1024");
    run.fails(&["1025", "1024", "rank 0", "num_max_tokens_per_rank"]);

    let factors: Vec<f64> = (0..num_tokens).map(|token| f64::from(1 << (token % 4))).collect();
    for chunk_tokens in ["512", "1024"] {
        let done = run.clone().key("dispatch", "chunk_tokens", chunk_tokens).succeed();
        assert_answers(done.layer(0), 0, "bf16", &factors, &format!("chunks of {chunk_tokens}"));
        assert_eq!(done.report.rows_per_expert(0), [257; 4]);
        let chunks = done.report.layer(0)["chunks"].as_u64().expect("chunks is a count");
        assert_eq!(chunks, if chunk_tokens == "512" { 3 } else { 2 }, "1025 tokens in chunks of {chunk_tokens}");
    }
}
