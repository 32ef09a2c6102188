//! Experts on an NVIDIA GPU: `mma_sync`, which any since Ampere runs, and `wgmma` for Hopper.
//!
//! A batch lies on the device, or comes from the host and rows go back to it. Router and latent projections lie beside the
//! experts ([`Around`]); [`Backend::linear`] serves the layers whose router stays on the host's cores.

mod around;
mod dense;
mod evidence;
mod experts;
mod gated;
mod load;
mod local;
pub mod pack;
mod programs;
mod topk;
mod workspace;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rayon::ThreadPool;

use super::simd::{Simd, best_instruction_set};
use super::{Backend, BackendError, ExpertsBuilder, ExpertsSpec, Linear, checks};
use crate::checkpoint::tensors::Projection;
use crate::cuda::Stream;
use crate::gpu;
use crate::jit::Arch;
use crate::jit::kernels::Family;
pub use around::{Around, AroundBuffers, AroundSpec, AroundTensors, Extent};
pub use dense::{DenseBy, DenseTools};
pub use gated::GatedDense;
pub use local::{Dense, LocalLayer, LocalSize, LocalTokens, LocalWork, Reading};
use programs::{Programs, SideStream};
pub use topk::{Selector, TopkBuffers};
use workspace::Workspace;

/// The technique of the kernels that run on any GPU since Ampere.
pub const MMA_SYNC: &str = "mma_sync";

/// The technique of the kernels for Hopper.
pub const WGMMA: &str = "wgmma";

/// Widths, rows and other numbers of kernels, which fit in 32 bits: whoever has loaded a layer has seen to it.
fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// The family of a GPU technique's schedules; absent for others.
#[must_use]
pub fn family(technique: &str) -> Option<Family> {
    match technique {
        MMA_SYNC => Some(Family::MmaSync),
        WGMMA => Some(Family::Wgmma),
        _ => None,
    }
}

/// What all experts of a backend use.
struct Shared {
    technique: &'static str,
    gpu: gpu::Gpu,
    programs: Programs,
    side: SideStream,
    /// Calls wait for each other: they would share the device anyway.
    workspace: Mutex<Workspace>,
}

impl Shared {
    fn stream(&self) -> &Stream {
        self.gpu.stream()
    }

    fn lock(&self) -> MutexGuard<'_, Workspace> {
        self.workspace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The backend, on a session's GPU.
pub struct Gpu {
    shared: Arc<Shared>,
    host: Simd,
}

impl Gpu {
    /// Runs on `gpu`; `num_threads` threads (0: one a core) compute dense projections.
    ///
    /// # Errors
    /// If none of the technique's kernels run on it, or there is no memory.
    pub fn new(technique: &'static str, gpu: &gpu::Gpu, num_threads: usize) -> Result<Self, BackendError> {
        if technique == WGMMA && gpu.arch() != Arch::Sm90a {
            let facts = gpu.device().facts();
            let (name, found) = (facts.name.clone(), facts.compute_capability.to_string());
            return Err(BackendError::Capability { technique, name, found });
        }
        let host = Simd::new(num_threads, best_instruction_set())?;
        let shared = Shared {
            technique,
            gpu: gpu.clone(),
            programs: Programs::new(gpu.clone()),
            side: SideStream::new(gpu.device())?,
            workspace: Mutex::new(Workspace::new(gpu.stream())?),
        };
        Ok(Self { shared: Arc::new(shared), host })
    }
}

impl Backend for Gpu {
    fn technique(&self) -> &'static str {
        self.shared.technique
    }

    fn experts(&self, spec: ExpertsSpec, num_local_experts: usize) -> Result<Box<dyn ExpertsBuilder>, BackendError> {
        checks::spec(&spec)?;
        Ok(Box::new(load::Builder::new(self.shared.clone(), spec, num_local_experts)?))
    }

    fn pool(&self) -> &ThreadPool {
        self.host.pool()
    }

    fn linear(&self, weight: &Projection) -> Result<Box<dyn Linear>, BackendError> {
        self.host.linear(weight)
    }
}
