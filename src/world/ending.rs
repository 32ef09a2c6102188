//! Ends that are not agreed on: a panic, a limit that passed, a signal. The whole job goes, with one cause.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};
use std::time::Duration;

use mpi::topology::SimpleCommunicator;
use mpi::traits::Communicator;

use super::agree::Ranks;
use super::roll::{Attendance, Notice};
use super::{Phase, World, signals};
use crate::exit::Exit;
use crate::host;
use crate::ids::Rank;

static PLACE: OnceLock<(Rank, usize)> = OnceLock::new();
static ENDING: OnceLock<Ending> = OnceLock::new();
/// Somebody in this process has given the cause, or is ending it; what fails because of that is not said.
static HAS_SPOKEN: AtomicBool = AtomicBool::new(false);

/// What a process does when it ends early.
#[derive(Debug, Clone, Copy)]
pub struct Ending {
    /// Prints a message of several lines to standard error: the log may be off, or not started yet.
    pub speak: fn(&str),
    /// Removes what is half-written.
    pub clean_up: fn(),
    /// What the launcher says this process is: its number, and of how many. Absent where there is none.
    pub launched: Option<(Rank, usize)>,
    /// The launcher says itself that it was told to end.
    pub launcher_speaks: bool,
}

/// Makes this process end well whatever happens: a panic on any thread says its rank and ends all ranks, Ctrl-C and
/// SIGTERM end with 130 and 143, and nothing is left half-written.
///
/// Without the panic hook the others would wait in a collective for ever: rsmpi finalises when it is dropped, and
/// finalising waits.
///
/// # Errors
/// If the signals' handlers can't be set.
pub fn end_well(ending: Ending) -> io::Result<()> {
    // A process has one way to end; a second caller finds it set.
    if ENDING.set(ending).is_err() {
        return Ok(());
    }
    std::panic::set_hook(Box::new(|panic| {
        let place = place().map_or(String::new(), |(rank, size)| format!("{rank} of {size}: "));
        last_words(&format!("{place}a bug in lockstep: {panic}"));
        abort_job(Exit::Bug);
    }));
    signals::end_on_signals(ending)
}

/// Where this process is, for messages of code that holds no world.
pub(super) fn remember_rank(rank: Rank, size: usize) {
    // A second world in one process is refused by MPI itself, so the first value stays.
    let _ = PLACE.set((rank, size));
}

/// What MPI has made of this process, or before that what the launcher said.
pub(super) fn place() -> Option<(Rank, usize)> {
    PLACE.get().copied().or_else(|| ENDING.get().and_then(|ending| ending.launched))
}

/// From here on this process has nothing to add, as it is being ended. False where it has given a cause before.
pub(super) fn fall_silent() -> bool {
    !HAS_SPOKEN.swap(true, Ordering::SeqCst)
}

/// Says why this process ends the job. Where two threads come here the first speaks, and ends both.
pub(super) fn last_words(cause: &str) {
    if !fall_silent() {
        loop {
            std::thread::park();
        }
    }
    speak(&format!("lockstep: error: {cause}"));
}

/// Says something while the process ends.
pub(super) fn speak(message: &str) {
    match ENDING.get() {
        Some(ending) => (ending.speak)(message),
        None => tracing::error!("{message}"),
    }
}

/// What a rank has said is read by its launcher in this time. MPICH's stops reading as soon as a rank aborts: 12 of 40
/// messages were lost without it (4.0.2, four ranks on two busy cores, 2026-11-30).
const READ_WITHIN: Duration = Duration::from_millis(100);

/// How long MPI may take to end the job, before this process ends alone.
const ABORT_LIMIT: Duration = Duration::from_secs(5);

/// Ends all ranks with `exit`'s code, without waiting for any.
pub fn abort_job(exit: Exit) -> ! {
    clean_up();
    see_daemon_off();
    // MPI asks the launcher to end the others, and waits for ever where that can't be reached, as over a cut link.
    let _ = std::thread::Builder::new().name("abort".to_owned()).spawn(move || {
        std::thread::sleep(ABORT_LIMIT);
        exit_at_once(exit);
    });
    if mpi::environment::is_initialized() && !mpi::environment::is_finalized() {
        std::thread::sleep(READ_WITHIN);
        SimpleCommunicator::world().abort(i32::from(exit.code()));
    }
    std::process::exit(i32::from(exit.code()))
}

/// Open MPI's daemons on hosts without `mpirun`.
const DAEMONS: [&str; 2] = ["orted", "prted"];

/// Waits up to 8 s for the end of the daemon with the number `$1` and the name `$2`, then ends it.
const SEE_OFF: &str = r#"n=0; while [ "$(cat "/proc/$1/comm" 2>/dev/null)" = "$2" ]; do
    [ $n -lt 16 ] || { kill -TERM "$1"; exit; }
    n=$((n + 1)); sleep 0.5; done"#;

/// A daemon whose `mpirun` is behind a cut link ends its ranks, and then tries to say so for a quarter of an hour. Told to end,
/// it goes at once, with its files. It serves this job alone where `launch/mpirun.sh` has started it. Who sees to it has to
/// outlive this rank, also where the daemon kills all that is of the rank's process group.
fn see_daemon_off() {
    let is_ours = ENDING.get().is_some_and(|ending| ending.launcher_speaks);
    if let Some((pid, name)) = host::parent()
        && is_ours
        && DAEMONS.contains(&name.as_str())
    {
        let mut shell = Command::new("sh");
        shell.args(["-c", SEE_OFF, "sh", &pid.to_string(), &name]).process_group(0);
        // Without a shell the daemon stays for its time, and nothing else.
        let _ = shell.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    }
}

/// Ends this process alone, for threads that may not call MPI. The launcher takes the others along.
pub(super) fn exit_at_once(exit: Exit) -> ! {
    clean_up();
    // Not `process::exit`: that would run the MPI library's exit handlers while the main thread is inside it.
    signal_hook::low_level::exit(i32::from(exit.code()))
}

/// Removes what is half-written. Writers wait from here on for the end of the process, and so would whoever removed a
/// second time, as where a process that aborts is told to end.
pub(super) fn clean_up() {
    static IS_CLEAN: Once = Once::new();
    if let Some(ending) = ENDING.get() {
        IS_CLEAN.call_once(ending.clean_up);
    }
}

/// How long a rank leaves it to those before it to speak for all that wait.
fn turn(waiting: &[Rank], mine: Rank) -> Duration {
    match waiting.iter().take_while(|rank| **rank < mine).count() {
        0 => Duration::ZERO,
        before => 4 * GRACE + 2 * GRACE * u32::try_from(before.min(MAX_BEFORE) - 1).unwrap_or_default(),
    }
}

/// Whoever has more before it does not wait longer for them.
const MAX_BEFORE: usize = 8;

/// How long notices of other ranks may still arrive once the limit has passed, and the speaker has to speak.
const GRACE: Duration = Duration::from_millis(500);

impl World {
    /// Says who is missing and ends the job. The lowest rank that waits speaks for all of them.
    pub(super) fn abort_after_limit(&self, operation: &str) -> ! {
        std::thread::sleep(GRACE);
        // Another's limit may pass a little later; where that can't be reached the next in line speaks.
        std::thread::sleep(turn(&self.roll.call(&self.comm).waiting, self.rank));
        let Attendance { waiting, missing, is_said } = self.roll.call(&self.comm);
        if is_said {
            // Whoever speaks ends the job. If this rank is still there after a while, that has not reached it.
            std::thread::sleep(20 * GRACE);
            abort_job(Exit::PeerFailed);
        }
        self.roll.announce(&self.comm, Notice::Speaks);
        let phase = self.phase.get();
        last_words(&too_late(phase, operation, self.doing(&missing).as_deref(), (&waiting, &missing)));
        abort_job(Exit::PeerFailed)
    }

    /// What ranks that are waited for are known to do.
    fn doing(&self, missing: &[Rank]) -> Option<String> {
        let work = self.work.borrow();
        let of_rank = |rank: &Rank| work.iter().find(|(busy, _)| busy == rank).map(|(_, work)| work.as_str());
        let known: Option<BTreeSet<&str>> = missing.iter().map(of_rank).collect();
        match known {
            Some(known) if !known.is_empty() => Some(known.into_iter().collect::<Vec<_>>().join(", ")),
            _ => self.watch.doing(),
        }
    }

    /// A line about a wait that takes long, for whoever watches.
    pub(super) fn say_who_is_missing(&self, operation: &str, waited: Duration) {
        let Attendance { missing, .. } = self.roll.call(&self.comm);
        if missing.is_empty() {
            return;
        }
        let Phase { name, limit, key } = self.phase.get();
        tracing::info!(
            "{}; {} has waited for {} s, at most {} s ({key})",
            absent(name, operation, self.doing(&missing).as_deref(), &missing),
            self.rank,
            waited.as_secs(),
            limit.as_secs(),
        );
    }
}

/// What is known of ranks that are waited for. `doing` is what all do before they come.
fn absent(phase: &str, operation: &str, doing: Option<&str>, missing: &[Rank]) -> String {
    match doing {
        Some(doing) => format!("{} still {doing}", Ranks(missing)),
        None => {
            let have = if missing.len() == 1 { "has" } else { "have" };
            format!("{} {have} not come to the {operation} of phase {phase}", Ranks(missing))
        }
    }
}

fn too_late(
    Phase { name, limit, key }: Phase,
    operation: &str,
    doing: Option<&str>,
    (waiting, missing): (&[Rank], &[Rank]),
) -> String {
    let limit = limit.as_secs();
    let wait = format!("{} wait{}", Ranks(waiting), if waiting.len() == 1 { "s" } else { "" });
    if missing.is_empty() {
        return format!(
            "all ranks are in the {operation} of phase {name}, but it has not ended within {limit} s: a message is lost or \
             very slow. See that the hosts reach each other; if the network is only slow, raise {key}"
        );
    }
    let absent = absent(name, operation, doing, missing);
    let (within, state) = if doing.is_some() { ("after", "slow, stuck or gone") } else { ("within", "stuck or gone") };
    format!("{absent} {within} {limit} s, where {wait}: {state}. If the work is only slow, raise {key}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_speak_in_turn() {
        let waiting = [0, 1, 2, 3].map(Rank);
        let turns = waiting.map(|rank| turn(&waiting, rank).as_millis());
        assert_eq!(turns, [0, 2000, 3000, 4000]);
        assert_eq!(turn(&waiting[2..], Rank(3)).as_millis(), 2000);
        let many: Vec<Rank> = (0..100).map(Rank).collect();
        assert_eq!(turn(&many, Rank(99)).as_millis(), 9000);
    }

    fn load() -> Phase {
        Phase { name: "load", limit: Duration::from_secs(4), key: "timeouts.load_s" }
    }

    #[test]
    fn whoever_is_late_is_named_with_what_it_does() {
        let (here, late) = (&[Rank(0), Rank(2)][..], &[Rank(1)][..]);
        insta::assert_snapshot!(
            too_late(load(), "all-gather", Some("loading layer 3 of k3"), (here, late)),
            @"rank 1 still loading layer 3 of k3 after 4 s, where ranks 0, 2 wait: slow, stuck or gone. If the work is only slow, raise timeouts.load_s"
        );
        insta::assert_snapshot!(
            too_late(load(), "all-to-all of rows", None, (&here[..1], &[Rank(1), Rank(2)])),
            @"ranks 1-2 have not come to the all-to-all of rows of phase load within 4 s, where rank 0 waits: stuck or gone. If the work is only slow, raise timeouts.load_s"
        );
        insta::assert_snapshot!(
            too_late(load(), "all-gather", None, (&[Rank(0), Rank(1), Rank(2)], &[])),
            @"all ranks are in the all-gather of phase load, but it has not ended within 4 s: a message is lost or very slow. See that the hosts reach each other; if the network is only slow, raise timeouts.load_s"
        );
    }
}
