//! Router logits that are no numbers, scales that are missing, unequal, upside down or out of range.

use std::path::Path;

use super::{answer, assert_answers, assert_bf16_answers, backends_and_modes};
use crate::support::checkpoint::{PROJECTIONS, expert_tensor, router_tensor};
use crate::support::compare::{Tolerance, assert_rows, assert_same_bits, situ};
use crate::support::directed;
use crate::support::made::{Choice, S, S_ANSWER_W4A4};
use crate::support::run::{BACKENDS, Done, Run, Work};
use crate::support::tensor::Tensor;

/// Large enough that its square overflows f32.
const HUGE: f32 = 3e38;

/// C1's rows, as values of `x` at columns of the router: all logits +inf but expert 0's; one +inf; all -inf; ordinary.
/// A single NaN beside numbers cannot be made from finite weights whatever the order of sums; the router's own tests have
/// it.
const C1_ROWS: [&[(usize, f32)]; 4] = [&[(35, HUGE)], &[(36, HUGE), (40, 1.0)], &[(37, HUGE)], &[(41, 1.0)]];

/// A router whose columns make these rows; elsewhere it is 0, so that a huge `x` touches one column's logits alone.
fn c1_router() -> Tensor {
    let mut weights = vec![0.0; 8 * 128];
    let mut set = |expert: usize, column: usize, value: f32| weights[expert * 128 + column] = value;
    for expert in 0..8 {
        set(expert, 35, if expert == 0 { 0.0 } else { HUGE });
        set(expert, 37, -HUGE);
    }
    set(0, 36, HUGE);
    for (expert, logit) in [(1, 3.0), (2, 2.0), (3, 1.0)] {
        set(expert, 40, logit);
    }
    for (expert, logit) in [(5, 1.5), (6, 1.0), (7, -1.0)] {
        set(expert, 41, logit);
    }
    Tensor::bf16(&[8, 128], &weights)
}

/// Router logits that are no numbers: ids stay in range, other rows keep their bits, and every run says the same.
#[test]
fn c1_nan_router_logits() {
    let work = Work::new();
    let s = S::new(8, 128, 128).topk(2);
    let mut checkpoint = s.checkpoint();
    *checkpoint.tensor(&router_tensor(0)) = c1_router();
    let checkpoint = work.checkpoint(&checkpoint);
    let input = |rows: &[&[(usize, f32)]]| {
        let mut values = vec![0.0; rows.len() * 128];
        for (row, columns) in rows.iter().enumerate() {
            values[row * 128] = 1.0;
            columns.iter().for_each(|&(column, value)| values[row * 128 + column] = value);
        }
        Tensor::bf16(&[rows.len(), 128], &values)
    };
    let q = 1.0 / (1.0 + (-0.5f64).exp());
    // An infinity counts as the largest number; where all are -inf, the lowest experts are chosen with weights of 0.
    let factors = [0.5 * 2.0 + 0.5 * 4.0, 1.0, 0.0, q * 32.0 + (1.0 - q) * 64.0];
    for backend in BACKENDS {
        let run = |rows: &[&[(usize, f32)]], ranks: usize| {
            let run = Run::new(&work, &checkpoint, &input(rows)).ranks(ranks).activations("bf16");
            run.backend(backend).export_topk()
        };
        let ordinary = run(&C1_ROWS[3..], 1).succeed();
        let first = run(&C1_ROWS, 2).succeed();
        for _ in 0..2 {
            assert_same_bits(run(&C1_ROWS, 2).succeed().layer(0), first.layer(0), "another run");
        }
        assert_same_bits(&first.layer(0).rows(3, 4), ordinary.layer(0), "an ordinary row beside infinite ones");
        let ids = first.exported["layers.0.topk_idx"].integers();
        assert_eq!(ids, [1, 2, 0, 1, 0, 1, 5, 6], "{backend}: experts of the four rows");
        let weights = first.exported["layers.0.topk_weights"].floats();
        assert_eq!(weights[..6], [0.5, 0.5, 1.0, 0.0, 0.0, 0.0], "{backend}: weights of the infinite rows");
        assert_answers(first.layer(0), 0, "bf16", &factors, backend);

        // A token that is NaN itself makes every logit NaN: it stays in range and leaves its neighbours alone.
        let nan_rows = [C1_ROWS[3], &[(50, f32::NAN)], C1_ROWS[3]];
        let (outcome, output) = run(&nan_rows, 2).attempt();
        let outcome = outcome.expect_code(1);
        assert!(outcome.stdout.contains("FAIL every output is finite"), "{}", outcome.printed());
        let output = output.expect("a judgement on an output that is there");
        for row in [0, 2] {
            let found = output["layers.0.output"].rows(row, row + 1);
            assert_same_bits(&found, ordinary.layer(0), &format!("{backend}: row {row} beside a NaN"));
        }
    }
}

/// Input scales that are missing, zero, NaN or negative are refused at load even if no token reaches their expert.
#[test]
fn c2_bad_input_scales() {
    let work = Work::new();
    let s = S::new(4, 128, 128);
    let input = s.tokens(3, 1.0);
    let choice = Choice::single(0..3);
    for bad in [0.0, f32::NAN, -1.0, f32::INFINITY] {
        for projection in PROJECTIONS {
            let mut checkpoint = s.checkpoint();
            checkpoint.set_scalar(3, projection, "input_scale", bad);
            let checkpoint = work.sharded(&checkpoint, 2);
            let run = Run::new(&work, &checkpoint, &input).choice(&choice).without("activations").ranks(2);
            run.fails(&[&expert_tensor(0, 3, projection, "input_scale")]);
        }
    }
    let mut checkpoint = s.checkpoint();
    checkpoint.remove("experts.3.gate_proj.input_scale");
    checkpoint.remove("experts.3.up_proj.input_scale");
    checkpoint.remove("experts.3.down_proj.input_scale");
    let checkpoint = work.sharded(&checkpoint, 2);
    let run = Run::new(&work, &checkpoint, &input).choice(&choice).ranks(2);
    for activations in ["checkpoint", "quantised"] {
        let names = PROJECTIONS.map(|projection| expert_tensor(0, 3, projection, "input_scale"));
        run.clone().activations(activations).fails(&["expert 3", &names[0]]);
    }
}

/// No input scales at all, and scalars of either shape.
#[test]
fn c2_absent_and_reshaped_scales() {
    let work = Work::new();
    let s = S::new(4, 128, 128);
    let input = s.tokens(4, 1.0);
    let mut bare = s.checkpoint();
    bare.remove(".input_scale");
    let bare = work.checkpoint(&bare);
    let mut listed = s.checkpoint();
    listed.for_each("weight_scale_2", |scalar| scalar.shape = vec![1]);
    listed.for_each("input_scale", |scalar| scalar.shape = vec![1]);
    let (plain, listed) = (work.checkpoint(&s.checkpoint()), work.checkpoint(&listed));
    let run = |checkpoint: &Path| Run::new(&work, checkpoint, &input).choice(&Choice::single(0..4)).ranks(2);
    for backend in BACKENDS {
        for asked in [None, Some("bf16")] {
            let run = run(&bare).backend(backend);
            let done = asked.map_or(run.clone(), |activations| run.activations(activations)).succeed();
            assert_answers(done.layer(0), 0, "bf16", &[1.0, 2.0, 4.0, 8.0], backend);
        }
        let of = |checkpoint: &Path| run(checkpoint).backend(backend).activations("quantised").succeed();
        assert_same_bits(of(&listed).layer(0), of(&plain).layer(0), &format!("scalars of shape [1], {backend}"));
    }
}

/// FC1's input scale is the largest of the layer over all ranks: one expert's, wherever it lives, counts for all.
#[test]
fn c2_input_scale_is_reduced_over_all_ranks() {
    let work = Work::new();
    let s = S::new(4, 128, 128);
    for widest in 0..4 {
        let mut checkpoint = s.checkpoint();
        for projection in ["gate_proj", "up_proj"] {
            // A token of 4 fits this expert's scale alone; by any other it would clip to 1.
            checkpoint.set_scalar(widest, projection, "input_scale", 4.0 / 2688.0);
            (0..4).for_each(|expert| checkpoint.set_scalar(expert, projection, "weight_scale_2", 0.25));
        }
        let checkpoint = work.checkpoint(&checkpoint);
        let run = Run::new(&work, &checkpoint, &s.tokens(4, 4.0)).choice(&Choice::single(0..4));
        for backend in BACKENDS {
            for ranks in 1..=4 {
                let done = run.clone().ranks(ranks).backend(backend).activations("quantised").succeed();
                let what = format!("expert {widest} has the largest scale, {backend} R={ranks}");
                assert_answers(done.layer(0), 0, "quantised", &[1.0, 2.0, 4.0, 8.0], &what);
                assert_eq!(done.report.layer(0)["fc1_input"]["num_saturated"], 0, "{what}");
            }
        }
    }
}

/// Gate and up with different global scales: each half keeps its own.
#[test]
fn c3_gate_and_up_scales_differ() {
    let work = Work::new();
    let s = S::new(2, 128, 128);
    for (gate, up, exponent) in [(1.0, 10.0, 0), (1.0, 1.254_545_5, 0), (1.0, 1.254_545_5, 15)] {
        let wanted = situ(1.0, f64::from(up), 4.0, Some(25.0));
        let mut checkpoint = s.checkpoint();
        let value = 2f32.powi(exponent);
        for expert in 0..2 {
            checkpoint.set_scalar(expert, "gate_proj", "weight_scale_2", gate / value);
            checkpoint.set_scalar(expert, "up_proj", "weight_scale_2", up / value);
            // So that neither quantisation of the activations moves the one value there is.
            checkpoint.set_scalar(expert, "gate_proj", "input_scale", value / 2688.0);
            checkpoint.set_scalar(expert, "up_proj", "input_scale", value / 2688.0);
            #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is what the file holds")]
            checkpoint.set_scalar(expert, "down_proj", "input_scale", (wanted / 2688.0) as f32);
        }
        let checkpoint = work.checkpoint(&checkpoint);
        let run = Run::new(&work, &checkpoint, &s.tokens(2, value)).choice(&Choice::single(0..2)).ranks(2);
        for (backend, activations) in backends_and_modes() {
            let done = run.clone().backend(backend).activations(activations).succeed();
            let what = format!("gate {gate}, up {up}, times 2^-{exponent}, {backend} {activations}");
            assert_rows(done.layer(0), 0, &[wanted, 2.0 * wanted], Tolerance::Relative(2e-6), &what);
        }
    }
}

/// The same numbers with the scale moved between its two levels, and input scales that are larger than needed.
#[test]
fn c5_scales_written_another_way() {
    let work = Work::new();
    let s = S::new(4, 128, 128);
    let plain = work.checkpoint(&s.checkpoint());
    let mut moved = s.checkpoint();
    moved.for_each(".weight_scale", |scales| scales.bytes.fill(0x48));
    moved.scale_scalars("weight_scale_2", 0.25);
    let moved = work.checkpoint(&moved);
    let run = |checkpoint: &Path| Run::new(&work, checkpoint, &s.tokens(4, 1.0)).choice(&Choice::single(0..4)).ranks(2);
    for (backend, activations) in backends_and_modes() {
        let of = |checkpoint: &Path| run(checkpoint).backend(backend).activations(activations).succeed();
        let what = format!("block scales 4, global scales a quarter, {backend} {activations}");
        assert_same_bits(of(&moved).layer(0), of(&plain).layer(0), &what);
    }
    for factor in [2.0, 4.0] {
        let mut larger = s.checkpoint();
        larger.scale_scalars("input_scale", factor);
        let larger = work.checkpoint(&larger);
        for backend in BACKENDS {
            let run = run(&larger).backend(backend).activations("quantised").output_dtype("bf16");
            let what = format!("input scales times {factor}, {backend}");
            assert_bf16_answers(run.succeed().layer(0), 0, &[1.0, 2.0, 4.0, 8.0], 0, &what);
        }
    }
}

/// Divisors where multipliers belong: the compressed-tensors names are refused, an implausible value is named.
#[test]
fn c5_divisors_for_multipliers() {
    let work = Work::new();
    let s = S::new(4, 128, 128);
    let mut renamed = s.checkpoint();
    renamed.for_each("weight_scale_2", |scalar| *scalar = Tensor::scalar(3584.0));
    renamed.for_each("input_scale", |scalar| *scalar = Tensor::scalar(3584.0));
    renamed.rename("weight_scale_2", "weight_global_scale");
    renamed.rename("input_scale", "input_global_scale");
    let renamed = work.checkpoint(&renamed);
    let run = |checkpoint: &Path| Run::new(&work, checkpoint, &s.tokens(4, 1.0)).choice(&Choice::single(0..4)).ranks(2);
    run(&renamed).fails(&["_global_scale", "divisors"]);

    let mut large = s.checkpoint();
    large.set_scalar(2, "up_proj", "weight_scale_2", 3584.0);
    let large = work.checkpoint(&large);
    let (outcome, _) = run(&large).attempt();
    let tensor = expert_tensor(0, 2, "up_proj", "weight_scale_2");
    let said = outcome.stderr.matches(&tensor).count();
    assert_eq!(said, 1, "an implausible multiplier is named once: {}", outcome.printed());
    assert!(outcome.stderr.contains("3584"), "{}", outcome.printed());
}

/// One expert, one rank, one token of value `a` at column 0.
fn c8_run(
    work: &Work,
    s: S,
    checkpoint: &crate::support::checkpoint::Checkpoint,
    input: &Tensor,
) -> Vec<(String, Done)> {
    let dir = work.checkpoint(checkpoint);
    let run = Run::new(work, &dir, input).choice(&Choice::single([0]));
    assert_eq!(s.geometry.num_experts, 1);
    backends_and_modes()
        .map(|(backend, activations)| {
            let done = run.clone().backend(backend).activations(activations).succeed();
            (format!("{backend} {activations}"), done)
        })
        .collect()
}

/// Activations above what the input scale can hold clip, and are counted.
#[test]
fn c8_saturating_activations_are_counted() {
    let work = Work::new();
    let (s, checkpoint) = directed::saturating();
    for (what, done) in c8_run(&work, s, &checkpoint, &s.tokens(1, 4000.0)) {
        let saturated = done.report.layer(0)["fc1_input"]["num_saturated"].as_u64().expect("a count");
        if what.ends_with("bf16") {
            // bf16 holds 4000 exactly.
            assert_rows(done.layer(0), 0, &[answer("bf16")], Tolerance::Relative(2e-6), &what);
            assert_eq!(saturated, 0, "{what}");
        } else {
            // 4000 clips to 2688, so g = u = 0.672; h then goes through NVFP4 with input_scale 1/2688.
            let h = situ(0.672, 0.672, 4.0, Some(25.0));
            assert!((h - 0.296_44).abs() < 1e-3, "the case's own arithmetic");
            assert_rows(done.layer(0), 0, &[h], Tolerance::Relative(0.07), &what);
            assert_eq!(saturated, 1, "{what}: one block of FC1's input is clipped");
        }
    }
}

/// Scales at the ends of their range: the largest and the smallest block scale, and sums beyond fp16.
#[test]
fn c8_scales_at_the_ends_of_their_range() {
    let work = Work::new();
    let (s, cases) = directed::ends_of_range();
    for (name, checkpoint, input) in &cases {
        for (what, done) in c8_run(&work, s, checkpoint, input) {
            let activations = if what.ends_with("bf16") { "bf16" } else { "quantised" };
            assert_answers(done.layer(0), 0, activations, &[1.0], &format!("{name}, {what}"));
        }
    }
    assert!((answer("quantised") - S_ANSWER_W4A4).abs() < 1e-12);
}
