//! What a tensor is, from its name alone.
//!
//! `PREFIX layers.N BLOCK ...` where the prefix is made of `model.` and `language_model.` in any order, and the block is `mlp` or
//! `block_sparse_moe`. Inside, experts are `experts.E.{gate,up,down}_proj` or `experts.E.{w1,w3,w2}`. Names that other formats use are
//! recognised, so that they can be refused with their reason.

use crate::ids::LayerIdx;
use crate::model::patterns::canonical;

/// One of an expert's three projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ProjectionKind {
    /// `gate_proj`, `w1`: `[intermediate, hidden]`
    Gate,
    /// `up_proj`, `w3`: `[intermediate, hidden]`
    Up,
    /// `down_proj`, `w2`: `[hidden, intermediate]`
    Down,
}

impl ProjectionKind {
    /// All three, in the order of arrays over them.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    /// gate, up or down
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gate => "gate",
            Self::Up => "up",
            Self::Down => "down",
        }
    }
}

/// One of the tensors of a projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Weight,
    BlockScales,
    GlobalScale,
    InputScale,
}

impl Part {
    /// The last component of its name.
    pub(crate) const fn leaf(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::BlockScales => "weight_scale",
            Self::GlobalScale => "weight_scale_2",
            Self::InputScale => "input_scale",
        }
    }
}

/// What a tensor of a MoE block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Expert {
        expert: u32,
        kind: ProjectionKind,
        part: Part,
    },
    Shared {
        kind: ProjectionKind,
        part: Part,
    },
    RouterWeight,
    RouterBias,
    LatentDown,
    LatentUp,
    LatentNorm,
    /// Something that changes the numbers and is not implemented.
    Refused(&'static str),
}

/// Where a name places experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place<'a> {
    /// In a MoE block of the text model: the layer and the block's full module name.
    Block(LayerIdx, &'a str),
    /// Outside the text model, or in a block of another name.
    Foreign,
}

/// The place of an expert's tensor; nothing for a name without `.experts.`.
pub(crate) fn expert_place(name: &str) -> Option<Place<'_>> {
    const EXPERTS: &str = ".experts.";
    let block_end = name.find(EXPERTS)?;
    let block = &name[..block_end];
    let place =
        canonical(block).strip_prefix("layers.").and_then(|rest| rest.split_once('.')).and_then(|(number, block)| {
            matches!(block, "mlp" | "block_sparse_moe").then(|| parse_number(number)).flatten()
        });
    Some(place.map_or(Place::Foreign, |layer| Place::Block(LayerIdx(layer), block)))
}

/// The role of a tensor from its name behind the block's.
pub(crate) fn role(inside: &str) -> Role {
    match inside {
        "gate.weight" => Role::RouterWeight,
        "gate.e_score_correction_bias" | "e_score_correction_bias" => Role::RouterBias,
        "routed_expert_down_proj.weight" => Role::LatentDown,
        "routed_expert_up_proj.weight" => Role::LatentUp,
        "routed_expert_norm.weight" => Role::LatentNorm,
        _ => {
            if let Some(rest) = inside.strip_prefix("experts.") {
                expert_role(rest)
            } else if let Some(rest) =
                inside.strip_prefix("shared_experts.").or_else(|| inside.strip_prefix("shared_expert."))
            {
                projection(rest).map_or_else(Role::Refused, |(kind, part)| Role::Shared { kind, part })
            } else {
                Role::Refused(beside_experts(inside))
            }
        }
    }
}

fn expert_role(rest: &str) -> Role {
    let Some((number, inside)) = rest.split_once('.') else {
        return Role::Refused(fused_or(rest, "it has no expert number"));
    };
    let Some(expert) = parse_number(number) else {
        return Role::Refused(fused_or(rest, "it has no expert number"));
    };
    projection(inside).map_or_else(Role::Refused, |(kind, part)| Role::Expert { expert, kind, part })
}

fn projection(inside: &str) -> Result<(ProjectionKind, Part), &'static str> {
    let (module, leaf) = inside.split_once('.').unwrap_or((inside, ""));
    let kind = match module {
        "gate_proj" | "w1" => ProjectionKind::Gate,
        "up_proj" | "w3" => ProjectionKind::Up,
        "down_proj" | "w2" => ProjectionKind::Down,
        _ => return Err(fused_or(module, "no such projection is known")),
    };
    let part = match leaf {
        "weight" => Part::Weight,
        "weight_scale" => Part::BlockScales,
        "weight_scale_2" => Part::GlobalScale,
        "input_scale" => Part::InputScale,
        _ => return Err(foreign_leaf(leaf)),
    };
    Ok((kind, part))
}

fn fused_or(name: &str, otherwise: &'static str) -> &'static str {
    if ["gate_up_proj", "up_gate_proj", "w13", "gate_and_up_proj"].iter().any(|fused| name.starts_with(fused)) {
        "gate and up are fused, and tools differ in whether the halves follow each other (in either order) or alternate; \
         export them as separate gate_proj and up_proj"
    } else if ["gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"].iter().any(|stacked| name.starts_with(stacked)) {
        "all experts are stacked in one tensor; export them one by one as experts.E.gate_proj, up_proj and down_proj"
    } else {
        otherwise
    }
}

fn foreign_leaf(leaf: &str) -> &'static str {
    match leaf {
        "weight_packed" | "weight_global_scale" | "input_global_scale" | "weight_shape" => {
            "this is compressed-tensors' layout, whose global scales are divisors where ModelOpt's weight_scale_2 and input_scale \
             multiply; export the checkpoint with ModelOpt"
        }
        "bias" => "experts with biases are not run by Lockstep",
        "weight_scale_inv" => {
            "FP8 experts with scales a tile are out of scope; export the experts as NVFP4 with ModelOpt"
        }
        "weight_blocks" | "weight_scales" | "blocks" | "scales" => {
            "MXFP4 experts are out of scope; export them as NVFP4 with ModelOpt"
        }
        "qweight" | "qzeros" | "g_idx" => "GPTQ and AWQ experts are out of scope; export them as NVFP4 with ModelOpt",
        "pre_quant_scale" => {
            "NVFP4-AWQ scales its inputs channel by channel, which is not run by Lockstep; export as plain NVFP4"
        }
        _ => "no meaning is known for it, and it may change the numbers",
    }
}

fn beside_experts(inside: &str) -> &'static str {
    if inside.starts_with("shared_expert_gate.") {
        "a gate on the shared expert (as in Qwen2-MoE and Qwen3-Next) is not run by Lockstep"
    } else if inside == "gate.bias" {
        "a bias on the router's logits is not run by Lockstep"
    } else if inside == "gate.tid2eid" {
        "hash layers choose experts by token id, which a MoE layer is not given"
    } else if inside.starts_with("gate.") {
        "a quantised router is not run by Lockstep; keep gate.weight in bf16 or f32"
    } else if inside.starts_with("routed_expert_") {
        "quantised latent projections are not run by Lockstep; keep them in bf16 or f32"
    } else {
        "no meaning is known for it in a MoE block, and it may change the numbers"
    }
}

/// A decimal without sign or leading zero.
fn parse_number(text: &str) -> Option<u32> {
    let canonical = text == "0" || !text.starts_with(['0', '+']);
    canonical.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_under_every_prefix() {
        for prefix in ["", "model.", "language_model.model.", "model.language_model."] {
            let block = format!("{prefix}layers.12.mlp");
            let name = format!("{block}.experts.3.up_proj.weight");
            assert_eq!(expert_place(&name), Some(Place::Block(LayerIdx(12), &block)));
        }
        assert_eq!(expert_place("mtp.layers.0.mlp.experts.3.up_proj.weight"), Some(Place::Foreign));
        assert_eq!(expert_place("model.layers.01.mlp.experts.3.up_proj.weight"), Some(Place::Foreign));
        assert_eq!(expert_place("model.layers.1.feed_forward.experts.3.up_proj.weight"), Some(Place::Foreign));
        assert_eq!(expert_place("model.layers.1.mlp.shared_experts.up_proj.weight"), None);
        assert_eq!(expert_place("model.layers.1.mlp.up_proj.weight"), None);
    }

    #[test]
    fn roles_of_both_schemes() {
        use ProjectionKind::{Down, Gate, Up};
        for (name, kind) in
            [("gate_proj", Gate), ("w1", Gate), ("up_proj", Up), ("w3", Up), ("down_proj", Down), ("w2", Down)]
        {
            let wanted = Role::Expert { expert: 17, kind, part: Part::GlobalScale };
            assert_eq!(role(&format!("experts.17.{name}.weight_scale_2")), wanted);
        }
        assert_eq!(role("shared_expert.up_proj.weight"), Role::Shared { kind: Up, part: Part::Weight });
        assert_eq!(role("shared_experts.up_proj.input_scale"), Role::Shared { kind: Up, part: Part::InputScale });
        assert_eq!(role("e_score_correction_bias"), Role::RouterBias);
    }

    #[test]
    fn foreign_formats_are_refused_by_reason() {
        let cases = [
            ("experts.0.gate_up_proj.weight", "fused"),
            ("experts.gate_up_proj", "fused"),
            ("experts.down_proj", "stacked"),
            ("experts.w13_weight", "fused"),
            ("experts.gate_up_proj_blocks", "fused"),
            ("experts.0.up_proj.weight_packed", "compressed-tensors"),
            ("experts.0.up_proj.input_global_scale", "divisors"),
            ("experts.0.up_proj.bias", "biases"),
            ("experts.0.up_proj.weight_scale_inv", "FP8"),
            ("experts.0.up_proj.qweight", "GPTQ"),
            ("experts.0.up_proj.pre_quant_scale", "AWQ"),
            ("experts.0.up_proj.amax", "no meaning"),
            ("experts.0.up_proj", "no meaning"),
            ("experts.-1.up_proj.weight", "no expert number"),
            ("experts.00.up_proj.weight", "no expert number"),
            ("experts.99999999999.up_proj.weight", "no expert number"),
            ("shared_expert_gate.weight", "Qwen3-Next"),
            ("gate.weight_scale", "quantised router"),
            ("gate.bias", "logits"),
            ("routed_expert_up_proj.weight_scale", "latent"),
            ("something.weight", "no meaning"),
        ];
        for (name, word) in cases {
            let Role::Refused(reason) = role(name) else { panic!("{name} is {:?}", role(name)) };
            assert!(reason.contains(word), "{name}: {reason:?} lacks {word:?}");
        }
    }
}
