//! Experts on an NVIDIA GPU: `mma_sync`, which any since Ampere runs, and `wgmma` for Hopper.
//!
//! A batch comes from the host and rows go back to it. Dense projections (router, latent) run on the host's cores.

mod experts;
mod local;
pub mod pack;
mod programs;
mod workspace;

use std::sync::{Arc, Mutex};

use super::simd::{Isa, Simd};
use super::{Backend, BackendError, ExpertsBuilder, ExpertsSpec, Linear, checks};
use crate::checkpoint::tensors::Projection;
use crate::cuda::{Device, Stream};
use crate::jit::kernels::Family;
use crate::jit::{Arch, KernelRequest};
pub use local::{LocalLayer, LocalSize, LocalTokens, LocalWork, Reading};
use programs::Programs;
use workspace::Workspace;

/// The technique of the kernels that run on any GPU since Ampere.
pub const MMA_SYNC: &str = "mma_sync";

/// The technique of the kernels for Hopper.
pub const WGMMA: &str = "wgmma";

/// The family of a GPU technique's schedules; absent for others.
#[must_use]
pub fn family(technique: &str) -> Option<Family> {
    match technique {
        MMA_SYNC => Some(Family::MmaSync),
        WGMMA => Some(Family::Wgmma),
        _ => None,
    }
}

/// Which GPU a backend drives, and with which kernels.
#[derive(Debug, Clone, Default)]
pub struct GpuOptions {
    /// The device's number in this process.
    pub ordinal: u32,
    /// Where kernels come from.
    pub kernels: Kernels,
}

/// Where a backend's kernels come from.
#[derive(Debug, Clone)]
pub enum Kernels {
    /// Machine code that was prepared before, by what it was made of. Nothing else is run.
    Prepared(Arc<[(KernelRequest, Vec<u8>)]>),
    /// Compiled when experts are packed: for one process alone, such as a test. NVRTC, or the directory that it lies in;
    /// absent: where the loader finds it.
    OnDemand(Option<String>),
}

impl Default for Kernels {
    fn default() -> Self {
        Self::Prepared(Arc::new([]))
    }
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
        let stream = Stream::new(&device)?;
        let workspace = Mutex::new(Workspace::new(&stream)?);
        let programs = Programs::new(device, arch, &options.kernels)?;
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
