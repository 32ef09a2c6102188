//! Any single change changes the digest; what is rank-local, and the order of anything, does not.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::super::super::tests::worlds::{deployment, gb300, h200, host, k3, registry};
use super::super::super::*;
use super::super::*;
use super::changes::{Change, Single, pattern, patterns, singles};
use super::{Inputs, NUM_STEPS, inputs, next_up};
use crate::config::{Device, Levels};
use crate::ids::Rank;
use crate::numerics::activation::Activation;

#[test]
fn any_single_change_changes_the_digest_and_is_named() {
    // Every pair of changes is told apart as well.
    let mut digests: BTreeMap<Digest, &str> = BTreeMap::from([(inputs().session().digest(), "none")]);
    for Single { name, fields, setting, change } in singles() {
        let mut before = inputs();
        setting(&mut before);
        let mut after = before.clone();
        change(&mut after);
        let of_selection = patterns(&before.selection());
        assert_eq!(
            before.selection().digest() != after.selection().digest(),
            fields.iter().any(|field| of_selection.contains(*field)),
            "{name}: only what `resolve` knows is in the digest that it prints"
        );
        let (ours, theirs) = (before.session(), after.session());
        assert_ne!(ours.digest(), theirs.digest(), "{name}");
        let differences = diff([(Rank(0), &ours), (Rank(1), &theirs)]);
        let moved: BTreeSet<String> = differences.iter().map(|difference| pattern(&difference.field)).collect();
        for field in fields {
            assert!(moved.contains(*field), "{name} does not move {field}, but {moved:?}");
        }
        let twin = digests.insert(theirs.digest(), name);
        assert_eq!(twin, None, "{name}");
    }
}

/// The table of changes and the encoding are one list: a field that nothing moves is a field that nobody has tried.
#[test]
fn the_changes_are_those_of_every_encoded_field() {
    let mut encoded = patterns(&inputs().session());
    let mut moved: BTreeSet<String> = BTreeSet::from(["selection".to_owned()]);
    for Single { fields, setting, change, .. } in singles() {
        let mut changed = inputs();
        setting(&mut changed);
        encoded.extend(patterns(&changed.session()));
        change(&mut changed);
        encoded.extend(patterns(&changed.session()));
        moved.extend(fields.iter().map(|field| (*field).to_owned()));
    }
    assert_eq!(moved, encoded, "left: fields that the table of changes names, right: fields that are encoded");
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
fn node_layout_counts_only_where_it_is_read() {
    let mut base = inputs();
    (base.deployment.backend, base.deployment.levels) = ("cpu".to_owned(), Levels::One);
    let mut other = base.clone();
    other.deployment.node_of_rank = vec![0, 1, 2, 3];
    assert_eq!(base.selection(), other.selection(), "the host transport reads no layout in one level");
    (base.deployment.levels, other.deployment.levels) = (Levels::Two, Levels::Two);
    assert_ne!(base.selection(), other.selection(), "in two levels it does");
    (base.deployment.levels, other.deployment.levels) = (Levels::Auto, Levels::Auto);
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
