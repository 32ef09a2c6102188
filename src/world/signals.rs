//! Ctrl-C and SIGTERM: this process ends at once, whatever it is doing, and the launcher takes the others along.

use std::io;
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::ending;
use crate::ids::Rank;

/// A launcher passes a signal on to all ranks: rank 0 speaks for them. The others give it this long, and speak only
/// where the signal was meant for them alone.
const OTHERS_WAIT: Duration = Duration::from_millis(1500);

/// Ends the process on SIGINT and SIGTERM with 130 and 143, after `clean_up`.
///
/// # Errors
/// If the handlers can't be set.
pub fn end_on_signals(clean_up: fn()) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in &mut signals {
            end(signal, clean_up);
        }
    })?;
    Ok(())
}

fn end(signal: i32, clean_up: fn()) {
    clean_up();
    let rank = ending::place().map_or(Rank(0), |(rank, _)| rank);
    if rank != Rank(0) {
        std::thread::sleep(OTHERS_WAIT);
    }
    let name = if signal == SIGINT { "Ctrl-C (SIGINT)" } else { "SIGTERM" };
    // No error of its own: a launcher also sends SIGTERM to those that remain when one rank has failed and said why.
    ending::speak(&format!("lockstep: {rank} ends on {name}; nothing is left half-written"));
    // Not `process::exit`: that would run the MPI library's exit handlers while the main thread is inside it.
    signal_hook::low_level::exit(128 + signal);
}
