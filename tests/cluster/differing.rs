//! Two hosts that differ: a variable, a file, a disk that is full or may not be written.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::hosts::{Hosts, NODES, Way};
use crate::agreement::{copy_dir, double_first_f32};
use crate::support::fixtures;
use crate::support::launch::{FAILURE_LIMIT, Job};
use crate::support::run::Work;
use crate::support::safetensors;
use crate::support::scene::Scene;

/// `mpirun` as people type it, on the first node: it passes on what it is told to.
fn bare_mpirun(hosts: &Hosts) -> Job {
    let words = "mpirun -n 4 --host node1:2,node2:2 --bind-to none -x LOCKSTEP_THREADS";
    hosts.on(NODES[0], words.split(' '))
}

#[test]
fn e2_a_variable_that_reached_one_host() {
    let Some(hosts) = Hosts::up() else { return };
    let scene = Scene::new("");
    for (variable, value, key, other) in [
        ("LOCKSTEP_BACKEND", "reference", "moe.backend", "auto"),
        ("LOCKSTEP_PAYLOAD", "bf16", "dispatch.payload", "auto"),
    ] {
        let difference = format!("{key}: {value} on ranks 0-1, {other} on ranks 2-3");
        let outcome = scene.run(bare_mpirun(&hosts)).env(variable, value).run();
        outcome.fails_clearly(4, &[&difference, "mpirun passes a variable on to other hosts only with -x"]);
        assert_eq!(scene.sha256(), None);
        hosts.assert_quiet(variable);
    }
    // Their levels of logging are each host's own.
    scene.run(bare_mpirun(&hosts)).env("LOCKSTEP_LOG", "warn").run().expect_code(0);
    let outcome = scene.run(bare_mpirun(&hosts)).env("LOCKSTEP_BAKEND", "simd").run().expect_code(0);
    assert_eq!(outcome.stderr.matches("LOCKSTEP_BAKEND").count(), 1, "{}", outcome.printed());
    assert!(outcome.stderr.contains("on ranks 0-1 only"), "{}", outcome.printed());
    // The launchers pass every one on.
    for way in Way::LAUNCHERS {
        let outcome = scene.run(hosts.job(way)).env("LOCKSTEP_BACKEND", "reference").run().expect_code(0);
        assert!(outcome.stdout.contains("lockstep.reference."), "{way:?}: {}", outcome.printed());
    }
    hosts.assert_quiet("equal variables");
}

/// A name that both hosts know, with another file behind it on the second.
struct Behind<'a> {
    hosts: &'a Hosts,
    path: PathBuf,
}

impl<'a> Behind<'a> {
    fn new(hosts: &'a Hosts, path: PathBuf, other: &Path) -> Self {
        hosts.shell(NODES[1], &format!("mount --bind '{}' '{}'", other.display(), path.display()));
        Self { hosts, path }
    }
}

impl Drop for Behind<'_> {
    fn drop(&mut self) {
        self.hosts.shell(NODES[1], &format!("umount '{}'", self.path.display()));
    }
}

/// The ranks of the first host read one file under a name, those of the second another.
#[test]
fn e2_other_files_on_the_second_host() {
    let Some(hosts) = Hosts::up() else { return };
    let work = Work::new();
    let fixture = fixtures::named("modelopt-dsv3-tiny");
    let copy = |name: &str| {
        let dir = work.path(name);
        copy_dir(&fixtures::checkpoint(fixture.name), &dir);
        dir
    };
    let [checkpoint, stale, other] = ["checkpoint", "stale", "other"].map(copy);
    assert!(double_first_f32(&stale, "shared_experts.gate_proj.weight_scale_2"), "the fixture has shared experts");
    let config = std::fs::read_to_string(other.join("config.json")).expect("a config");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    config["num_experts_per_tok"] = 1.into();
    safetensors::write_bytes(&other.join("config.json"), config.to_string().as_bytes());
    let empty = work.path("empty");
    std::fs::create_dir(&empty).expect("a directory");
    let [four, eight] = ["4", "8"].map(|chunk| {
        let path = work.path("deployment.yaml");
        safetensors::write_bytes(&path, format!("version: 1\ndispatch: {{chunk_tokens: {chunk}}}\n").as_bytes());
        path
    });
    let input = format!("{}:{}", fixture.layers[0].file.display(), fixture.layers[0].tensor("x"));
    let output = work.path("output.safetensors");
    let path = |path: &Path| path.display().to_string();
    let run = || {
        let words = [("--deployment", path(&four)), ("--checkpoint", path(&checkpoint)), ("--output", path(&output))];
        let job = hosts.job(Way::SrunLauncher).args(["run", "--layers", "1", "--input", &input]).limit(FAILURE_LIMIT);
        job.args(words.into_iter().flat_map(|(option, value)| [option.to_owned(), value]))
    };
    for (known, other, code, needles) in [
        (&four, &eight, 4, &["dispatch.chunk_tokens: 4 on ranks 0-1, 8 on ranks 2-3"][..]),
        (&checkpoint, &other, 4, &["topk", "on ranks 0-1", "on ranks 2-3"]),
        (&checkpoint, &stale, 4, &["scales.shared", "may be stale", "on ranks 2-3"]),
        (&checkpoint, &empty, 2, &["rank 2", "config.json"]),
    ] {
        let _behind = Behind::new(&hosts, known.clone(), other);
        run().run().fails_clearly(code, needles);
        assert!(!output.exists(), "{}", known.display());
        hosts.assert_quiet("other files");
    }
    run().run().expect_code(0);
    hosts.assert_quiet("equal files");
}

/// Timings that a rank would remember are let go, with one warning, and the run goes on with the same bits.
#[test]
fn f5_a_cache_that_can_t_be_written_on_one_host() {
    let Some(hosts) = Hosts::up() else { return };
    let scene = Scene::new("moe: {tuning: on}");
    let run = || scene.run(hosts.job(Way::SrunLauncher)).env("LOCKSTEP_CACHE_DIR", "/mnt/cache");
    let on_each = |line: &str| NODES.map(|node| hosts.shell(node, line));
    on_each("mount -t tmpfs none /mnt; mkdir /mnt/cache");
    run().run().expect_code(0);
    let whole = scene.sha256();
    assert!(hosts.shell(NODES[1], "find /mnt -type f").contains("/node2/rank1/tactics.json"), "a rank's own directory");
    for disk in
        ["mount -o remount,ro /mnt", "mount -o remount,rw,size=64k /mnt; ! cat /dev/zero >/mnt/full 2>/dev/null"]
    {
        hosts.shell(NODES[1], &format!("rm -rf /mnt/cache/* 2>/dev/null; {disk}"));
        scene.clear();
        let outcome = run().run().expect_code(0);
        assert!(outcome.stderr.contains("/mnt/cache"), "{disk}: {}", outcome.printed());
        assert_eq!(scene.sha256(), whole, "{disk}: {}", outcome.printed());
        let left = hosts.shell(NODES[1], "find /mnt/cache -name '*tmp*'");
        assert_eq!(left, "", "{disk}: half-written: {}", outcome.printed());
        hosts.assert_quiet(disk);
    }
}
