//! The tensors of a MoE block sorted by role, and whether the experts are all there.

use std::collections::BTreeMap;

use super::error::CheckpointError;
use super::faults::Faults;
use super::layout_error::LayoutError;
use super::manifest::Parts;
use super::naming::{ProjectionKind, Role, role};
use super::projection::Slots;
use super::table::TensorTable;
use crate::ids::LayerIdx;

/// Tensors of a block by their role.
#[derive(Default)]
pub(super) struct Found {
    pub(super) experts: BTreeMap<u32, [Slots; 3]>,
    pub(super) shared: Option<[Slots; 3]>,
    pub(super) parts: Parts,
    /// The module of one projection, as a pattern for the names of missing ones.
    pub(super) example: Option<String>,
    pub(super) shared_example: Option<String>,
}

/// Sorts the tensors of a block.
pub(super) fn find_roles(
    table: &TensorTable,
    layer: LayerIdx,
    block: &str,
    faults: &mut Faults,
) -> Result<Found, CheckpointError> {
    let mut found = Found::default();
    let prefix = format!("{block}.");
    for (idx, entry) in table.under(&prefix) {
        let inside = &entry.name[prefix.len()..];
        let slot = match role(inside) {
            Role::Expert { expert, kind, part } => {
                found.example.get_or_insert_with(|| module_of(&entry.name).to_owned());
                &mut found.experts.entry(expert).or_default()[kind as usize][part as usize]
            }
            Role::Shared { kind, part } => {
                found.shared_example.get_or_insert_with(|| module_of(&entry.name).to_owned());
                &mut found.shared.get_or_insert_default()[kind as usize][part as usize]
            }
            Role::RouterWeight => &mut found.parts.router_weight,
            Role::RouterBias => &mut found.parts.router_bias,
            Role::LatentDown => &mut found.parts.latent_down,
            Role::LatentUp => &mut found.parts.latent_up,
            Role::LatentNorm => &mut found.parts.latent_norm,
            Role::Refused(reason) => {
                faults.raise(LayoutError::RefusedTensor { layer, tensor: entry.name.to_string(), reason })?;
                continue;
            }
        };
        if let Some(other) = slot.replace(idx) {
            let other = table.entry(other).name.to_string();
            faults.raise(LayoutError::NamedTwice { layer, tensor: entry.name.to_string(), other })?;
        }
    }
    Ok(found)
}

/// The module that a tensor belongs to.
pub(super) fn module_of(tensor: &str) -> &str {
    tensor.rsplit_once('.').map_or(tensor, |(module, _)| module)
}

/// The last component of a projection's module, in the naming scheme of an example from the same layer.
pub(super) fn module_name(example: Option<&str>, kind: ProjectionKind) -> &'static str {
    let short = example.is_some_and(|name| name.ends_with(".w1") || name.ends_with(".w2") || name.ends_with(".w3"));
    match (kind, short) {
        (ProjectionKind::Gate, false) => "gate_proj",
        (ProjectionKind::Up, false) => "up_proj",
        (ProjectionKind::Down, false) => "down_proj",
        (ProjectionKind::Gate, true) => "w1",
        (ProjectionKind::Up, true) => "w3",
        (ProjectionKind::Down, true) => "w2",
    }
}

/// Experts must be exactly `0..num_experts`.
pub(super) fn check_count(
    found: &Found,
    layer: LayerIdx,
    num_experts: usize,
    faults: &mut Faults,
) -> Result<(), CheckpointError> {
    const NUM_LISTED: usize = 8;
    let is_expert = |expert: u32| (expert as usize) < num_experts;
    let beyond = found.experts.keys().filter(|&&expert| !is_expert(expert)).map(u32::to_string);
    let beyond: Vec<_> = beyond.take(NUM_LISTED).collect();
    if found.experts.len() == num_experts && beyond.is_empty() {
        return Ok(());
    }
    let missing =
        (0..u32::try_from(num_experts).unwrap_or(u32::MAX)).filter(|expert| !found.experts.contains_key(expert));
    let missing: Vec<_> = missing.take(NUM_LISTED).map(|expert| expert.to_string()).collect();
    let detail = match (missing.is_empty(), beyond.is_empty()) {
        (false, true) => format!("missing: {}", missing.join(", ")),
        (true, _) => format!("too many: {}", beyond.join(", ")),
        (false, false) => format!("missing: {}; too many: {}", missing.join(", "), beyond.join(", ")),
    };
    faults.raise(LayoutError::NumExperts { layer, wanted: num_experts, found: found.experts.len(), detail })
}
