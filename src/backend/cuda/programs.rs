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
        let parts_bytes = num_blocks as usize * schedule.parts_bytes(gemm) as usize;
        Ok(Program { wants_images: schedule.gathers(), parts_bytes, steps })
    }
}

/// What computes both products of some experts.
pub(super) struct Program {
    wants_images: bool,
    parts_bytes: usize,
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

    /// What blocks need for what their warps leave to each other.
    pub(super) fn parts_bytes(&self) -> usize {
        self.parts_bytes
    }

    /// Queues all kernels, which leave `num_spare` multiprocessors to others, though at most half of them.
    ///
    /// # Safety
    /// What `args` points to is as `kernels/experts.cuh` says, and lives until `stream` has come so far.
    pub(super) unsafe fn queue(
        &self,
        stream: &Stream,
        args: &GroupedGemmArgs,
        num_spare: u32,
    ) -> Result<(), BackendError> {
        let num_multiprocessors = stream.device().facts().num_multiprocessors;
        for Step { function, shape } in &self.steps {
            let shape = leaving(shape, num_multiprocessors, num_spare);
            // SAFETY: the caller answers for all addresses.
            unsafe { function.launch(stream, &shape, args)? };
        }
        Ok(())
    }
}

/// A launch of as many blocks on each of fewer multiprocessors: any number of blocks takes all tiles.
fn leaving(shape: &LaunchShape, num_multiprocessors: u32, num_spare: u32) -> LaunchShape {
    let [num_blocks, y, z] = shape.grid;
    let num_spare = num_spare.min(num_multiprocessors / 2);
    LaunchShape { grid: [num_blocks / num_multiprocessors.max(1) * (num_multiprocessors - num_spare), y, z], ..*shape }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spare_multiprocessors_are_left_alone() {
        let blocks = |num_blocks, num_spare| leaving(&LaunchShape::rows(num_blocks, 256), 132, num_spare).grid[0];
        assert_eq!([blocks(132, 0), blocks(264, 0), blocks(132 * 8, 0)], [132, 264, 132 * 8]);
        assert_eq!([blocks(132, 8), blocks(264, 8), blocks(132 * 8, 8)], [124, 248, 124 * 8]);
        assert_eq!(blocks(132, 1000), 66);
    }
}
