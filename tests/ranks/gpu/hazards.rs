//! Two ranks on two GPUs of which one has another part: they stop before anything is dispatched, or end in what is agreed.
//! Names as in `crate::agreement`, which has the same hazards with ranks on cores.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use lockstep::facts::BUILD;

use crate::support::driver::Driver;
use crate::support::fixtures;
use crate::support::gpu::{GPU_BACKENDS, job_on_gpus, job_with_cache};
use crate::support::launch::{FAILURE_LIMIT, Job, Outcome, mpirun};
use crate::support::places;
use crate::support::report::Report;
use crate::support::run::{Work, files_in, word};
use crate::support::safetensors;

/// Kimi K3's layout: SiTU, a latent, shared experts in bf16.
const FIXTURE: &str = "k3-tiny";

/// Two ranks that run a fixture's first layer.
struct Pair {
    work: Work,
    checkpoint: PathBuf,
    output: PathBuf,
    report: PathBuf,
}

impl Pair {
    fn new() -> Self {
        let work = Work::new();
        let (output, report) = (work.path("output.safetensors"), work.path("report.json"));
        Self { work, checkpoint: fixtures::checkpoint(FIXTURE), output, report }
    }

    fn bare(&self, backend: &str) -> Job {
        let layer = &fixtures::named(FIXTURE).layers[0];
        mpirun(2).limit(FAILURE_LIMIT).args([
            "run".to_owned(),
            "--checkpoint".to_owned(),
            word(&self.checkpoint),
            format!("--layers={}", layer.layer),
            format!("--input={}:{}", word(&layer.file), layer.tensor("x")),
            format!("--output={}", word(&self.output)),
            format!("--report={}", word(&self.report)),
            format!("--backend={backend}"),
            "--combine=slot".to_owned(),
        ])
    }

    /// With the tests' cache of kernels.
    fn run(&self, backend: &str) -> Job {
        job_with_cache(self.bare(backend))
    }

    /// With a cache of its own, a directory a rank.
    fn run_with_cache(&self, backend: &str, cache: &Path) -> Job {
        job_on_gpus(self.bare(backend)).args([format!("--cache-dir={}", word(cache))])
    }

    /// All ranks have stopped with one message, and nothing was dispatched or written.
    #[track_caller]
    fn stops(&self, job: &Job, code: i32, needles: &[&str]) -> Outcome {
        let outcome = job.clone().args(["--set=log.level=debug"]).run().fails_clearly(code, needles);
        assert!(!outcome.stderr.contains("carried"), "something was dispatched: {}", outcome.printed());
        assert!(!self.output.exists(), "a run that stopped has written an output");
        outcome
    }

    /// The output of a job that has to succeed.
    #[track_caller]
    fn output_of(&self, job: &Job) -> (String, Report, Outcome) {
        let outcome = job.run().expect_code(0);
        let sha256 = safetensors::sha256(&self.output);
        fs::remove_file(&self.output).expect("an output");
        (sha256, Report::read(&self.report), outcome)
    }
}

/// Another NCCL: that of `LOCKSTEP_TEST_OTHER_NCCL`, else the one there is under another version.
fn other_nccl(work: &Work) -> String {
    std::env::var("LOCKSTEP_TEST_OTHER_NCCL").unwrap_or_else(|_| word(another_nccl(work)))
}

/// NCCL as it is, but for the version that it answers with.
fn another_nccl(work: &Work) -> PathBuf {
    let real = std::env::var("LOCKSTEP_NCCL").expect("LOCKSTEP_NCCL names NCCL, or the directory that it lies in");
    let real = if Path::new(&real).is_dir() { Path::new(&real).join("libnccl.so.2") } else { real.into() };
    let dir = work.path("nccl");
    fs::create_dir(&dir).expect("made");
    let source = dir.join("version.c");
    fs::write(&source, "int ncclGetVersion(int *version) { *version = 22707; return 0; }\n").expect("written");
    let mut command = Command::new("cc");
    command
        .args(["-shared", "-fPIC", "-Wl,--no-as-needed", "-o"])
        .arg(dir.join("libnccl.so.2"))
        .arg(&source)
        .arg(&real);
    command.arg(format!("-Wl,-rpath,{}", word(real.parent().expect("a directory"))));
    assert!(command.status().expect("cc, which MPI needs as well").success());
    dir
}

#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_hazard_11_another_nccl() {
    let pair = Pair::new();
    let other = other_nccl(&pair.work);
    let job = pair.run("wgmma").env_of(1, "LOCKSTEP_NCCL", &other);
    pair.stops(&job, 4, &["versions.nccl", "on rank 1"]);
    // Alike again, ranks run, also over the other one.
    let job = pair.run("wgmma").env("LOCKSTEP_NCCL", &other);
    let (over_other, report, _) = pair.output_of(&job);
    assert_eq!(report.at("/decided/layers/0/transport"), "nccl");
    assert_eq!(over_other, pair.output_of(&pair.run("wgmma")).0, "NCCL carries bytes and changes none");
}

/// With another NVRTC on the machine (`LOCKSTEP_TEST_OTHER_NVRTC`) it is that; else a rank says that it found another.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_hazard_11_another_nvrtc() {
    let pair = Pair::new();
    let job = match std::env::var("LOCKSTEP_TEST_OTHER_NVRTC") {
        Ok(other) => pair.run("wgmma").env_of(1, "LOCKSTEP_NVRTC", &other),
        Err(_) => pair.run("wgmma").env("LOCKSTEP_FAULT", "1:start:library=nvrtc,13.1.80"),
    };
    pair.stops(&job, 4, &["versions.nvrtc", "on rank 1"]);
}

/// A driver that answers as one of another GPU, and one that answers well and then fails.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_hazard_11_another_answer_of_the_driver() {
    let (pair, own) = (Pair::new(), machines_driver());
    let other = Driver::in_front_of(
        &own,
        "int cuDeviceGetAttribute(int *value, int attribute, int device) {
            int (*own)(int *, int, int) = real(\"cuDeviceGetAttribute\");
            int result = own(value, attribute, device);
            if (attribute == 75) *value = 8; /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR */
            return result;
        }",
    );
    pair.stops(
        &pair.run("mma_sync").env_of(1, "LD_LIBRARY_PATH", &before(&other)),
        4,
        &["versions.compute_capability", "on rank 1"],
    );
    // CUDA_ERROR_ECC_UNCORRECTABLE
    let failing = Driver::in_front_of(&own, "int cuDevicePrimaryCtxRetain(void **context, int device) { return 214; }");
    pair.stops(&pair.run("mma_sync").env_of(1, "LD_LIBRARY_PATH", &before(&failing)), 3, &["(rank 1 of 2)", "ECC"]);
}

/// The driver that this machine has.
fn machines_driver() -> PathBuf {
    let listed = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let usual = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    let mut dirs = listed.split(':').filter(|dir| !dir.is_empty()).chain(usual).map(Path::new);
    dirs.find_map(|dir| fs::canonicalize(dir.join("libcuda.so.1")).ok())
        .expect("a driver, without which there is no GPU")
}

/// `LD_LIBRARY_PATH` with a driver's directory first.
fn before(driver: &Driver) -> String {
    format!("{}:{}", word(driver.dir()), std::env::var("LD_LIBRARY_PATH").unwrap_or_default())
}

/// Another beta on one rank: as a setting, and in its copy of the model's config.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_hazard_07_another_situ_constant() {
    let pair = Pair::new();
    let copy = pair.work.path("copy");
    fs::create_dir(&copy).expect("made");
    for name in files_in(&pair.checkpoint) {
        fs::copy(pair.checkpoint.join(&name), copy.join(&name)).expect("copied");
    }
    let config = fs::read_to_string(copy.join("config.json")).expect("a config");
    let changed = config.replace("\"activation_situ_beta\": 4.0", "\"activation_situ_beta\": 4.0000005");
    assert_ne!(changed, config);
    fs::write(copy.join("config.json"), changed).expect("written");
    for backend in GPU_BACKENDS {
        let job = pair.run(backend).env_of(1, "LOCKSTEP_ACTIVATION", "situ:4.2,25");
        pair.stops(&job, 4, &["moe.activation", "situ:4.2,25\" on rank 1"]);
        let job = pair.run(backend).word_of(1, &pair.checkpoint, &copy);
        pair.stops(&job, 4, &["beta", "on rank 1"]);
    }
}

/// How weights are packed is a matter of the build: another build is found whatever it changes.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_hazard_09_another_packed_layout() {
    let pair = Pair::new();
    let mut bytes = fs::read(places::binary()).expect("the binary");
    let revision = BUILD.revision.as_bytes();
    let places: Vec<usize> =
        bytes.windows(revision.len()).enumerate().filter(|(_, found)| *found == revision).map(|(at, _)| at).collect();
    assert!(!places.is_empty(), "the binary does not hold its revision");
    places.iter().for_each(|&at| bytes[at..at + 4].copy_from_slice(b"0000"));
    let other = pair.work.path("lockstep");
    fs::write(&other, bytes).expect("written");
    let mode = fs::metadata(places::binary()).expect("the binary").permissions();
    fs::set_permissions(&other, mode).expect("executable");
    let job = pair.run("wgmma").word_of(1, places::binary(), &other);
    pair.stops(&job, 4, &["build.revision", "on rank 1"]);
}

/// Kernels made of other sources stop all; a flipped bit is found when the entry is read, and a sound copy takes its place.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_hazard_07_other_sources_and_a_flipped_cubin() {
    for backend in GPU_BACKENDS {
        let pair = Pair::new();
        let cache = pair.work.path("cache");
        let job = pair.run_with_cache(backend, &cache).env("LOCKSTEP_FAULT", "1:compile:stale");
        pair.stops(&job, 4, &["what their kernels are made of", "define STALE none -> 1", "rank 1"]);
        let (sound, ..) = pair.output_of(&pair.run_with_cache(backend, &cache));
        let host = cache.join(&files_in(&cache)[0]);
        let entry =
            files_in(&host.join("rank1")).into_iter().find(|name| name.starts_with("kernel.")).expect("kernels");
        let cubin = host.join("rank1").join(entry).join("kernel.cubin");
        let mut bytes = fs::read(&cubin).expect("a cubin");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&cubin, bytes).expect("written");
        let (healed, _, outcome) = pair.output_of(&pair.run_with_cache(backend, &cache));
        assert_eq!(outcome.stderr.matches("is damaged").count(), 1, "said once: {}", outcome.printed());
        assert!(!outcome.stderr.contains("compiled "), "rank 0 has a sound one: {}", outcome.printed());
        assert_eq!(healed, sound, "{backend}");
    }
}

/// A rank that times its tactics otherwise, and one on which all of them fail.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_hazard_06_perturbed_tuning() {
    for backend in GPU_BACKENDS {
        let pair = Pair::new();
        let (untuned, ..) = pair.output_of(&pair.run(backend));
        let tuned = || pair.run(backend).args(["--tuning=on"]).limit(FAILURE_LIMIT);
        let perturbed = tuned().env("LOCKSTEP_FAULT", "1:tune:tactic_time=0,100000");
        let (perturbed, report, _) = pair.output_of(&perturbed);
        let ran = |rank: usize| report.at(&format!("/ranks/{rank}/layers/0/tactics")).clone();
        assert_eq!(ran(0), ran(1), "{backend}: {}", report.0);
        assert_eq!(perturbed, untuned, "{backend}: a tactic gives other bits");
        if !report.at("/decided/tactics").as_array().expect("a list").is_empty() {
            let failing = tuned().env("LOCKSTEP_FAULT", "1:tune:tactic_fails=all");
            pair.stops(&failing, 3, &["no tactic for", "failed on rank 1"]);
        }
    }
}

/// A rank that can't load its backend's kernels, or dies as it does.
#[test]
#[ignore = "needs two GPUs, NVRTC and NCCL"]
fn two_gpus_hazard_03_a_rank_that_cannot_build_its_backend() {
    let pair = Pair::new();
    for stage in ["compile", "load"] {
        let job = pair.run("wgmma").env("LOCKSTEP_FAULT", &format!("1:{stage}:error"));
        pair.stops(&job, 3, &["(rank 1 of 2)", "LOCKSTEP_FAULT"]);
    }
    let job = pair.run("wgmma").env_of(1, "CUDA_VISIBLE_DEVICES", "");
    pair.stops(&job, 4, &["on rank 1"]);
}
