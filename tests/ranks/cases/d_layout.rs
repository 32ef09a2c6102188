//! Weights laid out in another way than the names say: transposed, fused, swapped, of another dtype.

use super::backends_and_modes;
use crate::support::checkpoint::{Checkpoint, expert_tensor};
use crate::support::compare::{Tolerance, assert_rows, situ};
use crate::support::made::{Choice, S};
use crate::support::run::{BACKENDS, Run, Work};
use crate::support::tensor::{Dtype, Tensor};

fn run<'a>(work: &'a Work, s: S, checkpoint: &Checkpoint) -> Run<'a> {
    let dir = work.checkpoint(checkpoint);
    Run::new(work, &dir, &s.tokens(2, 1.0)).choice(&Choice::single(0..2)).activations("bf16").ranks(2)
}

/// S(2, 128, 256) whose live gate and up pre-activations are `g` and `u`; a negative `u` by the code's sign.
fn gate_and_up(g: f32, u: f32) -> (S, Checkpoint) {
    let s = S::new(2, 128, 256);
    let mut checkpoint = s.checkpoint();
    for expert in 0..2 {
        checkpoint.set_scalar(expert, "gate_proj", "weight_scale_2", g);
        checkpoint.set_scalar(expert, "up_proj", "weight_scale_2", u.abs());
        if u < 0.0 {
            checkpoint.of_expert(expert, "up_proj", "weight").set_code(0, 0, 10);
        }
    }
    (s, checkpoint)
}

/// The right answer and not the one with gate and up swapped.
#[test]
fn d4_gate_and_up_are_not_swapped() {
    let work = Work::new();
    for (g, u) in [(2.0, 3.0), (6.0, -6.0)] {
        let (s, checkpoint) = gate_and_up(g, u);
        let wanted = situ(g.into(), u.into(), 4.0, Some(25.0));
        for backend in BACKENDS {
            let done = run(&work, s, &checkpoint).backend(backend).succeed();
            let what = format!("g={g} u={u} {backend}");
            assert_rows(done.layer(0), 0, &[wanted, 2.0 * wanted], Tolerance::Relative(2e-6), &what);
        }
    }
    // With g = 6 and u = -6 the swapped answer is -0.05271: quantised activations tell as well.
    let (s, mut checkpoint) = gate_and_up(6.0, -6.0);
    checkpoint.for_each("down_proj.input_scale", |scalar| *scalar = Tensor::scalar(21.263_15 / 2688.0));
    let done = run(&work, s, &checkpoint).activations("quantised").succeed();
    assert_rows(done.layer(0), 0, &[-21.263_15, -42.5263], Tolerance::Relative(0.07), "quantised");
}

/// A transposed weight, also where only the scale's shape tells, and scales of another dtype.
#[test]
fn d4_transposed_and_retyped() {
    let work = Work::new();
    let (s, good) = gate_and_up(2.0, 3.0);
    let weight = expert_tensor(0, 1, "gate_proj", "weight");
    let scale = expert_tensor(0, 1, "gate_proj", "weight_scale");

    let mut transposed = good.clone();
    transposed.tensor(&weight).shape = vec![64, 256];
    run(&work, s, &transposed).fails(&[&weight, "[64, 256]", "[256, 64]"]);

    let square = S::new(2, 256, 128);
    let mut by_scale = square.checkpoint();
    assert_eq!(by_scale.tensor(&weight).shape, [128, 128], "transposed or not, the packed weight is square");
    by_scale.tensor(&scale).shape = vec![16, 128];
    run(&work, square, &by_scale).fails(&[&scale, "[16, 128]", "[128, 16]"]);

    let mut floats = good.clone();
    let ones = vec![1.0; 256 * 8];
    *floats.tensor(&scale) = Tensor::f32(&[256, 8], &ones);
    run(&work, s, &floats).fails(&[&scale, "F32", "F8_E4M3"]);

    let mut weight_dtype = good;
    let shape = weight_dtype.tensor(&weight).shape.clone();
    weight_dtype.tensor(&weight).dtype = Dtype::F8E4M3;
    run(&work, s, &weight_dtype).fails(&[&weight, "F8_E4M3", "U8"]);
    assert_eq!(shape, [256, 64]);
}

/// Fused gate and up leave open which half is which and how rows interleave: refused by name, never guessed.
#[test]
fn d4_fused_gate_and_up() {
    let work = Work::new();
    let (s, good) = gate_and_up(2.0, 3.0);
    for order in ["gate first", "up first", "interleaved"] {
        let mut fused = good.clone();
        for expert in 0..2 {
            let mut take = |projection: &str, kind: &str| {
                fused.tensors.remove(&expert_tensor(0, expert, projection, kind)).expect("the half")
            };
            let mut joined = Vec::new();
            for kind in ["weight", "weight_scale"] {
                let (gate, up) = (take("gate_proj", kind), take("up_proj", kind));
                let rows = gate.shape[0];
                let tensor = match order {
                    "gate first" => Tensor::stack(&[&gate, &up]),
                    "up first" => Tensor::stack(&[&up, &gate]),
                    _ => {
                        let of = |row: usize| [gate.rows(row, row + 1), up.rows(row, row + 1)];
                        let parts: Vec<Tensor> = (0..rows).flat_map(of).collect();
                        Tensor::stack(&parts.iter().collect::<Vec<_>>())
                    }
                };
                joined.push((kind, tensor));
            }
            for kind in ["weight_scale_2", "input_scale"] {
                joined.push((kind, take("gate_proj", kind)));
                take("up_proj", kind);
            }
            for (kind, tensor) in joined {
                fused.tensors.insert(expert_tensor(0, expert, "gate_up_proj", kind), tensor);
            }
        }
        run(&work, s, &fused).fails(&["gate_up_proj"]);
    }
}

/// Scales under U8 hold the same bits; bf16 weights without scales are unquantised experts. Both give the right answer
/// or are refused by name: never another number.
#[test]
fn d4_other_storage() {
    let work = Work::new();
    let (s, good) = gate_and_up(2.0, 3.0);
    let wanted = situ(2.0, 3.0, 4.0, Some(25.0));
    let mut as_u8 = good.clone();
    as_u8.for_each(".weight_scale", |scales| scales.dtype = Dtype::U8);
    let mut plain = good;
    for expert in 0..2 {
        for projection in crate::support::checkpoint::PROJECTIONS {
            plain.store_as_bf16(0, expert, projection);
        }
    }
    for (what, checkpoint, name) in [("scales as U8", &as_u8, "weight_scale"), ("bf16 weights", &plain, "weight")] {
        let (outcome, output) = run(&work, s, checkpoint).attempt();
        match output {
            Some(output) => {
                let found = &output["layers.0.output"];
                assert_rows(found, 0, &[wanted, 2.0 * wanted], Tolerance::Relative(2e-6), what);
            }
            None => drop(outcome.fails_clearly(2, &["experts.0.", name])),
        }
    }
}

/// Experts that the config excludes from quantisation and stores in bf16 run unquantised, beside quantised layers.
#[test]
fn d4_unquantised_layer_beside_a_quantised_one() {
    let work = Work::new();
    let s = S::new(2, 128, 256).layers(2);
    let mut checkpoint = s.checkpoint();
    for expert in 0..2 {
        for projection in crate::support::checkpoint::PROJECTIONS {
            checkpoint.store_as_bf16(1, expert, projection);
        }
    }
    let excluded = checkpoint.quant_config["quantization"]["exclude_modules"].as_array_mut().expect("a list");
    excluded.push("model.layers.1.mlp.experts*".into());
    for (backend, activations) in backends_and_modes() {
        let run = run(&work, s, &checkpoint).backend(backend);
        let done = run.activations(activations).succeed();
        // What the checkpoint keeps unquantised outranks what is asked for, and that is said.
        let said = done.outcome.stderr.contains("quantised does not reach layer 1");
        assert_eq!(said, activations == "quantised", "{}", done.outcome.printed());
        super::assert_answers(done.layer(0), 0, activations, &[1.0, 2.0], &format!("NVFP4 layer, {backend}"));
        super::assert_answers(done.layer(1), 0, "bf16", &[1.0, 2.0], &format!("bf16 layer, {backend}"));
        assert_eq!(done.report.layer(1)["quant"], "none", "{backend}");
    }
}
