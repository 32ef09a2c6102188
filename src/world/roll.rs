//! Who is missing when a wait takes too long.
//!
//! A collective does not say which rank has not come. So a rank that has waited a while tells every other, and tells them
//! again when the wait is over; when a limit passes, whoever is not waiting is missing. It need not be the same wait:
//! where a collective has nothing to exchange with the missing rank, it may let a rank through to the next one. Steps
//! that go well send nothing.

use std::cell::RefCell;
use std::time::Duration;

use mpi::point_to_point::{Destination, Source};
use mpi::request::StaticScope;
use mpi::topology::SimpleCommunicator;
use mpi::traits::Communicator;

use crate::ids::Rank;

/// Collectives have a context of their own, so that one tag keeps notices apart from everything.
const NOTICE_TAG: i32 = 0x10c5;

/// Which ranks have said that they wait, and have not said that it is over.
pub(super) struct Roll {
    waiting: RefCell<Vec<bool>>,
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
        Self { waiting: RefCell::new(vec![false; size]) }
    }

    /// How long a rank waits before it tells the others: well before the limit.
    pub fn notice_after(limit: Duration) -> Duration {
        (limit / 4).min(Duration::from_secs(1))
    }

    /// Tells every other rank that this one waits, or no longer does. Never blocks.
    pub fn announce(&self, comm: &SimpleCommunicator, waits: bool) {
        for rank in (0..comm.size()).filter(|&rank| rank != comm.rank()) {
            // A peer that is gone would never complete the send. The word is leaked, so that MPI may keep it, and the
            // request is forgotten: two words a peer for each wait that takes long.
            let word: &'static [u8; 1] = Box::leak(Box::new([u8::from(waits)]));
            let request = comm.process_at_rank(rank).immediate_send_with_tag(StaticScope, &word[..], NOTICE_TAG);
            std::mem::forget(request);
        }
    }

    /// Who waits, by the notices that have come. A rank's notices arrive in the order in which it sent them.
    pub fn call(&self, comm: &SimpleCommunicator) -> Attendance {
        let mut waiting = self.waiting.borrow_mut();
        while let Some((message, _)) = comm.any_process().immediate_matched_probe_with_tag(NOTICE_TAG) {
            let (waits, status) = message.matched_receive::<u8>();
            let sender = usize::try_from(status.source_rank()).ok();
            if let Some(waiting) = sender.and_then(|rank| waiting.get_mut(rank)) {
                *waiting = waits == 1;
            }
        }
        attendance(&waiting, usize::try_from(comm.rank()).unwrap_or_default())
    }
}

fn attendance(waiting: &[bool], mine: usize) -> Attendance {
    let ranks = || waiting.iter().enumerate().map(|(rank, &waits)| (rank, rank == mine || waits));
    let of = |here: bool| ranks().filter(|(_, waits)| *waits == here).map(|(rank, _)| Rank::from_index(rank)).collect();
    Attendance { waiting: of(true), missing: of(false) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_does_not_wait_is_missing() {
        let attendance = attendance(&[true, false, false, true], 2);
        assert_eq!(attendance.waiting, [Rank(0), Rank(2), Rank(3)]);
        assert_eq!(attendance.missing, [Rank(1)]);
    }
}
