//! Typed memory of a device.
//!
//! Copies from and to pageable memory wait until they are done, so that the borrowed slice outlives them. Those with pinned
//! memory, [`PinnedBuffer`](super::PinnedBuffer), do not wait.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytemuck::Pod;
use cudarc::driver::sys;

use super::device::Device;
use super::error::CudaError;
use super::stream::Stream;

/// Whether fresh memory is filled with 0xFF bytes.
static POISON: AtomicBool = AtomicBool::new(false);

/// Bytes of all buffers of this process.
static HELD_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes of device memory that this process's buffers hold, on all devices. What others have on a device does not count.
#[must_use]
pub fn held_bytes() -> u64 {
    HELD_BYTES.load(Ordering::Relaxed)
}

/// From here on memory that is not initialised holds 0xFF bytes, in this process, on all devices: NaNs as floats, and as
/// integers what no count is. For tests of who reads what nobody wrote.
pub fn poison_fresh_memory() {
    POISON.store(true, Ordering::Relaxed);
}

/// `len` values of `T` on a device, aligned to 256 bytes. Freed when it goes; the driver first ends what uses it.
#[derive(Debug)]
pub struct DeviceBuffer<T: Pod> {
    device: Device,
    address: sys::CUdeviceptr,
    len: usize,
    values: PhantomData<T>,
}

impl<T: Pod> DeviceBuffer<T> {
    /// Room for `len` values, which are whatever lay there before.
    ///
    /// # Errors
    /// If they do not fit.
    pub fn uninitialised(device: &Device, len: usize) -> Result<Self, CudaError> {
        let num_bytes = len.saturating_mul(size_of::<T>());
        let mut address = 0;
        if num_bytes > 0 {
            device.enter()?;
            // SAFETY: `address` is a place for one address; what lies there is freed once, by `drop`.
            let result = unsafe { sys::cuMemAlloc_v2(&raw mut address, num_bytes) };
            if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY || num_bytes == usize::MAX {
                let memory = device.memory()?;
                return Err(CudaError::OutOfMemory {
                    ordinal: device.ordinal(),
                    needed_bytes: num_bytes as u64,
                    free_bytes: memory.free_bytes,
                    total_bytes: memory.total_bytes,
                });
            }
            device.check(result, "allocating memory")?;
            HELD_BYTES.fetch_add(num_bytes as u64, Ordering::Relaxed);
        }
        let mut buffer = Self { device: device.clone(), address, len, values: PhantomData };
        if POISON.load(Ordering::Relaxed) && num_bytes > 0 {
            let stream = Stream::new(device)?;
            buffer.fill_bytes(&stream, 0xFF)?;
            stream.synchronise()?;
        }
        Ok(buffer)
    }

    /// `len` values of zero bytes, zeroed in the order of `stream`.
    ///
    /// # Errors
    /// If they do not fit.
    pub fn zeroed(stream: &Stream, len: usize) -> Result<Self, CudaError> {
        let mut buffer = Self::uninitialised(stream.device(), len)?;
        buffer.fill_bytes(stream, 0)?;
        Ok(buffer)
    }

    /// The values of a slice.
    ///
    /// # Errors
    /// If they do not fit, or the copy fails.
    pub fn from_slice(stream: &Stream, values: &[T]) -> Result<Self, CudaError> {
        let mut buffer = Self::uninitialised(stream.device(), values.len())?;
        buffer.upload(stream, 0, values)?;
        Ok(buffer)
    }

    /// Sets every byte, in the order of `stream`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn fill_bytes(&mut self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        if self.num_bytes() == 0 {
            return Ok(());
        }
        self.device.enter()?;
        // SAFETY: the range is that of this buffer.
        let result = unsafe { sys::cuMemsetD8Async(self.address, byte, self.num_bytes(), stream.raw()) };
        self.device.check(result, "filling memory")
    }

    /// Copies values to the elements from `start` on, behind the work of `stream`, and waits until it is done.
    ///
    /// # Errors
    /// If they reach beyond the end, or the copy or work before it fails.
    pub fn upload(&mut self, stream: &Stream, start: usize, values: &[T]) -> Result<(), CudaError> {
        let address = self.range(start..start.saturating_add(values.len()), "copying to a GPU")?;
        if !size_of_val(values).eq(&0) {
            self.device.enter()?;
            // SAFETY: `range` keeps the target inside the buffer; the source is borrowed until the wait below is over.
            let result = unsafe {
                sys::cuMemcpyHtoDAsync_v2(address, values.as_ptr().cast(), size_of_val(values), stream.raw())
            };
            self.device.check(result, "copying to a GPU")?;
        }
        stream.synchronise()
    }

    /// Copies the elements from `start` on into a slice, behind the work of `stream`, and waits until it is done.
    ///
    /// # Errors
    /// If they reach beyond the end, or the copy or work before it fails.
    pub fn download_into(&self, stream: &Stream, start: usize, values: &mut [T]) -> Result<(), CudaError> {
        let address = self.range(start..start.saturating_add(values.len()), "copying from a GPU")?;
        if !size_of_val(values).eq(&0) {
            self.device.enter()?;
            // SAFETY: `range` keeps the source inside the buffer; the target is borrowed until the wait below is over, and
            // any bytes are values of a `Pod`.
            let result = unsafe {
                sys::cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), address, size_of_val(values), stream.raw())
            };
            self.device.check(result, "copying from a GPU")?;
        }
        stream.synchronise()
    }

    /// All of its values, behind the work of `stream`.
    ///
    /// # Errors
    /// If the copy or work before it fails.
    pub fn download(&self, stream: &Stream) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::zeroed(); self.len];
        self.download_into(stream, 0, &mut values)?;
        Ok(values)
    }

    /// Copies elements of another buffer of this device to those from `start` on, in the order of `stream`.
    ///
    /// # Errors
    /// If either reaches beyond its end, or the driver fails.
    pub fn copy_from(
        &mut self,
        stream: &Stream,
        start: usize,
        source: &Self,
        elements: Range<usize>,
    ) -> Result<(), CudaError> {
        let num_bytes = elements.len() * size_of::<T>();
        let target = self.range(start..start.saturating_add(elements.len()), "copying on a GPU")?;
        let source = source.range(elements, "copying on a GPU")?;
        if num_bytes == 0 {
            return Ok(());
        }
        self.device.enter()?;
        // SAFETY: `range` keeps both inside their buffers, which are two because one is borrowed mutably.
        let result = unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, num_bytes, stream.raw()) };
        self.device.check(result, "copying on a GPU")
    }

    /// Queues a copy of pinned values, borrowed from a [`PinnedBuffer`](super::PinnedBuffer), to the elements from `start` on, and does not wait.
    ///
    /// # Errors
    /// If they reach beyond the end, or the driver fails.
    ///
    /// # Safety
    /// `values` is neither changed nor dropped before `stream` has come so far.
    pub unsafe fn upload_pinned(&mut self, stream: &Stream, start: usize, values: &[T]) -> Result<(), CudaError> {
        let address = self.range(start..start.saturating_add(values.len()), "copying to a GPU")?;
        if size_of_val(values) == 0 {
            return Ok(());
        }
        self.device.enter()?;
        // SAFETY: `range` keeps the target inside the buffer, and the caller keeps the source.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(address, values.as_ptr().cast(), size_of_val(values), stream.raw()) };
        self.device.check(result, "copying to a GPU")
    }

    /// Queues a copy of the elements from `start` on into pinned memory, borrowed from a [`PinnedBuffer`](super::PinnedBuffer), and does not wait.
    ///
    /// # Errors
    /// If they reach beyond the end, or the driver fails.
    ///
    /// # Safety
    /// `values` is neither read, changed nor dropped before `stream` has come so far.
    pub unsafe fn download_pinned(&self, stream: &Stream, start: usize, values: &mut [T]) -> Result<(), CudaError> {
        let address = self.range(start..start.saturating_add(values.len()), "copying from a GPU")?;
        if size_of_val(values) == 0 {
            return Ok(());
        }
        self.device.enter()?;
        // SAFETY: `range` keeps the source inside the buffer, and the caller keeps the target.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), address, size_of_val(values), stream.raw())
        };
        self.device.check(result, "copying from a GPU")
    }

    /// Where it lies on the device: what a kernel's arguments hold. 0 if it is empty.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Where some of its elements lie on the device.
    ///
    /// # Errors
    /// If they reach beyond the end.
    pub fn address_of(&self, elements: Range<usize>) -> Result<u64, CudaError> {
        self.range(elements, "pointing into a buffer")
    }

    /// How many values it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its size.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The device it lies on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    fn range(&self, elements: Range<usize>, operation: &'static str) -> Result<sys::CUdeviceptr, CudaError> {
        let Range { start, end } = elements;
        if start > end || end > self.len {
            return Err(CudaError::OutOfBounds { operation, start, end, len: self.len });
        }
        Ok(self.address + (start * size_of::<T>()) as u64)
    }
}

impl<T: Pod> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        if self.address != 0 && self.device.enter().is_ok() {
            // SAFETY: allocated by `uninitialised` and freed here alone; cuMemFree waits for the device.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
            HELD_BYTES.fetch_sub(self.num_bytes() as u64, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs a GPU"]
    fn gpu_fresh_memory_is_poisoned_where_asked() {
        let device = Device::open(0).unwrap();
        poison_fresh_memory();
        let stream = Stream::new(&device).unwrap();
        let fresh = DeviceBuffer::<u32>::uninitialised(&device, 1000).unwrap();
        assert_eq!(fresh.download(&stream).unwrap(), [u32::MAX; 1000]);
        let zeroed = DeviceBuffer::<u32>::zeroed(&stream, 1000).unwrap();
        assert_eq!(zeroed.download(&stream).unwrap(), [0; 1000]);
    }
}
