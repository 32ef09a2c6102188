//! Who is missing when a wait takes too long.
//!
//! A collective does not say which rank has not come. So a rank that has waited a while sends every other a notice with
//! the number of its wait; when the limit passes, whoever sent no notice of this wait is missing. Steps that go well
//! send nothing.

use std::cell::RefCell;
use std::time::Duration;

use mpi::point_to_point::{Destination, Source};
use mpi::request::StaticScope;
use mpi::topology::SimpleCommunicator;
use mpi::traits::Communicator;

use crate::ids::Rank;

/// Collectives have a context of their own, so that one tag keeps notices apart from everything.
const NOTICE_TAG: i32 = 0x10c5;

/// The number of the newest wait that each rank has announced.
pub(super) struct Roll {
    announced: RefCell<Vec<u64>>,
}

/// Who waits and who does not, once a limit has passed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Attendance {
    /// Ranks that wait too, this one included.
    pub waiting: Vec<Rank>,
    /// Ranks that have not come.
    pub missing: Vec<Rank>,
}

impl Roll {
    pub fn new(size: usize) -> Self {
        Self { announced: RefCell::new(vec![0; size]) }
    }

    /// How long a rank waits before it tells the others: well before the limit.
    pub fn notice_after(limit: Duration) -> Duration {
        (limit / 4).min(Duration::from_secs(1))
    }

    /// Tells every other rank that this one is in its `wait`-th wait. Never blocks.
    pub fn announce(&self, comm: &SimpleCommunicator, wait: u64) {
        for rank in (0..comm.size()).filter(|&rank| rank != comm.rank()) {
            // A peer that is gone would never complete the send. The word is leaked, so that MPI may keep it, and the
            // request is forgotten: at most one word a peer for each wait that takes long.
            let word: &'static [u64; 1] = Box::leak(Box::new([wait]));
            let request = comm.process_at_rank(rank).immediate_send_with_tag(StaticScope, &word[..], NOTICE_TAG);
            std::mem::forget(request);
        }
    }

    /// Who is in the `wait`-th wait, by the notices that have come.
    pub fn call(&self, comm: &SimpleCommunicator, wait: u64) -> Attendance {
        let mut announced = self.announced.borrow_mut();
        while let Some((message, _)) = comm.any_process().immediate_matched_probe_with_tag(NOTICE_TAG) {
            let (theirs, status) = message.matched_receive::<u64>();
            if let Some(newest) = usize::try_from(status.source_rank()).ok().and_then(|rank| announced.get_mut(rank)) {
                *newest = theirs.max(*newest);
            }
        }
        attendance(&announced, usize::try_from(comm.rank()).unwrap_or_default(), wait)
    }
}

fn attendance(announced: &[u64], mine: usize, wait: u64) -> Attendance {
    let ranks = || announced.iter().enumerate().map(|(rank, &newest)| (rank, rank == mine || newest >= wait));
    let of = |here: bool| ranks().filter(|(_, came)| *came == here).map(|(rank, _)| Rank::from_index(rank)).collect();
    Attendance { waiting: of(true), missing: of(false) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_not_announced_this_wait_is_missing() {
        let attendance = attendance(&[7, 3, 0, 9], 2, 7);
        assert_eq!(attendance.waiting, [Rank(0), Rank(2), Rank(3)]);
        assert_eq!(attendance.missing, [Rank(1)]);
    }
}
