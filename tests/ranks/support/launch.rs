//! Starts the binary under `mpirun` (or alone), waits with a hard limit, and leaves no process behind.
//!
//! Knows nothing of what the command means.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::disturb::{Pipes, Running};
use super::places;
use super::processes::{MARKER, high_water_mark, kill, marked_processes, wait_until_gone};
use super::slots::take_slot;

/// Every failing case has to be over by then (DESIGN: all ranks gone within 30 s).
pub const FAILURE_LIMIT: Duration = Duration::from_secs(30);
/// A case that succeeds may take longer on a busy machine; beyond this it hangs.
pub const SUCCESS_LIMIT: Duration = Duration::from_secs(240);

/// A command to start.
#[derive(Debug, Clone)]
pub struct Job {
    ranks: Option<usize>,
    through_launcher: bool,
    behind: Vec<OsString>,
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(String, String)>,
    unset: Vec<String>,
    of_rank: Vec<(usize, Change)>,
    limit: Duration,
    watch_memory: bool,
    dir: Option<PathBuf>,
    pipes: Pipes,
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
    /// Where it starts.
    Dir(PathBuf),
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

/// The same through the project's own launcher.
pub fn launcher(ranks: usize) -> Job {
    Job { through_launcher: true, ..mpirun(ranks) }
}

/// The binary under test without a launcher.
pub fn alone() -> Job {
    Job {
        ranks: None,
        through_launcher: false,
        behind: Vec::new(),
        program: places::binary(),
        args: Vec::new(),
        env: vec![("LOCKSTEP_THREADS".into(), "1".into())],
        unset: Vec::new(),
        of_rank: Vec::new(),
        limit: SUCCESS_LIMIT,
        watch_memory: false,
        dir: None,
        pipes: Pipes::Read,
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

    /// Puts words before the program, as those of another launcher.
    pub fn behind<A: Into<OsString>>(mut self, words: impl IntoIterator<Item = A>) -> Self {
        self.behind = words.into_iter().map(Into::into).collect();
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

    /// Takes a variable away, also one that these tests set for every job.
    pub fn without_env(mut self, name: &str) -> Self {
        self.unset.push(name.into());
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

    /// Starts one rank in another directory.
    pub fn dir_of(mut self, rank: usize, dir: &Path) -> Self {
        self.of_rank.push((rank, Change::Dir(dir.to_path_buf())));
        self
    }

    /// Starts in another directory.
    pub fn dir(mut self, dir: &Path) -> Self {
        self.dir = Some(dir.to_path_buf());
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

    /// Leaves pipes without a reader, as where `| head` has seen enough.
    pub fn pipes(mut self, pipes: Pipes) -> Self {
        self.pipes = pipes;
        self
    }

    /// Runs another program.
    pub fn program(mut self, program: &str) -> Self {
        self.program = program.into();
        self
    }

    fn command_line(&self) -> Vec<OsString> {
        let mut line = self.behind.clone();
        if let Some(ranks) = self.ranks
            && !self.of_rank.is_empty()
        {
            line.extend(mpi_launcher());
            for rank in 0..ranks {
                line.extend((rank > 0).then(|| ":".into()));
                line.extend(self.app_of(rank));
            }
            return line;
        }
        if let (Some(ranks), true) = (self.ranks, self.through_launcher) {
            line.push(places::of_project("launch/mpirun.sh").into());
            line.extend(["--ranks".into(), ranks.to_string().into(), "--binary".into()]);
        } else if let Some(ranks) = self.ranks {
            line.extend(mpi_launcher());
            line.extend(["-n".into(), ranks.to_string().into()]);
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
            if let Change::Dir(dir) = change {
                line.extend(["--chdir".into(), dir.into()]);
            }
        }
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
                Change::Env(..) | Change::Dir(_) => {}
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
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
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
            // Each mpirun counts cores from 0: jobs that run at once would share those few.
            .env("OMPI_MCA_hwloc_base_binding_policy", "none")
            .envs(self.env.iter().map(|(name, value)| (name, value)));
        self.unset.iter().for_each(|name| {
            command.env_remove(name);
        });
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
        self.run_while(|_| {})
    }

    /// As [`Job::run`], with `disturb` once the job has started.
    pub fn run_while(&self, disturb: impl FnOnce(&Running)) -> Outcome {
        static NEXT_JOB: AtomicUsize = AtomicUsize::new(0);
        let _slot = take_slot();
        let mark = format!("{}-{}", std::process::id(), NEXT_JOB.fetch_add(1, Ordering::Relaxed));
        let command = self.command_line().iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
        let start = Instant::now();
        let mut child = self.spawn(&mark);
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let seen = Arc::default();
        let stdout = drain(stdout.filter(|_| self.pipes == Pipes::Read), &Arc::default());
        let stderr = drain(stderr.filter(|_| self.pipes != Pipes::NoneRead), &seen);
        disturb(&Running { pid: child.id(), mark: mark.clone(), seen });

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
    pub fn error_messages(&self) -> Vec<String> {
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

/// What starts ranks, with its options: Open MPI's `mpirun`, or what `LOCKSTEP_TEST_MPIRUN` says, in words, for another MPI.
fn mpi_launcher() -> Vec<OsString> {
    let words = std::env::var("LOCKSTEP_TEST_MPIRUN").unwrap_or_else(|_| "mpirun --oversubscribe".into());
    words.split_whitespace().map(Into::into).collect()
}

/// Reads to the end and shows in `seen` what has come so far. No pipe, nothing to read: its other end is closed at once.
fn drain(pipe: Option<impl Read + Send + 'static>, seen: &Arc<Mutex<Vec<u8>>>) -> thread::JoinHandle<String> {
    let (seen, mut pipe) = (Arc::clone(seen), pipe);
    thread::spawn(move || {
        let lock = || seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut piece = [0; 4096];
        // An error here means the pipe broke, after which there is nothing more to read.
        while let Some(length @ 1..) = pipe.as_mut().and_then(|pipe| pipe.read(&mut piece).ok()) {
            lock().extend_from_slice(&piece[..length]);
        }
        String::from_utf8_lossy(&lock()).into_owned()
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

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
        let good = || {
            shell(mpirun(2), "[ ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} = 1 ] && echo 'lockstep: error: a b' >&2; exit 2")
                .run()
        };
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
