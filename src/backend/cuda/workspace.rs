//! Memory of the device that all experts of a backend share, grown as batches need it.

use super::super::BackendError;
use super::experts::Share;
use crate::cuda::{DeviceBuffer, Stream};
use crate::gpu::{Gpu, grow};
use crate::jit::kernels::deal::Dealt;
use crate::jit::kernels::grouped_gemm::{ExpertEntry, IMAGE_GROUP_ROWS};

/// The buffers. What they hold between calls is of no use.
pub(super) struct Workspace {
    pub host: Host,
    pub device: Device,
}

/// What comes from the host and goes back to it.
pub(super) struct Host {
    /// bf16 `[num_tokens, hidden]`
    pub tokens: DeviceBuffer<u16>,
    /// `[num_rows]`
    pub row_token: DeviceBuffer<u32>,
    /// `[rows of a wave, hidden]`
    pub out: DeviceBuffer<f32>,
}

/// What kernels need beside tokens and rows.
pub(super) struct Device {
    /// `[num_experts + 1]`
    pub expert_offsets: DeviceBuffer<u32>,
    /// `[num_launches, num_experts]`
    pub entries: DeviceBuffer<ExpertEntry>,
    /// `[MAX_PROGRAMS]` what each launch does, where the device deals rows out.
    pub dealt: DeviceBuffer<Dealt>,
    /// Rows as an image.
    pub image: DeviceBuffer<u16>,
    /// How much there is of each group of rows; zero whenever no kernel runs.
    pub gathered: DeviceBuffer<u32>,
    /// FC2's input: that of few rows, behind whose room lies that of many. Kernels for which the room is too small run by themselves.
    pub inner: DeviceBuffer<u16>,
    /// What warps of a block leave to each other.
    pub parts: DeviceBuffer<u8>,
    /// Zero whenever no kernel runs.
    pub given_out: DeviceBuffer<u32>,
}

impl Workspace {
    pub fn new(stream: &Stream) -> Result<Self, BackendError> {
        let device = stream.device();
        let host = Host {
            tokens: DeviceBuffer::uninitialised(device, 0)?,
            row_token: DeviceBuffer::uninitialised(device, 0)?,
            out: DeviceBuffer::uninitialised(device, 0)?,
        };
        let device = Device {
            expert_offsets: DeviceBuffer::uninitialised(device, 0)?,
            entries: DeviceBuffer::uninitialised(device, 0)?,
            dealt: DeviceBuffer::uninitialised(device, 0)?,
            image: DeviceBuffer::uninitialised(device, 0)?,
            gathered: DeviceBuffer::uninitialised(device, 0)?,
            inner: DeviceBuffer::uninitialised(device, 0)?,
            parts: DeviceBuffer::uninitialised(device, 0)?,
            given_out: DeviceBuffer::zeroed(stream, 1)?,
        };
        Ok(Self { host, device })
    }
}

impl Device {
    /// Makes room for counts of so many rows.
    pub fn grow_gathered(&mut self, stream: &Stream, num_padded_rows: usize) -> Result<(), BackendError> {
        let num_groups = num_padded_rows / IMAGE_GROUP_ROWS as usize;
        if self.gathered.len() < num_groups {
            grow(&mut self.gathered, num_groups)?;
            self.gathered.fill_bytes(stream, 0)?;
        }
        Ok(())
    }

    /// Queues what all waves of a batch read.
    pub fn upload_entries(&mut self, gpu: &Gpu, shares: &[Share]) -> Result<(), BackendError> {
        let entries: Vec<ExpertEntry> = shares.iter().flat_map(|share| share.entries.iter().copied()).collect();
        grow(&mut self.entries, entries.len())?;
        Ok(gpu.upload(&mut self.entries, 0, &entries)?)
    }
}
