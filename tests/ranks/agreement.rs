//! Ranks that differ: all end alike and are told where, or all go on alike. One rank is set up in another way by a line
//! of many programs, which is what a variable or file that reached one host only looks like.
//!
//! The tests named `hazard_NN` are the rows of the table in ARCHITECTURE.md.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::fixtures;
use crate::support::launch::{FAILURE_LIMIT, Job, alone, mpirun};
use crate::support::made::{Choice, S};
use crate::support::places;
use crate::support::report::Report;
use crate::support::run::{Work, word};
use crate::support::safetensors;

const FIXTURE: &str = "modelopt-dsv3-tiny";

/// A run of S on so many ranks, or of another checkpoint, with its files.
struct Set {
    work: Work,
    checkpoint: PathBuf,
    input: PathBuf,
    report: PathBuf,
    output: PathBuf,
}

impl Set {
    fn new() -> Self {
        let work = Work::new();
        let s = S::new(4, 128, 128);
        let checkpoint = work.checkpoint(&s.checkpoint());
        let input = work.tensors("input", &[("x".to_string(), s.tokens(8, 1.0))].into());
        Self::of(work, checkpoint, input)
    }

    /// A model with shared experts and quantised activations.
    fn of_fixture() -> Self {
        let layer = &fixtures::named(FIXTURE).layers[0];
        let work = Work::new();
        let input = format!("{}:{}", layer.file.display(), layer.tensor("x"));
        Self::of(work, fixtures::checkpoint(FIXTURE), input.into())
    }

    fn of(work: Work, checkpoint: PathBuf, input: PathBuf) -> Self {
        let (report, output) = (work.path("report.json"), work.path("output.safetensors"));
        Self { work, checkpoint, input, report, output }
    }

    fn run(&self, ranks: usize) -> Job {
        let path = |path: &Path| path.display().to_string();
        let words = [
            ("--checkpoint", path(&self.checkpoint)),
            ("--input", path(&self.input)),
            ("--output", path(&self.output)),
            ("--report", path(&self.report)),
        ];
        let mut job = mpirun(ranks).limit(FAILURE_LIMIT).args(["run"]);
        for (option, value) in words {
            job = job.args([option.to_owned(), value]);
        }
        job
    }

    /// The report of a job that has to succeed.
    #[track_caller]
    fn report(&self, job: &Job) -> Report {
        job.run().expect_code(0);
        Report::read(&self.report)
    }

    #[track_caller]
    fn sha256(&self) -> String {
        safetensors::sha256(&self.output)
    }

    /// A deployment file.
    fn deployment(&self, text: &str) -> PathBuf {
        let path = self.work.path("deployment.yaml");
        safetensors::write_bytes(&path, format!("version: 1\n{text}\n").as_bytes());
        path
    }
}

#[track_caller]
fn disagrees(job: &Job, needles: &[&str]) {
    job.run().fails_clearly(4, needles);
}

#[test]
fn e2_a_setting_that_reached_one_rank() {
    let set = Set::new();
    for (variable, value, key, other) in [
        ("LOCKSTEP_PAYLOAD", "f32", "dispatch.payload", "auto"),
        ("LOCKSTEP_COMBINE_DTYPE", "bf16", "dispatch.combine_dtype", "auto"),
        ("LOCKSTEP_LEVELS", "two", "dispatch.levels", "auto"),
        ("LOCKSTEP_SCALE_UP_RANKS", "1", "cluster.scale_up_ranks", "null"),
        ("LOCKSTEP_ACTIVATIONS", "bf16", "moe.activations", "checkpoint"),
        ("LOCKSTEP_STEP_S", "30", "timeouts.step_s", "60"),
        ("LOCKSTEP_TUNING", "on", "moe.tuning", "off"),
    ] {
        let sides = [format!("{key}: {value} on rank 0, {other} on rank 1"), "mpirun passes a variable on".to_owned()];
        disagrees(&set.run(2).env_of(0, variable, value), &[&sides[0], &sides[1]]);
    }
    assert!(!set.output.exists(), "a run of ranks that differ has written an output");
}

#[test]
fn e2_two_deployment_files() {
    let set = Set::new();
    let [one, other] = ["dispatch: {chunk_tokens: 4}", "dispatch: {chunk_tokens: 2}"].map(|text| set.deployment(text));
    let job = set.run(3).args(["--deployment".into(), one.clone()]).word_of(1, &one, &other);
    disagrees(&job, &["dispatch.chunk_tokens: 4 on ranks 0, 2; 2 on rank 1"]);
}

#[test]
fn e2_two_model_configs() {
    let set = Set::new();
    let other = set.work.checkpoint(&S::new(4, 128, 128).topk(2).checkpoint());
    let job = set.run(2).word_of(1, &set.checkpoint, other);
    disagrees(&job, &["num_topk: 1 on rank 0, 2 on rank 1"]);
}

#[test]
fn e2_options_that_every_rank_branches_on() {
    let set = Set::new();
    disagrees(&set.run(2).arg_of(1, "--steps=3"), &["asked.steps: 1 on rank 0, 3 on rank 1"]);
    disagrees(&set.run(2).arg_of(0, "--print-config"), &["asked.print-config: true on rank 0, false on rank 1"]);
    disagrees(&set.run(2).arg_of(1, "--split=3,5"), &["asked.split: even on rank 0, 3,5 on rank 1"]);
}

#[test]
fn e2_a_misspelt_variable_of_one_rank_is_said_once() {
    let set = Set::new();
    let outcome = set.run(2).env_of(1, "LOCKSTEP_BAKEND", "simd").run().expect_code(0);
    let lines: Vec<&str> = outcome.stderr.lines().filter(|line| line.contains("LOCKSTEP_BAKEND")).collect();
    assert_eq!(lines.len(), 1, "{}", outcome.printed());
    for needle in ["LOCKSTEP_BACKEND", "rank 1 only"] {
        assert!(lines[0].contains(needle), "lacks {needle}: {}", lines[0]);
    }
}

#[test]
fn e5_a_backend_that_cannot_run_is_never_replaced() {
    let set = Set::new();
    for backend in ["mma_sync", "wgmma"] {
        let needles =
            [format!("backend {backend} does not serve layer 0 on every rank"), "set moe.backend: simd".to_owned()];
        set.run(2).args(["--backend", backend]).run().fails_clearly(3, &[&needles[0], "runs on GPUs", &needles[1]]);
    }
    set.run(2).args(["--backend", "cutlas"]).run().fails_clearly(2, &["cutlas"]);
    set.run(2).args(["--implementation", "simd.none"]).run().fails_clearly(2, &["simd.none does not serve layer 0"]);
    assert!(!set.output.exists(), "a refused run has written an output");
}

#[test]
fn e5_auto_says_its_choice_and_why_once() {
    let set = Set::new();
    // Every expert has a token, so that every rank computes.
    let choice = set.work.tensors("choice", &Choice::single((0..8).map(|token| token % 4)).tensors());
    let outcome = set.run(3).args(["--topk".into(), choice]).run().expect_code(0);
    assert_eq!(outcome.stderr.matches("preferred by backend auto").count(), 1, "{}", outcome.printed());
    let report = Report::read(&set.report);
    assert_eq!(report.at("/decided/layers/0/why"), "preferred by backend auto");
    for rank in 0..3 {
        let ran = report.at(&format!("/ranks/{rank}/launches/0/identity"));
        assert_eq!(ran, report.at("/decided/layers/0/identities/0"), "rank {rank}");
    }
}

#[test]
fn g1_singletons_and_worlds_of_another_size() {
    let set = Set::new();
    let words: [String; 7] = [
        "run".to_owned(),
        "--checkpoint".to_owned(),
        set.checkpoint.display().to_string(),
        "--input".to_owned(),
        set.input.display().to_string(),
        "--output".to_owned(),
        set.output.display().to_string(),
    ];
    let single = || alone().args(words.clone()).limit(FAILURE_LIMIT);
    for (variables, launched) in [
        (&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "2")][..], "4"),
        (&[("PMI_SIZE", "4"), ("PMI_RANK", "1")], "4"),
        (&[("OMPI_COMM_WORLD_SIZE", "2")], "2"),
    ] {
        let job = variables.iter().fold(single(), |job, (name, value)| job.env(name, value));
        let needles =
            [format!("says that {launched} processes"), "world of 1".to_owned(), format!("mpirun -n {launched}")];
        job.run().fails_clearly(3, &[&needles[0], &needles[1], &needles[2], "--mpi=pmix"]);
    }
    let four = set.deployment("cluster: {ranks_per_node: 4}").display().to_string();
    let job = set.run(2).args(["--deployment", &four]);
    job.run().fails_clearly(2, &["wants 4 ranks", "the world has 2", "mpirun -n 4"]);
    let one = set.deployment("cluster: {ranks_per_node: 1}").display().to_string();
    single().args(["--deployment", &one]).run().expect_code(0);
}

#[test]
fn hazard_01_backend_of_one_rank() {
    let set = Set::new();
    let job = set.run(3).env_of(2, "LOCKSTEP_BACKEND", "reference");
    disagrees(&job, &["moe.backend: auto on ranks 0-1, reference on rank 2"]);
}

/// Ranks that could run other kernels end in the best that all have, and the difference is said once.
#[test]
fn hazard_02_same_winner_for_other_reasons() {
    let set = Set::new();
    let outcome = set.run(2).arg_of(1, "--isa=scalar").run().expect_code(0);
    let report = Report::read(&set.report);
    assert_eq!(report.at("/decided/isa"), "scalar");
    if !outcome.stderr.contains("compared.instruction_set") {
        // On a machine without vector instructions the ranks are alike.
        let best = alone().args(["doctor", "--json"]).run().expect_code(0).stdout;
        assert!(best.contains("\"instruction_set\": \"scalar\""), "{}", outcome.printed());
    }
    let mixed = set.sha256();
    set.run(2).run().expect_code(0);
    assert_eq!(mixed, set.sha256(), "the common variant gives other bits");
}

#[test]
fn hazard_03_a_rank_that_cannot_build_its_backend() {
    let set = Set::new();
    let job = set.run(3).env("LOCKSTEP_FAULT", "1:compile:error");
    job.run().fails_clearly(3, &["(rank 1 of 3)", "LOCKSTEP_FAULT"]);
}

/// Nothing is decided from a rank's own tokens: ranks of 7 and 1 tokens count the same chunks.
#[test]
fn hazard_04_and_05_chunks_follow_from_all_ranks_tokens() {
    let set = Set::new();
    let report = set.report(&set.run(2).args(["--chunk-tokens=2", "--split=7,1"]));
    for rank in 0..2 {
        assert_eq!(report.count(&format!("/ranks/{rank}/layers/0/chunks")), 4, "rank {rank}");
    }
    let job = set.run(2).env_of(1, "LOCKSTEP_CHUNK_TOKENS", "2");
    disagrees(&job, &["dispatch.chunk_tokens: null on rank 0, 2 on rank 1"]);
}

#[test]
fn hazard_08_scales_are_reduced_over_the_world() {
    let set = Set::of_fixture();
    let run = |ranks: usize| {
        let report = set.report(&set.run(ranks).args(["--layers=1", "--activations=quantised", "--output-dtype=f32"]));
        assert_eq!(report.at("/decided/layers/0/quant"), "nvfp4");
        set.sha256()
    };
    assert_eq!(run(1), run(3), "the output depends on which rank holds which scale");
}

/// A rank that reads a stale copy of the shared expert's scales is found before the first step.
#[test]
fn hazard_08_a_stale_copy_of_a_scale() {
    let set = Set::of_fixture();
    let copy = set.work.path("copy");
    copy_dir(&set.checkpoint, &copy);
    let name = "shared_experts.gate_proj.weight_scale_2";
    let changed = double_first_f32(&copy, name);
    assert!(changed, "the fixture has no {name}");
    let job = set.run(2).word_of(1, &set.checkpoint, &copy);
    disagrees(&job, &["scales.shared", "what they have loaded", "may be stale"]);
}

#[test]
fn hazard_09_buffer_sizes() {
    let set = Set::new();
    let job = set.run(2).env_of(1, "LOCKSTEP_NUM_MAX_TOKENS_PER_RANK", "4096");
    disagrees(&job, &["dispatch.num_max_tokens_per_rank: 8192 on rank 0, 4096 on rank 1"]);
}

#[test]
fn hazard_10_a_variable_that_reached_one_host() {
    let set = Set::new();
    let job = set.run(2).env_of(1, "NCCL_ALGO", "Ring");
    disagrees(&job, &["variables.NCCL_ALGO: not there on rank 0, Ring on rank 1"]);
}

/// A rank that finds another version, of what makes code or talks to its like, is not like the others.
#[test]
fn hazard_11_versions_that_change_numbers() {
    let set = Set::new();
    for (all, one, field, value, other) in [
        ("library=nvrtc,13.0.88", "library=nvrtc,13.1.80", "versions.nvrtc", "13.0.88", "13.1.80"),
        ("library=nccl,2.28.3", "library=nccl,2.27.7", "versions.nccl", "2.28.3", "2.27.7"),
        ("gpu=9.0,NVIDIA H200", "gpu=10.3,NVIDIA GB300", "versions.compute_capability", "9.0", "10.3"),
    ] {
        let job = set.run(3).env("LOCKSTEP_FAULT", &format!("*:start:{all};1:start:{one}"));
        let sides = format!("{field}: {value} on ranks 0, 2; {other} on rank 1");
        disagrees(&job, &[&sides, "the same build, libraries"]);
    }
    let job = set.run(2).env("LOCKSTEP_FAULT", "1:start:library=nvrtc,13.0.88");
    disagrees(&job, &["versions.nvrtc: unknown on rank 0, 13.0.88 on rank 1"]);
    assert!(!set.output.exists(), "a run of ranks that differ has written an output");
}

/// The driver loads finished code, MPI was matched by its launcher, and a model's name computes nothing: said once, and on.
#[test]
fn hazard_11_versions_that_change_no_numbers() {
    let set = Set::new();
    let all = "*:start:gpu=9.0,NVIDIA H200;*:start:library=driver,580.95.05";
    let one = "1:start:gpu=9.0,NVIDIA H100;1:start:library=driver,570.86.10;1:start:library=mpi,Open MPI v4.1.5";
    let alike = set.report(&set.run(3).env("LOCKSTEP_FAULT", all));
    let bits = set.sha256();
    let job = set.run(3).env("LOCKSTEP_FAULT", &format!("{all};{one}"));
    let outcome = job.run().expect_code(0);
    for line in [
        "compared.gpu: NVIDIA H200 on ranks 0, 2; NVIDIA H100 on rank 1",
        "compared.driver: 580.95.05 on ranks 0, 2; 570.86.10 on rank 1",
        "Open MPI v4.1.5 on rank 1",
    ] {
        assert_eq!(outcome.stderr.matches(line).count(), 1, "{line}: {}", outcome.printed());
    }
    assert_eq!(outcome.stderr.matches("differ where they may").count(), 1, "{}", outcome.printed());
    let report = Report::read(&set.report);
    for digest in ["/decided/selection", "/decided/session"] {
        assert_eq!(alike.at(digest), report.at(digest), "{digest}: what changes no number is no part of it");
    }
    assert_eq!(set.sha256(), bits);
}

/// What differs by nature changes neither the outcome nor a digest.
#[test]
fn hazard_12_what_differs_by_nature() {
    let set = Set::new();
    let alike = set.report(&set.run(2));
    let job = set
        .run(2)
        .env_of(0, "LOCKSTEP_CACHE_DIR", "elsewhere")
        .env_of(1, "LOCKSTEP_LEVEL", "warn")
        .env_of(1, "LOCKSTEP_NAME", "other")
        .env_of(1, "LOCKSTEP_THREADS", "2")
        .env("LOCKSTEP_FAULT", "1:start:host=another");
    let differing = set.report(&job);
    for digest in ["/decided/selection", "/decided/session"] {
        assert_eq!(alike.at(digest), differing.at(digest), "{digest}");
    }
}

#[test]
fn hazard_13_a_rank_that_never_reached_the_check() {
    let set = Set::new();
    for stage in ["start", "load"] {
        let job = set.run(3).env("LOCKSTEP_FAULT", &format!("1:{stage}:error"));
        job.run().fails_clearly(3, &["(rank 1 of 3)"]);
    }
}

/// A laptop with the description of ranks comes to what these ranks run.
#[test]
fn resolve_prints_the_digest_of_the_run() {
    for (set, ranks) in [(Set::new(), 2), (Set::of_fixture(), 3)] {
        let file = word(places::of_project("topology/laptop.yaml"));
        let laptop = ["--deployment", &file, "--batch-invariant"];
        for options in [&[][..], &["--activations=bf16"], &["--backend=reference", "--chunk-tokens=3"], &laptop] {
            let report = set.report(&set.run(ranks).args(options.iter().copied()));
            let described = mpirun(ranks).args(["doctor", "--json"]).run().expect_code(0).stdout;
            let environment = set.work.path("ranks.json");
            safetensors::write_bytes(&environment, described.as_bytes());
            let outcome = alone()
                .args(["resolve", "--json", "--model"])
                .args([&set.checkpoint])
                .args(["--environment"])
                .args([&environment])
                .args(options.iter().copied())
                .run()
                .expect_code(0);
            let resolved: Value = serde_json::from_str(&outcome.stdout).expect("resolve prints JSON");
            assert_eq!(&resolved["digest"], report.at("/decided/selection"), "{options:?}: {}", outcome.printed());
        }
    }
}

/// A deployment of GPUs on hosts without any: refused with every reason, and by `resolve` in the same words.
#[test]
fn a_cluster_of_gpus_is_refused_where_there_are_none() {
    let set = Set::new();
    let deployment = ["--deployment".to_owned(), word(places::of_project("topology/h200x2.yaml"))];
    let needles = ["does not serve layer 0 on every rank", "(ranks 0-1)", "would serve:", "cure:"];
    let outcome = set.run(2).args(deployment.clone()).run().fails_clearly(3, &needles);
    assert!(!outcome.stderr.contains("(on all"), "a message of several lines has a tail: {}", outcome.printed());
    let environment = set.work.path("ranks.json");
    let described = mpirun(2).args(["doctor", "--json"]).run().expect_code(0).stdout;
    safetensors::write_bytes(&environment, described.as_bytes());
    let resolve = alone().args(["resolve", "--model"]).args([&set.checkpoint]).args(deployment);
    let resolved = resolve.args(["--environment"]).args([&environment]).run().fails_clearly(3, &needles);
    let message = |stderr: &str| stderr[stderr.find("lockstep: error").expect("a message")..].trim_end().to_owned();
    assert!(outcome.stderr.contains(&message(&resolved.stderr)), "{}{}", outcome.printed(), resolved.printed());
}

#[test]
fn doctor_marks_a_planted_difference() {
    let alike = mpirun(3).args(["doctor"]).run().expect_code(0);
    assert!(alike.stdout.contains("ok: the ranks are alike"), "{}", alike.printed());
    alone().args(["doctor"]).run().expect_code(0);
    let planted = mpirun(3).args(["doctor"]).env_of(1, "LOCKSTEP_CHUNK_TOKENS", "64").run().expect_code(3);
    for needle in ["dispatch.chunk_tokens: null on ranks 0, 2; 64 on rank 1", "LOCKSTEP_CHUNK_TOKENS=64  * rank 1 only"]
    {
        assert!(planted.stdout.contains(needle), "lacks {needle}: {}", planted.printed());
    }
}

pub(crate) fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir(to).expect("a directory");
    for entry in std::fs::read_dir(from).expect("the fixture") {
        let entry = entry.expect("an entry");
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copied");
    }
}

/// Doubles the scalar of the first tensor whose name ends in `suffix`, in whichever file has it.
pub(crate) fn double_first_f32(dir: &Path, suffix: &str) -> bool {
    let files = std::fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    for file in files.filter(|file| file.extension().is_some_and(|extension| extension == "safetensors")) {
        let mut tensors = safetensors::read(&file);
        let Some((_, tensor)) = tensors.iter_mut().find(|(name, _)| name.ends_with(suffix)) else { continue };
        let bytes: [u8; 4] = tensor.bytes[..4].try_into().expect("four bytes");
        tensor.bytes[..4].copy_from_slice(&(f32::from_le_bytes(bytes) * 2.0).to_le_bytes());
        safetensors::write(&file, &tensors);
        return true;
    }
    false
}
