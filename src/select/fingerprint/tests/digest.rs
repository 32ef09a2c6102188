//! Any single change changes the digest; what is rank-local, and the order of anything, does not.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::super::tests::worlds::{deployment, gb300, h200, host, k3, registry};
use super::super::super::*;
use super::super::*;
use super::{Inputs, NUM_STEPS, inputs, next_up};
use crate::config::{CombineDtype, Device, Payload};
use crate::ids::Rank;
use crate::numerics::activation::Activation;
use crate::routing::RoutingMethod;

type Change = fn(&mut Inputs);

/// Changes of one thing, with whether it is the selection that changes.
fn changes() -> Vec<(&'static str, bool, Change)> {
    fn situ(inputs: &mut Inputs) -> (&mut f32, &mut f32) {
        match &mut inputs.activation {
            Activation::Situ { beta, linear_beta: Some(linear_beta) } => (beta, linear_beta),
            other => unreachable!("the inputs have SiTU with both constants, not {other:?}"),
        }
    }
    vec![
        ("beta", false, |i| *situ(i).0 = next_up(*situ(i).0)),
        ("linear_beta", false, |i| *situ(i).1 = next_up(*situ(i).1)),
        ("activation", false, |i| i.activation = Activation::Situ { beta: *situ(i).0, linear_beta: None }),
        ("scaling", false, |i| i.routing = RoutingMethod::KimiK3 { scaling: next_up(1.0) }),
        ("routing", false, |i| i.routing = RoutingMethod::Default),
        ("input_scale", false, |i| i.input_scale = next_up(i.input_scale)),
        ("one of many scales", false, |i| i.scales[1] = next_up(i.scales[1])),
        ("order of scales", false, |i| i.scales.reverse()),
        ("version", false, |i| i.version.push('1')),
        ("revision", false, |i| i.revision.push('d')),
        ("travelling dtype", false, |i| i.travel = "f32"),
        ("buffer size", false, |i| i.buffer_bytes += 1),
        ("layout", false, |i| i.layout = "n_major"),
        ("tactic", false, |i| i.tactic = "block_m 128"),
        ("kernel source", false, |i| i.kernel_source.push(' ')),
        ("artefact", false, |i| i.artefact = "0124"),
        ("flag", false, |i| i.flag = true),
        ("must-match variable", false, |i| {
            i.environments[0].variables.insert("NCCL_ALGO".to_owned(), "Ring".to_owned());
        }),
        ("chunk size", true, |i| i.deployment.chunk_tokens = Some(64)),
        ("capacity", true, |i| i.deployment.num_max_tokens_per_rank += 1),
        ("payload", true, |i| i.deployment.payload = Payload::Bf16),
        ("combine dtype", true, |i| i.deployment.combine_dtype = CombineDtype::Bf16),
        ("expert split", true, |i| i.deployment.experts = ExpertSplit::Blocks(vec![225, 223, 224, 224])),
        ("top-k", true, |i| i.problems[1].num_topk = 15),
        ("number of layers", true, |i| i.problems.truncate(2)),
        ("order of layers", true, |i| i.problems.swap(0, 1)),
        ("hidden", true, |i| i.problems[0].hidden += 128),
        ("format", true, |i| i.problems[0].quantisation.quantised_activations = false),
        ("shared width", true, |i| i.problems[0].shared.as_mut().unwrap().intermediate += 128),
        ("backend", true, |i| i.deployment.backend = "simd".to_owned()),
        ("asked activations", true, |i| i.deployment.activations = crate::config::Activations::Bf16),
        ("asked activation", true, |i| i.deployment.activation = Some(i.activation)),
        ("fallback", true, |i| i.deployment.allow_fallback = true),
        ("batch invariance", true, |i| i.deployment.batch_invariant = true),
        ("device", true, |i| i.deployment.device = Device::Gpu),
        ("node layout under a transport that reads it", true, |i| i.deployment.node_of_rank = vec![0, 1, 1, 1]),
        ("instruction set of a rank", true, |i| {
            i.environments[3].instruction_set = environment::Fact::Present(InstructionSet::Scalar);
        }),
        ("GPU of a rank", true, |i| i.environments[3].gpu = gb300().gpu),
        ("library of a rank", true, |i| {
            i.environments[3].libraries.nccl = environment::Fact::Present("2.30".to_owned())
        }),
        ("flag of a rank", true, |i| {
            i.environments[3].flags = Some(["LOCKSTEP_EAGER".to_owned()].into());
        }),
        ("registry", true, |i| {
            let instance = i.registry.descriptors()[0].narrow(|d| d.num_topk.max = Some(31)).unwrap();
            i.registry = i.registry.clone().with_instance(instance).unwrap();
        }),
    ]
}

#[test]
fn any_single_change_changes_the_digest_and_is_named() {
    let before = inputs();
    for (name, of_selection, change) in changes() {
        let mut after = before.clone();
        change(&mut after);
        assert_eq!(before.selection().digest() != after.selection().digest(), of_selection, "{name}");
        let (ours, theirs) = (before.session(), after.session());
        assert_ne!(ours.digest(), theirs.digest(), "{name}");
        let differences = diff([(Rank(0), &ours), (Rank(1), &theirs)]);
        assert!(!differences.is_empty(), "{name}");
        if !of_selection {
            assert_eq!(
                differences.len(),
                1 + usize::from(["activation", "routing"].contains(&name)),
                "{name}: {differences:?}"
            );
        }
    }
    // Every pair of changes is told apart as well.
    let mut digests: BTreeMap<Digest, &str> = BTreeMap::from([(before.session().digest(), "none")]);
    for (name, _, change) in changes() {
        let mut after = before.clone();
        change(&mut after);
        let twin = digests.insert(after.session().digest(), name);
        assert_eq!(twin, None, "{name}");
    }
}

#[test]
fn what_is_rank_local_stays_out() {
    let base = inputs();
    let mut other = base.clone();
    for (idx, environment) in other.environments.iter_mut().enumerate() {
        environment.host = Some(format!("node{idx}"));
        environment.info.insert("cache".to_owned(), format!("/tmp/{idx}"));
        environment.variables.insert("SLURM_PROCID".to_owned(), idx.to_string());
        environment.libraries.driver = base.environments[idx].libraries.driver.clone();
        if let environment::Fact::Present(gpu) = &mut environment.gpu {
            gpu.uuid = Some(format!("GPU-{idx}"));
        }
    }
    assert_eq!(base.selection(), other.selection());
    let sessions: Vec<Fingerprint> = (0..4).map(|rank| other.session_of(rank, &[0, 1, 2, 3, 4, 5, 6, 7])).collect();
    for (rank, session) in sessions.iter().enumerate() {
        assert_eq!(*session, base.session(), "rank {rank}");
    }
}

#[test]
fn node_layout_counts_only_where_a_transport_reads_it() {
    let mut base = inputs();
    base.deployment.backend = "cpu".to_owned();
    let mut other = base.clone();
    other.deployment.node_of_rank = vec![0, 1, 2, 3];
    assert_eq!(base.selection(), other.selection(), "the host transport reads no layout");
    (base.deployment.backend, other.deployment.backend) = ("wgmma".to_owned(), "wgmma".to_owned());
    let differences = diff([(Rank(0), &base.selection()), (Rank(1), &other.selection())]);
    let text: Vec<String> = differences.iter().map(ToString::to_string).collect();
    assert_eq!(text, ["world.node_of_rank: [0, 0, 1, 1] on rank 0, [0, 1, 2, 3] on rank 1"]);
}

#[test]
fn a_laptop_and_the_ranks_themselves_give_one_digest() {
    let registry = registry();
    for (described, device) in [
        (
            r#"{"count": 16, "instruction_set": "scalar", "libraries": {"driver": "580.65.06", "nccl": "2.28.3", "nvrtc": "13.0.88"},
            "flags": [], "gpu": {"name": "NVIDIA GB300", "compute_capability": "10.3"}}"#,
            Device::Gpu,
        ),
        (r#"{"count": 16, "instruction_set": "avx2", "gpu": null}"#, Device::Cpu),
    ] {
        let laptop = Environment::list_from_json(described).unwrap();
        // What ranks collect has more in it: hosts, UUIDs, MPI, variables.
        let collected: Vec<Environment> = (0..16)
            .map(|rank| {
                let mut environment = if device == Device::Gpu { gb300() } else { host(InstructionSet::Avx2) };
                if device == Device::Cpu {
                    environment.libraries = laptop[0].libraries.clone();
                    environment.flags = laptop[0].flags.clone();
                }
                environment.host = Some(format!("node{}", rank / 4));
                environment.variables.insert("OMPI_COMM_WORLD_RANK".to_owned(), rank.to_string());
                if let environment::Fact::Present(gpu) = &mut environment.gpu {
                    gpu.uuid = Some(format!("GPU-{rank}"));
                }
                environment
            })
            .collect();
        let facts =
            DeploymentFacts { node_of_rank: (0..16).map(|rank| rank / 4).collect(), ..deployment(16, device, "auto") };
        let digest = |environments: &[Environment]| {
            let selection = resolve(&[k3(1), k3(2)], &facts, environments, &registry).unwrap();
            (selection.summary(), selection.fingerprint(&facts, environments, &registry).unwrap().digest())
        };
        assert_eq!(digest(&laptop), digest(&collected));
    }
}

proptest! {
    #[test]
    fn order_does_not_matter(order in Just((0..NUM_STEPS).collect::<Vec<usize>>()).prop_shuffle()) {
        let inputs = inputs();
        prop_assert_eq!(inputs.session_of(0, &order), inputs.session());
    }

    #[test]
    fn the_last_bit_of_a_constant_counts(beta in 1e-30f32..1e30, scale in 1e-30f32..1e30) {
        let mut base = inputs();
        base.activation = Activation::Situ { beta, linear_beta: Some(scale) };
        base.input_scale = scale;
        for change in [
            (|i: &mut Inputs| i.input_scale = next_up(i.input_scale)) as Change,
            |i| if let Activation::Situ { beta, .. } = &mut i.activation { *beta = next_up(*beta) },
            |i| if let Activation::Situ { linear_beta: Some(l), .. } = &mut i.activation { *l = next_up(*l) },
        ] {
            let mut after = base.clone();
            change(&mut after);
            prop_assert_ne!(base.session().digest(), after.session().digest());
        }
    }

    /// Equal set-ups never differ: which rank has which environment, what hosts are called and where caches lie.
    #[test]
    fn equal_set_ups_give_one_selection_digest(
        ranks in Just((0..4usize).collect::<Vec<_>>()).prop_shuffle(),
        hosts in prop::collection::vec("[a-z]{1,8}", 4),
        variables in prop::collection::vec(("[A-Z_]{1,8}", "[a-z]{0,4}"), 0..6),
    ) {
        let mut base = inputs();
        base.environments = vec![h200(), h200(), gb300(), gb300()];
        let mut other = base.clone();
        other.environments = ranks.iter().map(|rank| base.environments[*rank].clone()).collect();
        for (environment, host) in other.environments.iter_mut().zip(hosts) {
            environment.host = Some(host);
            environment.variables.extend(variables.iter().cloned());
        }
        prop_assert_eq!(base.selection(), other.selection());
    }
}
