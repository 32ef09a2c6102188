//! Checks of what surrounds the routed experts: shared experts, router, latent projections.

use safetensors::Dtype;

use super::declared::Notes;
use super::error::CheckpointError;
use super::faults::Faults;
use super::layout_error::LayoutError;
use super::manifest::{Parts, check_expert};
use super::projection::{Checker, Dims, ProjectionEntries};
use super::roles::{Found, module_name, module_of};
use super::table::EntryIdx;
use crate::model::ModelDescription;

/// The shared expert, which config and tensors must agree to have or to lack.
pub(super) fn check_shared(
    check: Checker<'_>,
    model: &ModelDescription,
    (block, found): (&str, &Found),
    notes: &mut Notes<'_>,
    faults: &mut Faults,
) -> Result<Option<[ProjectionEntries; 3]>, CheckpointError> {
    let layer = check.layer;
    let part = |config, found, tensor| LayoutError::PartMismatch { layer, config, found, tensor };
    let (geometry, slots) = match (model.geometry.shared, &found.shared) {
        (None, None) => return Ok(None),
        (Some(geometry), Some(slots)) => (geometry, slots),
        (Some(_), None) => {
            let tensor = format!("{block}.shared_experts.gate_proj.weight");
            return faults.raise(part("there are shared experts", "lacks them", tensor)).map(|()| None);
        }
        (None, Some(_)) => {
            let tensor = found.shared_example.clone().unwrap_or_default();
            return faults.raise(part("there are no shared experts", "has them", tensor)).map(|()| None);
        }
    };
    let parent = found.shared_example.as_deref().map_or(block, module_of);
    let names = |kind| format!("{parent}.{}", module_name(found.shared_example.as_deref(), kind));
    let dims = |kind| Dims::of(kind, model.geometry.hidden, geometry.intermediate);
    let checked = check_expert(check, slots, dims, &names);
    let checked = checked.and_then(|projections| notes.take(check.table, &projections).map(|()| projections));
    faults.take(checked)
}

/// The router's weight and correction bias.
pub(super) fn check_router(
    check: Checker<'_>,
    model: &ModelDescription,
    block: &str,
    parts: &mut Parts,
    faults: &mut Faults,
) -> Result<(), CheckpointError> {
    let (layer, geometry) = (check.layer, &model.geometry);
    let missing = |tensor: &str| LayoutError::MissingTensor {
        layer,
        tensor: format!("{block}.{tensor}"),
        because: ", and the router needs it".to_owned(),
    };
    match parts.router_weight {
        None => faults.raise(missing("gate.weight"))?,
        Some(weight) => {
            let fault = float(check, weight)
                .and_then(|()| check.dense(weight, &[geometry.num_experts, geometry.hidden], "[experts, hidden]"));
            parts.router_weight = faults.take(fault)?.map(|()| weight);
        }
    }
    match parts.router_bias {
        None if model.router_has_bias => faults.raise(missing("gate.e_score_correction_bias"))?,
        None => {}
        Some(bias) if !model.router_has_bias => faults.raise(LayoutError::PartMismatch {
            layer,
            config: "the router has no correction bias",
            found: "has one",
            tensor: check.table.entry(bias).name.to_string(),
        })?,
        Some(bias) => {
            let fault = float(check, bias).and_then(|()| check.dense(bias, &[geometry.num_experts], "[experts]"));
            parts.router_bias = faults.take(fault)?.map(|()| bias);
        }
    }
    Ok(())
}

/// The projections and the norm around routed experts that work in a latent.
pub(super) fn check_latent(
    check: Checker<'_>,
    model: &ModelDescription,
    block: &str,
    parts: &mut Parts,
    faults: &mut Faults,
) -> Result<(), CheckpointError> {
    let (hidden, latent) = (model.geometry.hidden, model.geometry.expert_hidden);
    let has_latent = model.geometry.latent.is_some();
    let has_norm = model.geometry.latent.is_some_and(|latent| latent.norm_eps.is_some());
    let wanted: [(&mut Option<EntryIdx>, bool, &str, &[usize]); 3] = [
        (&mut parts.latent_down, has_latent, "routed_expert_down_proj.weight", &[latent, hidden]),
        (&mut parts.latent_up, has_latent, "routed_expert_up_proj.weight", &[hidden, latent]),
        (&mut parts.latent_norm, has_norm, "routed_expert_norm.weight", &[latent]),
    ];
    for (slot, is_wanted, name, shape) in wanted {
        let mismatch = |config, found| LayoutError::PartMismatch {
            layer: check.layer,
            config,
            found,
            tensor: format!("{block}.{name}"),
        };
        match *slot {
            None if is_wanted => faults.raise(mismatch("the routed experts work in a latent", "lacks a part of it"))?,
            Some(_) if !is_wanted => {
                faults.raise(mismatch(
                    "there is no such part (routed_expert_hidden_size, latent_moe_use_norm)",
                    "has it",
                ))?;
            }
            Some(entry) if is_wanted => {
                let fault =
                    float(check, entry).and_then(|()| check.dense(entry, shape, "[out, in], or [latent] for the norm"));
                *slot = faults.take(fault)?.map(|()| entry);
            }
            _ => {}
        }
    }
    Ok(())
}

fn float(check: Checker<'_>, entry: EntryIdx) -> Result<(), LayoutError> {
    check.dtype(entry, &[Dtype::BF16, Dtype::F32], "BF16 or F32", "")
}
