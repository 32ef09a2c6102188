//! Compiled kernels on a device, and their launches: the only `unsafe` of this backend.

use super::super::BackendError;
use crate::cuda::{Function, LaunchShape, Stream};
use crate::gpu::Gpu;
use crate::jit::kernels::grouped_gemm::{GatherTokens, GroupedGemm, GroupedGemmArgs, Schedule};

/// Makes programs of a session's kernels.
pub(super) struct Programs {
    gpu: Gpu,
}

impl Programs {
    pub(super) fn new(gpu: Gpu) -> Self {
        Self { gpu }
    }

    /// The kernels of a schedule, loaded if they are not there yet.
    pub(super) fn schedule(&self, schedule: Schedule, gemm: &GroupedGemm) -> Result<Program, BackendError> {
        let module = self.gpu.module(schedule.request(gemm, self.gpu.arch()))?;
        let launch = schedule.launch(gemm);
        let shared_bytes = launch.shared_bytes;
        let function = |name: &str| -> Result<Function, BackendError> {
            let function = module.function(name)?;
            function.allow_dynamic_shared(shared_bytes)?;
            Ok(function)
        };
        let num_blocks = self.gpu.device().facts().num_multiprocessors * launch.blocks_per_multiprocessor;
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
        let module = self.gpu.module(GatherTokens { hidden }.request(self.gpu.arch()))?;
        let num_blocks = self.gpu.device().facts().num_multiprocessors * 8;
        let shape = LaunchShape::rows(num_blocks, GatherTokens::NUM_THREADS);
        Ok(Step { function: module.function(GatherTokens::FUNCTION)?, shape, reads_image: false })
    }
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
