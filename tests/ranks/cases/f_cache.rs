//! Kernels compiled at run time: cold and warm caches, damage, races, nowhere to write, nothing to compile with.
//!
//! `lockstep warmup` does what a run does before its first step, and needs no GPU. Where there is no NVRTC, tests that
//! compile say so and pass, unless `LOCKSTEP_TEST_NVRTC=required`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use lockstep::jit::Compiler;
use serde_json::Value;

use crate::support::launch::{Job, Outcome, alone, mpirun};
use crate::support::places;
use crate::support::run::Work;

/// The cheapest kernel of the geometry below, in its variants: one for f32 rows, one for bf16 rows.
const NUM_KERNELS: usize = 2;

/// Where NVRTC is, as the binary under test is to be told; none: the test is skipped.
#[expect(clippy::print_stderr, reason = "a skipped test says why")]
fn nvrtc() -> Option<Option<String>> {
    let setting = std::env::var("LOCKSTEP_NVRTC").ok();
    match Compiler::load(setting.as_deref()) {
        Ok(_) => Some(setting),
        Err(error) => {
            let required = std::env::var("LOCKSTEP_TEST_NVRTC").is_ok_and(|value| value == "required");
            assert!(!required, "{error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// `warmup` of Kimi K3 for Hopper into the ranks' directories of a cache, ready for more words.
struct Warmup {
    nvrtc: Option<String>,
    cache: PathBuf,
    work: Work,
}

impl Warmup {
    fn new() -> Option<Self> {
        let nvrtc = nvrtc()?;
        let work = Work::new();
        Some(Self { nvrtc, cache: work.path("cache"), work })
    }

    fn job(&self, job: Job) -> Job {
        let job = job.args(["warmup", "--model", "kimi-k3", "--kernels", "dense_product", "--into", "ranks", "--json"]);
        let job = job.args(["--arch", "sm_90a", "--cache-dir"]).args([&self.cache]);
        match &self.nvrtc {
            Some(nvrtc) => job.env("LOCKSTEP_NVRTC", nvrtc),
            None => job,
        }
    }

    /// So many ranks that share one directory.
    fn flat(&self, ranks: usize) -> Job {
        self.job(mpirun(ranks)).args(["--cache-layout", "flat"])
    }

    /// So many ranks with a directory each.
    fn per_rank(&self, ranks: usize) -> Job {
        self.job(mpirun(ranks))
    }

    /// Every `kernel.*` directory of the cache, and everything beside them that is no directory on the way to one.
    fn entries(&self) -> (Vec<PathBuf>, Vec<PathBuf>) {
        let (mut entries, mut others) = (Vec::new(), Vec::new());
        walk(&self.cache, &mut entries, &mut others);
        entries.sort();
        (entries, others)
    }

    #[track_caller]
    fn assert_entries(&self, num_entries: usize) {
        let (entries, others) = self.entries();
        assert_eq!(entries.len(), num_entries, "{entries:#?}");
        assert_eq!(others, Vec::<PathBuf>::new(), "nothing is left beside entries");
    }
}

fn walk(dir: &Path, entries: &mut Vec<PathBuf>, others: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        match (path.is_dir(), name.starts_with("kernel.")) {
            (true, true) => entries.push(path),
            (true, false) if !name.starts_with("tmp.") && !name.starts_with("damaged.") => walk(&path, entries, others),
            _ => others.push(path),
        }
    }
}

/// How often any rank says that it has compiled something.
fn compilations(outcome: &Outcome) -> usize {
    outcome.stderr.lines().filter(|line| line.contains("compiled dense_product")).count()
}

fn report(outcome: &Outcome) -> Value {
    serde_json::from_str(&outcome.stdout).unwrap_or_else(|error| panic!("{error}: {}", outcome.printed()))
}

/// Runs to the end and counts compilations.
#[track_caller]
fn fine(job: &Job) -> (usize, Outcome) {
    let outcome = job.run().expect_code(0);
    (compilations(&outcome), outcome)
}

#[test]
fn f1_cold_start_on_one_shared_directory() {
    for _ in 0..3 {
        let Some(warmup) = Warmup::new() else { return };
        let (compiled, outcome) = fine(&warmup.flat(8));
        assert_eq!(compiled, NUM_KERNELS, "each kernel once: {}", outcome.printed());
        assert!(!outcome.stderr.contains("WARN"), "{}", outcome.printed());
        warmup.assert_entries(NUM_KERNELS);
        assert_eq!(fine(&warmup.flat(8)).0, 0, "warm");
    }
}

#[test]
fn f1_cold_start_with_a_directory_a_rank() {
    let Some(warmup) = Warmup::new() else { return };
    let (compiled, outcome) = fine(&warmup.per_rank(4));
    assert_eq!(compiled, NUM_KERNELS, "once for all ranks: {}", outcome.printed());
    warmup.assert_entries(4 * NUM_KERNELS);
    let (entries, _) = warmup.entries();
    for entry in &entries {
        let same = entries.iter().filter(|other| other.file_name() == entry.file_name());
        for file in ["kernel.cu", "kernel.cubin", "manifest.json"] {
            let mine = fs::read(entry.join(file)).expect("a file");
            assert!(
                same.clone().all(|other| fs::read(other.join(file)).expect("a file") == mine),
                "{file} of all ranks"
            );
        }
    }
    // A rank more finds nothing of its own and is sent what the others have.
    let (compiled, _) = fine(&warmup.per_rank(5));
    assert_eq!(compiled, 0);
    warmup.assert_entries(5 * NUM_KERNELS);
}

/// Without MPI between them, eight processes build the same entries; whoever comes second uses what it built.
#[test]
fn f1_eight_processes_race() {
    let Some(warmup) = Warmup::new() else { return };
    let start = || {
        let mut command = Command::new(places::binary());
        command.args(["warmup", "--model", "kimi-k3", "--kernels", "dense_product", "--into", "ranks"]);
        command.args(["--cache-layout", "flat", "--arch", "sm_90a"]);
        command.arg("--cache-dir").arg(&warmup.cache).stdout(std::process::Stdio::null());
        if let Some(nvrtc) = &warmup.nvrtc {
            command.env("LOCKSTEP_NVRTC", nvrtc);
        }
        command.env("OMPI_MCA_btl_vader_single_copy_mechanism", "none").spawn().expect("a process")
    };
    let processes: Vec<_> = (0..8).map(|_| start()).collect();
    for mut process in processes {
        assert!(process.wait().expect("an end").success());
    }
    warmup.assert_entries(NUM_KERNELS);
    let verified = alone().args(["cache", "verify", "--cache-dir"]).args([&warmup.cache]).run().expect_code(0);
    assert!(verified.stdout.contains("2 entries below"), "{}", verified.printed());
}

#[test]
fn f1_a_writer_that_is_killed_leaves_nothing_that_hurts() {
    let Some(warmup) = Warmup::new() else { return };
    let outcome = warmup.per_rank(2).env("LOCKSTEP_FAULT", "1:compile:kill").env("LOCKSTEP_COMPILE_S", "10").run();
    assert_ne!(outcome.code, 0, "{}", outcome.printed());
    // What is left of a writer that was killed between two of its writes.
    let dir = fs::read_dir(&warmup.cache).into_iter().flatten().flatten().next();
    let dir = dir.map_or_else(|| warmup.cache.join("x/rank0"), |host| host.path().join("rank0"));
    let host = dir.parent().and_then(Path::file_name).expect("a host").to_string_lossy().into_owned();
    let half = dir.join(format!("tmp.{host}.4194999.x"));
    fs::create_dir_all(&half).expect("made");
    fs::write(half.join("kernel.cubin"), "half").expect("written");
    fine(&warmup.per_rank(2));
    let (entries, others) = warmup.entries();
    assert!(entries.len() >= 2 * NUM_KERNELS, "{entries:?}");
    assert!(others.is_empty() || host == "x", "{others:?}");
}

#[test]
fn f3_another_source_or_architecture_is_another_kernel() {
    let Some(warmup) = Warmup::new() else { return };
    fine(&warmup.per_rank(1));
    let (entries, _) = warmup.entries();
    for entry in &entries {
        for file in fs::read_dir(entry).expect("an entry") {
            let file = fs::File::options().append(true).open(file.expect("a file").path()).expect("opened");
            file.set_modified(std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_577_836_800)).expect("2020");
        }
    }
    let (compiled, outcome) = fine(&warmup.per_rank(1).env("LOCKSTEP_FAULT", "*:compile:stale"));
    assert_eq!(compiled, NUM_KERNELS);
    assert!(outcome.stderr.contains("define STALE none -> 1"), "says what changed: {}", outcome.printed());
    let (compiled, outcome) = fine(&warmup.per_rank(1).args(["--arch", "sm_100a"]));
    assert_eq!(compiled, NUM_KERNELS, "of two architectures the new one's: {}", outcome.printed());
    assert!(outcome.stderr.contains("architecture sm_90a -> sm_100a"), "{}", outcome.printed());
    assert_eq!(fine(&warmup.per_rank(1)).0, 0, "going back finds the old ones");
    warmup.assert_entries(3 * NUM_KERNELS);
}

#[test]
fn f3_a_damaged_entry_is_set_aside_and_replaced() {
    let Some(warmup) = Warmup::new() else { return };
    fine(&warmup.per_rank(2));
    let (entries, _) = warmup.entries();
    let of_rank_1 = entries.iter().find(|entry| entry.to_string_lossy().contains("rank1")).expect("an entry");
    let cubin = of_rank_1.join("kernel.cubin");
    let mut bytes = fs::read(&cubin).expect("read");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&cubin, bytes).expect("written");
    let verified = alone().args(["cache", "verify", "--cache-dir"]).args([&warmup.cache]).run().expect_code(1);
    assert!(verified.stderr.contains("1 of 4 entries"), "{}", verified.printed());
    let (compiled, outcome) = fine(&warmup.per_rank(2));
    assert_eq!(compiled, 0, "rank 0 has a sound one: {}", outcome.printed());
    assert_eq!(outcome.stderr.matches("is damaged").count(), 1, "said once: {}", outcome.printed());
    let (entries, others) = warmup.entries();
    assert_eq!((entries.len(), others.len()), (4, 1), "the damaged one lies beside: {others:?}");
    // Both ranks' entries cut short: nobody has it any more.
    entries.iter().for_each(|entry| fs::write(entry.join("kernel.cubin"), "\x7fELF").expect("written"));
    assert_eq!(fine(&warmup.per_rank(2)).0, NUM_KERNELS);
    alone().args(["cache", "prune", "--cache-dir"]).args([&warmup.cache]).run().expect_code(0);
    warmup.assert_entries(4);
}

#[test]
fn f5_nothing_to_compile_with() {
    let Some(warmup) = Warmup::new() else { return };
    let without = |job: Job| job.env("LOCKSTEP_NVRTC", "/nowhere/libnvrtc.so.13").env("LOCKSTEP_COMPILE_S", "20");
    let needles = ["dense_product for sm_90a", "/nowhere/libnvrtc.so.13", "LOCKSTEP_NVRTC", "(on all 2 ranks)"];
    let cold = without(warmup.per_rank(2)).run();
    cold.fails_clearly(3, &needles[3..]);
    let cold = without(warmup.per_rank(2)).run();
    needles.iter().for_each(|needle| assert!(cold.stderr.contains(needle), "lacks {needle}: {}", cold.printed()));
    warmup.assert_entries(0);
    // One rank without: the others compile for it.
    let (compiled, _) = fine(&warmup.per_rank(2).env_of(0, "LOCKSTEP_NVRTC", "/nowhere"));
    assert_eq!(compiled, NUM_KERNELS);
    // None has one, and all is there.
    let (compiled, outcome) = fine(&without(warmup.per_rank(2)));
    assert_eq!((compiled, report(&outcome)["kernels"].as_array().map(Vec::len)), (0, Some(NUM_KERNELS)));
}

#[test]
fn f5_nowhere_to_write() {
    let Some(warmup) = Warmup::new() else { return };
    let file = warmup.work.path("file");
    fs::write(&file, "x").expect("written");
    for (name, dir) in [("a file", file.as_path()), ("/proc", Path::new("/proc"))] {
        let (compiled, outcome) =
            fine(&warmup.per_rank(2).word_of(0, &warmup.cache, dir).word_of(1, &warmup.cache, dir));
        assert_eq!(compiled, NUM_KERNELS, "{name}: {}", outcome.printed());
        assert_eq!(outcome.stderr.matches("can't be kept below").count(), 1, "{name}: {}", outcome.printed());
        assert!(outcome.stderr.contains("LOCKSTEP_CACHE_DIR"), "{name}: {}", outcome.printed());
    }
    // One rank alone.
    let (_, outcome) = fine(&warmup.per_rank(2).word_of(1, &warmup.cache, &file));
    assert_eq!(outcome.stderr.matches("(on rank 1)").count(), 1, "{}", outcome.printed());
    warmup.assert_entries(NUM_KERNELS);
}

/// Runs a shell line in a mount namespace of its own, where it may mount; `None` where the system forbids that.
#[expect(clippy::print_stderr, reason = "a skipped test says why")]
fn with_mounts(warmup: &Warmup, line: &str) -> Option<std::process::Output> {
    let allowed = Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "none", "/mnt"]).output();
    if !allowed.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: mounting in a namespace of one's own is not allowed here");
        return None;
    }
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", line]);
    command.env("LOCKSTEP", places::binary()).env("CACHE", &warmup.cache);
    command
        .env("WARMUP", "warmup --model kimi-k3 --kernels dense_product --into ranks --cache-layout flat --arch sm_90a");
    if let Some(nvrtc) = &warmup.nvrtc {
        command.env("LOCKSTEP_NVRTC", nvrtc);
    }
    Some(command.output().expect("unshare"))
}

#[track_caller]
fn assert_fine(output: &std::process::Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{stderr}");
    stderr
}

#[test]
fn f5_a_read_only_cache() {
    let Some(warmup) = Warmup::new() else { return };
    fs::create_dir(&warmup.cache).expect("made");
    let read_only = "mount --bind \"$CACHE\" \"$CACHE\" && mount -o remount,bind,ro \"$CACHE\" && \
                     \"$LOCKSTEP\" $WARMUP --cache-dir \"$CACHE\"";
    let Some(cold) = with_mounts(&warmup, read_only) else { return };
    let stderr = assert_fine(&cold);
    assert!(stderr.contains("Read-only file system") && stderr.matches("WARN").count() == 1, "{stderr}");
    warmup.assert_entries(0);
    fine(&warmup.flat(1));
    let Some(warm) = with_mounts(&warmup, &format!("{read_only} --require-warm")) else { return };
    let stderr = assert_fine(&warm);
    assert!(!stderr.contains("WARN"), "{stderr}");
    warmup.assert_entries(NUM_KERNELS);
}

#[test]
fn f5_a_full_file_system() {
    let Some(warmup) = Warmup::new() else { return };
    fs::create_dir(&warmup.cache).expect("made");
    // 24 KiB hold less than one entry.
    let line = "mount -t tmpfs -o size=24k none \"$CACHE\" && \"$LOCKSTEP\" $WARMUP --cache-dir \"$CACHE\" && \
                echo left: $(ls \"$CACHE\" | wc -l)";
    let Some(full) = with_mounts(&warmup, line) else { return };
    let stderr = assert_fine(&full);
    assert!(stderr.contains("No space left on device") && stderr.matches("WARN").count() == 1, "{stderr}");
    let stdout = String::from_utf8_lossy(&full.stdout);
    assert!(stdout.contains("left: 0"), "no partial entry: {stdout}");
}

#[test]
fn require_warm_fails_cold_and_takes_what_warmup_shipped() {
    let Some(warmup) = Warmup::new() else { return };
    let strict = warmup.per_rank(2).args(["--require-warm"]);
    strict.run().fails_clearly(3, &["require_warm", "dense_product for sm_90a", "lockstep warmup", "(on all 2 ranks)"]);
    warmup.assert_entries(0);
    // Filled without GPU and launcher, shipped as one directory.
    let shared = warmup.job(alone()).args(["--arch", "sm_80,sm_103a,sm_120a"]).word("ranks", "shared");
    let (compiled, outcome) = fine(&shared);
    assert_eq!(compiled, 4 * NUM_KERNELS, "{}", outcome.printed());
    let (compiled, outcome) = fine(&strict);
    assert_eq!(compiled, 0, "{}", outcome.printed());
    warmup.assert_entries(4 * NUM_KERNELS);
    let listed = alone().args(["cache", "list", "--json", "--cache-dir"]).args([&warmup.cache]).run().expect_code(0);
    let states: Vec<Value> = report(&listed)["entries"].as_array().expect("a list").clone();
    assert!(
        states.len() == 4 * NUM_KERNELS && states.iter().all(|entry| entry["state"] == "ok"),
        "{}",
        listed.printed()
    );
}

#[test]
fn hazard_07_a_rank_whose_kernels_are_made_of_other_sources() {
    let Some(warmup) = Warmup::new() else { return };
    let outcome = warmup.per_rank(3).env("LOCKSTEP_FAULT", "1:compile:stale").run();
    outcome.fails_clearly(4, &["what their kernels are made of", "define STALE none -> 1", "rank 1"]);
    warmup.assert_entries(0);
}

#[test]
fn j1_a_slow_compilation_is_said_and_waited_for() {
    let Some(warmup) = Warmup::new() else { return };
    let (compiled, outcome) = fine(&warmup.per_rank(2).env("LOCKSTEP_FAULT", "1:compile:delay=12"));
    assert_eq!(compiled, NUM_KERNELS);
    let line = outcome.stderr.lines().find(|line| line.contains("still compiling dense_product for sm_90a"));
    assert!(line.is_some_and(|line| line.contains("10 s so far") && line.contains("rank")), "{}", outcome.printed());
}

#[test]
fn j1_the_limit_names_who_compiles_what() {
    let Some(warmup) = Warmup::new() else { return };
    let slow = warmup.per_rank(2).env("LOCKSTEP_FAULT", "1:compile:delay=25").env("LOCKSTEP_COMPILE_S", "3");
    let outcome =
        slow.run().fails_clearly(5, &["rank 1 still compiling dense_product for sm_90a", "timeouts.compile_s"]);
    assert!(!outcome.stderr.contains("communication"), "{}", outcome.printed());
    let (entries, others) = warmup.entries();
    assert!(entries.len() <= NUM_KERNELS && others.is_empty(), "{entries:?} {others:?}");
    let verified = alone().args(["cache", "verify", "--cache-dir"]).args([&warmup.cache]).run();
    assert_eq!(verified.code, 0, "{}", verified.printed());
}
