//! Kernels compiled where there is no GPU, and what runs make of caches: cold, warm, shipped, changed, unwritable.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::answer;
use crate::support::compare::{Tolerance, assert_rows, situ};
use crate::support::fixtures;
use crate::support::gpu::{GPU_BACKENDS, job_on_gpus, libraries};
use crate::support::launch::{Job, Outcome, alone, mpirun};
use crate::support::made::{Choice, S};
use crate::support::run::{Work, files_in, word};
use crate::support::safetensors;

const FIXTURE: &str = "k3-tiny";

/// A run of a fixture's layers, or of another checkpoint, with a cache of its own.
struct Cached {
    work: Work,
    cache: PathBuf,
    output: PathBuf,
}

impl Cached {
    fn new() -> Self {
        let work = Work::new();
        let (cache, output) = (work.path("cache"), work.path("output.safetensors"));
        Self { work, cache, output }
    }

    /// A run of the fixture, in the checkpoint's own mode.
    fn run(&self, job: Job, backend: &str) -> Job {
        let layer = &fixtures::named(FIXTURE).layers[0];
        job_on_gpus(job.args([
            "run".to_owned(),
            format!("--checkpoint={}", word(fixtures::checkpoint(FIXTURE))),
            format!("--layers={}", layer.layer),
            format!("--input={}:{}", word(&layer.file), layer.tensor("x")),
            format!("--output={}", word(&self.output)),
            format!("--backend={backend}"),
            "--combine=slot".to_owned(),
            "--cache-dir".to_owned(),
            word(&self.cache),
        ]))
    }
}

/// How often any rank says that it has compiled something.
fn compilations(outcome: &Outcome) -> usize {
    outcome.stderr.lines().filter(|line| line.contains("compiled ") && line.contains(" for sm_")).count()
}

#[track_caller]
fn fine(job: &Job) -> (usize, Outcome) {
    let outcome = job.run().expect_code(0);
    (compilations(&outcome), outcome)
}

/// Case F1: each kernel once for all ranks, however they share the cache.
fn f1(ranks: usize) {
    for backend in GPU_BACKENDS {
        let mut kernels = Vec::new();
        for layout in ["flat", "per-rank"] {
            let cached = Cached::new();
            let run = || cached.run(mpirun(ranks), backend).args(["--cache-layout", layout]);
            let (compiled, cold) = fine(&run());
            let bits = safetensors::sha256(&cached.output);
            let (again, warm) = fine(&run());
            assert!(compiled > 0, "{}", cold.printed());
            assert_eq!(again, 0, "warm: {}", warm.printed());
            assert_eq!(bits, safetensors::sha256(&cached.output), "{backend} {layout}: cold and warm");
            fine(&run().args(["--require-warm"]));
            kernels.push(compiled);
        }
        assert_eq!(kernels[0], kernels[1], "{backend}: one directory or one a rank");
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_f1_cold_and_warm() {
    f1(1);
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_f1_cold_and_warm() {
    f1(2);
}

/// Case F3: one cache, beta 4, then 5, then 4 again: each gives its own value, and going back compiles nothing.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_f3_another_constant_is_another_kernel() {
    let cached = Cached::new();
    let s = S::new(1, 128, 128);
    let mut checkpoint = s.checkpoint();
    checkpoint.set_scalar(0, "gate_proj", "weight_scale_2", 8.0);
    checkpoint.set_scalar(0, "up_proj", "weight_scale_2", 30.0);
    let dir = cached.work.checkpoint(&checkpoint);
    let input = cached.work.tensors("input", &[("x".to_string(), s.tokens(1, 1.0))].into());
    let choice = cached.work.tensors("choice", &Choice::single([0]).tensors());
    for backend in GPU_BACKENDS {
        let run = |beta: f64| {
            let job = alone().args(["run".to_owned(), format!("--backend={backend}"), "--activations=bf16".to_owned()]);
            job_on_gpus(job).args([
                format!("--checkpoint={}", word(&dir)),
                format!("--input={}", word(&input)),
                format!("--topk={}", word(&choice)),
                format!("--output={}", word(&cached.output)),
                format!("--cache-dir={}", word(&cached.cache)),
                format!("--activation=situ:{beta},25"),
                "--part=routed".to_owned(),
                "--output-dtype=f32".to_owned(),
            ])
        };
        let value_of = |job: &Job, beta: f64| {
            let (compiled, outcome) = fine(job);
            assert!(compiled == 0 || beta == 4.0 || outcome.stderr.contains("BETA_BITS"), "{}", outcome.printed());
            let output = safetensors::read(&cached.output).remove("layers.0.output").expect("an output");
            // FC2's input is a bf16.
            let wanted = situ(8.0, 30.0, beta, Some(25.0));
            assert_rows(&output, 0, &[wanted], Tolerance::Relative(1.0 / 256.0), &format!("{backend} beta {beta}"));
            compiled
        };
        let first = value_of(&run(4.0), 4.0);
        assert!(first > 0);
        let second = value_of(&run(5.0), 5.0);
        assert!(
            second > 0 && second <= first,
            "{backend}: every kernel that folds the constant in, {second} of {first}"
        );
        assert_eq!(value_of(&run(4.0), 4.0), 0, "{backend}: back again");
    }
    assert!(
        (situ(8.0, 30.0, 4.0, Some(25.0)) - 80.34).abs() < 0.01
            && (situ(8.0, 30.0, 5.0, Some(25.0)) - 96.01).abs() < 0.01
    );
    assert_ne!(answer("bf16"), 0.0);
}

/// Case F5: no home, a cache that is a file, and no compiler: warm runs go on, cold ones name what was looked for.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn one_gpu_f5_nowhere_to_write_and_nothing_to_compile_with() {
    let cached = Cached::new();
    let backend = "wgmma";
    let without = |job: Job| job.env("LOCKSTEP_NVRTC", "/nowhere/libnvrtc.so.13");
    let cold = without(cached.run(alone(), backend)).run();
    let outcome = cold.fails_clearly(3, &["no rank has a compiler", "for sm_90a", "not cached below"]);
    assert!(outcome.stderr.contains("/nowhere/libnvrtc.so.13"), "names what was looked for: {}", outcome.printed());
    let (compiled, _) = fine(&cached.run(alone(), backend));
    assert!(compiled > 0);
    let bits = safetensors::sha256(&cached.output);
    assert_eq!(fine(&without(cached.run(alone(), backend))).0, 0, "warm without a compiler");
    assert_eq!(bits, safetensors::sha256(&cached.output));

    let file = cached.work.path("file");
    fs::write(&file, "x").expect("written");
    for (name, path) in [("a file", file.as_path()), ("/proc", Path::new("/proc"))] {
        let (again, outcome) = fine(&cached.run(alone(), backend).word(&word(&cached.cache), &word(path)));
        assert_eq!(again, compiled, "{name}: {}", outcome.printed());
        assert_eq!(outcome.stderr.matches("can't be kept below").count(), 1, "{name}: {}", outcome.printed());
    }
    // No cache directory is named, and no home is there to have one.
    let homeless =
        cached.run(alone(), backend).word("--cache-dir", "--cache-layout").word(&word(&cached.cache), "flat");
    let (again, outcome) = fine(&homeless.without_env("HOME").without_env("XDG_CACHE_HOME"));
    assert_eq!(again, compiled, "{}", outcome.printed());
    assert_eq!(bits, safetensors::sha256(&cached.output));
}

/// A cache that `lockstep warmup --arch sm_90a` filled without a GPU (`LOCKSTEP_TEST_SHIPPED`, as `tests/gpu/pack.sh` makes
/// it): a node starts with it under `--require-warm`, with no compiler or with one of the build that filled it. A compiler of
/// another build makes other kernels, so that such a node is refused.
#[test]
#[ignore = "needs a GPU and LOCKSTEP_TEST_SHIPPED"]
fn one_gpu_starts_with_a_shipped_cache() {
    let shipped =
        std::env::var("LOCKSTEP_TEST_SHIPPED").expect("LOCKSTEP_TEST_SHIPPED names a cache that warmup filled");
    for backend in GPU_BACKENDS {
        let cached = Cached::new();
        copy(Path::new(&shipped), &cached.cache);
        let strict = || cached.run(alone(), backend).args(["--require-warm"]);
        let (compiled, _) = fine(&strict().env("LOCKSTEP_NVRTC", "/nowhere/libnvrtc.so.13"));
        assert_eq!(compiled, 0, "{backend}");
        let bits = safetensors::sha256(&cached.output);
        if builds_of(&cached.cache).contains(&build_here()) {
            assert_eq!(fine(&strict()).0, 0, "{backend}: a compiler of the same build");
            assert_eq!(bits, safetensors::sha256(&cached.output), "{backend}");
        } else {
            strict().run().fails_clearly(3, &["jit.require_warm is set", "lockstep warmup"]);
        }
        // A model that nobody warmed up for is no accident.
        let other = strict().args(["--activation=situ:4.5,25"]).env("LOCKSTEP_NVRTC", "/nowhere/libnvrtc.so.13");
        other.run().fails_clearly(3, &["no rank has a compiler", "for sm_90a"]);
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("made");
    for name in files_in(from) {
        let (from, to) = (from.join(&name), to.join(&name));
        if from.is_dir() {
            copy(&from, &to);
        } else {
            fs::copy(&from, &to).expect("copied");
        }
    }
}

/// The builds of compilers that made a cache's kernels.
fn builds_of(cache: &Path) -> Vec<String> {
    let listed = alone().args(["cache", "list", "--json", "--cache-dir"]).args([cache]).run().expect_code(0);
    let listed: Value = serde_json::from_str(&listed.stdout).expect("JSON");
    let entries = listed["entries"].as_array().expect("a list");
    entries.iter().map(|entry| entry["parts"]["compiler"].as_str().unwrap_or_default().to_owned()).collect()
}

/// The build of this machine's compiler, as `doctor` tells it.
fn build_here() -> String {
    let job = alone().args(["doctor", "--json"]);
    let job = libraries().iter().fold(job, |job, (name, value)| job.env(name, value));
    let told: Value = serde_json::from_str(&job.run().expect_code(0).stdout).expect("JSON");
    find(&told, "nvrtc").unwrap_or_default()
}

/// The first text that stands under a key, at any depth.
fn find(value: &Value, key: &str) -> Option<String> {
    match value {
        Value::Object(map) => map
            .get(key)
            .and_then(|found| found.as_str().map(str::to_owned))
            .or_else(|| map.values().find_map(|value| find(value, key))),
        Value::Array(list) => list.iter().find_map(|value| find(value, key)),
        _ => None,
    }
}
