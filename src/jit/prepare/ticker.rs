//! A line every ten seconds while a kernel is being compiled: a rank that is silent for minutes looks dead.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(10);

/// Does `work`, and says every ten seconds that `what` is still being compiled.
pub(super) fn during<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    thread::scope(|scope| {
        let (done, is_done) = mpsc::channel::<()>();
        scope.spawn(move || {
            while is_done.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                tracing::info!("still compiling {what}, {} s so far", started.elapsed().as_secs());
            }
        });
        let value = work();
        drop(done);
        value
    })
}
