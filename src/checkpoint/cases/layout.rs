//! Case D4, and the other ways in which a layer's tensors can be other than NVFP4 or bf16 experts.

use serde_json::json;

use super::super::testing::{Sample, Size, Tensor, loads, refused, refused_by_headers};
use super::super::{Checkpoint, CheckpointError, ExpertFormat, LayoutError, Warning};
use crate::ids::LayerIdx;

const GATE: &str = "model.layers.0.mlp.experts.1.gate_proj";

/// S with H = 128 and I = 256.
fn sample() -> Sample {
    Sample::s(2, 128, 256)
}

fn part(part: &str) -> String {
    format!("{GATE}.{part}")
}

#[test]
fn case_d4_i_transposed_gate() {
    let mut sample = sample();
    sample.tensor(&part("weight")).shape = vec![64, 256];
    refused_by_headers(sample.write().path(), 0, &[&part("weight"), "[64, 256]", "[256, 64]", "transposed"]);
}

#[test]
fn case_d4_ii_only_the_scale_shape_tells() {
    let mut sample = Sample::s(2, 256, 128);
    assert_eq!(sample.tensor(&part("weight")).shape, [128, 128]);
    sample.tensor(&part("weight_scale")).shape = vec![16, 128];
    refused_by_headers(sample.write().path(), 0, &[&part("weight_scale"), "[16, 128]", "[128, 16]", "transposed"]);
}

#[test]
fn case_d4_iii_to_v_fused_gate_and_up() {
    for name in ["experts.1.gate_up_proj", "experts.1.w13"] {
        let mut sample = sample();
        sample.remove("experts.1.gate_proj");
        sample.remove("experts.1.up_proj");
        sample.nvfp4(&format!("model.layers.0.mlp.{name}"), [512, 128], 1.0);
        refused_by_headers(sample.write().path(), 0, &[name, "fused", "gate_proj and up_proj"]);
    }
    let mut sample = sample();
    sample.remove(".experts.");
    let stacked = Tensor::bf16(&[2, 512, 128], 0.0);
    sample.tensors.insert("model.layers.0.mlp.experts.gate_up_proj".to_owned(), stacked);
    sample.tensors.insert("model.layers.0.mlp.experts.down_proj".to_owned(), Tensor::bf16(&[2, 128, 256], 0.0));
    refused(sample.write().path(), &["experts.", "export"]);
}

#[test]
fn case_d4_vi_scales_as_u8_load_with_a_warning() {
    let mut sample = sample();
    sample.tensor(&part("weight_scale")).dtype = "U8";
    let (_, manifest) = loads(sample.write().path());
    assert_eq!(manifest.warnings, [Warning::ScalesAsU8 { count: 1, first: part("weight_scale") }]);
    assert_eq!(manifest.experts, [ExpertFormat::Nvfp4; 2]);
    // Their bits are checked like any others.
    sample.tensor(&part("weight_scale")).bytes[5] = 0xFF;
    refused(sample.write().path(), &[&part("weight_scale"), "NaN", "expert 1"]);
}

#[test]
fn case_d4_vii_scales_as_f32() {
    let mut sample = sample();
    let scale = sample.tensor(&part("weight_scale"));
    *scale = Tensor::new("F32", &scale.shape, 1.0_f32.to_le_bytes().repeat(scale.bytes.len()));
    refused_by_headers(sample.write().path(), 0, &[&part("weight_scale"), "F32", "F8_E4M3"]);
}

#[test]
fn case_d4_viii_bf16_without_scales_runs_in_bf16_and_says_so() {
    let mut sample = sample();
    for name in ["gate_proj", "up_proj", "down_proj"] {
        sample.make_bf16(&format!("model.layers.0.mlp.experts.1.{name}"));
    }
    let (_, manifest) = loads(sample.write().path());
    assert_eq!(manifest.experts, [ExpertFormat::Nvfp4, ExpertFormat::Bf16]);
    assert!(!manifest.quantise_activations);
    let [Warning::UndeclaredBf16 { count: 3, first }] = &manifest.warnings[..] else {
        panic!("{:?}", manifest.warnings)
    };
    assert!(first.contains("experts.1."));
}

#[test]
fn an_expert_of_two_formats_is_refused() {
    let mut sample = sample();
    sample.make_bf16(GATE);
    refused_by_headers(sample.write().path(), 0, &["experts.1.up_proj", "NVFP4", "bf16"]);
}

#[test]
fn bf16_with_leftover_scales_is_refused() {
    let mut sample = sample();
    *sample.tensor(&part("weight")) = Tensor::bf16(&[256, 128], 0.0);
    refused_by_headers(sample.write().path(), 0, &[&part("weight"), "BF16", "U8"]);
}

#[test]
fn other_dtypes_are_refused_by_name() {
    for (dtype, bytes, words) in [("F8_E4M3", 1, "FP8"), ("F32", 4, "bf16"), ("F16", 2, "bf16")] {
        let mut sample = sample();
        sample.make_bf16(GATE);
        *sample.tensor(&part("weight")) = Tensor::new(dtype, &[256, 128], vec![0; 256 * 128 * bytes]);
        refused_by_headers(sample.write().path(), 0, &[&part("weight"), dtype, "BF16", words]);
    }
    let mut sample = sample();
    *sample.tensor(&part("weight_scale_2")) = Tensor::new("F32", &[256], vec![0; 1024]);
    refused_by_headers(sample.write().path(), 0, &[&part("weight_scale_2"), "[256]", "scalar"]);
    let mut sample = self::sample();
    *sample.tensor(&part("weight_scale_2")) = Tensor::bf16(&[], 1.0);
    refused_by_headers(sample.write().path(), 0, &[&part("weight_scale_2"), "BF16", "F32"]);
}

#[test]
fn mxfp4_scales_are_told_by_their_shape() {
    let mut sample = sample();
    *sample.tensor(&part("weight_scale")) = Tensor::new("U8", &[256, 4], vec![0; 1024]);
    refused_by_headers(sample.write().path(), 0, &[&part("weight_scale"), "[256, 8]", "[256, 4]", "MXFP4"]);
}

#[test]
fn packed_weights_without_scales_or_declaration_are_refused() {
    for leaf in ["weight_scale", "weight_scale_2"] {
        let mut sample = sample();
        sample.tensors.remove(&part(leaf)).unwrap();
        refused_by_headers(sample.write().path(), 0, &[&part(leaf), "missing"]);
    }
    let mut sample = sample();
    sample.quant = None;
    refused_by_headers(sample.write().path(), 0, &["experts.0.gate_proj", "U8", "hf_quant_config.json"]);
    let mut sample = self::sample();
    sample.quant = Some(json!({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "model.layers.0.mlp.experts": {"quant_algo": "FP8"}}}}));
    refused_by_headers(sample.write().path(), 0, &["`FP8`", "U8"]);
}

#[test]
fn case_b3_width_that_16_does_not_divide() {
    let mut sample = Sample::s(4, 128, 128);
    sample.config["hidden_size"] = json!(136);
    for expert in 0..4 {
        for name in ["gate_proj", "up_proj", "down_proj"] {
            let module = format!("model.layers.0.mlp.experts.{expert}.{name}");
            let (out, inner) = if name == "down_proj" { (136, 128) } else { (128, 136) };
            sample.nvfp4(&module, [out, inner], 1.0);
        }
    }
    *sample.tensor("model.layers.0.mlp.gate.weight") = Tensor::bf16(&[4, 136], 0.0);
    refused_by_headers(sample.write().path(), 0, &["136", "16"]);
    for hidden in [144, 160, 192, 2880] {
        let (_, manifest) = loads(Sample::s(4, hidden, 128).write().path());
        assert_eq!(manifest.experts.len(), 4);
    }
}

#[test]
fn case_c5_iii_compressed_tensors_names() {
    for name in ["weight_global_scale", "input_global_scale", "weight_packed"] {
        let mut sample = sample();
        sample.tensors.insert(part(name), Tensor::scalar(3584.0));
        refused_by_headers(sample.write().path(), 0, &[&part(name), "compressed-tensors", "divisors", "ModelOpt"]);
    }
}

#[test]
fn biases_and_unknown_tensors_are_refused() {
    for (name, word) in [("bias", "biases"), ("pre_quant_scale", "AWQ"), ("zero_point", "no meaning")] {
        let mut sample = sample();
        sample.tensors.insert(part(name), Tensor::bf16(&[256], 0.0));
        refused_by_headers(sample.write().path(), 0, &[&part(name), word]);
    }
    let mut sample = sample();
    sample.tensors.insert("model.layers.0.mlp.shared_expert_gate.weight".to_owned(), Tensor::bf16(&[1, 128], 0.0));
    refused_by_headers(sample.write().path(), 0, &["shared_expert_gate", "Qwen3-Next"]);
}

#[test]
fn missing_and_extra_experts_are_named() {
    let mut sample = Sample::s(4, 128, 128);
    sample.remove("experts.2.");
    refused_by_headers(sample.write().path(), 0, &["layer 0", "3 experts", "missing: 2", "4"]);
    let mut sample = Sample::s(4, 128, 128);
    sample.config["num_experts"] = json!(3);
    refused_by_headers(sample.write().path(), 0, &["4 experts", "too many: 3", "says 3"]);
    let mut sample = Sample::s(4, 128, 128);
    sample.remove("experts.1.up_proj.weight");
    refused_by_headers(sample.write().path(), 0, &["experts.1.up_proj.weight is missing"]);
    let mut sample = Sample::s(4, 128, 128);
    let twin = sample.tensor("model.layers.0.mlp.experts.1.up_proj.weight").clone();
    sample.tensors.insert("model.layers.0.mlp.experts.1.w3.weight".to_owned(), twin);
    refused_by_headers(sample.write().path(), 0, &["up_proj.weight", "w3.weight", "two names"]);
}

#[test]
fn the_other_scheme_loads_and_names_missing_tensors_its_own_way() {
    let mut sample = Sample::s(2, 128, 64);
    sample.tensors = sample
        .tensors
        .into_iter()
        .map(|(name, tensor)| {
            let name = name
                .replace(".mlp.", ".block_sparse_moe.")
                .replace("gate_proj", "w1")
                .replace("up_proj", "w3")
                .replace("down_proj", "w2");
            (name, tensor)
        })
        .collect();
    let (_, manifest) = loads(sample.write().path());
    assert_eq!(manifest.block, "model.layers.0.block_sparse_moe");
    sample.tensors.retain(|name, _| !name.contains("experts.1.w2."));
    refused_by_headers(sample.write().path(), 0, &["model.layers.0.block_sparse_moe.experts.1.w2.weight is missing"]);
}

#[test]
fn moe_layers_are_checked_against_the_config() {
    let size = Size { layers: 3, experts: 2, hidden: 32, intermediate: 32 };
    let mut sample = Sample::of(size, "");
    sample.config["num_hidden_layers"] = json!(2);
    let checkpoint = Checkpoint::open(sample.write().path()).unwrap();
    assert_eq!(checkpoint.moe_layers(), [LayerIdx(0), LayerIdx(1)]);
    let beyond = Warning::LayersBeyondModel { layers: vec![LayerIdx(2)], num_layers: 2 };
    assert_eq!(checkpoint.warnings(), std::slice::from_ref(&beyond));
    assert!(beyond.is_note());
    let error = checkpoint.layer(LayerIdx(2)).unwrap_err();
    assert!(matches!(error, CheckpointError::NoSuchLayer { .. }) && error.to_string().contains("0, 1"), "{error}");

    sample.config["num_hidden_layers"] = json!(4);
    refused(sample.write().path(), &["layers 3 are MoE layers", "first_k_dense_replace"]);
    sample.config["num_hidden_layers"] = json!(3);
    sample.config["first_k_dense_replace"] = json!(1);
    let checkpoint = Checkpoint::open(sample.write().path()).unwrap();
    assert_eq!(checkpoint.warnings(), [Warning::UnexpectedMoeLayers { layers: vec![LayerIdx(0)] }]);
}

#[test]
fn experts_elsewhere_are_reported_and_never_mixed_in() {
    let mut sample = sample();
    let other = Sample::of(Size { layers: 1, experts: 2, hidden: 128, intermediate: 256 }, "mtp.");
    sample.tensors.extend(other.tensors.clone());
    let checkpoint = Checkpoint::open(sample.write().path()).unwrap();
    let [Warning::ForeignExperts { count: 24, first }] = checkpoint.warnings() else {
        panic!("{:?}", checkpoint.warnings())
    };
    assert!(first.starts_with("mtp.layers.0."));

    sample.tensors = other.tensors;
    let error = refused(sample.write().path(), &["no MoE layer", "mtp.layers.0."]);
    assert!(matches!(error, CheckpointError::Layout(LayoutError::NoMoeLayers { .. })));
    let mut twice = self::sample();
    twice.tensors.extend(
        Sample::of(Size { layers: 1, experts: 2, hidden: 128, intermediate: 256 }, "language_model.model.").tensors,
    );
    refused(twice.write().path(), &["layer 0", "model.layers.0.mlp", "language_model.model.layers.0.mlp"]);
}

#[test]
fn router_shared_expert_and_latent_must_be_the_configs() {
    let router = "model.layers.0.mlp.gate.weight";
    let mut sample = sample();
    sample.tensors.remove(router).unwrap();
    refused_by_headers(sample.write().path(), 0, &[router, "missing"]);
    let mut sample = self::sample();
    *sample.tensor(router) = Tensor::bf16(&[128, 2], 0.0);
    refused_by_headers(sample.write().path(), 0, &[router, "[128, 2]", "[2, 128]", "transposed"]);
    let mut sample = self::sample();
    *sample.tensor(router) = Tensor::new("F16", &[2, 128], vec![0; 512]);
    refused_by_headers(sample.write().path(), 0, &[router, "F16", "BF16 or F32"]);

    let shared = "model.layers.0.mlp.shared_experts";
    let mut sample = self::sample();
    sample.config["n_shared_experts"] = json!(1);
    refused_by_headers(sample.write().path(), 0, &[&format!("{shared}.gate_proj.weight"), "lacks"]);
    for (name, shape) in [("gate_proj", [256, 128]), ("up_proj", [256, 128]), ("down_proj", [128, 256])] {
        sample.tensors.insert(format!("{shared}.{name}.weight"), Tensor::bf16(&shape, 0.5));
    }
    sample.exclude("*shared_experts*");
    let (checkpoint, manifest) = loads(sample.write().path());
    assert_eq!(manifest.shared, Some(ExpertFormat::Bf16));
    assert!(manifest.quantise_activations && !manifest.quantise_shared);
    let expert = checkpoint.read_shared(&manifest).unwrap().unwrap();
    assert_eq!((expert.down.out_features, expert.down.in_features), (128, 256));
    sample.config["n_shared_experts"] = json!(2);
    refused_by_headers(sample.write().path(), 0, &[shared, "[256, 128]", "[512, 128]"]);
    sample.config["n_shared_experts"] = json!(0);
    refused_by_headers(sample.write().path(), 0, &[shared, "has them"]);

    let mut sample = self::sample();
    sample.tensors.insert("model.layers.0.mlp.routed_expert_norm.weight".to_owned(), Tensor::bf16(&[128], 1.0));
    refused_by_headers(sample.write().path(), 0, &["routed_expert_norm.weight", "has it"]);
}

#[test]
fn the_correction_bias_must_be_where_the_method_needs_it() {
    let bias = "model.layers.0.mlp.gate.e_score_correction_bias";
    let mut sample = sample();
    sample.config["model_type"] = json!("deepseek_v3");
    refused_by_headers(sample.write().path(), 0, &[bias, "missing"]);
    sample.tensors.insert(bias.to_owned(), Tensor::bf16(&[2], 0.25));
    let (checkpoint, manifest) = loads(sample.write().path());
    assert_eq!(checkpoint.read_router(&manifest).unwrap().bias, Some(vec![0.25, 0.25]));
    sample.tensor(bias).bytes.copy_from_slice(&[0, 0, 0xC0, 0x7F]);
    refused(sample.write().path(), &[bias, "value 1", "NaN", "finite"]);
    sample.config["model_type"] = json!("llama4");
    refused_by_headers(sample.write().path(), 0, &[bias, "no correction bias"]);
}

#[test]
fn case_b4_top_k_is_refused_before_any_layer() {
    let mut sample = sample();
    sample.config["num_experts_per_tok"] = json!(5);
    let error = Checkpoint::open(sample.write().path()).unwrap_err();
    let message = super::super::testing::chain(&error);
    assert!(message.contains('5') && message.contains("2 experts"), "{message}");
}
