//! Faults of other systems, on the smallest experts that show them: one weight of 1 in each projection.

use std::sync::Arc;

use super::super::{Backend, ExpertsSpec, ForwardStats};
use super::{Case, ExpertTensors, Projection, ProjectionData, SITU, isas, owned, reference, simd};
use crate::numerics::nvfp4::quantise_unscaled;

const E4M3_ONE: u8 = 0x38;
const CODE_ONE: u8 = 2;

/// situ(1, 1)
const WEIGHTS_ONLY: f32 = 0.715_817_8;
/// The same, taken through NVFP4 with input_scale 1 / 2688.
const QUANTISED: f32 = 0.714_285_73;

/// A matrix of zeros but for one value.
struct OneHot {
    out_features: usize,
    in_features: usize,
    at: (usize, usize),
    code: u8,
    block_scale: u8,
    global_scale: f32,
    input_scale: f32,
}

impl OneHot {
    fn new(out_features: usize, in_features: usize, at: (usize, usize)) -> Self {
        let input_scale = 1.0 / 2688.0;
        Self { out_features, in_features, at, code: CODE_ONE, block_scale: E4M3_ONE, global_scale: 1.0, input_scale }
    }

    fn build(&self) -> Projection {
        let elements = self.out_features * self.in_features;
        let at = self.at.0 * self.in_features + self.at.1;
        let mut packed = vec![0; elements / 2];
        packed[at / 2] = self.code << (at % 2 * 4);
        let mut block_scales = vec![E4M3_ONE; elements / 16];
        block_scales[at / 16] = self.block_scale;
        Projection {
            out_features: self.out_features,
            in_features: self.in_features,
            data: ProjectionData::Nvfp4 {
                packed: owned(packed),
                block_scales: owned(block_scales),
                global_scale: self.global_scale,
                input_scale: Some(self.input_scale),
            },
        }
    }
}

/// gate, up and down of fixture S for one expert.
struct Sparse {
    gate: OneHot,
    up: OneHot,
    down: OneHot,
}

impl Sparse {
    fn new(expert: i32, spec: &ExpertsSpec, h0: usize) -> Self {
        let mut down = OneHot::new(spec.hidden, spec.intermediate, (h0, 0));
        down.global_scale = 2.0_f32.powi(expert);
        Self {
            gate: OneHot::new(spec.intermediate, spec.hidden, (0, h0)),
            up: OneHot::new(spec.intermediate, spec.hidden, (0, h0)),
            down,
        }
    }

    fn build(&self) -> ExpertTensors {
        ExpertTensors { gate: self.gate.build(), up: self.up.build(), down: self.down.build() }
    }
}

fn spec(hidden: usize, quantise_activations: bool) -> ExpertsSpec {
    ExpertsSpec { hidden, intermediate: 128, activation: SITU, quantise_activations, batch_invariant: true }
}

/// One row an expert, a token of zeros but for `value` at `h0`.
fn case(spec: ExpertsSpec, experts: &[Sparse], h0: usize, value: f32) -> Case {
    let mut tokens = vec![0.0; spec.hidden];
    tokens[h0] = value;
    let mut token_scale = 1.0;
    if spec.quantise_activations {
        token_scale = experts[0].gate.input_scale;
        let values = tokens.clone();
        quantise_unscaled(&values, token_scale, &mut tokens);
    }
    Case {
        spec,
        experts: experts.iter().map(Sparse::build).collect(),
        tokens,
        token_scale,
        row_token: vec![0; experts.len()],
        expert_offsets: (0..=experts.len()).collect(),
    }
}

fn backends() -> Vec<(String, Arc<dyn Backend>)> {
    let mut backends = vec![("reference".to_owned(), reference())];
    backends.extend(isas().map(|isa| (format!("simd, {isa}"), simd(2, isa))));
    backends
}

/// Runs on every backend, checks that all but column `h0` is zero, and hands over column `h0` of every expert.
fn for_each_backend(case: &Case, h0: usize, check: impl Fn(&str, &[f32], ForwardStats)) {
    for (name, backend) in backends() {
        let (out, stats) = case.run(&backend);
        for (i, value) in out.iter().enumerate() {
            let (expert, column) = (i / case.spec.hidden, i % case.spec.hidden);
            assert!(column == h0 || *value == 0.0, "{name}: expert {expert}, column {column} is {value}, not 0");
        }
        let found: Vec<f32> = out.iter().skip(h0).step_by(case.spec.hidden).copied().collect();
        check(&name, &found, stats);
    }
}

fn assert_near(found: f32, expected: f32, what: &str) {
    assert!((found - expected).abs() <= 1e-6 * expected.abs(), "{what}: {found}, expected {expected}");
}

/// Case B3: widths that 128 does not divide, every expert right and not the first alone.
#[test]
fn b3_widths_that_128_does_not_divide() {
    for hidden in [144, 160, 192, 2880] {
        for quantise in [false, true] {
            let spec = spec(hidden, quantise);
            let mut experts: Vec<Sparse> = (0..4).map(|expert| Sparse::new(expert, &spec, hidden - 1)).collect();
            for expert in &mut experts {
                expert.down.block_scale = 0x40;
            }
            let case = case(spec, &experts, hidden - 1, 1.0);
            let c = if quantise { QUANTISED } else { WEIGHTS_ONLY };
            for_each_backend(&case, hidden - 1, |name, found, _| {
                for (expert, value) in found.iter().enumerate() {
                    let expected = c * 2.0 * 2.0_f32.powi(expert as i32);
                    assert_near(*value, expected, &format!("{name}, hidden {hidden}, expert {expert}"));
                }
            });
        }
    }
}

/// Case C3: gate and up keep their own global scales.
#[test]
fn c3_gate_and_up_with_different_global_scales() {
    for (gate, up, value, expected) in [
        (1.0, 10.0, 1.0, 6.802_98),
        (1.0, 1.254_545_5, 1.0, 0.897_75),
        (2.0_f32.powi(-15), 3.828_568e-5, 32768.0, 0.897_75),
    ] {
        let spec = spec(128, false);
        let mut expert = Sparse::new(0, &spec, 0);
        expert.gate.global_scale = gate;
        expert.up.global_scale = up;
        for_each_backend(&case(spec, &[expert], 0, value), 0, |name, found, _| {
            assert!((found[0] - expected).abs() < 1e-5 * 10.0, "{name}: {}, expected {expected}", found[0]);
        });
    }
}

/// Case C5 (i): the same numbers with block scales times four and global scales divided by it, to the bit.
#[test]
fn c5_scales_split_another_way_give_equal_bits() {
    for quantise in [false, true] {
        let spec = spec(128, quantise);
        let plain = Sparse::new(1, &spec, 0);
        let mut split = Sparse::new(1, &spec, 0);
        for projection in [&mut split.gate, &mut split.up, &mut split.down] {
            projection.block_scale = 0x48;
            projection.global_scale /= 4.0;
        }
        let plain = case(spec, &[plain], 0, 1.0);
        let split = case(spec, &[split], 0, 1.0);
        for (name, backend) in backends() {
            assert_eq!(plain.run(&backend), split.run(&backend), "{name}, quantised: {quantise}");
        }
    }
}

/// Case C8 (i): an FC1 input beyond 6 * 448 * input_scale clips; an FC2 input beyond it is counted.
#[test]
fn c8_saturated_block_scales_are_counted() {
    let spec = spec(128, true);
    let mut expert = Sparse::new(0, &spec, 0);
    for projection in [&mut expert.gate, &mut expert.up] {
        projection.input_scale = 1.0;
        projection.global_scale = 1.0 / 4000.0;
    }
    for_each_backend(&case(spec, &[expert], 0, 4000.0), 0, |name, found, stats| {
        // situ(.672, .672) = .2947; its block scale fits input_scale 1 / 2688.
        assert!((found[0] / 0.294_7 - 1.0).abs() < 0.05, "{name}: {}", found[0]);
        assert_eq!((stats.fc2_input.num_blocks, stats.fc2_input.num_saturated), (8, 0), "{name}");
    });

    let mut expert = Sparse::new(0, &spec, 0);
    expert.down.input_scale = 0.5 / 2688.0;
    for_each_backend(&case(spec, &[expert], 0, 1.0), 0, |name, found, stats| {
        assert_near(found[0], 0.5, name);
        let counts = (stats.fc2_input.num_blocks, stats.fc2_input.num_saturated, stats.fc2_input.num_zeroed);
        assert_eq!(counts, (8, 1, 0), "{name}");
    });

    let mut expert = Sparse::new(0, &spec, 0);
    expert.down.input_scale = 1e6;
    for_each_backend(&case(spec, &[expert], 0, 1.0), 0, |name, found, stats| {
        assert_eq!((found[0], stats.fc2_input.num_zeroed), (0.0, 1), "{name}");
    });
}

/// Case C8 (ii) and (iii): the largest and smallest block scales lose nothing.
#[test]
fn c8_extreme_block_scales_are_exact() {
    for quantise in [false, true] {
        let spec = spec(128, quantise);
        let mut large = Sparse::new(0, &spec, 0);
        (large.down.code, large.down.block_scale, large.down.global_scale) = (7, 0x7E, 1.0 / 2688.0);
        let mut small = Sparse::new(0, &spec, 0);
        for projection in [&mut small.gate, &mut small.up, &mut small.down] {
            (projection.block_scale, projection.global_scale) = (0x01, 512.0);
        }
        let c = if quantise { QUANTISED } else { WEIGHTS_ONLY };
        for_each_backend(&case(spec, &[large, small], 0, 1.0), 0, |name, found, _| {
            assert_near(found[0], c, &format!("{name}, scale 448"));
            assert_near(found[1], c, &format!("{name}, scale 2^-9"));
        });
    }
}

/// Case C8 (iv): sums of 344,064 before the global scale.
#[test]
fn c8_large_sums_stay_finite() {
    let spec = spec(128, false);
    let mut case = case(spec, &[Sparse::new(0, &spec, 0)], 0, 1.0);
    case.tokens.fill(1.0);
    let ExpertTensors { gate, up, .. } = &mut case.experts[0];
    for projection in [gate, up] {
        let mut packed = vec![0; 128 * 128 / 2];
        packed[..64].fill(0x77);
        let mut block_scales = vec![E4M3_ONE; 128 * 8];
        block_scales[..8].fill(0x7E);
        projection.data = ProjectionData::Nvfp4 {
            packed: owned(packed),
            block_scales: owned(block_scales),
            global_scale: 1.0 / 344_064.0,
            input_scale: Some(1.0 / 2688.0),
        };
    }
    for_each_backend(&case, 0, |name, found, _| assert_near(found[0], WEIGHTS_ONLY, name));
}
