//! The kernels of a layer's way to experts and back, queued one stage at a time. Knows no other rank: what leaves and arrives
//! lies in [`Buffers`].

use bytemuck::NoUninit;

use super::live::Coming;
use super::{Buffers, DeviceTokens};
use crate::cuda::{DeviceBuffer, Function, LaunchShape, PinnedBuffer};
use crate::dispatch::combine::CombineMode;
use crate::dispatch::counts::{ReceivedCounts, SentCounts};
use crate::dispatch::nvlink::{Push, Telling};
use crate::dispatch::region::{Flag, MAX_PEERS};
use crate::dispatch::travel::Travel;
use crate::gpu::{Gpu, GpuError, grow};
use crate::ids::Rank;
use crate::jit::KernelRequest;
use crate::jit::kernels::dispatch::{
    DispatchArgs, NUM_THREADS, PACK_BYTES_PER_SLOT, ReceiveArgs, TravelKernels, count_block, index_block,
};
use crate::jit::kernels::few;
use crate::jit::kernels::nvlink::{Hear, Raise, Run, Tell};

/// Tiles of tokens at most, more tokens make larger ones; and words of a column of their counts. `kMaxTiles` of `kernels/tiles.cuh`.
const MAX_TILES: usize = 64;
/// Tokens of a tile at least, `kMinTileTokens` there.
const MIN_TILE_TOKENS: usize = 16;
/// Blocks of kernels that take tokens one by one, for each multiprocessor.
const BLOCKS_PER_MULTIPROCESSOR: usize = 8;

/// What a layer's tokens and rows are made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Forms {
    /// How they travel.
    pub travel: Travel,
    /// The global scale of tokens that travel unquantised and go through NVFP4 where they arrive.
    pub quantise: Option<f32>,
}

impl Forms {
    /// The kernels for it.
    #[must_use]
    pub fn kernels(&self) -> TravelKernels {
        let Travel { payload, row_form, mode, .. } = self.travel;
        TravelKernels {
            hidden: narrow(row_form.hidden),
            payload,
            quantise: self.quantise.is_some(),
            form: row_form.form,
            mode,
        }
    }
}

/// Kernels of one layer's forms on one rank.
#[derive(Debug)]
pub struct Stages {
    pub(super) gpu: Gpu,
    pub(super) forms: Forms,
    rank: Rank,
    pub(super) leaving: LeavingKernels,
    pub(super) index: Function,
    unpack: Function,
    pub(super) give_back: Function,
    pub(super) add: Function,
    /// Both in one.
    pub(super) exchange: Function,
    /// Both in one, of a rank alone.
    pub(super) add_own: Function,
    pub(super) few: Function,
}

/// What numbers tokens that leave, or are passed on, and packs them.
#[derive(Debug)]
pub(super) struct LeavingKernels {
    count: Function,
    pack: Function,
}

impl LeavingKernels {
    pub fn new(gpu: &Gpu, request: KernelRequest, num_ranks: usize) -> Result<Self, GpuError> {
        let (_, count_bytes) = count_block(narrow(num_ranks));
        Ok(Self {
            count: gpu.function(request.clone(), TravelKernels::COUNT, count_bytes)?,
            pack: gpu.function(request, TravelKernels::PACK, 0)?,
        })
    }
}

/// How many tiles so many tokens are cut into, at most; changes no result.
pub(super) fn num_tiles(num_tokens: usize) -> usize {
    num_tokens.div_ceil(MIN_TILE_TOKENS).min(MAX_TILES)
}

/// Addresses on the device of a list's runs and of how many rows it has; 0: the host knows.
#[derive(Debug, Clone, Copy)]
pub(super) struct LiveRuns {
    pub runs: u64,
    pub count: u64,
}

pub(super) const NOT_LIVE: LiveRuns = LiveRuns { runs: 0, count: 0 };

/// Numbers of tokens, slots and rows of a chunk fit in 32 bits, or its buffers fit no device.
pub(super) fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl Stages {
    /// Loads the kernels of `forms` for what `rank` sends and receives.
    ///
    /// # Errors
    /// If they were not prepared or don't load.
    pub fn new(gpu: &Gpu, forms: Forms, rank: Rank) -> Result<Self, GpuError> {
        let (kernels, arch) = (forms.kernels(), gpu.arch());
        let placement = forms.travel.placement;
        let (_, index_bytes) = index_block(narrow(placement.local_experts(rank).len()));
        let [dispatch, receive, combine, few] = kernels.requests(arch);
        Ok(Self {
            gpu: gpu.clone(),
            forms,
            rank,
            leaving: LeavingKernels::new(gpu, dispatch, placement.num_ranks())?,
            index: gpu.function(receive.clone(), TravelKernels::INDEX, index_bytes)?,
            unpack: gpu.function(receive, TravelKernels::UNPACK, 0)?,
            give_back: gpu.function(combine.clone(), TravelKernels::GIVE_BACK, 0)?,
            add: gpu.function(combine.clone(), TravelKernels::ADD, 0)?,
            exchange: gpu.function(combine.clone(), TravelKernels::EXCHANGE, 0)?,
            add_own: gpu.function(combine, TravelKernels::ADD_OWN, 0)?,
            few: gpu.function(few, few::FUNCTION, 0)?,
        })
    }

    /// Where they run.
    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// What they are for.
    #[must_use]
    pub fn forms(&self) -> &Forms {
        &self.forms
    }

    /// Counts what leaves; the host has the counts at the next mark.
    ///
    /// # Errors
    /// As the next.
    pub fn count(&self, buffers: &mut Buffers, tokens: &DeviceTokens<'_>) -> Result<(), GpuError> {
        self.count_and_tell(buffers, tokens, None, true)
    }

    /// The same, which other ranks hear of where they are told. Whether the host has the counts, or is to get them otherwise.
    ///
    /// # Errors
    /// If there is no memory or the driver fails.
    pub fn count_and_tell(
        &self,
        buffers: &mut Buffers,
        tokens: &DeviceTokens<'_>,
        telling: Option<Telling>,
        is_for_host: bool,
    ) -> Result<(), GpuError> {
        self.grow_for_counts(buffers, (tokens.tokens.len(), tokens.num_topk))?;
        let mut args = self.dispatch_args(buffers, tokens)?;
        if let Some(Telling { hear, tell }) = telling {
            (args.hear, args.tell) = (hear, tell);
        }
        self.queue_counts(&self.leaving, &args, is_for_host.then_some(&buffers.host_totals))
    }

    /// Counts what leaves in a whole step, of which `tokens` is the first chunk: into `buffers.step_totals`, and the host has it at
    /// the next mark.
    ///
    /// # Errors
    /// If there is no memory or the driver fails.
    pub fn count_step(&self, buffers: &mut Buffers, tokens: &DeviceTokens<'_>) -> Result<(), GpuError> {
        self.grow_for_counts(buffers, (tokens.tokens.len(), tokens.num_topk))?;
        let num_words = buffers.totals.len();
        grow(&mut buffers.step_totals, num_words)?;
        if buffers.host_step.len() != num_words {
            buffers.host_step = PinnedBuffer::zeroed(self.gpu.device(), num_words)?;
        }
        let args = DispatchArgs { totals: buffers.step_totals.address(), ..self.dispatch_args(buffers, tokens)? };
        self.queue_counts(&self.leaving, &args, Some(&buffers.host_step))
    }

    /// Room for what leaves, counted.
    pub(super) fn room_for_totals(&self, buffers: &mut Buffers) -> Result<(), GpuError> {
        let num_words = SentCounts::num_words(self.forms.travel.placement);
        if buffers.host_totals.len() != num_words {
            buffers.host_totals = PinnedBuffer::zeroed(self.gpu.device(), num_words)?;
            buffers.totals = DeviceBuffer::uninitialised(self.gpu.device(), num_words)?;
        }
        Ok(())
    }

    /// Room for so many tokens and rows, as experts read them.
    pub(super) fn room_for_rows(
        &self,
        buffers: &mut Buffers,
        (num_tokens, num_rows): (usize, usize),
        num_topk: usize,
    ) -> Result<(), GpuError> {
        grow(&mut buffers.tokens, num_tokens * self.forms.travel.row_form.hidden)?;
        grow(&mut buffers.slot_row, num_tokens * num_topk)?;
        grow(&mut buffers.weights, num_tokens * num_topk)?;
        grow(&mut buffers.row_token, num_rows)?;
        grow(&mut buffers.return_rows, num_rows)
    }

    /// Room for the counts of so many tokens with so many slots.
    pub(super) fn grow_for_counts(
        &self,
        buffers: &mut Buffers,
        (num_tokens, num_topk): (usize, usize),
    ) -> Result<(), GpuError> {
        let placement = self.forms.travel.placement;
        let num_columns = 2 * placement.num_ranks();
        self.room_for_totals(buffers)?;
        if buffers.scratch.len() != placement.num_experts() + 1 {
            buffers.scratch = DeviceBuffer::zeroed(self.gpu.stream(), placement.num_experts() + 1)?;
        }
        grow(&mut buffers.starts, num_columns)?;
        self.grow_tiles(&mut buffers.send_tiles, num_columns)?;
        grow(&mut buffers.slot_token, num_tokens * num_topk)?;
        grow(&mut buffers.slot_home, num_tokens * num_topk)
    }

    /// Queues the counts of what `args` say, of which `host` has as many words as it is long at the next mark.
    pub(super) fn queue_counts(
        &self,
        kernels: &LeavingKernels,
        args: &DispatchArgs,
        host: Option<&PinnedBuffer<u32>>,
    ) -> Result<(), GpuError> {
        let (host_totals, num_host_words) = host.map_or((0, 0), |host| (host.address(), narrow(host.len())));
        let args = DispatchArgs { host_totals, num_host_words, ..*args };
        let (num_threads, shared_bytes) = count_block(args.num_ranks);
        let shape = LaunchShape { shared_bytes, ..LaunchShape::rows(args.num_tiles, num_threads) };
        self.launch(&kernels.count, shape, &args)
    }

    /// Queues the packing of what was counted.
    pub(super) fn queue_pack(&self, kernels: &LeavingKernels, args: &DispatchArgs) -> Result<(), GpuError> {
        let shared_bytes = PACK_BYTES_PER_SLOT * args.num_topk;
        kernels.pack.allow_dynamic_shared(shared_bytes)?;
        let shape = self.one_by_one(args.num_tokens as usize, &args.raise);
        self.launch(&kernels.pack, LaunchShape { shared_bytes, ..shape }, args)
    }

    /// Packs what was counted into `buffers.packed`, or straight into other ranks' rooms, which then hear of it: once their counts
    /// have been heard, or hearing them itself.
    ///
    /// # Errors
    /// If there is no memory or the driver fails.
    pub fn pack(
        &self,
        buffers: &mut Buffers,
        tokens: &DeviceTokens<'_>,
        push: Option<(&Push, Hear)>,
    ) -> Result<(), GpuError> {
        let Travel { placement, .. } = self.forms.travel;
        let num_topk = tokens.num_topk;
        let row_bytes = self.forms.travel.layout(num_topk).row_bytes();
        let num_tokens = tokens.tokens.len();
        if push.is_none() {
            // As many as there can be: the host does not know how many there are.
            grow(&mut buffers.packed, num_tokens * num_topk.min(placement.num_ranks()) * row_bytes)?;
        }
        grow(&mut buffers.home_rows, num_tokens * num_topk)?;
        let mut args = self.dispatch_args(buffers, tokens)?;
        if let Some((push, hear)) = push {
            (args.rooms, args.raise, args.hear) = (push.rooms(), push.raise(Flag::Tokens), hear);
        }
        self.queue_pack(&self.leaving, &args)
    }

    pub(super) fn dispatch_args(&self, buffers: &Buffers, tokens: &DeviceTokens<'_>) -> Result<DispatchArgs, GpuError> {
        let Travel { placement, payload, mode, row_form } = self.forms.travel;
        let DeviceTokens { values, ids, weights, tokens, num_topk, live_tokens, .. } = tokens;
        let of_tokens = |width: usize| tokens.start * width..tokens.end * width;
        Ok(DispatchArgs {
            rooms: [0; MAX_PEERS],
            raise: Raise::none(),
            hear: Hear::none(),
            tell: Tell::none(),
            values: values.address_of(of_tokens(row_form.hidden))?,
            ids: ids.address_of(of_tokens(*num_topk))?,
            weights: weights.address_of(of_tokens(*num_topk))?,
            entries: 0,
            totals: buffers.totals.address(),
            host_totals: 0,
            starts: buffers.starts.address(),
            tiles: buffers.send_tiles.address(),
            scratch: buffers.scratch.address(),
            slot_token: buffers.slot_token.address(),
            slot_row: buffers.slot_home.address(),
            packed: buffers.packed.address(),
            home_rows: buffers.home_rows.address(),
            counts: buffers.counts.address_of(0..2)?,
            live_tokens: *live_tokens,
            row_bytes: self.forms.travel.layout(*num_topk).row_bytes() as u64,
            value_bytes: (row_form.hidden * size_of::<f32>()) as u64,
            slot_stride: *num_topk as u64,
            num_tokens: narrow(tokens.len()),
            num_topk: narrow(*num_topk),
            num_ranks: narrow(placement.num_ranks()),
            num_experts: narrow(placement.num_experts()),
            num_tiles: narrow(num_tiles(tokens.len()).max(1)),
            num_host_words: 0,
            per_slot: u32::from(mode == CombineMode::Slot),
            input_scale: payload.input_scale(),
        })
    }

    /// What has arrived in `packed` into tokens and rows for experts.
    ///
    /// # Errors
    /// If there is no memory or the driver fails.
    pub fn unpack(
        &self,
        buffers: &mut Buffers,
        received: &ReceivedCounts,
        num_topk: usize,
        packed: [Run; MAX_PEERS],
    ) -> Result<(), GpuError> {
        let offsets: Vec<u32> = received.expert_offsets.iter().map(|&offset| narrow(offset)).collect();
        grow(&mut buffers.expert_offsets, offsets.len())?;
        self.gpu.upload(&mut buffers.expert_offsets, 0, &offsets)?;
        let num_received = (received.total_tokens(), received.total_rows());
        self.queue_unpack(buffers, num_received, num_topk, packed, (NOT_LIVE, None))
    }

    /// The same for up to so many tokens and rows, of which the device knows how many there are, and where `live` points to, if they
    /// are `coming`.
    pub(super) fn queue_unpack(
        &self,
        buffers: &mut Buffers,
        (num_tokens, num_rows): (usize, usize),
        num_topk: usize,
        packed: [Run; MAX_PEERS],
        (live, coming): (LiveRuns, Option<Coming>),
    ) -> Result<(), GpuError> {
        let (num_experts, num_slots) = (self.num_experts(), num_tokens * num_topk);
        self.grow_tiles(&mut buffers.receive_tiles, num_experts + 1)?;
        grow(&mut buffers.slot_place, num_slots)?;
        grow(&mut buffers.slot_order, num_slots)?;
        self.room_for_rows(buffers, (num_tokens, num_rows), num_topk)?;
        let num_more = u32::from(coming.is_some());
        let Coming { hear, settle, totals, num_totals, told } = coming.unwrap_or_else(Coming::nothing);
        let args = ReceiveArgs {
            packed,
            hear,
            settle,
            live_packed: live.runs,
            live_tokens: live.count,
            expert_offsets: buffers.expert_offsets.address(),
            tiles: buffers.receive_tiles.address(),
            slot_place: buffers.slot_place.address(),
            slot_order: buffers.slot_order.address(),
            tokens: buffers.tokens.address(),
            weights: buffers.weights.address(),
            row_token: buffers.row_token.address(),
            return_rows: buffers.return_rows.address(),
            slot_row: buffers.slot_row.address(),
            counts: buffers.counts.address_of(2..4)?,
            totals: totals[0],
            host_totals: totals[1],
            host_told: told.0,
            row_bytes: self.forms.travel.layout(num_topk).row_bytes() as u64,
            num_tokens: narrow(num_tokens),
            num_topk: narrow(num_topk),
            num_experts: narrow(num_experts),
            num_tiles: narrow(num_tiles(num_tokens)),
            num_totals: narrow(num_totals),
            num_told: narrow(told.1),
            input_scale: self.forms.quantise.unwrap_or(1.0),
            padding: 0,
        };
        // A block more settles what comes, and one hands on to the host what it is.
        let (num_threads, shared_bytes) = index_block(args.num_experts);
        let shape = LaunchShape::rows(args.num_tiles + num_more, num_threads);
        self.launch(&self.index, LaunchShape { shared_bytes, ..shape }, &args)?;
        let num_blocks = self.one_by_one(num_tokens, &Raise::none()).grid[0] + num_more;
        self.launch(&self.unpack, LaunchShape::rows(num_blocks, NUM_THREADS), &args)
    }

    /// Room for columns of tiles' counts, zeros at first: kernels read four tiles at once and leave out those that there are not.
    fn grow_tiles(&self, tiles: &mut DeviceBuffer<u32>, num_columns: usize) -> Result<(), GpuError> {
        if tiles.len() < num_columns * MAX_TILES {
            grow(tiles, num_columns * MAX_TILES)?;
            tiles.fill_bytes(self.gpu.stream(), 0)?;
        }
        Ok(())
    }

    /// Experts of this rank.
    pub(super) fn num_experts(&self) -> usize {
        self.forms.travel.placement.local_experts(self.rank).len()
    }

    /// A block a token, as many as the device has room for; one at least where somebody has to hear of it.
    fn one_by_one(&self, num_tokens: usize, raise: &Raise) -> LaunchShape {
        let most = self.gpu.device().facts().num_multiprocessors as usize * BLOCKS_PER_MULTIPROCESSOR;
        let least = usize::from(raise.num_ranks > 0);
        LaunchShape::rows(narrow(num_tokens.min(most).max(least)), NUM_THREADS)
    }

    pub(super) fn launch<A: NoUninit>(
        &self,
        function: &Function,
        shape: LaunchShape,
        args: &A,
    ) -> Result<(), GpuError> {
        // SAFETY: `A` is the kernel's argument (sizes are asserted in its source). The addresses are those of buffers that
        // were grown for this chunk's tokens, slots and rows in the stage that queues the kernel; they live in `Buffers` or
        // with the caller, whose freeing waits for the device; and only this stream writes them, but for experts' rows, behind
        // whose marks it is.
        Ok(unsafe { function.launch(self.gpu.stream(), &shape, args) }?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_all_tokens_and_are_few() {
        for num_tokens in (0..3000).chain([8192, 300_000]) {
            // `tile_tokens_of` of `kernels/tiles.cuh`
            let num_tiles = num_tiles(num_tokens);
            let tile_tokens = num_tokens.div_ceil(num_tiles.max(1)).max(MIN_TILE_TOKENS);
            assert!(num_tiles <= MAX_TILES && num_tiles * tile_tokens >= num_tokens, "{num_tokens}: {num_tiles}");
        }
    }
}
