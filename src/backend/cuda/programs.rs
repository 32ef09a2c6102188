//! Compiled kernels on a device, and their launches: the only `unsafe` of this backend.

use std::collections::BTreeSet;

use super::super::BackendError;
use crate::cuda::{Function, LaunchShape, Stream};
use crate::gpu::Gpu;
use crate::jit::kernels::grouped_gemm::{GroupedGemm, GroupedGemmArgs, Schedule};

/// Makes programs of a session's kernels.
pub(super) struct Programs {
    gpu: Gpu,
}

impl Programs {
    pub(super) fn new(gpu: Gpu) -> Self {
        Self { gpu }
    }

    /// Loads the kernels of schedules that will be asked for, all at once where they are compiled on demand.
    pub(super) fn load(&self, schedules: &BTreeSet<Schedule>, gemm: &GroupedGemm) -> Result<(), BackendError> {
        let arch = self.gpu.arch();
        Ok(self.gpu.load(schedules.iter().map(|schedule| schedule.request(gemm, arch)).collect())?)
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
            Schedule::Small { .. } | Schedule::Wgmma { .. } => {
                let shape = LaunchShape { cooperative: true, ..shape };
                vec![Step { function: function(Schedule::FC1_FC2)?, shape }]
            }
            Schedule::MmaSync { .. } => {
                vec![
                    Step { function: function(Schedule::FC1)?, shape },
                    Step { function: function(Schedule::FC2)?, shape },
                ]
            }
        };
        Ok(Program { wants_images: schedule.gathers(), steps })
    }
}

/// What computes both products of some experts.
pub(super) struct Program {
    wants_images: bool,
    steps: Vec<Step>,
}

struct Step {
    function: Function,
    shape: LaunchShape,
}

impl Program {
    /// Whether rows and FC2's input are images (`kernels/image.cuh`).
    pub(super) fn wants_images(&self) -> bool {
        self.wants_images
    }

    /// Queues all kernels.
    ///
    /// # Safety
    /// What `args` points to is as `kernels/experts.cuh` says, and lives until `stream` has come so far.
    pub(super) unsafe fn queue(&self, stream: &Stream, args: &GroupedGemmArgs) -> Result<(), BackendError> {
        for Step { function, shape } in &self.steps {
            // SAFETY: the caller answers for all addresses.
            unsafe { function.launch(stream, shape, args)? };
        }
        Ok(())
    }
}
