//! A whole layer on a rank's GPU: hidden states go there once, everything is queued into one stream, rows come back once.
//!
//! [`super::device`] brings tokens to their experts; here is what surrounds that. The host waits once at the end, and where
//! routed parts make it.

use std::cell::{RefCell, RefMut};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::cuda::{Around, AroundBuffers, DenseTools};
use crate::backend::{BackendError, Beside, DeviceBatch, DeviceExperts, Experts, LiveBounds};
use crate::cuda::{DeviceBuffer, Event};
use crate::dispatch::capacity::Capacity;
use crate::fault::{Action, Stage};
use crate::gpu::grow;
use crate::world::World;

use super::device::{DeviceRoute, RoutedInput};
use super::parts::{Shared, SharedBy};
use super::routed::Brought;
use super::{LayerError, LayerInput, LayerOutput, LayerStats, MoeLayer, Part, PhaseTimes};

/// What surrounds a layer's routed experts, on the device.
pub(crate) struct DeviceBlock {
    pub(super) tools: Arc<DenseTools>,
    pub around: Around,
    pub(super) memory: BlockMemory,
}

/// Memory that the layers of a session use one after the other.
#[derive(Clone)]
pub(super) struct BlockMemory(Rc<RefCell<Memory>>);

impl BlockMemory {
    pub fn borrow_mut(&self) -> RefMut<'_, Memory> {
        self.0.borrow_mut()
    }
}

pub(super) struct Memory {
    pub buffers: AroundBuffers,
    /// Sums of routed experts, `[num_tokens, width]`.
    pub routed: DeviceBuffer<f32>,
    /// Their way back from the latent, `[num_tokens, hidden]`.
    pub up: DeviceBuffer<f32>,
    /// `[num_tokens, hidden]`
    pub shared: DeviceBuffer<f32>,
    /// Marks of a step: its begin, experts chosen, values made; routed sums made, back from the latent, all summed.
    pub marks: [Event; 6],
}

impl Memory {
    /// Overwrites all that a step writes, so that what is read before it is written shows.
    pub fn poison(&mut self, tools: &DenseTools) -> Result<(), LayerError> {
        self.buffers.poison(tools)?;
        let written = [&mut self.routed, &mut self.up, &mut self.shared];
        Ok(written.into_iter().try_for_each(|buffer| buffer.fill_bytes(tools.gpu().stream(), 0xff))?)
    }

    /// Adds the times between the marks of a step, which the device has passed.
    pub fn count_times(&self, times: &mut PhaseTimes) -> Result<(), LayerError> {
        let marks = &self.marks;
        let between = |at: usize| -> Result<Duration, LayerError> { Ok(marks[at + 1].elapsed_since(&marks[at])?) };
        times.route += between(0)?;
        times.latent += between(1)? + between(3)?;
        times.shared += between(4)?;
        Ok(())
    }
}

impl BlockMemory {
    pub fn new(tools: &DenseTools) -> Result<Self, BackendError> {
        let device = tools.gpu().device();
        let mark = || Event::new(device);
        let memory = Memory {
            buffers: AroundBuffers::new(tools)?,
            routed: DeviceBuffer::uninitialised(device, 0)?,
            up: DeviceBuffer::uninitialised(device, 0)?,
            shared: DeviceBuffer::uninitialised(device, 0)?,
            marks: [mark()?, mark()?, mark()?, mark()?, mark()?, mark()?],
        };
        Ok(Self(Rc::new(RefCell::new(memory))))
    }
}

impl DeviceBlock {
    pub fn new(tools: &Arc<DenseTools>, around: Around, memory: &BlockMemory) -> Self {
        Self { tools: tools.clone(), around, memory: memory.clone() }
    }
}

impl MoeLayer {
    /// Runs the layer on this rank's tokens, which lie on the host, with all of its parts on the device; collective.
    ///
    /// # Errors
    /// As [`MoeLayer::forward`].
    pub(super) fn forward_on_device(
        &self,
        (route, block): (&DeviceRoute, &DeviceBlock),
        (world, capacity): (&World, Capacity),
        input: &LayerInput<'_>,
        mut stats: LayerStats,
    ) -> Result<LayerOutput, LayerError> {
        let DeviceBlock { tools, around, memory } = block;
        if let Ok(graphs) = self.graphs.as_ref()
            && input.part != Part::Shared
            && let Some(output) = self.forward_in_graph(graphs, (route, block), (world, capacity), input, &mut stats)?
        {
            return Ok(output);
        }
        let stream = tools.gpu().stream();
        let mut memory = memory.borrow_mut();
        let (hidden, latent) = (self.geometry.hidden, self.geometry.expert_hidden);
        let num_tokens = input.hidden.len() / hidden;

        if world.has_fault(Stage::Experts, &Action::Poison) {
            memory.poison(tools)?;
        }
        let Memory { buffers, routed, up, shared, marks } = &mut *memory;

        // Choose experts
        buffers.upload(tools, input.hidden, hidden)?;
        marks[0].record(stream)?;
        if input.part != Part::Shared {
            match input.topk {
                Some(topk) => buffers.take(tools, topk)?,
                None => around.route(buffers)?,
            }
        }
        marks[1].record(stream)?;

        // Routed experts
        let width = if input.part == Part::Routed { latent } else { hidden };
        let is_back = if input.part == Part::Shared {
            grow(routed, num_tokens * hidden)?;
            routed.fill_bytes(stream, 0)?;
            marks[2].record(stream)?;
            marks[3].record(stream)?;
            false
        } else {
            grow(routed, num_tokens * latent)?;
            around.values(buffers)?;
            marks[2].record(stream)?;
            let (ids, weights, num_topk) = buffers.chosen();
            let brought = Brought { num_tokens, num_topk, step: input.step };
            let tokens = RoutedInput { values: around.made_values(buffers), ids, weights, brought };
            self.queue_routed(route, (world, capacity), tokens, routed, &mut stats)?;
            marks[3].record(stream)?;
            input.part == Part::Block && around.up(buffers, routed, up)?
        };
        marks[4].record(stream)?;

        // Shared experts
        let out = if is_back { up } else { routed };
        let with_shared = self.shared.as_ref().filter(|_| input.part != Part::Routed);
        if let Some(with_shared) = with_shared {
            queue_shared(with_shared, around, buffers, shared)?;
            around.add(buffers, out, shared)?;
        }
        marks[5].record(stream)?;

        // Back to the host, which waits here
        buffers.queue_results(tools)?;
        let mut values = vec![0f32; num_tokens * width];
        route.wait_for_all(world)?;
        tools.gpu().count_wait();
        out.download_into(stream, 0, &mut values)?;
        if input.part != Part::Shared {
            self.finish_routed(route, &mut stats)?;
        }
        if let Some(with_shared) = with_shared {
            self.finish_shared(with_shared, (around, &memory), None, &mut stats)?;
        }
        memory.count_times(&mut stats.times)?;
        let topk = (input.part != Part::Shared).then(|| input.topk.cloned().unwrap_or_else(|| memory.buffers.topk()));
        Ok(LayerOutput { values, width, topk, stats })
    }

    /// Counts what the shared experts did, once the host has waited for the device. `rows` are those that launches were made for,
    /// where the device alone knew how many there were.
    pub(super) fn finish_shared(
        &self,
        with_shared: &Shared,
        (around, memory): (&Around, &Memory),
        rows: Option<usize>,
        stats: &mut LayerStats,
    ) -> Result<(), LayerError> {
        let buffers = &memory.buffers;
        let num_blocks = if with_shared.input_scale.is_some() { around.num_blocks(buffers) } else { 0 };
        let (num_tokens, room) = (buffers.num_tokens(), buffers.extent().room);
        let evidence = match &with_shared.by {
            SharedBy::Backend(experts) => {
                let experts = on_device(&**experts)?;
                if let Some(rows) = rows {
                    experts.expect(&[0, num_tokens], LiveBounds { max_rows: room, max_expert_rows: rows })?;
                }
                experts.evidence()?
            }
            SharedBy::Library(expert) => {
                if rows.is_some() {
                    expert.expect(num_tokens);
                }
                expert.evidence()?
            }
        };
        stats.count_shared(&evidence, buffers.quant_counts(num_blocks));
        Ok(())
    }
}

/// Queues every token through the shared experts into `out` `[num_tokens, hidden]`, which grows.
fn queue_shared(
    shared: &Shared,
    around: &Around,
    buffers: &mut AroundBuffers,
    out: &mut DeviceBuffer<f32>,
) -> Result<(), LayerError> {
    let experts = match &shared.by {
        SharedBy::Backend(experts) => on_device(&**experts)?,
        SharedBy::Library(expert) => {
            expert.queue(buffers, out)?;
            return Ok(expert.queue_evidence()?);
        }
    };
    let num_tokens = buffers.num_tokens();
    grow(out, around.num_room_values(buffers))?;
    let (tokens, row_token) = around.shared_tokens(buffers, shared.input_scale)?;
    let token_scale = shared.input_scale.unwrap_or(1.0);
    let (expert_offsets, beside) = (&[0, num_tokens][..], Beside::default());
    let batch = DeviceBatch { tokens, token_scale, row_token, expert_offsets, beside };
    experts.queue(&batch, out)?;
    Ok(experts.queue_evidence()?)
}

pub(super) fn on_device(experts: &dyn Experts) -> Result<&dyn DeviceExperts, BackendError> {
    experts.on_device().ok_or(BackendError::NotOnDevice { technique: "the shared experts' backend" })
}
