//! `lockstep warmup`: every kernel that a deployment needs, compiled before anything runs. Needs no GPU where `--arch` says
//! what it is for, no launcher, and of a checkpoint the headers alone.

use std::collections::BTreeSet;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::json;

use super::doctor::cache_dir;
use super::failure::Failure;
use super::logging::LogSettings;
use super::options::{DeploymentArgs, LogArgs};
use super::output::{self, OutputError};
use super::resolve::{self, ModelLayer};
use super::values::LayerChoice;
use super::world::{StartError, with_world};
use crate::config::{BackendFamily, Choice, Effective, Moe};
use crate::cuda::{Devices, Driver};
use crate::env::EnvVars;
use crate::exit::{Classify, Exit};
use crate::jit::cache::{Cache, Place};
use crate::jit::{Arch, KernelRequest, ParseArchError, PrepareSettings, Prepared, kernels, prepare};
use crate::model::MoeGeometry;
use crate::report::new_table;
use crate::world::World;

/// Compiles every kernel that a deployment needs, before anything runs.
#[derive(Debug, Clone, Args)]
pub struct WarmupArgs {
    /// A checkpoint's directory, of which headers are read alone; or a geometry: kimi-k3, deepseek-v3, qwen3-235b.
    #[arg(long, value_name = "DIR|GEOMETRY")]
    pub model: String,
    /// Layers that are needed: `all`, or a list as in 1,2.
    #[arg(long, value_name = "all|N,N,...", default_value = "all")]
    pub layers: LayerChoice,
    /// What is compiled for: sm_80, sm_90a, sm_100a, sm_103a, sm_120a, or several; default: the GPUs that are visible.
    #[arg(long, value_name = "ARCH,...", value_delimiter = ',', value_parser = arch)]
    pub arch: Vec<Arch>,
    /// Only kernels of these names, as in deal,topk; default: all that the layers need.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub kernels: Vec<String>,
    /// Where kernels go: the layer behind all ranks' directories, which can be shipped, or under a launcher the ranks' own.
    #[arg(long, value_enum, default_value = "shared")]
    pub into: Into,
    /// What overrides the deployment.
    #[command(flatten)]
    pub deployment: DeploymentArgs,
    /// Prints one JSON object instead of a table.
    #[arg(long, help_heading = "Printing")]
    pub json: bool,
    /// Logs and progress.
    #[command(flatten)]
    pub log: LogArgs,
}

/// The directory that is filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Into {
    /// `<cache>/shared`.
    Shared,
    /// `<cache>/<host>/rank<local>`, or the cache itself with `--cache-layout flat`.
    Ranks,
}

fn arch(text: &str) -> Result<Arch, ParseArchError> {
    Arch::from_str(text)
}

/// Why there is nothing to compile for.
#[derive(Debug, thiserror::Error)]
pub enum WarmupError {
    /// No `--arch` and no GPU.
    #[error(
        "no GPU is visible ({driver}), and --arch does not say what to compile for; give --arch, as in --arch sm_90a"
    )]
    NoArch {
        /// What there is of a driver.
        driver: Driver,
    },
    /// A GPU without kernels.
    #[error("{name} has compute capability {capability}, which no kernel is made for; give --arch")]
    Capability {
        /// The GPU.
        name: String,
        /// What it runs.
        capability: String,
    },
    /// A named family that no GPU of an architecture runs.
    #[error("moe.backend {} has no kernels for {arch}; leave it out of --arch, or set moe.backend: auto", family.name())]
    NoFamily {
        /// As named.
        family: BackendFamily,
        /// As asked for, or of a GPU that is visible.
        arch: Arch,
    },
    /// A name in `--kernels` that is none.
    #[error("--kernels {name}: the layers need no kernel of that name; they need {}", needed.join(", "))]
    NoKernel {
        /// As given.
        name: String,
        /// The names there are.
        needed: Vec<&'static str>,
    },
}

impl Classify for WarmupError {
    fn exit(&self) -> Exit {
        match self {
            Self::NoKernel { .. } | Self::NoFamily { .. } => Exit::BadInput,
            Self::NoArch { .. } | Self::Capability { .. } => Exit::Environment,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// What it fails with, after the other ranks have been told.
pub fn command(args: &WarmupArgs, env: &EnvVars) -> Result<Exit, Failure> {
    with_world(env, |world| {
        let effective = world.agree(args.deployment.effective(env).map_err(StartError::from))?;
        world.agree(LogSettings::new(args.log, env, &effective).start().map_err(StartError::from))?;
        let deployment = &effective.deployment;
        let (layers, _) = world.agree(resolve::layers(&args.model, &args.layers, deployment))?;
        let geometry = world.agree(resolve::geometry(&args.model))?;
        let requests = world.agree(requests((&geometry, &layers), &deployment.moe, &world.agree(archs(args))?))?;
        let requests = world.agree(named(requests, &args.kernels))?;
        let mut cache = open_cache(world, &effective, env, args.into);
        let asked = world.agree(env.threads().map_err(StartError::from))?;
        let num_threads = asked.unwrap_or_else(|| (env.available_parallelism / world.local_size()).max(1));
        let settings = PrepareSettings {
            nvrtc: env.nvrtc(),
            require_warm: deployment.jit.require_warm,
            num_threads,
            limit: Duration::from_secs(deployment.timeouts.compile_s),
        };
        let prepared = prepare(world, &mut cache, &requests, &settings)?;
        let shown = if world.is_root() { show(args.json, &cache, &prepared) } else { Ok(()) };
        world.agree(shown)?;
        Ok(Exit::Fine)
    })
}

/// What `--arch` says, else what the visible GPUs run.
fn archs(args: &WarmupArgs) -> Result<Vec<Arch>, WarmupError> {
    if !args.arch.is_empty() {
        return Ok(args.arch.clone());
    }
    let mut archs = Vec::new();
    let Devices { driver, devices } = Devices::probe();
    for device in devices {
        let capability = device.compute_capability;
        let none = || WarmupError::Capability { name: device.name.clone(), capability: capability.to_string() };
        let arch = Arch::of(capability).ok_or_else(none)?;
        if !archs.contains(&arch) {
            archs.push(arch);
        }
    }
    if archs.is_empty() { Err(WarmupError::NoArch { driver }) } else { Ok(archs) }
}

fn requests(
    (geometry, layers): (&MoeGeometry, &[ModelLayer]),
    moe: &Moe,
    archs: &[Arch],
) -> Result<Vec<KernelRequest>, WarmupError> {
    if !moe.allow_fallback {
        match moe.backend {
            BackendFamily::Auto => {}
            BackendFamily::Cpu | BackendFamily::Reference | BackendFamily::Simd => return Ok(Vec::new()),
            family @ (BackendFamily::MmaSync | BackendFamily::Wgmma) => {
                if let Some(&arch) = archs.iter().find(|&&arch| kernels::families(moe, arch).is_empty()) {
                    return Err(WarmupError::NoFamily { family, arch });
                }
            }
        }
    }
    let of_layer = |(problem, decision): &ModelLayer| {
        let requests = |&arch| kernels::for_layer(problem, decision, moe, arch);
        archs.iter().flat_map(requests).collect::<Vec<_>>()
    };
    let around = archs.iter().flat_map(|&arch| kernels::around(geometry, arch));
    Ok(layers.iter().flat_map(of_layer).chain(around).collect())
}

/// Those that `--kernels` names; all if it names none.
fn named(mut requests: Vec<KernelRequest>, names: &[String]) -> Result<Vec<KernelRequest>, WarmupError> {
    let needed: BTreeSet<&'static str> = requests.iter().map(|request| request.source.name).collect();
    if let Some(name) = names.iter().find(|name| !needed.contains(name.as_str())) {
        return Err(WarmupError::NoKernel { name: name.clone(), needed: needed.into_iter().collect() });
    }
    requests.retain(|request| names.is_empty() || names.iter().any(|name| name == request.source.name));
    Ok(requests)
}

/// The cache of this rank, as deployment and environment say.
fn open_cache(world: &World, effective: &Effective, env: &EnvVars, into: Into) -> Cache {
    let host = world.host().to_owned();
    let place = match into {
        Into::Shared => Place::Shared { host },
        Into::Ranks => Place::Rank { host, local_rank: world.local_rank(), layout: effective.deployment.jit.layout },
    };
    Cache::open(cache_dir(effective, env).as_deref().map(Path::new), &place)
}

fn show(json: bool, cache: &Cache, prepared: &Prepared) -> Result<(), OutputError> {
    let dir = cache.own().map(|dir| dir.display().to_string());
    if json {
        let kernels: Vec<_> = prepared
            .kernels
            .iter()
            .map(|(request, artefact)| {
                json!({
                    "kernel": request.source.name, "arch": request.arch.name(), "key": artefact.key().to_string(),
                    "defines": artefact.parts().defines, "compiler": artefact.parts().compiler,
                    "num_bytes": artefact.cubin().len(), "usage": artefact.usage(),
                })
            })
            .collect();
        return output::json(&json!({
            "dir": dir, "num_compiled": prepared.num_compiled, "num_received": prepared.num_received,
            "seconds": prepared.elapsed.as_secs_f64(), "kernels": kernels,
        }));
    }
    if prepared.kernels.is_empty() {
        return output::line("nothing to compile: no layer needs a kernel that is compiled at run time");
    }
    let mut table = new_table(&["kernel", "registers", "local memory", "bytes", "key"]);
    for (request, artefact) in &prepared.kernels {
        let registers = artefact.usage().iter().map(|usage| usage.num_registers).max().unwrap_or_default();
        let local = artefact.usage().iter().any(crate::jit::Usage::has_local_memory);
        table.add_row([
            request.describe(),
            registers.to_string(),
            if local { "yes" } else { "none" }.to_owned(),
            artefact.cubin().len().to_string(),
            artefact.key().to_string()[..12].to_owned(),
        ]);
    }
    output::line(format!(
        "{table}\n{} kernels below {}, {} of them compiled by rank 0, in {:.1} s",
        prepared.kernels.len(),
        dir.unwrap_or_else(|| "no directory".to_owned()),
        prepared.num_compiled,
        prepared.elapsed.as_secs_f64()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Deployment;

    /// Names of the products' kernels that a geometry needs on an architecture, or why there are none.
    fn products(backend: BackendFamily, allow_fallback: bool, arch: Arch) -> Result<Vec<&'static str>, String> {
        let mut deployment = Deployment::default();
        (deployment.moe.backend, deployment.moe.allow_fallback) = (backend, allow_fallback);
        let (layers, _) = resolve::layers("kimi-k3", &LayerChoice::All, &deployment).unwrap();
        let geometry = resolve::geometry("kimi-k3").unwrap();
        let requests = requests((&geometry, &layers), &deployment.moe, &[arch]).map_err(|error| error.to_string())?;
        let names: BTreeSet<_> = requests.iter().map(|request| request.source.name).collect();
        assert!(names.is_empty() || names.contains("topk") && names.contains("dispatch"), "{names:?}");
        Ok(names.into_iter().filter(|name| name.starts_with("grouped_gemm")).collect())
    }

    #[test]
    fn what_is_named_is_compiled_alone() {
        let (mma, ranges, small, wgmma) =
            ("grouped_gemm_mma", "grouped_gemm_ranges", "grouped_gemm_small", "grouped_gemm_wgmma");
        for (backend, allow_fallback, wanted) in [
            (BackendFamily::Auto, false, vec![mma, ranges, small, wgmma]),
            (BackendFamily::Wgmma, false, vec![ranges, small, wgmma]),
            (BackendFamily::MmaSync, false, vec![mma]),
            (BackendFamily::Wgmma, true, vec![mma, ranges, small, wgmma]),
            (BackendFamily::Cpu, false, vec![]),
            (BackendFamily::Simd, false, vec![]),
        ] {
            assert_eq!(products(backend, allow_fallback, Arch::Sm90a), Ok(wanted), "{backend:?} {allow_fallback}");
        }
        assert_eq!(products(BackendFamily::Auto, false, Arch::Sm80), Ok(vec![mma]));
        let refused = products(BackendFamily::Wgmma, false, Arch::Sm80).unwrap_err();
        assert_eq!(
            refused,
            "moe.backend wgmma has no kernels for sm_80; leave it out of --arch, or set moe.backend: auto"
        );
    }
}
