//! What one MoE layer holds, checked from headers alone, for all its experts.

use super::declared::Notes;
use super::error::CheckpointError;
use super::faults::Faults;
use super::layout_error::LayoutError;
use super::naming::{Part, ProjectionKind};
use super::parts::{check_latent, check_router, check_shared};
use super::projection::{Checker, Dims, ExpertFormat, ProjectionEntries, Slots};
use super::roles::{check_count, find_roles, module_name, module_of};
use super::table::{EntryIdx, TensorTable};
use super::warning::Warning;
use crate::ids::{ExpertIdx, LayerIdx};
use crate::model::ModelDescription;

/// One MoE layer: formats of all experts, and where their tensors are.
#[derive(Debug, Clone)]
pub struct LayerManifest {
    /// The layer.
    pub layer: LayerIdx,
    /// The module that holds it, such as `model.layers.3.mlp`.
    pub block: String,
    /// Every routed expert's format.
    pub experts: Vec<ExpertFormat>,
    /// The shared expert's format, where the model has one.
    pub shared: Option<ExpertFormat>,
    /// Whether every NVFP4 projection of the routed experts has an `input_scale`. (Some with and some without is an error.)
    pub has_input_scales: bool,
    /// As `has_input_scales`, for the shared expert.
    pub shared_has_input_scales: bool,
    /// Whether the checkpoint asks for quantised activations in the routed experts: all are NVFP4, declared with quantised
    /// inputs, and have an `input_scale`.
    pub quantise_activations: bool,
    /// As `quantise_activations`, for the shared expert.
    pub quantise_shared: bool,
    /// What is odd about the layer.
    pub warnings: Vec<Warning>,
    pub(super) expert_entries: Vec<[ProjectionEntries; 3]>,
    pub(super) parts: Parts,
}

/// The tensors around the routed experts.
#[derive(Debug, Clone, Default)]
pub(super) struct Parts {
    pub(super) shared: Option<[ProjectionEntries; 3]>,
    pub(super) router_weight: Option<EntryIdx>,
    pub(super) router_bias: Option<EntryIdx>,
    pub(super) latent_down: Option<EntryIdx>,
    pub(super) latent_up: Option<EntryIdx>,
    pub(super) latent_norm: Option<EntryIdx>,
}

/// A layer as far as it is whole: experts that have a fault are absent.
#[derive(Debug)]
pub(crate) struct LayerSurvey {
    pub(crate) experts: Vec<Option<[ProjectionEntries; 3]>>,
    pub(super) parts: Parts,
    pub(super) inputs: Inputs,
    pub(super) shared_inputs: Inputs,
    pub(super) warnings: Vec<Warning>,
}

/// What is known about the quantisation of a group of experts' inputs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Inputs {
    pub(super) have_scales: bool,
    pub(super) declared: bool,
}

/// Checks a layer whose block is the module `block`.
pub(crate) fn survey(
    table: &TensorTable,
    model: &ModelDescription,
    (layer, block): (LayerIdx, &str),
    faults: &mut Faults,
) -> Result<LayerSurvey, CheckpointError> {
    let check = Checker { table, layer };
    let found = find_roles(table, layer, block, faults)?;
    check_count(&found, layer, model.geometry.num_experts, faults)?;
    let mut notes = Notes::new(layer, model.quantisation.within(block));
    let mut experts = vec![None; model.geometry.num_experts];
    for (&expert, slots) in &found.experts {
        let Some(place) = experts.get_mut(expert as usize) else { continue };
        let names = |kind| format!("{block}.experts.{expert}.{}", module_name(found.example.as_deref(), kind));
        let checked = check_expert(check, slots, |kind| Dims::routed(&model.geometry, kind), &names);
        *place = faults.take(checked.and_then(|projections| notes.take(table, &projections).map(|()| projections)))?;
    }
    let inputs = check_inputs(table, layer, &experts, faults)?.with_declared(&notes);
    if !inputs.have_scales && notes.num_nvfp4 > 0 && inputs.declared {
        notes.warnings.push(Warning::NoInputScales { layer });
    }
    let mut warnings = notes.finish();
    let mut shared_notes = Notes::new(layer, model.quantisation.within(block));
    let mut parts = found.parts.clone();
    parts.shared = check_shared(check, model, (block, &found), &mut shared_notes, faults)?;
    check_router(check, model, block, &mut parts, faults)?;
    check_latent(check, model, block, &mut parts, faults)?;
    let have_scales = match &parts.shared {
        Some(shared) => faults.take(check_shared_inputs(table, layer, shared))?.unwrap_or(false),
        None => false,
    };
    let shared_inputs = Inputs { have_scales, declared: false }.with_declared(&shared_notes);
    warnings.extend(shared_notes.finish());
    Ok(LayerSurvey { experts, parts, inputs, shared_inputs, warnings })
}

impl Parts {
    /// The router's weight and the latent projections.
    pub(super) fn matrices(&self) -> impl Iterator<Item = EntryIdx> {
        [self.router_weight, self.latent_down, self.latent_up].into_iter().flatten()
    }

    /// All but the shared expert.
    pub(super) fn around(&self) -> Vec<EntryIdx> {
        let all = [self.router_weight, self.router_bias, self.latent_down, self.latent_up, self.latent_norm];
        all.into_iter().flatten().collect()
    }
}

impl LayerManifest {
    pub(super) fn router_weight(&self) -> EntryIdx {
        self.parts.router_weight.expect("a manifest is made of layers whose router was found")
    }
}

impl LayerSurvey {
    /// Whether the checkpoint asks for quantised activations in the routed experts.
    pub(super) fn quantise_activations(&self) -> bool {
        let is_nvfp4 =
            |expert: &Option<_>| expert.as_ref().is_some_and(|entries| format_of(entries) == ExpertFormat::Nvfp4);
        self.experts.iter().all(is_nvfp4) && self.inputs.have_scales && self.inputs.declared
    }

    /// The manifest of a layer without faults; nothing if an expert has one.
    pub(super) fn into_manifest(self, layer: LayerIdx, block: String) -> Option<LayerManifest> {
        let quantise_activations = self.quantise_activations();
        let expert_entries: Vec<_> = self.experts.into_iter().collect::<Option<_>>()?;
        let experts: Vec<_> = expert_entries.iter().map(format_of).collect();
        let shared = self.parts.shared.as_ref().map(format_of);
        let (inputs, shared_inputs) = (self.inputs, self.shared_inputs);
        Some(LayerManifest {
            layer,
            block,
            quantise_activations,
            quantise_shared: shared == Some(ExpertFormat::Nvfp4) && shared_inputs.have_scales && shared_inputs.declared,
            has_input_scales: inputs.have_scales,
            shared_has_input_scales: shared_inputs.have_scales,
            experts,
            shared,
            warnings: self.warnings,
            expert_entries,
            parts: self.parts,
        })
    }
}

pub(crate) const fn format_of(projections: &[ProjectionEntries; 3]) -> ExpertFormat {
    projections[0].format()
}

/// Checks the three projections of an expert, which must share a format.
pub(super) fn check_expert(
    check: Checker<'_>,
    slots: &[Slots; 3],
    dims: impl Fn(ProjectionKind) -> Dims,
    names: &dyn Fn(ProjectionKind) -> String,
) -> Result<[ProjectionEntries; 3], LayoutError> {
    let one = |kind: ProjectionKind| check.projection(slots[kind as usize], dims(kind), &|| names(kind));
    let projections = [one(ProjectionKind::Gate)?, one(ProjectionKind::Up)?, one(ProjectionKind::Down)?];
    let wanted = projections[0].format();
    for (kind, projection) in ProjectionKind::ALL.into_iter().zip(&projections) {
        if projection.format() != wanted {
            let (wanted, found) = (wanted.name(), projection.format().name());
            return Err(LayoutError::MixedExpert { layer: check.layer, module: names(kind), wanted, found });
        }
    }
    Ok(projections)
}

impl Inputs {
    fn with_declared(self, notes: &Notes<'_>) -> Self {
        Self { declared: notes.num_nvfp4 > 0 && notes.all_activations, ..self }
    }
}

/// All NVFP4 projections have an `input_scale`, or none has.
fn check_inputs(
    table: &TensorTable,
    layer: LayerIdx,
    experts: &[Option<[ProjectionEntries; 3]>],
    faults: &mut Faults,
) -> Result<Inputs, CheckpointError> {
    let whole = || experts.iter().enumerate().filter_map(|(expert, projections)| Some((expert, projections.as_ref()?)));
    let scales = || whole().flat_map(|(_, projections)| projections.iter().filter_map(|projection| projection.scales));
    let num_projections = scales().count();
    let num_missing = scales().filter(|scales| scales.input.is_none()).count();
    if num_missing == 0 || num_missing == num_projections {
        return Ok(Inputs { have_scales: num_projections > 0 && num_missing == 0, declared: false });
    }
    let lacking = whole().find_map(|(expert, projections)| {
        let tensors = lacking_input_scales(table, projections);
        (!tensors.is_empty()).then_some((expert, tensors))
    });
    if let Some((expert, tensors)) = lacking {
        let expert = ExpertIdx::from_index(expert);
        let tensors = tensors.join(", ");
        faults.raise(LayoutError::MissingInputScale { layer, expert, tensors, num_missing, num_projections })?;
    }
    Ok(Inputs::default())
}

fn lacking_input_scales(table: &TensorTable, projections: &[ProjectionEntries; 3]) -> Vec<String> {
    let lacking =
        projections.iter().filter(|projection| projection.scales.is_some_and(|scales| scales.input.is_none()));
    lacking.map(|p| format!("{}.{}", module_of(&table.entry(p.weight).name), Part::InputScale.leaf())).collect()
}

fn check_shared_inputs(
    table: &TensorTable,
    layer: LayerIdx,
    shared: &[ProjectionEntries; 3],
) -> Result<bool, LayoutError> {
    let lacking = lacking_input_scales(table, shared);
    match (format_of(shared), lacking.len()) {
        (ExpertFormat::Bf16, _) | (_, 3) => Ok(false),
        (_, 0) => Ok(true),
        _ => Err(LayoutError::MissingSharedInputScale { layer, tensors: lacking.join(", ") }),
    }
}
