//! Compiled kernels on a device, and their launches: the only `unsafe` of this backend.

use std::collections::BTreeSet;

use super::super::BackendError;
use crate::cuda::{Device, Event, Function, LaunchShape, Stream};
use crate::gpu::Gpu;
use crate::jit::kernels::deal::MAX_PROGRAMS;
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
            Schedule::Small { .. } | Schedule::Ranges { .. } | Schedule::Wgmma { .. } => {
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

    /// Whether launches of these may begin before those before them have ended (`kernels/turns.cuh`).
    pub(super) fn may_overlap<'a>(device: &Device, programs: impl IntoIterator<Item = &'a Self>) -> bool {
        let mut steps = programs.into_iter().flat_map(|program| &program.steps);
        steps.all(|step| step.shape.cooperative) && device.overlaps_in_graphs()
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
        let num_spare = num_spare.min(num_multiprocessors / 2);
        // SAFETY: the caller's promise.
        unsafe { self.queue_on(num_multiprocessors - num_spare, stream, args) }
    }

    /// Queues all kernels for so many multiprocessors.
    ///
    /// # Safety
    /// As for [`Program::queue`].
    unsafe fn queue_on(&self, wanted: u32, stream: &Stream, args: &GroupedGemmArgs) -> Result<(), BackendError> {
        let num_multiprocessors = stream.device().facts().num_multiprocessors;
        for Step { function, shape } in &self.steps {
            let shape = on(shape, num_multiprocessors, wanted);
            // SAFETY: the caller answers for all addresses.
            unsafe { function.launch(stream, &shape, args)? };
        }
        Ok(())
    }
}

/// A launch of as many blocks on each of fewer multiprocessors: any number of blocks takes all tiles.
fn on(shape: &LaunchShape, num_multiprocessors: u32, wanted: u32) -> LaunchShape {
    let [num_blocks, y, z] = shape.grid;
    LaunchShape { grid: [num_blocks / num_multiprocessors.max(1) * wanted, y, z], ..*shape }
}

/// A second stream, for a launch that runs beside one in the session's.
pub(super) struct SideStream {
    stream: Stream,
    begun: Event,
    done: Event,
    /// Of launches that may overlap, but the last.
    ended: Vec<Event>,
}

impl SideStream {
    pub(super) fn new(device: &Device) -> Result<Self, BackendError> {
        let ended = (1..MAX_PROGRAMS).map(|_| Event::new(device)).collect::<Result<_, _>>()?;
        Ok(Self { stream: Stream::new(device)?, begun: Event::new(device)?, done: Event::new(device)?, ended })
    }

    /// Queues launches of which the device alone knows what each does: one behind the other, or where they `may_overlap`, as
    /// `kernels/turns.cuh` says. What `stream` is given later waits for all.
    ///
    /// Outside of a graph the marks between them keep launches from overlapping; what each does is the same.
    ///
    /// # Safety
    /// As for [`SideStream::queue`]; what is at `dealt` in each was written by work before it.
    pub(super) unsafe fn queue_dealt(
        &self,
        stream: &Stream,
        launches: &[Launch<'_>],
        may_overlap: bool,
    ) -> Result<(), BackendError> {
        if !may_overlap {
            // SAFETY: the caller's promise.
            return unsafe { self.queue(stream, launches, None, 0) };
        }
        for (index, Launch { program, args }) in launches.iter().enumerate() {
            for Step { function, shape } in &program.steps {
                let shape = LaunchShape { cooperative: false, early: index > 0, ..*shape };
                // SAFETY: the caller's promise.
                unsafe { function.launch(stream, &shape, args)? };
            }
            if index + 1 < launches.len() {
                self.ended[index].record(stream)?;
            }
        }
        // NOTE: that the last has ended says nothing of those before it.
        self.ended.iter().take(launches.len().saturating_sub(1)).try_for_each(|ended| Ok(stream.wait_for(ended)?))
    }

    /// Queues the launches of a batch: one behind the other, leaving `num_spare` multiprocessors to others; or where `of_large` is
    /// given, the two that there are at once, that of many rows on so many multiprocessors and that of few on all others.
    ///
    /// # Safety
    /// As for [`Program::queue`] of each; of two at once neither writes what the other reads or writes.
    pub(super) unsafe fn queue(
        &self,
        stream: &Stream,
        launches: &[Launch<'_>],
        of_large: Option<u32>,
        num_spare: u32,
    ) -> Result<(), BackendError> {
        if let (Some(of_large), [first, second]) = (of_large, launches) {
            let (small, large) = if second.program.wants_images() { (first, second) } else { (second, first) };
            // SAFETY: the caller's promise.
            return unsafe { self.queue_both(stream, small, large, of_large) };
        }
        for Launch { program, args } in launches {
            // SAFETY: the caller's promise.
            unsafe { program.queue(stream, args, num_spare)? };
        }
        Ok(())
    }

    /// Queues two launches behind what `stream` holds; what it is given later waits for both.
    ///
    /// # Safety
    /// As for [`SideStream::queue`].
    unsafe fn queue_both(
        &self,
        stream: &Stream,
        small: &Launch<'_>,
        large: &Launch<'_>,
        of_large: u32,
    ) -> Result<(), BackendError> {
        let num_multiprocessors = stream.device().facts().num_multiprocessors;
        self.begun.record(stream)?;
        self.stream.wait_for(&self.begun)?;
        // SAFETY: the caller's promise; `stream` waits below, so that what its owner frees later is not in use.
        unsafe {
            large.program.queue_on(of_large, &self.stream, &large.args)?;
            small.program.queue_on(num_multiprocessors - of_large, stream, &small.args)?;
        }
        self.done.record(&self.stream)?;
        Ok(stream.wait_for(&self.done)?)
    }
}

/// What is computed by one program of a batch.
pub(super) struct Launch<'a> {
    pub program: &'a Program,
    pub args: GroupedGemmArgs,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_multiprocessors_have_as_many_blocks_each() {
        let blocks = |num_blocks, wanted| on(&LaunchShape::rows(num_blocks, 256), 132, wanted).grid[0];
        assert_eq!([blocks(132, 132), blocks(264, 132), blocks(132 * 8, 132)], [132, 264, 132 * 8]);
        assert_eq!([blocks(132, 124), blocks(264, 124), blocks(132 * 8, 124)], [124, 248, 124 * 8]);
    }
}
