//! Tests of whole config texts.

use super::*;

const K3: &str = include_str!("../../tests/fixtures/k3-tiny/config.json");
const K3_QUANT: &str = include_str!("../../tests/fixtures/k3-tiny/hf_quant_config.json");
const DSV3: &str = include_str!("../../tests/fixtures/modelopt-dsv3-tiny/config.json");
const DSV3_QUANT: &str = include_str!("../../tests/fixtures/modelopt-dsv3-tiny/hf_quant_config.json");
const QWEN3: &str = include_str!("../../tests/fixtures/modelopt-qwen3-tiny/config.json");

fn describe(config: &str, hf_quant: Option<&str>, bias: CorrectionBias) -> Result<ModelDescription, ModelError> {
    ModelDescription::from_texts(ConfigTexts { config, hf_quant_config: hf_quant }, bias)
}

/// A small model's config with `changes` laid over it; a null deletes a key.
fn config(changes: serde_json::Value) -> String {
    let mut base = serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": 128, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "norm_topk_prob": true, "hidden_act": "silu",
    });
    let (base_map, serde_json::Value::Object(changes)) = (base.as_object_mut().unwrap(), changes) else {
        unreachable!()
    };
    base_map.extend(changes);
    base.to_string()
}

fn changed(changes: serde_json::Value) -> Result<ModelDescription, ModelError> {
    describe(&config(changes), None, CorrectionBias::Absent)
}

#[track_caller]
fn refused(changes: serde_json::Value, words: &[&str]) {
    let message = changed(changes.clone()).expect_err(&format!("{changes} should be refused")).to_string();
    for word in words {
        assert!(message.contains(word), "{changes}: {message:?} lacks {word:?}");
    }
}

#[test]
fn k3_is_read_from_the_nested_config() {
    let model = describe(K3, Some(K3_QUANT), CorrectionBias::Present).unwrap();
    let wanted = MoeGeometry {
        hidden: 256,
        expert_hidden: 128,
        intermediate: 96,
        num_experts: 24,
        num_topk: 6,
        shared: Some(SharedGeometry { intermediate: 192 }),
        latent: Some(LatentGeometry { norm_eps: Some(1e-5) }),
        routing: RoutingMethod::KimiK3 { scaling: 1.0 },
        activation: Activation::Situ { beta: 4.0, linear_beta: Some(25.0) },
    };
    assert_eq!(model.geometry, wanted);
    assert_eq!(model.model_type, "kimi_linear");
    assert_eq!(model.layers.moe_layers, [1, 2].map(crate::ids::LayerIdx));
    let experts = "language_model.model.layers.1.block_sparse_moe.experts.3.w1";
    assert_eq!(model.quantisation.declared(experts), Declared::Nvfp4 { activations: true });
    let moved = "model.language_model.layers.1.block_sparse_moe.experts.3.w1";
    assert_eq!(model.quantisation.declared(moved), Declared::Nvfp4 { activations: true });
    let other = "language_model.model.layers.10.block_sparse_moe.experts.3.w1";
    assert_eq!(model.quantisation.declared(other), Declared::Unquantised { by: None });
    let shared = "language_model.model.layers.1.block_sparse_moe.shared_experts.up_proj";
    assert!(
        matches!(model.quantisation.declared(shared), Declared::Unquantised { by: Some(p) } if p.text() == "*shared_experts*")
    );
}

#[test]
fn deepseek_v3_gets_its_method_from_the_model_type() {
    for bias in [CorrectionBias::Present, CorrectionBias::Absent, CorrectionBias::Unknown] {
        let model = describe(DSV3, Some(DSV3_QUANT), bias).unwrap();
        let wanted = RoutingMethod::DeepseekV3 { num_groups: 4, topk_group: 2, scaling: 2.5 };
        assert_eq!(model.geometry.routing, wanted, "{bias:?}");
        assert!(model.router_has_bias);
        assert_eq!(model.geometry.shared, Some(SharedGeometry { intermediate: 128 }));
        assert_eq!(model.warnings, []);
    }
}

#[test]
fn qwen3_renormalises_by_its_key() {
    let model = describe(QWEN3, None, CorrectionBias::Absent).unwrap();
    assert_eq!(model.geometry.routing, RoutingMethod::Renormalize);
    assert_eq!((model.geometry.num_experts, model.geometry.num_topk), (8, 2));
    assert_eq!(model.quantisation.algorithm.as_deref(), Some("NVFP4"));
    let model = changed(serde_json::json!({"norm_topk_prob": false})).unwrap();
    assert_eq!(model.geometry.routing, RoutingMethod::Default);
}

#[test]
fn methods_follow_scores_bias_and_family() {
    use serde_json::json;
    let with = |changes, bias| describe(&config(changes), None, bias).map(|model| model.geometry.routing);
    let sigmoid = json!({"model_type": "x", "scoring_func": "sigmoid"});
    assert_eq!(with(sigmoid.clone(), CorrectionBias::Absent).unwrap(), RoutingMethod::SigmoidRenorm);
    assert_eq!(with(sigmoid.clone(), CorrectionBias::Present).unwrap(), RoutingMethod::KimiK3 { scaling: 1.0 });
    assert!(with(sigmoid, CorrectionBias::Unknown).is_err());
    let noaux =
        json!({"model_type": "x", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 2, "topk_group": 1});
    let wanted = RoutingMethod::DeepseekV3 { num_groups: 2, topk_group: 1, scaling: 1.0 };
    assert_eq!(with(noaux, CorrectionBias::Unknown).unwrap(), wanted);
    let sqrt = json!({"model_type": "x", "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5});
    assert_eq!(with(sqrt, CorrectionBias::Present).unwrap(), RoutingMethod::DeepseekV4 { scaling: 1.5 });
    let minimax = json!({"model_type": "minimax_m2", "moe_intermediate_size": null, "intermediate_size": 48});
    assert_eq!(with(minimax, CorrectionBias::Present).unwrap(), RoutingMethod::MinimaxM2);
    let mixtral = json!({"model_type": "mixtral", "norm_topk_prob": null});
    assert_eq!(with(mixtral, CorrectionBias::Absent).unwrap(), RoutingMethod::Renormalize);
    assert_eq!(with(json!({"model_type": "llama4_text"}), CorrectionBias::Absent).unwrap(), RoutingMethod::Llama4);
}

#[test]
fn routers_that_no_method_serves_are_refused() {
    use serde_json::json;
    refused(json!({"model_type": "x"}), &["scoring_func", "`x`"]);
    refused(json!({"scoring_func": "tanh"}), &["scoring_func", "`tanh`", "sigmoid"]);
    refused(json!({"n_group": 2, "topk_group": 1}), &["Softmax", "groups"]);
    refused(json!({"routed_scaling_factor": 2.5}), &["Softmax", "2.5"]);
    refused(json!({"routed_scaling_factor": 1e-60}), &["routed_scaling_factor", "finite"]);
    let v3 = |changes: serde_json::Value| {
        let mut base = json!({"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4});
        base.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        base
    };
    assert!(changed(v3(json!({}))).is_ok());
    refused(v3(json!({"n_group": 3})), &["8 experts", "3 groups"]);
    refused(v3(json!({"topk_group": 5})), &["5", "4 groups"]);
    refused(v3(json!({"num_experts_per_tok": 5})), &["top-5", "2 groups of 2"]);
    refused(v3(json!({"topk_group": null})), &["topk_group"]);
    refused(v3(json!({"norm_topk_prob": false})), &["divided by their sum"]);
}

#[test]
fn case_b4_top_k_out_of_range_names_both() {
    for k in [0, 9, -1] {
        refused(serde_json::json!({"num_experts_per_tok": k}), &[&k.to_string(), "8 experts", "num_experts_per_tok"]);
    }
    refused(serde_json::json!({"num_experts_per_tok": 2.0}), &["num_experts_per_tok", "integer"]);
    assert_eq!(changed(serde_json::json!({"num_experts_per_tok": 8})).unwrap().geometry.num_topk, 8);
    let one = changed(serde_json::json!({"num_experts": 1, "num_experts_per_tok": 1})).unwrap();
    assert_eq!(one.geometry.num_experts, 1);
}

#[test]
fn activations_are_read_or_refused_by_name() {
    use serde_json::json;
    let act = |changes| changed(changes).map(|model| model.geometry.activation);
    assert_eq!(act(json!({"hidden_act": "silu"})).unwrap(), Activation::Swiglu);
    assert_eq!(act(json!({"swiglu_limit": 10})).unwrap(), Activation::SwigluClamp { limit: 10.0 });
    let situ = json!({"hidden_act": "situ", "activation_situ_beta": 4});
    assert_eq!(act(situ).unwrap(), Activation::Situ { beta: 4.0, linear_beta: None });
    refused(
        json!({"hidden_act": "situ", "activation_situ_beta": 4.0, "swiglu_limit": 7.0}),
        &["swiglu_limit 7", "situ"],
    );
    refused(json!({"hidden_act": "situ"}), &["activation_situ_beta"]);
    refused(json!({"hidden_act": "situ", "activation_situ_beta": 0}), &["activation_situ_beta", "0"]);
    refused(json!({"hidden_act": "situ", "activation_situ_beta": 1e39}), &["activation_situ_beta", "finite"]);
    refused(
        json!({"hidden_act": "situ", "activation_situ_beta": 4, "activation_situ_linear_beta": -1}),
        &["linear_beta", "-1"],
    );
    refused(json!({"hidden_act": "gelu_pytorch_tanh"}), &["gelu_pytorch_tanh", "silu"]);
    refused(json!({"hidden_act": "relu2"}), &["relu2"]);
    refused(json!({"hidden_act": null}), &["hidden_act"]);
    let nan = config(json!({})).replace("128", "NaN");
    assert!(describe(&nan, None, CorrectionBias::Absent).unwrap_err().to_string().contains("NaN"));
}

#[test]
fn what_is_out_of_scope_is_refused_with_its_reason() {
    use serde_json::json;
    refused(json!({"model_type": "gpt_oss"}), &["gpt_oss", "biases"]);
    refused(json!({"model_type": "deepseek_v4", "num_hash_layers": 3}), &["num_hash_layers", "3", "token id"]);
    refused(json!({"expert_dtype": "fp4"}), &["expert_dtype", "MXFP4"]);
    refused(json!({"quantization_config": {"quant_method": "fp8"}}), &["`fp8`", "FP8 experts"]);
    refused(json!({"quantization_config": {"quant_method": "mxfp4"}}), &["MXFP4"]);
    refused(
        json!({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}}),
        &["divisors", "ModelOpt"],
    );
    refused(json!({"quantization_config": {"quant_method": "gptq"}}), &["`gptq`"]);
    for (algorithm, word) in
        [("FP8", "FP8"), ("W4A8_MXFP4_FP8", "MXFP4"), ("NVFP4_AWQ", "pre_quant_scale"), ("INT4", "known")]
    {
        refused(
            json!({"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}}),
            &[algorithm, word],
        );
    }
    refused(json!({"quantization_config": {"quant_algo": "NVFP4", "group_size": 32}}), &["32", "16"]);
    let groups = json!({"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}, "targets": ["Linear"]}});
    refused(json!({"quantization_config": {"quant_algo": "NVFP4", "config_groups": groups}}), &["32", "16"]);
}

#[test]
fn eight_bit_activations_are_not_taken_for_four() {
    let weights = serde_json::json!({"num_bits": 4, "type": "float", "group_size": 16});
    let group = serde_json::json!({"input_activations": {"num_bits": 8}, "weights": weights, "targets": ["Linear"]});
    let quant = serde_json::json!({"quant_algo": "NVFP4", "config_groups": {"g": group}});
    refused(serde_json::json!({"quantization_config": quant}), &["8-bit activations"]);
}

#[test]
fn spellings_must_agree_and_lies_size_nothing() {
    use serde_json::json;
    refused(json!({"n_routed_experts": 16}), &["n_routed_experts", "16", "num_experts", "8"]);
    assert!(changed(json!({"n_routed_experts": 8, "num_local_experts": 8})).is_ok());
    refused(json!({"num_experts": 1_000_000_000_000_u64}), &["num_experts"]);
    refused(json!({"num_hidden_layers": 4_000_000_000_u64}), &["num_hidden_layers"]);
    refused(json!({"hidden_size": "128"}), &["hidden_size", "integer"]);
    refused(json!({"hidden_size": null}), &["hidden_size"]);
    refused(json!({"moe_intermediate_size": null}), &["moe_intermediate_size"]);
    refused(json!({"n_shared_experts": 1_000_000}), &["n_shared_experts"]);
    refused(json!({"text_config": 3}), &["text_config", "object"]);
}

#[test]
fn dense_layers_are_left_out_by_every_key() {
    use serde_json::json;
    let layers = |changes| changed(changes).unwrap().layers.moe_layers.iter().map(|l| l.0).collect::<Vec<_>>();
    assert_eq!(layers(json!({"num_hidden_layers": 4, "first_k_dense_replace": 2})), [2, 3]);
    assert_eq!(layers(json!({"num_hidden_layers": 5, "decoder_sparse_step": 2})), [1, 3]);
    assert_eq!(layers(json!({"num_hidden_layers": 4, "mlp_only_layers": [0, 3]})), [1, 2]);
    assert_eq!(layers(json!({"num_hidden_layers": 5, "moe_layer_freq": 2})), [0, 2, 4]);
    assert_eq!(layers(json!({"num_hidden_layers": 3, "moe_layer_freq": [0, 1, 1]})), [1, 2]);
    assert_eq!(layers(json!({"num_hidden_layers": null})), [0_u32; 0]);
}

#[test]
fn both_quantisation_files_are_compared() {
    let with = |change: &str, to: &str| describe(DSV3, Some(&DSV3_QUANT.replace(change, to)), CorrectionBias::Present);
    let message = with("\"NVFP4\"", "\"FP8\"").unwrap_err().to_string();
    assert!(message.contains("`FP8`") && message.contains("`NVFP4`") && message.contains("quant_algo"), "{message}");
    let message = with("\"NVFP4\"", "null").unwrap_err().to_string();
    assert!(message.contains("nothing") && message.contains("`NVFP4`"), "{message}");
    let message = with("\"group_size\": 16", "\"group_size\": 32").unwrap_err().to_string();
    assert!(message.contains("32") && message.contains("16"), "{message}");
    let silent = DSV3.replace("\"quant_algo\": \"NVFP4\",", "");
    assert!(describe(&silent, Some(DSV3_QUANT), CorrectionBias::Present).is_ok());
    assert!(describe(&silent, None, CorrectionBias::Present).unwrap_err().to_string().contains("quant_algo"));
    let model = with("model.layers.1.mlp.gate\"", "model.layers.1.self_attn\"").unwrap();
    let [ModelWarning::ExclusionsDiffer { hf_only, config_only }] = &model.warnings[..] else {
        panic!("{:?}", model.warnings)
    };
    assert_eq!(
        (&hf_only[..], &config_only[..]),
        (&["layers.1.self_attn".to_owned()][..], &["layers.1.mlp.gate".to_owned()][..])
    );
    assert!(matches!(
        model.quantisation.declared("model.layers.1.self_attn.q_proj"),
        Declared::Unquantised { by: Some(_) }
    ));
}

#[test]
fn null_input_activations_leave_weights_only() {
    let text = DSV3.replace("\"input_activations\": {", "\"input_activations\": null, \"unused\": {");
    let model = describe(&text, Some(DSV3_QUANT), CorrectionBias::Present).unwrap();
    assert_eq!(
        model.quantisation.declared("model.layers.1.mlp.experts.0.up_proj"),
        Declared::Nvfp4 { activations: false }
    );
    let mixed = serde_json::json!({"quantization_config": {"quant_algo": "MIXED_PRECISION", "config_groups": {
        "a": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["model.layers.0.self_attn"]},
        "b": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "input_activations": null, "targets": ["*.experts.*"]},
    }, "ignore": ["model.layers.1.mlp.experts.3"]}});
    let quantisation = changed(mixed).unwrap().quantisation;
    assert_eq!(quantisation.declared("model.layers.0.self_attn.q_proj"), Declared::Other("8-bit float"));
    assert_eq!(quantisation.declared("model.layers.1.mlp.experts.2.up_proj"), Declared::Nvfp4 { activations: false });
    assert!(matches!(
        quantisation.declared("model.layers.1.mlp.experts.3.up_proj"),
        Declared::Unquantised { by: Some(_) }
    ));
    assert_eq!(quantisation.declared("lm_head"), Declared::Unquantised { by: None });
}
