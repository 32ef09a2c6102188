//! Changes of one thing each: every field that is encoded, and what of its inputs moves it.

use std::collections::BTreeSet;

use super::super::super::descriptor::{CapabilityRange, Descriptor, Limits, Target, Width};
use super::super::super::environment::{Fact, Library};
use super::super::super::registry::TransportDescriptor;
use super::super::super::tests::worlds::gb300;
use super::super::super::*;
use super::{Inputs, next_up};
use crate::config::{Activations, Combine, CombineDtype, Device, Levels, Payload, Transport};
use crate::numerics::activation::Activation;
use crate::routing::RoutingMethod;

/// What is done to inputs.
pub(super) type Change = fn(&mut Inputs);

/// A single change, with fields that it must move.
pub(super) struct Single {
    pub name: &'static str,
    /// Fields, with `*` for what is a name or a number of something.
    pub fields: &'static [&'static str],
    /// Where the change is tried, if the inputs are not the place.
    pub setting: Change,
    pub change: Change,
}

const fn single(name: &'static str, fields: &'static [&'static str], change: Change) -> Single {
    Single { name, fields, setting: |_| {}, change }
}

const fn single_in(setting: Change, name: &'static str, fields: &'static [&'static str], change: Change) -> Single {
    Single { name, fields, setting, change }
}

/// A field's path without names and numbers of things.
pub(super) fn pattern(path: &str) -> String {
    let segments: Vec<&str> = path.split('.').collect();
    match segments[..] {
        ["layers", "order"] | ["registry", "order"] => path.to_owned(),
        ["layers", _, ref field @ ..] => format!("layers.*.{}", field.join(".")),
        ["registry", "transport", _, field] => format!("registry.transport.*.{field}"),
        // The four parts of an identity.
        ["registry", _, _, _, _, ref field @ ..] => format!("registry.*.{}", field.join(".")),
        ["kernels", _, field] => format!("kernels.*.{field}"),
        ["environment", "flags", _] => "environment.flags.*".to_owned(),
        ["tactics" | "variables", ..] => format!("{}.*", segments[0]),
        _ => path.to_owned(),
    }
}

/// The patterns of all fields of a fingerprint.
pub(super) fn patterns(fingerprint: &Fingerprint) -> BTreeSet<String> {
    fingerprint.fields().map(|(path, _)| pattern(path)).collect()
}

fn situ(inputs: &mut Inputs) -> (&mut f32, &mut f32) {
    match &mut inputs.activation {
        Activation::Situ { beta, linear_beta: Some(linear_beta) } => (beta, linear_beta),
        other => unreachable!("the inputs have SiTU with both constants, not {other:?}"),
    }
}

/// Replaces the registry by one whose descriptors have been changed; the first is the one that is preferred.
fn descriptors(inputs: &mut Inputs, change: impl Fn(usize, &mut Descriptor)) {
    let mut all = inputs.registry.descriptors().to_vec();
    all.iter_mut().enumerate().for_each(|(idx, descriptor)| change(idx, descriptor));
    inputs.registry = Registry::new(all, inputs.registry.transports().to_vec()).unwrap();
}

fn first_descriptor(inputs: &mut Inputs, change: impl Fn(&mut Descriptor)) {
    descriptors(inputs, |idx, descriptor| {
        if idx == 0 {
            change(descriptor);
        }
    });
}

fn transports(inputs: &mut Inputs, change: impl Fn(&mut TransportDescriptor)) {
    let mut all = inputs.registry.transports().to_vec();
    all.iter_mut().filter(|described| described.transport == Transport::Nccl).for_each(change);
    inputs.registry = Registry::new(inputs.registry.descriptors().to_vec(), all).unwrap();
}

fn on_hosts(inputs: &mut Inputs) {
    inputs.deployment.device = Device::Cpu;
}

/// Where tokens go in two levels.
fn on_two_hosts(inputs: &mut Inputs) {
    on_hosts(inputs);
    inputs.deployment.node_of_rank = vec![0, 0, 1, 1];
}

fn with_swiglu_asked_for(inputs: &mut Inputs) {
    inputs.deployment.activation = Some(Activation::SwigluClamp { limit: 7.0 });
}

fn with_situ_asked_for(inputs: &mut Inputs) {
    inputs.deployment.activation = Some(inputs.activation);
}

fn with_groups(inputs: &mut Inputs) {
    inputs.routing = RoutingMethod::DeepseekV3 { num_groups: 8, topk_group: 4, scaling: 2.5 };
}

fn with_nvfp4_shared(inputs: &mut Inputs) {
    inputs.problems[0].shared.as_mut().unwrap().weights = WeightFormat::Nvfp4;
}

/// Everything that a digest is of, changed one thing at a time.
pub(super) fn singles() -> Vec<Single> {
    [of_the_session(), of_the_deployment(), of_layers(), of_ranks(), of_the_registry()].into_iter().flatten().collect()
}

fn of_the_session() -> Vec<Single> {
    vec![
        single("beta", &["layers.*.activation.beta"], |i| *situ(i).0 = next_up(*situ(i).0)),
        single("linear_beta", &["layers.*.activation.linear_beta"], |i| *situ(i).1 = next_up(*situ(i).1)),
        single("a constant that is missing", &["layers.*.activation", "layers.*.activation.linear_beta"], |i| {
            i.activation = Activation::Situ { beta: *situ(i).0, linear_beta: None };
        }),
        single_in(
            |i| i.activation = Activation::SwigluClamp { limit: 7.0 },
            "limit",
            &["layers.*.activation.limit"],
            |i| i.activation = Activation::SwigluClamp { limit: next_up(7.0) },
        ),
        single("scaling", &["layers.*.routing.scaling"], |i| {
            i.routing = RoutingMethod::KimiK3 { scaling: next_up(1.0) };
        }),
        single("routing", &["layers.*.routing"], |i| i.routing = RoutingMethod::Default),
        single_in(with_groups, "routing groups", &["layers.*.routing.num_groups"], |i| {
            i.routing = RoutingMethod::DeepseekV3 { num_groups: 4, topk_group: 4, scaling: 2.5 };
        }),
        single_in(with_groups, "groups kept", &["layers.*.routing.topk_group"], |i| {
            i.routing = RoutingMethod::DeepseekV3 { num_groups: 8, topk_group: 3, scaling: 2.5 };
        }),
        single("another constant", &["layers.*.constants.norm_eps"], |i| i.norm_eps = next_up(i.norm_eps)),
        single("input_scale", &["layers.*.scales.fc1.input"], |i| i.input_scale = next_up(i.input_scale)),
        single("one of many scales", &["layers.*.scales.fc2"], |i| i.scales[1] = next_up(i.scales[1])),
        single("order of scales", &["layers.*.scales.fc2"], |i| i.scales.reverse()),
        single("version", &["build.version"], |i| i.version.push('1')),
        single("source of the build", &["build.revision"], |i| i.revision.push('d')),
        single("target of the build", &["build.target"], |i| i.target = "aarch64-unknown-linux-gnu"),
        single("profile of the build", &["build.profile"], |i| i.profile = "debug"),
        single("travelling dtype", &["layers.*.travel.payload"], |i| i.travel = "f32"),
        single("buffer size", &["capacity.receive_bytes"], |i| i.buffer_bytes += 1),
        single("layout", &["layout.weights"], |i| i.layout = "n_major"),
        single("tactic", &["tactics.*"], |i| i.tactic = "block_m 128"),
        single("kernel source", &["kernels.*.source"], |i| i.kernel_source.push(' ')),
        single("artefact", &["kernels.*.artefact"], |i| i.artefact = "0124"),
        single("flag", &["flags.graphs"], |i| i.flag = true),
        single_in(
            |i| {
                i.environments[0].variables.insert("NCCL_ALGO".to_owned(), "Tree".to_owned());
            },
            "must-match variable",
            &["variables.*"],
            |i| {
                i.environments[0].variables.insert("NCCL_ALGO".to_owned(), "Ring".to_owned());
            },
        ),
    ]
}

fn of_the_deployment() -> Vec<Single> {
    vec![
        single("chunk size", &["dispatch.chunk_tokens"], |i| i.deployment.chunk_tokens = Some(64)),
        single("capacity", &["dispatch.num_max_tokens_per_rank"], |i| i.deployment.num_max_tokens_per_rank += 1),
        single("payload", &["dispatch.payload"], |i| i.deployment.payload = Payload::Bf16),
        single("combine dtype", &["dispatch.combine_dtype"], |i| i.deployment.combine_dtype = CombineDtype::Bf16),
        single("transport", &["dispatch.transport", "layers.*.selection.transport"], |i| {
            i.deployment.transport = Transport::Host;
        }),
        single_in(
            on_two_hosts,
            "levels",
            &["dispatch.levels", "layers.*.selection.levels", "world.node_of_rank"],
            |i| i.deployment.levels = Levels::One,
        ),
        single_in(on_two_hosts, "node layout of two levels", &["world.node_of_rank"], |i| {
            i.deployment.node_of_rank = vec![0, 1, 1, 1];
        }),
        single("expert split", &["world.expert_split"], |i| {
            i.deployment.experts = ExpertSplit::Blocks(vec![225, 223, 224, 224]);
        }),
        single_in(
            |i| descriptors(i, |_, descriptor| descriptor.max_tensor_parallel = 2),
            "tensor parallelism",
            &["world.tensor_parallel"],
            |i| i.deployment.tensor_parallel = 2,
        ),
        single("number of ranks", &["world.num_ranks"], |i| {
            i.deployment.node_of_rank.push(1);
            i.environments.push(i.environments[0].clone());
        }),
        single("node layout under a transport that reads it", &["world.node_of_rank"], |i| {
            i.deployment.node_of_rank = vec![0, 1, 1, 1];
        }),
        single("device", &["cluster.device"], |i| i.deployment.device = Device::Gpu),
        single("backend", &["moe.backend", "layers.*.selection.why"], |i| i.deployment.backend = "wgmma".to_owned()),
        single("another backend", &["moe.backend", "layers.*.selection.winner"], |i| {
            i.deployment.backend = "mma_sync".to_owned();
        }),
        single_in(
            |i| i.problems.truncate(2),
            "implementation",
            &["moe.implementation", "layers.*.selection.why"],
            |i| i.deployment.implementation = Some("wgmma.nvfp4".to_owned()),
        ),
        single("fallback", &["moe.allow_fallback"], |i| i.deployment.allow_fallback = true),
        single("shared GPUs", &["cluster.share_gpus"], |i| i.deployment.share_gpus = true),
        single("batch invariance", &["moe.batch_invariant"], |i| i.deployment.batch_invariant = true),
        single("combine", &["moe.combine"], |i| i.deployment.combine = Combine::Rank),
        single("asked activations", &["moe.activations"], |i| i.deployment.activations = Activations::Bf16),
        single("asked activation", &["moe.activation"], |i| i.deployment.activation = Some(i.activation)),
        single_in(with_situ_asked_for, "asked beta", &["moe.activation.beta"], |i| {
            i.deployment.activation = Some(Activation::Situ { beta: next_up(4.0), linear_beta: Some(25.0) });
        }),
        single_in(with_situ_asked_for, "asked linear_beta", &["moe.activation.linear_beta"], |i| {
            i.deployment.activation = Some(Activation::Situ { beta: 4.0, linear_beta: Some(next_up(25.0)) });
        }),
        single_in(with_swiglu_asked_for, "asked limit", &["moe.activation.limit"], |i| {
            i.deployment.activation = Some(Activation::SwigluClamp { limit: next_up(7.0) });
        }),
    ]
}

fn of_layers() -> Vec<Single> {
    vec![
        single("number of layers", &["layers.order"], |i| i.problems.truncate(2)),
        single("order of layers", &["layers.order"], |i| i.problems.swap(0, 1)),
        single("top-k", &["layers.*.problem.num_topk"], |i| i.problems[1].num_topk = 15),
        single("experts", &["layers.*.problem.num_experts"], |i| i.problems[1].num_experts += 1),
        single("hidden", &["layers.*.problem.hidden"], |i| i.problems[0].hidden += 128),
        single("intermediate", &["layers.*.problem.intermediate"], |i| i.problems[0].intermediate += 128),
        single("dtype of some experts", &["layers.*.problem.weights"], |i| {
            i.problems[2].quantisation.weights.insert(WeightFormat::Bf16);
        }),
        single("format", &["layers.*.problem.quantised_activations"], |i| {
            i.problems[0].quantisation.quantised_activations = false;
        }),
        single("a layer's activation", &["layers.*.problem.activation"], |i| {
            i.problems[0].activation = ActivationForm::Situ;
        }),
        single("a layer's routing", &["layers.*.problem.routing"], |i| {
            i.problems[0].routing = RoutingKind::Renormalize;
        }),
        single_in(
            |i| descriptors(i, |_, descriptor| descriptor.bias = true),
            "bias",
            &["layers.*.problem.has_bias"],
            |i| i.problems[0].has_bias = true,
        ),
        single("dtype of shared experts", &["layers.*.problem.shared.weights"], with_nvfp4_shared),
        single_in(
            with_nvfp4_shared,
            "format of shared experts",
            &["layers.*.problem.shared.quantised_activations"],
            |i| {
                i.problems[0].shared.as_mut().unwrap().quantised_activations = true;
            },
        ),
        single("shared width", &["layers.*.problem.shared.intermediate"], |i| {
            i.problems[0].shared.as_mut().unwrap().intermediate += 128;
        }),
        single("shared input", &["layers.*.problem.shared.hidden"], |i| {
            i.problems[0].shared.as_mut().unwrap().hidden += 128;
        }),
        single("no shared experts", &["layers.*.selection.companions"], |i| i.problems[0].shared = None),
    ]
}

fn of_ranks() -> Vec<Single> {
    vec![
        single("instruction set of a rank", &["environment.instruction_set"], |i| {
            i.environments[3].instruction_set = Fact::Present(InstructionSet::Scalar);
        }),
        single_in(on_hosts, "common instruction set", &["layers.*.selection.instruction_set"], |i| {
            i.environments[3].instruction_set = Fact::Present(InstructionSet::Avx2);
        }),
        single("GPU of a rank", &["environment.gpu"], |i| i.environments[3].gpu = gb300().gpu),
        single("this rank's GPU", &["environment.gpu", "versions.compute_capability"], |i| {
            i.environments[0].gpu = gb300().gpu;
        }),
        single("driver of a rank", &["environment.driver"], |i| {
            i.environments[3].libraries.driver = Fact::Present("590.1".to_owned());
        }),
        single("NCCL of a rank", &["environment.nccl"], |i| {
            i.environments[3].libraries.nccl = Fact::Present("2.30".to_owned());
        }),
        single("this rank's NCCL", &["environment.nccl", "versions.nccl"], |i| {
            i.environments[0].libraries.nccl = Fact::Present("2.30".to_owned());
        }),
        single("NVRTC of a rank", &["environment.nvrtc"], |i| {
            i.environments[3].libraries.nvrtc = Fact::Present("13.1".to_owned());
        }),
        single("this rank's NVRTC", &["environment.nvrtc", "versions.nvrtc"], |i| {
            i.environments[0].libraries.nvrtc = Fact::Present("13.1".to_owned());
        }),
        single("this rank's cublasLt", &["versions.cublaslt"], |i| {
            i.environments[0].libraries.cublaslt = Fact::Present("13.1.0".to_owned());
        }),
        single("flag of a rank", &["environment.flags.*"], |i| {
            i.environments[3].flags = Some(["LOCKSTEP_EAGER".to_owned()].into());
        }),
    ]
}

fn of_the_registry() -> Vec<Single> {
    vec![
        single("order of preference", &["registry.order"], |i| {
            let mut all = i.registry.descriptors().to_vec();
            all.reverse();
            i.registry = Registry::new(all, i.registry.transports().to_vec()).unwrap();
        }),
        single("capabilities served", &["registry.*.target.compute_capabilities"], |i| {
            first_descriptor(i, |d| {
                d.target = Target::Gpu { compute_capabilities: vec![CapabilityRange::only(10, 0)] };
            });
        }),
        single("instruction sets served", &["registry.*.target.instruction_sets"], |i| {
            descriptors(i, |_, d| {
                if d.identity.technique == "vectors" {
                    d.target = Target::Cpu { instruction_sets: [InstructionSet::Avx2].into() };
                }
            });
        }),
        single("libraries needed", &["registry.*.libraries"], |i| {
            first_descriptor(i, |d| _ = d.libraries.insert(Library::Nccl, None));
        }),
        single("opt-in", &["registry.*.opt_in"], |i| first_descriptor(i, |d| d.opt_in = Some("LOCKSTEP_EAGER"))),
        single("deprecation", &["registry.*.deprecated"], |i| first_descriptor(i, |d| d.deprecated = Some("old"))),
        single("activations served", &["registry.*.activations"], |i| {
            first_descriptor(i, |d| _ = d.activations.insert(ActivationForm::SwigluClamp));
        }),
        single("bias served", &["registry.*.bias"], |i| first_descriptor(i, |d| d.bias = true)),
        single("routing served", &["registry.*.routing"], |i| {
            first_descriptor(i, |d| _ = d.routing.insert(RoutingKind::Hash));
        }),
        single("top-k served", &["registry.*.num_topk"], |i| {
            first_descriptor(i, |d| d.num_topk = Limits::between(1, 31));
        }),
        single("hidden served", &["registry.*.hidden"], |i| {
            first_descriptor(i, |d| d.hidden = Width::multiple_of(256));
        }),
        single("intermediate served", &["registry.*.intermediate"], |i| {
            first_descriptor(i, |d| d.intermediate = Width::multiple_of(256));
        }),
        single("experts of a rank served", &["registry.*.num_local_experts"], |i| {
            first_descriptor(i, |d| d.num_local_experts = Limits::from(1));
        }),
        single("uneven experts", &["registry.*.uneven_experts"], |i| {
            first_descriptor(i, |d| d.uneven_experts = false);
        }),
        single("ranks that share an expert", &["registry.*.max_tensor_parallel"], |i| {
            first_descriptor(i, |d| d.max_tensor_parallel = 2);
        }),
        single("hosts served", &["registry.*.max_num_nodes"], |i| first_descriptor(i, |d| d.max_num_nodes = Some(64))),
        single("order of transports", &["registry.*.transports"], |i| first_descriptor(i, |d| d.transports.reverse())),
        single("passing tokens on", &["registry.*.forwards"], |i| {
            first_descriptor(i, |d| d.forwards = Some(Limits::between(1, 64)));
        }),
        single("passing tokens on unasked", &["registry.*.forwards_unasked"], |i| {
            first_descriptor(i, |d| d.forwards_unasked = true);
        }),
        single("payloads served", &["registry.*.payloads"], |i| {
            first_descriptor(i, |d| d.payloads.push(Payload::F32));
        }),
        single("rows served", &["registry.*.combine_dtypes"], |i| {
            first_descriptor(i, |d| d.combine_dtypes.push(CombineDtype::F32));
        }),
        single("batch invariance served", &["registry.*.batch_invariant"], |i| {
            first_descriptor(i, |d| d.batch_invariant = true);
        }),
        single("libraries of a transport", &["registry.transport.*.libraries"], |i| {
            transports(i, |t| _ = t.libraries.insert(Library::Nccl, Some("2.21")));
        }),
        single("when a transport is taken unasked", &["registry.transport.*.auto_from_num_ranks"], |i| {
            transports(i, |t| t.auto_from_num_ranks += 1);
        }),
        single("whether a transport serves ranks that share a GPU", &["registry.transport.*.shares_gpus"], |i| {
            transports(i, |t| t.shares_gpus = false);
        }),
        single("hosts that a transport connects", &["registry.transport.*.max_num_nodes"], |i| {
            transports(i, |t| t.max_num_nodes = Some(64));
        }),
        single("whether a transport carries what is passed on", &["registry.transport.*.forwards"], |i| {
            transports(i, |t| t.forwards = false);
        }),
        single("what a transport reads", &["registry.transport.*.reads_node_layout"], |i| {
            transports(i, |t| t.reads_node_layout = false);
        }),
    ]
}
