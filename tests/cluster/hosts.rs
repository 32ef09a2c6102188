//! The hosts of a test: brought up, looked at, disturbed, taken down.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::launch::{Job, alone};
use crate::support::processes::kill;

/// Nodes, in the order of their ranks. Jobs of Slurm are started on `login`.
pub const NODES: [&str; 2] = ["node1", "node2"];

/// Ranks of a job, half of them on each node.
pub const RANKS: usize = 4;

/// How four ranks come to be on two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// `srun` itself.
    Srun,
    /// `launch/srun.sh`
    SrunLauncher,
    /// `launch/mpirun.sh` on the first node, which reaches the other by ssh.
    Ssh,
    /// The same on a host without ranks.
    LoginSsh,
    /// `launch/mpirun.sh` in an allocation of Slurm.
    Allocation,
}

impl Way {
    pub const ALL: [Self; 4] = [Self::Srun, Self::SrunLauncher, Self::Ssh, Self::Allocation];
    /// The project's launchers, with what they use to reach the hosts.
    pub const LAUNCHERS: [Self; 2] = [Self::SrunLauncher, Self::Ssh];

    /// Where it is typed.
    fn host(self) -> &'static str {
        if self == Self::Ssh { NODES[0] } else { "login" }
    }

    /// What stands before the program.
    fn words(self) -> Vec<String> {
        let script = |name: &str| format!("{ROOT}/launch/{name}");
        let words = match self {
            Self::Srun => "srun -N2 -n4 --mpi=pmix".to_owned(),
            Self::SrunLauncher => format!("{} --ranks 4 --ranks-per-node 2 --binary", script("srun.sh")),
            Self::Ssh | Self::LoginSsh => format!("{} --hosts node1:2,node2:2 --binary", script("mpirun.sh")),
            Self::Allocation => format!("salloc -N2 --ntasks-per-node=2 {} --binary", script("mpirun.sh")),
        };
        words.split(' ').map(str::to_owned).collect()
    }
}

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// What `hosts.sh` keeps of its hosts.
const STATE: &str = "/run/lockstep-cluster";

/// Hosts that are up until this is dropped.
pub struct Hosts {
    /// Takes them down when its standard input ends.
    holder: Child,
    /// Goes with the file; other tests wait for it.
    _turn: File,
}

impl Hosts {
    /// Brings them up; none where this machine can't have them, which is said.
    #[expect(clippy::print_stderr, reason = "a skipped test says why")]
    pub fn up() -> Option<Self> {
        let check = script().arg("check").output().expect("bash");
        if !check.status.success() {
            let reason = String::from_utf8_lossy(&check.stderr).into_owned();
            let required = std::env::var("LOCKSTEP_TEST_CLUSTER").is_ok_and(|value| value == "required");
            assert!(!required, "two hosts are required: {reason}");
            eprintln!("skipped: {reason}");
            return None;
        }
        let turn = File::create(format!("{STATE}.lock")).expect("root may write to /run");
        turn.lock().expect("a file can be locked");
        let mut command = script();
        command.args(["hold", env!("CARGO_BIN_EXE_lockstep")]);
        let mut holder = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("bash");
        let mut line = String::new();
        BufReader::new(holder.stdout.take().expect("piped")).read_line(&mut line).expect("hosts.sh says something");
        assert_eq!(line.trim(), "up", "the hosts do not come up");
        Some(Self { holder, _turn: turn })
    }

    /// The binary under test on both hosts.
    pub fn job(&self, way: Way) -> Job {
        self.on(way.host(), way.words())
    }

    /// The binary under test on a host, behind such words.
    pub fn on<W: Into<String>>(&self, host: &str, words: impl IntoIterator<Item = W>) -> Job {
        let run = [format!("{ROOT}/tests/cluster/hosts.sh"), "run".to_owned(), host.to_owned()];
        alone().behind(run.into_iter().chain(words.into_iter().map(Into::into)))
    }

    /// A command on a host, without the binary under test.
    pub fn command<W: Into<String>>(&self, host: &str, words: impl IntoIterator<Item = W>) -> Job {
        let mut words: Vec<String> = words.into_iter().map(Into::into).collect();
        let last = words.pop().expect("a command");
        self.on(host, words).program(&last)
    }

    /// Runs a command line on a host, which has to succeed.
    #[track_caller]
    pub fn shell(&self, host: &str, line: &str) -> String {
        let Output { status, stdout, stderr } =
            script().args(["run", host, "bash", "-ec", line]).output().expect("bash");
        assert!(status.success(), "{line} on {host}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8_lossy(&stdout).into_owned()
    }

    /// Processes that are no daemons, as `node2 1234 command`.
    pub fn processes(&self) -> Vec<String> {
        let of = |host: &str| {
            let output = script().args(["processes", host]).output().expect("bash");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.lines().map(|line| format!("{host} {line}")).collect::<Vec<_>>()
        };
        ["login", NODES[0], NODES[1]].into_iter().flat_map(of).collect()
    }

    /// Sends a signal to the first process whose line holds `needle`.
    pub fn signal(&self, needle: &str, name: &str) {
        let processes = self.processes();
        let found = processes.iter().find(|line| line.contains(needle));
        send(found.unwrap_or_else(|| panic!("no {needle} in {processes:#?}")), name);
    }

    /// Sends a signal to all processes of a host whose lines hold `needle`.
    pub fn signal_all(&self, host: &str, needle: &str, name: &str) {
        let processes = self.processes();
        let found: Vec<&String> =
            processes.iter().filter(|line| line.starts_with(host) && line.contains(needle)).collect();
        assert!(!found.is_empty(), "no {needle} on {host} in {processes:#?}");
        found.into_iter().for_each(|line| send(line, name));
    }

    /// Cuts a host off the network, or joins it again.
    pub fn link(&self, host: &str, state: &str) {
        self.shell(host, &format!("ip link set eth0 {state}"));
    }

    /// How long it takes until no process is left that `counts`; panics after `limit`.
    #[track_caller]
    pub fn wait_until_gone(&self, limit: Duration, counts: impl Fn(&str) -> bool) -> Duration {
        let start = Instant::now();
        loop {
            let left: Vec<String> = self.processes().into_iter().filter(|line| counts(line)).collect();
            if left.is_empty() {
                return start.elapsed();
            }
            assert!(start.elapsed() < limit, "left after {} s: {left:#?}", limit.as_secs());
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Nothing of a job is left on any host: no process, and no file on the disks that each has for itself.
    #[track_caller]
    pub fn assert_quiet(&self, what: &str) {
        self.wait_until_gone(Duration::from_secs(10), |_| true);
        let disks = NODES.iter().flat_map(|node| ["tmp", "var-tmp"].map(|dir| format!("{STATE}/{node}/{dir}")));
        let files: Vec<PathBuf> = disks.flat_map(|dir| files_below(Path::new(&dir))).collect();
        assert_eq!(files, Vec::<PathBuf>::new(), "left by {what}");
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        // Killed by its namespaces' holder or not: the next test's `up` takes down what is left.
        if self.holder.wait().is_err() {
            kill(&[self.holder.id()]);
        }
    }
}

/// Sends a signal to the process of a line of [`Hosts::processes`].
fn send(line: &str, name: &str) {
    let pid = line.split(' ').nth(1).expect("a number");
    // It may have ended meanwhile, which `kill` reports as a failure.
    let _ = Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status();
}

/// `hosts.sh`, without the settings of whoever runs the tests.
fn script() -> Command {
    let mut command = Command::new(format!("{ROOT}/tests/cluster/hosts.sh"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("LOCKSTEP_") {
            command.env_remove(name);
        }
    }
    command
}

/// All files of a directory and those in it, but for the entries of a cache, which are whole or not there.
fn files_below(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).map(|entries| entries.flatten().collect::<Vec<_>>()).unwrap_or_default();
    let deeper = |path: PathBuf| if path.is_dir() { files_below(&path) } else { vec![path] };
    entries.into_iter().flat_map(|entry| deeper(entry.path())).collect()
}
