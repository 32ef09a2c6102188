//! A whole layer of a rank's GPU, from router to output, as one CUDA graph: recorded once for the declared number of tokens, and
//! replayed with any up to it.
//!
//! Nothing in it waits for a host, and nothing in it follows from a step's numbers: those lie on the device
//! ([`crate::dispatch::device::LiveStep`]), where kernels find them. The first step of a kind runs what is then recorded, so
//! that all memory is there. Bits are those of steps that hosts follow: see [`crate::jit::kernels::deal`].

use std::cell::RefCell;

use crate::backend::cuda::{Around, DenseTools, Extent};
use crate::backend::{LiveBatch, LiveBounds};
use crate::config::{Choice as _, CudaGraph, Transport};
use crate::cuda::{CudaError, DeviceBuffer, Event, Graph, Stream};
use crate::dispatch::capacity::{Capacity, Chunks};
use crate::dispatch::device::{DeviceTokens, LiveExtent};
use crate::dispatch::nvlink::Push;
use crate::exit::{Classify, Exit};
use crate::fault::{Action, Stage};
use crate::gpu::{grow, num_grown};
use crate::ids::LayerIdx;
use crate::world::World;

use super::block::{DeviceBlock, Memory, on_device};
use super::device::{DeviceRoute, Memory as RouteMemory};
use super::parts::{Shared, SharedBy};
use super::routed::Brought;
use super::{LayerError, LayerInput, LayerOutput, LayerStats, MoeLayer, Part};

/// Rows that a library's products are recorded for at least: reading K3's weights takes as long as multiplying about so many.
const MIN_ROWS: usize = 256;
/// From one number of rows that is recorded to the next.
const ROWS_FACTOR: usize = 4;

/// What is said of a layer for which no recordings were asked for.
pub const NO_GRAPH_ASKED: &str = "moe.cuda_graph: off";

/// Why a layer is not recorded, though it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("moe.cuda_graph: on, but {layer} can't be recorded: {why}")]
pub struct GraphRefusal {
    layer: LayerIdx,
    why: NotRecorded,
}

impl Classify for GraphRefusal {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

/// Why a layer is not recorded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotRecorded {
    #[error("it runs on hosts; set cluster.device: gpu, or moe.cuda_graph: off")]
    OnHost,
    #[error("its router runs on hosts, which the GPU's kernel has too few slots for; set moe.cuda_graph: off")]
    RouterOnHost,
    #[error(
        "its tokens travel over {transport}, where hosts tell each other counts in every step; set dispatch.transport: nvlink \
         for ranks that have a GPU each, or moe.cuda_graph: off"
    )]
    HostsTell { transport: &'static str },
    #[error(
        "ranks share a GPU, and wait on their hosts before they hear each other; give each rank a GPU, or set \
         moe.cuda_graph: off"
    )]
    SharedGpu,
}

/// A layer's recordings.
pub(crate) struct LayerGraphs {
    /// Tokens of a rank that they serve, the same on all ranks.
    capacity: usize,
    recorded: RefCell<Vec<Recorded>>,
}

struct Recorded {
    kind: Kind,
    graph: Graph,
    /// What memory had grown by then.
    num_grown: u64,
}

/// What a recording depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind {
    part: Part,
    are_bf16: bool,
    with_router: bool,
    num_topk: usize,
    /// Tokens that launches are made for.
    rows: usize,
}

/// A step as it is queued: all that it depends on but its numbers.
#[derive(Clone, Copy)]
struct Queued<'a> {
    kind: Kind,
    extent: LiveExtent,
    push: Option<&'a Push>,
    /// It is being recorded.
    in_graph: bool,
}

impl Queued<'_> {
    fn mark(&self, stream: &Stream, event: &Event) -> Result<(), CudaError> {
        if self.in_graph { event.record_in_graph(stream) } else { event.record(stream) }
    }
}

/// Whether a layer is recorded, and if not, why; the same on all ranks.
pub(super) fn verdict(
    (route, block): (Option<&DeviceRoute>, Option<&DeviceBlock>),
    transport: Transport,
) -> Result<(), NotRecorded> {
    let route = route.ok_or(NotRecorded::OnHost)?;
    block.ok_or(NotRecorded::RouterOnHost)?;
    if route.transport.can_go_alone() {
        return Ok(());
    }
    Err(match transport {
        Transport::Nvlink => NotRecorded::SharedGpu,
        _ => NotRecorded::HostsTell { transport: transport.name() },
    })
}

/// Room for recordings of steps of up to `capacity` tokens a rank, or why there are none. Says on rank 0 where `auto` leaves it.
///
/// # Errors
/// If recordings were asked for that can't be.
pub(super) fn choose(
    asked: CudaGraph,
    (world, layer): (&World, LayerIdx),
    verdict: Result<(), NotRecorded>,
    capacity: usize,
) -> Result<Result<LayerGraphs, String>, GraphRefusal> {
    match (asked, verdict) {
        (CudaGraph::Off, _) => Ok(Err(NO_GRAPH_ASKED.to_owned())),
        (_, Ok(())) => Ok(Ok(LayerGraphs { capacity, recorded: RefCell::default() })),
        (CudaGraph::On, Err(why)) => Err(GraphRefusal { layer, why }),
        (CudaGraph::Auto, Err(why)) => {
            if world.is_root() {
                tracing::info!("{layer} is not recorded as a CUDA graph: {why}");
            }
            Ok(Err(why.to_string()))
        }
    }
}

impl LayerGraphs {
    /// Whether a step fits: decided from what all ranks know.
    fn serve(&self, chunks: &Chunks) -> bool {
        chunks.num_chunks == 1 && chunks.max_tokens <= self.capacity
    }

    /// Tokens that launches are made for. Our own kernels look up how many there are; a library multiplies all of them, so
    /// that there is one recording for few tokens and others for more.
    fn rows(&self, num_tokens: usize, tools: &DenseTools) -> usize {
        rows_of(num_tokens, self.capacity, tools.has_library())
    }
}

fn rows_of(num_tokens: usize, capacity: usize, has_library: bool) -> usize {
    if !has_library {
        return capacity;
    }
    let mut rows = MIN_ROWS;
    while rows < num_tokens {
        rows = rows.saturating_mul(ROWS_FACTOR);
    }
    rows.min(capacity)
}

impl MoeLayer {
    /// Runs the layer as [`MoeLayer::forward_on_device`] does, without a host in it; collective. None, and nothing done, of a
    /// step that does not fit.
    ///
    /// # Errors
    /// As [`MoeLayer::forward`].
    pub(super) fn forward_in_graph(
        &self,
        graphs: &LayerGraphs,
        (route, block): (&DeviceRoute, &DeviceBlock),
        (world, capacity): (&World, Capacity),
        input: &LayerInput<'_>,
        stats: &mut LayerStats,
    ) -> Result<Option<LayerOutput>, LayerError> {
        let DeviceBlock { tools, around, memory } = block;
        let (gpu, stream) = (tools.gpu(), tools.gpu().stream());
        let (hidden, latent) = (self.geometry.hidden, self.geometry.expert_hidden);
        let num_tokens = input.hidden.len() / hidden;
        let num_topk = input.topk.map_or(self.geometry.num_topk, |topk| topk.num_topk);
        let brought = Brought { num_tokens, num_topk, step: input.step };
        if !graphs.serve(&self.chunks(world, capacity, brought, stats)?) {
            return Ok(None);
        }
        let mut memory = memory.borrow_mut();
        let mut on_route = route.on.memory.borrow_mut();
        let extent = LiveExtent { max_tokens: graphs.capacity, num_ranks: world.size(), num_topk };

        // What differs from step to step
        world.fault(Stage::Dispatch)?;
        if world.has_fault(Stage::Experts, &Action::Poison) {
            memory.poison(tools)?;
            on_route.buffers.poison(gpu)?;
        }
        world.fault(Stage::Experts)?;
        world.fault(Stage::Combine)?;
        let step = input.step + u64::from(world.has_fault(Stage::Combine, &Action::Drift));
        let push = route.transport.begin_alone(world, extent, step)?;
        on_route.live.begin(gpu, push.as_ref().map_or(0, Push::word), num_tokens)?;
        let rows = graphs.rows(num_tokens, tools);
        let extent_of_rows = Extent { rows, room: graphs.capacity, live_tokens: on_route.live.tokens_address() };
        memory.buffers.upload_within(tools, (input.hidden, hidden), extent_of_rows)?;
        memory.buffers.set_num_topk(num_topk);
        if let Some(topk) = input.topk {
            memory.buffers.take(tools, topk)?;
        }

        // The step
        let (are_bf16, with_router) = (memory.buffers.are_bf16(), input.topk.is_none());
        let kind = Kind { part: input.part, are_bf16, with_router, num_topk, rows };
        let queued = Queued { kind, extent, push: push.as_ref(), in_graph: false };
        let recorded = graphs.recorded.borrow();
        let found = recorded.iter().find(|known| known.kind == kind && known.num_grown == num_grown());
        let is_replayed = found.is_some();
        match found {
            // SAFETY: all memory that was there when it was recorded is: none has grown since, and the layer and the session's
            // memory, which it is part of, are borrowed. The step before is over.
            Some(found) => unsafe { found.graph.launch(stream)? },
            None => self.queue_step(route, (around, &mut *memory, &mut *on_route), queued)?,
        }
        drop(recorded);
        on_route.timers.set_marked();

        // Back to the host, which waits here
        memory.buffers.queue_results(tools)?;
        let RouteMemory { buffers, counts, live, .. } = &mut *on_route;
        buffers.queue_counts(gpu, counts)?;
        live.queue_numbers(gpu)?;
        self.experts_on_device()?.queue_evidence()?;
        let with_shared = self.shared.as_ref().filter(|_| input.part != Part::Routed);
        if let Some(with_shared) = with_shared {
            match &with_shared.by {
                SharedBy::Backend(experts) => on_device(&**experts)?.queue_evidence()?,
                SharedBy::Library(expert) => expert.queue_evidence()?,
            }
        }
        let width = if input.part == Part::Routed { latent } else { hidden };
        let mut values = vec![0f32; num_tokens * width];
        route.wait_for_all(world)?;
        gpu.count_wait();
        let Memory { routed, up, .. } = &*memory;
        let out = if self.latent.is_some() && input.part == Part::Block { up } else { routed };
        out.download_into(stream, 0, &mut values)?;

        // What was done
        let (sent, received) =
            route.transport.finish_alone(world, (&on_route.buffers, &on_route.live), (extent, num_tokens))?;
        let num_packed = sent.num_tokens.iter().sum();
        self.count_chunk(&received, (num_packed, sent.num_remote(world.rank())), stats);
        self.experts_on_device()?.expect(&received.expert_offsets, bounds(extent))?;
        drop(on_route);
        self.finish_routed(route, stats)?;
        if let Some(with_shared) = with_shared {
            self.finish_shared(with_shared, (around, &memory), Some(rows), stats)?;
        }
        memory.count_times(&mut stats.times)?;
        if is_replayed {
            stats.num_graph_replays += 1;
        } else {
            let mut on_route = route.on.memory.borrow_mut();
            self.record(graphs, route, (around, &mut *memory, &mut *on_route), queued)?;
            stats.num_graph_captures += 1;
        }
        let topk = input.topk.cloned().unwrap_or_else(|| memory.buffers.topk());
        Ok(Some(LayerOutput { values, width, topk: Some(topk), stats: stats.clone() }))
    }

    /// Records what has just run, in place of an older recording of its kind.
    fn record(
        &self,
        graphs: &LayerGraphs,
        route: &DeviceRoute,
        (around, memory, on_route): (&Around, &mut Memory, &mut RouteMemory),
        queued: Queued<'_>,
    ) -> Result<(), LayerError> {
        let queued = Queued { in_graph: true, ..queued };
        let num_grown = num_grown();
        memory.buffers.restart();
        let stream = route.on.gpu.stream();
        let graph = Graph::capture(stream, || self.queue_step(route, (around, memory, on_route), queued))?;
        on_route.timers.restart();
        let mut recorded = graphs.recorded.borrow_mut();
        recorded.retain(|known| known.kind != queued.kind);
        recorded.push(Recorded { kind: queued.kind, graph, num_grown });
        Ok(())
    }

    /// Queues everything from router to output; waits for nothing, and allocates nothing once it has run.
    fn queue_step(
        &self,
        route: &DeviceRoute,
        (around, memory, on_route): (&Around, &mut Memory, &mut RouteMemory),
        queued: Queued<'_>,
    ) -> Result<(), LayerError> {
        let stream = route.on.gpu.stream();
        let Memory { buffers, routed, up, marks, .. } = &mut *memory;
        let room = queued.extent.max_tokens;
        queued.mark(stream, &marks[0])?;
        if queued.kind.with_router {
            around.route(buffers)?;
        }
        queued.mark(stream, &marks[1])?;
        grow(routed, room * self.geometry.expert_hidden)?;
        around.values(buffers)?;
        queued.mark(stream, &marks[2])?;
        let (ids, weights, num_topk) = buffers.chosen();
        let tokens = DeviceTokens {
            values: around.made_values(buffers),
            ids,
            weights,
            tokens: 0..room,
            num_topk,
            step: 0,
            chunk: 0,
            of_step: None,
            live_tokens: buffers.extent().live_tokens,
        };
        self.queue_routed_alone(route, on_route, &tokens, (queued, routed))?;
        queued.mark(stream, &marks[3])?;
        let is_back = queued.kind.part == Part::Block && around.up(buffers, routed, up)?;
        queued.mark(stream, &marks[4])?;
        if let Some(with_shared) = self.shared.as_ref().filter(|_| queued.kind.part == Part::Block) {
            queue_shared_alone(with_shared, around, memory)?;
            let Memory { buffers, routed, up, shared, .. } = memory;
            around.add(buffers, if is_back { up } else { routed }, shared)?;
        }
        queued.mark(stream, &memory.marks[5])?;
        Ok(())
    }

    /// Queues dispatch, experts and combine.
    fn queue_routed_alone(
        &self,
        route: &DeviceRoute,
        on_route: &mut RouteMemory,
        tokens: &DeviceTokens<'_>,
        (queued, out): (Queued<'_>, &mut DeviceBuffer<f32>),
    ) -> Result<(), LayerError> {
        let Queued { extent, push, in_graph, .. } = queued;
        let (gpu, transport) = (&route.on.gpu, &route.transport);
        let RouteMemory { buffers, timers, live, .. } = on_route;
        timers.restart();
        let mut mark = || timers.mark_as(gpu, in_graph);
        mark()?;
        transport.queue_dispatch(buffers, live, tokens, (extent, push))?;
        mark()?;
        grow(&mut buffers.rows, extent.max_rows() * self.geometry.expert_hidden)?;
        let batch = LiveBatch {
            tokens: &buffers.tokens,
            token_scale: self.input_scale.unwrap_or(1.0),
            row_token: &buffers.row_token,
            expert_offsets: &buffers.expert_offsets,
            bounds: bounds(extent),
        };
        self.experts_on_device()?.queue_live(&batch, &mut buffers.rows)?;
        mark()?;
        transport.queue_combine(buffers, live, tokens, (extent, push), out)?;
        Ok(mark()?)
    }
}

/// Rows that there may be. Kernels for more rows an expert than tokens travel are not queued.
fn bounds(extent: LiveExtent) -> LiveBounds {
    LiveBounds { max_rows: extent.max_rows(), max_expert_rows: extent.max_received() }
}

/// Queues every token through the shared experts.
fn queue_shared_alone(with_shared: &Shared, around: &Around, memory: &mut Memory) -> Result<(), LayerError> {
    let Memory { buffers, shared: out, .. } = memory;
    let experts = match &with_shared.by {
        SharedBy::Backend(experts) => on_device(&**experts)?,
        SharedBy::Library(expert) => return Ok(expert.queue(buffers, out)?),
    };
    let Extent { rows, room, .. } = buffers.extent();
    grow(out, around.num_room_values(buffers))?;
    around.shared_tokens(buffers, with_shared.input_scale)?;
    let (tokens, row_token) = around.made_shared_tokens(buffers, with_shared.input_scale.is_some());
    let expert_offsets = around.shared_offsets(buffers);
    let token_scale = with_shared.input_scale.unwrap_or(1.0);
    let bounds = LiveBounds { max_rows: room, max_expert_rows: rows };
    let batch = LiveBatch { tokens, token_scale, row_token, expert_offsets, bounds };
    Ok(experts.queue_live(&batch, out)?)
}

#[cfg(test)]
mod tests;
