//! The only user of MPI: who the ranks are, how they exchange bytes, how they agree, and how a run ends early.
//!
//! Every wait polls a non-blocking operation against the limit of the current [`Phase`], because a blocking
//! collective can't time out. Knows nothing of models or experts.

mod agree;
mod clock;
mod compare;
mod cost;
mod ending;
mod exchange;
mod group;
mod links;
mod roll;
mod signals;
#[cfg(test)]
pub(crate) mod simulated;
mod watch;

use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives};

use crate::exit::{Classify, Exit};
use crate::fault::{Action, Faults, Injected, Stage};
use crate::ids::Rank;

use roll::{Notice, Roll};
use watch::{Watch, Watchdog};

pub use agree::Refusal;
pub use clock::ClockReading;
pub use compare::{Brought, Compared, Sheet};
pub use cost::{OUTCOME_BYTES, RECORD_BYTES, Traffic};
pub use ending::{Ending, abort_job, end_well};
pub use exchange::{Parts, num_rounds};
pub use group::Group;

/// Errors of the world itself.
#[derive(Debug, thiserror::Error)]
pub enum WorldError {
    /// MPI was already initialised by somebody else in this process.
    #[error("MPI is already initialised in this process; give Lockstep the first call")]
    AlreadyInitialised,
    /// The deployment wants another number of ranks.
    #[error(
        "the deployment wants {wanted} ranks ({nodes} nodes x {ranks_per_node}), but the world has {found}; \
         start it with `mpirun -n {wanted}` or correct cluster.ranks_per_node"
    )]
    Size {
        /// Nodes of the deployment.
        nodes: u32,
        /// Ranks of a node.
        ranks_per_node: u32,
        /// Their product.
        wanted: u32,
        /// The world's size.
        found: u32,
    },
}

impl Classify for WorldError {
    fn exit(&self) -> Exit {
        match self {
            Self::Size { .. } => Exit::BadInput,
            Self::AlreadyInitialised => Exit::Environment,
        }
    }
}

/// What the ranks are doing, with the limit of every wait in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Phase {
    /// A word for messages: `start`, `load`, `step`.
    pub name: &'static str,
    /// The longest a rank waits for the others.
    pub limit: Duration,
    /// The setting that raises it.
    pub key: &'static str,
}

/// The MPI world, seen from this rank. One exists a process; [`World::finish`] ends it.
pub struct World {
    universe: ManuallyDrop<mpi::environment::Universe>,
    comm: SimpleCommunicator,
    rank: Rank,
    size: usize,
    local_rank: usize,
    local_size: usize,
    /// The world's number of the first rank on this host.
    first_on_host: Rank,
    host: String,
    phase: Cell<Phase>,
    /// Largest piece that goes to one peer in one collective. Below the i32 counts of MPI; tests lower it.
    round_bytes: usize,
    exchanged: RefCell<Exchanged>,
    /// By cargo, `[num_ranks]` each.
    carried_to: RefCell<[Vec<u64>; 2]>,
    /// Where this rank's clock starts.
    joined_at: Instant,
    traffic: Cell<Traffic>,
    roll: Roll,
    watch: Watch,
    /// What ranks are known to do while the others wait.
    work: RefCell<Vec<(Rank, String)>>,
    faults: Faults,
}

/// Bytes that this rank moved: through [`World::all_to_all_bytes`], or by whoever tells [`World::count_carried`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Exchanged {
    /// To other ranks.
    pub sent_bytes: u64,
    /// From other ranks.
    pub received_bytes: u64,
    /// Collectives, or rounds of sends and receives, it took.
    pub rounds: u64,
}

/// What is carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cargo {
    /// What goes out to be computed on.
    Tokens,
    /// What comes back.
    Rows,
}

impl World {
    /// Initialises MPI and finds this rank's place. Waits of the start phase are limited to `start`; `faults` are none but
    /// in tests.
    ///
    /// # Errors
    /// If MPI was initialised before.
    pub fn init(start: Duration, faults: Faults) -> Result<Self, WorldError> {
        let joined_at = Instant::now();
        let phase = Phase { name: "start", limit: start, key: "LOCKSTEP_START_S" };
        // MPI's start waits for every process without a limit, and so do the collectives below.
        let watchdog = Watchdog::new(start, "start", phase.key);
        let (universe, _threading) =
            mpi::initialize_with_threading(Threading::Funneled).ok_or(WorldError::AlreadyInitialised)?;
        let comm = universe.world();
        let rank = Rank(u32::try_from(comm.rank()).unwrap_or_default());
        let size = usize::try_from(comm.size()).unwrap_or(1);
        let node = comm.split_shared(comm.rank());
        let local_rank = usize::try_from(node.rank()).unwrap_or_default();
        let local_size = usize::try_from(node.size()).unwrap_or(1);
        let mut on_host = vec![0i32; local_size];
        node.all_gather_into(&comm.rank(), &mut on_host[..]);
        let first_on_host = on_host.into_iter().min().and_then(|first| u32::try_from(first).ok()).unwrap_or_default();
        let host = mpi::environment::processor_name().unwrap_or_else(|_| "unknown host".to_owned());
        ending::remember_rank(rank, size);
        drop(watchdog);
        let mut world = Self {
            universe: ManuallyDrop::new(universe),
            comm,
            rank,
            size,
            local_rank,
            local_size,
            first_on_host: Rank(first_on_host),
            host,
            phase: Cell::new(phase),
            round_bytes: exchange::default_round_bytes(size),
            exchanged: RefCell::default(),
            carried_to: RefCell::new([vec![0; size], vec![0; size]]),
            joined_at,
            traffic: Cell::default(),
            roll: Roll::new(size),
            watch: Watch::new(rank, phase),
            work: RefCell::default(),
            faults,
        };
        world.apply_settings();
        world.watch_hosts();
        tracing::debug!(host = world.host, size, local_rank, "joined the world");
        Ok(world)
    }

    /// This process.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// This process among those of its host, from MPI's shared-memory split.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Number of ranks on this host.
    #[must_use]
    pub fn local_size(&self) -> usize {
        self.local_size
    }

    /// The host's name as MPI knows it.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Gives `local`'s value if every rank succeeded, else the same [`Refusal`] on all of them; collective.
    ///
    /// # Errors
    /// If any rank's `local` is an error.
    pub fn agree<T, E: Classify + Send + Sync + 'static>(&self, local: Result<T, E>) -> Result<T, Refusal> {
        Group::agree(self, local)
    }

    /// The refusal of an error that every rank has come to, from numbers that all know; collective.
    pub fn refuse<E: Classify + Send + Sync + 'static>(&self, error: E) -> Refusal {
        Group::refuse(self, error)
    }

    /// What the MPI library calls itself and its version.
    #[must_use]
    pub fn mpi_version() -> String {
        let text = mpi::environment::library_version().unwrap_or_default();
        // What follows is who packed it and when.
        text.split(',').next().unwrap_or_default().trim().to_owned()
    }

    /// Whether this rank speaks for all where every rank would say the same.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.rank == Rank(0)
    }

    /// Enters a phase: its name goes into messages, its limit bounds every wait until the next phase.
    pub fn enter(&self, phase: Phase) {
        tracing::debug!(phase = phase.name, limit_s = phase.limit.as_secs(), "phase");
        self.phase.set(phase);
        self.watch.enter(phase);
    }

    /// Says what this rank does from here until it next meets the others, as in `loading layer 3`: a wait that takes long
    /// names it. Every rank has to do the same at this point.
    pub fn begin(&self, doing: impl Into<String>) {
        self.watch.begin(doing.into());
    }

    /// Says what some ranks do next while the others wait for them, such as `compiling X`: should the limit pass, the message
    /// names it. Holds until it is said anew.
    pub fn expect_work(&self, work: Vec<(Rank, String)>) {
        self.work.replace(work);
    }

    /// What faults change rather than break: the host's name, the size of a piece of an exchange.
    fn apply_settings(&mut self) {
        if self.faults.is_empty() {
            return;
        }
        if self.is_root() {
            tracing::warn!("LOCKSTEP_FAULT is set: this run breaks on purpose");
        }
        for action in self.faults.at(self.rank, Stage::Start) {
            match action {
                Action::Host(name) => self.host.clone_from(name),
                Action::RoundBytes(bytes) => {
                    self.round_bytes = (*bytes).clamp(1, exchange::default_round_bytes(self.size));
                }
                _ => {}
            }
        }
    }

    /// Strikes with what `LOCKSTEP_FAULT` says for this rank and `stage`; usually nothing.
    ///
    /// # Errors
    /// If a fault says so.
    pub fn fault(&self, stage: Stage) -> Result<(), Injected> {
        self.faults.strike(self.rank, stage)
    }

    /// Whether `LOCKSTEP_FAULT` has `action` for this rank and `stage`.
    #[must_use]
    pub fn has_fault(&self, stage: Stage, action: &Action) -> bool {
        self.faults.at(self.rank, stage).any(|fault| fault == action)
    }

    /// What `LOCKSTEP_FAULT` has for this rank and `stage`.
    pub fn faults_at(&self, stage: Stage) -> impl Iterator<Item = &Action> {
        self.faults.at(self.rank, stage)
    }

    /// What this rank has moved so far.
    #[must_use]
    pub fn exchanged(&self) -> Exchanged {
        *self.exchanged.borrow()
    }

    /// Every collective that this rank has taken part in since it joined, and what it moved.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.traffic.get()
    }

    /// Counts what this rank has exchanged by another way than MPI.
    pub fn count_carried(&self, carried: Exchanged) {
        let Exchanged { sent_bytes, received_bytes, rounds } = carried;
        let mut exchanged = self.exchanged.borrow_mut();
        exchanged.sent_bytes += sent_bytes;
        exchanged.received_bytes += received_bytes;
        exchanged.rounds += rounds;
    }

    /// Counts bytes by the rank they go to, whoever carries them.
    pub fn count_carried_to(&self, cargo: Cargo, counts: &[usize]) {
        let carried_to = &mut self.carried_to.borrow_mut()[cargo as usize];
        carried_to.iter_mut().zip(counts).for_each(|(sum, &bytes)| *sum += bytes as u64);
    }

    /// `[num_ranks]` bytes that this rank has sent to each; to itself: what did not travel.
    #[must_use]
    pub fn carried_to(&self, cargo: Cargo) -> Vec<u64> {
        self.carried_to.borrow()[cargo as usize].clone()
    }

    /// Checks the world against what was asked for.
    ///
    /// # Errors
    /// If the sizes differ.
    pub fn expect_size(&self, nodes: u32, ranks_per_node: Option<u32>) -> Result<(), WorldError> {
        let found = u32::try_from(self.size).unwrap_or(u32::MAX);
        if let Some(ranks_per_node) = ranks_per_node {
            let wanted = nodes.saturating_mul(ranks_per_node);
            if wanted != found {
                return Err(WorldError::Size { nodes, ranks_per_node, wanted, found });
            }
        }
        Ok(())
    }

    /// Waits until all ranks are here.
    pub fn barrier(&self) {
        self.wait("barrier", self.comm.immediate_barrier());
        self.traffic.set(self.traffic.get() + Traffic { collectives: 1, ..Traffic::default() });
    }

    /// Leaves MPI; collective. Nothing may be sent afterwards.
    pub fn finish(self) {
        self.barrier();
        let Phase { limit, key, .. } = self.phase.get();
        let _watchdog = Watchdog::new(limit, "end", key);
        drop(ManuallyDrop::into_inner(self.universe));
    }

    /// Polls `request` until it completes or the phase's limit passes, which ends the job.
    fn wait<'a, D: ?Sized, S: mpi::request::Scope<'a>>(
        &self,
        operation: &str,
        request: mpi::request::Request<'a, D, S>,
    ) {
        let mut pending = Some(request);
        self.poll(operation, || match pending.take()?.test() {
            Ok(_) => Some(()),
            Err(request) => {
                pending = Some(request);
                None
            }
        });
    }

    /// Asks `done` until it gives a value or the phase's limit passes, which ends the job: for what other ranks take part
    /// in and can't be taken back, also where it does not go over MPI.
    pub fn poll<T>(&self, operation: &str, done: impl FnMut() -> Option<T>) -> T {
        let Phase { limit, .. } = self.phase.get();
        // The request can't be taken back: peers may still write into its buffer, so the job ends here.
        self.ask(operation, limit, done).unwrap_or_else(|| self.abort_after_limit(operation))
    }

    /// Asks `done` until it gives a value, or nothing once `limit` has passed: for what can be taken back.
    pub fn poll_within<T>(&self, operation: &str, limit: Duration, done: impl FnMut() -> Option<T>) -> Option<T> {
        let value = self.ask(operation, limit, done);
        if value.is_none() {
            self.roll.announce(&self.comm, Notice::Works);
            self.watch.end();
        }
        value
    }

    /// The other ranks hear that this one waits, once it has waited a while, and that it no longer does if a value came.
    fn ask<T>(&self, operation: &str, limit: Duration, mut done: impl FnMut() -> Option<T>) -> Option<T> {
        let begin = Instant::now();
        let mut announced = false;
        self.watch.wait();
        let mut poll = 0u32;
        loop {
            if let Some(value) = done() {
                if announced {
                    self.roll.announce(&self.comm, Notice::Works);
                }
                self.watch.end();
                return Some(value);
            }
            // A peer that shares the core can only come if this rank gives way; the clock is read now and then.
            if poll > 64 {
                std::thread::yield_now();
            }
            poll = poll.wrapping_add(1);
            if !poll.is_multiple_of(64) {
                continue;
            }
            let waited = begin.elapsed();
            if !announced && waited > Roll::notice_after(limit) {
                announced = true;
                self.roll.announce(&self.comm, Notice::Waits);
            }
            // Twice as long: whoever waits as well has said so by then.
            if waited > 2 * Roll::notice_after(limit) && self.is_root() && self.watch.is_line_due(begin) {
                self.say_who_is_missing(operation, waited);
            }
            if waited > limit {
                return None;
            }
        }
    }
}
