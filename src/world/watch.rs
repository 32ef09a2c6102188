//! What takes long is said: what this rank is at, every so often, and a limit for MPI's own start and end, which wait
//! without one.
//!
//! Rank 0 speaks alone. While it waits it says who is missing ([`super::World`] asks [`Watch::is_line_due`]); while it
//! works itself a thread says what at, because a read or a compiler may not return for minutes.

use std::cell::Cell;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::{Phase, ending};
use crate::exit::Exit;
use crate::ids::Rank;

/// Lines of a phase that takes long come so often; more often where its limit is short.
fn interval(limit: Duration) -> Duration {
    (limit / 4).min(Duration::from_secs(10))
}

/// What this rank is doing until it next meets the others.
pub(super) struct Watch {
    shared: Arc<Shared>,
    /// Whether something is being done: waits that nobody named cost no lock.
    is_busy: Cell<bool>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    phase: Phase,
    /// As in `loading layer 3`.
    doing: Option<String>,
    /// This rank has done it and waits for the others.
    waits: bool,
    last_line: Instant,
    is_over: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch {
    pub fn new(rank: Rank, phase: Phase) -> Self {
        let state = State { phase, doing: None, waits: false, last_line: Instant::now(), is_over: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        if rank == Rank(0) {
            let shared = Arc::clone(&shared);
            // Without the thread the lines are missing and nothing else.
            let _ =
                thread::Builder::new().name("progress".to_owned()).spawn(move || say_what_takes_long(&shared, rank));
        }
        Self { shared, is_busy: Cell::new(false) }
    }

    pub fn enter(&self, phase: Phase) {
        self.change(|state| (state.phase, state.last_line, state.doing) = (phase, Instant::now(), None));
        self.is_busy.set(false);
    }

    pub fn begin(&self, doing: String) {
        self.is_busy.set(true);
        self.change(|state| (state.doing, state.waits) = (Some(doing), false));
    }

    /// This rank waits; what it did is done.
    pub fn wait(&self) {
        if self.is_busy.get() {
            self.change(|state| state.waits = true);
        }
    }

    /// All ranks have come: nobody is at it any more.
    pub fn end(&self) {
        if self.is_busy.replace(false) {
            self.change(|state| state.doing = None);
        }
    }

    /// What this rank did last before it waited, which is what a rank that has not come is still at.
    pub fn doing(&self) -> Option<String> {
        self.shared.lock().doing.clone()
    }

    /// Whether it is time for a line about a wait that began at `begin`; if so, the next is due an interval later.
    pub fn is_line_due(&self, begin: Instant) -> bool {
        let mut state = self.shared.lock();
        // Work that has a name may be late in small pieces; another wait is no news before it has lasted.
        let since = if state.doing.is_some() { state.last_line } else { state.last_line.max(begin) };
        let is_due = since.elapsed() >= interval(state.phase.limit);
        if is_due {
            state.last_line = Instant::now();
        }
        is_due
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.shared.lock());
        self.shared.changed.notify_all();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.change(|state| state.is_over = true);
    }
}

/// Until woken, where there is nothing to say.
const IDLE: Duration = Duration::from_secs(3600);

fn say_what_takes_long(shared: &Shared, rank: Rank) {
    let mut state = shared.lock();
    while !state.is_over {
        let due = state.last_line + interval(state.phase.limit);
        let left = due.saturating_duration_since(Instant::now());
        let pause = match (&state.doing, state.waits) {
            (Some(doing), false) if left.is_zero() => {
                // Printing may block on a full pipe, but then the work would as well.
                tracing::info!("{rank} still {doing}, in phase {}", state.phase.name);
                state.last_line = Instant::now();
                continue;
            }
            (Some(_), false) => left,
            _ => IDLE,
        };
        state = shared.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// While it lives, ends the process when a limit passes.
pub(super) struct Watchdog {
    /// Dropped with the guard, which the thread sees.
    _armed: Sender<()>,
}

/// Ranks that are stuck alike speak in turn, so that the first takes the others along before they do: mpirun takes a
/// second for that.
const TURN: Duration = Duration::from_millis(2000);
const MAX_TURNS: u32 = 10;

impl Watchdog {
    /// `what` is what MPI is waited for to do, as in `start`; `key` is the setting of the limit.
    pub fn new(limit: Duration, what: &'static str, key: &'static str) -> Self {
        let (armed, receiver) = mpsc::channel();
        // Without the thread the wait has no limit, as it would have without this.
        let _ = thread::Builder::new().name("watchdog".to_owned()).spawn(move || {
            if receiver.recv_timeout(limit) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let rank = ending::place().map_or(Rank(0), |(rank, _)| rank);
            thread::sleep(TURN * rank.0.min(MAX_TURNS));
            ending::last_words(&format!(
                "{rank} has waited {} s for MPI to {what}: another process that was launched with it has not come, is \
                 stuck or can't be reached. See that lockstep starts on every host and that the hosts reach each other; \
                 if they are only slow, raise {key}",
                limit.as_secs()
            ));
            ending::exit_at_once(Exit::PeerFailed);
        });
        Self { _armed: armed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(limit: Duration) -> Watch {
        // Not rank 0: no thread that speaks meanwhile.
        Watch::new(Rank(1), Phase { name: "load", limit, key: "timeouts.load_s" })
    }

    #[test]
    fn lines_are_ten_seconds_apart_or_a_quarter_of_a_short_limit() {
        assert_eq!(interval(Duration::from_secs(3600)), Duration::from_secs(10));
        assert_eq!(interval(Duration::from_secs(6)), Duration::from_millis(1500));
    }

    #[test]
    fn a_line_is_due_once_an_interval() {
        let now = Instant::now();
        assert!(!watch(Duration::from_secs(3600)).is_line_due(now));
        let watch = watch(Duration::ZERO);
        watch.begin("loading layer 3".to_owned());
        watch.wait();
        assert!(watch.is_line_due(now));
        watch.shared.lock().phase.limit = Duration::from_secs(3600);
        assert!(!watch.is_line_due(now), "a line was just said");
    }

    #[test]
    fn what_was_done_is_known_until_all_have_come() {
        let watch = watch(Duration::from_secs(4));
        assert_eq!(watch.doing(), None);
        watch.begin("loading layer 3".to_owned());
        watch.wait();
        assert_eq!(watch.doing().as_deref(), Some("loading layer 3"));
        watch.end();
        assert_eq!(watch.doing(), None);
    }
}
