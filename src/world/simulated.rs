//! Worlds of many ranks in one process, for tests: a thread a rank, exchanges through shared memory, everything counted.

use std::cell::Cell;
use std::sync::{Barrier, Mutex};

use super::cost::Traffic;
use super::exchange::default_round_bytes;
use super::group::Group;
use crate::ids::Rank;

/// Comparisons need little: a default stack would reserve gigabytes for 256 ranks.
const STACK_BYTES: usize = 1 << 20;

/// A rank of a simulated world.
pub(crate) struct Simulated<'a> {
    rank: usize,
    shared: &'a Shared,
    traffic: Cell<Traffic>,
}

struct Shared {
    world: SimulatedWorld,
    slots: Vec<Mutex<Vec<u8>>>,
    barrier: Barrier,
}

/// The shape of a simulated world.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SimulatedWorld {
    pub num_ranks: usize,
    pub ranks_per_host: usize,
    /// The most bytes to a peer in one collective.
    pub round_bytes: usize,
}

/// Runs `body` on every rank of a world of `num_ranks`; gives what each returned and what it moved.
pub(crate) fn simulate<T: Send>(num_ranks: usize, body: impl Fn(&Simulated<'_>) -> T + Sync) -> Vec<(T, Traffic)> {
    SimulatedWorld::new(num_ranks).run(body)
}

impl SimulatedWorld {
    /// Eight ranks a host.
    pub fn new(num_ranks: usize) -> Self {
        Self { num_ranks, ranks_per_host: 8, round_bytes: default_round_bytes(num_ranks) }
    }

    /// Runs `body` on every rank; gives what each returned and what it moved.
    ///
    /// A body that panics on one rank would hang the rest: check what it returned instead.
    pub fn run<T: Send>(self, body: impl Fn(&Simulated<'_>) -> T + Sync) -> Vec<(T, Traffic)> {
        let slots = (0..self.num_ranks).map(|_| Mutex::default()).collect();
        let shared = Shared { world: self, slots, barrier: Barrier::new(self.num_ranks) };
        let (shared, body) = (&shared, &body);
        let run = |rank: usize| {
            let simulated = Simulated { rank, shared, traffic: Cell::default() };
            (body(&simulated), simulated.traffic.get())
        };
        std::thread::scope(|scope| {
            let start = |rank| {
                let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
                thread.spawn_scoped(scope, move || run(rank)).expect("a thread a rank")
            };
            // All are started before any is waited for.
            let threads: Vec<_> = (0..self.num_ranks).map(start).collect();
            threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
        })
    }
}

impl Simulated<'_> {
    fn count(&self, traffic: Traffic) {
        self.traffic.set(self.traffic.get() + traffic);
    }

    fn slot(&self, rank: usize) -> std::sync::MutexGuard<'_, Vec<u8>> {
        self.shared.slots[rank].lock().expect("no rank panics")
    }
}

impl Group for Simulated<'_> {
    fn rank(&self) -> Rank {
        Rank::from_index(self.rank)
    }

    fn size(&self) -> usize {
        self.shared.world.num_ranks
    }

    fn first_on_host(&self) -> Rank {
        Rank::from_index(self.rank - self.rank % self.shared.world.ranks_per_host)
    }

    fn all_gather(&self, _operation: &str, mine: &[u8]) -> Vec<u8> {
        *self.slot(self.rank) = mine.to_vec();
        self.shared.barrier.wait();
        let all: Vec<u8> = (0..self.size()).flat_map(|rank| self.slot(rank).clone()).collect();
        self.shared.barrier.wait();
        assert_eq!(all.len(), mine.len() * self.size(), "all ranks bring the same length");
        self.count(Traffic::all_gather(self.size() as u64, mine.len() as u64));
        all
    }

    fn broadcast(&self, root: Rank, bytes: &mut [u8]) {
        if root == self.rank() {
            *self.slot(self.rank) = bytes.to_vec();
        }
        self.shared.barrier.wait();
        bytes.copy_from_slice(&self.slot(root.index()));
        self.shared.barrier.wait();
        self.count(Traffic::broadcast(bytes.len() as u64, root == self.rank()));
    }

    fn round_bytes(&self) -> usize {
        self.shared.world.round_bytes
    }
}
