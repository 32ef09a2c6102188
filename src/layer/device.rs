//! The routed part of a layer on a rank's GPU: dispatch, experts, combine, chunk by chunk, queued into one stream; where chunks
//! overlap, by [`super::overlap`].
//!
//! Input and output are buffers of the device. What a step did is read once the host has waited for the device, which is the
//! caller's to do: [`MoeLayer::queue_routed`], a wait, [`MoeLayer::finish_routed`].

use std::cell::RefCell;
use std::rc::Rc;

use crate::backend::{BackendError, Beside, DeviceBatch, DeviceExperts};
use crate::config::Overlap;
use crate::cuda::{DeviceBuffer, PinnedBuffer};
use crate::dispatch::capacity::Capacity;
use crate::dispatch::counts::ReceivedCounts;
use crate::dispatch::device::{Buffers, DeviceTokens, DeviceTransport, Forms, LiveStep, Stages, TwoLevels, Way};
use crate::dispatch::layout::PayloadForm;
use crate::dispatch::nodes::Nodes;
use crate::fault::{Action, Stage};
use crate::gpu::{Gpu, GpuError, grow};
use crate::ids::{LayerIdx, Rank};
use crate::numerics::nvfp4::{BLOCK, QuantCounts};
use crate::routing::TopK;
use crate::world::World;

use super::overlap::{Lane, Overlapped};
use super::routed::Brought;
use super::timers::Timers;
use super::{LayerError, LayerStats, MoeLayer};

/// A session's GPU and the memory that its layers share.
#[derive(Clone)]
pub(super) struct OnGpu {
    pub gpu: Gpu,
    pub memory: Rc<RefCell<Memory>>,
    input: Rc<RefCell<HostInput>>,
    /// Where chunks may overlap.
    lane: Option<Lane>,
}

/// Memory that layers use one after the other.
pub(super) struct Memory {
    pub buffers: Buffers,
    pub timers: Timers,
    /// The host's copy of `buffers.counts`.
    pub counts: PinnedBuffer<u64>,
    /// Numbers of steps that no host follows.
    pub live: LiveStep,
}

/// What comes from the host and goes back to it.
struct HostInput {
    values: DeviceBuffer<f32>,
    ids: DeviceBuffer<i32>,
    weights: DeviceBuffer<f32>,
    out: DeviceBuffer<f32>,
}

/// How one layer's tokens travel between GPUs.
pub(crate) struct DeviceRoute {
    pub(super) on: OnGpu,
    pub(super) transport: DeviceTransport,
}

/// Tokens of this rank, on its device.
#[derive(Clone, Copy)]
pub(super) struct RoutedInput<'a> {
    /// `[num_tokens, width]`
    pub values: &'a DeviceBuffer<f32>,
    /// `[num_tokens, num_topk]` experts; -1 masks a slot. No other number is none of the layer's.
    pub ids: &'a DeviceBuffer<i32>,
    /// `[num_tokens, num_topk]`
    pub weights: &'a DeviceBuffer<f32>,
    /// How many, and in which step.
    pub brought: Brought,
}

impl OnGpu {
    /// With a second lane unless chunks go one after the other.
    pub fn new(gpu: &Gpu, overlap: Overlap) -> Result<Self, GpuError> {
        let device = gpu.device();
        let input = HostInput {
            values: DeviceBuffer::uninitialised(device, 0)?,
            ids: DeviceBuffer::uninitialised(device, 0)?,
            weights: DeviceBuffer::uninitialised(device, 0)?,
            out: DeviceBuffer::uninitialised(device, 0)?,
        };
        let buffers = Buffers::new(gpu)?;
        let counts = PinnedBuffer::zeroed(device, buffers.counts.len())?;
        let memory = Memory { buffers, timers: Timers::default(), counts, live: LiveStep::new(gpu)? };
        let (memory, input) = (Rc::new(RefCell::new(memory)), Rc::new(RefCell::new(input)));
        let lane = if overlap == Overlap::Off { None } else { Some(Lane::new(gpu)?) };
        Ok(Self { gpu: gpu.clone(), memory, input, lane })
    }

    /// A layer's way, in two levels where there are nodes.
    pub fn route(
        &self,
        forms: Forms,
        (rank, nodes): (Rank, Option<Rc<Nodes>>),
        (way, layer): (Way, LayerIdx),
    ) -> Result<DeviceRoute, GpuError> {
        let transport = in_lane(&self.gpu, forms, (rank, nodes), (way, layer))?;
        Ok(DeviceRoute { on: self.clone(), transport })
    }

    /// The same way in the second lane, where there is one.
    pub fn overlapped(
        &self,
        forms: Forms,
        place: (Rank, Option<Rc<Nodes>>),
        (way, layer): (Way, LayerIdx),
        asked: Overlap,
    ) -> Result<Option<Overlapped>, GpuError> {
        let Some(lane) = &self.lane else { return Ok(None) };
        let transport = in_lane(&lane.travel, forms, place, (way, layer))?;
        Ok(Some(Overlapped::new(lane, transport.in_turns(), asked)))
    }
}

fn in_lane(
    lane: &Gpu,
    forms: Forms,
    (rank, nodes): (Rank, Option<Rc<Nodes>>),
    (way, layer): (Way, LayerIdx),
) -> Result<DeviceTransport, GpuError> {
    let stages = Stages::new(lane, forms, rank)?;
    let levels = nodes.map(|nodes| TwoLevels::new(lane, forms, (rank, nodes))).transpose()?;
    Ok(DeviceTransport::new(lane, stages, way, layer).with_levels(levels))
}

impl DeviceRoute {
    /// See [`DeviceTransport::wait_for_all`].
    pub fn wait_for_all(&self, world: &World) -> Result<(), LayerError> {
        Ok(self.transport.wait_for_all(world)?)
    }
}

impl MoeLayer {
    /// Dispatch, expert computation and combine of tokens that lie on the host; collective.
    pub(super) fn routed_on_device(
        &self,
        route: &DeviceRoute,
        world: &World,
        capacity: Capacity,
        (values, topk, step): (&[f32], &TopK, u64),
        stats: &mut LayerStats,
    ) -> Result<Vec<f32>, LayerError> {
        let OnGpu { gpu, input, .. } = &route.on;
        let stream = gpu.stream();
        let mut input = input.borrow_mut();
        let HostInput { values: on_device, ids, weights, out } = &mut *input;
        stats.times.dispatch(|| -> Result<(), LayerError> {
            grow(on_device, values.len())?;
            grow(ids, topk.idx.len())?;
            grow(weights, topk.weights.len())?;
            grow(out, values.len())?;
            on_device.upload(stream, 0, values)?;
            ids.upload(stream, 0, &topk.idx)?;
            Ok(weights.upload(stream, 0, &topk.weights)?)
        })?;
        let num_tokens = topk.idx.len() / topk.num_topk;
        let brought = Brought { num_tokens, num_topk: topk.num_topk, step };
        let input = RoutedInput { values: on_device, ids, weights, brought };
        self.queue_routed(route, (world, capacity), input, out, stats)?;
        let mut rows = vec![0f32; values.len()];
        stats.times.combine(|| route.wait_for_all(world))?;
        gpu.count_wait();
        stats.times.combine(|| out.download_into(stream, 0, &mut rows))?;
        self.finish_routed(route, stats)?;
        Ok(rows)
    }

    /// Queues dispatch, expert computation and combine of this rank's tokens into the rows of `out` `[num_tokens, width]`;
    /// collective. The device may still be at it; a chunk has waited for it once.
    ///
    /// # Errors
    /// If ranks are at different steps or bring more tokens than declared: on all ranks alike. If a device or a network
    /// fails, on its rank, which then has to end the job.
    pub(super) fn queue_routed(
        &self,
        route: &DeviceRoute,
        (world, capacity): (&World, Capacity),
        input: RoutedInput<'_>,
        out: &mut DeviceBuffer<f32>,
        stats: &mut LayerStats,
    ) -> Result<(), LayerError> {
        let gpu = &route.on.gpu;
        let waits_before = gpu.num_waits();
        let RoutedInput { values, ids, weights, brought } = input;
        let experts = self.experts_on_device()?;
        let chunks = self.chunks(world, capacity, brought, stats)?;
        if let Ok(overlapped) = self.overlap.as_ref()
            && chunks.num_chunks > 1
        {
            self.queue_overlapped((route, overlapped), (world, chunks), input, out, stats)?;
            stats.num_device_waits += gpu.num_waits() - waits_before;
            return Ok(());
        }
        let mut memory = route.on.memory.borrow_mut();
        let Memory { buffers, timers, counts, .. } = &mut *memory;
        // What devices tell each other is another step's, though hosts agree on this one.
        let step = brought.step + u64::from(world.has_fault(Stage::Combine, &Action::Drift));
        for chunk in 0..chunks.num_chunks {
            let (tokens, num_topk) = (chunks.tokens(chunk, brought.num_tokens), brought.num_topk);
            let tokens =
                DeviceTokens { values, ids, weights, tokens, num_topk, step, chunk, of_step: None, live_tokens: 0 };
            world.fault(Stage::Dispatch)?;
            if world.has_fault(Stage::Experts, &Action::Poison) {
                buffers.poison(gpu)?;
            }
            timers.mark(gpu)?;
            let handle = route.transport.dispatch(world, buffers, &tokens, chunks.chunk_tokens)?;
            self.count_chunk(&handle.received, (handle.num_packed, handle.num_sent_remote), stats);
            world.fault(Stage::Experts)?;
            timers.mark(gpu)?;
            let offsets = &handle.received.expert_offsets;
            grow(&mut buffers.rows, handle.received.total_rows() * self.geometry.expert_hidden)?;
            let token_scale = self.input_scale.unwrap_or(1.0);
            let Buffers { tokens: received, row_token, rows, .. } = buffers;
            let beside = Beside::default();
            let batch = DeviceBatch { tokens: received, token_scale, row_token, expert_offsets: offsets, beside };
            experts.queue(&batch, rows)?;
            world.fault(Stage::Combine)?;
            timers.mark(gpu)?;
            route.transport.combine(world, buffers, &handle, (&tokens, chunks.chunk_tokens), out)?;
            timers.mark(gpu)?;
        }
        buffers.queue_counts(gpu, counts)?;
        experts.queue_evidence()?;
        stats.num_device_waits += gpu.num_waits() - waits_before;
        Ok(())
    }

    /// Counts what was queued, once the host has waited for the device.
    ///
    /// # Errors
    /// If rows were queued that no kernel has stored.
    pub(super) fn finish_routed(&self, route: &DeviceRoute, stats: &mut LayerStats) -> Result<(), LayerError> {
        let mut memory = route.on.memory.borrow_mut();
        let Memory { timers, counts, .. } = &mut *memory;
        timers.take(stats)?;
        let others = self.overlap.as_ref().map_or([0; 4], Overlapped::take_counts);
        let sum = |at: usize| counts[at] + counts[at + 2] + others[at] + others[at + 2];
        let of_blocks = QuantCounts { num_blocks: 0, num_saturated: sum(0), num_zeroed: sum(1) };
        stats.count_forward(self.experts_on_device()?.evidence()?, of_blocks);
        Ok(())
    }

    /// What the host knows of a chunk.
    pub(super) fn count_chunk(
        &self,
        received: &ReceivedCounts,
        (num_packed, num_sent_remote): (usize, usize),
        stats: &mut LayerStats,
    ) {
        let quantised = match (self.travel.payload, self.input_scale) {
            (PayloadForm::Nvfp4 { .. }, _) => num_packed,
            (_, Some(_)) => received.total_tokens(),
            (_, None) => 0,
        };
        stats.fc1_input.num_blocks += (quantised * (self.geometry.expert_hidden / BLOCK)) as u64;
        stats.num_tokens_sent += num_sent_remote as u64;
        stats.num_tokens_received += received.total_tokens() as u64;
        for (rows, pair) in stats.rows_per_expert.iter_mut().zip(received.expert_offsets.windows(2)) {
            *rows += (pair[1] - pair[0]) as u64;
        }
    }

    pub(super) fn experts_on_device(&self) -> Result<&dyn DeviceExperts, BackendError> {
        let technique = self.selected.winner.identity.technique;
        self.experts.on_device().ok_or(BackendError::NotOnDevice { technique })
    }
}
