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

use std::sync::{Arc, Mutex, PoisonError};

use rayon::ThreadPool;

use super::simd::{Isa, Simd};
use super::{Backend, BackendError, ExpertsBuilder, ExpertsSpec, Linear, checks};
use crate::checkpoint::tensors::Projection;
use crate::cuda::Stream;
use crate::gpu;
use crate::gpu::feed::Feed;
use crate::jit::Arch;
use crate::jit::kernels::Family;
pub use around::{Around, AroundBuffers, AroundSpec, AroundTensors};
pub use dense::{DenseBy, DenseTools};
pub use gated::GatedDense;
pub use local::{Dense, LocalLayer, LocalSize, LocalTokens, LocalWork, Reading};
use programs::Programs;
pub use topk::{Selector, TopkBuffers};
use workspace::Workspace;

/// The technique of the kernels that run on any GPU since Ampere.
pub const MMA_SYNC: &str = "mma_sync";

/// The technique of the kernels for Hopper.
pub const WGMMA: &str = "wgmma";

/// Slots that a thread fills while its others are on their way.
const SLOTS_A_THREAD: usize = 2;

/// Slots at most: beyond that the link has enough to do.
const MAX_SLOTS: usize = 32;

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
    /// Calls wait for each other: they would share the device anyway.
    workspace: Mutex<Workspace>,
    /// What weights come through, from the first expert on until loading is over.
    feed: Mutex<Option<Arc<Feed>>>,
    /// Slots of it at most.
    max_slots: usize,
}

impl Shared {
    fn stream(&self) -> &Stream {
        self.gpu.stream()
    }

    fn feed(&self) -> Arc<Feed> {
        let mut feed = self.feed.lock().unwrap_or_else(PoisonError::into_inner);
        feed.get_or_insert_with(|| Arc::new(Feed::new(self.gpu.device(), self.max_slots))).clone()
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
        let host = Simd::new(num_threads, Isa::detect())?;
        let shared = Shared {
            technique,
            gpu: gpu.clone(),
            programs: Programs::new(gpu.clone()),
            workspace: Mutex::new(Workspace::new(gpu.stream())?),
            feed: Mutex::default(),
            max_slots: (SLOTS_A_THREAD * host.num_threads()).min(MAX_SLOTS),
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

    fn end_loading(&self) {
        *self.shared.feed.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn linear(&self, weight: &Projection) -> Result<Box<dyn Linear>, BackendError> {
        self.host.linear(weight)
    }
}
