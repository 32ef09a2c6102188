//! Compiled kernels on a device, each loaded once.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::GpuError;
use crate::cuda::{Device, Module};
use crate::jit::cache::{Artefact, Cache, Place};
use crate::jit::{Compiler, KernelRequest, KeyParts};

/// Where a session's kernels come from.
#[derive(Debug, Clone)]
pub enum Kernels {
    /// Machine code that was prepared before, by what it was made of. Nothing else is run.
    Prepared(Arc<[(KernelRequest, Vec<u8>)]>),
    /// Compiled when they are asked for: for one process alone, such as a test. NVRTC, or the directory that it lies in;
    /// absent: where the loader finds it.
    OnDemand(Option<String>),
    /// The same, but looked for in the shared layer of a cache first, and kept there.
    Kept {
        /// As above.
        nvrtc: Option<String>,
        /// The cache: what `lockstep warmup --cache-dir` fills.
        cache_dir: PathBuf,
    },
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
    OnDemand(Box<Maker>),
}

/// Makes kernels, or finds them made.
struct Maker {
    compiler: Compiler,
    cache: Option<Mutex<Cache>>,
}

impl Maker {
    fn new(nvrtc: Option<&str>, cache_dir: Option<&Path>) -> Result<Self, GpuError> {
        let open = |dir: &Path| Mutex::new(Cache::open(Some(dir), &Place::Shared { host: "localhost".to_owned() }));
        Ok(Self { compiler: Compiler::load(nvrtc)?, cache: cache_dir.map(open) })
    }

    fn cubin(&self, request: &KernelRequest) -> Result<Vec<u8>, GpuError> {
        let Some(cache) = &self.cache else { return Ok(self.compiler.compile(request)?.cubin) };
        let parts = KeyParts::new(request, self.compiler.id());
        let lock = || cache.lock().unwrap_or_else(PoisonError::into_inner);
        // A compilation takes seconds and leaves the cache to others meanwhile.
        let found = lock().find(&parts.name, parts.key());
        if let Some(artefact) = found {
            return Ok(artefact.cubin().to_vec());
        }
        let artefact = Artefact::new(request, parts, self.compiler.compile(request)?);
        lock().publish(&artefact);
        Ok(artefact.cubin().to_vec())
    }
}

impl Modules {
    pub fn new(kernels: &Kernels) -> Result<Self, GpuError> {
        let source = match kernels {
            Kernels::Prepared(prepared) => Source::Prepared(prepared.clone()),
            Kernels::OnDemand(nvrtc) => Source::OnDemand(Box::new(Maker::new(nvrtc.as_deref(), None)?)),
            Kernels::Kept { nvrtc, cache_dir } => {
                Source::OnDemand(Box::new(Maker::new(nvrtc.as_deref(), Some(cache_dir))?))
            }
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
            Source::OnDemand(maker) => Cow::Owned(maker.cubin(&request)?),
        };
        let module = Module::load(device, request.source.name, request.arch.name(), &cubin)?;
        loaded.push((request, module.clone()));
        Ok(module)
    }

    /// Loads modules that will be asked for: where kernels are made on demand, all at once, each on a thread of its own.
    pub fn load(&self, device: &Device, requests: Vec<KernelRequest>) -> Result<(), GpuError> {
        let Source::OnDemand(maker) = &self.source else { return Ok(()) };
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let mut wanted: Vec<KernelRequest> = Vec::new();
        for request in requests {
            if !wanted.contains(&request) && loaded.iter().all(|(known, _)| *known != request) {
                wanted.push(request);
            }
        }
        let cubins = thread::scope(|scope| {
            let threads: Vec<_> = wanted.iter().map(|request| scope.spawn(|| maker.cubin(request))).collect();
            let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
            joined.map(|made| made.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect::<Vec<_>>()
        });
        for (request, cubin) in wanted.into_iter().zip(cubins) {
            let module = Module::load(device, request.source.name, request.arch.name(), &cubin?)?;
            loaded.push((request, module));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jit::{Arch, Compiled, KernelSource};

    #[test]
    fn what_is_kept_is_found_and_not_compiled_again() {
        let dir = tempfile::tempdir().unwrap();
        let nvrtc = std::env::var("LOCKSTEP_NVRTC").ok();
        let maker = match Maker::new(nvrtc.as_deref(), Some(dir.path())) {
            Ok(maker) => maker,
            Err(error) => {
                assert!(std::env::var("LOCKSTEP_TEST_NVRTC").map_or(true, |value| value != "required"), "{error}");
                eprintln!("skipped: {error}");
                return;
            }
        };
        let source = |main| KernelSource { name: "kept", main, headers: &[] };
        let request = KernelRequest::new(source("extern \"C\" __global__ void kept() {}\n"), Arch::Sm90a);
        let made = maker.cubin(&request).unwrap();
        assert_eq!(maker.compiler.compile(&request).unwrap().cubin, made);

        // One whose entry holds other bytes than its compiler makes: they can only have come from there.
        let other = KernelRequest::new(source("extern \"C\" __global__ void kept(int) {}\n"), Arch::Sm90a);
        let parts = KeyParts::new(&other, maker.compiler.id());
        let compiled = Compiled { cubin: vec![1, 2, 3], ..maker.compiler.compile(&other).unwrap() };
        let cache = maker.cache.as_ref().unwrap();
        cache.lock().unwrap().publish(&Artefact::new(&other, parts, compiled));
        assert_eq!(maker.cubin(&other).unwrap(), [1, 2, 3]);
        assert_eq!(std::fs::read_dir(dir.path().join("shared")).unwrap().count(), 2, "both are kept");
    }
}
