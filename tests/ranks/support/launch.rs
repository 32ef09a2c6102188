//! Starts the binary under `mpirun` (or alone), waits with a hard limit, and leaves no process behind.
//!
//! Knows nothing of what the command means.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Every failing case has to be over by then (DESIGN: all ranks gone within 30 s).
pub const FAILURE_LIMIT: Duration = Duration::from_secs(30);
/// A case that succeeds may take longer on a busy machine; beyond this it hangs.
pub const SUCCESS_LIMIT: Duration = Duration::from_secs(240);
/// Jobs at once over all test threads and processes: the smallest machine we test on has two cores.
const NUM_SLOTS: usize = 2;
/// Marks every process of a job, so that a hung one is found whatever group or session it has moved to.
const MARKER: &str = "RANKS_TEST_JOB";

/// A command to start.
#[derive(Debug, Clone)]
pub struct Job {
    ranks: Option<usize>,
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(String, String)>,
    of_rank: Vec<(usize, Change)>,
    limit: Duration,
    watch_memory: bool,
}

/// What is different on one rank.
#[derive(Debug, Clone)]
enum Change {
    /// A variable that reaches this rank alone.
    Env(String, String),
    /// A word of the command line that is another one here.
    Word(OsString, OsString),
    /// A word that follows the others.
    Added(OsString),
}

/// What a job left.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code; 128 + signal where a signal ended it.
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
    /// From the start of the job, waiting for a slot excluded.
    pub elapsed: Duration,
    /// The command line, for messages.
    pub command: String,
    /// Largest resident size seen of any process of the job; 0 unless asked for.
    pub peak_rss_bytes: u64,
}

/// The binary under test on `ranks` MPI ranks.
pub fn mpirun(ranks: usize) -> Job {
    Job { ranks: Some(ranks), ..alone() }
}

/// The binary under test without a launcher.
pub fn alone() -> Job {
    Job {
        ranks: None,
        program: env!("CARGO_BIN_EXE_lockstep").into(),
        args: Vec::new(),
        env: vec![("LOCKSTEP_THREADS".into(), "1".into())],
        of_rank: Vec::new(),
        limit: SUCCESS_LIMIT,
        watch_memory: false,
    }
}

impl Job {
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Replaces a word of the command line.
    pub fn word(mut self, word: &str, other: &str) -> Self {
        let found = self.args.iter_mut().find(|known| *known == word);
        *found.unwrap_or_else(|| panic!("no {word} to replace")) = other.into();
        self
    }

    /// The same job on so many ranks.
    pub fn ranks(mut self, ranks: usize) -> Self {
        self.ranks = Some(ranks);
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.retain(|(known, _)| known != name);
        self.env.push((name.into(), value.into()));
        self
    }

    /// Sets a variable on one rank, as where `mpirun` did not pass it on.
    pub fn env_of(mut self, rank: usize, name: &str, value: &str) -> Self {
        self.of_rank.push((rank, Change::Env(name.into(), value.into())));
        self
    }

    /// Replaces a word of the command line on one rank.
    pub fn word_of(mut self, rank: usize, word: impl Into<OsString>, other: impl Into<OsString>) -> Self {
        self.of_rank.push((rank, Change::Word(word.into(), other.into())));
        self
    }

    /// Adds a word to the command line of one rank.
    pub fn arg_of(mut self, rank: usize, arg: impl Into<OsString>) -> Self {
        self.of_rank.push((rank, Change::Added(arg.into())));
        self
    }

    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Follows the resident size of the job's processes while it runs.
    pub fn watch_memory(mut self) -> Self {
        self.watch_memory = true;
        self
    }

    fn program(mut self, program: &str) -> Self {
        self.program = program.into();
        self
    }

    fn command_line(&self) -> Vec<OsString> {
        let mut line: Vec<OsString> = Vec::new();
        if let Some(ranks) = self.ranks
            && !self.of_rank.is_empty()
        {
            line.extend(["mpirun".into(), "--oversubscribe".into()]);
            for rank in 0..ranks {
                line.extend((rank > 0).then(|| ":".into()));
                line.extend(self.app_of(rank));
            }
            return line;
        }
        if let Some(ranks) = self.ranks {
            line.extend(["mpirun".into(), "--oversubscribe".into(), "-n".into(), ranks.to_string().into()]);
        }
        line.push(self.program.clone().into());
        line.extend(self.args.iter().cloned());
        line
    }

    /// One rank's part of a line of many programs.
    fn app_of(&self, rank: usize) -> Vec<OsString> {
        let mut line: Vec<OsString> = vec!["-n".into(), "1".into(), "env".into()];
        let changes = || self.of_rank.iter().filter(|(of, _)| *of == rank).map(|(_, change)| change);
        for change in changes() {
            if let Change::Env(name, value) = change {
                line.push(format!("{name}={value}").into());
            }
        }
        let start = line.len();
        line.push(self.program.clone().into());
        line.extend(self.args.iter().cloned());
        for change in changes() {
            match change {
                Change::Env(..) => {}
                Change::Word(word, other) => {
                    let found = line[start..].iter_mut().find(|known| *known == word);
                    *found.unwrap_or_else(|| panic!("no {} to replace", word.display())) = other.clone();
                }
                Change::Added(arg) => line.push(arg.clone()),
            }
        }
        line
    }

    fn spawn(&self, mark: &str) -> Child {
        let line = self.command_line();
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("LOCKSTEP_") {
                command.env_remove(name);
            }
        }
        command
            .env(MARKER, mark)
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("OMPI_MCA_mpi_yield_when_idle", "1")
            .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
            .env("OMPI_MCA_btl_vader_single_copy_mechanism", "none")
            .envs(self.env.iter().map(|(name, value)| (name, value)));
        command.spawn().unwrap_or_else(|error| {
            panic!(
                "cannot start {}: {error}. These tests need Open MPI: on Debian or Ubuntu \
                 `apt-get install openmpi-bin libopenmpi-dev`, then check that `mpirun --version` works",
                line[0].display()
            )
        })
    }

    /// Runs to the end.
    ///
    /// Panics, with what was printed so far and after killing every process, if the limit passes or a process outlives
    /// the job.
    pub fn run(&self) -> Outcome {
        static NEXT_JOB: AtomicUsize = AtomicUsize::new(0);
        let _slot = take_slot();
        let mark = format!("{}-{}", std::process::id(), NEXT_JOB.fetch_add(1, Ordering::Relaxed));
        let command = self.command_line().iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
        let start = Instant::now();
        let mut child = self.spawn(&mark);
        let stdout = drain(child.stdout.take().expect("stdout is piped"));
        let stderr = drain(child.stderr.take().expect("stderr is piped"));

        let (status, peak_rss_bytes) = self.wait(child, &mark, start);
        let elapsed = start.elapsed();
        let left_over = if status.is_some() { wait_until_gone(&mark) } else { marked_processes(&mark) };
        if !left_over.is_empty() {
            kill(&left_over);
            // Also what was being started meanwhile.
            kill(&wait_until_gone(&mark));
        }
        let (stdout, stderr) = (stdout.join().expect("the reader ends"), stderr.join().expect("the reader ends"));
        let printed = format!("--- stdout\n{stdout}\n--- stderr\n{stderr}");
        let Some(status) = status else {
            panic!(
                "hangs: still running after {} s, {} processes killed: {command}\n{printed}",
                self.limit.as_secs(),
                left_over.len()
            );
        };
        assert!(left_over.is_empty(), "{} processes outlived the job: {command}\n{printed}", left_over.len());
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
        Outcome { code, stdout, stderr, elapsed, command, peak_rss_bytes }
    }

    fn wait(&self, mut child: Child, mark: &str, start: Instant) -> (Option<ExitStatus>, u64) {
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || sender.send(child.wait().expect("the child can be waited for")));
        let mut peak = 0;
        loop {
            let left = self.limit.saturating_sub(start.elapsed());
            let pause = if self.watch_memory { left.min(Duration::from_millis(5)) } else { left };
            match receiver.recv_timeout(pause) {
                Ok(status) => return (Some(status), peak),
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return (None, peak),
                Err(RecvTimeoutError::Timeout) => {
                    let now = marked_processes(mark).into_iter().filter_map(high_water_mark).max();
                    peak = peak.max(now.unwrap_or(0));
                }
                Err(RecvTimeoutError::Disconnected) => panic!("the waiting thread died"),
            }
        }
    }
}

impl Outcome {
    /// All that was printed, for messages.
    pub fn printed(&self) -> String {
        format!("{}\nexit code {}\n--- stdout\n{}\n--- stderr\n{}", self.command, self.code, self.stdout, self.stderr)
    }

    /// Panics unless the exit code is `code`.
    #[track_caller]
    pub fn expect_code(self, code: i32) -> Self {
        assert_eq!(self.code, code, "unexpected exit code: {}", self.printed());
        self
    }

    /// Panics unless the job failed as a user deserves: the documented exit code, in time, one message which holds every
    /// one of `needles`, no panic.
    #[track_caller]
    pub fn fails_clearly(self, code: i32, needles: &[&str]) -> Self {
        assert_ne!(self.code, 0, "should have failed: {}", self.printed());
        assert!(self.elapsed < FAILURE_LIMIT, "took {:?} to fail: {}", self.elapsed, self.printed());
        for trace in ["panicked at", "stack backtrace", "core dumped", "Segmentation fault"] {
            assert!(!self.stderr.contains(trace), "{trace:?} instead of a message: {}", self.printed());
        }
        let messages = self.error_messages();
        assert_eq!(messages.len(), 1, "want one error message, printed once: {}", self.printed());
        for needle in needles {
            assert!(messages[0].contains(needle), "the message lacks {needle:?}: {}", self.printed());
        }
        assert_eq!(self.code, code, "unexpected exit code: {}", self.printed());
        self
    }

    /// Everything printed to stderr from a line that starts with `lockstep: error` (or `error`, of the option parser) to the
    /// next such line or the launcher's own epilogue.
    fn error_messages(&self) -> Vec<String> {
        let mut messages: Vec<String> = Vec::new();
        let mut within = false;
        for line in self.stderr.lines() {
            if ["lockstep: error", "error"].iter().any(|start| line.starts_with(start)) {
                messages.push(String::new());
                within = true;
            } else if line.starts_with("-----") {
                within = false;
            }
            if let (true, Some(message)) = (within, messages.last_mut()) {
                message.push_str(line);
                message.push('\n');
            }
        }
        messages
    }
}

/// Waits for one of the slots; the lock goes with the file. Files and not a semaphore, so that a runner which starts a
/// process a test is held to the same number.
fn take_slot() -> File {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let first = std::process::id() as usize + NEXT.fetch_add(1, Ordering::Relaxed);
    let mut slots: Vec<File> = (0..NUM_SLOTS)
        .map(|slot| {
            let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("ranks-slot-{slot}"));
            File::create(&path).unwrap_or_else(|error| panic!("cannot create {}: {error}", path.display()))
        })
        .collect();
    let mine = (0..NUM_SLOTS)
        .map(|step| (first + step) % NUM_SLOTS)
        .find(|&slot| slots[slot].try_lock().is_ok())
        .unwrap_or_else(|| {
            let slot = first % NUM_SLOTS;
            slots[slot].lock().expect("a slot can be locked");
            slot
        });
    slots.swap_remove(mine)
}

fn drain(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // An error here means the pipe broke, after which there is nothing more to read.
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn marked_processes(mark: &str) -> Vec<u32> {
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
fn wait_until_gone(mark: &str) -> Vec<u32> {
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        let alive = marked_processes(mark);
        if alive.is_empty() || Instant::now() > deadline {
            return alive;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn kill(pids: &[u32]) {
    if pids.is_empty() {
        return;
    }
    let list = pids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    // Some may have gone meanwhile, which `kill` reports as a failure.
    let _ = Command::new("sh").arg("-c").arg(format!("kill -9 {list}")).stderr(Stdio::null()).status();
}

fn high_water_mark(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(job: Job, script: &str) -> Job {
        job.program("sh").args(["-c", script])
    }

    fn panic_text(run: impl FnOnce() + std::panic::UnwindSafe) -> String {
        let payload = std::panic::catch_unwind(run).expect_err("should have panicked");
        payload.downcast_ref::<String>().cloned().unwrap_or_default()
    }

    #[test]
    fn a_job_reports_code_output_and_ranks() {
        let outcome = shell(mpirun(3), "echo out $LOCKSTEP_THREADS; echo err >&2; exit 0").run().expect_code(0);
        assert_eq!(outcome.stdout.matches("out 1").count(), 3);
        assert_eq!(outcome.stderr.matches("err").count(), 3);
        assert_eq!(shell(mpirun(2), "exit 7").run().code, 7);
        assert_eq!(shell(alone(), "kill -9 $$").run().code, 128 + 9);
    }

    #[test]
    fn a_hung_job_is_killed_and_named() {
        let text = panic_text(|| {
            shell(mpirun(2), "echo begun; exec sleep 87654").limit(Duration::from_secs(3)).run();
        });
        assert!(text.contains("hangs") && text.contains("sleep 87654") && text.contains("begun"), "{text}");
        let own = std::process::id().to_string();
        let alive = fs::read_dir("/proc").expect("/proc").filter_map(|entry| {
            let pid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
            let ours = format!("{MARKER}={own}-");
            (String::from_utf8_lossy(&environment).contains(&ours) && line.contains("87654")).then_some(pid)
        });
        assert_eq!(alive.count(), 0, "processes of the hung job are still there");
    }

    #[test]
    fn a_process_that_outlives_its_job_is_caught() {
        let text = panic_text(|| {
            shell(alone(), "sleep 87653 >/dev/null 2>&1 & exit 0").run();
        });
        assert!(text.contains("outlived"), "{text}");
    }

    #[test]
    fn memory_is_followed_when_asked() {
        let script = "x=$(head -c 40000000 /dev/zero | tr '\\0' a); sleep 1; exit 0";
        let outcome = shell(alone(), script).watch_memory().run().expect_code(0);
        assert!(outcome.peak_rss_bytes > 40_000_000, "{}", outcome.peak_rss_bytes);
    }

    #[test]
    fn a_clear_failure_is_one_message_with_every_needle() {
        let good =
            || shell(mpirun(2), "[ $OMPI_COMM_WORLD_RANK = 1 ] && echo 'lockstep: error: a b' >&2; exit 2").run();
        good().fails_clearly(2, &["a", "b"]);
        assert!(panic_text(|| drop(good().fails_clearly(2, &["z"]))).contains("lacks \"z\""));
        assert!(panic_text(|| drop(good().fails_clearly(3, &["a"]))).contains("unexpected exit code"));
        // The launcher ends the other rank once one has failed, hence the pause.
        let each = || shell(mpirun(2), "echo 'error: a b' >&2; sleep 1; exit 2").run();
        assert!(panic_text(|| drop(each().fails_clearly(2, &["a"]))).contains("printed once"));
        let panicked = || shell(mpirun(1), "echo \"thread 'main' panicked at x\" >&2; exit 101").run();
        assert!(panic_text(|| drop(panicked().fails_clearly(101, &[]))).contains("instead of a message"));
        let fine = || shell(mpirun(1), "exit 0").run();
        assert!(panic_text(|| drop(fine().fails_clearly(2, &[]))).contains("should have failed"));
    }
}
