//! A device that this process drives.

use std::sync::Arc;

use cudarc::driver::sys;

use super::error::{CudaError, check};
use super::library::{Api, api};
use super::probe::{CudaVersion, DeviceFacts, device_count, device_facts, device_handle, driver_version};

/// A GPU with its primary context; copies of it are the same device. The context goes when the last of them, and the last
/// of what was made with them, goes.
#[derive(Debug, Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    facts: DeviceFacts,
    device: sys::CUdevice,
    context: sys::CUcontext,
    api: &'static Api,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("facts", &self.facts).finish_non_exhaustive()
    }
}

// SAFETY: a context may be used by any thread that makes it current, which `Device::enter` does before every call.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver serialises what it must.
unsafe impl Sync for Inner {}

/// Memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that an allocation could have, were they in one piece.
    pub free_bytes: u64,
    /// Bytes of the device.
    pub total_bytes: u64,
}

impl Device {
    /// Opens the device that this process sees as `ordinal`.
    ///
    /// # Errors
    /// If there is no usable driver or no such device, or its context can't be had.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        let api = api()?;
        // SAFETY: takes no pointer; the only flags there are is 0.
        let started = unsafe { sys::cuInit(0) };
        if started == sys::CUresult::CUDA_ERROR_NO_DEVICE {
            return Err(CudaError::NoDevice { ordinal, num_devices: 0 });
        }
        check(started, "starting the driver", ordinal)?;
        let num_devices = device_count()?;
        if ordinal >= num_devices {
            return Err(CudaError::NoDevice { ordinal, num_devices });
        }
        let facts = device_facts(ordinal)?;
        let device = device_handle(ordinal)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is a place for one handle; it is released once, by `Inner::drop`.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        check(result, "opening a GPU", ordinal)?;
        let opened = Self(Arc::new(Inner { facts, device, context, api }));
        opened.enter()?;
        Ok(opened)
    }

    /// Whether launches that are recorded in a graph may overlap ([`super::LaunchShape`]).
    #[must_use]
    pub fn overlaps_in_graphs(&self) -> bool {
        driver_version().is_ok_and(|version| version >= CudaVersion { major: 12, minor: 3 })
    }

    /// What is known of it.
    #[must_use]
    pub fn facts(&self) -> &DeviceFacts {
        &self.0.facts
    }

    /// Its number in this process.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.0.facts.ordinal
    }

    /// Its memory at this moment.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn memory(&self) -> Result<MemoryInfo, CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: both are places for one size.
        let result = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        self.check(result, "asking for free memory")?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }

    /// Whether both are one device of this process.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        self.ordinal() == other.ordinal()
    }

    /// Makes its context current on this thread, for libraries that go by that (NCCL).
    ///
    /// # Errors
    /// If the driver fails.
    pub fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained as long as `self` lives.
        self.check(unsafe { sys::cuCtxSetCurrent(self.0.context) }, "entering a GPU's context")
    }

    pub(super) fn check(&self, result: sys::CUresult, operation: &'static str) -> Result<(), CudaError> {
        check(result, operation, self.ordinal())
    }

    pub(super) fn api(&self) -> &'static Api {
        self.0.api
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: `device` came from the driver, and its context was retained once by `open`. A failure leaves it retained
        // until the process ends, which is soon.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
