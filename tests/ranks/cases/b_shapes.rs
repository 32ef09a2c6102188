//! Shapes, counts and expert ids.

use serde_json::json;

use super::{assert_answers, assert_bf16_answers, backends_and_modes};
use crate::support::directed;
use crate::support::launch::alone;
use crate::support::made::{Choice, S};
use crate::support::run::{BACKENDS, Run, Work};

/// Experts that do not divide by ranks: every expert is owned once, by the rank that even sizes give.
#[test]
fn b1_experts_do_not_divide_by_ranks() {
    let work = Work::new();
    for (num_experts, owned) in
        [(5, &[3, 2][..]), (7, &[3, 2, 2]), (128, &[22, 22, 21, 21, 21, 21]), (256, &[86, 85, 85])]
    {
        let ranks = owned.len();
        let small = num_experts < 16;
        let s = S::new(num_experts, 128, 128);
        let s = if small { s } else { s.unit_scales() };
        let checkpoint = work.checkpoint(&s.checkpoint());
        // A token a rank to the last expert, then one to each expert in turn.
        let experts: Vec<usize> = std::iter::repeat_n(num_experts - 1, ranks).chain(0..num_experts).collect();
        let factors: Vec<f64> =
            experts.iter().map(|&expert| if small { f64::from(1 << expert) } else { 1.0 }).collect();
        let run = Run::new(&work, &checkpoint, &s.tokens(experts.len(), 1.0))
            .choice(&Choice::single(experts))
            .output_dtype("bf16")
            .ranks(ranks);
        for backend in BACKENDS {
            let what = format!("E={num_experts} R={ranks} {backend}");
            let done = run.clone().backend(backend).succeed();
            assert_bf16_answers(done.layer(0), 0, &factors, 0, &what);
            let mut rows: Vec<u64> = owned.to_vec();
            rows[ranks - 1] += ranks as u64;
            assert_eq!(done.report.computed_rows(0), rows, "{what}: rows by owner");
        }
    }
}

/// Widths that are no multiple of 128: every expert reads its own scales, and rows keep their length.
#[test]
fn b3_hidden_not_a_multiple_of_128() {
    let work = Work::new();
    for hidden in [144, 160, 192, 2880] {
        let (s, checkpoint) = directed::last_column(hidden);
        let checkpoint = work.checkpoint(&checkpoint);
        let run = Run::new(&work, &checkpoint, &s.tokens(4, 1.0)).choice(&Choice::single(0..4));
        for (backend, activations) in backends_and_modes() {
            for ranks in [1, 2] {
                let what = format!("H={hidden} R={ranks} {backend}");
                let done = run.clone().ranks(ranks).backend(backend).activations(activations).succeed();
                assert_eq!(done.layer(0).shape, [4, hidden], "{what}");
                assert_answers(done.layer(0), hidden - 1, activations, &[2.0, 4.0, 8.0, 16.0], &what);
            }
        }
    }
    let s = S::new(4, 136, 128);
    let checkpoint = work.checkpoint(&s.checkpoint());
    for ranks in [1, 2] {
        let run = Run::new(&work, &checkpoint, &s.tokens(4, 1.0)).choice(&Choice::single(0..4)).ranks(ranks);
        run.fails(&["136", "16"]);
    }
}

/// A top-k that the experts cannot fill is refused before any work: alike by every command, and once for all ranks.
#[test]
fn b4_topk_out_of_range() {
    let work = Work::new();
    for (topk, ranks) in [(0, 4), (5, 2), (-1, 3)] {
        let s = S::new(4, 128, 128);
        let mut checkpoint = s.checkpoint();
        checkpoint.config["num_experts_per_tok"] = json!(topk);
        let checkpoint = work.checkpoint(&checkpoint);
        let shown = topk.to_string();
        let needles = ["num_experts_per_tok", &shown, "4"];
        let run = Run::new(&work, &checkpoint, &s.tokens(2, 1.0)).ranks(ranks);
        let everywhere = format!("(on all {ranks} ranks)");
        run.fails(&[needles[0], needles[1], needles[2], &everywhere]);
        let resolve = alone().args(["resolve".into(), "--model".into(), checkpoint.clone()]);
        resolve.run().fails_clearly(2, &needles);
        let verify = alone().args(["verify", "--layer=0"]).args([
            format!("--checkpoint={}", checkpoint.display()),
            format!("--input={}", work.tensors("input", &[("x".to_string(), s.tokens(2, 1.0))].into()).display()),
        ]);
        verify.run().fails_clearly(2, &needles);
    }
}

/// More slots than experts in a file of choices: each has to name an expert, or none.
#[test]
fn b4_a_choice_may_be_wider_than_the_models_but_names_experts() {
    let work = Work::new();
    let s = S::new(2, 32, 32).unit_scales();
    let checkpoint = work.checkpoint(&s.checkpoint());
    let run = Run::new(&work, &checkpoint, &s.tokens(2, 1.0)).ranks(2).output_dtype("bf16");
    let wide = Choice::uniform(2, &[0, 1, 1, -1], &[0.25, 0.25, 0.5, 9.0]);
    assert_bf16_answers(run.clone().choice(&wide).succeed().layer(0), 0, &[1.0; 2], 0, "four slots of two experts");
    run.choice(&Choice::uniform(2, &[0, 1, 2, -1], &[0.25; 4])).fails(&["2", "slot"]);
}

/// A wide top-k, one expert, and more ranks than experts.
#[test]
fn b4_extreme_topk_and_ranks() {
    let work = Work::new();
    for topk in [17u16, 33, 64] {
        let s = S::new(64, 128, 128).topk(topk.into()).unit_scales();
        let checkpoint = work.checkpoint(&s.checkpoint());
        let ids: Vec<i64> = (0..i64::from(topk)).collect();
        let choice = Choice::uniform(3, &ids, &vec![1.0 / f32::from(topk); topk.into()]);
        let run = Run::new(&work, &checkpoint, &s.tokens(3, 1.0)).choice(&choice).ranks(2).output_dtype("bf16");
        for backend in BACKENDS {
            let done = run.clone().backend(backend).succeed();
            assert_bf16_answers(done.layer(0), 0, &[1.0; 3], 2, &format!("k={topk} {backend}"));
        }
    }
    for (num_experts, ranks) in [(1, 1), (2, 4)] {
        let s = S::new(num_experts, 128, 128);
        let checkpoint = work.checkpoint(&s.checkpoint());
        let experts: Vec<usize> = (0..8).map(|token| token % num_experts).collect();
        let factors: Vec<f64> = experts.iter().map(|&expert| f64::from(1 << expert)).collect();
        let run = Run::new(&work, &checkpoint, &s.tokens(8, 1.0)).choice(&Choice::single(experts)).ranks(ranks);
        for (backend, activations) in backends_and_modes() {
            let done = run.clone().backend(backend).activations(activations).succeed();
            let what = format!("E={num_experts} R={ranks} {backend}");
            assert_answers(done.layer(0), 0, activations, &factors, &what);
            assert!(done.report.computed_rows(0)[num_experts.min(ranks)..].iter().all(|&rows| rows == 0), "{what}");
        }
    }
}

/// The same expert twice in a token's top-k counts twice.
#[test]
fn b6_repeated_expert() {
    let work = Work::new();
    for (ids, weights, factor) in [(&[3, 3][..], &[0.25, 0.75][..], 8.0), (&[0, 3, 0], &[0.25, 0.5, 0.25], 4.5)] {
        let s = S::new(4, 128, 128).topk(ids.len());
        let checkpoint = work.checkpoint(&s.checkpoint());
        let run = Run::new(&work, &checkpoint, &s.tokens(2, 1.0)).choice(&Choice::uniform(2, ids, weights));
        for (backend, activations) in backends_and_modes() {
            for combine in ["slot", "rank"] {
                let what = format!("ids {ids:?}, {backend}, combine {combine}");
                let run = run.clone().ranks(2).backend(backend).activations(activations).key("moe", "combine", combine);
                let done = run.succeed();
                assert_answers(done.layer(0), 0, activations, &[factor; 2], &what);
            }
        }
    }
}

/// Id -1 masks a slot: nothing is computed for it, and nothing travels.
#[test]
fn b7_masked_slots() {
    let work = Work::new();
    let s = S::new(4, 128, 128).topk(2);
    let checkpoint = work.checkpoint(&s.checkpoint());
    let half = [0.5, 0.5];
    let choice = Choice::new(&[(&[-1, 2], &half), (&[-1, -1], &half), (&[2, -1], &half), (&[-1, -1], &half)]);
    for (backend, activations) in backends_and_modes() {
        let run = Run::new(&work, &checkpoint, &s.tokens(4, 1.0)).choice(&choice).ranks(2);
        let done = run.backend(backend).activations(activations).succeed();
        assert_answers(done.layer(0), 0, activations, &[2.0, 0.0, 2.0, 0.0], backend);
        assert_eq!(done.report.rows_per_expert(0), [0, 0, 2, 0], "{backend}");
    }

    // A hundred live tokens, alone and among nine hundred masked ones.
    let live = Choice::uniform(100, &[-1, 2], &half);
    let mut among = Choice::default();
    for token in 0..1000 {
        among.push(if token % 10 == 0 { &[-1, 2] } else { &[-1, -1] }, &half);
    }
    let counters = |choice: &Choice, num_tokens: usize| {
        let run = Run::new(&work, &checkpoint, &s.tokens(num_tokens, 1.0)).choice(choice).ranks(2);
        let report = run.succeed().report;
        let fields = ["rows_sent", "rows_received", "dispatch_bytes_sent"].map(|field| report.by_rank(field));
        (report.computed_rows(0), fields)
    };
    assert_eq!(counters(&among, 1000), counters(&live, 100), "masked tokens add no rows and no bytes");
}

/// Any other id out of range is an error that names token, slot and id, before anything is sent.
#[test]
fn b7_ids_out_of_range() {
    let work = Work::new();
    let s = S::new(4, 128, 128).topk(2);
    let checkpoint = work.checkpoint(&s.checkpoint());
    for (bad, slot) in [([4, 0], 0), ([0, 4], 1), ([-2, 0], 0), ([0, i64::MAX], 1)] {
        let mut choice = Choice::uniform(5, &[0, 1], &[0.5, 0.5]);
        choice.push(&bad, &[0.5, 0.5]);
        let run = Run::new(&work, &checkpoint, &s.tokens(6, 1.0)).choice(&choice).ranks(2);
        run.fails(&["token", &format!("slot {slot}"), &bad[slot].to_string()]);
        if bad[slot] < i64::from(i32::MAX) {
            run.choice_tensors(&choice.tensors_i32()).fails(&[&format!("slot {slot}"), &bad[slot].to_string()]);
        }
    }
}
