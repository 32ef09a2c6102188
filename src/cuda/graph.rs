//! Work of a stream, recorded once and replayed by one call.

use cudarc::driver::sys;

use super::device::Device;
use super::error::CudaError;
use super::stream::Stream;

/// Recorded work. It holds addresses, not buffers: what the work touches has to outlive every replay.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    handle: sys::CUgraphExec,
}

// SAFETY: the driver's handles may be used by any thread with the context current, which every call here sees to.
unsafe impl Send for Graph {}
// SAFETY: launches of one graph are ordered by the stream they are queued in.
unsafe impl Sync for Graph {}

impl Graph {
    /// Records what `work` queues in `stream` instead of doing it. Work that waits, allocates or frees fails in there.
    ///
    /// # Errors
    /// If `work` fails, or what it queued can't be recorded.
    pub fn capture<E: From<CudaError>>(stream: &Stream, work: impl FnOnce() -> Result<(), E>) -> Result<Self, E> {
        let device = stream.device();
        device.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        device.check(unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) }, "beginning to record a graph")?;
        let worked = work();
        let mut graph = std::ptr::null_mut();
        device.enter()?;
        // SAFETY: `graph` is a place for one handle. A recording is ended whatever became of the work in it.
        let ended = unsafe { sys::cuStreamEndCapture(stream.raw(), &raw mut graph) };
        let made = worked.and_then(|()| {
            device.check(ended, "recording a graph")?;
            let mut handle = std::ptr::null_mut();
            // SAFETY: `handle` is a place for one handle, and `graph` was just recorded.
            let result = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut handle, graph, 0) };
            device.check(result, "making a graph ready")?;
            Ok(Self { device: device.clone(), handle })
        });
        if !graph.is_null() {
            // SAFETY: recorded above; what can be launched is a copy.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        made
    }

    /// Queues all of its work.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Safety
    /// What was promised for each launch in it holds again: buffers live, and nothing else writes what kernels read.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        self.device.enter()?;
        // SAFETY: both handles live; the caller answers for the work.
        self.device.check(unsafe { sys::cuGraphLaunch(self.handle, stream.raw()) }, "replaying a graph")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: made by `capture` and destroyed here alone.
            let _ = unsafe { sys::cuGraphExecDestroy(self.handle) };
        }
    }
}
