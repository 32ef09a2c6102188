//! What `resolve` offers against what descriptors admit, as sets, over a grid of problems, deployments and worlds.
//!
//! `admits` reads descriptors in its own words and shares no code with the gates: a gate that is missing, asks the wrong
//! field or refuses too much makes the sets differ.

use std::collections::BTreeSet;

use super::super::descriptor::{Descriptor, Target};
use super::super::environment::{Environment, Fact, Gpu, version_at_least};
use super::super::*;
use super::worlds::{a100, deployment, gb300, h200, host, k3, qwen3, registry, unquantised_shared};
use crate::config::{CombineDtype, Device, Levels, Payload, Transport};

fn problems() -> Vec<Problem> {
    let base = [k3(1), qwen3(1)];
    let mut problems = base.to_vec();
    type Change = Box<dyn Fn(&mut Problem)>;
    let mut changes: Vec<Change> = Vec::new();
    for weights in [WeightFormat::Nvfp4, WeightFormat::Mxfp4, WeightFormat::Fp8, WeightFormat::Bf16] {
        for quantised in [false, true] {
            changes.push(Box::new(move |p| p.quantisation = Quantisation::uniform(weights, quantised)));
            let shared = SharedProblem { weights, quantised_activations: quantised, hidden: 256, intermediate: 128 };
            changes.push(Box::new(move |p| p.shared = Some(shared)));
        }
    }
    changes.push(Box::new(|p| {
        p.quantisation.weights.insert(WeightFormat::Bf16);
        p.quantisation.quantised_activations = false;
    }));
    for activation in ActivationForm::ALL {
        changes.push(Box::new(move |p| p.activation = activation));
    }
    for routing in RoutingKind::ALL {
        changes.push(Box::new(move |p| p.routing = routing));
    }
    for width in [1, 8, 16, 64, 96, 128, 4000] {
        changes.push(Box::new(move |p| p.hidden = width));
        changes.push(Box::new(move |p| p.intermediate = width));
        changes.push(Box::new(move |p| {
            p.shared = Some(unquantised_shared(width, 64));
        }));
    }
    for (num_experts, num_topk) in [(1, 1), (2, 2), (37, 3), (64, 17), (64, 33), (64, 64), (100, 65), (2048, 8)] {
        changes.push(Box::new(move |p| (p.num_experts, p.num_topk) = (num_experts, num_topk)));
    }
    changes.push(Box::new(|p| p.has_bias = true));
    for problem in &base {
        for change in &changes {
            let mut changed = problem.clone();
            change(&mut changed);
            problems.push(changed);
        }
    }
    problems
}

fn worlds() -> Vec<Vec<Environment>> {
    let gpus = [h200(), gb300(), a100()];
    let hosts = InstructionSet::ALL.map(host);
    let mut worlds: Vec<Vec<Environment>> = gpus.iter().chain(&hosts).map(|rank| vec![rank.clone(); 2]).collect();
    worlds.push(vec![Environment::default(); 2]);
    worlds.push(vec![h200(), gb300()]);
    worlds.push(vec![h200(), host(InstructionSet::Avx2)]);
    worlds.push(vec![host(InstructionSet::Avx512), host(InstructionSet::Scalar)]);
    worlds.push(vec![h200(), Environment::default()]);
    worlds.push(vec![h200(), Environment { gpu: Fact::Absent, ..h200() }]);
    for library in ["driver", "nccl", "nvrtc"] {
        for found in [Fact::Absent, Fact::Unknown, Fact::Present("1.0".to_owned()), Fact::Present("new".to_owned())] {
            let mut rank = h200();
            *match library {
                "driver" => &mut rank.libraries.driver,
                "nccl" => &mut rank.libraries.nccl,
                _ => &mut rank.libraries.nvrtc,
            } = found;
            worlds.push(vec![h200(), rank]);
        }
    }
    for flags in [None, Some(BTreeSet::from(["LOCKSTEP_EAGER".to_owned()]))] {
        worlds.push(vec![Environment { flags, ..gb300() }; 2]);
    }
    let with_uuid = |uuid: &str| {
        let Fact::Present(gpu) = h200().gpu else { unreachable!("an H200 rank has a GPU") };
        Environment { gpu: Fact::Present(Gpu { uuid: Some(uuid.to_owned()), ..gpu }), ..h200() }
    };
    worlds.push(vec![with_uuid("GPU-a"), with_uuid("GPU-b")]);
    worlds.push(vec![with_uuid("GPU-a"), with_uuid("GPU-a")]);
    worlds
}

fn deployments() -> Vec<DeploymentFacts> {
    // The backend is named so that worlds of both kinds are asked too; a family does not change who is offered.
    let base = deployment(2, Device::Auto, "mma_sync");
    let with = |change: &dyn Fn(&mut DeploymentFacts)| {
        let mut changed = base.clone();
        change(&mut changed);
        changed
    };
    let mut deployments = vec![base.clone()];
    deployments.extend([Device::Cpu, Device::Gpu].map(|device| with(&|d| d.device = device)));
    deployments.extend([Transport::Host, Transport::Nccl].map(|transport| with(&|d| d.transport = transport)));
    deployments.extend([Payload::F32, Payload::Bf16, Payload::Nvfp4].map(|payload| with(&|d| d.payload = payload)));
    deployments.extend([CombineDtype::F32, CombineDtype::Bf16].map(|dtype| with(&|d| d.combine_dtype = dtype)));
    deployments.push(with(&|d| d.batch_invariant = true));
    deployments.push(with(&|d| d.share_gpus = true));
    deployments.push(with(&|d| d.tensor_parallel = 2));
    deployments.push(with(&|d| d.node_of_rank = vec![0, 1]));
    deployments.extend([Levels::One, Levels::Two].map(|levels| with(&|d| d.levels = levels)));
    for counts in [vec![448, 448], vec![896, 0], vec![128, 0], vec![64, 64], vec![1, 2, 3]] {
        deployments.push(with(&|d| d.experts = ExpertSplit::Blocks(counts.clone())));
    }
    deployments
}

/// Whether a descriptor, read literally, admits a group of experts; `shared` experts neither travel nor are routed.
fn admits_group(d: &Descriptor, problem: &Problem, deployment: &DeploymentFacts, shared: bool) -> bool {
    let (hidden, intermediate) = match problem.shared {
        Some(s) if shared => (s.hidden, s.intermediate),
        _ => (problem.hidden, problem.intermediate),
    };
    let shapes = [(d.hidden, hidden), (d.intermediate, intermediate)].into_iter().all(|(width, found)| {
        found % width.multiple_of == 0 && width.limits.min <= found && found <= width.limits.max.unwrap_or(found)
    });
    let counts = deployment.experts.counts(problem.num_experts, deployment.num_ranks());
    let dealt = counts.len() == deployment.num_ranks() && counts.iter().sum::<usize>() == problem.num_experts;
    let (least, most) = (counts.iter().min().copied().unwrap_or(0), counts.iter().max().copied().unwrap_or(0));
    let local = d.num_local_experts;
    let experts =
        dealt && local.min <= least && most <= local.max.unwrap_or(most) && (least == most || d.uneven_experts);
    let topk = d.num_topk.min <= problem.num_topk && problem.num_topk <= d.num_topk.max.unwrap_or(problem.num_topk);
    let travels = (deployment.payload == Payload::Auto || d.payloads.contains(&deployment.payload))
        && (deployment.combine_dtype == CombineDtype::Auto || d.combine_dtypes.contains(&deployment.combine_dtype))
        && (deployment.levels != Levels::Two
            || d.forwards.is_some_and(|ranks| ranks.max.is_none_or(|max| deployment.num_ranks() <= max)));
    shapes
        && d.activations.contains(&problem.activation)
        && (d.bias || !problem.has_bias)
        && (d.batch_invariant || !deployment.batch_invariant)
        && deployment.tensor_parallel <= d.max_tensor_parallel
        && d.max_num_nodes.is_none_or(|max| BTreeSet::from_iter(&deployment.node_of_rank).len() <= max as usize)
        && d.deprecated.is_none()
        && (shared || (experts && topk && travels && d.routing.contains(&problem.routing)))
}

fn has_library(found: &Fact<String>, needed: Option<&str>) -> bool {
    match found {
        Fact::Unknown => true,
        Fact::Absent => false,
        Fact::Present(found) => needed.is_none_or(|needed| version_at_least(found, needed) != Some(false)),
    }
}

fn admits_rank(d: &Descriptor, deployment: &DeploymentFacts, rank: &Environment) -> bool {
    let device = match &d.target {
        Target::Cpu { instruction_sets } => {
            let runs = |fact: Fact<InstructionSet>| match fact {
                Fact::Unknown => true,
                Fact::Absent => instruction_sets.contains(&InstructionSet::Scalar),
                Fact::Present(found) => instruction_sets.iter().any(|set| *set <= found),
            };
            deployment.device != Device::Gpu && runs(rank.instruction_set)
        }
        Target::Gpu { compute_capabilities } => {
            deployment.device != Device::Cpu
                && match &rank.gpu {
                    Fact::Unknown => true,
                    Fact::Absent => false,
                    Fact::Present(gpu) => compute_capabilities.iter().any(|range| {
                        range.first <= gpu.compute_capability
                            && range.last.is_none_or(|last| gpu.compute_capability <= last)
                    }),
                }
        }
    };
    device
        && d.libraries.iter().all(|(library, needed)| has_library(rank.libraries.get(*library), *needed))
        && d.opt_in.is_none_or(|flag| rank.flags.as_ref().is_none_or(|flags| flags.contains(flag)))
}

fn admits(
    registry: &Registry,
    d: &Descriptor,
    problem: &Problem,
    deployment: &DeploymentFacts,
    ranks: &[Environment],
) -> bool {
    let quant_of = |weights: WeightFormat, quantised: bool| match (weights, quantised) {
        (WeightFormat::Nvfp4, true) => Some(Quant::Nvfp4),
        (WeightFormat::Nvfp4, false) => Some(Quant::W4a16Nvfp4),
        (WeightFormat::Bf16, _) => Some(Quant::None),
        (WeightFormat::Mxfp4 | WeightFormat::Fp8, _) => None,
    };
    let same_technique =
        |quant: Quant| registry.descriptors().iter().find(|other| other.identity == Identity { quant, ..d.identity });
    let quantised = problem.quantisation.weights.iter().copied().find(|weights| *weights != WeightFormat::Bf16);
    let routed = quant_of(quantised.unwrap_or(WeightFormat::Bf16), problem.quantisation.quantised_activations);
    let main = routed == Some(d.identity.quant);
    let serves = |other: &Descriptor, shared: bool| {
        admits_group(other, problem, deployment, shared)
            && ranks.iter().all(|rank| admits_rank(other, deployment, rank))
    };
    let kept = quantised.is_none()
        || !problem.quantisation.weights.contains(&WeightFormat::Bf16)
        || same_technique(Quant::None).is_some_and(|other| serves(other, false));
    let shared = problem.shared.is_none_or(|shared| {
        quant_of(shared.weights, shared.quantised_activations)
            .and_then(same_technique)
            .is_some_and(|other| serves(other, true))
    });
    let distinct_gpus = {
        let uuids: Vec<&String> = ranks.iter().filter_map(|rank| rank.gpu.present()?.uuid.as_ref()).collect();
        BTreeSet::from_iter(&uuids).len() == uuids.len()
    };
    let transport = d.transports.iter().any(|transport| {
        let known = registry.transport(*transport).unwrap();
        let libraries = &known.libraries;
        (deployment.transport == Transport::Auto || deployment.transport == *transport)
            && (distinct_gpus || known.shares_gpus)
            && known.max_num_nodes.is_none_or(|max| deployment.num_nodes() <= max as usize)
            && (known.forwards || deployment.levels != Levels::Two)
            && ranks.iter().all(|rank| {
                libraries.iter().all(|(library, needed)| has_library(rank.libraries.get(*library), *needed))
            })
    });
    let own_gpu = distinct_gpus || deployment.share_gpus || matches!(d.target, Target::Cpu { .. });
    main && serves(d, false) && kept && shared && transport && own_gpu
}

/// Who serves, by what `resolve` says: the winner and the others, or those eligible in a refusal.
fn offered(
    problem: &Problem,
    deployment: &DeploymentFacts,
    ranks: &[Environment],
    registry: &Registry,
) -> BTreeSet<Identity> {
    match resolve(std::slice::from_ref(problem), deployment, ranks, registry) {
        Ok(selection) => {
            let selected = &selection.layers[0];
            let offered: BTreeSet<Identity> =
                std::iter::once(&selected.winner).chain(&selected.others).map(|candidate| candidate.identity).collect();
            let all = 1 + selected.others.len() + selected.refused.len();
            assert_eq!(all, registry.identities().count(), "all are asked");
            assert!(selected.refused.iter().all(|candidate| !candidate.refusals.is_empty()));
            offered
        }
        Err(ResolveError::Refused(refused)) => {
            let candidates = &refused.failures[0].candidates;
            assert_eq!(candidates.len(), registry.identities().count(), "all are asked");
            candidates.iter().filter(|candidate| candidate.is_eligible()).map(|candidate| candidate.identity).collect()
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn what_is_offered_is_what_descriptors_admit() {
    let registry = registry();
    let (problems, deployments, worlds) = (problems(), deployments(), worlds());
    let (mut num_offered, mut num_asked) = (0, 0);
    let mut ever_offered: BTreeSet<Identity> = BTreeSet::new();
    for (w, ranks) in worlds.iter().enumerate() {
        for (d, deployment) in deployments.iter().enumerate() {
            // The whole product is large: every deployment meets every world with a changing third of the problems.
            for (p, problem) in problems.iter().enumerate().filter(|(p, _)| (p + w + d) % 3 == 0 || d == 0) {
                let offered = offered(problem, deployment, ranks, &registry);
                let admitted: BTreeSet<Identity> = registry
                    .descriptors()
                    .iter()
                    .filter(|descriptor| admits(&registry, descriptor, problem, deployment, ranks))
                    .map(|descriptor| descriptor.identity)
                    .collect();
                assert_eq!(
                    offered, admitted,
                    "problem {p} {problem:?}\ndeployment {d} {deployment:?}\nworld {w} {ranks:?}"
                );
                num_offered += offered.len();
                num_asked += 1;
                ever_offered.extend(offered);
            }
        }
    }
    assert!(
        num_asked > 10_000 && num_offered > num_asked / 2,
        "{num_offered} offered of {num_asked} asked: the grid is thin"
    );
    let never: Vec<Identity> = registry
        .identities()
        .filter(|identity| !ever_offered.contains(identity) && identity.technique != "wgmma_old")
        .collect();
    assert_eq!(never, [], "no problem of the grid is theirs");
}

#[test]
fn a_narrowed_instance_is_offered_no_more_than_its_descriptor() {
    let wide = registry();
    let simd = wide.descriptor(Identity::grouped_gemm("simd", Quant::W4a16Nvfp4)).unwrap();
    let instance = simd
        .narrow(|d| {
            d.activations.remove(&ActivationForm::SwigluClamp);
            d.num_topk.max = Some(16);
            d.hidden.multiple_of = 128;
        })
        .unwrap();
    let narrow = wide.clone().with_instance(instance).unwrap();
    let ranks = vec![host(InstructionSet::Avx2); 2];
    let deployment = deployment(2, Device::Cpu, "cpu");
    let mut num_lost = 0;
    for problem in problems() {
        let [wide, narrow] = [&wide, &narrow].map(|registry| offered(&problem, &deployment, &ranks, registry));
        assert!(narrow.is_subset(&wide), "{problem:?}: {narrow:?} of {wide:?}");
        num_lost += wide.len() - narrow.len();
    }
    assert!(num_lost > 0, "the instance takes something away");
}
