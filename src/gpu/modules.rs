//! Compiled kernels on a device, each loaded once.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};

use super::GpuError;
use crate::cuda::{Device, Module};
use crate::jit::{Compiler, KernelRequest};

/// Where a session's kernels come from.
#[derive(Debug, Clone)]
pub enum Kernels {
    /// Machine code that was prepared before, by what it was made of. Nothing else is run.
    Prepared(Arc<[(KernelRequest, Vec<u8>)]>),
    /// Compiled when they are asked for: for one process alone, such as a test. NVRTC, or the directory that it lies in;
    /// absent: where the loader finds it.
    OnDemand(Option<String>),
}

impl Default for Kernels {
    fn default() -> Self {
        Self::Prepared(Arc::new([]))
    }
}

/// Modules by what was compiled.
pub(super) struct Modules {
    source: Source,
    loaded: Mutex<Vec<(KernelRequest, Module)>>,
}

enum Source {
    Prepared(Arc<[(KernelRequest, Vec<u8>)]>),
    OnDemand(Compiler),
}

impl Modules {
    pub fn new(kernels: &Kernels) -> Result<Self, GpuError> {
        let source = match kernels {
            Kernels::Prepared(prepared) => Source::Prepared(prepared.clone()),
            Kernels::OnDemand(nvrtc) => Source::OnDemand(Compiler::load(nvrtc.as_deref())?),
        };
        Ok(Self { source, loaded: Mutex::default() })
    }

    pub fn get(&self, device: &Device, request: KernelRequest) -> Result<Module, GpuError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, module)) = loaded.iter().find(|(known, _)| *known == request) {
            return Ok(module.clone());
        }
        let cubin = match &self.source {
            Source::Prepared(prepared) => {
                let found = prepared.iter().find(|(known, _)| *known == request);
                let missing = || GpuError::NotPrepared { kernel: request.describe() };
                Cow::Borrowed(&found.ok_or_else(missing)?.1)
            }
            Source::OnDemand(compiler) => Cow::Owned(compiler.compile(&request)?.cubin),
        };
        let module = Module::load(device, request.source.name, request.arch.name(), &cubin)?;
        loaded.push((request, module.clone()));
        Ok(module)
    }
}
