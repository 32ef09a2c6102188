//! A command in the MPI world: how it starts, and the two ways in which it ends.
//!
//! An error that all ranks know of is printed by one of them, and all leave MPI together. An error that one rank alone
//! knows of is printed by that rank, which then ends the job, because the others wait for it.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::checkpoint;
use crate::config::{ConfigError, Deployment, Device, Effective};
use crate::cuda;
use crate::env::{EnvError, EnvVars};
use crate::exit::{Classify, Exit, Known};
use crate::facts::{self, FactsError, Machine};
use crate::fault::{Action, FaultError, Faults, Injected, Stage};
use crate::host;
use crate::ids::Rank;
use crate::jit::cache;
use crate::launched::{LaunchError, Launched, Library};
use crate::layer::JitOptions;
use crate::layer::agreement::{Topic, agree_on};
use crate::select::fingerprint::{FingerprintError, StartBuilder};
use crate::select::{Environment, Fingerprint, RankSet};
use crate::world::{Ending, Phase, Refusal, World, WorldError, abort_job, end_well};

use super::doctor::cache_dir;
use super::failure::Failure;
use super::logging::{self, LogError};
use super::options::CommonArgs;
use super::output::{self, OutputError};

/// Why a command does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The deployment.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The log filter.
    #[error(transparent)]
    Log(#[from] LogError),
    /// Standard output.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// A variable.
    #[error(transparent)]
    Env(#[from] EnvError),
    /// The world's size.
    #[error(transparent)]
    World(#[from] WorldError),
    /// `LOCKSTEP_FAULT`.
    #[error(transparent)]
    Fault(#[from] FaultError),
    /// Signals.
    #[error("cannot set handlers for Ctrl-C and SIGTERM")]
    Signals {
        /// What the system says.
        #[source]
        source: std::io::Error,
    },
    /// A fault on purpose.
    #[error(transparent)]
    Injected(#[from] Injected),
    /// This rank's machine.
    #[error(transparent)]
    Facts(#[from] FactsError),
    /// Some rank failed; all end.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

impl Classify for StartError {
    fn exit(&self) -> Exit {
        match self {
            Self::Config(error) => error.exit(),
            Self::Log(error) => error.exit(),
            Self::Output(error) => error.exit(),
            Self::Env(error) => error.exit(),
            Self::World(error) => error.exit(),
            Self::Facts(error) => error.exit(),
            Self::Fault(error) => error.exit(),
            Self::Injected(error) => error.exit(),
            Self::Signals { .. } => Exit::Environment,
            Self::Refused(error) => error.exit(),
        }
    }

    fn known(&self) -> Known {
        match self {
            Self::Refused(error) => error.known(),
            _ => Known::Here,
        }
    }
}

/// What a command starts with.
pub struct Started {
    /// The deployment, with origins.
    pub effective: Effective,
    /// Threads of this rank.
    pub num_threads: usize,
    /// The number in this process of this rank's GPU, where it drives one.
    pub gpu_ordinal: u32,
    /// Where kernels are kept and what compiles them.
    pub jit: JitOptions,
    /// NCCL, or the directory that it lies in; absent: where the loader finds it.
    pub nccl: Option<String>,
    /// cublasLt, likewise.
    pub cublaslt: Option<String>,
    /// What this rank is.
    pub environment: Environment,
}

impl Started {
    /// How to run.
    #[must_use]
    pub fn deployment(&self) -> &Deployment {
        &self.effective.deployment
    }
}

/// What a command asks for beside the deployment and the machine, by option; equal on all ranks, or none starts.
pub type Asked = Vec<(&'static str, String)>;

/// Joins the world, starts as `common` says on every rank or on none, runs `body`, and leaves.
///
/// # Errors
/// What `body` or the start fails with, after the other ranks have been told.
pub fn in_world(
    env: &EnvVars,
    (common, asked): (&CommonArgs, Asked),
    body: impl FnOnce(&World, &Started) -> Result<Exit, Failure>,
) -> Result<Exit, Failure> {
    with_world(env, |world| match start(world, env, common, &asked)? {
        Some(started) => body(world, &started),
        None => Ok(Exit::Fine),
    })
}

/// Joins the world, runs `body`, and leaves.
///
/// # Errors
/// What `body` or joining fails with, after the other ranks have been told.
pub fn with_world(env: &EnvVars, body: impl FnOnce(&World) -> Result<Exit, Failure>) -> Result<Exit, Failure> {
    prepare_to_end(env)?;
    let (world, faults) = join(env)?;
    let ended = world.agree(faults).map_err(Failure::from).and_then(|()| body(&world));
    leave(world, ended)
}

/// From here on this process ends well, whatever ends it.
///
/// # Errors
/// If the signals' handlers can't be set.
pub fn prepare_to_end(env: &EnvVars) -> Result<(), StartError> {
    let size = env.launched().and_then(|launched| usize::try_from(launched.size).ok());
    end_well(Ending {
        speak: |message| output::note(message),
        clean_up: remove_unfinished,
        launched: env.launched_rank().map(Rank).zip(size),
        launcher_speaks: env.launcher_speaks(),
    })
    .map_err(|source| StartError::Signals { source })
}

/// Removes what is half-written, for a process that ends at once.
fn remove_unfinished() {
    checkpoint::remove_unfinished();
    cache::remove_unfinished();
}

/// Says on one rank that the command line is wrong, and ends all of them.
///
/// # Errors
/// Always.
pub fn refuse_usage(env: &EnvVars, usage: UsageError) -> Result<Exit, Failure> {
    prepare_to_end(env)?;
    let (world, _) = join(env)?;
    let refused = world.refuse(usage);
    leave(world, Err(refused.into()))
}

/// A command line that can't be read, with clap's explanation.
#[derive(Debug, thiserror::Error)]
#[error("the command line is not understood\n\n{0}")]
pub struct UsageError(pub String);

impl Classify for UsageError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

/// Every launched process has found the same; one of them says so, and the others give it time to.
fn spoken_once(launched: &Launched, error: LaunchError) -> Failure {
    if launched.speaks() {
        return error.into();
    }
    // Launchers end all processes once one has ended.
    std::thread::sleep(Duration::from_secs(1));
    Failure::said_elsewhere(error.exit())
}

/// MPI, with the limit of the environment or the defaults: the deployment's is not known yet. Beside it whether
/// `LOCKSTEP_FAULT` could be read.
fn join(env: &EnvVars) -> Result<(World, Result<(), FaultError>), Failure> {
    let parsed = env.fault().map_or_else(|| Ok(Faults::default()), str::parse::<Faults>);
    let faults = parsed.as_ref().ok().cloned().unwrap_or_default();
    faults.strike(Rank(env.launched_rank().unwrap_or_default()), Stage::Init)?;
    let start_s = env.start_s().unwrap_or(Deployment::default().timeouts.start_s);
    let launched = env.launched();
    if let Some(launched) = &launched {
        let library = World::mpi_version();
        let library = Library { name: &library, speaks_pmi: host::open_mpi_speaks_pmi() };
        launched.foresee(library).map_err(|error| spoken_once(launched, error))?;
    }
    let world = World::init(Duration::from_secs(start_s), faults)?;
    logging::set_rank(world.rank().0);
    if let Some(launched) = &launched
        && let Err(error) = launched.expect_one_world(world.size())
    {
        world.finish();
        return Err(spoken_once(launched, error));
    }
    Ok((world, parsed.map(drop)))
}

/// The deployment, the log and the world's size, agreed; `None` where only the configuration was to be printed.
fn start(world: &World, env: &EnvVars, common: &CommonArgs, asked: &Asked) -> Result<Option<Started>, StartError> {
    world.begin("reading its deployment");
    let effective = world.agree(common.deployment.effective(env))?;
    world.begin("looking at its machine");
    let Machine { environment, gpu_ordinal } = world.agree(facts::machine(world, env, common.isa.named()))?;
    let asked = asked.iter().cloned().chain([("print-config", common.print_config.to_string())]).collect();
    agree_on(world, START, fingerprint(&effective, &environment, &asked))?;
    if !world.agree(common.start(env, &effective, world.is_root()))? {
        return Ok(None);
    }
    warn(world, &effective);
    warn_of_no_gpu(world, &effective, &environment);
    let limit = Duration::from_secs(effective.deployment.timeouts.start_s);
    world.enter(Phase { name: "start", limit, key: "timeouts.start_s" });
    world.begin("starting");
    world.agree(world.fault(Stage::Start))?;
    if world.has_fault(Stage::Experts, &Action::Poison) {
        cuda::poison_fresh_memory();
    }
    let cluster = &effective.deployment.cluster;
    world.agree(world.expect_size(cluster.nodes, cluster.ranks_per_node))?;
    let asked = world.agree(common.threads(env))?;
    let num_threads = asked.unwrap_or_else(|| (env.available_parallelism / world.local_size()).max(1));
    let cache_dir = cache_dir(&effective, env).map(Into::into);
    let jit = JitOptions { cache_dir, nvrtc: env.nvrtc().map(str::to_owned) };
    let nccl = env.nccl().map(str::to_owned);
    let cublaslt = env.cublaslt().map(str::to_owned);
    Ok(Some(Started { effective, num_threads, gpu_ordinal, jit, nccl, cublaslt, environment }))
}

/// Says on its own rank, with the host, that a driver shows it no GPU: selection knows ranks alone.
fn warn_of_no_gpu(world: &World, effective: &Effective, environment: &Environment) {
    let has_driver = environment.libraries.driver.present().is_some();
    if effective.deployment.cluster.device != Device::Cpu && has_driver && environment.has_gpu() == Some(false) {
        let visible =
            environment.variables.get("CUDA_VISIBLE_DEVICES").map_or("unset".to_owned(), |v| format!("{v:?}"));
        let (rank, host) = (world.rank(), world.host());
        tracing::warn!("no GPU is visible to {rank} on host {host}: CUDA_VISIBLE_DEVICES is {visible}");
    }
}

/// Compared before anything is decided from it.
pub(super) const START: Topic = Topic {
    about: "what they were asked for",
    cure: "Give every rank the same build, libraries, deployment file, options and LOCKSTEP_* variables; mpirun passes a \
           variable on to other hosts only with -x NAME.",
};

/// Keys that are each rank's own business.
const RANK_LOCAL: [&str; 4] = ["name", "jit.cache_dir", "log.level", "log.format"];

/// What a rank was asked for, and what of its environment has to be like the others'.
///
/// # Errors
/// If one path is fed two values, a bug.
pub fn fingerprint(
    effective: &Effective,
    environment: &Environment,
    asked: &Asked,
) -> Result<Fingerprint, FingerprintError> {
    let mut start = StartBuilder::new(facts::BUILD);
    for (key, value, _) in effective.entries().filter(|(key, ..)| !RANK_LOCAL.contains(&key.path)) {
        start.key(key.path, &value);
    }
    start.environment(environment);
    for (option, value) in asked {
        start.asked(option, value);
    }
    start.finish()
}

/// Says what is odd about any rank's environment, once, on rank 0; collective.
fn warn(world: &World, effective: &Effective) {
    let all = world.all_gather_bytes(effective.warnings.join("\n").as_bytes());
    let mut said: BTreeMap<String, Vec<Rank>> = BTreeMap::new();
    for (rank, text) in all.iter().enumerate() {
        for warning in String::from_utf8_lossy(text).lines() {
            said.entry(warning.to_owned()).or_default().push(Rank::from_index(rank));
        }
    }
    for (warning, ranks) in said.into_iter().filter(|_| world.is_root()) {
        if ranks.len() == world.size() {
            tracing::warn!("{warning}");
        } else {
            tracing::warn!("{warning} (on {} only)", ranks.into_iter().collect::<RankSet>());
        }
    }
}

/// Ends a command: together where all know how it ended, at once where the others can't know.
fn leave(world: World, ended: Result<Exit, Failure>) -> Result<Exit, Failure> {
    match ended {
        Ok(exit) => {
            world.finish();
            Ok(exit)
        }
        Err(failure) => match failure.known() {
            Known::Everywhere { speaks } => {
                if speaks && let Some(message) = failure.message() {
                    output::note(message);
                }
                let exit = failure.exit();
                world.finish();
                Err(Failure::said_elsewhere(exit))
            }
            Known::Here => {
                if let Some(message) = failure.message() {
                    output::note(format!("{message}\n  on {}, which ends the job", world.rank()));
                }
                abort_job(failure.exit())
            }
        },
    }
}

#[cfg(test)]
mod tests;
