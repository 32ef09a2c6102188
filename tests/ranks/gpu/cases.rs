//! The cases of `crate::cases` that the issue of the GPU backends names, on GPUs.

use super::{answer, assert_answers, backends_and_modes, with_exact_rows};
use crate::support::compare::{Tolerance, assert_rows, assert_same_bits, situ};
use crate::support::directed;
use crate::support::gpu::{GPU_BACKENDS, on_gpus};
use crate::support::made::{Choice, S, S_ANSWER};
use crate::support::run::{Run, Work};

/// Ranks that hold no tokens, over 50 steps that all give the same bits.
fn a1(splits: &[(usize, &[usize])]) {
    let work = Work::new();
    for &(num_experts, split) in splits {
        let s = S::new(num_experts, 128, 128).topk(2);
        let checkpoint = work.sharded(&s.checkpoint(), 2);
        let num_tokens: usize = split.iter().sum();
        let choice = Choice::uniform(num_tokens, &[0, 1], &[0.5, 0.5]);
        let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0)).choice_tensors(&choice.tensors_of(2));
        let run = run.output_dtype("bf16").option("combine", "slot");
        for (backend, activations) in backends_and_modes() {
            let what = format!("E={num_experts} T={split:?} {backend} {activations}");
            let run = on_gpus(&run, backend).activations(activations);
            let done = run.clone().ranks(split.len()).split(split).steps(50).succeed();
            assert_eq!(done.layer(0).shape, [num_tokens, 128], "{what}");
            assert_rows(done.layer(0), 0, &vec![1.070_312_5; num_tokens], Tolerance::Ulps(0), &what);
            assert_same_bits(done.layer(0), run.succeed().layer(0), &format!("{what} against one rank"));
            let mut rows = vec![0; num_experts];
            rows[..2].fill(50 * num_tokens as u64);
            assert_eq!(done.report.rows_per_expert(0), rows, "{what}: no padding is counted");
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_a1_no_tokens() {
    a1(&[(8, &[0]), (8, &[5])]);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_a1_ranks_without_tokens() {
    a1(&[(8, &[0, 7]), (8, &[0, 0]), (8, &[5, 0]), (6, &[0, 3])]);
}

/// Traffic in one direction only, and a rank whose experts get nothing.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_a3_one_sided_traffic() {
    let work = Work::new();
    let s = S::new(3, 128, 128);
    let checkpoint = work.checkpoint(&s.checkpoint());
    // Rank 0 has experts 0 and 1.
    for (split, expert, of_rank) in [([4, 4], 2, 1), ([4, 0], 2, 1), ([0, 4], 1, 0)] {
        let num_tokens = split.iter().sum();
        let choice = Choice::single(vec![expert; num_tokens]);
        for (backend, activations) in backends_and_modes() {
            let what = format!("T={split:?} to expert {expert}, {backend}");
            let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0)).choice(&choice).ranks(2).split(&split);
            let done = with_exact_rows(&on_gpus(&run, backend)).activations(activations).succeed();
            assert_answers(done.layer(0), 0, activations, &vec![f64::from(1 << expert); num_tokens], &what);
            let mut rows = vec![0; 2];
            rows[of_rank] = num_tokens as u64;
            assert_eq!(done.report.computed_rows(0), rows, "{what}: rows by rank");
        }
    }
}

/// Everything to one expert: no row is lost, and the count is exact.
fn a4(ranks: usize) {
    let work = Work::new();
    let s = S::new(4, 128, 128);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let num_tokens = 4 * 2304;
    let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0))
        .choice(&Choice::single(vec![0; num_tokens]))
        .option("num-max-tokens-per-rank", &num_tokens.to_string())
        .output_dtype("bf16")
        .ranks(ranks);
    for (backend, activations) in backends_and_modes() {
        let what = format!("{backend} {activations} R={ranks}");
        let done = on_gpus(&run, backend).activations(activations).succeed();
        assert_rows(done.layer(0), 0, &vec![S_ANSWER; num_tokens], Tolerance::Ulps(0), &what);
        assert_eq!(done.report.rows_per_expert(0), [9216, 0, 0, 0], "{what}");
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_a4_everything_to_one_expert() {
    a4(1);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_a4_everything_to_one_expert() {
    a4(2);
}

/// Widths that are no multiple of 128: every expert reads its own scales, and rows keep their length.
fn b3(ranks: usize) {
    let work = Work::new();
    for hidden in [144, 160, 192, 2880] {
        let (s, checkpoint) = directed::last_column(hidden);
        let checkpoint = work.checkpoint(&checkpoint);
        let run = Run::new(&work, &checkpoint, &s.tokens(4, 1.0)).choice(&Choice::single(0..4)).ranks(ranks);
        for (backend, activations) in backends_and_modes() {
            let what = format!("H={hidden} R={ranks} {backend}");
            let done = with_exact_rows(&on_gpus(&run, backend)).activations(activations).succeed();
            assert_eq!(done.layer(0).shape, [4, hidden], "{what}");
            assert_answers(done.layer(0), hidden - 1, activations, &[2.0, 4.0, 8.0, 16.0], &what);
        }
    }
    let s = S::new(4, 136, 128);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let run = Run::new(&work, &checkpoint, &s.tokens(4, 1.0)).choice(&Choice::single(0..4)).ranks(ranks);
    for backend in GPU_BACKENDS {
        on_gpus(&run, backend).fails(&["136", "16"]);
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_b3_hidden_not_a_multiple_of_128() {
    b3(1);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_b3_hidden_not_a_multiple_of_128() {
    b3(2);
}

/// The same expert twice in a token's top-k counts twice.
fn b6(ranks: usize) {
    let work = Work::new();
    for (ids, weights, factor) in [(&[3, 3][..], &[0.25, 0.75][..], 8.0), (&[0, 3, 0], &[0.25, 0.5, 0.25], 4.5)] {
        let s = S::new(4, 128, 128).topk(ids.len());
        let checkpoint = work.checkpoint(&s.checkpoint());
        let run = Run::new(&work, &checkpoint, &s.tokens(2, 1.0)).choice(&Choice::uniform(2, ids, weights));
        for (backend, activations) in backends_and_modes() {
            for combine in ["slot", "rank"] {
                let what = format!("ids {ids:?}, {backend}, combine {combine}, R={ranks}");
                let run = with_exact_rows(&on_gpus(&run, backend)).ranks(ranks).option("combine", combine);
                let done = run.activations(activations).succeed();
                assert_answers(done.layer(0), 0, activations, &[factor; 2], &what);
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_b6_repeated_expert() {
    b6(1);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_b6_repeated_expert() {
    b6(2);
}

/// Id -1 masks a slot: nothing is computed for it, and nothing travels. Other ids out of range are named.
fn b7(ranks: usize) {
    let work = Work::new();
    let s = S::new(4, 128, 128).topk(2);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let half = [0.5, 0.5];
    let choice = Choice::new(&[(&[-1, 2], &half), (&[-1, -1], &half), (&[2, -1], &half), (&[-1, -1], &half)]);
    for (backend, activations) in backends_and_modes() {
        let run = Run::new(&work, &checkpoint, &s.tokens(4, 1.0)).choice(&choice).ranks(ranks);
        let done = with_exact_rows(&on_gpus(&run, backend)).activations(activations).succeed();
        assert_answers(done.layer(0), 0, activations, &[2.0, 0.0, 2.0, 0.0], backend);
        assert_eq!(done.report.rows_per_expert(0), [0, 0, 2, 0], "{backend}");
    }
    let live = Choice::uniform(100, &[-1, 2], &half);
    let mut among = Choice::default();
    for token in 0..1000 {
        among.push(if token % 10 == 0 { &[-1, 2] } else { &[-1, -1] }, &half);
    }
    for backend in GPU_BACKENDS {
        let counters = |choice: &Choice, num_tokens: usize| {
            let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0)).choice(choice).ranks(ranks);
            let report = on_gpus(&run, backend).succeed().report;
            let fields = ["rows_sent", "rows_received", "dispatch_bytes_sent"].map(|field| report.by_rank(field));
            (report.computed_rows(0), fields)
        };
        assert_eq!(counters(&among, 1000), counters(&live, 100), "{backend}: masked tokens add no rows and no bytes");
        for (bad, slot) in [([4, 0], 0), ([-2, 0], 0)] {
            let mut choice = Choice::uniform(5, &[0, 1], &half);
            choice.push(&bad, &half);
            let run = Run::new(&work, &checkpoint, &s.tokens(6, 1.0)).choice(&choice).ranks(ranks);
            on_gpus(&run, backend).fails(&["token", &format!("slot {slot}"), &bad[slot].to_string()]);
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_b7_masked_slots() {
    b7(1);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_b7_masked_slots() {
    b7(2);
}

/// Activations above what the input scale can hold clip, and are counted.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_c8_saturating_activations_are_counted() {
    let work = Work::new();
    let (s, checkpoint) = directed::saturating();
    let checkpoint = work.checkpoint(&checkpoint);
    let run = Run::new(&work, &checkpoint, &s.tokens(1, 4000.0)).choice(&Choice::single([0]));
    for (backend, activations) in backends_and_modes() {
        let done = with_exact_rows(&on_gpus(&run, backend)).activations(activations).succeed();
        let saturated = done.report.layer(0)["fc1_input"]["num_saturated"].as_u64().expect("a count");
        if activations == "bf16" {
            assert_answers(done.layer(0), 0, activations, &[1.0], backend);
            assert_eq!(saturated, 0, "{backend}");
        } else {
            // 4000 clips to 2688, so g = u = 0.672; h then goes through NVFP4 with input_scale 1/2688.
            let h = situ(0.672, 0.672, 4.0, Some(25.0));
            assert_rows(done.layer(0), 0, &[h], Tolerance::Relative(0.07), backend);
            assert_eq!(saturated, 1, "{backend}: one block of FC1's input is clipped");
        }
    }
}

/// Scales at the ends of their range: the largest and the smallest block scale, and sums beyond fp16.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_c8_scales_at_the_ends_of_their_range() {
    let work = Work::new();
    let (_, cases) = directed::ends_of_range();
    for (name, checkpoint, input) in &cases {
        let dir = work.checkpoint(checkpoint);
        let run = Run::new(&work, &dir, input).choice(&Choice::single([0]));
        for (backend, activations) in backends_and_modes() {
            let done = with_exact_rows(&on_gpus(&run, backend)).activations(activations).succeed();
            assert_answers(done.layer(0), 0, activations, &[1.0], &format!("{name}, {backend}"));
        }
    }
    assert_ne!(answer("bf16"), answer("quantised"), "or the modes are not told apart");
}
