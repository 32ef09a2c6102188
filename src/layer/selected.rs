//! What runs every layer, resolved from the joint facts of all ranks, and the fingerprints that they compare.

use crate::config::{Choice as _, Deployment, Levels};
use crate::dispatch::nodes::Nodes;
use crate::dispatch::travel::{combine_mode, payload_form, row_form};
use crate::facts::BUILD;
use crate::ids::LayerIdx;
use crate::jit::Prepared;
use crate::select::fingerprint::{BuildFacts, SessionBuilder};
use crate::select::registry::Registry;
use crate::select::{
    DeploymentFacts, Environment, Fingerprint, InstructionSet, LayerDecision, LayerSelection, Problem, SelectError,
    Selection, resolve,
};
use crate::world::{Group, World};

use super::agreement::{self, Topic};
use super::plan::LayerPlan;
use super::session::SessionOptions;
use super::tune::TacticTable;
use super::{LayerError, MoeLayer};
use crate::model::MoeGeometry;

/// Compared before any weight is read.
pub(crate) const PLAN: Topic =
    Topic { about: "what they would run", cure: "Give every rank the same build, checkpoint, input and settings." };

/// Compared before the first step.
pub(crate) const SESSION: Topic = Topic {
    about: "what they have loaded",
    cure: "Give every rank the same build and checkpoint; a copy on one host may be stale.",
};

/// Compared once more where tactics were tuned: a rank that ran another one would be found nowhere else.
const TUNED: Topic = Topic {
    about: "the tactics that they chose from the same timings",
    cure: "Give every rank the same build; with moe.tuning: off nothing is chosen from timings.",
};

/// What a rank brings to the selection: the question, which is the same on all, and its own environment.
#[derive(Clone, Copy)]
pub(crate) struct Asks<'a> {
    pub deployment: &'a Deployment,
    pub environment: &'a Environment,
    pub problems: &'a [Problem],
    pub registry: &'a Registry,
}

/// What follows from the facts of all ranks; the same on all of them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Jointly {
    pub selection: Selection,
    pub fingerprint: Fingerprint,
    pub environments: Vec<Environment>,
    pub nodes: Nodes,
}

/// Selects from the facts of all ranks; collective.
///
/// # Errors
/// The same on all ranks: if nothing serves some layer on every rank.
pub(crate) fn select_jointly(group: &impl Group, asks: Asks<'_>) -> Result<Jointly, LayerError> {
    let Asks { deployment, environment, problems, registry } = asks;
    let environments = group.agree(agreement::gather_environments(group, environment))?;
    let nodes = group.nodes();
    let facts = group.agree(DeploymentFacts::new(deployment, nodes).map_err(SelectError::from))?;
    let selection = group.agree(resolve(problems, &facts, &environments, registry).map_err(SelectError::from))?;
    let fingerprint = group.agree(selection.fingerprint(&facts, &environments, registry))?;
    Ok(Jointly { selection, fingerprint, environments, nodes: Nodes::new(&facts.node_of_rank) })
}

/// What all ranks have agreed to run.
pub(super) struct Selected {
    pub selection: Selection,
    /// What it is, and everything it follows from.
    pub fingerprint: Fingerprint,
    /// Which ranks share a node.
    pub nodes: Nodes,
    fields: SessionBuilder,
}

impl Selected {
    /// Selects from the facts of all ranks and compares the outcome; collective.
    ///
    /// # Errors
    /// The same on all ranks: if nothing serves some layer on every rank, or the ranks differ.
    pub fn agree(
        world: &World,
        options: &SessionOptions<'_>,
        geometry: &MoeGeometry,
        plans: &[LayerPlan],
    ) -> Result<Self, LayerError> {
        let problems: Vec<_> = plans.iter().map(|plan| plan.problem.clone()).collect();
        let SessionOptions { deployment, environment, .. } = options;
        let asks = Asks { deployment, environment, problems: &problems, registry: &Registry::builtin() };
        let Jointly { selection, fingerprint, environments, nodes } = select_jointly(world, asks)?;
        let decisions: Vec<_> = plans.iter().map(|plan| plan.decision).collect();
        let fields = must_match(BUILD, options, (geometry, &decisions), (&selection, &fingerprint));
        agreement::agree_on(world, PLAN, fields.clone().finish())?;
        agreement::compare_trails(world, &selection)?;
        if world.is_root() {
            say(&selection, &fingerprint, plans);
            say_gpus(&selection, &environments);
            warn_of_harmless_differences(&environments);
        }
        Ok(Self { selection, fingerprint, nodes, fields })
    }

    /// Whether a layer's tokens cross to a node once and are passed on in it.
    pub fn goes_in_two_levels(&self, layer: LayerIdx) -> bool {
        self.selection.layer(layer).is_some_and(|selected| selected.levels == Levels::Two)
    }

    /// Puts the keys of kernels into what all ranks compare.
    pub fn add_artefacts(&mut self, prepared: &Prepared) {
        prepared.add_to(&mut self.fields);
    }

    /// What runs a layer.
    ///
    /// # Errors
    /// If nothing was selected for it, a bug.
    pub fn layer(&self, plan: &LayerPlan) -> Result<&LayerSelection, LayerError> {
        let layer = plan.problem.layer;
        let found = plan.problem.quantisation.clone();
        Ok(self.selection.layer(layer).ok_or(crate::select::FormatError::NotSelected { layer, found })?)
    }

    /// Compares what was loaded, scales by their bits, and returns it; collective.
    ///
    /// # Errors
    /// The same on all ranks: if they differ.
    pub fn agree_on_loaded(&self, world: &World, layers: &[MoeLayer]) -> Result<Loaded, LayerError> {
        let mut fields = self.fields.clone();
        layers.iter().for_each(|layer| add_loaded(&mut fields, layer));
        let fingerprint = agreement::agree_on(world, SESSION, fields.clone().finish())?;
        Ok(Loaded { fields, fingerprint })
    }

    /// Compares the tactics beside what was loaded, where any were tuned; collective. The fingerprint of the session.
    ///
    /// # Errors
    /// The same on all ranks: if they differ.
    pub fn agree_on_tactics(
        &self,
        world: &World,
        Loaded { mut fields, mut fingerprint }: Loaded,
        tactics: &TacticTable,
    ) -> Result<Fingerprint, LayerError> {
        if !tactics.0.is_empty() {
            for tuned in &tactics.0 {
                fields.tactic(&tuned.shape.with_rows(tuned.rows), tuned.tactic());
            }
            fingerprint = agreement::agree_on(world, TUNED, fields.finish())?;
        }
        if world.is_root() {
            tracing::info!(selection = %self.fingerprint.digest(), session = %fingerprint.digest(), "all ranks agree");
            fingerprint.listing().lines().for_each(|line| tracing::debug!("agreed: {line}"));
        }
        Ok(fingerprint)
    }
}

/// What all ranks have loaded alike.
pub(super) struct Loaded {
    fields: SessionBuilder,
    fingerprint: Fingerprint,
}

/// Everything that has to be alike before weights are read.
pub(crate) fn must_match(
    build: BuildFacts<'_>,
    options: &SessionOptions<'_>,
    (geometry, decisions): (&MoeGeometry, &[LayerDecision]),
    (selection, fingerprint): (&Selection, &Fingerprint),
) -> SessionBuilder {
    let mut fields = SessionBuilder::new(fingerprint);
    fields.build(build).environment(&options.environment);
    add_options(&mut fields, options);
    decisions.iter().for_each(|decision| add_decision(&mut fields, geometry, decision));
    add_layouts(&mut fields, selection);
    fields
}

fn add_options(fields: &mut SessionBuilder, options: &SessionOptions<'_>) {
    let dispatch = &options.deployment.dispatch;
    let capacity = super::memory::capacity_of(&options.deployment);
    let at_once = super::memory::tokens_at_once(capacity, options.num_tokens);
    fields
        .capacity("num_max_tokens_per_rank", dispatch.num_max_tokens_per_rank as u64)
        .capacity("tokens_at_once", at_once as u64)
        .flag("part", options.part.name())
        .flag("cuda_graph", options.deployment.moe.cuda_graph.name())
        .flag("overlap", dispatch.overlap.name())
        .flag("input_is_bf16", options.input_is_bf16);
}

fn add_decision(fields: &mut SessionBuilder, geometry: &MoeGeometry, decision: &LayerDecision) {
    let row = row_form(geometry, decision);
    fields
        .layer(decision.layer)
        .activation(decision.activation)
        .routing(geometry.routing)
        .constant("norm_eps", geometry.latent.and_then(|latent| latent.norm_eps))
        .travel("payload", payload_form(decision, 1.0).name())
        .travel("combine", combine_mode(decision).name())
        .travel("combine_dtype", row.form.name())
        .travel("return_bytes", row.form.row_bytes(row.hidden));
}

/// Packed weights are of the technique's own form, which the build fixes.
fn add_layouts(fields: &mut SessionBuilder, selection: &Selection) {
    for technique in selection.techniques() {
        let set = selection.instruction_set(technique).map(|set| set.name());
        fields.layout(&format!("packed.{technique}"), set);
    }
}

/// What every rank has of a layer: its experts' own scales are with their ranks alone.
fn add_loaded(fields: &mut SessionBuilder, layer: &MoeLayer) {
    for (projection, by) in layer.dense() {
        fields.layout(&format!("{projection}_of_layer_{}", layer.decision.layer.0), by);
    }
    let mut of_layer = fields.layer(layer.decision.layer);
    of_layer.travel("carrier", layer.carrier.name());
    of_layer.scale("fc1_input", layer.input_scale);
    if let Some(bias) = &layer.router.bias {
        of_layer.scales("router_bias", bias.iter().copied());
    }
    if let Some(norm) = layer.latent.as_ref().and_then(|latent| latent.norm.as_ref()) {
        of_layer.scales("latent_norm", norm.weight.iter().copied());
    }
    if let Some(shared) = &layer.shared {
        of_layer.scale("shared_fc1_input", shared.input_scale).scales("shared", shared.scales.iter().copied());
    }
}

fn say(selection: &Selection, fingerprint: &Fingerprint, plans: &[LayerPlan]) {
    for line in selection.summary().lines() {
        tracing::info!(selection = fingerprint.digest().short(), "{line}");
    }
    let kept: Vec<String> =
        plans.iter().filter(|plan| plan.decision.kept_unquantised).map(|plan| plan.problem.layer.to_string()).collect();
    if !kept.is_empty() {
        tracing::warn!(
            "activations: quantised does not reach {}, which the checkpoint keeps unquantised",
            kept.join(", ")
        );
    }
}

/// Which GPU each rank drives, where some layer runs on them, and which transport between them is not used, and why.
fn say_gpus(selection: &Selection, environments: &[Environment]) {
    let registry = Registry::builtin();
    let on_gpu = |selected: &&LayerSelection| {
        registry.descriptor(selected.winner.identity).is_some_and(|descriptor| descriptor.target.is_gpu())
    };
    let Some(selected) = selection.layers.iter().find(on_gpu) else { return };
    for (rank, environment) in environments.iter().enumerate() {
        let Some(gpu) = environment.gpu.present() else { continue };
        tracing::info!(
            rank,
            host = environment.host.as_deref().unwrap_or_default(),
            ordinal = environment.info.get("gpu_ordinal").map_or("", String::as_str),
            uuid = gpu.uuid.as_deref().unwrap_or_default(),
            "{}",
            gpu.name
        );
    }
    for refusal in &selected.winner.passed_over {
        tracing::warn!("tokens travel over {}; passed over: {refusal}", selected.transport.name());
    }
}

fn warn_of_harmless_differences(environments: &[Environment]) {
    match agreement::harmless_differences(environments) {
        Ok(differences) if differences.is_empty() => {}
        Ok(differences) => {
            let lines: String = differences.iter().map(|difference| format!("\n    {difference}")).collect();
            tracing::warn!("the ranks differ where they may, and go on:{lines}");
        }
        Err(error) => tracing::error!("{error}"),
    }
}

/// The instruction set of a technique's kernels.
pub(super) fn isa(selection: &Selection, technique: &str) -> InstructionSet {
    selection.instruction_set(technique).unwrap_or(InstructionSet::Scalar)
}

#[cfg(test)]
mod tests;
