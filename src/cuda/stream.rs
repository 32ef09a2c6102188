//! Streams, in which a device's work is done in order, and events, which mark places in them.

use std::time::Duration;

use cudarc::driver::sys;

use super::device::Device;
use super::error::CudaError;

/// A queue of a device's work. It does not wait for the default stream.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    handle: sys::CUstream,
}

// SAFETY: the driver's handles may be used by any thread with the context current, which every call here sees to.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new, empty one.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        device.enter()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `handle` is a place for one handle; it is destroyed once, by `drop`.
        let result = unsafe { sys::cuStreamCreate(&raw mut handle, flags) };
        device.check(result, "making a stream")?;
        Ok(Self { device: device.clone(), handle })
    }

    /// One whose kernels' blocks go before those that other streams have not begun.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn urgent(device: &Device) -> Result<Self, CudaError> {
        device.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both are places for one number.
        let result = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        device.check(result, "asking for the priorities of streams")?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `handle` is a place for one handle; it is destroyed once, by `drop`.
        let result = unsafe { sys::cuStreamCreateWithPriority(&raw mut handle, flags, greatest) };
        device.check(result, "making an urgent stream")?;
        Ok(Self { device: device.clone(), handle })
    }

    /// The device whose work it holds.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits until all of its work is done. Reports what failed in it.
    ///
    /// # Errors
    /// If a kernel or a copy in it failed.
    pub fn synchronise(&self) -> Result<(), CudaError> {
        self.device.enter()?;
        // SAFETY: the handle lives as long as `self`.
        self.device.check(unsafe { sys::cuStreamSynchronize(self.handle) }, "waiting for a stream")
    }

    /// Whether all of its work is done; does not wait. Reports what failed in it.
    ///
    /// # Errors
    /// If a kernel or a copy in it failed.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.device.enter()?;
        // SAFETY: the handle lives as long as `self`.
        let result = unsafe { sys::cuStreamQuery(self.handle) };
        if result == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        self.device.check(result, "asking for a stream's progress")?;
        Ok(true)
    }

    /// Lets later work of this stream wait for an event of another one.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        self.device.enter()?;
        // SAFETY: both handles live; the only flags that matter is 0.
        let result = unsafe { sys::cuStreamWaitEvent(self.handle, event.handle, 0) };
        self.device.check(result, "making a stream wait")
    }

    /// The driver's handle, for libraries that queue work of their own (NCCL). Valid while `self` lives.
    #[must_use]
    pub fn handle(&self) -> *mut std::ffi::c_void {
        self.handle.cast()
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: made by `new` and destroyed here alone. Work in it is still done: the driver keeps what it needs.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

/// A mark in a stream, with its time.
#[derive(Debug)]
pub struct Event {
    device: Device,
    handle: sys::CUevent,
}

// SAFETY: as for streams.
unsafe impl Send for Event {}
// SAFETY: as for streams.
unsafe impl Sync for Event {}

impl Event {
    /// One that has not been recorded.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        device.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is a place for one handle; it is destroyed once, by `drop`.
        let result = unsafe { sys::cuEventCreate(&raw mut handle, 0) };
        device.check(result, "making an event")?;
        Ok(Self { device: device.clone(), handle })
    }

    /// Marks the place behind the work that `stream` has now.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        self.device.enter()?;
        // SAFETY: both handles live.
        self.device.check(unsafe { sys::cuEventRecord(self.handle, stream.raw()) }, "recording an event")
    }

    /// The same in work that is being recorded: every replay marks the place anew.
    ///
    /// # Errors
    /// If the driver fails, or nothing is being recorded.
    pub fn record_in_graph(&self, stream: &Stream) -> Result<(), CudaError> {
        self.device.enter()?;
        let flags = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: both handles live.
        let result = unsafe { sys::cuEventRecordWithFlags(self.handle, stream.raw(), flags) };
        self.device.check(result, "recording an event in a graph")
    }

    /// Waits until the work before the mark is done.
    ///
    /// # Errors
    /// If a kernel or a copy before it failed.
    pub fn synchronise(&self) -> Result<(), CudaError> {
        self.device.enter()?;
        // SAFETY: the handle lives.
        self.device.check(unsafe { sys::cuEventSynchronize(self.handle) }, "waiting for an event")
    }

    /// Whether the work before the mark is done; does not wait. Reports what failed in it.
    ///
    /// # Errors
    /// If a kernel or a copy before it failed.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.device.enter()?;
        // SAFETY: the handle lives.
        let result = unsafe { sys::cuEventQuery(self.handle) };
        if result == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        self.device.check(result, "asking for an event")?;
        Ok(true)
    }

    /// The time from `start` to this mark; both have to be behind us. Resolution about half a microsecond.
    ///
    /// # Errors
    /// If one of them was not recorded or its work is not done.
    pub fn elapsed_since(&self, start: &Self) -> Result<Duration, CudaError> {
        self.device.enter()?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: both handles live, and `milliseconds` is a place for one float.
        let result = unsafe { (self.device.api().elapsed_time)(&raw mut milliseconds, start.handle, self.handle) };
        self.device.check(result, "reading the time between events")?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: made by `new` and destroyed here alone.
            let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
