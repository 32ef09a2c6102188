//! What is done to a job while it runs: signals to the launcher or to one rank, once it has come to where it should be.
//!
//! Nothing here fails: a job that never comes there ends by itself, and its outcome says so.

use std::fs;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::processes::marked_processes;

/// Which of a job's pipes are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pipes {
    Read,
    /// Nobody reads standard output.
    StdoutGone,
    /// Nobody reads anything, as after `2>&1 | head -1`.
    NoneRead,
}

/// A job that has started.
#[derive(Debug)]
pub struct Running {
    /// Of the launcher, or of the only process.
    pub(super) pid: u32,
    pub(super) mark: String,
    /// What has come on standard error so far.
    pub(super) seen: Arc<Mutex<Vec<u8>>>,
}

/// Longest wait for a job to come to where it is disturbed.
const PATIENCE: Duration = Duration::from_secs(20);

impl Running {
    /// Waits until `needle` is on standard error.
    pub fn wait_for(&self, needle: &str) {
        self.wait_until(|| {
            let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            String::from_utf8_lossy(&seen).contains(needle)
        });
    }

    /// Waits until so many processes of the binary under test run.
    pub fn wait_for_ranks(&self, ranks: usize) {
        self.wait_until(|| marked_processes(&self.mark).into_iter().filter(|&pid| is_lockstep(pid)).count() == ranks);
    }

    pub fn wait_until(&self, is_there: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_there() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether no process of it is left.
    pub fn is_over(&self) -> bool {
        marked_processes(&self.mark).is_empty()
    }

    /// Sends a signal to the launcher, or to the only process.
    pub fn signal(&self, name: &str) {
        send(name, self.pid);
    }

    /// Sends a signal to one rank alone.
    pub fn signal_rank(&self, rank: usize, name: &str) {
        // As Open MPI and MPICH say it.
        let wanted = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].map(|name| format!("{name}={rank}"));
        let is_wanted = |variable: &[u8]| wanted.iter().any(|wanted| variable == wanted.as_bytes());
        let is_rank = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            is_lockstep(*pid) && environment.split(|&byte| byte == 0).any(is_wanted)
        };
        if let Some(pid) = marked_processes(&self.mark).into_iter().find(is_rank) {
            send(name, pid);
        }
    }
}

fn is_lockstep(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "lockstep")
}

fn send(name: &str, pid: u32) {
    // It may have ended meanwhile, which `kill` reports as a failure.
    let _ = Command::new("sh").arg("-c").arg(format!("kill -{name} {pid}")).stderr(Stdio::null()).status();
}
