//! The digest that `resolve` prints: a selection, and everything that it follows from.

use std::collections::BTreeMap;

use super::super::deployment::{DeploymentFacts, ExpertSplit};
use super::super::environment::{Environment, Fact, Library};
use super::super::problem::{Problem, Quantisation, SharedProblem};
use super::super::registry::Registry;
use super::super::resolve::{LayerSelection, Selection};
use super::{Fields, Fingerprint, FingerprintError, Kind, Value, registry as registry_fields};
use crate::config::{Device, Levels};

impl Selection {
    /// The fingerprint of this selection, given what it was resolved from: equal wherever it is computed from equal facts.
    ///
    /// Nothing rank-local is in it. Of the environments it holds what gates may have read, and not which rank has it.
    ///
    /// # Errors
    /// If two entries of one layer differ, which [`resolve`](super::super::resolve()) refuses.
    pub fn fingerprint(
        &self,
        deployment: &DeploymentFacts,
        environments: &[Environment],
        registry: &Registry,
    ) -> Result<Fingerprint, FingerprintError> {
        let mut fields = Fields::new(Kind::Selection);
        add_deployment(&mut fields, deployment);
        if self.reads_node_layout(registry) || self.layers.iter().any(|selected| selected.levels == Levels::Two) {
            fields.add("world.node_of_rank", Value::list(&deployment.node_of_rank));
        }
        add_environments(&mut fields, deployment, environments, registry);
        registry_fields::add(&mut fields, registry);
        fields.add("layers.order", Value::list(self.layers.iter().map(|selected| selected.layer.0)));
        for selected in &self.layers {
            add_problem(&mut fields, &selected.problem);
            add_selected(&mut fields, selected);
        }
        fields.finish()
    }

    fn reads_node_layout(&self, registry: &Registry) -> bool {
        let transports = self.layers.iter().filter_map(|selected| registry.transport(selected.transport));
        transports.into_iter().any(|transport| transport.reads_node_layout)
    }
}

fn add_deployment(fields: &mut Fields, deployment: &DeploymentFacts) {
    let DeploymentFacts {
        node_of_rank,
        experts,
        tensor_parallel,
        device,
        share_gpus,
        backend,
        implementation,
        allow_fallback,
        activations,
        activation,
        combine,
        batch_invariant,
        transport,
        levels,
        payload,
        combine_dtype,
        num_max_tokens_per_rank,
        chunk_tokens,
    } = deployment;
    fields.add("world.num_ranks", node_of_rank.len());
    fields.add("world.tensor_parallel", *tensor_parallel);
    fields.add(
        "world.expert_split",
        match experts {
            ExpertSplit::Even => Value::text("even"),
            ExpertSplit::Blocks(counts) => Value::list(counts),
        },
    );
    // By the names of the keys that set them.
    fields.add("cluster.device", Value::text(device));
    fields.add("cluster.share_gpus", *share_gpus);
    fields.add("moe.backend", backend.as_str());
    fields.add("moe.implementation", implementation.as_deref());
    fields.add("moe.allow_fallback", *allow_fallback);
    fields.add("moe.activations", Value::text(activations));
    match activation {
        Some(activation) => fields.add_activation("moe.activation", *activation),
        None => fields.add("moe.activation", "checkpoint"),
    }
    fields.add("moe.combine", Value::text(combine));
    fields.add("moe.batch_invariant", *batch_invariant);
    fields.add("dispatch.transport", Value::text(transport));
    fields.add("dispatch.levels", Value::text(levels));
    fields.add("dispatch.payload", Value::text(payload));
    fields.add("dispatch.combine_dtype", Value::text(combine_dtype));
    fields.add("dispatch.num_max_tokens_per_rank", *num_max_tokens_per_rank);
    fields.add("dispatch.chunk_tokens", *chunk_tokens);
}

/// Each fact as how many ranks have which value: gates look at one fact of one rank at a time, so that no more can count.
fn add_environments(
    fields: &mut Fields,
    deployment: &DeploymentFacts,
    environments: &[Environment],
    registry: &Registry,
) {
    let mut add = |path: String, fact: &dyn Fn(&Environment) -> String| {
        let mut ranks_of: BTreeMap<String, usize> = BTreeMap::new();
        for environment in environments {
            *ranks_of.entry(fact(environment)).or_default() += 1;
        }
        fields.add(path, Value::set(ranks_of.into_iter().map(|(value, num_ranks)| format!("{value} on {num_ranks}"))));
    };
    add("environment.instruction_set".to_owned(), &|environment| environment.instruction_set.to_string());
    if deployment.device != Device::Cpu {
        add("environment.gpu".to_owned(), &|environment| match &environment.gpu {
            Fact::Present(gpu) => gpu.compute_capability.to_string(),
            Fact::Absent => "absent".to_owned(),
            Fact::Unknown => "unknown".to_owned(),
        });
    }
    for (library, reads_version) in libraries_read(registry) {
        add(format!("environment.{}", library.name()), &|environment| match environment.libraries.get(library) {
            Fact::Present(_) if !reads_version => "present".to_owned(),
            fact => fact.to_string(),
        });
    }
    for flag in registry.descriptors().iter().filter_map(|descriptor| descriptor.opt_in) {
        add(format!("environment.flags.{flag}"), &|environment| match &environment.flags {
            Some(flags) if flags.contains(flag) => "set".to_owned(),
            Some(_) => "not set".to_owned(),
            None => "unknown".to_owned(),
        });
    }
}

/// What selection asks libraries for: to be there, or also (true) to be of some version.
fn libraries_read(registry: &Registry) -> BTreeMap<Library, bool> {
    let of_implementations = registry.descriptors().iter().flat_map(|descriptor| &descriptor.libraries);
    let of_transports = registry.transports().iter().flat_map(|transport| &transport.libraries);
    let mut read = BTreeMap::new();
    for (library, least) in of_implementations.chain(of_transports) {
        *read.entry(*library).or_default() |= least.is_some();
    }
    read
}

fn add_problem(fields: &mut Fields, problem: &Problem) {
    let Problem {
        layer,
        quantisation: Quantisation { weights, quantised_activations },
        activation,
        hidden,
        intermediate,
        num_experts,
        num_topk,
        routing,
        has_bias,
        shared,
    } = problem;
    let mut add = |field: &str, value: Value| fields.add(format!("layers.{}.problem.{field}", layer.0), value);
    add("weights", Value::set(weights));
    add("quantised_activations", (*quantised_activations).into());
    add("activation", Value::text(activation));
    add("hidden", (*hidden).into());
    add("intermediate", (*intermediate).into());
    add("num_experts", (*num_experts).into());
    add("num_topk", (*num_topk).into());
    add("routing", Value::text(routing));
    add("has_bias", (*has_bias).into());
    if let Some(SharedProblem { weights, quantised_activations, hidden, intermediate }) = shared {
        add("shared.weights", Value::text(weights));
        add("shared.quantised_activations", (*quantised_activations).into());
        add("shared.hidden", (*hidden).into());
        add("shared.intermediate", (*intermediate).into());
    }
}

/// What runs. Who else could have, and why not, is information: see [`Information`](super::Information).
fn add_selected(fields: &mut Fields, selected: &LayerSelection) {
    let LayerSelection { layer, winner, transport, levels, why, .. } = selected;
    let mut add = |field: &str, value: Value| fields.add(format!("layers.{}.selection.{field}", layer.0), value);
    add("winner", Value::text(winner.identity));
    add("companions", Value::set(&winner.companions));
    add("instruction_set", winner.instruction_set.map(|set| set.name()).into());
    add("transport", Value::text(transport));
    add("levels", Value::text(levels));
    add("why", Value::text(why));
}
