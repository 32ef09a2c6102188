//! Host memory that a device copies from and to without the host's help.

use std::ops::{Deref, DerefMut};

use bytemuck::Pod;
use cudarc::driver::sys;

use super::device::Device;
use super::error::{CudaError, code};
use super::stream::Stream;

/// `len` values of `T` in page-locked host memory.
#[derive(Debug)]
pub struct PinnedBuffer<T: Pod> {
    device: Device,
    values: *mut T,
    len: usize,
}

// SAFETY: plain memory of the host with one owner.
unsafe impl<T: Pod + Send> Send for PinnedBuffer<T> {}
// SAFETY: as above; shared references only read.
unsafe impl<T: Pod + Sync> Sync for PinnedBuffer<T> {}

impl<T: Pod> PinnedBuffer<T> {
    /// `len` values of zero bytes.
    ///
    /// # Errors
    /// If they can't be locked.
    pub fn zeroed(device: &Device, len: usize) -> Result<Self, CudaError> {
        let num_bytes = len.saturating_mul(size_of::<T>());
        let mut address = std::ptr::null_mut();
        if num_bytes == 0 {
            let values = std::ptr::NonNull::dangling().as_ptr();
            return Ok(Self { device: device.clone(), values, len });
        }
        device.enter()?;
        // SAFETY: `address` is a place for one pointer; what lies there is freed once, by `drop`.
        let result = unsafe { sys::cuMemHostAlloc(&raw mut address, num_bytes, 0) };
        if result != sys::CUresult::CUDA_SUCCESS {
            let (ordinal, needed_bytes) = (device.ordinal(), num_bytes as u64);
            return Err(CudaError::OutOfPinnedMemory { ordinal, needed_bytes, code: code(result) });
        }
        // SAFETY: the driver gave so many bytes; they are written before anything reads them.
        unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, num_bytes) };
        Ok(Self { device: device.clone(), values: address.cast(), len })
    }

    /// Where kernels of the device find it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.values as u64
    }

    /// A value that a kernel may be writing at this moment.
    ///
    /// # Panics
    /// If there is no such value.
    #[must_use]
    pub fn read_volatile(&self, at: usize) -> T {
        assert!(at < self.len, "value {at} of {}", self.len);
        // SAFETY: `zeroed` made so many values, and any bytes are values of a `Pod`.
        unsafe { self.values.add(at).read_volatile() }
    }

    /// Queues a copy of its first `len` values to a device's memory, and does not wait.
    ///
    /// # Errors
    /// If there are not so many, or the driver fails.
    ///
    /// # Safety
    /// `address` is that of room for so many values, and neither they nor it are dropped, nor changed by anyone else, before
    /// `stream` has come so far.
    pub unsafe fn send(&self, stream: &Stream, len: usize, address: u64) -> Result<(), CudaError> {
        if len > self.len {
            let (operation, start, end) = ("copying to a GPU", 0, len);
            return Err(CudaError::OutOfBounds { operation, start, end, len: self.len });
        }
        self.device.enter()?;
        // SAFETY: so many values are there, and the caller answers for the rest.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(address, self.values.cast(), len * size_of::<T>(), stream.raw()) };
        self.device.check(result, "copying to a GPU")
    }

    /// Its size.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }
}

impl<T: Pod> Deref for PinnedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `zeroed` made so many values, page-aligned; those who copy into them without waiting promise not to read.
        unsafe { std::slice::from_raw_parts(self.values, self.len) }
    }
}

impl<T: Pod> DerefMut for PinnedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.values, self.len) }
    }
}

impl<T: Pod> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        if self.num_bytes() > 0 && self.device.enter().is_ok() {
            // SAFETY: allocated by `zeroed` and freed here alone.
            let _ = unsafe { sys::cuMemFreeHost(self.values.cast()) };
        }
    }
}
