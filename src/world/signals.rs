//! Ctrl-C and SIGTERM: this process ends at once, whatever it is doing, and the launcher takes the others along.

use std::io;
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Origin;

use super::ending::{self, Ending};
use crate::ids::Rank;

/// A signal may be sent to all ranks: rank 0 speaks for them. The others give it this long, and speak only where the
/// signal was meant for them alone. Once rank 0 has ended, mpirun takes a second before it ends them.
const OTHERS_WAIT: Duration = Duration::from_millis(2000);

/// Open MPI 4.1.4 ends ranks by SIGTERM and, a second later, SIGKILL; but that second is over as soon as any of them has
/// ended. So each gives the others time to remove what they are writing.
const CLEAN_UP_TIME: Duration = Duration::from_millis(300);

/// Ends the process on SIGINT and SIGTERM with 130 and 143.
pub(super) fn end_on_signals(ending: Ending) -> io::Result<()> {
    let mut signals = SignalsInfo::<WithOrigin>::new([SIGINT, SIGTERM])?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if let Some(origin) = signals.forever().next() {
            end(ending, &origin);
        }
    })?;
    Ok(())
}

fn end(ending: Ending, origin: &Origin) -> ! {
    ending::clean_up();
    let is_first = ending::fall_silent();
    let place = ending::place();
    let by_launcher = ending.launched.is_some() && is_from_parent(origin);
    if by_launcher {
        std::thread::sleep(CLEAN_UP_TIME);
    }
    // What it says is no error of its own: a launcher sends SIGTERM also to those that remain when one has failed and
    // has said why.
    match place {
        _ if !is_first || (by_launcher && ending.launcher_speaks) => {}
        // Launchers tell all ranks.
        Some((rank, _)) if rank != Rank(0) && by_launcher => {}
        Some((rank, _)) if rank != Rank(0) => {
            std::thread::sleep(OTHERS_WAIT);
            ending::speak(&farewell(origin.signal, place, by_launcher));
        }
        _ => ending::speak(&farewell(origin.signal, place, by_launcher)),
    }
    // Not `process::exit`: that would run the MPI library's exit handlers while the main thread is inside it.
    signal_hook::low_level::exit(128 + origin.signal)
}

/// Launchers are the parents of their ranks. One that isn't, because a script stands between, is taken for a person.
fn is_from_parent(origin: &Origin) -> bool {
    let parent = i32::try_from(std::os::unix::process::parent_id());
    origin.process.is_some_and(|sender| parent == Ok(sender.pid))
}

fn farewell(signal: i32, place: Option<(Rank, usize)>, by_launcher: bool) -> String {
    let signal = if signal == SIGINT { "Ctrl-C (SIGINT)" } else { "SIGTERM" };
    let who = place.filter(|(_, size)| *size > 1).map_or("this process".to_owned(), |(rank, _)| rank.to_string());
    let how = if by_launcher { "is ended by its launcher, with" } else { "ends on" };
    format!("lockstep: {who} {how} {signal}; nothing is left half-written")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_farewell_says_who_ends_and_why() {
        assert_eq!(
            farewell(SIGINT, None, false),
            "lockstep: this process ends on Ctrl-C (SIGINT); nothing is left half-written"
        );
        assert_eq!(
            farewell(SIGTERM, Some((Rank(2), 4)), false),
            "lockstep: rank 2 ends on SIGTERM; nothing is left half-written"
        );
        assert_eq!(
            farewell(SIGTERM, Some((Rank(0), 4)), true),
            "lockstep: rank 0 is ended by its launcher, with SIGTERM; nothing is left half-written"
        );
    }
}
