//! Runs on GPUs: libraries are where this process's variables say, and all tests share one cache of kernels.

use std::path::PathBuf;

use super::launch::Job;
use super::places;
use super::run::{Run, word};

/// Both GPU backends.
pub const GPU_BACKENDS: [&str; 2] = ["mma_sync", "wgmma"];

/// Variables that say where libraries are, which jobs otherwise do not inherit.
const LIBRARIES: [&str; 3] = ["LOCKSTEP_NVRTC", "LOCKSTEP_NCCL", "LOCKSTEP_CUBLASLT"];

/// The libraries' variables of this process, and threads for a rank to compile its kernels on.
pub fn libraries() -> Vec<(&'static str, String)> {
    let libraries = LIBRARIES.into_iter().filter_map(|name| Some((name, std::env::var(name).ok()?)));
    libraries.chain([("LOCKSTEP_THREADS", "4".to_owned())]).collect()
}

/// Where tests keep kernels that they do not try the keeping of.
pub fn cache() -> PathBuf {
    places::temporary().join("gpu-cache")
}

/// What carries tokens where a test does not say: what `LOCKSTEP_TEST_TRANSPORT` names, else what is chosen.
fn transport() -> Option<(&'static str, String)> {
    Some(("LOCKSTEP_TRANSPORT", std::env::var("LOCKSTEP_TEST_TRANSPORT").ok()?))
}

/// A run on GPUs, one rank each.
pub fn on_gpus<'a>(run: &Run<'a>, backend: &str) -> Run<'a> {
    let run = run.clone().backend(backend).key("cluster", "device", "gpu");
    let run = run.option("cache-dir", &word(cache())).option("cache-layout", "flat");
    libraries().into_iter().chain(transport()).fold(run, |run, (name, value)| run.env(name, &value))
}

/// A job on GPUs, one rank each, with a cache of its own choice.
pub fn job_on_gpus(job: Job) -> Job {
    let job = job.args(["--set=cluster.device=gpu"]);
    libraries().into_iter().chain(transport()).fold(job, |job, (name, value)| job.env(name, &value))
}

/// The same with the tests' cache.
pub fn job_with_cache(job: Job) -> Job {
    let cache = format!("--cache-dir={}", word(cache()));
    job_on_gpus(job).args([cache, "--cache-layout=flat".to_owned()])
}
