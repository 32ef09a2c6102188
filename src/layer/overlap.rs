//! Chunks that travel while others are computed: dispatch and combine in a lane of their own, experts in the session's stream.
//!
//! Two sets of buffers take turns. While the experts of one chunk are at work, the next one's tokens come and the rows of the one
//! before go home:
//!
//! ```text
//! travel   dispatch 0 │ dispatch 1 │ combine 0 · dispatch 2 │ combine 1 · dispatch 3 │ ...
//! compute             │ experts 0  │ experts 1              │ experts 2              │ ...
//! ```
//!
//! Experts of a chunk follow its dispatch, its combine follows them, and the dispatch that takes the same buffers again is behind
//! that combine in the same lane: nothing else has to be ordered. What lies in other ranks' memory is [`crate::dispatch::region`]'s
//! to argue. Hosts queue the same collectives in the same order on all ranks.
//! They wait for counts, and where bytes go through them for bytes, once the experts of a chunk are queued that those waits lie
//! under.

use std::cell::RefCell;
use std::rc::Rc;

use crate::backend::{Beside, DeviceBatch};
use crate::config;
use crate::cuda::{DeviceBuffer, PinnedBuffer};
use crate::dispatch::capacity::Chunks;
use crate::dispatch::device::{Buffers, DeviceHandle, DeviceTokens, DeviceTransport};
use crate::dispatch::overlap::{Cut, NUM_SETS, NUM_TRAVEL_MULTIPROCESSORS, Turn, set_of, turns};
use crate::exit::{Classify, Exit};
use crate::fault::{Action, Stage};
use crate::gpu::{Gpu, GpuError, Mark, grow};
use crate::ids::LayerIdx;
use crate::world::World;

use super::device::{DeviceRoute, Memory, RoutedInput};
use super::timers::Edge;
use super::{LayerError, LayerStats, MoeLayer};

/// What is said of a layer for which no overlap was asked for.
pub const NO_OVERLAP_ASKED: &str = "dispatch.overlap: off";

/// Why a layer's chunks do not overlap, though it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("dispatch.overlap: on, but the chunks of {layer} can't overlap: {why}")]
pub struct OverlapRefusal {
    layer: LayerIdx,
    why: NotOverlapped,
}

impl Classify for OverlapRefusal {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

/// Why a layer's chunks do not overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotOverlapped {
    #[error("it runs on hosts; set cluster.device: gpu, or dispatch.overlap: off")]
    OnHost,
    #[error(
        "its steps are recorded as CUDA graphs, which are whole; set moe.cuda_graph: off, or dispatch.overlap: off"
    )]
    Recorded,
    #[error("one rank waits for nobody")]
    Alone,
}

/// A session's second lane, and what chunks in it have beside the session's memory.
#[derive(Clone)]
pub(super) struct Lane {
    pub travel: Gpu,
    second: Rc<RefCell<Second>>,
}

/// What takes turns with [`Memory`].
struct Second {
    buffers: Buffers,
    /// The host's copy of `buffers.counts`.
    counts: PinnedBuffer<u64>,
    /// They are those of a step that has not been counted.
    is_counted: bool,
    /// Behind the tokens of even and odd chunks, unpacked.
    unpacked: [Mark; NUM_SETS],
    /// Behind their rows, computed.
    computed: [Mark; NUM_SETS],
    /// Where the lanes part and meet.
    part: Mark,
    meet: Mark,
}

/// How one layer's chunks overlap.
pub(crate) struct Overlapped {
    lane: Lane,
    transport: DeviceTransport,
    asked: config::Overlap,
}

/// A chunk whose rows are being computed.
struct UnderWay<'a> {
    handle: DeviceHandle,
    tokens: DeviceTokens<'a>,
}

impl Lane {
    /// Beside a session's stream.
    pub fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let travel = gpu.urgent_lane()?;
        let buffers = Buffers::new(&travel)?;
        let counts = PinnedBuffer::zeroed(gpu.device(), buffers.counts.len())?;
        let second = Second {
            buffers,
            counts,
            is_counted: true,
            unpacked: [travel.mark()?, travel.mark()?],
            computed: [gpu.mark()?, gpu.mark()?],
            part: gpu.mark()?,
            meet: travel.mark()?,
        };
        Ok(Self { travel, second: Rc::new(RefCell::new(second)) })
    }

    /// Counts of block scales of the last step that had chunks in it, once.
    fn take_counts(&self) -> [u64; 4] {
        let mut second = self.second.borrow_mut();
        let is_counted = std::mem::replace(&mut second.is_counted, true);
        std::array::from_fn(|at| if is_counted { 0 } else { second.counts[at] })
    }
}

impl Overlapped {
    pub fn new(lane: &Lane, transport: DeviceTransport, asked: config::Overlap) -> Self {
        Self { lane: lane.clone(), transport, asked }
    }

    /// How steps with so many slots a token are cut.
    pub fn cut(&self, num_topk: usize, num_experts: usize) -> Cut {
        match self.asked {
            config::Overlap::Off => Cut::Never,
            config::Overlap::Auto => Cut::ByRows { num_topk, num_experts },
            config::Overlap::On => Cut::ByTokens,
        }
    }

    /// See [`Lane::take_counts`].
    pub fn take_counts(&self) -> [u64; 4] {
        self.lane.take_counts()
    }
}

/// What decides whether a layer's chunks may overlap.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts {
    pub asked: config::Overlap,
    pub num_ranks: usize,
    /// Its steps are recorded.
    pub is_recorded: bool,
}

impl Facts {
    /// What the layer's chunks overlap in, of what was `made` where it runs on a GPU; or why nothing. The same on all ranks.
    fn verdict<T>(self, made: Option<T>) -> Result<T, NotOverlapped> {
        let made = made.ok_or(NotOverlapped::OnHost)?;
        if self.is_recorded {
            return Err(NotOverlapped::Recorded);
        }
        // Asked for by name, a rank's own packing overlaps as well.
        if self.asked == config::Overlap::Auto && self.num_ranks == 1 {
            return Err(NotOverlapped::Alone);
        }
        Ok(made)
    }

    /// The same, as a session holds it.
    ///
    /// # Errors
    /// If it was asked for and can't be.
    pub fn choose<T>(self, layer: LayerIdx, made: Option<T>) -> Result<Result<T, String>, OverlapRefusal> {
        match (self.asked, self.verdict(made)) {
            (config::Overlap::Off, _) => Ok(Err(NO_OVERLAP_ASKED.to_owned())),
            (config::Overlap::On, Err(why)) => Err(OverlapRefusal { layer, why }),
            (_, verdict) => Ok(verdict.map_err(|why| why.to_string())),
        }
    }
}

impl MoeLayer {
    /// Queues a step of several chunks as [`MoeLayer::queue_routed`] does, so that they overlap; what is queued into the session's
    /// stream afterwards is behind all of them.
    ///
    /// # Errors
    /// As [`MoeLayer::queue_routed`].
    pub(super) fn queue_overlapped(
        &self,
        (route, overlapped): (&DeviceRoute, &Overlapped),
        (world, chunks): (&World, Chunks),
        input: RoutedInput<'_>,
        out: &mut DeviceBuffer<f32>,
        stats: &mut LayerStats,
    ) -> Result<(), LayerError> {
        let Overlapped { lane, transport, .. } = overlapped;
        let (compute, travel) = (&route.on.gpu, &lane.travel);
        let RoutedInput { values, ids, weights, brought } = input;
        let num_topk = brought.num_topk;
        let experts = self.experts_on_device()?;
        let (mut memory, mut second) = (route.on.memory.borrow_mut(), lane.second.borrow_mut());
        let Memory { buffers: even, timers, counts, .. } = &mut *memory;
        let Second { buffers: odd, counts: odd_counts, is_counted, unpacked, computed, part, meet } = &mut *second;
        let sets = [even, odd];
        // What devices tell each other is another step's, though hosts agree on this one.
        let step = brought.step + u64::from(world.has_fault(Stage::Combine, &Action::Drift));
        let mut rows_of_step = None;
        let mut under_way: [Option<UnderWay<'_>>; NUM_SETS] = Default::default();
        compute.move_mark(part)?;
        travel.follow(part)?;
        for turn in turns(chunks.num_chunks) {
            match turn {
                // Its tokens, behind the combine that had these buffers before
                Turn::Dispatch(chunk) => {
                    let set = set_of(chunk);
                    let of_step = (chunks.is_one_cut && chunk == 0).then_some(0..brought.num_tokens);
                    let tokens = chunks.tokens(chunk, brought.num_tokens);
                    let tokens =
                        DeviceTokens { values, ids, weights, tokens, num_topk, step, chunk, of_step, live_tokens: 0 };
                    world.fault(Stage::Dispatch)?;
                    if world.has_fault(Stage::Experts, &Action::Poison) {
                        sets[set].poison(travel)?;
                    }
                    timers.mark_edge(travel, chunk, Edge::Dispatch)?;
                    let mut handle = transport.dispatch(world, sets[set], &tokens, chunks.chunk_tokens)?;
                    timers.mark_edge(travel, chunk, Edge::Dispatched)?;
                    travel.move_mark(&mut unpacked[set])?;
                    self.count_chunk(&handle.received, (handle.num_packed, handle.num_sent_remote), stats);
                    rows_of_step = handle.rows_of_step.take().or(rows_of_step);
                    under_way[set] = Some(UnderWay { handle, tokens });
                }
                Turn::Experts(chunk) => {
                    let set = set_of(chunk);
                    let Some(UnderWay { handle, .. }) = &under_way[set] else { continue };
                    world.fault(Stage::Experts)?;
                    compute.note(&computed[set])?;
                    compute.follow(&unpacked[set])?;
                    timers.mark_edge(compute, chunk, Edge::Experts)?;
                    self.queue_chunk(sets[set], handle, rows_of_step.as_deref())?;
                    timers.mark_edge(compute, chunk, Edge::Computed)?;
                    compute.move_mark(&mut computed[set])?;
                }
                // Its rows, under the experts of the next one
                Turn::Combine(chunk) => {
                    let set = set_of(chunk);
                    let Some(UnderWay { handle, tokens }) = under_way[set].take() else { continue };
                    world.fault(Stage::Combine)?;
                    travel.follow(&computed[set])?;
                    timers.mark_edge(travel, chunk, Edge::Combine)?;
                    transport.combine(world, sets[set], &handle, (&tokens, chunks.chunk_tokens), out)?;
                    timers.mark_edge(travel, chunk, Edge::Combined)?;
                }
            }
        }
        let [even, odd] = sets;
        even.queue_counts(travel, counts)?;
        odd.queue_counts(travel, odd_counts)?;
        *is_counted = false;
        travel.move_mark(meet)?;
        compute.follow(meet)?;
        Ok(experts.queue_evidence()?)
    }

    /// Queues the experts of a chunk that came as `handle` says, of a step in which they have `rows_of_step` where that is known.
    fn queue_chunk(
        &self,
        buffers: &mut Buffers,
        handle: &DeviceHandle,
        rows_of_step: Option<&[usize]>,
    ) -> Result<(), LayerError> {
        let expert_offsets = &handle.received.expert_offsets[..];
        grow(&mut buffers.rows, handle.received.total_rows() * self.geometry.expert_hidden)?;
        let token_scale = self.input_scale.unwrap_or(1.0);
        let Buffers { tokens, row_token, rows, .. } = buffers;
        let num_spare_multiprocessors = NUM_TRAVEL_MULTIPROCESSORS;
        let beside = Beside { rows_of_all: rows_of_step, num_spare_multiprocessors };
        let batch = DeviceBatch { tokens, token_scale, row_token, expert_offsets, beside };
        Ok(self.experts_on_device()?.queue(&batch, rows)?)
    }
}

#[cfg(test)]
mod tests;
