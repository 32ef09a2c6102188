//! What a laptop says of geometries, and of the machines that `topology/` describes.

use std::collections::BTreeSet;
use std::path::Path;

use clap::ValueEnum;

use super::*;
use crate::config::{Effective, Sources};
use crate::ids::Rank;
use crate::layer::{Asks, select_jointly};
use crate::sample::Geometry;
use crate::select::environment::Fact;
use crate::select::tests::worlds::registry as with_gpus;
use crate::world::Group;
use crate::world::simulated::SimulatedWorld;

/// What the layers of a cluster's model ask.
fn problems(args: &ResolveArgs, deployment: &Deployment) -> Vec<Problem> {
    let (layers, _) = layers(&args.model, &args.layers, deployment).expect("planned");
    layers.into_iter().map(|(problem, _)| problem).collect()
}

fn args(model: &str) -> ResolveArgs {
    ResolveArgs {
        model: model.to_owned(),
        environment: Vec::new(),
        layers: LayerChoice::All,
        deployment: DeploymentArgs::default(),
        json: false,
        log: LogArgs::default(),
    }
}

#[test]
fn every_geometry_resolves_without_anything_known() {
    for geometry in Geometry::value_variants() {
        let resolved =
            resolved(&args(geometry.name()), &Deployment::default(), &Registry::builtin()).expect("resolves");
        assert_eq!(resolved.selection.techniques(), ["simd"], "{}", geometry.name());
    }
}

#[test]
fn a_geometry_asks_for_what_its_sample_asks_for() {
    for geometry in Geometry::value_variants() {
        let mut spec = SampleSpec::of(*geometry);
        (spec.hidden, spec.intermediate, spec.num_experts, spec.num_topk) = (64, 32, 8, 2);
        spec.latent = spec.latent.map(|_| 32);
        spec.fit_groups();
        let dir = tempfile::tempdir().expect("a directory");
        spec.clone().plan().expect("a plan").write(dir.path(), &|_| {}).expect("written");
        let dir = dir.path().display().to_string();
        let of_dir = layers(&dir, &LayerChoice::All, &Deployment::default()).expect("planned").0;
        let of_spec = of_geometry(&spec, &LayerChoice::All, &Deployment::default()).expect("planned");
        assert_eq!(of_dir[0].0, of_spec.0, "{}", geometry.name());
        assert_eq!(of_dir.len(), 1, "{}", geometry.name());
    }
}

#[test]
fn what_is_neither_directory_nor_geometry_is_refused() {
    let error = resolved(&args("kimi-k9"), &Deployment::default(), &Registry::builtin()).expect_err("no such thing");
    assert_eq!(error.exit(), Exit::BadInput);
    assert!(error.to_string().contains("kimi-k3, deepseek-v3, qwen3-235b"), "{error}");
}

/// A cluster of `topology/`: its deployment, the description of its ranks, and a model that it is for.
struct Cluster {
    deployment: &'static str,
    environment: &'static str,
    model: &'static str,
    num_ranks: usize,
}

const CLUSTERS: [Cluster; 6] = [
    Cluster { deployment: "laptop", environment: "cpu-avx2", model: "qwen3-235b", num_ranks: 4 },
    Cluster { deployment: "h200", environment: "h200", model: "qwen3-235b", num_ranks: 1 },
    Cluster { deployment: "h200x2", environment: "h200x2", model: "kimi-k3", num_ranks: 2 },
    Cluster { deployment: "2x8-h200", environment: "2x8-h200", model: "deepseek-v3", num_ranks: 16 },
    Cluster { deployment: "4x4-gb300-k3", environment: "4x4-gb300", model: "kimi-k3", num_ranks: 16 },
    Cluster { deployment: "two-hosts", environment: "cpu-avx2", model: "qwen3-235b", num_ranks: 4 },
];

fn topology() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/topology"))
}

impl Cluster {
    fn deployment(&self) -> Deployment {
        let path = topology().join(self.deployment).with_extension("yaml");
        let bytes = std::fs::read(&path).expect("the deployment is there");
        let sources = Sources { file: Some((self.deployment, &bytes)), ..Sources::default() };
        Effective::resolve(&sources).unwrap_or_else(|error| panic!("{error}")).deployment
    }

    fn args(&self) -> ResolveArgs {
        let environment = topology().join("environments").join(self.environment).with_extension("json");
        ResolveArgs { environment: vec![environment], ..args(self.model) }
    }

    fn resolved(&self, registry: &Registry) -> Result<Resolved, ResolveCommandError> {
        resolved(&self.args(), &self.deployment(), registry)
    }
}

/// Stems of the files with an extension in a directory.
fn stems(dir: &Path, extension: &str) -> BTreeSet<String> {
    let files = std::fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    files
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned())
        .collect()
}

#[test]
fn every_file_of_topology_loads_and_describes_its_ranks() {
    let named = |of: fn(&Cluster) -> &'static str| CLUSTERS.iter().map(|cluster| of(cluster).to_owned()).collect();
    let deployments: BTreeSet<String> = named(|cluster| cluster.deployment);
    assert_eq!(deployments, stems(topology(), "yaml"));
    let environments: BTreeSet<String> = named(|cluster| cluster.environment);
    assert_eq!(environments, stems(&topology().join("environments"), "json"));
    for cluster in &CLUSTERS {
        let deployment = cluster.deployment();
        assert_eq!(deployment.name, cluster.deployment);
        let (facts, environments) = ranks(&cluster.args(), &deployment).expect("ranks as declared");
        assert_eq!((facts.num_ranks(), environments.len()), (cluster.num_ranks, cluster.num_ranks));
        assert_eq!(facts.num_nodes(), deployment.cluster.nodes as usize, "{}", cluster.deployment);
    }
}

/// What this build makes of each cluster: hosts run, GPUs are refused with every reason until there are kernels for them.
#[test]
fn clusters_as_this_build_sees_them() {
    for cluster in &CLUSTERS {
        let text = match cluster.resolved(&Registry::builtin()) {
            Ok(resolved) => resolved.selection.to_string(),
            Err(error) => format!("exit {}: {error}", error.exit().code()),
        };
        insta::assert_snapshot!(format!("builtin_{}", cluster.deployment), text);
    }
}

/// The same with GPU implementations that exist in tests alone: compute capability 9.0 for sm_90a, 10.0 to 10.3 for
/// sm_100a to sm_103a.
#[test]
fn clusters_with_implementations_of_tests() {
    for cluster in &CLUSTERS {
        let resolved = cluster.resolved(&with_gpus()).unwrap_or_else(|error| panic!("{}: {error}", cluster.deployment));
        insta::assert_snapshot!(format!("with_gpus_{}", cluster.deployment), resolved.to_string());
    }
}

/// Ranks that are what the file says come to what the laptop says, by the code that a run selects with. What ranks collect
/// has more in it than the file: UUIDs, variables, their own host names.
#[test]
fn simulated_ranks_of_each_cluster_select_what_the_laptop_prints() {
    for cluster in &CLUSTERS {
        let (registry, deployment) = (with_gpus(), cluster.deployment());
        let printed = cluster.resolved(&registry).unwrap_or_else(|error| panic!("{}: {error}", cluster.deployment));
        let problems = problems(&cluster.args(), &deployment);
        let (_, described) = ranks(&cluster.args(), &deployment).expect("described");
        let collected = |rank: Rank| {
            let mut environment = described[rank.index()].clone();
            environment.host = environment.host.map(|host| format!("{host}.cluster.example"));
            environment.variables.insert("OMPI_COMM_WORLD_RANK".to_owned(), rank.0.to_string());
            environment.info.insert("cores".to_owned(), "144".to_owned());
            if let Fact::Present(gpu) = &mut environment.gpu {
                gpu.uuid = Some(format!("GPU-{rank}"));
            }
            environment
        };
        let world = SimulatedWorld {
            ranks_per_host: cluster.num_ranks / deployment.cluster.nodes as usize,
            ..SimulatedWorld::new(cluster.num_ranks)
        };
        let selected = world.run(|ranks| {
            let environment = &collected(ranks.rank());
            select_jointly(
                ranks,
                Asks { deployment: &deployment, environment, problems: &problems, registry: &registry },
            )
        });
        for (outcome, _) in selected {
            let jointly = outcome.unwrap_or_else(|error| panic!("{}: {error}", cluster.deployment));
            assert_eq!(jointly.selection, printed.selection, "{}", cluster.deployment);
            assert_eq!(jointly.fingerprint.digest(), printed.digest, "{}", cluster.deployment);
        }
    }
}

/// One rank of sixteen that is not what the file says moves the digest, and all of them select for it.
#[test]
fn a_rank_that_is_not_as_described_is_seen() {
    let cluster = &CLUSTERS[4];
    let (registry, deployment) = (with_gpus(), cluster.deployment());
    let printed = cluster.resolved(&registry).expect("resolves");
    let problems = problems(&cluster.args(), &deployment);
    let (_, described) = ranks(&cluster.args(), &deployment).expect("described");
    let world = SimulatedWorld { ranks_per_host: 4, ..SimulatedWorld::new(16) };
    let selected = world.run(|ranks| {
        let mut environment = described[ranks.rank().index()].clone();
        if ranks.rank() == Rank(9) {
            environment.gpu = crate::select::tests::worlds::h200().gpu;
        }
        let asks =
            Asks { deployment: &deployment, environment: &environment, problems: &problems, registry: &registry };
        select_jointly(ranks, asks)
    });
    for (outcome, _) in selected {
        let jointly = outcome.expect("mma_sync serves on both");
        assert_eq!(jointly.selection.techniques(), ["mma_sync"]);
        assert_ne!(jointly.fingerprint.digest(), printed.digest);
    }
}
