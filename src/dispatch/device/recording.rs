//! Dispatch and combine recorded as a graph, round behind round, for those who time them alone: no host is in a replay, and what
//! ranks wait for each other in a round aligns them for the next.

use std::time::Duration;

use super::{Buffers, DeviceTokens, DeviceTransport, Echo, LiveExtent, LiveStep};
use crate::cuda::{CudaError, DeviceBuffer, Event, Graph, Stream};
use crate::dispatch::carrier::CarryError;
use crate::dispatch::nvlink::Push;
use crate::gpu::{Gpu, GpuError, num_grown};
use crate::world::World;

/// What a recording is of.
pub struct Recorded<'a> {
    /// How tokens travel.
    pub transport: &'a DeviceTransport,
    /// Experts.
    pub echo: &'a Echo,
    /// What they travel in.
    pub buffers: &'a mut Buffers,
    /// This rank's, as many as it brings.
    pub tokens: DeviceTokens<'a>,
    /// Where sums come to.
    pub out: &'a mut DeviceBuffer<f32>,
    /// What all ranks bring.
    pub extent: LiveExtent,
}

/// Rounds that can be replayed while what they work on is borrowed.
pub struct Recording<'a> {
    gpu: Gpu,
    of: Recorded<'a>,
    rounds: Vec<Round>,
    graph: Option<(Graph, u64)>,
}

/// What a round has for itself: its flags hold another word than those of the round before.
struct Round {
    live: LiveStep,
    /// Before dispatch, behind it, before combine, behind it.
    marks: [Event; 4],
}

impl Round {
    fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let mark = || Event::new(gpu.device());
        Ok(Self { live: LiveStep::new(gpu)?, marks: [mark()?, mark()?, mark()?, mark()?] })
    }
}

/// What a round took on this rank's device.
#[derive(Debug, Clone, Copy)]
pub struct RoundTimes {
    /// From tokens to rows as experts read them.
    pub dispatch: Duration,
    /// From experts' rows to sums at home.
    pub combine: Duration,
}

impl<'a> Recording<'a> {
    /// Runs `num_rounds` rounds of step 0, and records them; collective. None, and nothing done, where a host has to follow.
    ///
    /// # Errors
    /// If there is no memory, the driver fails, or tokens do not come.
    pub fn new((world, gpu): (&World, &Gpu), of: Recorded<'a>, num_rounds: usize) -> Result<Option<Self>, CarryError> {
        if !of.transport.can_go_alone() {
            return Ok(None);
        }
        let rounds = (0..num_rounds).map(|_| Round::new(gpu)).collect::<Result<_, _>>()?;
        let mut made = Self { gpu: gpu.clone(), of, rounds, graph: None };
        let pushes = made.begin(world, 0)?;
        made.queue(&pushes, false)?;
        made.finish(world)?;
        let num_grown = num_grown();
        let graph = Graph::capture(gpu.stream(), || made.queue(&pushes, true))?;
        made.graph = Some((graph, num_grown));
        Ok(Some(made))
    }

    /// Replays all rounds, and waits for them; collective.
    ///
    /// # Errors
    /// If tokens do not come, or the driver fails.
    pub fn replay(&mut self, world: &World, step: u64) -> Result<Vec<RoundTimes>, CarryError> {
        let pushes = self.begin(world, step)?;
        match &self.graph {
            // SAFETY: buffers, tokens and sums are borrowed as long as this lives, no memory has grown, and the replay before
            // is over.
            Some((graph, grown)) if *grown == num_grown() => unsafe { graph.launch(self.gpu.stream()) }?,
            _ => self.queue(&pushes, false)?,
        }
        self.finish(world)?;
        let time = |from: &Event, to: &Event| to.elapsed_since(from);
        let times = |Round { marks: [begin, dispatched, computed, end], .. }: &Round| -> Result<_, CarryError> {
            Ok(RoundTimes { dispatch: time(begin, dispatched)?, combine: time(computed, end)? })
        };
        self.rounds.iter().map(times).collect()
    }

    /// What the last round has given, `[num_tokens, hidden]`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn sums(&self) -> Result<Vec<f32>, CudaError> {
        self.of.out.download(self.gpu.stream())
    }

    fn begin(&mut self, world: &World, step: u64) -> Result<Vec<Option<Push>>, CarryError> {
        let Recorded { transport, extent, tokens, .. } = &self.of;
        let mut pushes = Vec::new();
        for round in &mut self.rounds {
            let push = transport.begin_alone(world, *extent, step)?;
            round.live.begin(&self.gpu, push.as_ref().map_or(0, Push::word), tokens.tokens.len())?;
            pushes.push(push);
        }
        Ok(pushes)
    }

    fn queue(&mut self, pushes: &[Option<Push>], in_graph: bool) -> Result<(), CarryError> {
        let Recorded { transport, echo, buffers, tokens, out, extent } = &mut self.of;
        let stream = self.gpu.stream();
        let mark = |event: &Event| record(event, stream, in_graph);
        for (Round { live, marks }, push) in self.rounds.iter().zip(pushes) {
            let tokens = DeviceTokens { live_tokens: live.tokens_address(), ..tokens.clone() };
            let (extent, push) = (*extent, push.as_ref());
            mark(&marks[0])?;
            transport.queue_dispatch(buffers, live, &tokens, (extent, push))?;
            mark(&marks[1])?;
            echo.queue_live(buffers, extent.max_rows(), live)?;
            mark(&marks[2])?;
            transport.queue_combine(buffers, live, &tokens, (extent, push), out)?;
            mark(&marks[3])?;
        }
        Ok(())
    }

    /// Waits, and holds what the last round found to what ranks told.
    fn finish(&mut self, world: &World) -> Result<(), CarryError> {
        let Recorded { transport, buffers, tokens, extent, .. } = &self.of;
        let Some(Round { live, .. }) = self.rounds.last_mut() else { return Ok(()) };
        live.queue_numbers(&self.gpu)?;
        transport.wait_for_all(world)?;
        self.gpu.stream().synchronise()?;
        transport.finish_alone(world, (buffers, live), (*extent, tokens.tokens.len()))?;
        Ok(())
    }
}

fn record(event: &Event, stream: &Stream, in_graph: bool) -> Result<(), CudaError> {
    if in_graph { event.record_in_graph(stream) } else { event.record(stream) }
}
