//! Compiled kernels on a device, and their launches: the only `unsafe` of this backend.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};

use super::super::BackendError;
use super::Kernels;
use crate::cuda::{Device, Function, LaunchShape, Module, Stream};
use crate::jit::kernels::grouped_gemm::{GatherTokens, GroupedGemm, GroupedGemmArgs, Schedule};
use crate::jit::{Arch, Compiler, KernelRequest};

/// Modules by what was compiled: layers of one shape share them.
pub(super) struct Programs {
    device: Device,
    arch: Arch,
    source: Source,
    modules: Mutex<Vec<(KernelRequest, Module)>>,
}

impl Programs {
    pub(super) fn new(device: Device, arch: Arch, kernels: &Kernels) -> Result<Self, BackendError> {
        let source = match kernels {
            Kernels::Prepared(prepared) => Source::Prepared(prepared.clone()),
            Kernels::OnDemand(nvrtc) => Source::OnDemand(Compiler::load(nvrtc.as_deref())?),
        };
        Ok(Self { device, arch, source, modules: Mutex::default() })
    }

    /// What kernels are compiled for.
    pub(super) fn arch(&self) -> Arch {
        self.arch
    }

    /// The kernels of a schedule, loaded if they are not there yet.
    pub(super) fn schedule(&self, schedule: Schedule, gemm: &GroupedGemm) -> Result<Program, BackendError> {
        let module = self.module(schedule.request(gemm, self.arch))?;
        let launch = schedule.launch(gemm);
        let shared_bytes = launch.shared_bytes;
        let function = |name: &str| -> Result<Function, BackendError> {
            let function = module.function(name)?;
            function.allow_dynamic_shared(shared_bytes)?;
            Ok(function)
        };
        let num_blocks = self.device.facts().num_multiprocessors * launch.blocks_per_multiprocessor;
        let shape = LaunchShape { shared_bytes, ..LaunchShape::rows(num_blocks, launch.num_threads) };
        let steps = match schedule {
            Schedule::Small { .. } => {
                let shape = LaunchShape { cooperative: true, ..shape };
                vec![Step { function: function(Schedule::FC1_FC2)?, shape, reads_image: false }]
            }
            Schedule::MmaSync { .. } | Schedule::Wgmma { .. } => {
                let reads_image = matches!(schedule, Schedule::Wgmma { .. });
                let step = |name| Ok::<_, BackendError>(Step { function: function(name)?, shape, reads_image });
                vec![step(Schedule::FC1)?, step(Schedule::FC2)?]
            }
        };
        let gather = match schedule {
            Schedule::Wgmma { .. } => Some(self.gather(gemm.hidden)?),
            Schedule::MmaSync { .. } | Schedule::Small { .. } => None,
        };
        Ok(Program { gather, steps })
    }

    fn gather(&self, hidden: u32) -> Result<Step, BackendError> {
        let module = self.module(GatherTokens { hidden }.request(self.arch))?;
        let num_blocks = self.device.facts().num_multiprocessors * 8;
        let shape = LaunchShape::rows(num_blocks, GatherTokens::NUM_THREADS);
        Ok(Step { function: module.function(GatherTokens::FUNCTION)?, shape, reads_image: false })
    }

    /// A kernel's module.
    pub(super) fn module(&self, request: KernelRequest) -> Result<Module, BackendError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, module)) = modules.iter().find(|(known, _)| *known == request) {
            return Ok(module.clone());
        }
        let cubin = match &self.source {
            Source::Prepared(prepared) => {
                let found = prepared.iter().find(|(known, _)| *known == request);
                let missing = || BackendError::NotPrepared { kernel: request.describe() };
                Cow::Borrowed(&found.ok_or_else(missing)?.1)
            }
            Source::OnDemand(compiler) => Cow::Owned(compiler.compile(&request)?.cubin),
        };
        let module = Module::load(&self.device, request.source.name, self.arch.name(), &cubin)?;
        modules.push((request, module.clone()));
        Ok(module)
    }
}

enum Source {
    Prepared(Arc<[(KernelRequest, Vec<u8>)]>),
    OnDemand(Compiler),
}

/// What computes both products of some experts.
pub(super) struct Program {
    gather: Option<Step>,
    steps: Vec<Step>,
}

struct Step {
    function: Function,
    shape: LaunchShape,
    /// Reads the image that was gathered, where other kernels read tokens.
    reads_image: bool,
}

impl Program {
    /// Whether rows and FC2's input are images (`kernels/image.cuh`).
    pub(super) fn wants_images(&self) -> bool {
        self.gather.is_some()
    }

    /// Queues all kernels. `image` is where gathered rows go, if they are.
    ///
    /// # Safety
    /// What `args` points to is as `kernels/experts.cuh` says, and lives until `stream` has come so far; so does `image`.
    pub(super) unsafe fn queue(&self, stream: &Stream, args: &GroupedGemmArgs, image: u64) -> Result<(), BackendError> {
        if let Some(Step { function, shape, .. }) = &self.gather {
            // SAFETY: the caller answers for both addresses.
            unsafe { function.launch(stream, shape, &GroupedGemmArgs { inner: image, ..*args })? };
        }
        for Step { function, shape, reads_image } in &self.steps {
            let tokens = if *reads_image { image } else { args.tokens };
            // SAFETY: as above.
            unsafe { function.launch(stream, shape, &GroupedGemmArgs { tokens, ..*args })? };
        }
        Ok(())
    }
}
