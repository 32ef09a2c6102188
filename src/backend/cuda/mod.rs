//! Experts on an NVIDIA GPU: `mma_sync`, which any since Ampere runs, and `wgmma` for Hopper.
//!
//! A batch comes from the host and rows go back to it. Dense projections (router, latent) run on the host's cores.

mod experts;
pub mod pack;
mod programs;
mod schedule;
mod workspace;

use std::sync::{Arc, Mutex};

use super::simd::{Isa, Simd};
use super::{Backend, BackendError, ExpertsBuilder, ExpertsSpec, Linear, checks};
use crate::checkpoint::tensors::Projection;
use crate::cuda::{Device, Stream};
use crate::jit::{Arch, Compiler};
use programs::Programs;
use workspace::Workspace;

/// The technique of the kernels that run on any GPU since Ampere.
pub const MMA_SYNC: &str = "mma_sync";

/// The technique of the kernels for Hopper.
pub const WGMMA: &str = "wgmma";

/// Which GPU a backend drives, and with which compiler.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuOptions {
    /// The device's number in this process.
    pub ordinal: u32,
    /// NVRTC, or the directory that it lies in; absent: where the loader finds it.
    pub nvrtc: Option<String>,
}

/// What all experts of a backend use.
struct Shared {
    technique: &'static str,
    stream: Stream,
    programs: Programs,
    /// Calls wait for each other: they would share the device anyway.
    workspace: Mutex<Workspace>,
}

/// The backend, with a device, a stream and a compiler of its own.
pub struct Gpu {
    shared: Arc<Shared>,
    host: Simd,
}

impl Gpu {
    /// Opens the device; `num_threads` threads (0: one a core) compute dense projections.
    ///
    /// # Errors
    /// If there is no such device, none of this build's kernels run on it, or there is no compiler.
    pub fn new(technique: &'static str, options: &GpuOptions, num_threads: usize) -> Result<Self, BackendError> {
        let device = Device::open(options.ordinal)?;
        let found = device.facts().compute_capability;
        let arch = Arch::of(found).filter(|arch| technique == MMA_SYNC || *arch == Arch::Sm90a);
        let arch = arch.ok_or_else(|| BackendError::Capability {
            technique,
            name: device.facts().name.clone(),
            found: found.to_string(),
        })?;
        let compiler = Compiler::load(options.nvrtc.as_deref())?;
        let stream = Stream::new(&device)?;
        let workspace = Mutex::new(Workspace::new(&stream)?);
        let programs = Programs::new(device, arch, compiler);
        let shared = Shared { technique, stream, programs, workspace };
        Ok(Self { shared: Arc::new(shared), host: Simd::new(num_threads, Isa::detect())? })
    }
}

impl Backend for Gpu {
    fn technique(&self) -> &'static str {
        self.shared.technique
    }

    fn experts(&self, spec: ExpertsSpec, num_local_experts: usize) -> Result<Box<dyn ExpertsBuilder>, BackendError> {
        checks::spec(&spec)?;
        Ok(Box::new(experts::Builder::new(self.shared.clone(), spec, num_local_experts)))
    }

    fn linear(&self, weight: &Projection) -> Result<Box<dyn Linear>, BackendError> {
        self.host.linear(weight)
    }
}
