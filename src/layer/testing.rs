//! Sessions of this module's tests on a GPU. One process is one rank.

use std::path::Path;

use super::{JitOptions, Part, Session, SessionOptions};
use crate::config::{Activations, BackendFamily, Deployment, Device};
use crate::env::EnvVars;
use crate::facts;
use crate::world::World;

/// A session over all layers of a fixture for up to `num_tokens` tokens, with kernels kept in `work`, and with what `set` sets.
pub(super) fn session_on_gpu(
    (world, work): (&World, &Path),
    (fixture, technique, activations): (&str, BackendFamily, Activations),
    num_tokens: usize,
    set: impl FnOnce(&mut Deployment),
) -> Session {
    let env = EnvVars::read().unwrap();
    let machine = facts::machine(world, &env, None).unwrap();
    let mut deployment = Deployment::default();
    deployment.cluster.device = Device::Gpu;
    deployment.moe.backend = technique;
    deployment.moe.activations = activations;
    deployment.moe.activation = None;
    set(&mut deployment);
    let options = SessionOptions {
        checkpoint: Path::new("tests/fixtures").join(fixture),
        layers: None,
        deployment,
        num_threads: env.available_parallelism,
        gpu_ordinal: machine.gpu_ordinal,
        jit: JitOptions { cache_dir: Some(work.to_owned()), nvrtc: env.nvrtc().map(str::to_owned) },
        nccl: None,
        cublaslt: env.cublaslt().map(str::to_owned),
        environment: machine.environment,
        input_is_bf16: true,
        part: Part::Block,
        num_tokens: Some(num_tokens),
        progress: &|_, _| {},
    };
    Session::open(world, &options).unwrap_or_else(|error| panic!("{fixture}: {error}"))
}
