//! When the device came to places of its stream: the host's clock sees only when work was queued.

use std::time::Duration;

use crate::cuda::{CudaError, Event};
use crate::gpu::Gpu;

use super::PhaseTimes;

/// Places of a chunk: its begin, tokens unpacked, rows computed, sums made.
const PER_CHUNK: usize = 4;

/// Marks of the chunks of a step; kept between steps.
#[derive(Debug, Default)]
pub(super) struct Timers {
    events: Vec<Event>,
    num_marked: usize,
}

impl Timers {
    /// Marks the next place.
    pub fn mark(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        self.mark_as(gpu, false)
    }

    /// The same, where `in_graph` says that work is being recorded.
    pub fn mark_as(&mut self, gpu: &Gpu, in_graph: bool) -> Result<(), CudaError> {
        if self.num_marked == self.events.len() {
            self.events.push(Event::new(gpu.device())?);
        }
        let event = &self.events[self.num_marked];
        if in_graph {
            event.record_in_graph(gpu.stream())?
        } else {
            event.record(gpu.stream())?
        };
        self.num_marked += 1;
        Ok(())
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
    pub fn take(&mut self, times: &mut PhaseTimes) -> Result<(), CudaError> {
        let marked = &self.events[..std::mem::take(&mut self.num_marked)];
        let between =
            |events: &[Event], at: usize| -> Result<Duration, CudaError> { events[at + 1].elapsed_since(&events[at]) };
        for chunk in marked.chunks_exact(PER_CHUNK) {
            let [dispatch, experts, combine] = [between(chunk, 0)?, between(chunk, 1)?, between(chunk, 2)?];
            tracing::debug!(?dispatch, ?experts, ?combine, "a chunk on the device");
            times.dispatch += dispatch;
            times.experts += experts;
            times.combine += combine;
        }
        Ok(())
    }
}
