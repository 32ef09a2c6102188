//! Stores into the memory of other ranks' GPUs, over NVLink: tokens and rows are packed where they are read.
//!
//! Every rank has opened every other's region, laid out by [`super::region`]. Kernels of [`super::device`] store into them and
//! raise flags; here a rank tells what comes and waits for what others raise. Ranks wait on their devices, with a limit; a wait
//! in vain raises an alarm at every rank, and hosts look for alarms whenever they wait. Ranks that share a GPU wait on their
//! hosts before: kernels of different processes take turns there, and one that waits would hold up those it waits for.

mod error;
mod join;

use std::cell::RefCell;

use bytemuck::Zeroable;
pub use error::NvlinkError;
pub use join::{NvlinkOptions, Prepared};

use crate::cuda::{DeviceBuffer, Function, LaunchShape, PinnedBuffer};
use crate::dispatch::region::{ALARM_WORDS, Alarm, ChunkTag, Flag, MAX_PEERS, Region, Rooms};
use crate::gpu::{Gpu, GpuError, Mark, count_growth};
use crate::ids::{LayerIdx, Rank};
use crate::jit::kernels::few::FewArgs;
use crate::jit::kernels::nvlink::{Hear, NvlinkArgs, NvlinkKernels, Raise, Run, Tell};
use crate::world::World;
use join::{Opened, Own};

/// How long a device holds back what is queued behind a wait in vain: hosts that look see the alarm long before.
const HOLD_NS: u64 = 3_000_000_000;

/// For messages.
const STORING: &str = "stores into other ranks' memory";

/// This rank's end.
#[derive(Debug)]
pub struct Nvlink {
    options: NvlinkOptions,
    functions: Functions,
    state: RefCell<Option<State>>,
    /// Behind what a wait of its own is for.
    mark: RefCell<Mark>,
}

/// The kernels of `kernels/nvlink.cu`.
#[derive(Debug)]
struct Functions {
    greet: Function,
    hear: Function,
}

impl Functions {
    fn load(gpu: &Gpu) -> Result<Self, GpuError> {
        let request = NvlinkKernels.request(gpu.arch());
        let load = |name| gpu.function(request.clone(), name, 0);
        Ok(Self { greet: load(NvlinkKernels::GREET)?, hear: load(NvlinkKernels::HEAR)? })
    }
}

/// What there is until it is given up.
#[derive(Debug)]
struct State {
    // Closed before this rank's own goes.
    opened: Opened,
    own: Own,
    host_counts: PinnedBuffer<u32>,
    host_alarms: PinnedBuffer<u64>,
    /// Blocks of a storing kernel that are through, and whether one that waits has raised an alarm.
    done: DeviceBuffer<u32>,
    /// The chunk that was begun last.
    epoch: u32,
}

/// Where one chunk's tokens and rows go.
#[derive(Debug, Clone, Copy)]
pub struct Push {
    tag: ChunkTag,
    /// Address of what flags hold instead; 0: the tag's word.
    live_word: u64,
    region: Region,
    regions: [u64; MAX_PEERS],
    done: u64,
    rank: usize,
    num_ranks: usize,
    /// Which home its rows come to, everywhere.
    home: usize,
    /// Rows of a whole step are told with its counts.
    tells_step: bool,
}

/// How a kernel that counts tells every rank of it, whose flags are then waited for.
#[derive(Debug, Clone, Copy)]
pub struct Telling {
    /// A wait for everybody's.
    pub hear: Hear,
    /// Where counts go.
    pub tell: Tell,
}

/// What one rank told of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// Tokens that come, then the rows of each of this rank's experts.
    pub counts: Vec<u32>,
    /// Those of the whole step, where they were told.
    pub rows_of_step: Vec<u32>,
    /// The row of its home at which this rank's begin.
    pub home_start: usize,
}

impl Push {
    /// `[num_ranks]` where each rank has room for this one's tokens.
    #[must_use]
    pub fn rooms(&self) -> [u64; MAX_PEERS] {
        self.regions.map(|region| region.wrapping_add(self.region.room_at(self.rank) as u64))
    }

    /// What a kernel raises behind `flag`'s stores.
    #[must_use]
    pub fn raise(&self, flag: Flag) -> Raise {
        let at = (self.region.flags_at(flag, self.home) + 8 * self.rank) as u64;
        let flags = self.regions.map(|region| region.wrapping_add(at));
        // A world of more than MAX_PEERS has no regions.
        let num_ranks = u32::try_from(self.num_ranks).unwrap_or(0);
        let (word, live_word) = (self.tag.word(), self.live_word);
        Raise { flags, word, live_word, done: self.done, num_ranks, padding: 0 }
    }

    /// Where tokens from all ranks lie here, `num_tokens[r]` of them from rank `r`.
    #[must_use]
    pub fn arrived(&self, num_tokens: &[usize], row_bytes: usize) -> [Run; MAX_PEERS] {
        let own = self.regions[self.rank];
        Run::of(num_tokens, row_bytes, |source| own + self.region.room_at(source) as u64)
    }

    /// Where rows go home to, `num_rows[r]` of them to rank `r`, whose begin at row `home_starts[r]` there.
    #[must_use]
    pub fn homes(&self, num_rows: &[usize], home_starts: &[usize], row_bytes: usize) -> [Run; MAX_PEERS] {
        let at = |rank: usize| (self.region.home_at(self.home) + home_starts[rank] * row_bytes) as u64;
        Run::of(num_rows, row_bytes, |rank| self.regions[rank] + at(rank))
    }

    /// The same for every chunk that is queued like this one: what flags hold lies at an address of the device.
    #[must_use]
    pub fn with_live_word(self, live_word: u64) -> Self {
        Self { live_word, ..self }
    }

    /// With rows of a whole step among the counts, or without.
    #[must_use]
    pub fn telling_step(self, tells_step: bool) -> Self {
        Self { tells_step, ..self }
    }

    /// What its flags hold.
    #[must_use]
    pub fn word(&self) -> u64 {
        self.tag.word()
    }

    /// Where each rank's home begins, as this device sees it.
    #[must_use]
    pub fn home_addresses(&self) -> [u64; MAX_PEERS] {
        self.regions.map(|region| region.wrapping_add(self.region.home_at(self.home) as u64))
    }

    /// Where what ranks told lies here, and how many words each has; where rank 0's tokens lie, and bytes from rank to rank.
    #[must_use]
    pub fn own_parts(&self) -> ((u64, usize), (u64, usize)) {
        let (own, region) = (self.regions[self.rank], &self.region);
        let told = (own + region.counts_at() as u64, region.num_words());
        (told, (own + region.room_at(0) as u64, region.rooms().room_bytes))
    }

    /// Where rows come home to.
    #[must_use]
    pub fn home(&self) -> u64 {
        self.regions[self.rank] + self.region.home_at(self.home) as u64
    }
}

impl Nvlink {
    fn new(options: NvlinkOptions, functions: Functions, mark: Mark, state: State) -> Self {
        Self { options, functions, state: RefCell::new(Some(state)), mark: RefCell::new(mark) }
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> Result<T, NvlinkError>) -> Result<T, NvlinkError> {
        // A session closes it when no step is to come any more.
        f(self.state.borrow_mut().as_mut().expect("nvlink is used while its session is open"))
    }

    /// Has every rank store its number into every other's memory, and checks them; collective. Here ranks are connected, or
    /// fail to be, before any rank is in a step.
    ///
    /// # Errors
    /// If what one stored is not here once all have stored.
    pub fn greet(&self, world: &World) -> Result<(), NvlinkError> {
        let gpu = &self.options.gpu;
        let num_ranks = world.size();
        let push = self.begin((world, gpu), Rooms::default(), (LayerIdx(0), 0), 0)?;
        let stored = self.with(|state| {
            let args = self.args(state, &push, Flag::Counts);
            self.launch(gpu, &self.functions.greet, NvlinkKernels::GREET_SHAPE, &args)?;
            Ok(gpu.stream().synchronise()?)
        });
        world.barrier();
        stored?;
        self.with(|state| {
            let args = self.args(state, &push, Flag::Counts);
            let hear = Hear { hold_ns: 0, limit_ns: 0, ..args.hear };
            let args = NvlinkArgs { hear, host_counts: state.host_counts.address(), ..args };
            self.launch(gpu, &self.functions.hear, NvlinkKernels::hear_shape(hear.num_ranks), &args)?;
            gpu.stream().synchronise()?;
            let wanted = |peer: usize| Rank::from_index(peer).0 + 1;
            let told = state.host_counts.chunks_exact(state.own.region.num_words()).take(num_ranks);
            match told.enumerate().find(|(peer, words)| words[0] != wanted(*peer)) {
                None => Ok(()),
                Some((peer, words)) => Err(NvlinkError::Garbled { peer: Rank::from_index(peer), found: words[0] }),
            }
        })
    }

    /// Begins a chunk in `lane` for which there has to be so much room, and whose rows have a home of [`super::region::NUM_HOMES`];
    /// collective. Where there is less, all ranks make more first, which no chunk of the declared sizes needs: nothing else is
    /// under way then.
    ///
    /// # Errors
    /// If memory has to grow and can't, on its rank, which then has to end the job.
    pub fn begin(
        &self,
        (world, lane): (&World, &Gpu),
        rooms: Rooms,
        (layer, step): (LayerIdx, u64),
        home: usize,
    ) -> Result<Push, NvlinkError> {
        let is_enough = self.with(|state| Ok(state.own.region.rooms().hold(rooms)))?;
        if !is_enough {
            self.grow((world, lane), rooms)?;
        }
        self.with(|state| {
            let tag = ChunkTag::after(state.epoch, layer, step);
            state.epoch = tag.epoch;
            let (region, regions) = (state.own.region, state.opened.regions);
            let (rank, num_ranks) = (world.rank().index(), world.size());
            Ok(Push {
                tag,
                live_word: 0,
                region,
                regions,
                done: state.done.address(),
                rank,
                num_ranks,
                home,
                tells_step: false,
            })
        })
    }

    /// Makes every rank's region larger; collective.
    fn grow(&self, (world, lane): (&World, &Gpu), rooms: Rooms) -> Result<(), NvlinkError> {
        let NvlinkOptions { gpu, num_local_experts, .. } = &self.options;
        // Nobody frees what another still stores into, or has open.
        self.wait_for_all((world, lane), STORING)?;
        world.barrier();
        let mut held = self.state.borrow_mut();
        let State { opened, own, host_counts, host_alarms, done, epoch } =
            held.take().expect("nvlink is used while its session is open");
        drop(opened);
        world.barrier();
        count_growth();
        let region = Region::new(world.size(), *num_local_experts, own.region.rooms().max(rooms));
        tracing::info!(num_bytes = region.num_bytes(), "memory that other ranks store into grows");
        drop(own);
        let own = Own::new(gpu, region)?;
        let told = world.all_gather_bytes(&own.told(world)?);
        let opened = Opened::open(world, &own, &told)?;
        *held = Some(State { opened, own, host_counts, host_alarms, done, epoch });
        Ok(())
    }

    /// How what counts a chunk tells every rank of it: `of_step` is the address of `[2 * num_ranks + num_experts]` counts of the whole
    /// step, where it was cut and this is its first chunk; else 0.
    ///
    /// # Errors
    /// None: its state is there while its session is open.
    pub fn telling(&self, push: &Push, of_step: u64) -> Result<Telling, NvlinkError> {
        self.with(|state| {
            let NvlinkArgs { hear, counts_at, num_words, .. } = self.args(state, push, Flag::Counts);
            Ok(Telling { hear, tell: Tell { of_step, counts_at, num_words, is_told: 1 } })
        })
    }

    /// A wait for `flag` of every rank, for a kernel of many blocks, which all wait: where every rank has a GPU of its own.
    ///
    /// # Errors
    /// As [`Nvlink::telling`].
    pub fn hearing(&self, push: &Push, flag: Flag) -> Result<Hear, NvlinkError> {
        self.with(|state| {
            let is_raised = state.done.address_of(1..2)?;
            Ok(Hear { is_raised, ..self.args(state, push, flag).hear })
        })
    }

    /// Where the host reads what every rank told, and words of each, which whoever has heard them copies there.
    ///
    /// # Errors
    /// As [`Nvlink::telling`].
    pub fn host_told(&self, push: &Push) -> Result<(u64, usize), NvlinkError> {
        self.with(|state| Ok((state.host_counts.address(), push.region.num_told(push.tells_step))))
    }

    /// Queues a wait for `flag` of every rank: what is queued behind it sees what they stored; collective.
    ///
    /// # Errors
    /// If the driver fails, or ranks that share a GPU see an alarm.
    pub fn hear(&self, (world, lane): (&World, &Gpu), push: &Push, flag: Flag) -> Result<(), NvlinkError> {
        if self.shares_gpus() {
            self.meet((world, lane))?;
        }
        self.queue_hear(lane, push, flag)
    }

    /// Waits until all ranks have stored what they have queued; collective. Ranks that share a GPU do, before each wait of a
    /// kernel.
    ///
    /// # Errors
    /// If the driver fails, or there is an alarm.
    pub fn meet(&self, (world, lane): (&World, &Gpu)) -> Result<(), NvlinkError> {
        lane.count_wait();
        self.wait_for_all((world, lane), STORING)?;
        world.barrier();
        Ok(())
    }

    /// Whether some of the ranks share a GPU, so that they wait on their hosts.
    #[must_use]
    pub fn shares_gpus(&self) -> bool {
        self.state.borrow().as_ref().is_some_and(|state| state.opened.shares_gpus)
    }

    /// The same where every rank has a GPU of its own: no host waits.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn queue_hear(&self, lane: &Gpu, push: &Push, flag: Flag) -> Result<(), NvlinkError> {
        self.with(|state| {
            let counts = if flag == Flag::Counts { state.host_counts.address() } else { 0 };
            let args = NvlinkArgs { host_counts: counts, ..self.args(state, push, flag) };
            self.launch(lane, &self.functions.hear, NvlinkKernels::hear_shape(args.hear.num_ranks), &args)
        })
    }

    /// What a few tokens of `push` need of the memory that ranks share: counts and tagged tokens, and where rows come home. The
    /// rest is the layer's.
    #[must_use]
    pub fn few(&self, push: &Push) -> FewArgs {
        let fill = |state: &mut State| {
            let NvlinkArgs { hear, counts_at, num_words, num_heard, .. } = self.args(state, push, Flag::Counts);
            let region = &state.own.region;
            Ok(FewArgs {
                hear,
                host_counts: state.host_counts.address(),
                counts_at,
                tagged_at: region.tagged_at(0) as u64,
                tagged_bytes: region.rooms().tagged_bytes as u64,
                home_at: region.home_at(push.home) as u64,
                num_words,
                num_heard,
                ..FewArgs::zeroed()
            })
        };
        self.with(fill).unwrap_or_else(|_| FewArgs::zeroed())
    }

    /// What every rank told, once a mark behind hearing it has come. `max_tokens` bounds every rank's tokens.
    ///
    /// # Errors
    /// If a rank told what can't be.
    pub fn told(
        &self,
        num_local_experts: usize,
        (max_tokens, num_topk): (usize, usize),
    ) -> Result<Vec<Told>, NvlinkError> {
        self.with(|state| {
            let all = state.host_counts.chunks_exact(state.own.region.num_words());
            all.enumerate()
                .map(|(peer, words)| {
                    let (num_tokens, rows) = (words[0] as usize, &words[2..2 + num_local_experts]);
                    let num_rows = rows.iter().map(|&rows| rows as usize).sum();
                    if num_tokens > max_tokens || num_rows > num_tokens * num_topk {
                        let peer = Rank::from_index(peer);
                        return Err(NvlinkError::Implausible { peer, num_tokens, num_rows, num_topk });
                    }
                    let counts = [&words[..1], rows].concat();
                    let rows_of_step = words[2 + num_local_experts..2 + 2 * num_local_experts].to_vec();
                    Ok(Told { counts, rows_of_step, home_start: words[1] as usize })
                })
                .collect()
        })
    }

    /// Why this rank's device has waited in vain, where it has: the cause of whatever fails afterwards.
    #[must_use]
    pub fn alarm(&self) -> Option<NvlinkError> {
        self.state.borrow().as_ref().and_then(State::alarm).map(NvlinkError::Alarm)
    }

    /// Waits until the device has come to a `mark` of `lane`, and looks for alarms meanwhile.
    ///
    /// # Errors
    /// If there is an alarm, or something that was queued failed.
    pub fn wait(&self, (world, lane): (&World, &Gpu), operation: &str, mark: &Mark) -> Result<(), NvlinkError> {
        self.with(|state| {
            let waited = lane.wait_unless(world, operation, mark, || state.alarm().map(NvlinkError::Alarm));
            // A device that has held back long enough gives up: the alarm is why.
            waited.map_err(|error| state.alarm().map_or(error, NvlinkError::Alarm))
        })
    }

    /// Waits until the device is through with all that is queued in `lane`, and looks for alarms meanwhile.
    ///
    /// # Errors
    /// As [`Nvlink::wait`].
    pub fn wait_for_all(&self, (world, lane): (&World, &Gpu), operation: &str) -> Result<(), NvlinkError> {
        let mut mark = self.mark.borrow_mut();
        lane.move_mark(&mut mark)?;
        self.wait((world, lane), operation, &mark)
    }

    /// Closes the memory of other ranks. Right once every rank is through with it; this rank's own may go once all have.
    pub fn close(&self) {
        if let Some(state) = self.state.borrow_mut().as_mut() {
            state.opened.close();
        }
    }

    fn args(&self, state: &State, push: &Push, flag: Flag) -> NvlinkArgs {
        let region = &state.own.region;
        let narrow = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        // The device says who is missing before the host's own limit passes.
        let limit_ns = u64::try_from(self.options.step_limit.as_nanos() / 4 * 3).unwrap_or(u64::MAX);
        let hear = Hear {
            regions: state.opened.regions,
            host_alarms: state.host_alarms.address(),
            is_raised: 0,
            flags_at: region.flags_at(flag, push.home) as u64,
            alarms_at: region.alarms_at() as u64,
            word: push.tag.word(),
            live_word: push.live_word,
            limit_ns,
            hold_ns: HOLD_NS,
            phase: flag as u32,
            rank: narrow(push.rank),
            num_ranks: narrow(push.num_ranks),
            padding: 0,
        };
        NvlinkArgs {
            hear,
            host_counts: 0,
            counts_at: region.counts_at() as u64,
            num_words: narrow(region.num_words()),
            num_heard: narrow(region.num_told(push.tells_step)),
        }
    }

    fn launch(
        &self,
        lane: &Gpu,
        function: &Function,
        shape: LaunchShape,
        args: &NvlinkArgs,
    ) -> Result<(), NvlinkError> {
        // SAFETY: the argument is the kernel's (its size is asserted in the source). Regions are open and laid out alike on all
        // ranks while `self.state` is there; counts and alarms of the host live with them, and what is told with the caller, whose
        // freeing waits for the device.
        Ok(unsafe { function.launch(lane.stream(), &shape, args) }?)
    }
}

impl State {
    /// What a wait of this rank's device was ended by, which the device may be writing: the state of a cell comes last.
    fn alarm(&self) -> Option<Alarm> {
        let mut states = (0..self.host_alarms.len()).step_by(ALARM_WORDS).map(|at| self.host_alarms.read_volatile(at));
        let is_raised = states.any(|state| state != 0);
        is_raised.then(|| Alarm::first(&self.host_alarms)).flatten()
    }
}
