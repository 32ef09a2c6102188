//! What a build can do, as fields.

use super::super::descriptor::{Descriptor, Target};
use super::super::environment::Library;
use super::super::registry::{Registry, TransportDescriptor};
use super::{Fields, Value};

pub(super) fn add(fields: &mut Fields, registry: &Registry) {
    fields.add("registry.order", Value::list(registry.identities()));
    for descriptor in registry.descriptors() {
        add_descriptor(fields, descriptor);
    }
    for descriptor in registry.transports() {
        let TransportDescriptor {
            transport,
            libraries,
            auto_from_num_ranks,
            shares_gpus,
            max_num_nodes,
            forwards,
            reads_node_layout,
        } = descriptor;
        let path = |field: &str| format!("registry.transport.{transport}.{field}");
        fields.add(path("libraries"), needed(libraries));
        fields.add(path("auto_from_num_ranks"), *auto_from_num_ranks);
        fields.add(path("shares_gpus"), *shares_gpus);
        fields.add(path("max_num_nodes"), *max_num_nodes);
        fields.add(path("forwards"), *forwards);
        fields.add(path("reads_node_layout"), *reads_node_layout);
    }
}

fn add_descriptor(fields: &mut Fields, descriptor: &Descriptor) {
    // Taken apart by name, so that a field that is added has to be thought of here.
    let Descriptor {
        identity,
        target,
        libraries,
        opt_in,
        deprecated,
        activations,
        bias,
        routing,
        num_topk,
        hidden,
        intermediate,
        num_local_experts,
        uneven_experts,
        max_tensor_parallel,
        max_num_nodes,
        transports,
        forwards,
        forwards_unasked,
        payloads,
        combine_dtypes,
        batch_invariant,
    } = descriptor;
    let mut add = |field: &str, value: Value| fields.add(format!("registry.{identity}.{field}"), value);
    match target {
        Target::Cpu { instruction_sets } => add("target.instruction_sets", Value::set(instruction_sets)),
        Target::Gpu { compute_capabilities } => add("target.compute_capabilities", Value::set(compute_capabilities)),
    }
    add("libraries", needed(libraries));
    add("opt_in", (*opt_in).into());
    add("deprecated", (*deprecated).into());
    add("activations", Value::set(activations));
    add("bias", (*bias).into());
    add("routing", Value::set(routing));
    add("num_topk", Value::text(num_topk));
    add("hidden", Value::text(hidden));
    add("intermediate", Value::text(intermediate));
    add("num_local_experts", Value::text(num_local_experts));
    add("uneven_experts", (*uneven_experts).into());
    add("max_tensor_parallel", (*max_tensor_parallel).into());
    add("max_num_nodes", (*max_num_nodes).into());
    add("transports", Value::list(transports));
    add("forwards", forwards.map(|ranks| ranks.to_string()).into());
    add("forwards_unasked", (*forwards_unasked).into());
    add("payloads", Value::set(payloads));
    add("combine_dtypes", Value::set(combine_dtypes));
    add("batch_invariant", (*batch_invariant).into());
}

fn needed<'a>(libraries: impl IntoIterator<Item = (&'a Library, &'a Option<&'static str>)>) -> Value {
    Value::set(libraries.into_iter().map(|(library, version)| match version {
        Some(version) => format!("{} {version}", library.name()),
        None => library.name().to_owned(),
    }))
}
