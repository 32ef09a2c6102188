//! Deployment files: unknown keys, files that are none, scalars that change type. Read once, refused once.
//!
//! The whole tables go through one process each, by the loader that every command has; some rows of each go through ranks,
//! where one copy of the message is wanted.

use std::path::{Path, PathBuf};

use crate::support::launch::{FAILURE_LIMIT, Outcome, alone, mpirun};
use crate::support::made::{Choice, S};
use crate::support::run::Work;
use crate::support::safetensors;

/// Everything of a good run but the deployment.
struct Good<'a> {
    work: &'a Work,
    checkpoint: PathBuf,
    input: PathBuf,
    choice: PathBuf,
}

impl<'a> Good<'a> {
    fn new(work: &'a Work) -> Self {
        let s = S::new(2, 32, 32);
        Self {
            work,
            checkpoint: work.checkpoint(&s.checkpoint()),
            input: work.tensors("input", &[("x".to_string(), s.tokens(2, 1.0))].into()),
            choice: work.tensors("choice", &Choice::single(0..2).tensors()),
        }
    }

    /// A run of so many ranks with this deployment file.
    fn run(&self, ranks: usize, deployment: &Path) -> Outcome {
        let output = self.work.path("output.safetensors");
        let mut job = mpirun(ranks).limit(FAILURE_LIMIT).args(["run", "--layers=all", "--activation=situ:4,25"]);
        for (option, path) in [
            ("deployment", deployment),
            ("checkpoint", &self.checkpoint),
            ("input", &self.input),
            ("topk", &self.choice),
            ("output", &output),
        ] {
            job = job.args([format!("--{option}={}", path.display())]);
        }
        let outcome = job.run();
        assert_eq!(outcome.code == 0, output.exists(), "output and exit code: {}", outcome.printed());
        outcome
    }
}

fn file(work: &Work, bytes: &[u8]) -> PathBuf {
    let path = work.path("deployment.yaml");
    safetensors::write_bytes(&path, bytes);
    path
}

/// The deployment read by one process without MPI.
fn load(deployment: &Path) -> Outcome {
    let words = ["resolve", "--model=qwen3-235b"].map(str::to_owned);
    alone().limit(FAILURE_LIMIT).args(words).args([format!("--deployment={}", deployment.display())]).run()
}

/// A file, the line at fault, and what the message has to say of it.
type Row = (&'static str, usize, &'static [&'static str]);

/// Unknown, misspelt, misplaced and doubled keys.
const KEYS: [Row; 13] = [
    ("version: 1\nmoe: {top_kk: 2}\n", 2, &["moe.top_kk", "moe takes backend"]),
    ("version: 1\ntop_k: 2\n", 2, &["top_k", "the top level takes"]),
    ("version: 1\nmoe:\n  top-k: 2\n", 3, &["moe.top-k"]),
    ("version: 1\nmoe:\n  Top_K: 2\n", 3, &["moe.Top_K"]),
    ("version: 1\nmoe: {backnd: simd}\n", 2, &["moe.backnd", "did you mean backend?"]),
    ("version: 1\nbackend: simd\n", 2, &["backend belongs under moe"]),
    ("version: 1\ndispatch:\n  chunk-tokens: 4\n", 3, &["chunk-tokens", "chunk_tokens"]),
    ("version: 1\ndispatch:\n  Chunk_Tokens: 4\n", 3, &["Chunk_Tokens", "chunk_tokens"]),
    ("version: 1\nmoe:\n  backend: {name: simd}\n", 3, &["moe.backend", "found a mapping"]),
    ("version: 1\nmoe:\n  moe: {backend: simd}\n", 3, &["moe.moe"]),
    ("version: 1\nmoe:\n  combine: slot\n  backend: simd\n  combine: rank\n", 5, &["moe.combine", "twice"]),
    ("version: 1\nmoe:\n  backend: cutlas\n", 3, &["moe.backend", "cutlas", "simd"]),
    ("version: 1\nmoe:\n  backend: simd\n combine: slot\n", 4, &["check the indentation"]),
];

fn needles((_, line, needles): &Row) -> Vec<String> {
    let mut wanted = vec![format!("deployment.yaml:{line}")];
    wanted.extend(needles.iter().map(ToString::to_string));
    wanted
}

/// Unknown, misspelt, misplaced and doubled keys are refused with file, line and the nearest valid name.
#[test]
fn i1_unknown_and_misplaced_keys() {
    let work = Work::new();
    for row in &KEYS {
        let wanted = needles(row);
        let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
        load(&file(&work, row.0.as_bytes())).fails_clearly(2, &wanted);
    }
}

/// The same across ranks: one message, from the rank that speaks.
#[test]
fn i1_one_copy_of_the_message_across_ranks() {
    let work = Work::new();
    let good = Good::new(&work);
    for (row, ranks) in [(&KEYS[0], 4), (&KEYS[10], 2)] {
        let wanted = needles(row);
        let mut wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
        let everywhere = format!("(on all {ranks} ranks)");
        wanted.push(&everywhere);
        good.run(ranks, &file(&work, row.0.as_bytes())).fails_clearly(2, &wanted);
    }
    good.run(3, &work.path("nowhere.yaml")).fails_clearly(2, &["nowhere.yaml", "(on all 3 ranks)"]);
    good.run(2, &file(&work, b"\xef\xbb\xbfversion: 1\r\nname: bom\r\n")).expect_code(0);
}

/// Files that are no deployment are refused with their name and the reason; a BOM and CRLF load.
#[test]
fn i1_files_that_are_no_deployment() {
    let work = Work::new();
    for (bytes, reason) in [
        (&b""[..], "empty"),
        (b"# nothing\n# here\n", "comments"),
        (b"- version: 1\n- moe\n", "list"),
        (b"version: 1\nmoe:\n\tbackend: simd\n", "tab"),
        (b"version: 1\nname: \xff\xfe\n", "UTF-8"),
    ] {
        load(&file(&work, bytes)).fails_clearly(2, &["deployment.yaml", reason]);
    }
    for bytes in [&b"\xef\xbb\xbfversion: 1\nname: bom\n"[..], b"version: 1\r\nmoe:\r\n  backend: simd\r\n"] {
        load(&file(&work, bytes)).expect_code(0);
    }
    load(&work.path("nowhere.yaml")).fails_clearly(2, &["nowhere.yaml"]);
    let directory = work.path("directory.yaml");
    std::fs::create_dir(&directory).expect("a directory");
    load(&directory).fails_clearly(2, &["directory.yaml", "directory"]);
}

fn keyed(section: &str, key: &str, value: &str) -> String {
    format!("version: 1\n{section}:\n  {key}: {value}\n")
}

const FLOAT: (&str, &str) = ("links", "memory_gbyte_per_s");
const INTEGER: (&str, &str) = ("dispatch", "num_max_tokens_per_rank");
const BOOLEAN: (&str, &str) = ("moe", "allow_fallback");

/// Scalars are read by one table: what it refuses names key and value.
#[test]
fn i2_scalars_that_change_type() {
    let work = Work::new();
    for ((section, key), refused) in [
        (FLOAT, &[".inf", "-.inf", ".nan", "1_000.0", "\"1e-5\"", "no"][..]),
        (INTEGER, &["010", "0x10", "0o10", "1_000", "4.0", "\"4\"", "-1", "99999999999999999999", "null"]),
        (BOOLEAN, &["True", "yes", "no", "off", "on", "\"false\"", "0", "null"]),
    ] {
        for value in refused {
            let shown = value.trim_matches('"');
            let outcome = load(&file(&work, keyed(section, key, value).as_bytes()));
            outcome.fails_clearly(2, &["deployment.yaml:3", &format!("{section}.{key}"), shown]);
        }
    }
    for ((section, key), taken) in [
        (FLOAT, &["1e-5", "1.0e-5", "1E-5", ".5", "null", "~"][..]),
        (INTEGER, &["16", "8192"]),
        (BOOLEAN, &["true", "false"]),
    ] {
        for value in taken {
            load(&file(&work, keyed(section, key, value).as_bytes())).expect_code(0);
        }
    }
    for nothing in ["null", "~", ""] {
        let outcome = load(&file(&work, format!("version: 1\nname: {nothing}\n").as_bytes()));
        outcome.fails_clearly(2, &["deployment.yaml:2", "name"]);
    }
}

/// Text stays text, and what is read is what holds: `--print-config` shows it.
#[test]
fn i2_text_stays_as_it_is_written() {
    let work = Work::new();
    let good = Good::new(&work);
    for name in ["no", "on", "1.10"] {
        let path = file(&work, format!("version: 1\nname: {name}\n").as_bytes());
        let words = ["checkpoint", "input", "output"].map(|option| format!("--{option}={}", good.checkpoint.display()));
        let job = alone().args(["run", "--print-config"]).args(words);
        let outcome = job.args([format!("--deployment={}", path.display())]).run().expect_code(0);
        let line = outcome.stdout.lines().find(|line| line.starts_with("name:")).expect("a line of name");
        let shown = line.split_whitespace().nth(1).expect("a value").trim_matches('"');
        assert_eq!(shown, name, "{}", outcome.printed());
    }
}

/// The same across ranks: one message, from the rank that speaks.
#[test]
fn i2_one_copy_of_the_message_across_ranks() {
    let work = Work::new();
    let good = Good::new(&work);
    for ((section, key), value) in [(INTEGER, "010"), (BOOLEAN, "yes")] {
        let outcome = good.run(3, &file(&work, keyed(section, key, value).as_bytes()));
        let wanted = ["deployment.yaml:3", &format!("{section}.{key}"), value, "(on all 3 ranks)"];
        outcome.fails_clearly(2, &wanted);
    }
    good.run(2, &file(&work, keyed(FLOAT.0, FLOAT.1, "1E-5").as_bytes())).expect_code(0);
}
