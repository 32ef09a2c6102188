//! `lockstep run` as a builder: writes deployment, input and choice files, launches, and reads back what came out.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::checkpoint::Checkpoint;
use super::disturb::Running;
use super::launch::{FAILURE_LIMIT, Job, Outcome, SUCCESS_LIMIT, mpirun};
use super::made::Choice;
use super::places;
use super::report::Report;
use super::safetensors::{self, Tensors};
use super::tensor::Tensor;

/// Both CPU backends.
pub const BACKENDS: [&str; 2] = ["reference", "simd"];
/// Both `--activations`.
pub const ACTIVATIONS: [&str; 2] = ["bf16", "quantised"];

/// A path as a word of a command line.
pub fn word(path: impl AsRef<Path>) -> String {
    path.as_ref().display().to_string()
}

/// A temporary directory of a test, with a new file name whenever asked.
#[derive(Debug)]
pub struct Work {
    dir: tempfile::TempDir,
    next: Cell<usize>,
}

impl Work {
    pub fn new() -> Self {
        Self { dir: places::temporary_dir(), next: Cell::new(0) }
    }

    /// A path in this directory that was never given out before.
    pub fn path(&self, name: &str) -> PathBuf {
        self.next.set(self.next.get() + 1);
        self.dir.path().join(format!("{:03}-{name}", self.next.get()))
    }

    /// Writes a file of tensors.
    pub fn tensors(&self, name: &str, tensors: &Tensors) -> PathBuf {
        let path = self.path(&format!("{name}.safetensors"));
        safetensors::write(&path, tensors);
        path
    }

    /// Writes a checkpoint as a single file.
    pub fn checkpoint(&self, checkpoint: &Checkpoint) -> PathBuf {
        let dir = self.path("checkpoint");
        checkpoint.write_single(&dir);
        dir
    }

    /// Writes a checkpoint in shards with an index.
    pub fn sharded(&self, checkpoint: &Checkpoint, num_shards: usize) -> PathBuf {
        let dir = self.path("checkpoint");
        checkpoint.write_shards(&dir, num_shards);
        dir
    }
}

/// A `lockstep run` to launch: f32 output, SiTU 4 / 25, the routed part of all layers, one thread a rank.
#[derive(Debug, Clone)]
pub struct Run<'a> {
    work: &'a Work,
    checkpoint: PathBuf,
    input: Tensor,
    ranks: usize,
    choice: Option<Tensors>,
    deployment: Vec<(String, String, String)>,
    options: Vec<(String, String)>,
    env: Vec<(String, String)>,
    output: Option<PathBuf>,
    watch_memory: bool,
}

/// What a run left.
#[derive(Debug)]
pub struct Done {
    pub outcome: Outcome,
    pub output: Tensors,
    pub sha256: String,
    pub report: Report,
    /// What `--export-topk` wrote; empty where it was not asked for.
    pub exported: Tensors,
}

struct Files {
    output: PathBuf,
    report: PathBuf,
    exported: PathBuf,
}

impl<'a> Run<'a> {
    pub fn new(work: &'a Work, checkpoint: &Path, input: &Tensor) -> Self {
        let run = Self {
            work,
            checkpoint: checkpoint.to_path_buf(),
            input: input.clone(),
            ranks: 1,
            choice: None,
            deployment: Vec::new(),
            options: Vec::new(),
            env: Vec::new(),
            output: None,
            watch_memory: false,
        };
        run.option("layers", "all").option("part", "routed").activation("situ:4,25").output_dtype("f32")
    }

    pub fn ranks(mut self, ranks: usize) -> Self {
        self.ranks = ranks;
        self
    }

    /// The router's choice, the same for every layer.
    pub fn choice(self, choice: &Choice) -> Self {
        let tensors = choice.tensors();
        self.choice_tensors(&tensors)
    }

    pub fn choice_tensors(mut self, tensors: &Tensors) -> Self {
        self.choice = Some(tensors.clone());
        self
    }

    /// Sets `--name value`, replacing an earlier one.
    pub fn option(mut self, name: &str, value: &str) -> Self {
        self.options.retain(|(known, _)| known != name);
        self.options.push((name.into(), value.into()));
        self
    }

    /// Takes an option back, so that the program's default holds.
    pub fn without(mut self, name: &str) -> Self {
        self.options.retain(|(known, _)| known != name);
        self
    }

    /// Tokens of each rank.
    pub fn split(self, tokens: &[usize]) -> Self {
        let list: Vec<String> = tokens.iter().map(ToString::to_string).collect();
        self.option("split", &list.join(","))
    }

    pub fn backend(self, backend: &str) -> Self {
        self.option("backend", backend)
    }

    pub fn activations(self, activations: &str) -> Self {
        self.option("activations", activations)
    }

    pub fn activation(self, activation: &str) -> Self {
        self.option("activation", activation)
    }

    pub fn output_dtype(self, dtype: &str) -> Self {
        self.option("output-dtype", dtype)
    }

    pub fn steps(self, steps: usize) -> Self {
        self.option("steps", &steps.to_string())
    }

    pub fn export_topk(self) -> Self {
        self.option("export-topk", "")
    }

    /// Sets a key of the deployment file, as YAML text.
    pub fn key(mut self, section: &str, key: &str, value: &str) -> Self {
        self.deployment.push((section.into(), key.into(), value.into()));
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Writes the output there, rather than where nothing was before.
    pub fn output_at(mut self, path: &Path) -> Self {
        self.output = Some(path.to_path_buf());
        self
    }

    pub fn watch_memory(mut self) -> Self {
        self.watch_memory = true;
        self
    }

    /// Runs, and reads the results of a run that has to succeed.
    #[track_caller]
    pub fn succeed(&self) -> Done {
        self.succeed_while(|_| {})
    }

    /// The same, with `watch` once the job has started.
    #[track_caller]
    pub fn succeed_while(&self, watch: impl FnOnce(&Running)) -> Done {
        let (files, job) = self.job(SUCCESS_LIMIT);
        let outcome = job.run_while(watch).expect_code(0);
        let exported = if files.exported.exists() { safetensors::read(&files.exported) } else { Tensors::new() };
        Done {
            output: safetensors::read(&files.output),
            sha256: safetensors::sha256(&files.output),
            report: Report::read(&files.report),
            exported,
            outcome,
        }
    }

    /// Runs what has to fail for bad input: exit code 2, within 30 s, one message that holds the needles, output untouched.
    #[track_caller]
    pub fn fails(&self, needles: &[&str]) -> Outcome {
        self.fails_with(2, needles)
    }

    #[track_caller]
    pub fn fails_with(&self, code: i32, needles: &[&str]) -> Outcome {
        let (files, job) = self.job(FAILURE_LIMIT);
        let before = fs::read(&files.output).ok();
        let outcome = job.run().fails_clearly(code, needles);
        let after = fs::read(&files.output).ok();
        assert!(before == after, "a failed run touched its output file: {}", outcome.printed());
        outcome
    }

    /// Runs what may end either way: with an output, or with an error and none.
    pub fn attempt(&self) -> (Outcome, Option<Tensors>) {
        let (files, job) = self.job(FAILURE_LIMIT);
        let outcome = job.run();
        // Exit code 1 is a judgement on an output that is there.
        assert_eq!(outcome.code <= 1, files.output.exists(), "output and exit code: {}", outcome.printed());
        let output = files.output.exists().then(|| safetensors::read(&files.output));
        (outcome, output)
    }

    /// The text of the deployment file.
    fn deployment(&self) -> String {
        let mut text = "version: 1\nname: ranks\n".to_string();
        let mut sections: Vec<&str> = self.deployment.iter().map(|(section, ..)| section.as_str()).collect();
        sections.sort_unstable();
        sections.dedup();
        for section in sections {
            text.push_str(&format!("{section}:\n"));
            for (_, key, value) in self.deployment.iter().filter(|(of, ..)| of == section) {
                text.push_str(&format!("  {key}: {value}\n"));
            }
        }
        text
    }

    fn job(&self, limit: Duration) -> (Files, Job) {
        let files = Files {
            output: self.output.clone().unwrap_or_else(|| self.work.path("output.safetensors")),
            report: self.work.path("report.json"),
            exported: self.work.path("exported.safetensors"),
        };
        let deployment = self.work.path("deployment.yaml");
        safetensors::write_bytes(&deployment, self.deployment().as_bytes());
        let input = self.work.tensors("input", &[("x".to_string(), self.input.clone())].into());
        let mut job = mpirun(self.ranks).limit(limit).args(["run"]);
        for (name, path) in [
            ("deployment", &deployment),
            ("checkpoint", &self.checkpoint),
            ("input", &input),
            ("output", &files.output),
        ] {
            job = job.args([format!("--{name}"), path.display().to_string()]);
        }
        job = job.args(["--report".to_string(), files.report.display().to_string()]);
        if let Some(choice) = &self.choice {
            let path = self.work.tensors("choice", choice);
            job = job.args(["--topk".to_string(), path.display().to_string()]);
        }
        for (name, value) in &self.options {
            let value = if name == "export-topk" { files.exported.display().to_string() } else { value.clone() };
            // One word: a value may begin with a dash.
            job = job.args([format!("--{name}={value}")]);
        }
        for (name, value) in &self.env {
            job = job.env(name, value);
        }
        (files, if self.watch_memory { job.watch_memory() } else { job })
    }
}

impl Done {
    /// The output of a layer.
    #[track_caller]
    pub fn layer(&self, layer: usize) -> &Tensor {
        let name = format!("layers.{layer}.output");
        self.output.get(&name).unwrap_or_else(|| panic!("no {name} in {:?}", self.output.keys()))
    }
}

/// Every file in a directory, for tests that count what a run leaves.
pub fn files_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("cannot list {}: {error}", dir.display()));
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::super::made::S;
    use super::*;

    #[test]
    fn the_deployment_file_has_one_section_a_name() {
        let work = Work::new();
        let run = Run::new(&work, Path::new("none"), &S::new(1, 16, 16).tokens(1, 1.0))
            .key("dispatch", "chunk_tokens", "3")
            .key("moe", "combine", "slot")
            .key("dispatch", "num_max_tokens_per_rank", "9");
        let wanted = "version: 1\nname: ranks\ndispatch:\n  chunk_tokens: 3\n  num_max_tokens_per_rank: 9\nmoe:\n  combine: slot\n";
        assert_eq!(run.deployment(), wanted);
    }

    #[test]
    fn a_later_option_replaces_an_earlier_one() {
        let work = Work::new();
        let run = Run::new(&work, Path::new("none"), &S::new(1, 16, 16).tokens(1, 1.0)).option("part", "block");
        assert_eq!(run.options.iter().filter(|(name, _)| name == "part").count(), 1);
        assert!(run.options.contains(&("part".into(), "block".into())));
        assert!(!run.without("part").options.iter().any(|(name, _)| name == "part"));
    }
}
