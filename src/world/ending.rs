//! Ends that are not agreed on: a panic, a limit that passed. The whole job goes, with one cause.

use std::sync::OnceLock;
use std::time::Duration;

use mpi::topology::SimpleCommunicator;
use mpi::traits::Communicator;

use super::World;
use crate::exit::Exit;
use crate::ids::Rank;

static PLACE: OnceLock<(Rank, usize)> = OnceLock::new();

/// Where this process is, for messages of code that holds no world.
pub(super) fn remember_rank(rank: Rank, size: usize) {
    // A second world in one process is refused by MPI itself, so the first value stays.
    let _ = PLACE.set((rank, size));
}

/// Makes a panic on any thread say its rank and end all ranks.
///
/// Without it the others would wait in a collective for ever: rsmpi finalises when it is dropped, and finalising waits.
pub fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        let place = PLACE.get().map_or(String::new(), |(rank, size)| format!("{rank} of {size}: "));
        tracing::error!("{place}a bug in lockstep: {panic}");
        abort_job(Exit::Bug);
    }));
}

/// Ends all ranks at once with `exit`'s code.
fn abort_job(exit: Exit) -> ! {
    if mpi::environment::is_initialized() && !mpi::environment::is_finalized() {
        SimpleCommunicator::world().abort(i32::from(exit.code()));
    }
    std::process::exit(i32::from(exit.code()))
}

impl World {
    /// Says what was waited for and ends the job.
    pub(super) fn abort_after_limit(&self, phase: &str, operation: &str, limit: Duration) -> ! {
        tracing::error!(
            "{} of {} on {} waited {} s for other ranks in phase {phase} ({operation}): one of them is stuck or gone. \
             If the work is only slow, raise timeouts.{phase}_s",
            self.rank,
            self.size,
            self.host,
            limit.as_secs(),
        );
        abort_job(Exit::PeerFailed)
    }
}
