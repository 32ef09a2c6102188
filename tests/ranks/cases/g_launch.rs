//! Machines without GPUs, without a launcher, with fewer slots than ranks, as root in a container.
//!
//! What needs GPUs of case G4 (two ranks on one GPU) is not there yet.

use std::fs;
use std::process::Command;

use crate::support::launch::{FAILURE_LIMIT, Job, launcher, mpirun};
use crate::support::places;
use crate::support::scene::Scene;

/// No GPU is to be seen, and no library to talk to one.
fn without_gpu(job: Job) -> Job {
    job.env("CUDA_VISIBLE_DEVICES", "").env("LD_LIBRARY_PATH", "/nowhere")
}

#[test]
fn g4_help_and_version_need_nothing() {
    for words in [&["--help"][..], &["--version"], &["run", "--help"], &["doctor", "--version"]] {
        let mut command = Command::new(places::binary());
        // No search path: there is no mpirun.
        let output = command.args(words).env_clear().output().expect("the program starts");
        assert!(output.status.success(), "{words:?}: {output:?}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{words:?}: {output:?}");
    }
    let outcome = mpirun(3).args(["--version"]).limit(FAILURE_LIMIT).run().expect_code(0);
    assert_eq!(outcome.stdout.lines().count(), 1, "ranks that say the same: {}", outcome.printed());
}

/// The program names no GPU library that the system would have to load with it.
#[test]
fn g4_no_gpu_library_is_linked() {
    let output = Command::new("ldd").arg(places::binary()).output().expect("ldd is part of the C library");
    let libraries = String::from_utf8_lossy(&output.stdout);
    assert!(libraries.contains("libmpi"), "{libraries}");
    for library in ["libcuda", "libnvrtc", "libnccl"] {
        assert!(!libraries.contains(library), "{libraries}");
    }
}

#[test]
fn g4_cpu_backends_run_without_gpus() {
    let mut digests = Vec::new();
    for backend in ["auto", "cpu", "simd", "reference"] {
        let scene = Scene::new(&format!("moe: {{backend: {backend}}}"));
        without_gpu(scene.run(mpirun(2))).run().expect_code(0);
        digests.push(scene.sha256().expect("an output"));
    }
    assert_eq!(digests[0], digests[1], "auto and cpu are one choice here");
    assert_eq!(digests[1], digests[2], "cpu prefers simd");
}

#[test]
fn g4_a_gpu_that_is_not_there_is_said_once() {
    for (deployment, needle) in [("cluster: {device: gpu}", "gpu"), ("moe: {backend: wgmma}", "wgmma")] {
        let scene = Scene::new(deployment);
        let outcome = without_gpu(scene.run(mpirun(2))).run();
        assert!([2, 3].contains(&outcome.code), "{}", outcome.printed());
        let code = outcome.code;
        outcome.fails_clearly(code, &[needle]);
    }
}

/// On one host any number of ranks is the user's to say; on hosts with so many slots, a larger one is explained.
#[test]
fn g4_more_ranks_than_slots() {
    let scene = Scene::new("");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    scene.run(launcher((2 * cores).clamp(3, 8))).run().expect_code(0);
    let hostfile = scene.path("hosts");
    fs::write(&hostfile, "# two hosts\nnode1 slots=1\nnode2 slots = 2 max_slots=8\n").expect("a hostfile");
    let none = scene.path("none");
    fs::write(&none, "node1 slots=0\n").expect("a hostfile");
    for (option, value, room) in [
        ("--hosts", "node1:1,node2:2".to_string(), 3),
        ("--hosts", "node1,node2".to_string(), 2),
        ("--hostfile", hostfile.display().to_string(), 3),
        ("--hostfile", none.display().to_string(), 0),
    ] {
        let dry_run = |ranks: usize, more: &[&str]| {
            let mut command = Command::new(places::of_project("launch/mpirun.sh"));
            command.args(["--dry-run", "--ranks", &ranks.to_string(), option, &value]).args(more);
            command.arg("run").output().expect("the launcher starts")
        };
        let refused = dry_run(room + 1, &[]);
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(2), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        for needle in [&format!("--ranks {}", room + 1), &value, &format!("has room for {room}"), "--oversubscribe"] {
            assert!(message.contains(needle), "no {needle:?}: {message}");
        }
        assert!(dry_run(room + 1, &["--mpi-arg=--oversubscribe"]).status.success());
        assert!(room == 0 || dry_run(room, &[]).status.success());
    }
}

/// mpirun refuses root; the launcher tells it that root is meant, and the README says how to do so by hand.
#[test]
fn g4_root_in_a_container() {
    let scene = Scene::new("");
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    let confirm = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"];
    let without = |job: Job| confirm.into_iter().fold(job, |job, name| job.without_env(name));
    let plain = without(scene.run(mpirun(2))).run();
    if is_root {
        assert_ne!(plain.code, 0, "{}", plain.printed());
        assert!(plain.stderr.contains("as root"), "{}", plain.printed());
    } else {
        plain.expect_code(0);
    }
    without(scene.run(launcher(2))).run().expect_code(0);
    let readme = fs::read_to_string(places::of_project("README.md")).expect("a README");
    assert!(readme.contains(&confirm.map(|name| format!("{name}=1")).join(" ")), "the README lacks the line for root");
}
