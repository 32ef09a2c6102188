//! Dispatch and combine between devices: packed and unpacked by kernels, from device memory to device memory. The same bytes,
//! orders and sums as [`super::transport`] has on hosts.
//!
//! What is packed is carried ([`Way::Carried`]), or packed where it is read, in another rank's memory ([`Way::Pushed`]). A chunk
//! waits for its device once: for the counts of what leaves, which hosts then tell each other, or for those of what comes, which
//! devices have told each other. All other work is queued without waiting; carriers that go through hosts wait where they have
//! to. In two levels ([`TwoLevels`]) what is carried is passed on once more.

mod buffers;
mod combining;
mod echo;
mod few;
mod live;
mod recording;
mod stages;
mod two_level;

use std::ops::Range;
use std::rc::Rc;
use std::time::Instant;

pub use buffers::Buffers;
pub use echo::Echo;
pub use live::{LiveExtent, LiveStep};
pub use recording::{Recorded, Recording, RoundTimes};
pub use stages::{Forms, Stages};
pub use two_level::TwoLevels;

use few::Few;

use crate::config::Transport;
use crate::cuda::DeviceBuffer;
use crate::dispatch::carrier::{Carrier, CarryError, Runs};
use crate::dispatch::combine::CombineMode;
use crate::dispatch::counts::{Miscount, ReceivedCounts, SentCounts, message_len};
use crate::dispatch::nvlink::{Nvlink, Push};
use crate::dispatch::overlap::set_of;
use crate::dispatch::region::{Flag, Rooms, RowSizes};
use crate::gpu::{Gpu, GpuError, grow};
use crate::ids::{LayerIdx, Rank};
use crate::jit::kernels::nvlink::{Hear, Run};
use crate::world::{Cargo, Exchanged, World};

/// Tokens of a rank that go at once, on its device.
#[derive(Debug, Clone)]
pub struct DeviceTokens<'a> {
    /// `[.., hidden]` values, of which those of `tokens` go.
    pub values: &'a DeviceBuffer<f32>,
    /// `[.., num_topk]` experts; -1 masks a slot.
    pub ids: &'a DeviceBuffer<i32>,
    /// `[.., num_topk]`
    pub weights: &'a DeviceBuffer<f32>,
    /// Which of them go.
    pub tokens: Range<usize>,
    /// Slots of a token.
    pub num_topk: usize,
    /// Counts the steps of a run.
    pub step: u64,
    /// Counts the chunks of a step.
    pub chunk: usize,
    /// The tokens of the whole step, where this is its first chunk and rows of all of them are wanted.
    pub of_step: Option<Range<usize>>,
    /// Address on the device of how many of them there are, where it alone knows; 0: all of `tokens`.
    pub live_tokens: u64,
}

/// How what leaves comes to its ranks. All ranks of a session have the same.
#[derive(Debug, Clone)]
pub enum Way {
    /// Packed here and carried there.
    Carried(Rc<dyn Carrier>),
    /// Packed there.
    Pushed(Rc<Nvlink>),
}

impl Way {
    /// Its name in deployments and reports.
    #[must_use]
    pub fn transport(&self) -> Transport {
        match self {
            Self::Carried(carrier) => carrier.transport(),
            Self::Pushed(_) => Transport::Nvlink,
        }
    }

    /// Lets go of what it holds with other ranks: see [`Carrier::close`].
    pub fn close(&self) {
        match self {
            Self::Carried(carrier) => carrier.close(),
            Self::Pushed(nvlink) => nvlink.close(),
        }
    }
}

/// Counts of a chunk that is under way, which combine needs.
#[derive(Debug)]
pub struct DeviceHandle {
    /// What left.
    pub sent: SentCounts,
    /// What has arrived, and the rows of it.
    pub received: ReceivedCounts,
    /// `[num_local_experts]` rows of the whole step, where [`DeviceTokens::of_step`] asks.
    pub rows_of_step: Option<Vec<usize>>,
    /// Tokens that were packed from values: in two levels once a node.
    pub num_packed: usize,
    /// Tokens sent to other ranks: in two levels in both hops.
    pub num_sent_remote: usize,
    /// Where rows go home to, where they are packed there.
    pushed: Option<Pushed>,
}

#[derive(Debug)]
struct Pushed {
    push: Push,
    /// `[num_ranks]` the row of each rank's home at which this one's begin.
    home_starts: Vec<usize>,
}

impl DeviceHandle {
    fn in_one_level(world: &World, (sent, received): (SentCounts, ReceivedCounts), pushed: Option<Pushed>) -> Self {
        let (num_packed, num_sent_remote) = (sent.num_tokens.iter().sum(), sent.num_remote(world.rank()));
        Self { sent, received, rows_of_step: None, num_packed, num_sent_remote, pushed }
    }
}

/// Carries the tokens of one layer.
#[derive(Debug)]
pub struct DeviceTransport {
    gpu: Gpu,
    stages: Stages,
    way: Way,
    layer: LayerIdx,
    /// Where tokens go in two levels.
    two_levels: Option<TwoLevels>,
    /// Chunks of a step take turns in two sets of what lies in other ranks' memory twice.
    takes_turns: bool,
}

impl DeviceTransport {
    /// Carries tokens of `layer` as `stages` pack them, in the lane that these were loaded for.
    #[must_use]
    pub fn new(gpu: &Gpu, stages: Stages, way: Way, layer: LayerIdx) -> Self {
        Self { gpu: gpu.clone(), stages, way, layer, two_levels: None, takes_turns: false }
    }

    /// For steps whose chunks overlap: two are under way.
    #[must_use]
    pub fn in_turns(self) -> Self {
        Self { takes_turns: true, ..self }
    }

    /// In two levels, where there are any. Rows that are stored into other ranks' memory know one alone, so that no such layer is
    /// selected.
    #[must_use]
    pub fn with_levels(self, two_levels: Option<TwoLevels>) -> Self {
        Self { two_levels, ..self }
    }

    /// Waits for all that is queued where it may wait for peers that are gone: whoever waits for the device without a limit does
    /// this first.
    ///
    /// # Errors
    /// If peers were waited for in vain.
    pub fn wait_for_all(&self, world: &World) -> Result<(), CarryError> {
        match &self.way {
            Way::Carried(_) => Ok(()),
            Way::Pushed(nvlink) => Ok(nvlink.wait_for_all((world, &self.gpu), "rows of a step")?),
        }
    }

    /// Sends this rank's tokens to their experts' ranks and receives those that come here, unpacked in `buffers`;
    /// collective. `chunk_tokens` bounds every rank's tokens and is equal on all.
    ///
    /// # Errors
    /// If the carrier or the GPU fails, on its rank, which then has to end the job.
    pub fn dispatch(
        &self,
        world: &World,
        buffers: &mut Buffers,
        tokens: &DeviceTokens<'_>,
        chunk_tokens: usize,
    ) -> Result<DeviceHandle, CarryError> {
        match (&self.way, &self.two_levels) {
            (Way::Carried(carrier), None) => self.dispatch_carried(world, buffers, tokens, (&**carrier, chunk_tokens)),
            (Way::Carried(carrier), Some(levels)) => {
                self.dispatch_in_two_levels(world, buffers, (tokens, levels), (&**carrier, chunk_tokens))
            }
            (Way::Pushed(nvlink), _) => {
                let dispatched = self.dispatch_pushed(world, buffers, tokens, (nvlink, chunk_tokens));
                dispatched.map_err(|error| nvlink.alarm().map_or(error, CarryError::from))
            }
        }
    }

    fn dispatch_carried(
        &self,
        world: &World,
        buffers: &mut Buffers,
        tokens: &DeviceTokens<'_>,
        (carrier, chunk_tokens): (&dyn Carrier, usize),
    ) -> Result<DeviceHandle, CarryError> {
        self.count_step(buffers, tokens)?;
        self.stages.count(buffers, tokens)?;
        self.gpu.move_mark(&mut buffers.counted)?;
        // Packing needs no count of the host's: the device goes on while ranks tell each other.
        self.stages.pack(buffers, tokens, None)?;
        self.gpu.wait(world, "count of what leaves", &buffers.counted)?;
        let rows_of_step = self.tell_step(world, buffers, tokens)?;
        let (sent, received) = self.tell(world, &buffers.host_totals, (tokens.tokens.len(), tokens.num_topk))?;
        let row_bytes = self.stages.forms().travel.layout(tokens.num_topk).row_bytes();
        let max_run_bytes = chunk_tokens * row_bytes;
        let counts = [scaled(&sent.num_tokens, row_bytes), scaled(&received.num_tokens, row_bytes)];
        world.count_carried_to(Cargo::Tokens, &counts[0]);
        let mut arrived = buffers.packed.address();
        if world.size() > 1 {
            grow(&mut buffers.arrived, received.total_tokens() * row_bytes)?;
            self.carry(world, (carrier, &buffers.packed, &mut buffers.arrived), &counts, max_run_bytes)?;
            arrived = buffers.arrived.address();
        }
        self.stages.unpack(buffers, &received, tokens.num_topk, Run::whole(arrived))?;
        Ok(DeviceHandle { rows_of_step, ..DeviceHandle::in_one_level(world, (sent, received), None) })
    }

    /// Tells every rank what comes of `size` tokens and slots, of the device's counts, and hears what the others tell; collective.
    fn tell(
        &self,
        world: &World,
        words: &[u32],
        size: (usize, usize),
    ) -> Result<(SentCounts, ReceivedCounts), Miscount> {
        let placement = self.stages.forms().travel.placement;
        let sent = SentCounts::new(placement, words, size)?;
        let lengths: Vec<usize> =
            (0..world.size()).map(|rank| message_len(placement, Rank::from_index(rank))).collect();
        let mine = vec![message_len(placement, world.rank()); world.size()];
        let told = world.all_to_all_u32(&sent.messages(placement), &lengths, &mine);
        let received = ReceivedCounts::new(placement.local_experts(world.rank()).len(), &told);
        Ok((sent, received))
    }

    /// Queues counting the whole step where its rows are wanted, before the chunk itself is counted.
    fn count_step(&self, buffers: &mut Buffers, tokens: &DeviceTokens<'_>) -> Result<(), GpuError> {
        let Some(step) = tokens.of_step.clone() else { return Ok(()) };
        self.stages.count_step(buffers, &DeviceTokens { tokens: step, ..tokens.clone() })
    }

    /// The same for devices that tell each other: the address of what was counted; 0 where nothing is wanted.
    fn count_step_for_device(&self, buffers: &mut Buffers, tokens: &DeviceTokens<'_>) -> Result<u64, GpuError> {
        self.count_step(buffers, tokens)?;
        Ok(if tokens.of_step.is_some() { buffers.step_totals.address() } else { 0 })
    }

    /// The rows of this rank's experts in it, once the counts have come; collective, where they are wanted.
    fn tell_step(
        &self,
        world: &World,
        buffers: &Buffers,
        tokens: &DeviceTokens<'_>,
    ) -> Result<Option<Vec<usize>>, Miscount> {
        let Some(step) = &tokens.of_step else { return Ok(None) };
        let (_, received) = self.tell(world, &buffers.host_step, (step.len(), tokens.num_topk))?;
        Ok(Some(received.expert_offsets.windows(2).map(|offsets| offsets[1] - offsets[0]).collect()))
    }

    fn dispatch_pushed(
        &self,
        world: &World,
        buffers: &mut Buffers,
        tokens: &DeviceTokens<'_>,
        (nvlink, chunk_tokens): (&Nvlink, usize),
    ) -> Result<DeviceHandle, CarryError> {
        let travel = self.stages.forms().travel;
        let (placement, num_topk) = (travel.placement, tokens.num_topk);
        let row_bytes = travel.layout(num_topk).row_bytes();
        let place = (world, &self.gpu);
        // Room for all chunks of a step before its first is under way.
        let (second_home, home) = if self.takes_turns { (chunk_tokens, set_of(tokens.chunk)) } else { (0, 0) };
        let rooms = Rooms::new(&self.row_sizes(world.size(), num_topk), [chunk_tokens, second_home]);
        let push = nvlink.begin(place, rooms, (self.layer, tokens.step), home)?;
        let of_step = self.count_step_for_device(buffers, tokens)?;
        let push = push.telling_step(of_step != 0);
        let is_tagged = self.are_tagged((chunk_tokens, num_topk));
        if is_tagged {
            let few = Few { max_tokens: chunk_tokens, live: 0, of_step };
            self.dispatch_few((world, nvlink), buffers, tokens, (&push, few))?;
            self.gpu.move_mark(&mut buffers.counted)?;
        } else {
            self.stages.count_and_tell(buffers, tokens, Some(nvlink.telling(&push, of_step)?), true)?;
            // The host has its counts before tokens are packed, so that they are heard by themselves.
            nvlink.hear(place, &push, Flag::Counts)?;
            self.gpu.move_mark(&mut buffers.counted)?;
            self.stages.pack(buffers, tokens, Some((&push, Hear::none())))?;
            // Hearing needs no count of the host's either.
            nvlink.hear(place, &push, Flag::Tokens)?;
        }
        self.gpu.count_wait();
        nvlink.wait(place, "counts of what comes", &buffers.counted)?;
        let sent = SentCounts::new(placement, &buffers.host_totals, (tokens.tokens.len(), num_topk))?;
        let num_local_experts = placement.local_experts(world.rank()).len();
        let told = nvlink.told(num_local_experts, (chunk_tokens, num_topk))?;
        let words: Vec<u32> = told.iter().flat_map(|told| told.counts.iter().copied()).collect();
        let received = ReceivedCounts::new(num_local_experts, &words);
        count_pushed(world, Cargo::Tokens, [&sent.num_tokens, &received.num_tokens], row_bytes);
        if !is_tagged {
            self.stages.unpack(buffers, &received, num_topk, push.arrived(&received.num_tokens, row_bytes))?;
        }
        let home_starts = told.iter().map(|told| told.home_start).collect();
        let rows_of = |expert: usize| told.iter().map(|told| told.rows_of_step[expert] as usize).sum();
        let rows_of_step = (of_step != 0).then(|| (0..num_local_experts).map(rows_of).collect());
        let pushed = Some(Pushed { push, home_starts });
        Ok(DeviceHandle { rows_of_step, ..DeviceHandle::in_one_level(world, (sent, received), pushed) })
    }

    /// What decides the room that its tokens and rows take in other ranks' memory.
    fn row_sizes(&self, num_ranks: usize, num_topk: usize) -> RowSizes {
        let travel = self.stages.forms().travel;
        let (token_bytes, return_bytes) = (travel.layout(num_topk).row_bytes(), self.return_bytes());
        RowSizes { num_ranks, num_topk, token_bytes, return_bytes, per_slot: travel.mode == CombineMode::Slot }
    }

    /// Bytes of a row that comes back.
    fn return_bytes(&self) -> usize {
        let row_form = self.stages.forms().travel.row_form;
        row_form.form.row_bytes(row_form.hidden)
    }

    /// Sends the computed rows, `buffers.rows`, back and writes the sums of those that come home to the rows of `tokens` in
    /// `out` `[.., hidden]`; collective. `tokens` and `chunk_tokens` are those of the dispatch.
    ///
    /// # Errors
    /// If the carrier or the GPU fails, on its rank, which then has to end the job.
    pub fn combine(
        &self,
        world: &World,
        buffers: &mut Buffers,
        handle: &DeviceHandle,
        (tokens, chunk_tokens): (&DeviceTokens<'_>, usize),
        out: &mut DeviceBuffer<f32>,
    ) -> Result<(), CarryError> {
        let (travel, row_bytes) = (self.stages.forms().travel, self.return_bytes());
        let (num_back, num_home) = match travel.mode {
            CombineMode::Slot => (&handle.received.num_rows, &handle.sent.num_slots),
            CombineMode::Rank => (&handle.received.num_tokens, &handle.sent.num_tokens),
        };
        let home = match (&self.way, &handle.pushed) {
            (Way::Pushed(nvlink), Some(Pushed { push, home_starts })) => {
                let homes = push.homes(num_back, home_starts, row_bytes);
                let homes = Some((homes, push.raise(Flag::Rows)));
                self.stages.give_back(buffers, &handle.received, tokens.num_topk, homes)?;
                count_pushed(world, Cargo::Rows, [num_back, num_home], row_bytes);
                nvlink.hear((world, &self.gpu), push, Flag::Rows)?;
                push.home()
            }
            (Way::Carried(carrier), _) if world.size() > 1 => {
                self.stages.give_back(buffers, &handle.received, tokens.num_topk, None)?;
                let counts = [scaled(num_back, row_bytes), scaled(num_home, row_bytes)];
                world.count_carried_to(Cargo::Rows, &counts[0]);
                grow(&mut buffers.home, counts[1].iter().sum())?;
                let max_rows = chunk_tokens * travel.mode.max_rows(tokens.num_topk);
                let (back, home) = (&buffers.back, &mut buffers.home);
                self.carry(world, (&**carrier, back, home), &counts, max_rows * row_bytes)?;
                buffers.home.address()
            }
            _ => {
                world.count_carried_to(Cargo::Rows, &scaled(num_back, row_bytes));
                return Ok(self.stages.add_own(buffers, tokens, out)?);
            }
        };
        Ok(self.stages.add(buffers, tokens, home, out)?)
    }

    /// The bytes of all ranks to where they belong, timed for the log; a rank's own by a copy on its device.
    fn carry(
        &self,
        world: &World,
        (carrier, sent, arrived): (&dyn Carrier, &DeviceBuffer<u8>, &mut DeviceBuffer<u8>),
        [sent_counts, arrived_counts]: &[Vec<usize>; 2],
        max_run_bytes: usize,
    ) -> Result<(), CarryError> {
        let (begin, before) = (Instant::now(), world.exchanged().sent_bytes);
        let rank = world.rank().index();
        let sent = Runs { buffer: sent, counts: sent_counts };
        let arrived = Runs { buffer: arrived, counts: arrived_counts };
        arrived.buffer.copy_from(self.gpu.stream(), arrived.range(rank).start, sent.buffer, sent.range(rank))?;
        carrier.exchange(world, &self.gpu, sent, arrived, max_run_bytes)?;
        let (sent_bytes, us) = (world.exchanged().sent_bytes - before, begin.elapsed().as_secs_f64() * 1e6);
        tracing::debug!(carrier = carrier.name(), sent_bytes, us, "carried or queued");
        Ok(())
    }
}

/// Counts what leaves and what comes, rows of `row_bytes` for and from each rank, as [`DeviceTransport::carry`] does.
fn count_pushed(world: &World, cargo: Cargo, [sent, received]: [&[usize]; 2], row_bytes: usize) {
    let of_others = |counts: &[usize]| (counts.iter().sum::<usize>() - counts[world.rank().index()]) as u64;
    let (sent_bytes, received_bytes) = (of_others(sent) * row_bytes as u64, of_others(received) * row_bytes as u64);
    world.count_carried_to(cargo, &scaled(sent, row_bytes));
    world.count_carried(Exchanged { sent_bytes, received_bytes, rounds: 1 });
    tracing::debug!(carrier = "nvlink", sent_bytes, "carried or queued");
}

fn scaled(counts: &[usize], bytes: usize) -> Vec<usize> {
    counts.iter().map(|&n| n * bytes).collect()
}

#[cfg(test)]
mod tests;
