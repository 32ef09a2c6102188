//! Dispatch and combine between devices: packed and unpacked by kernels, carried from device memory to device memory. The
//! same bytes, orders and sums as [`super::transport`] has on hosts.
//!
//! A chunk waits for its device once: for the counts of what leaves, which ranks then tell each other. All other work is
//! queued without waiting; carriers that go through hosts wait where they have to.

mod buffers;
mod stages;

use std::ops::Range;
use std::rc::Rc;
use std::time::Instant;

pub use buffers::Buffers;
pub use stages::{Forms, Stages};

use crate::cuda::DeviceBuffer;
use crate::dispatch::carrier::{Carrier, CarryError, Runs};
use crate::dispatch::combine::CombineMode;
use crate::dispatch::counts::{ReceivedCounts, SentCounts, message_len};
use crate::gpu::{Gpu, grow};
use crate::ids::Rank;
use crate::world::{Cargo, World};

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
}

/// Counts of a chunk that is under way, which combine needs.
#[derive(Debug)]
pub struct DeviceHandle {
    /// What left.
    pub sent: SentCounts,
    /// What has arrived, and the rows of it.
    pub received: ReceivedCounts,
}

/// Carries the tokens of one layer.
#[derive(Debug)]
pub struct DeviceTransport {
    gpu: Gpu,
    stages: Stages,
    carrier: Rc<dyn Carrier>,
}

impl DeviceTransport {
    /// Carries tokens as `stages` pack them.
    #[must_use]
    pub fn new(gpu: &Gpu, stages: Stages, carrier: Rc<dyn Carrier>) -> Self {
        Self { gpu: gpu.clone(), stages, carrier }
    }

    /// Who moves the bytes.
    #[must_use]
    pub fn carrier(&self) -> &dyn Carrier {
        &*self.carrier
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
        let placement = self.stages.forms().travel.placement;
        self.stages.count(buffers, tokens)?;
        // Packing needs no count of the host's: the device goes on while ranks tell each other.
        self.stages.pack(buffers, tokens)?;
        self.gpu.wait(world, "count of what leaves", &buffers.counted)?;
        let sent = SentCounts::new(placement, &buffers.host_totals, (tokens.tokens.len(), tokens.num_topk))?;
        let lengths: Vec<usize> =
            (0..world.size()).map(|rank| message_len(placement, Rank::from_index(rank))).collect();
        let mine = vec![message_len(placement, world.rank()); world.size()];
        let told = world.all_to_all_u32(&sent.messages(placement), &lengths, &mine);
        let received = ReceivedCounts::new(placement.local_experts(world.rank()).len(), &told);
        let row_bytes = self.stages.forms().travel.layout(tokens.num_topk).row_bytes();
        let max_run_bytes = chunk_tokens * row_bytes;
        let counts = [scaled(&sent.num_tokens, row_bytes), scaled(&received.num_tokens, row_bytes)];
        world.count_carried_to(Cargo::Tokens, &counts[0]);
        if world.size() > 1 {
            grow(&mut buffers.arrived, received.total_tokens() * row_bytes)?;
            self.carry(world, (&buffers.packed, &mut buffers.arrived), &counts, max_run_bytes)?;
        }
        self.stages.unpack(buffers, &received, tokens.num_topk)?;
        Ok(DeviceHandle { sent, received })
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
        let travel = self.stages.forms().travel;
        let row_bytes = travel.row_form.form.row_bytes(travel.row_form.hidden);
        self.stages.give_back(buffers, &handle.received, tokens.num_topk)?;
        let (num_back, num_home) = match travel.mode {
            CombineMode::Slot => (&handle.received.num_rows, &handle.sent.num_slots),
            CombineMode::Rank => (&handle.received.num_tokens, &handle.sent.num_tokens),
        };
        let counts = [scaled(num_back, row_bytes), scaled(num_home, row_bytes)];
        world.count_carried_to(Cargo::Rows, &counts[0]);
        if world.size() > 1 {
            grow(&mut buffers.home, counts[1].iter().sum())?;
            let max_rows = chunk_tokens * travel.mode.max_rows(tokens.num_topk);
            self.carry(world, (&buffers.back, &mut buffers.home), &counts, max_rows * row_bytes)?;
        }
        Ok(self.stages.add(buffers, tokens, out)?)
    }

    /// The bytes of all ranks to where they belong, timed for the log; a rank's own by a copy on its device.
    fn carry(
        &self,
        world: &World,
        (sent, arrived): (&DeviceBuffer<u8>, &mut DeviceBuffer<u8>),
        [sent_counts, arrived_counts]: &[Vec<usize>; 2],
        max_run_bytes: usize,
    ) -> Result<(), CarryError> {
        let (begin, before) = (Instant::now(), world.exchanged().sent_bytes);
        let rank = world.rank().index();
        let sent = Runs { buffer: sent, counts: sent_counts };
        let arrived = Runs { buffer: arrived, counts: arrived_counts };
        arrived.buffer.copy_from(self.gpu.stream(), arrived.range(rank).start, sent.buffer, sent.range(rank))?;
        self.carrier.exchange(world, sent, arrived, max_run_bytes)?;
        let (sent_bytes, us) = (world.exchanged().sent_bytes - before, begin.elapsed().as_secs_f64() * 1e6);
        tracing::debug!(carrier = self.carrier.name(), sent_bytes, us, "carried or queued");
        Ok(())
    }
}

fn scaled(counts: &[usize], bytes: usize) -> Vec<usize> {
    counts.iter().map(|&n| n * bytes).collect()
}

#[cfg(test)]
mod tests;
