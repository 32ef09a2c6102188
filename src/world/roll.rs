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

/// What a rank tells the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Notice {
    /// It does not wait any more.
    Works = 0,
    /// It has waited a while.
    Waits = 1,
    /// Its limit has passed, and it says so for all.
    Speaks = 2,
}

/// The last notice of every rank.
pub(super) struct Roll {
    notices: RefCell<Vec<Notice>>,
}

/// Who waits and who does not, once a limit has passed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Attendance {
    /// Ranks that wait too, this one included.
    pub waiting: Vec<Rank>,
    /// Ranks that have not come.
    pub missing: Vec<Rank>,
    /// Another rank says so already.
    pub is_said: bool,
}

impl Roll {
    pub fn new(size: usize) -> Self {
        Self { notices: RefCell::new(vec![Notice::Works; size]) }
    }

    /// How long a rank waits before it tells the others: well before the limit.
    pub fn notice_after(limit: Duration) -> Duration {
        (limit / 4).min(Duration::from_secs(1))
    }

    /// Tells every other rank. Never blocks.
    pub fn announce(&self, comm: &SimpleCommunicator, notice: Notice) {
        for rank in (0..comm.size()).filter(|&rank| rank != comm.rank()) {
            // A peer that is gone would never complete the send. The word is leaked, so that MPI may keep it, and the
            // request is forgotten: two words a peer for each wait that takes long.
            let word: &'static [u8; 1] = Box::leak(Box::new([notice as u8]));
            let request = comm.process_at_rank(rank).immediate_send_with_tag(StaticScope, &word[..], NOTICE_TAG);
            std::mem::forget(request);
        }
    }

    /// Who waits, by the notices that have come. A rank's notices arrive in the order in which it sent them.
    pub fn call(&self, comm: &SimpleCommunicator) -> Attendance {
        let mut notices = self.notices.borrow_mut();
        while let Some((message, _)) = comm.any_process().immediate_matched_probe_with_tag(NOTICE_TAG) {
            let (said, status) = message.matched_receive::<u8>();
            let sender = usize::try_from(status.source_rank()).ok();
            if let Some(notice) = sender.and_then(|rank| notices.get_mut(rank)) {
                let known = [Notice::Works, Notice::Waits, Notice::Speaks];
                *notice = known.into_iter().find(|known| *known as u8 == said).unwrap_or(Notice::Works);
            }
        }
        attendance(&notices, usize::try_from(comm.rank()).unwrap_or_default())
    }
}

fn attendance(notices: &[Notice], mine: usize) -> Attendance {
    let ranks = || notices.iter().enumerate().map(|(rank, &notice)| (rank, rank == mine || notice != Notice::Works));
    let of = |here: bool| ranks().filter(|(_, waits)| *waits == here).map(|(rank, _)| Rank::from_index(rank)).collect();
    let is_said = notices.contains(&Notice::Speaks);
    Attendance { waiting: of(true), missing: of(false), is_said }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_does_not_wait_is_missing() {
        use Notice::{Speaks, Waits, Works};
        let found = attendance(&[Waits, Works, Works, Waits], 2);
        assert_eq!(found.waiting, [Rank(0), Rank(2), Rank(3)]);
        assert_eq!((found.missing, found.is_said), (vec![Rank(1)], false));
        let found = attendance(&[Speaks, Works, Works, Waits], 3);
        assert_eq!((found.waiting, found.is_said), (vec![Rank(0), Rank(3)], true));
    }
}
