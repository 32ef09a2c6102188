//! The questions that every implementation is asked about every layer. Each gate looks at the problem, the deployment and
//! the environment, compares them with the descriptor, and knows one reason to refuse.

use super::deployment::DeploymentFacts;
use super::descriptor::{Descriptor, Target, Width};
use super::environment::{Environment, Fact, InstructionSet, Library, version_at_least};
use super::problem::{Group, Members, Problem, counted, list};
use super::refusal::Reason;
use crate::config::{CombineDtype, Device, Levels, Payload};

/// What a gate is asked: whether this implementation serves this group of experts.
pub(super) struct Question<'a> {
    pub descriptor: &'a Descriptor,
    pub problem: &'a Problem,
    pub group: Group,
    pub deployment: &'a DeploymentFacts,
}

/// What a gate says.
pub(super) enum Answer {
    Serves,
    /// What is needed and what was found.
    Refuses(String),
    /// What would have to be known to tell.
    Unknown(String),
}

use Answer::{Refuses, Serves, Unknown};

type WorldGate = fn(&Question<'_>) -> Answer;
type RankGate = fn(&Question<'_>, &Environment) -> Answer;

/// Gates whose answer is the same on all ranks, in the order in which reasons are listed.
pub(super) const WORLD_GATES: [(Reason, WorldGate); 13] = [
    (Reason::Quantisation, quantisation),
    (Reason::Dtype, payload),
    (Reason::Dtype, combine_dtype),
    (Reason::Device, declared_device),
    (Reason::Shape, shape),
    (Reason::ExpertsAndRanks, experts_and_ranks),
    (Reason::Topology, topology),
    (Reason::Topology, levels),
    (Reason::Activation, activation),
    (Reason::Bias, bias),
    (Reason::Routing, routing),
    (Reason::Determinism, determinism),
    (Reason::Deprecated, deprecated),
];

/// Gates that look at one rank's environment.
pub(super) const RANK_GATES: [(Reason, RankGate); 5] = [
    (Reason::Device, device),
    (Reason::ComputeCapability, compute_capability),
    (Reason::InstructionSet, instruction_set),
    (Reason::MissingLibrary, |question, environment| libraries(question.descriptor.libraries.iter(), environment)),
    (Reason::PathNotEnabled, opt_in),
];

fn refuse_unless(serves: bool, sentence: impl FnOnce() -> String) -> Answer {
    if serves { Serves } else { Refuses(sentence()) }
}

fn quantisation(question: &Question<'_>) -> Answer {
    let ours = question.descriptor.identity.quant;
    let found = match question.group.members {
        Members::Routed => format!("the layer has {}", question.problem.quantisation),
        members => format!("the layer has {members} of another format"),
    };
    match question.group.quant {
        Some(wanted) => refuse_unless(wanted == ours, || format!("computes {ours}; {found}, which is {wanted}")),
        None => Refuses(format!("computes {ours}; {found}, which nothing in this build computes")),
    }
}

fn payload(question: &Question<'_>) -> Answer {
    let (ours, wanted) = (&question.descriptor.payloads, question.deployment.payload);
    let travels = question.group.members != Members::Shared && wanted != Payload::Auto;
    refuse_unless(!travels || ours.contains(&wanted), || {
        format!("takes tokens as {}; dispatch.payload is {wanted}", list(ours, " or "))
    })
}

fn combine_dtype(question: &Question<'_>) -> Answer {
    let (ours, wanted) = (&question.descriptor.combine_dtypes, question.deployment.combine_dtype);
    let travels = question.group.members != Members::Shared && wanted != CombineDtype::Auto;
    refuse_unless(!travels || ours.contains(&wanted), || {
        format!("gives rows back as {}; dispatch.combine_dtype is {wanted}", list(ours, " or "))
    })
}

fn declared_device(question: &Question<'_>) -> Answer {
    match (&question.descriptor.target, question.deployment.device) {
        (Target::Gpu { .. }, Device::Cpu) => Refuses("runs on GPUs; cluster.device is cpu".to_owned()),
        (Target::Cpu { .. }, Device::Gpu) => Refuses("runs on a host's cores; cluster.device is gpu".to_owned()),
        (Target::Gpu { .. }, Device::Gpu | Device::Auto) | (Target::Cpu { .. }, Device::Cpu | Device::Auto) => Serves,
    }
}

fn shape(question: &Question<'_>) -> Answer {
    let Question { descriptor, group, .. } = question;
    let wrong = |(name, width, found): (&str, Width, usize)| {
        (!width.contains(found)).then(|| format!("{name} {found} of the {}, kernels take {width}", group.members))
    };
    let widths =
        [("hidden", descriptor.hidden, group.hidden), ("intermediate", descriptor.intermediate, group.intermediate)];
    let wrong: Vec<String> = widths.into_iter().filter_map(wrong).collect();
    refuse_unless(wrong.is_empty(), || wrong.join("; "))
}

fn experts_and_ranks(question: &Question<'_>) -> Answer {
    let Question { descriptor, problem, deployment, group } = question;
    if group.members == Members::Shared {
        return Serves;
    }
    let (num_experts, num_ranks) = (problem.num_experts, deployment.num_ranks());
    let counts = deployment.experts.counts(num_experts, num_ranks);
    let dealt: usize = counts.iter().sum();
    if (counts.len(), dealt) != (num_ranks, num_experts) {
        let parts = counts.len();
        return Refuses(format!(
            "the split deals {dealt} experts to {parts} ranks; the layer has {num_experts}, the world {num_ranks}"
        ));
    }
    let limits = descriptor.num_local_experts;
    if let Some(count) = counts.iter().find(|count| !limits.contains(**count)) {
        return Refuses(format!(
            "a rank holds {limits} experts; {num_experts} over {} give one {count}",
            counted(num_ranks, "rank")
        ));
    }
    let is_even = counts.iter().all(|count| Some(count) == counts.first());
    refuse_unless(is_even || descriptor.uneven_experts, || {
        format!("every rank must hold as many experts; {num_experts} don't divide by {num_ranks}")
    })
}

fn topology(question: &Question<'_>) -> Answer {
    let Question { descriptor, deployment, .. } = question;
    let (tensor_parallel, num_nodes) = (deployment.tensor_parallel, deployment.num_nodes());
    if tensor_parallel > descriptor.max_tensor_parallel {
        let ours = descriptor.max_tensor_parallel;
        return Refuses(format!(
            "splits an expert over at most {}; tensor parallelism is {tensor_parallel}",
            counted(ours as usize, "rank")
        ));
    }
    match descriptor.max_num_nodes {
        Some(max) if num_nodes > max as usize => {
            Refuses(format!("spans at most {}; the world has {num_nodes}", counted(max as usize, "host")))
        }
        _ => Serves,
    }
}

fn levels(question: &Question<'_>) -> Answer {
    let Question { descriptor, group, deployment, .. } = question;
    if group.members == Members::Shared || deployment.levels != Levels::Two {
        return Serves;
    }
    let cure = "dispatch.levels is two: set it to auto or one";
    let Some(limits) = descriptor.forwards else {
        return Refuses(format!("sends tokens straight to their ranks; {cure}"));
    };
    let num_ranks = deployment.num_ranks();
    refuse_unless(limits.contains(num_ranks), || {
        format!("passes tokens on among {limits} ranks; the world has {num_ranks}, and {cure}")
    })
}

fn activation(question: &Question<'_>) -> Answer {
    let (ours, wanted) = (&question.descriptor.activations, question.problem.activation);
    refuse_unless(ours.contains(&wanted), || format!("computes {}; the layer has {wanted}", list(ours, ", ")))
}

fn bias(question: &Question<'_>) -> Answer {
    refuse_unless(question.descriptor.bias || !question.problem.has_bias, || {
        "adds no biases; the layer's experts have them".to_owned()
    })
}

fn routing(question: &Question<'_>) -> Answer {
    let Question { descriptor, problem, group, .. } = question;
    if group.members == Members::Shared {
        return Serves;
    }
    let (ours, wanted) = (&descriptor.routing, problem.routing);
    if !ours.contains(&wanted) {
        return Refuses(format!("serves routing by {}; the layer's is {wanted}", list(ours, ", ")));
    }
    refuse_unless(descriptor.num_topk.contains(problem.num_topk), || {
        format!("serves top-k {}; the layer's is {}", descriptor.num_topk, problem.num_topk)
    })
}

fn determinism(question: &Question<'_>) -> Answer {
    refuse_unless(question.descriptor.batch_invariant || !question.deployment.batch_invariant, || {
        "can't hold to one order over K for every row count; moe.batch_invariant is true".to_owned()
    })
}

fn deprecated(question: &Question<'_>) -> Answer {
    match question.descriptor.deprecated {
        Some(why) => Refuses(format!("is no longer offered: {why}")),
        None => Serves,
    }
}

fn device(question: &Question<'_>, environment: &Environment) -> Answer {
    match (&question.descriptor.target, environment.has_gpu()) {
        (Target::Cpu { .. }, _) | (Target::Gpu { .. }, Some(true)) => Serves,
        (Target::Gpu { .. }, Some(false)) => match environment.libraries.driver {
            Fact::Present(_) => Refuses(
                "needs a GPU, and the driver shows none; look at CUDA_VISIBLE_DEVICES, and at what the launcher binds"
                    .to_owned(),
            ),
            Fact::Absent | Fact::Unknown => Refuses("needs a GPU, found none".to_owned()),
        },
        (Target::Gpu { .. }, None) => Unknown("whether there is a GPU".to_owned()),
    }
}

fn compute_capability(question: &Question<'_>, environment: &Environment) -> Answer {
    // A missing or unknown GPU is the device gate's to say.
    let (Target::Gpu { compute_capabilities }, Some(gpu)) = (&question.descriptor.target, environment.gpu.present())
    else {
        return Serves;
    };
    let found = gpu.compute_capability;
    refuse_unless(compute_capabilities.iter().any(|range| range.contains(found)), || {
        format!("needs {}, found {found} ({})", list(compute_capabilities, " or "), gpu.name)
    })
}

fn instruction_set(question: &Question<'_>, environment: &Environment) -> Answer {
    let Target::Cpu { instruction_sets } = &question.descriptor.target else { return Serves };
    let Some(lowest) = instruction_sets.first() else {
        return Refuses("has kernels for no instruction set".to_owned());
    };
    let found = match environment.instruction_set {
        Fact::Present(found) => found,
        Fact::Absent => InstructionSet::Scalar,
        // Plain code runs anywhere: there is nothing to know.
        Fact::Unknown if *lowest == InstructionSet::Scalar => return Serves,
        Fact::Unknown => return Unknown(format!("whether the CPU has {lowest}")),
    };
    refuse_unless(*lowest <= found, || format!("needs {lowest}, found {found}"))
}

/// Whether a rank has all of `needed`.
pub(super) fn libraries<'a>(
    needed: impl Iterator<Item = (&'a Library, &'a Option<&'static str>)>,
    environment: &Environment,
) -> Answer {
    let (mut wrong, mut unknown) = (Vec::new(), Vec::new());
    for (library, wanted) in needed {
        match (environment.libraries.get(*library), wanted) {
            (Fact::Absent, None) => wrong.push(format!("needs {library}, which is missing")),
            (Fact::Absent, Some(wanted)) => wrong.push(format!("needs {library} {wanted}, which is missing")),
            (Fact::Unknown, _) => unknown.push(format!("whether there is {library}")),
            (Fact::Present(_), None) => {}
            (Fact::Present(found), Some(wanted)) => match version_at_least(found, wanted) {
                Some(true) => {}
                Some(false) => wrong.push(format!("needs {library} {wanted} or later, found {found}")),
                None => unknown.push(format!("whether {library} `{found}` is {wanted} or later")),
            },
        }
    }
    if !wrong.is_empty() {
        return Refuses(wrong.join("; "));
    }
    if unknown.is_empty() { Serves } else { Unknown(unknown.join("; ")) }
}

fn opt_in(question: &Question<'_>, environment: &Environment) -> Answer {
    match (question.descriptor.opt_in, &environment.flags) {
        (None, _) => Serves,
        (Some(flag), None) => Unknown(format!("whether the flag {flag} is set")),
        (Some(flag), Some(flags)) => {
            refuse_unless(flags.contains(flag), || format!("runs only where the flag {flag} is set"))
        }
    }
}
