//! Memory of the device between upload and download, kept by the backend and grown as batches need it.

use bytemuck::Pod;

use super::super::BackendError;
use crate::cuda::{DeviceBuffer, Stream};
use crate::jit::kernels::grouped_gemm::ExpertEntry;

/// Counters of one launch: block scales that saturated, that became 0, rows stored.
pub(super) const NUM_COUNTERS: usize = 3;

/// The buffers. What they hold between calls is of no use.
pub(super) struct Workspace {
    /// bf16 `[num_tokens, hidden]`
    pub tokens: DeviceBuffer<u16>,
    /// `[num_rows]`
    pub row_token: DeviceBuffer<u32>,
    /// `[num_experts + 1]`
    pub expert_offsets: DeviceBuffer<u32>,
    /// `[num_launches, num_experts]`
    pub entries: DeviceBuffer<ExpertEntry>,
    /// `[num_launches, NUM_COUNTERS]`
    pub counts: DeviceBuffer<u64>,
    /// Rows as an image.
    pub image: DeviceBuffer<u16>,
    /// FC2's input.
    pub inner: DeviceBuffer<u16>,
    /// `[num_rows, hidden]`
    pub out: DeviceBuffer<f32>,
    /// Zero whenever no kernel runs.
    pub barrier: DeviceBuffer<u32>,
}

impl Workspace {
    pub(super) fn new(stream: &Stream) -> Result<Self, BackendError> {
        let device = stream.device();
        let barrier = DeviceBuffer::zeroed(stream, 2)?;
        stream.synchronise()?;
        Ok(Self {
            tokens: DeviceBuffer::uninitialised(device, 0)?,
            row_token: DeviceBuffer::uninitialised(device, 0)?,
            expert_offsets: DeviceBuffer::uninitialised(device, 0)?,
            entries: DeviceBuffer::uninitialised(device, 0)?,
            counts: DeviceBuffer::uninitialised(device, 0)?,
            image: DeviceBuffer::uninitialised(device, 0)?,
            inner: DeviceBuffer::uninitialised(device, 0)?,
            out: DeviceBuffer::uninitialised(device, 0)?,
            barrier,
        })
    }
}

/// Makes room for `len` values. No work may be queued that uses the buffer.
pub(super) fn grow<T: Pod>(buffer: &mut DeviceBuffer<T>, len: usize) -> Result<(), BackendError> {
    if buffer.len() < len {
        let device = buffer.device().clone();
        // The old one goes first: two would not always fit.
        *buffer = DeviceBuffer::uninitialised(&device, 0)?;
        *buffer = DeviceBuffer::uninitialised(&device, len)?;
    }
    Ok(())
}

/// Uploads `values` to the beginning of a buffer that is large enough, or becomes so.
pub(super) fn upload<T: Pod>(buffer: &mut DeviceBuffer<T>, stream: &Stream, values: &[T]) -> Result<(), BackendError> {
    grow(buffer, values.len())?;
    Ok(buffer.upload(stream, 0, values)?)
}
