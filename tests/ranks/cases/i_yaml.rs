//! Deployment files: unknown keys, files that are none, scalars that change type. Read once, refused once.

use std::path::{Path, PathBuf};

use crate::support::launch::{FAILURE_LIMIT, Outcome, mpirun};
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

    fn run_with(&self, deployment: &Path) -> Outcome {
        let output = self.work.path("output.safetensors");
        let mut job = mpirun(2).limit(FAILURE_LIMIT).args(["run", "--layers=all", "--activation=situ:4,25"]);
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

    fn run(&self, deployment: &[u8]) -> Outcome {
        let path = self.work.path("deployment.yaml");
        safetensors::write_bytes(&path, deployment);
        self.run_with(&path)
    }
}

/// Unknown, misspelt, misplaced and doubled keys are refused with file, line and the nearest valid name.
#[test]
fn i1_unknown_and_misplaced_keys() {
    let work = Work::new();
    let good = Good::new(&work);
    for (text, line, needles) in [
        ("version: 1\nmoe: {backnd: simd}\n", 2, &["moe.backnd", "backend"][..]),
        ("version: 1\nbackend: simd\n", 2, &["backend", "moe"]),
        ("version: 1\ndispatch:\n  chunk-tokens: 4\n", 3, &["chunk-tokens", "chunk_tokens"]),
        ("version: 1\ndispatch:\n  Chunk_Tokens: 4\n", 3, &["Chunk_Tokens", "chunk_tokens"]),
        ("version: 1\nmoe:\n  backend: {name: simd}\n", 3, &["moe.backend"]),
        ("version: 1\nmoe:\n  combine: slot\n  backend: simd\n  combine: rank\n", 5, &["moe.combine", "twice"]),
        ("version: 1\nmoe:\n  backend: cutlas\n", 3, &["moe.backend", "cutlas", "simd"]),
    ] {
        let mut wanted = vec!["deployment.yaml".to_string(), format!("deployment.yaml:{line}")];
        wanted.extend(needles.iter().map(ToString::to_string));
        let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
        good.run(text.as_bytes()).fails_clearly(2, &wanted);
    }
}

/// Files that are no deployment are refused with their name and the reason; a BOM and CRLF load.
#[test]
fn i1_files_that_are_no_deployment() {
    let work = Work::new();
    let good = Good::new(&work);
    for (bytes, reason) in [
        (&b""[..], "empty"),
        (b"# nothing\n# here\n", "comments"),
        (b"- version: 1\n- moe\n", "list"),
        (b"version: 1\nmoe:\n  backend: simd\n combine: slot\n", "deployment.yaml:4"),
        (b"version: 1\nmoe:\n\tbackend: simd\n", "tab"),
        (b"version: 1\nname: \xff\xfe\n", "UTF-8"),
    ] {
        good.run(bytes).fails_clearly(2, &["deployment.yaml", reason]);
    }
    for bytes in [&b"\xef\xbb\xbfversion: 1\nname: bom\n"[..], b"version: 1\r\nmoe:\r\n  backend: simd\r\n"] {
        good.run(bytes).expect_code(0);
    }
    good.run_with(&work.path("nowhere.yaml")).fails_clearly(2, &["nowhere.yaml"]);
    let directory = work.path("directory.yaml");
    std::fs::create_dir(&directory).expect("a directory");
    good.run_with(&directory).fails_clearly(2, &["directory.yaml", "directory"]);
}

/// Scalars are read by one table: what it refuses names key and value, once for all ranks.
#[test]
fn i2_scalars_that_change_type() {
    let work = Work::new();
    let good = Good::new(&work);
    let text = |section: &str, key: &str, value: &str| format!("version: 1\n{section}:\n  {key}: {value}\n");
    let float = ("links", "memory_gbyte_per_s");
    let integer = ("dispatch", "num_max_tokens_per_rank");
    let boolean = ("moe", "allow_fallback");
    for ((section, key), refused) in [
        (float, &[".inf", ".nan", "1_000.0", "\"1e-5\""][..]),
        (integer, &["010", "0x10", "0o10", "1_000", "4.0", "\"4\"", "-1", "99999999999999999999", "null"]),
        (boolean, &["True", "yes", "no", "off", "\"false\"", "0"]),
    ] {
        for value in refused {
            let shown = value.trim_matches('"');
            let outcome = good.run(text(section, key, value).as_bytes());
            outcome.fails_clearly(2, &["deployment.yaml:3", &format!("{section}.{key}"), shown]);
        }
    }
    for ((section, key), taken) in [
        (float, &["1e-5", "1.0e-5", "1E-5", ".5", "null", "~"][..]),
        (integer, &["16", "8192"]),
        (boolean, &["true", "false"]),
    ] {
        for value in taken {
            good.run(text(section, key, value).as_bytes()).expect_code(0);
        }
    }
    for name in ["no", "on", "1.10"] {
        good.run(format!("version: 1\nname: {name}\n").as_bytes()).expect_code(0);
    }
}
