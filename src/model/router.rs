//! The routing method that a config, its model type and the presence of a correction bias add up to.
//!
//! Config files name the score function but seldom the bias that is added to it for the choice of experts; that is known
//! from the family (`deepseek_v3`, `kimi_*`, ...), from `topk_method: noaux_tc`, or from the checkpoint's own tensors.
//! Where the family or the config promise a bias, its tensor is required; elsewhere the tensors decide.

use super::error::ModelError;
use super::fields::{Fields, Found, missing, positive_f32};
use super::{CorrectionBias, RouterModel};
use crate::routing::RoutingMethod;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scores {
    Softmax,
    Sigmoid,
    SqrtSoftplus,
}

/// What the config files say about the router.
struct RouterFacts {
    scores: Scores,
    renormalise: bool,
    num_groups: usize,
    topk_group: usize,
    scaling: f32,
    bias: bool,
}

/// Families and what their code does where the config does not say.
struct Family {
    prefix: &'static str,
    scores: Scores,
    renormalise: bool,
    bias_promised: bool,
}

const FAMILIES: [Family; 12] = [
    Family { prefix: "deepseek_v4", scores: Scores::SqrtSoftplus, renormalise: true, bias_promised: true },
    Family { prefix: "deepseek_v3", scores: Scores::Sigmoid, renormalise: true, bias_promised: true },
    Family { prefix: "deepseek_v2", scores: Scores::Softmax, renormalise: false, bias_promised: false },
    Family { prefix: "kimi_", scores: Scores::Sigmoid, renormalise: true, bias_promised: true },
    Family { prefix: "glm4_moe", scores: Scores::Sigmoid, renormalise: true, bias_promised: true },
    Family { prefix: "glm_moe_dsa", scores: Scores::Sigmoid, renormalise: true, bias_promised: true },
    Family { prefix: "qwen2_moe", scores: Scores::Softmax, renormalise: false, bias_promised: false },
    Family { prefix: "qwen3_moe", scores: Scores::Softmax, renormalise: false, bias_promised: false },
    Family { prefix: "qwen3_vl_moe", scores: Scores::Softmax, renormalise: true, bias_promised: false },
    Family { prefix: "qwen3_5_moe", scores: Scores::Softmax, renormalise: true, bias_promised: false },
    Family { prefix: "qwen3_next", scores: Scores::Softmax, renormalise: true, bias_promised: false },
    Family { prefix: "mixtral", scores: Scores::Softmax, renormalise: true, bias_promised: false },
];

/// Decides the method for a model of `num_experts` experts and `num_topk` slots.
pub(super) fn router(
    fields: &Fields,
    bias: CorrectionBias,
    (num_experts, num_topk): (usize, usize),
) -> Result<RouterModel, ModelError> {
    let model_types = fields.model_types();
    let is_type = |prefix: &str| model_types.iter().any(|name| name.starts_with(prefix));
    if is_type("minimax_m2") {
        return Ok(RouterModel { method: RoutingMethod::MinimaxM2, has_bias: true });
    }
    if is_type("llama4") {
        return Ok(RouterModel { method: RoutingMethod::Llama4, has_bias: false });
    }
    let family = FAMILIES.iter().find(|family| is_type(family.prefix));
    let facts = facts(fields, family, bias)?;
    let method = method(&facts)?;
    check_groups(&facts, num_experts, num_topk)?;
    Ok(RouterModel { method, has_bias: facts.bias })
}

fn facts(fields: &Fields, family: Option<&Family>, bias: CorrectionBias) -> Result<RouterFacts, ModelError> {
    let scores = scores(fields, family)?;
    let renormalise = fields
        .flag(&["norm_topk_prob", "moe_renormalize"])?
        .map_or_else(|| family.map_or(scores != Scores::Softmax, |family| family.renormalise), |found| found.value);
    let num_groups = fields.size(&["n_group", "num_expert_group"], MAX_GROUPS)?;
    let topk_group = fields.size(&["topk_group"], MAX_GROUPS)?;
    let promised = family.is_some_and(|family| family.bias_promised) || topk_method_promises(fields)?;
    let bias = match bias {
        _ if promised => true,
        CorrectionBias::Present => true,
        CorrectionBias::Absent => false,
        CorrectionBias::Unknown if scores == Scores::Softmax => false,
        CorrectionBias::Unknown => {
            return Err(ModelError::Routing {
                facts: format!("model type `{}` with {scores:?} scores", fields.model_types().join("/")),
                reason: "the config does not say whether the router has an e_score_correction_bias; give the checkpoint itself"
                    .to_owned(),
            });
        }
    };
    let num_groups = num_groups.map_or(1, |found| found.value);
    let topk_group = match topk_group {
        Some(found) => found.value,
        None if num_groups == 1 => 1,
        None => return Err(missing(&["topk_group"], "the number of groups kept")),
    };
    Ok(RouterFacts {
        scores,
        renormalise,
        num_groups,
        topk_group,
        scaling: fields.float(&["routed_scaling_factor"])?.map_or(Ok(1.0), positive_f32)?,
        bias,
    })
}

const MAX_GROUPS: usize = 1 << 20;

fn scores(fields: &Fields, family: Option<&Family>) -> Result<Scores, ModelError> {
    match fields.text(&["scoring_func", "moe_router_activation_func", "score_func"])? {
        Some(Found { value: "softmax", .. }) => Ok(Scores::Softmax),
        Some(Found { value: "sigmoid", .. }) => Ok(Scores::Sigmoid),
        Some(Found { value: "sqrtsoftplus", .. }) => Ok(Scores::SqrtSoftplus),
        Some(Found { key, value }) => Err(ModelError::OutOfRange {
            key: key.to_owned(),
            wanted: "softmax, sigmoid or sqrtsoftplus".to_owned(),
            found: format!("`{value}`"),
        }),
        None => family.map(|family| family.scores).ok_or_else(|| ModelError::Routing {
            facts: format!("model type `{}`", fields.model_types().join("/")),
            reason: "neither scoring_func nor moe_router_activation_func is given, and the family is not known; add scoring_func"
                .to_owned(),
        }),
    }
}

/// Whether `topk_method` says that a bias steers the choice; unknown methods are refused.
fn topk_method_promises(fields: &Fields) -> Result<bool, ModelError> {
    match fields.text(&["topk_method"])? {
        None | Some(Found { value: "greedy" | "group_limited_greedy", .. }) => Ok(false),
        Some(Found { value: "noaux_tc", .. }) => Ok(true),
        Some(Found { key, value }) => Err(ModelError::OutOfRange {
            key: key.to_owned(),
            wanted: "noaux_tc or greedy".to_owned(),
            found: format!("`{value}`"),
        }),
    }
}

fn method(facts: &RouterFacts) -> Result<RoutingMethod, ModelError> {
    let &RouterFacts { scores, renormalise, num_groups, topk_group, scaling, bias } = facts;
    let refuse = |reason: &str| {
        Err(ModelError::Routing {
            facts: format!(
                "{scores:?} scores {} correction bias, {num_groups} groups, scaling {scaling}, renormalised: {renormalise}",
                if bias { "with" } else { "without" }
            ),
            reason: reason.to_owned(),
        })
    };
    match scores {
        Scores::Softmax if bias => refuse("softmax scores take no correction bias"),
        Scores::Softmax if num_groups > 1 => refuse("softmax scores are not limited to groups"),
        #[expect(clippy::float_cmp, reason = "1.0 is written, not computed")]
        Scores::Softmax if scaling != 1.0 => refuse("softmax weights are not scaled"),
        Scores::Softmax if renormalise => Ok(RoutingMethod::Renormalize),
        Scores::Softmax => Ok(RoutingMethod::Default),
        _ if !renormalise => refuse("weights of these scores are always divided by their sum"),
        Scores::SqrtSoftplus if num_groups > 1 => refuse("sqrtsoftplus scores are not limited to groups"),
        Scores::SqrtSoftplus if bias => Ok(RoutingMethod::DeepseekV4 { scaling }),
        Scores::SqrtSoftplus => refuse("sqrtsoftplus scores come with a correction bias"),
        Scores::Sigmoid if bias && num_groups == 1 => Ok(RoutingMethod::KimiK3 { scaling }),
        Scores::Sigmoid if bias => Ok(RoutingMethod::DeepseekV3 { num_groups, topk_group, scaling }),
        Scores::Sigmoid if num_groups > 1 => refuse("groups are scored with a correction bias, and there is none"),
        #[expect(clippy::float_cmp, reason = "1.0 is written, not computed")]
        Scores::Sigmoid if scaling != 1.0 => refuse("without a correction bias the weights are not scaled"),
        Scores::Sigmoid => Ok(RoutingMethod::SigmoidRenorm),
    }
}

fn check_groups(facts: &RouterFacts, num_experts: usize, num_topk: usize) -> Result<(), ModelError> {
    let &RouterFacts { num_groups, topk_group, .. } = facts;
    let fault = if !num_experts.is_multiple_of(num_groups) {
        Some(format!("{num_experts} experts do not divide into {num_groups} groups"))
    } else if topk_group > num_groups {
        Some(format!("topk_group {topk_group} is more than the {num_groups} groups"))
    } else if num_groups > 1 && num_experts / num_groups < 2 {
        Some("a group is scored by its two best experts and holds only one".to_owned())
    } else if num_topk > topk_group * (num_experts / num_groups) {
        Some(format!("{topk_group} groups of {} experts hold fewer than {num_topk}", num_experts / num_groups))
    } else {
        None
    };
    fault.map_or(Ok(()), |reason| {
        Err(ModelError::Routing {
            facts: format!("{num_experts} experts in {num_groups} groups, top-{num_topk}"),
            reason,
        })
    })
}
