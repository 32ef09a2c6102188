//! Cases C2, C3 and C5: scales that are missing, impossible, different for gate and up, or upside down.

use serde_json::json;

use super::super::tensors::{Projection, ProjectionData};
use super::super::testing::{Sample, Tensor, loads, refused, refused_by_headers};
use super::super::{Checkpoint, CheckpointError, LayerScales, ScaleError, Warning};
use crate::ids::{ExpertIdx, LayerIdx};

fn sample() -> Sample {
    Sample::s(4, 128, 128)
}

fn name(expert: u32, projection: &str, part: &str) -> String {
    format!("model.layers.0.mlp.experts.{expert}.{projection}.{part}")
}

fn global_scale(projection: &Projection) -> f32 {
    match projection.data {
        ProjectionData::Nvfp4 { global_scale, .. } => global_scale,
        ref other => panic!("not NVFP4: {other:?}"),
    }
}

fn input_scale(projection: &Projection) -> Option<f32> {
    match projection.data {
        ProjectionData::Nvfp4 { input_scale, .. } => input_scale,
        ref other => panic!("not NVFP4: {other:?}"),
    }
}

#[test]
fn case_c2_i_an_expert_without_input_scales() {
    let mut sample = sample();
    let names = ["gate_proj", "up_proj", "down_proj"].map(|projection| name(3, projection, "input_scale"));
    for name in &names {
        sample.tensors.remove(name).unwrap();
    }
    let mut words: Vec<_> = names.iter().map(String::as_str).collect();
    words.extend(["expert 3", "3 of 12"]);
    // From headers alone: every rank says so, whichever experts it owns and wherever tokens go.
    refused_by_headers(sample.write().path(), 0, &words);
    let mut sample = self::sample();
    sample.tensors.remove(&names[1]).unwrap();
    refused_by_headers(sample.write().path(), 0, &[&names[1], "expert 3", "1 of 12"]);
}

#[test]
fn case_c2_ii_to_iv_impossible_input_scales() {
    for (value, shown) in [(0.0, "is 0"), (f32::NAN, "NaN"), (-1.0, "-1"), (f32::INFINITY, "inf"), (-0.0, "-0")] {
        for projection in ["gate_proj", "up_proj", "down_proj"] {
            for part in ["input_scale", "weight_scale_2"] {
                let mut sample = sample();
                let name = name(3, projection, part);
                *sample.tensor(&name) = Tensor::scalar(value);
                let error = refused(sample.write().path(), &[&name, shown, "expert 3"]);
                assert!(matches!(error, CheckpointError::Scale(ScaleError::Global { expert: Some(ExpertIdx(3)), .. })));
            }
        }
    }
}

#[test]
fn case_c2_v_no_input_scales_run_weights_only() {
    let mut sample = sample();
    sample.remove("input_scale");
    let (checkpoint, manifest) = loads(sample.write().path());
    assert!(!manifest.has_input_scales && !manifest.quantise_activations);
    assert_eq!(
        manifest.warnings,
        [Warning::NoInputScales { layer: LayerIdx(0) }],
        "the config declares quantised activations"
    );
    let expert = checkpoint.read_expert(&manifest, ExpertIdx(3)).unwrap();
    assert_eq!((global_scale(&expert.down), input_scale(&expert.down)), (8.0, None));

    let weights = json!({"num_bits": 4, "type": "float", "group_size": 16});
    let groups = json!({"group_0": {"input_activations": null, "weights": weights, "targets": ["Linear"]}});
    sample.config["quantization_config"] =
        json!({"quant_algo": "NVFP4", "config_groups": groups, "ignore": ["*.gate"]});
    let (_, manifest) = loads(sample.write().path());
    assert_eq!(manifest.warnings, []);

    // Scales that are there and declared unused leave activations unquantised too.
    let mut with_scales = self::sample();
    with_scales.config = sample.config;
    let (_, manifest) = loads(with_scales.write().path());
    assert!(manifest.has_input_scales && !manifest.quantise_activations);
}

#[test]
fn case_c2_vi_scalars_of_both_shapes() {
    let plain = sample();
    let mut other = plain.clone();
    for (name, tensor) in &mut other.tensors {
        if name.ends_with("input_scale") || name.ends_with("weight_scale_2") {
            tensor.shape = vec![1];
        }
    }
    let ((one, one_layer), (two, two_layer)) = (loads(plain.write().path()), loads(other.write().path()));
    assert!(one_layer.quantise_activations && two_layer.quantise_activations);
    for expert in (0..4).map(ExpertIdx) {
        let (a, b) = (one.read_expert(&one_layer, expert).unwrap(), two.read_expert(&two_layer, expert).unwrap());
        for (a, b) in [(&a.gate, &b.gate), (&a.up, &b.up), (&a.down, &b.down)] {
            assert_eq!(global_scale(a).to_bits(), global_scale(b).to_bits(), "{expert}");
            assert_eq!(input_scale(a).unwrap().to_bits(), input_scale(b).unwrap().to_bits(), "{expert}");
        }
    }
}

#[test]
fn case_c3_gate_and_up_keep_their_own_scales() {
    for up in [10.0, 1.254_545_5] {
        let mut sample = Sample::s(2, 128, 128);
        *sample.tensor(&name(0, "up_proj", "weight_scale_2")) = Tensor::scalar(up);
        let (checkpoint, manifest) = loads(sample.write().path());
        let mut scales = LayerScales::default();
        let expert = checkpoint.read_expert_into(&manifest, ExpertIdx(0), &mut scales).unwrap();
        assert_eq!(
            (global_scale(&expert.gate).to_bits(), global_scale(&expert.up).to_bits()),
            (1.0_f32.to_bits(), up.to_bits())
        );
        checkpoint.read_expert_into(&manifest, ExpertIdx(1), &mut scales).unwrap();
        assert_eq!((scales.num_pairs, scales.num_pairs_differing), (2, 1));
    }
}

#[test]
fn case_c5_iv_an_implausible_multiplier_is_reported() {
    let mut sample = sample();
    let name = name(2, "up_proj", "weight_scale_2");
    *sample.tensor(&name) = Tensor::scalar(3584.0);
    let (checkpoint, manifest) = loads(sample.write().path());
    let mut scales = LayerScales::default();
    for expert in 0..4 {
        checkpoint.read_expert_into(&manifest, ExpertIdx(expert), &mut scales).unwrap();
    }
    let warning = scales.warning().expect("3584 is implausible");
    assert_eq!(warning, Warning::ImplausibleScales { count: 1, first: name.clone(), value_bits: 3584.0_f32.to_bits() });
    let message = warning.to_string();
    assert!(message.contains(&name) && message.contains("3584") && message.contains("divisor"), "{message}");
    // S itself, whose down scales reach 2^3, gives no such warning.
    let (checkpoint, manifest) = loads(self::sample().write().path());
    let mut scales = LayerScales::default();
    checkpoint.read_expert_into(&manifest, ExpertIdx(3), &mut scales).unwrap();
    assert_eq!(scales.warning(), None);
}

#[test]
fn block_scales_are_checked_for_experts_that_no_token_reaches() {
    for (bits, what) in [(0x7F, "NaN"), (0xFF, "NaN"), (0x81, "negative")] {
        let mut sample = sample();
        let name = name(3, "down_proj", "weight_scale");
        sample.tensor(&name).bytes[19] = bits;
        let error = refused(sample.write().path(), &[&name, what, "expert 3", "row 2, block 3"]);
        assert!(matches!(error, CheckpointError::Scale(ScaleError::Block { row: 2, block: 3, num_bad: 1, .. })));
    }
    let mut sample = sample();
    sample.tensor(&name(3, "down_proj", "weight_scale")).bytes[19] = 0x80;
    loads(sample.write().path());
}

#[test]
fn a_rank_reads_the_bytes_of_its_own_experts() {
    let dir = sample().write_two_shards();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let manifest = checkpoint.layer(LayerIdx(0)).unwrap();
    assert_eq!(checkpoint.bytes_read(), super::super::BytesRead::default());
    checkpoint.read_expert(&manifest, ExpertIdx(2)).unwrap();
    // Three of 128 x 128: codes, block scales, two scalars.
    let one = 3 * (128 * 64 + 128 * 8 + 8);
    assert_eq!(checkpoint.expert_bytes(&manifest, ExpertIdx(2)).unwrap(), one);
    assert_eq!(checkpoint.bytes_read(), super::super::BytesRead { experts: one, replicated: 0 });
    checkpoint.read_router(&manifest).unwrap();
    assert_eq!(checkpoint.bytes_read(), super::super::BytesRead { experts: one, replicated: 4 * 128 * 2 });
    assert_eq!(checkpoint.replicated_bytes(&manifest), 4 * 128 * 2);
    let error = checkpoint.read_expert(&manifest, ExpertIdx(4)).unwrap_err();
    assert!(matches!(error, CheckpointError::NoSuchExpert { num_experts: 4, .. }));
}

#[test]
fn a_shared_expert_with_some_input_scales_is_refused() {
    let mut sample = sample();
    sample.config["n_shared_experts"] = json!(1);
    for (projection, shape) in [("gate_proj", [128, 128]), ("up_proj", [128, 128]), ("down_proj", [128, 128])] {
        sample.nvfp4(&format!("model.layers.0.mlp.shared_experts.{projection}"), shape, 1.0);
    }
    let (_, manifest) = loads(sample.write().path());
    assert!(manifest.quantise_shared && manifest.shared_has_input_scales);
    let lacking = "model.layers.0.mlp.shared_experts.up_proj.input_scale";
    sample.tensors.remove(lacking).unwrap();
    refused_by_headers(sample.write().path(), 0, &[lacking, "shared expert"]);
}
