//! The way of experts' rows back to one row a token, queued one stage at a time. Knows no other rank: see [`super::stages`].

use bytemuck::Zeroable;

use super::stages::{LiveRuns, NOT_LIVE, Stages, narrow};
use super::{Buffers, DeviceTokens};
use crate::cuda::{DeviceBuffer, LaunchShape};
use crate::dispatch::combine::CombineMode;
use crate::dispatch::counts::ReceivedCounts;
use crate::dispatch::region::MAX_PEERS;
use crate::dispatch::travel::Travel;
use crate::gpu::{GpuError, grow};
use crate::jit::kernels::dispatch::{CombineArgs, Half, combine_shape};
use crate::jit::kernels::nvlink::{Hear, Raise, Run};

/// The computed rows of a rank on their way back, where other ranks store theirs: up to `num_back`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Back {
    pub num_back: usize,
    pub num_topk: usize,
    /// Where they go, unless only the device knows.
    pub homes: [Run; MAX_PEERS],
    /// How many there are, and where they go, where only the device knows.
    pub live: LiveRuns,
    pub raise: Raise,
}

impl Stages {
    /// The computed `buffers.rows` into what goes back: `buffers.back`, or the homes of other ranks, which then hear of it.
    ///
    /// # Errors
    /// If there is no memory or the driver fails.
    pub fn give_back(
        &self,
        buffers: &mut Buffers,
        received: &ReceivedCounts,
        num_topk: usize,
        homes: Option<([Run; MAX_PEERS], Raise)>,
    ) -> Result<(), GpuError> {
        let Travel { mode, row_form, .. } = self.forms.travel;
        let num_back = match mode {
            CombineMode::Slot => received.total_rows(),
            CombineMode::Rank => received.total_tokens(),
        };
        let (homes, raise) = match homes {
            Some(homes) => homes,
            None => {
                grow(&mut buffers.back, num_back * row_form.form.row_bytes(row_form.hidden))?;
                (Run::whole(buffers.back.address()), Raise::none())
            }
        };
        self.queue_give_back(buffers, &Back { num_back, num_topk, homes, live: NOT_LIVE, raise })
    }

    /// The same of `back`.
    pub(super) fn queue_give_back(&self, buffers: &Buffers, back: &Back) -> Result<(), GpuError> {
        let args = self.owner_args(buffers, back);
        self.launch(&self.give_back, self.combine_shape(back.num_back, back.raise.num_ranks), &args)
    }

    /// Of what gives back.
    fn owner_args(&self, buffers: &Buffers, back: &Back) -> CombineArgs {
        let slot_row = match self.forms.travel.mode {
            CombineMode::Slot => &buffers.return_rows,
            CombineMode::Rank => &buffers.slot_row,
        };
        let owner = Half {
            rows: buffers.rows.address(),
            slot_row: slot_row.address(),
            weights: buffers.weights.address(),
            live_tokens: back.live.count,
            num_tokens: back.num_back as u64,
        };
        let (out, live_out, raise, num_topk) = (back.homes, back.live.runs, back.raise, narrow(back.num_topk));
        CombineArgs { owner, out, live_out, raise, num_topk, ..CombineArgs::zeroed() }
    }

    /// Adds what came home, `home`, into the rows of `tokens` in `out`, which it overwrites.
    ///
    /// # Errors
    /// If `out` is too small or the driver fails.
    pub fn add(
        &self,
        buffers: &Buffers,
        tokens: &DeviceTokens<'_>,
        home: u64,
        out: &mut DeviceBuffer<f32>,
    ) -> Result<(), GpuError> {
        let args = self.home_args(tokens, (home, buffers.home_rows.address()), out)?;
        self.launch(&self.add, self.combine_shape(tokens.tokens.len(), 0), &args)
    }

    /// Gives back as `back` says and adds what comes `home` once the flags of all ranks are there, in one launch. All ranks queue it,
    /// and nothing else is on their GPUs.
    pub(super) fn exchange(
        &self,
        buffers: &Buffers,
        back: &Back,
        tokens: &DeviceTokens<'_>,
        (home, hear): (u64, Hear),
        out: &mut DeviceBuffer<f32>,
    ) -> Result<(), GpuError> {
        let home = self.home_args(tokens, (home, buffers.home_rows.address()), out)?;
        let CombineArgs { home, sums, num_topk, .. } = home;
        let args = CombineArgs { home, sums, num_topk, hear, ..self.owner_args(buffers, back) };
        let num_rows = back.num_back.max(tokens.tokens.len());
        // A block that waits for flags waits for all blocks of all ranks.
        let shape = LaunchShape { cooperative: true, ..self.combine_shape(num_rows, hear.num_ranks) };
        self.launch(&self.exchange, shape, &args)
    }

    /// Adds the computed `buffers.rows` of a rank alone into the rows of `tokens` in `out`, which it overwrites: what giving them back
    /// and adding what comes home would.
    ///
    /// # Errors
    /// As [`Stages::add`].
    pub fn add_own(
        &self,
        buffers: &Buffers,
        tokens: &DeviceTokens<'_>,
        out: &mut DeviceBuffer<f32>,
    ) -> Result<(), GpuError> {
        let args = self.home_args(tokens, (buffers.rows.address(), 0), out)?;
        let (slot_row, weights) = match self.forms.travel.mode {
            CombineMode::Slot => (buffers.return_rows.address(), args.home.weights),
            CombineMode::Rank => (buffers.slot_row.address(), buffers.weights.address()),
        };
        let home = Half { slot_row, weights, ..args.home };
        let args = CombineArgs { home, home_rows: buffers.home_rows.address(), ..args };
        self.launch(&self.add_own, self.combine_shape(tokens.tokens.len(), 0), &args)
    }

    /// Of what adds `rows` into those of `tokens` in `out`.
    fn home_args(
        &self,
        tokens: &DeviceTokens<'_>,
        (rows, slot_row): (u64, u64),
        out: &DeviceBuffer<f32>,
    ) -> Result<CombineArgs, GpuError> {
        let hidden = self.forms.travel.row_form.hidden;
        let DeviceTokens { weights, tokens, num_topk, live_tokens, .. } = tokens;
        let home = Half {
            rows,
            slot_row,
            weights: weights.address_of(tokens.start * num_topk..tokens.end * num_topk)?,
            live_tokens: *live_tokens,
            num_tokens: tokens.len() as u64,
        };
        let sums = out.address_of(tokens.start * hidden..tokens.end * hidden)?;
        Ok(CombineArgs { home, sums, num_topk: narrow(*num_topk), ..CombineArgs::zeroed() })
    }

    /// Of a kernel that gives back or adds up to `num_rows`; somebody hears of it, or it hears `num_ranks`.
    fn combine_shape(&self, num_rows: usize, num_ranks: u32) -> LaunchShape {
        let num_multiprocessors = self.gpu.device().facts().num_multiprocessors as usize;
        let hidden = self.forms.travel.row_form.hidden;
        combine_shape((num_rows, hidden), num_multiprocessors, usize::from(num_ranks > 0))
    }
}
