//! Ends that are not agreed on: a panic, a limit that passed. The whole job goes, with one cause.

use std::sync::OnceLock;
use std::time::Duration;

use mpi::topology::SimpleCommunicator;
use mpi::traits::Communicator;

use super::agree::Ranks;
use super::roll::Attendance;
use super::{Phase, World};
use crate::exit::Exit;
use crate::ids::Rank;

static PLACE: OnceLock<(Rank, usize)> = OnceLock::new();

/// Where this process is, for messages of code that holds no world.
pub(super) fn remember_rank(rank: Rank, size: usize) {
    // A second world in one process is refused by MPI itself, so the first value stays.
    let _ = PLACE.set((rank, size));
}

/// What [`remember_rank`] was told.
pub(super) fn place() -> Option<(Rank, usize)> {
    PLACE.get().copied()
}

/// How last words are printed: the log may be off, or not started yet.
static SPEAK: OnceLock<fn(&str)> = OnceLock::new();

/// Makes a panic on any thread say its rank and end all ranks. `speak` prints a message of several lines to standard
/// error; it also prints who is missing when a limit passes.
///
/// Without it the others would wait in a collective for ever: rsmpi finalises when it is dropped, and finalising waits.
pub fn install_panic_hook(speak: fn(&str)) {
    let _ = SPEAK.set(speak);
    std::panic::set_hook(Box::new(|panic| {
        let place = PLACE.get().map_or(String::new(), |(rank, size)| format!("{rank} of {size}: "));
        last_words(&format!("{place}a bug in lockstep: {panic}"));
        abort_job(Exit::Bug);
    }));
}

/// Says why this process ends the job.
pub(super) fn last_words(cause: &str) {
    speak(&format!("lockstep: error: {cause}"));
}

/// Says something while the process ends.
pub(super) fn speak(message: &str) {
    match SPEAK.get() {
        Some(speak) => speak(message),
        None => tracing::error!("{message}"),
    }
}

/// Ends all ranks at once with `exit`'s code, without waiting for any.
pub fn abort_job(exit: Exit) -> ! {
    if mpi::environment::is_initialized() && !mpi::environment::is_finalized() {
        SimpleCommunicator::world().abort(i32::from(exit.code()));
    }
    std::process::exit(i32::from(exit.code()))
}

/// How long notices of other ranks may still arrive once the limit has passed, and the speaker has to speak.
const GRACE: Duration = Duration::from_millis(500);

impl World {
    /// Says who is missing and ends the job. The lowest rank that waits speaks for all of them.
    pub(super) fn abort_after_limit(&self, operation: &str) -> ! {
        std::thread::sleep(GRACE);
        let Attendance { waiting, missing } = self.roll.call(&self.comm);
        if waiting.first() != Some(&self.rank) {
            // Its limit may pass a little later. If this rank is still there then, nobody has spoken.
            std::thread::sleep(4 * GRACE);
        }
        let Phase { name, limit } = self.phase.get();
        let work = self.work.borrow();
        let known: Vec<String> = missing
            .iter()
            .filter_map(|rank| work.iter().find(|(busy, _)| busy == rank))
            .map(|(rank, work)| format!("{rank} still {work}"))
            .collect();
        if !missing.is_empty() && known.len() == missing.len() {
            last_words(&format!(
                "{} after {} s, the limit of phase {name}, where {} wait{}. If it is only slow, raise timeouts.{name}_s",
                known.join(", "),
                limit.as_secs(),
                Ranks(&waiting),
                if waiting.len() == 1 { "s" } else { "" },
            ));
            abort_job(Exit::PeerFailed)
        }
        last_words(&format!(
            "{} not come to the {operation} of phase {name} within {} s, where {} wait{}: stuck or gone. \
             If the work is only slow, raise timeouts.{name}_s",
            if missing.is_empty() { "all ranks are here, but their messages have".to_owned() } else { had(&missing) },
            limit.as_secs(),
            Ranks(&waiting),
            if waiting.len() == 1 { "s" } else { "" },
        ));
        abort_job(Exit::PeerFailed)
    }
}

fn had(missing: &[Rank]) -> String {
    format!("{} ha{}", Ranks(missing), if missing.len() == 1 { "s" } else { "ve" })
}
