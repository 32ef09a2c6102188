//! Memory of the device and of the host for what surrounds routed experts, and the ways between the two.

use rayon::prelude::*;

use super::super::dense::{DenseRows, DenseTools, RowCount, upper_half};
use super::BackendError;
use crate::cuda::{Device, DeviceBuffer, Event, PinnedBuffer};
use crate::gpu::grow;
use crate::numerics::nvfp4::QuantCounts;
use crate::routing::TopK;

/// What a step's kernels are launched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Tokens that launches are made for.
    pub rows: usize,
    /// Tokens that buffers have room for, at least as many.
    pub room: usize,
    /// Address of a u32 on the device: how many of `rows` there are; 0: all.
    pub live_tokens: u64,
}

impl Extent {
    /// So many tokens, and no others.
    #[must_use]
    pub const fn exactly(num_tokens: usize) -> Self {
        Self { rows: num_tokens, room: num_tokens, live_tokens: 0 }
    }
}

/// What layers of a session have on the device in a step, one after the other; it grows as steps need it.
pub struct AroundBuffers {
    pub(super) num_tokens: usize,
    pub(super) extent: Extent,
    /// bf16 `[num_parts, num_tokens, hidden]`: one part, or three that hold all bits of f32 values.
    pub(super) hidden: DeviceBuffer<u16>,
    pub(super) num_parts: usize,
    /// f32 `[num_tokens, hidden]`
    pub(super) plain: DeviceBuffer<f32>,
    pub(super) has_plain: bool,
    pub(super) logits: DeviceBuffer<f32>,
    pub(super) num_topk: usize,
    pub(super) ids: DeviceBuffer<i32>,
    pub(super) weights: DeviceBuffer<f32>,
    /// f32 `[num_tokens, latent]`
    pub(super) latent: DeviceBuffer<f32>,
    /// bf16 `[num_tokens, latent]`, normed
    pub(super) normed: DeviceBuffer<u16>,
    /// bf16 `[num_tokens, hidden]` through NVFP4
    pub(super) quantised: DeviceBuffer<u16>,
    /// f32 `[num_tokens, 2, intermediate]`, FC1's of a shared expert
    pub(in super::super) products: DeviceBuffer<f32>,
    /// bf16 `[num_tokens, intermediate]`, what its FC2 reads
    pub(in super::super) inner: DeviceBuffer<u16>,
    /// 0, 1, 2, ...: the token of each of the shared experts' rows
    pub(super) row_token: DeviceBuffer<u32>,
    /// `[2]` where they start and end, of the tokens that there are
    pub(super) shared_offsets: DeviceBuffer<u32>,
    /// `[2]` block scales that saturated and that became 0
    pub(super) counts: DeviceBuffer<u64>,
    host: Host,
}

/// The host's side of copies that it does not wait for.
struct Host {
    bf16: PinnedBuffer<u16>,
    f32: PinnedBuffer<f32>,
    ids: PinnedBuffer<i32>,
    weights: PinnedBuffer<f32>,
    counts: PinnedBuffer<u64>,
    /// Behind the copies to the device.
    uploaded: Event,
}

impl AroundBuffers {
    /// Empty ones.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn new(tools: &DenseTools) -> Result<Self, BackendError> {
        let gpu = tools.gpu();
        let device = gpu.device();
        Ok(Self {
            num_tokens: 0,
            extent: Extent::exactly(0),
            hidden: DeviceBuffer::uninitialised(device, 0)?,
            num_parts: 1,
            plain: DeviceBuffer::uninitialised(device, 0)?,
            has_plain: false,
            logits: DeviceBuffer::uninitialised(device, 0)?,
            num_topk: 1,
            ids: DeviceBuffer::uninitialised(device, 0)?,
            weights: DeviceBuffer::uninitialised(device, 0)?,
            latent: DeviceBuffer::uninitialised(device, 0)?,
            normed: DeviceBuffer::uninitialised(device, 0)?,
            quantised: DeviceBuffer::uninitialised(device, 0)?,
            products: DeviceBuffer::uninitialised(device, 0)?,
            inner: DeviceBuffer::uninitialised(device, 0)?,
            row_token: DeviceBuffer::uninitialised(device, 0)?,
            shared_offsets: DeviceBuffer::zeroed(gpu.stream(), 2)?,
            counts: DeviceBuffer::zeroed(gpu.stream(), 2)?,
            host: Host {
                bf16: PinnedBuffer::zeroed(device, 0)?,
                f32: PinnedBuffer::zeroed(device, 0)?,
                ids: PinnedBuffer::zeroed(device, 0)?,
                weights: PinnedBuffer::zeroed(device, 0)?,
                counts: PinnedBuffer::zeroed(device, 2)?,
                uploaded: Event::new(device)?,
            },
        })
    }

    /// Overwrites all that a step writes, so that what is read before it is written shows.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn poison(&mut self, tools: &DenseTools) -> Result<(), BackendError> {
        let stream = tools.gpu().stream();
        for buffer in [&mut self.hidden, &mut self.normed, &mut self.quantised, &mut self.inner] {
            buffer.fill_bytes(stream, 0xff)?;
        }
        for buffer in [&mut self.plain, &mut self.logits, &mut self.weights, &mut self.latent, &mut self.products] {
            buffer.fill_bytes(stream, 0xff)?;
        }
        Ok(self.ids.fill_bytes(stream, 0xff)?)
    }

    /// Uploads hidden states `[num_tokens, hidden]`, once for all that read them. Where all are bf16 values they travel as
    /// such; else f32 ones are kept exactly for the router, as three parts, of which everything else reads the first: the
    /// values rounded.
    ///
    /// # Errors
    /// If there is no room for them.
    ///
    /// # Panics
    /// If they are no whole rows, which is a bug of the caller.
    pub fn upload(&mut self, tools: &DenseTools, hidden: &[f32], width: usize) -> Result<(), BackendError> {
        self.upload_within(tools, (hidden, width), Extent::exactly(hidden.len() / width))
    }

    /// The same for launches that serve any number of tokens. What `extent.live_tokens` points to holds theirs by now.
    ///
    /// # Errors
    /// If there is no room for them.
    ///
    /// # Panics
    /// If they are no whole rows, or more than the extent, which is a bug of the caller.
    pub fn upload_within(
        &mut self,
        tools: &DenseTools,
        (hidden, width): (&[f32], usize),
        extent: Extent,
    ) -> Result<(), BackendError> {
        assert!(hidden.len().is_multiple_of(width), "hidden states are whole rows");
        assert!(hidden.len() <= extent.rows * width && extent.rows <= extent.room, "tokens fit what is launched");
        let (stream, device) = (tools.gpu().stream(), tools.gpu().device());
        let are_bf16 = hidden.par_iter().all(|value| value.to_bits() & 0xffff == 0);
        self.num_tokens = hidden.len() / width;
        self.extent = extent;
        self.num_parts = if are_bf16 { 1 } else { 3 };
        self.restart();
        let offsets = [0, u32::try_from(self.num_tokens).unwrap_or(u32::MAX)];
        tools.gpu().upload(&mut self.shared_offsets, 0, &offsets)?;
        self.host.uploaded.synchronise()?;
        grow(&mut self.hidden, self.num_parts * extent.room * width)?;
        if are_bf16 {
            pin(&mut self.host.bf16, device, hidden.len())?;
            let staged = &mut self.host.bf16[..hidden.len()];
            staged.par_iter_mut().zip(hidden).for_each(|(to, value)| *to = upper_half(*value));
            // SAFETY: nothing writes the staged values before `uploaded` has been waited for, above.
            unsafe { self.hidden.upload_pinned(stream, 0, staged)? };
        } else {
            pin(&mut self.host.f32, device, hidden.len())?;
            grow(&mut self.plain, extent.room * width)?;
            self.host.f32[..hidden.len()].copy_from_slice(hidden);
            // SAFETY: as above.
            unsafe { self.plain.upload_pinned(stream, 0, &self.host.f32[..hidden.len()])? };
            // SAFETY: both buffers have just got their room.
            unsafe { tools.split(self.plain.address(), self.rows(), width)? };
        }
        Ok(self.host.uploaded.record(stream)?)
    }

    /// What was uploaded is there and nothing else, so that the same work may be queued once more.
    pub fn restart(&mut self) {
        self.has_plain = self.num_parts == 3;
    }

    /// Says how many slots a token has that work chooses which was recorded before.
    pub fn set_num_topk(&mut self, num_topk: usize) {
        self.num_topk = num_topk;
    }

    /// Whether hidden states were uploaded as bf16.
    #[must_use]
    pub fn are_bf16(&self) -> bool {
        self.num_parts == 1
    }

    /// Takes experts and weights from outside, of as many tokens as were uploaded. The step before has to be over.
    ///
    /// # Errors
    /// If there is no room for them.
    pub fn take(&mut self, tools: &DenseTools, topk: &TopK) -> Result<(), BackendError> {
        let (stream, device) = (tools.gpu().stream(), tools.gpu().device());
        let num_slots = topk.idx.len();
        self.num_topk = topk.num_topk;
        pin(&mut self.host.ids, device, num_slots)?;
        pin(&mut self.host.weights, device, num_slots)?;
        grow(&mut self.ids, self.extent.room * topk.num_topk)?;
        grow(&mut self.weights, self.extent.room * topk.num_topk)?;
        self.host.ids[..num_slots].copy_from_slice(&topk.idx);
        self.host.weights[..num_slots].copy_from_slice(&topk.weights);
        // SAFETY: nothing writes the staged values but `queue_results`, behind this, and the next step's calls, before which the
        // host has waited for what this one has yielded.
        unsafe { self.ids.upload_pinned(stream, 0, &self.host.ids[..num_slots])? };
        // SAFETY: as above.
        unsafe { self.weights.upload_pinned(stream, 0, &self.host.weights[..num_slots])? };
        Ok(())
    }

    /// Experts `[num_tokens, num_topk]` and their weights on the device, and how many slots a token has.
    #[must_use]
    pub fn chosen(&self) -> (&DeviceBuffer<i32>, &DeviceBuffer<f32>, usize) {
        (&self.ids, &self.weights, self.num_topk)
    }

    /// Queues the way of what was chosen and counted to the host.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn queue_results(&mut self, tools: &DenseTools) -> Result<(), BackendError> {
        let (stream, device) = (tools.gpu().stream(), tools.gpu().device());
        let num_slots = self.num_tokens * self.num_topk;
        pin(&mut self.host.ids, device, num_slots)?;
        pin(&mut self.host.weights, device, num_slots)?;
        if self.ids.len() >= num_slots {
            // SAFETY: whoever reads them has waited for the stream.
            unsafe { self.ids.download_pinned(stream, 0, &mut self.host.ids[..num_slots])? };
            // SAFETY: as above.
            unsafe { self.weights.download_pinned(stream, 0, &mut self.host.weights[..num_slots])? };
        }
        // SAFETY: as above.
        unsafe { self.counts.download_pinned(stream, 0, &mut self.host.counts)? };
        Ok(self.counts.fill_bytes(stream, 0)?)
    }

    /// What was chosen, once the host has waited for the stream behind [`Self::queue_results`].
    #[must_use]
    pub fn topk(&self) -> TopK {
        let num_slots = self.num_tokens * self.num_topk;
        let (idx, weights) = (self.host.ids[..num_slots].to_vec(), self.host.weights[..num_slots].to_vec());
        TopK { num_topk: self.num_topk, idx, weights }
    }

    /// What was counted of `num_blocks` block scales, likewise.
    #[must_use]
    pub fn quant_counts(&self, num_blocks: u64) -> QuantCounts {
        QuantCounts { num_blocks, num_saturated: self.host.counts[0], num_zeroed: self.host.counts[1] }
    }

    /// Tokens that were uploaded.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// What launches are made for.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    pub(in super::super) fn count(&self) -> RowCount {
        RowCount { most: self.extent.rows, live: self.extent.live_tokens }
    }

    pub(super) fn rows(&self) -> DenseRows {
        DenseRows { address: self.hidden.address(), num_parts: self.num_parts, count: self.count() }
    }

    pub(in super::super) fn first_part(&self) -> DenseRows {
        DenseRows { num_parts: 1, ..self.rows() }
    }

    /// Numbers the shared experts' rows.
    pub(super) fn number_rows(&mut self, tools: &DenseTools) -> Result<(), BackendError> {
        if self.row_token.len() < self.extent.room {
            let numbers: Vec<u32> = (0..u32::try_from(self.extent.room).unwrap_or(u32::MAX)).collect();
            self.row_token = DeviceBuffer::from_slice(tools.gpu().stream(), &numbers)?;
        }
        Ok(())
    }
}

/// Makes room in pinned memory that no copy is under way from or to.
fn pin<T: bytemuck::Pod>(buffer: &mut PinnedBuffer<T>, device: &Device, len: usize) -> Result<(), BackendError> {
    if buffer.len() < len {
        *buffer = PinnedBuffer::zeroed(device, len)?;
    }
    Ok(())
}
