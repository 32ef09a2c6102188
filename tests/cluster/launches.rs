//! Launches over two hosts: the same bits as on one, and what can't become a world of ranks.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::hosts::{Hosts, NODES, RANKS, Way};
use crate::support::driver::Driver;
use crate::support::fixtures;
use crate::support::launch::{FAILURE_LIMIT, Job, mpirun};
use crate::support::run::Work;
use crate::support::safetensors;
use crate::support::scene::Scene;

/// What can't start says so within this.
const AT_ONCE: Duration = Duration::from_secs(5);

/// A run of all layers of a fixture on the rows of its first one.
fn fixture_run(job: Job, name: &str, output: &Path) -> Job {
    let layer = &fixtures::named(name).layers[0];
    let input = format!("{}:{}", layer.file.display(), layer.tensor("x"));
    let checkpoint = fixtures::checkpoint(name).display().to_string();
    let output = output.display().to_string();
    let words = ["run", "--checkpoint", &checkpoint, "--layers", "all", "--input", &input, "--output", &output];
    job.args(words)
}

#[test]
fn two_hosts_give_the_bits_of_one() {
    let Some(hosts) = Hosts::up() else { return };
    let work = Work::new();
    for (idx, fixture) in fixtures::all().iter().enumerate() {
        let here = work.path("here.safetensors");
        fixture_run(mpirun(RANKS), fixture.name, &here).run().expect_code(0);
        // Two ways for every fixture, so that each way has had two.
        for way in [Way::ALL[idx % 4], Way::ALL[(idx + 1) % 4]] {
            let there = work.path("there.safetensors");
            let outcome = fixture_run(hosts.job(way), fixture.name, &there).run().expect_code(0);
            let what = format!("{} by {way:?}", fixture.name);
            assert_eq!(safetensors::sha256(&there), safetensors::sha256(&here), "{what}: {}", outcome.printed());
            for node in NODES {
                assert!(outcome.stdout.contains(node), "{what} ran on {node}: {}", outcome.printed());
            }
            // Two ranks a host: tokens cross once, and are passed on.
            for said in [&outcome.stderr, &outcome.stdout] {
                assert!(said.contains("over host in two levels"), "{what}: {}", outcome.printed());
            }
            assert!(outcome.stdout.contains("between 2 nodes: dispatch "), "{what}: {}", outcome.printed());
            hosts.assert_quiet(&what);
        }
    }
}

/// Without PMIx every process would be alone, or Open MPI would end it with advice on building Slurm.
#[test]
fn g1_srun_without_pmix_is_explained() {
    let Some(hosts) = Hosts::up() else { return };
    let scene = Scene::new("");
    for (words, how) in [
        ("srun -N2 -n4 --mpi=none", "--mpi=none"),
        // The site's default, which is none.
        ("srun -N2 -n4", "--mpi=none"),
        ("srun -N2 -n4 --mpi=pmi2", "--mpi=pmi2"),
        ("srun -N1 -n1 --mpi=none", "--mpi=none"),
    ] {
        let outcome = scene.run(hosts.on("login", words.split(' '))).run();
        assert!(outcome.elapsed < AT_ONCE, "{}", outcome.printed());
        let launched = if words.contains("-n4") { "=4 processes" } else { "=1 processes" };
        outcome.fails_clearly(3, &[how, launched, "srun --mpi=pmix", "srun --mpi=list", "mpirun -n", "Open MPI"]);
        assert_eq!(scene.sha256(), None);
        hosts.assert_quiet(words);
    }
}

#[test]
fn g1_a_world_of_another_size_than_the_deployment() {
    let Some(hosts) = Hosts::up() else { return };
    let scene = Scene::new("cluster: {nodes: 2, ranks_per_node: 4}");
    for way in Way::LAUNCHERS {
        let outcome = scene.run(hosts.job(way)).run();
        assert!(outcome.elapsed < AT_ONCE, "{way:?}: {}", outcome.printed());
        outcome.fails_clearly(2, &["wants 8 ranks (2 nodes x 4)", "the world has 4", "mpirun -n 8"]);
        hosts.assert_quiet("a world that is too small");
    }
}

/// Each rank as it would be bound by Slurm: its devices in `CUDA_VISIBLE_DEVICES`, by its number on its host.
fn with_devices(hosts: &Hosts, drivers: &Driver, of_ranks: [&str; 2]) -> Job {
    let [first, second] = of_ranks;
    let line = format!(
        "if [ \"$SLURM_LOCALID\" = 0 ]; then d='{first}'; else d='{second}'; fi; CUDA_VISIBLE_DEVICES=$d exec \"$@\""
    );
    let words = ["srun", "-N2", "-n4", "--mpi=pmix", "sh", "-c", &line, "sh"];
    hosts.on("login", words).env("LD_LIBRARY_PATH", &drivers.dir().display().to_string())
}

/// The devices are a stand-in's, two on each host. What counts is which of them each rank takes.
#[test]
fn g2_every_rank_has_a_device_of_its_own_whatever_it_sees() {
    let Some(hosts) = Hosts::up() else { return };
    for node in NODES {
        hosts.shell(
            node,
            "mount -t tmpfs none /proc/driver; mkdir /proc/driver/nvidia; \
             echo 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  x' >/proc/driver/nvidia/version",
        );
    }
    let driver = Driver::new(&["DEVICES=2", "INIT=0", "MAJOR=9"], None);
    for devices in [["0", "1"], ["0,1", "0,1"], ["1,0", "1,0"], ["1", "0"], ["0", "0,1"]] {
        let outcome = with_devices(&hosts, &driver, devices).args(["doctor", "--json"]).limit(FAILURE_LIMIT).run();
        let ranks: Value = serde_json::from_str(&outcome.stdout)
            .unwrap_or_else(|error| panic!("{devices:?}: {error}: {}", outcome.printed()));
        let uuid = |rank: usize| ranks[rank]["gpu"]["uuid"].as_str().unwrap_or_default().to_owned();
        let mut uuids: Vec<String> = (0..RANKS).map(uuid).collect();
        assert!(uuids.iter().all(|uuid| !uuid.is_empty()), "{devices:?}: {}", outcome.printed());
        uuids.sort();
        uuids.dedup();
        assert_eq!(uuids.len(), RANKS, "{devices:?}: {}", outcome.printed());
    }
    let scene = Scene::new("cluster: {device: gpu}");
    // Two ranks that were given one device are told, before anything is allocated on it.
    let shared = scene.run(with_devices(&hosts, &driver, ["1", "1"])).run();
    let code = shared.code;
    assert!([2, 3].contains(&code), "{}", shared.printed());
    shared.fails_clearly(code, &["ranks 0-1", "GPU-"]);
    for nothing in ["", "-1"] {
        let outcome = scene.run(with_devices(&hosts, &driver, [nothing, nothing])).run();
        assert!([2, 3].contains(&outcome.code), "{}", outcome.printed());
        for (rank, node) in [(1, NODES[0]), (2, NODES[1])] {
            let said = format!("no GPU is visible to rank {rank} on host {node}");
            assert!(outcome.stderr.contains(&said), "{said}: {}", outcome.printed());
        }
        let outcome = scene.run(with_devices(&hosts, &driver, ["0,1", nothing])).run();
        outcome.fails_clearly(4, &["9.0 on ranks 0, 2; not there on ranks 1, 3"]);
    }
    hosts.assert_quiet("ranks with stand-in devices");
}

/// More ranks than the hosts have room for are refused with the way to have them, and run when it is taken.
#[test]
fn g4_more_ranks_than_slots_of_two_hosts() {
    let Some(hosts) = Hosts::up() else { return };
    let scene = Scene::new("");
    let launcher = |script: &str| format!("{}/launch/{script}", env!("CARGO_MANIFEST_DIR"));
    let mpirun_sh = |more: &[&str]| {
        let words = [&launcher("mpirun.sh"), "--ranks", "6", "--hosts", "node1:2,node2:2"];
        hosts.on(NODES[0], words.into_iter().chain(more.iter().copied()).chain(["--binary"]))
    };
    let refused = scene.run(mpirun_sh(&[])).run().expect_code(2);
    assert!(refused.stderr.contains("has room for 4") && refused.stderr.contains("--mpi-arg=--oversubscribe"));
    scene.run(mpirun_sh(&["--mpi-arg=--oversubscribe"])).run().expect_code(0);
    assert!(scene.sha256().is_some());
    scene.clear();
    // What Slurm has no room for is no wrong result, which is what its own exit code would mean. Without --immediate it queues.
    let words = [&launcher("srun.sh"), "--ranks", "6", "--ranks-per-node", "3", "--mpi-arg=--immediate=5", "--binary"];
    let refused = scene.run(hosts.on("login", words)).run().expect_code(3);
    assert!(refused.stderr.contains("srun.sh: error: srun did not start the ranks"), "{}", refused.printed());
    assert_eq!(scene.sha256(), None);
    hosts.assert_quiet("six ranks");
}
