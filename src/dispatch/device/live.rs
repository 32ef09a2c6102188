//! Steps in which no host learns what comes: numbers lie on the device, everything is queued for the most that there may be, and
//! kernels follow the numbers. What is queued may be recorded, and replayed for other numbers.
//!
//! For one rank, and for ranks whose devices tell each other ([`Way::Pushed`]) and have a GPU each. Counts reach the host when
//! the step is over, for what it reports.

use std::mem::offset_of;

use bytemuck::Zeroable;

use super::combining::Back;
use super::few::{Few, Sides};
use super::stages::{LiveRuns, narrow};
use super::{Buffers, DeviceTokens, DeviceTransport, Way};
use crate::cuda::{DeviceBuffer, PinnedBuffer};
use crate::dispatch::carrier::CarryError;
use crate::dispatch::combine::CombineMode;
use crate::dispatch::counts::{ReceivedCounts, SentCounts};
use crate::dispatch::nvlink::Push;
use crate::dispatch::region::{Flag, MAX_PEERS, Rooms};
use crate::gpu::{Gpu, GpuError, grow};
use crate::jit::kernels::live::{FromHost, Live, SettleArgs};
use crate::jit::kernels::nvlink::{Hear, Run};
use crate::world::{Cargo, World};

/// Words of [`Live`] and of what the host writes of it.
const NUM_WORDS: usize = size_of::<Live>() / size_of::<u64>();
const HOST_WORDS: usize = size_of::<FromHost>() / size_of::<u64>();

/// Numbers of a step on the device, for all layers of a session one after the other.
#[derive(Debug)]
pub struct LiveStep {
    numbers: DeviceBuffer<u64>,
    from_host: PinnedBuffer<u64>,
    to_host: PinnedBuffer<u64>,
}

/// The most that there may be: from declared sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveExtent {
    /// Tokens of a rank.
    pub max_tokens: usize,
    /// Ranks.
    pub num_ranks: usize,
    /// Slots of a token.
    pub num_topk: usize,
}

impl LiveExtent {
    /// Tokens that come to a rank.
    #[must_use]
    pub fn max_received(&self) -> usize {
        self.max_tokens * self.num_ranks
    }

    /// Rows of a rank's experts, ids that repeat one included.
    #[must_use]
    pub fn max_rows(&self) -> usize {
        self.max_received() * self.num_topk
    }
}

/// What comes in a step that no host follows: whose tokens are waited for, where what they are is told, and what the host reads of
/// it when the step is over.
#[derive(Debug, Clone, Copy)]
pub(super) struct Coming {
    pub hear: Hear,
    pub settle: SettleArgs,
    /// Address of what left, on the device and on the host.
    pub totals: [u64; 2],
    pub num_totals: usize,
    /// Address on the host of what ranks told, and words of each; 0: this rank alone has counted.
    pub told: (u64, usize),
}

impl Coming {
    /// Of a step that hosts follow.
    pub fn nothing() -> Self {
        Self { hear: Hear::none(), settle: SettleArgs::none(), totals: [0; 2], num_totals: 0, told: (0, 0) }
    }
}

impl LiveStep {
    /// Of zeros.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let device = gpu.device();
        Ok(Self {
            numbers: DeviceBuffer::zeroed(gpu.stream(), NUM_WORDS)?,
            from_host: PinnedBuffer::zeroed(device, HOST_WORDS)?,
            to_host: PinnedBuffer::zeroed(device, NUM_WORDS)?,
        })
    }

    /// Queues what the host says of the step that comes. The step before is over.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn begin(&mut self, gpu: &Gpu, word: u64, num_tokens: usize) -> Result<(), GpuError> {
        let said = FromHost { word, num_tokens: narrow(num_tokens), unused: 0 };
        self.from_host.copy_from_slice(bytemuck::cast_slice(std::slice::from_ref(&said)));
        // SAFETY: written when the step before is over, that is when the host has waited for what is queued behind this.
        Ok(unsafe { self.numbers.upload_pinned(gpu.stream(), 0, &self.from_host) }?)
    }

    /// Queues the way of all numbers to the host.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn queue_numbers(&mut self, gpu: &Gpu) -> Result<(), GpuError> {
        // SAFETY: whoever reads them has waited for the stream.
        Ok(unsafe { self.numbers.download_pinned(gpu.stream(), 0, &mut self.to_host) }?)
    }

    /// The numbers, once the host has waited for the stream behind [`LiveStep::queue_numbers`].
    fn numbers(&self) -> Live {
        let mut live = Live::zeroed();
        bytemuck::bytes_of_mut(&mut live).copy_from_slice(bytemuck::cast_slice(&self.to_host));
        live
    }

    fn at(&self, offset: usize) -> u64 {
        self.numbers.address() + offset as u64
    }

    /// Where the number of this rank's tokens lies, a u32.
    #[must_use]
    pub fn tokens_address(&self) -> u64 {
        self.at(offset_of!(Live, from_host) + offset_of!(FromHost, num_tokens))
    }

    /// Where the number of rows of this rank's experts lies, likewise.
    #[must_use]
    pub fn rows_address(&self) -> u64 {
        self.at(offset_of!(Live, num_rows))
    }

    fn word_address(&self) -> u64 {
        self.at(offset_of!(Live, from_host) + offset_of!(FromHost, word))
    }
}

impl DeviceTransport {
    /// Whether steps may be queued without a host that follows them.
    #[must_use]
    pub fn can_go_alone(&self) -> bool {
        match &self.way {
            Way::Carried(_) => self.stages.forms().travel.placement.num_ranks() == 1,
            Way::Pushed(nvlink) => !nvlink.shares_gpus(),
        }
    }

    /// Begins a step: what its flags hold; collective.
    ///
    /// # Errors
    /// If memory that other ranks store into has to grow and can't.
    pub fn begin_alone(&self, world: &World, extent: LiveExtent, step: u64) -> Result<Option<Push>, CarryError> {
        let Way::Pushed(nvlink) = &self.way else { return Ok(None) };
        // Replays know one home: their steps are whole.
        let rooms = Rooms::new(&self.row_sizes(extent.num_ranks, extent.num_topk), [extent.max_tokens, 0]);
        Ok(Some(nvlink.begin((world, &self.gpu), rooms, (self.layer, step), 0)?))
    }

    /// Queues what brings this rank's tokens to their experts and those of others here. `tokens` are all that there may be, and
    /// `push` is of a step that [`DeviceTransport::begin_alone`] has begun, of whose like all are.
    ///
    /// # Errors
    /// If there is no memory or the driver fails.
    pub fn queue_dispatch(
        &self,
        buffers: &mut Buffers,
        live: &LiveStep,
        tokens: &DeviceTokens<'_>,
        (extent, push): (LiveExtent, Option<&Push>),
    ) -> Result<(), CarryError> {
        let push = push.map(|push| push.with_live_word(live.word_address()));
        if let (Some(push), Way::Pushed(nvlink)) = (&push, &self.way)
            && self.are_tagged((extent.max_tokens, extent.num_topk))
        {
            let few = Few { max_tokens: extent.max_tokens, live: live.at(0), of_step: 0 };
            return Ok(self.queue_few(buffers, tokens, (nvlink, push), (few, Sides::Both))?);
        }
        let (mut hear, mut told) = (Hear::none(), (0, 0));
        if let (Some(push), Way::Pushed(nvlink)) = (&push, &self.way) {
            self.stages.count_and_tell(buffers, tokens, Some(nvlink.telling(push, 0)?), false)?;
            told = nvlink.host_told(push)?;
            self.stages.pack(buffers, tokens, Some((push, nvlink.hearing(push, Flag::Counts)?)))?;
            hear = nvlink.hearing(push, Flag::Tokens)?;
        } else {
            self.stages.count_and_tell(buffers, tokens, None, false)?;
            self.stages.pack(buffers, tokens, None)?;
        }
        let settle = self.settle(buffers, live, (extent, push.as_ref()))?;
        let totals = [buffers.totals.address(), buffers.host_totals.address()];
        let coming = Coming { hear, settle, totals, num_totals: buffers.totals.len(), told };
        let runs = if push.is_some() { live.at(offset_of!(Live, arrived)) } else { 0 };
        let live = LiveRuns { runs, count: live.at(offset_of!(Live, num_received)) };
        let packed = Run::whole(buffers.packed.address());
        let most = (extent.max_received(), extent.max_rows());
        Ok(self.stages.queue_unpack(buffers, most, extent.num_topk, packed, (live, Some(coming)))?)
    }

    /// How what comes is found, from what all ranks told; one rank has counted it.
    fn settle(
        &self,
        buffers: &mut Buffers,
        live: &LiveStep,
        (extent, push): (LiveExtent, Option<&Push>),
    ) -> Result<SettleArgs, GpuError> {
        let travel = self.stages.forms().travel;
        let num_experts = self.stages.num_experts();
        grow(&mut buffers.expert_offsets, num_experts + 1)?;
        // Of one rank: tokens, slots, rows of each expert.
        let own = ((buffers.totals.address(), 0), (0, 0));
        let ((told, num_words), (arrived_at, room_bytes)) = push.map_or(own, Push::own_parts);
        Ok(SettleArgs {
            homes: push.map_or([0; MAX_PEERS], Push::home_addresses),
            told,
            live: live.at(0),
            expert_offsets: buffers.expert_offsets.address(),
            arrived_at,
            room_bytes: room_bytes as u64,
            row_bytes: travel.layout(extent.num_topk).row_bytes() as u64,
            return_bytes: self.return_bytes() as u64,
            num_words: narrow(num_words),
            num_ranks: narrow(extent.num_ranks),
            num_experts: narrow(num_experts),
            per_slot: u32::from(travel.mode == CombineMode::Slot),
            max_tokens: narrow(extent.max_tokens),
            max_rows: narrow(extent.max_rows()),
        })
    }

    /// Queues the way home of `buffers.rows` and the sums of what comes home, into the rows of `tokens` in `out`.
    ///
    /// # Errors
    /// If there is no memory or the driver fails.
    pub fn queue_combine(
        &self,
        buffers: &mut Buffers,
        live: &LiveStep,
        tokens: &DeviceTokens<'_>,
        (extent, push): (LiveExtent, Option<&Push>),
        out: &mut DeviceBuffer<f32>,
    ) -> Result<(), CarryError> {
        let (most, count) = match self.stages.forms().travel.mode {
            CombineMode::Slot => (extent.max_rows(), offset_of!(Live, num_rows)),
            CombineMode::Rank => (extent.max_received(), offset_of!(Live, num_received)),
        };
        let (Some(push), Way::Pushed(nvlink)) = (push, &self.way) else {
            return Ok(self.stages.add_own(buffers, tokens, out)?);
        };
        let push = push.with_live_word(live.word_address());
        let runs = LiveRuns { runs: live.at(offset_of!(Live, homes)), count: live.at(count) };
        let (homes, raise) = (Run::whole(0), push.raise(Flag::Rows));
        let back = Back { num_back: most, num_topk: extent.num_topk, homes, live: runs, raise };
        let home = (push.home(), nvlink.hearing(&push, Flag::Rows)?);
        Ok(self.stages.exchange(buffers, &back, tokens, home, out)?)
    }

    /// What left and what came, once the host has waited for the step and [`LiveStep::queue_numbers`] behind it.
    ///
    /// # Errors
    /// If it is not what can be: a rank told of more than it may bring, or this device did not count right.
    pub fn finish_alone(
        &self,
        world: &World,
        (buffers, live): (&Buffers, &LiveStep),
        (extent, num_tokens): (LiveExtent, usize),
    ) -> Result<(SentCounts, ReceivedCounts), CarryError> {
        let travel = self.stages.forms().travel;
        let (placement, num_experts) = (travel.placement, self.stages.num_experts());
        let sent = SentCounts::new(placement, &buffers.host_totals, (num_tokens, extent.num_topk))?;
        let words: Vec<u32> = match &self.way {
            Way::Pushed(nvlink) => {
                let told = nvlink.told(num_experts, (extent.max_tokens, extent.num_topk))?;
                told.into_iter().flat_map(|told| told.counts).collect()
            }
            Way::Carried(_) => sent.messages(placement),
        };
        let received = ReceivedCounts::new(num_experts, &words);
        let Live { num_received, num_rows, .. } = live.numbers();
        let (found_tokens, found_rows) = (num_received as usize, num_rows as usize);
        let (num_tokens, num_rows) = (received.total_tokens(), received.total_rows());
        if (found_tokens, found_rows) != (num_tokens, num_rows) {
            return Err(CarryError::Unsettled { found_tokens, found_rows, num_tokens, num_rows });
        }
        let row_bytes = travel.layout(extent.num_topk).row_bytes();
        let (back, home) = match travel.mode {
            CombineMode::Slot => (&received.num_rows, &sent.num_slots),
            CombineMode::Rank => (&received.num_tokens, &sent.num_tokens),
        };
        match &self.way {
            Way::Pushed(_) => {
                super::count_pushed(world, Cargo::Tokens, [&sent.num_tokens, &received.num_tokens], row_bytes);
                super::count_pushed(world, Cargo::Rows, [back, home], self.return_bytes());
            }
            Way::Carried(_) => {
                world.count_carried_to(Cargo::Tokens, &super::scaled(&sent.num_tokens, row_bytes));
                world.count_carried_to(Cargo::Rows, &super::scaled(back, self.return_bytes()));
            }
        }
        Ok((sent, received))
    }
}

#[cfg(test)]
mod tests;
