//! Processes of a job: found by a mark in their environment, ended, measured.

use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Marks every process of a job, so that a hung one is found whatever group or session it has moved to.
pub const MARKER: &str = "RANKS_TEST_JOB";

/// The processes of a job.
pub fn marked_processes(mark: &str) -> Vec<u32> {
    let wanted = format!("{MARKER}={mark}");
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|&byte| byte == 0).any(|variable| variable == wanted.as_bytes())
        })
        .collect()
}

/// Gives processes that the launcher has ended a moment to vanish from the table; what remains has outlived the job.
pub fn wait_until_gone(mark: &str) -> Vec<u32> {
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        let alive = marked_processes(mark);
        if alive.is_empty() || Instant::now() > deadline {
            return alive;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

pub fn kill(pids: &[u32]) {
    if pids.is_empty() {
        return;
    }
    let list = pids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    // Some may have gone meanwhile, which `kill` reports as a failure.
    let _ = Command::new("sh").arg("-c").arg(format!("kill -9 {list}")).stderr(Stdio::null()).status();
}

pub fn high_water_mark(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}
