//! When the device came to places of its streams: the host's clock sees only when work was queued.

use crate::cuda::{CudaError, Event};
use crate::gpu::Gpu;

use super::LayerStats;

/// Places of a chunk: its begin, tokens unpacked, rows computed, sums made.
const PER_CHUNK: usize = 4;

/// Places of a chunk that travels while another is computed: of which lane they are is the caller's to know.
#[derive(Debug, Clone, Copy)]
pub(super) enum Edge {
    Dispatch,
    Dispatched,
    Experts,
    Computed,
    Combine,
    Combined,
}

impl Edge {
    const NUM: usize = 6;
}

/// Marks of the chunks of a step; kept between steps.
#[derive(Debug, Default)]
pub(super) struct Timers {
    events: Vec<Event>,
    num_marked: usize,
    is_overlapped: bool,
}

impl Timers {
    /// Marks the next place.
    pub fn mark(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        self.mark_as(gpu, false)
    }

    /// The same, where `in_graph` says that work is being recorded.
    pub fn mark_as(&mut self, gpu: &Gpu, in_graph: bool) -> Result<(), CudaError> {
        let event = self.event(gpu, self.num_marked)?;
        if in_graph {
            event.record_in_graph(gpu.stream())?
        } else {
            event.record(gpu.stream())?
        }
        self.num_marked += 1;
        Ok(())
    }

    /// Marks a place of a chunk, in the lane that has it, of a step whose chunks overlap.
    pub fn mark_edge(&mut self, lane: &Gpu, chunk: usize, edge: Edge) -> Result<(), CudaError> {
        let at = chunk * Edge::NUM + edge as usize;
        self.event(lane, at)?.record(lane.stream())?;
        self.num_marked = self.num_marked.max(at + 1);
        self.is_overlapped = true;
        Ok(())
    }

    fn event(&mut self, gpu: &Gpu, at: usize) -> Result<&Event, CudaError> {
        while self.events.len() <= at {
            self.events.push(Event::new(gpu.device())?);
        }
        Ok(&self.events[at])
    }

    /// Forgets what was marked.
    pub fn restart(&mut self) {
        self.num_marked = 0;
    }

    /// The places of one chunk are marked, by work that was recorded before.
    pub fn set_marked(&mut self) {
        self.num_marked = PER_CHUNK;
    }

    /// Adds the times between the marks, which the device has passed, to their phases, and begins anew.
    ///
    /// What the device waits for counts: peers and the host's exchange of counts are part of dispatch.
    pub fn take(&mut self, stats: &mut LayerStats) -> Result<(), CudaError> {
        let marked = &self.events[..std::mem::take(&mut self.num_marked)];
        let (per_chunk, spans) = if std::mem::take(&mut self.is_overlapped) {
            (Edge::NUM, [(0, 1), (2, 3), (4, 5)])
        } else {
            (PER_CHUNK, [(0, 1), (1, 2), (2, 3)])
        };
        for chunk in marked.chunks_exact(per_chunk) {
            let time = |(begin, end): (usize, usize)| chunk[end].elapsed_since(&chunk[begin]);
            let [dispatch, experts, combine] = [time(spans[0])?, time(spans[1])?, time(spans[2])?];
            tracing::debug!(?dispatch, ?experts, ?combine, "a chunk on the device");
            stats.times.dispatch += dispatch;
            stats.times.experts += experts;
            stats.times.combine += combine;
        }
        if let [first, .., last] = marked {
            stats.routed += last.elapsed_since(first)?;
        }
        Ok(())
    }
}
