//! The GPU that a rank drives in a session: one device, one stream for all work of its layers, and its kernels.
//!
//! Everything that a layer does on the device goes into this stream: what is queued later sees what was queued before, and
//! nothing has to be waited for in between. Knows nothing of layers, experts or tokens.

mod error;
mod modules;

use std::sync::Arc;

pub use error::GpuError;
pub use modules::Kernels;

use crate::cuda::{Device, Module, Stream};
use crate::jit::{Arch, KernelRequest};
use modules::Modules;

/// A rank's GPU. Copies of it are the same one.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    arch: Arch,
    stream: Stream,
    modules: Modules,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("device", self.device()).finish_non_exhaustive()
    }
}

impl Gpu {
    /// Opens the device that this process sees as `ordinal`.
    ///
    /// # Errors
    /// If there is no such device, no kernel is made for it, or there is no compiler where `kernels` wants one.
    pub fn open(ordinal: u32, kernels: &Kernels) -> Result<Self, GpuError> {
        let device = Device::open(ordinal)?;
        let facts = device.facts();
        let none = || GpuError::Capability { name: facts.name.clone(), found: facts.compute_capability.to_string() };
        let arch = Arch::of(facts.compute_capability).ok_or_else(none)?;
        let stream = Stream::new(&device)?;
        Ok(Self(Arc::new(Inner { arch, stream, modules: Modules::new(kernels)? })))
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.0.stream.device()
    }

    /// The stream of all work.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// What kernels are compiled for.
    #[must_use]
    pub fn arch(&self) -> Arch {
        self.0.arch
    }

    /// A kernel's module, loaded if it is not there yet: layers of one shape share it.
    ///
    /// # Errors
    /// If it was not prepared, does not compile, or does not load.
    pub fn module(&self, request: KernelRequest) -> Result<Module, GpuError> {
        self.0.modules.get(self.device(), request)
    }
}
