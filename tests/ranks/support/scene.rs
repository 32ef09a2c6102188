//! A small run with a directory of its own for everything it may leave: what an ended job left is a list of names.

use std::fs;
use std::path::{Path, PathBuf};

use super::launch::{FAILURE_LIMIT, Job};
use super::made::{Choice, S};
use super::run::{Work, files_in};
use super::safetensors;

/// Eight tokens on four experts, each to one; all of them, and the files of the run.
pub struct Scene {
    work: Work,
    words: Vec<String>,
    /// Outputs lie here and nothing else does.
    out: PathBuf,
    /// What MPI keeps while it runs.
    tmp: PathBuf,
}

impl Scene {
    /// `deployment` is the text of the file, but its version.
    pub fn new(deployment: &str) -> Self {
        let work = Work::new();
        let s = S::new(4, 128, 128);
        let path = |path: PathBuf| path.display().to_string();
        let file = work.path("deployment.yaml");
        safetensors::write_bytes(&file, format!("version: 1\n{deployment}\n").as_bytes());
        let choice = Choice::single((0..8).map(|token| token % 4)).tensors();
        let (out, tmp) = (work.path("out"), work.path("tmp"));
        for dir in [&out, &tmp] {
            fs::create_dir(dir).unwrap_or_else(|error| panic!("cannot create {}: {error}", dir.display()));
        }
        let words = [
            ("deployment", path(file)),
            ("checkpoint", path(work.checkpoint(&s.checkpoint()))),
            ("input", path(work.tensors("input", &[("x".to_string(), s.tokens(8, 1.0))].into()))),
            ("topk", path(work.tensors("choice", &choice))),
            ("output", path(out.join(OUTPUT))),
            ("report", path(out.join(REPORT))),
            ("steps", "3".to_string()),
            ("part", "routed".to_string()),
            ("activation", "situ:4,25".to_string()),
        ];
        let words = words.into_iter().flat_map(|(name, value)| [format!("--{name}"), value]).collect();
        Self { work, words, out, tmp }
    }

    /// `job` as a run of this scene.
    pub fn run(&self, job: Job) -> Job {
        let job = job.args(["run"]).args(self.words.iter().map(String::as_str));
        job.limit(FAILURE_LIMIT).env("TMPDIR", &self.tmp.display().to_string())
    }

    pub fn output(&self) -> PathBuf {
        self.out.join(OUTPUT)
    }

    /// A path that nothing was at before.
    pub fn path(&self, name: &str) -> PathBuf {
        self.work.path(name)
    }

    /// Removes what a run left, for the next.
    pub fn clear(&self) {
        for name in files_in(&self.out) {
            let path = self.out.join(name);
            fs::remove_file(&path).unwrap_or_else(|error| panic!("cannot remove {}: {error}", path.display()));
        }
    }

    /// Files that are neither output nor report.
    pub fn left_over(&self) -> Vec<String> {
        let beside = files_in(&self.out).into_iter().filter(|name| name != OUTPUT && name != REPORT);
        beside.chain(files_below(&self.tmp)).collect()
    }

    /// The output's digest, of the whole file; none where there is no output.
    pub fn sha256(&self) -> Option<String> {
        self.output().exists().then(|| safetensors::sha256(&self.output()))
    }
}

const OUTPUT: &str = "output.safetensors";
const REPORT: &str = "report.json";

/// Paths of all files in a directory and those in it.
fn files_below(dir: &Path) -> Vec<String> {
    let mut files = Vec::new();
    for name in files_in(dir) {
        let path = dir.join(name);
        if path.is_dir() { files.extend(files_below(&path)) } else { files.push(path.display().to_string()) }
    }
    files
}
