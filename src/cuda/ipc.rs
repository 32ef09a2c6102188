//! Memory of a device that other processes of its host use as well.

use cudarc::driver::sys;

use super::buffer::DeviceBuffer;
use super::device::Device;
use super::error::CudaError;
use super::probe::{Devices, device_handle};

/// Allocations that are shown to others are multiples of this: then nothing else lies in the pages that are mapped.
pub const SHARED_GRANULE_BYTES: usize = 2 << 20;

/// What another process opens a [`DeviceBuffer`] with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedHandle(pub [u8; 64]);

impl DeviceBuffer<u8> {
    /// What other processes of this host open it with. It has to outlive what they have opened.
    ///
    /// # Errors
    /// If the driver can't share it.
    pub fn share(&self) -> Result<SharedHandle, CudaError> {
        self.device().enter()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: `handle` is a place for one handle, and the address that of a whole allocation.
        let result = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.address()) };
        self.device().check(result, "sharing memory of a GPU")?;
        Ok(SharedHandle(handle.reserved.map(std::ffi::c_char::cast_unsigned)))
    }
}

/// Memory of another process, on this device or on one that it has peer access to. Closed when it goes, which the owner has to
/// wait for.
#[derive(Debug)]
pub struct PeerMemory {
    device: Device,
    address: sys::CUdeviceptr,
}

impl PeerMemory {
    /// Maps what another process shares, as `device` sees it.
    ///
    /// # Errors
    /// If the driver can't: there is no peer access, or the handle is of another host.
    pub fn open(device: &Device, handle: &SharedHandle) -> Result<Self, CudaError> {
        device.enter()?;
        let mut address = 0;
        let handle = sys::CUipcMemHandle { reserved: handle.0.map(u8::cast_signed) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: `address` is a place for one address; what is opened is closed once, by `drop`.
        let result = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) };
        device.check(result, "opening memory of another rank's GPU")?;
        Ok(Self { device: device.clone(), address })
    }

    /// Where it lies for kernels of the device that it was opened for.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: opened by `open` and closed here alone.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.address) };
        }
    }
}

impl Device {
    /// Whether it reaches the memory of the device `uuid`; none where this process does not see that one.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn reaches(&self, uuid: &str) -> Result<Option<bool>, CudaError> {
        if self.facts().uuid == uuid {
            return Ok(Some(true));
        }
        let seen = Devices::probe().devices;
        let Some(other) = seen.iter().find(|other| other.uuid == uuid) else { return Ok(None) };
        let (own, other) = (device_handle(self.ordinal())?, device_handle(other.ordinal)?);
        let mut reaches = 0;
        // SAFETY: `reaches` is a place for one integer, and both handles came from the driver.
        let result = unsafe { sys::cuDeviceCanAccessPeer(&raw mut reaches, own, other) };
        self.check(result, "asking for peer access")?;
        Ok(Some(reaches != 0))
    }
}
