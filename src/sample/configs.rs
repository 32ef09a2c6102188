//! `config.json` and `hf_quant_config.json` of a sample, with the keys that the model's own files have.
//!
//! Pure. No producer but this one is claimed: the layout is ModelOpt's, the file is not.

use serde_json::{Value, json};

use super::tensors::block_name;
use super::{Geometry, SampleFormat, SampleSpec};

/// The text of `config.json`.
pub fn config(spec: &SampleSpec) -> Value {
    match spec.geometry {
        Geometry::KimiK3 => kimi_k3(spec),
        Geometry::DeepseekV3 => with_quantisation(deepseek_v3(spec), spec),
        Geometry::Qwen3 => with_quantisation(qwen3(spec), spec),
    }
}

fn kimi_k3(spec: &SampleSpec) -> Value {
    let preset = spec.geometry.preset();
    json!({
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": {
            "model_type": "kimi_linear",
            "hidden_size": spec.hidden,
            "num_hidden_layers": spec.layers().end,
            "first_k_dense_replace": preset.num_dense,
            "num_experts": spec.num_experts,
            "num_experts_per_token": spec.num_topk,
            "num_shared_experts": preset.num_shared,
            "moe_intermediate_size": spec.intermediate,
            "routed_expert_hidden_size": spec.latent,
            "latent_moe_use_norm": true,
            "moe_renormalize": true,
            "moe_router_activation_func": "sigmoid",
            "num_expert_group": spec.num_groups,
            "topk_group": spec.topk_group,
            "routed_scaling_factor": preset.scaling,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "rms_norm_eps": 1e-5,
        },
    })
}

fn deepseek_v3(spec: &SampleSpec) -> Value {
    let preset = spec.geometry.preset();
    json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "dtype": "bfloat16",
        "first_k_dense_replace": preset.num_dense,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": spec.intermediate,
        "n_group": spec.num_groups,
        "n_routed_experts": spec.num_experts,
        "n_shared_experts": preset.num_shared,
        "norm_topk_prob": true,
        "num_experts_per_tok": spec.num_topk,
        "num_hidden_layers": spec.layers().end,
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": preset.scaling,
        "scoring_func": "sigmoid",
        "topk_group": spec.topk_group,
        "topk_method": "noaux_tc",
    })
}

fn qwen3(spec: &SampleSpec) -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": spec.intermediate,
        "norm_topk_prob": true,
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.num_topk,
        "num_hidden_layers": spec.layers().end,
        "rms_norm_eps": 1e-6,
    })
}

/// Adds the `quantization_config` that newer ModelOpt exports repeat in `config.json`.
fn with_quantisation(mut config: Value, spec: &SampleSpec) -> Value {
    if spec.format == SampleFormat::Nvfp4 {
        let format = json!({"dynamic": false, "num_bits": 4, "type": "float", "group_size": 16});
        config["quantization_config"] = json!({
            "config_groups": {"group_0": {"input_activations": format, "weights": format, "targets": ["Linear"]}},
            "ignore": gates(spec),
            "quant_algo": "NVFP4",
            "producer": producer(),
            "quant_method": "modelopt",
        });
    }
    config
}

fn producer() -> Value {
    json!({"name": "lockstep", "version": env!("CARGO_PKG_VERSION")})
}

fn gates(spec: &SampleSpec) -> Vec<String> {
    spec.layers().map(|layer| format!("{}.gate", block_name(spec.geometry, layer))).collect()
}

/// The text of `hf_quant_config.json`; none where nothing is quantised.
pub fn quant_config(spec: &SampleSpec) -> Option<Value> {
    if spec.format == SampleFormat::Bf16 {
        return None;
    }
    let quantization = match spec.geometry {
        Geometry::KimiK3 => {
            let layers = spec.layers().map(|layer| {
                let module = format!("{}.experts", block_name(spec.geometry, layer));
                (module, json!({"quant_algo": "NVFP4", "group_size": 16}))
            });
            json!({
                "quant_algo": "MIXED_PRECISION",
                "kv_cache_quant_algo": null,
                "quantized_layers": layers.collect::<serde_json::Map<String, Value>>(),
                "exclude_modules": ["*.gate", "*shared_experts*", "*routed_expert_*"],
            })
        }
        Geometry::DeepseekV3 | Geometry::Qwen3 => json!({
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": null,
            "group_size": 16,
            "exclude_modules": gates(spec),
        }),
    };
    Some(json!({"producer": producer(), "quantization": quantization}))
}
