//! The geometry of a model's MoE layers, from the keys of its family.

use super::error::ModelError;
use super::fields::{Fields, Found, missing, positive_f32};
use super::{CorrectionBias, LatentGeometry, MoeGeometry, SharedGeometry, activation, router};

/// No model is wider; a lying config must not size an allocation.
const MAX_WIDTH: usize = 1 << 24;
/// As `MAX_WIDTH`, for experts.
const MAX_EXPERTS: usize = 1 << 20;

/// Families whose `intermediate_size` is the width of an expert.
const EXPERT_WIDTH_IN_INTERMEDIATE_SIZE: [&str; 4] = ["mixtral", "minimax_m2", "llama4", "phimoe"];

/// Refuses the models whose layers need more than the config's numbers would show.
pub(super) fn refuse_out_of_scope(fields: &Fields) -> Result<(), ModelError> {
    let refuse = |what: String, reason| Err(ModelError::Unsupported { what, reason });
    let types = fields.model_types();
    if let Some(name) = types.iter().find(|name| name.starts_with("gpt_oss")) {
        return refuse(
            format!("config.json: model_type `{name}`"),
            "its experts have biases, and its SwiGLU an alpha and an offset; neither is run by Lockstep",
        );
    }
    for key in ["mlp_bias", "moe_bias"] {
        if fields.flag(&[key])?.is_some_and(|found| found.value) {
            return refuse(format!("config.json: `{key}` is true"), "experts with biases are not run by Lockstep");
        }
    }
    if let Some(found) =
        fields.count(&["num_hash_layers", "n_hash_layers"], MAX_EXPERTS)?.filter(|found| found.value > 0)
    {
        return refuse(
            format!("config.json: `{}` is {}", found.key, found.value),
            "hash layers choose experts by token id, which a MoE layer is not given (DeepSeek-V4 is not run by Lockstep)",
        );
    }
    if let Some(found) = fields.text(&["expert_dtype"])?.filter(|found| found.value != "bf16" && found.value != "nvfp4")
    {
        return refuse(
            format!("config.json: `expert_dtype` is `{}`", found.value),
            "MXFP4 and FP8 experts are out of scope; export the experts as NVFP4 with ModelOpt",
        );
    }
    Ok(())
}

/// Reads the geometry, and whether the router has a correction bias.
pub(super) fn geometry(fields: &Fields, bias: CorrectionBias) -> Result<(MoeGeometry, bool), ModelError> {
    const HIDDEN: [&str; 1] = ["hidden_size"];
    const EXPERTS: [&str; 3] = ["n_routed_experts", "num_experts", "num_local_experts"];
    let hidden = fields.size(&HIDDEN, MAX_WIDTH)?.ok_or_else(|| missing(&HIDDEN, "the model's width"))?.value;
    let num_experts =
        fields.size(&EXPERTS, MAX_EXPERTS)?.ok_or_else(|| missing(&EXPERTS, "the number of experts"))?.value;
    let num_topk = num_topk(fields, num_experts)?;
    let intermediate = intermediate(fields)?;
    let latent_width = fields.size(&["routed_expert_hidden_size"], MAX_WIDTH)?;
    let router = router::router(fields, bias, (num_experts, num_topk))?;
    let geometry = MoeGeometry {
        hidden,
        expert_hidden: latent_width.map_or(hidden, |found| found.value),
        intermediate,
        num_experts,
        num_topk,
        shared: shared(fields, intermediate)?,
        latent: latent_width.map(|_| latent(fields)).transpose()?,
        routing: router.method,
        activation: activation::activation(fields)?,
    };
    Ok((geometry, router.has_bias))
}

fn num_topk(fields: &Fields, num_experts: usize) -> Result<usize, ModelError> {
    const TOPK: [&str; 2] = ["num_experts_per_tok", "num_experts_per_token"];
    let Found { key, value } = fields.integer(&TOPK)?.ok_or_else(|| missing(&TOPK, "top-k"))?;
    match usize::try_from(value) {
        Ok(num_topk) if (1..=num_experts).contains(&num_topk) => Ok(num_topk),
        _ => Err(ModelError::TopK { key: key.to_owned(), num_topk: value, num_experts }),
    }
}

fn intermediate(fields: &Fields) -> Result<usize, ModelError> {
    const KEYS: [&str; 1] = ["moe_intermediate_size"];
    if let Some(found) = fields.size(&KEYS, MAX_WIDTH)? {
        return Ok(found.value);
    }
    let types = fields.model_types();
    let is_expert_width =
        types.iter().any(|name| EXPERT_WIDTH_IN_INTERMEDIATE_SIZE.iter().any(|family| name.starts_with(family)));
    if is_expert_width && let Some(found) = fields.size(&["intermediate_size"], MAX_WIDTH)? {
        return Ok(found.value);
    }
    Err(missing(&KEYS, "the width of an expert"))
}

fn shared(fields: &Fields, intermediate: usize) -> Result<Option<SharedGeometry>, ModelError> {
    let count = fields.count(&["n_shared_experts", "num_shared_experts"], MAX_EXPERTS)?;
    let width = fields.count(&["shared_expert_intermediate_size"], MAX_WIDTH)?.map_or(0, |found| found.value);
    let together = match count {
        Some(found) if width == 0 => found.value.saturating_mul(intermediate),
        _ => width,
    };
    if together > MAX_WIDTH {
        return Err(ModelError::OutOfRange {
            key: count.map_or("shared_expert_intermediate_size", |found| found.key).to_owned(),
            wanted: format!("small enough for a shared width of at most {MAX_WIDTH}"),
            found: together.to_string(),
        });
    }
    Ok((together > 0).then_some(SharedGeometry { intermediate: together }))
}

fn latent(fields: &Fields) -> Result<LatentGeometry, ModelError> {
    const EPS: [&str; 1] = ["rms_norm_eps"];
    let uses_norm = fields.flag(&["latent_moe_use_norm"])?.is_some_and(|found| found.value);
    if !uses_norm {
        return Ok(LatentGeometry { norm_eps: None });
    }
    let eps = fields.float(&EPS)?.ok_or_else(|| missing(&EPS, "the epsilon of the norm after the routed sum"))?;
    Ok(LatentGeometry { norm_eps: Some(positive_f32(eps)?) })
}
