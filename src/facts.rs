//! This rank's facts, collected once: what selection and agreement may know of its machine.
//!
//! Gathers what the other doors have read into an [`Environment`]; decides nothing with it.

use std::collections::{BTreeMap, BTreeSet};

use crate::backend::best_instruction_set;
use crate::cuda::{DeviceFacts, Devices, blas};
use crate::env::EnvVars;
use crate::exit::{Classify, Exit};
use crate::fault::{Action, Stage};
use crate::host;
use crate::jit::Compiler;
use crate::nccl;
use crate::select::environment::{Fact, Gpu, Libraries};
use crate::select::fingerprint::BuildFacts;
use crate::select::{Environment, InstructionSet};
use crate::world::World;

/// The build that this process runs.
pub const BUILD: BuildFacts<'static> = BuildFacts {
    version: env!("CARGO_PKG_VERSION"),
    revision: env!("LOCKSTEP_BUILD_REVISION"),
    target: env!("LOCKSTEP_BUILD_TARGET"),
    profile: env!("LOCKSTEP_BUILD_PROFILE"),
};

/// Why this rank can't be what was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FactsError {
    /// An instruction set that this machine lacks.
    #[error("--isa {wanted} on {host}: this machine does not have it, its best is {best}; give --isa {best} or auto")]
    Isa {
        /// What was asked for.
        wanted: InstructionSet,
        /// This host.
        host: String,
        /// What there is.
        best: InstructionSet,
    },
}

impl Classify for FactsError {
    fn exit(&self) -> Exit {
        Exit::Environment
    }
}

/// The environment of this rank. `wanted`: no better instruction set than this; absent: the machine's best.
///
/// A rank's GPU is looked for where a driver is loaded, and NVRTC, NCCL and cublasLt where there is a GPU.
///
/// # Errors
/// If the machine lacks `wanted`.
pub fn environment(world: &World, env: &EnvVars, wanted: Option<InstructionSet>) -> Result<Environment, FactsError> {
    machine(world, env, wanted).map(|machine| machine.environment)
}

/// What a rank knows of the machine that it runs on.
#[derive(Debug, Clone)]
pub struct Machine {
    /// What all ranks select from.
    pub environment: Environment,
    /// The number in this process of the GPU that this rank drives; 0 where it has none.
    pub gpu_ordinal: u32,
}

/// [`environment`], and what is this process's own business.
///
/// # Errors
/// As [`environment`].
pub fn machine(world: &World, env: &EnvVars, wanted: Option<InstructionSet>) -> Result<Machine, FactsError> {
    let best = best_instruction_set();
    let isa = wanted.unwrap_or(best);
    let host = world.host().to_owned();
    if isa > best {
        return Err(FactsError::Isa { wanted: isa, host, best });
    }
    let driver = host::nvidia_driver().map_or(Fact::Absent, Fact::Present);
    let gpu = if driver == Fact::Absent { None } else { gpu_of(world, Devices::probe().devices) };
    let nvrtc = match &gpu {
        Some(_) => {
            Compiler::load(env.nvrtc()).map_or(Fact::Absent, |compiler| Fact::Present(compiler.id().to_string()))
        }
        None => Fact::Unknown,
    };
    let mut info = BTreeMap::from([
        ("cores".to_owned(), env.available_parallelism.to_string()),
        ("ranks_on_host".to_owned(), world.local_size().to_string()),
    ]);
    let (nccl, cublaslt) = match &gpu {
        Some(facts) => {
            info.insert("gpu_ordinal".to_owned(), facts.ordinal.to_string());
            let (nccl, found) = nccl(env);
            info.insert("nccl".to_owned(), found);
            let (cublaslt, found) = cublaslt(env);
            info.insert("cublaslt".to_owned(), found);
            (nccl, cublaslt)
        }
        None => (Fact::Unknown, Fact::Unknown),
    };
    let gpu_ordinal = gpu.as_ref().map_or(0, |facts| facts.ordinal);
    let gpu = gpu.map_or(Fact::Absent, |facts| {
        Fact::Present(Gpu { name: facts.name, uuid: Some(facts.uuid), compute_capability: facts.compute_capability })
    });
    let mpi = Fact::Present(World::mpi_version());
    let variables = env.lockstep.iter().chain(&env.libraries).cloned().collect();
    let mut environment = Environment {
        host: Some(host),
        instruction_set: Fact::Present(isa),
        gpu,
        libraries: Libraries { mpi, driver, nccl, nvrtc, cublaslt },
        // No implementation of this build is opt-in.
        flags: Some(BTreeSet::new()),
        variables,
        info,
    };
    pretend(&mut environment, world.faults_at(Stage::Start));
    Ok(Machine { environment, gpu_ordinal })
}

/// What faults say that this rank has in place of what it has.
fn pretend<'a>(environment: &mut Environment, faults: impl Iterator<Item = &'a Action>) {
    for fault in faults {
        match fault {
            Action::Library(library, version) => {
                *environment.libraries.get_mut(*library) = Fact::Present(version.clone());
            }
            Action::Gpu(compute_capability, name) => {
                let (name, compute_capability) = (name.clone(), *compute_capability);
                environment.gpu = Fact::Present(Gpu { name, uuid: None, compute_capability });
            }
            _ => {}
        }
    }
}

/// NCCL's version, and where it was found or why it was not. One that lacks functions is of no use: absent.
fn nccl(env: &EnvVars) -> (Fact<String>, String) {
    match nccl::Library::load(env.nccl()) {
        Ok(library) => (Fact::Present(library.version()), library.found_as().to_owned()),
        Err(error) => (Fact::Absent, error.to_string()),
    }
}

/// cublasLt's, likewise.
fn cublaslt(env: &EnvVars) -> (Fact<String>, String) {
    match blas::Library::load(env.cublaslt()) {
        Ok(library) => (Fact::Present(library.version()), library.found_as().to_owned()),
        Err(error) => (Fact::Absent, error.to_string()),
    }
}

/// The GPU that this rank drives, by its place on its host. More ranks than GPUs share them, which selection refuses.
fn gpu_of(world: &World, mut devices: Vec<DeviceFacts>) -> Option<DeviceFacts> {
    let at = world.local_rank().checked_rem(devices.len())?;
    Some(devices.swap_remove(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_says_what_it_is() {
        assert_eq!(BUILD.revision.len(), 16, "{}", BUILD.revision);
        assert!(BUILD.target.contains('-') && !BUILD.profile.is_empty());
    }
}
