//! Equal set-ups never differ, and any single change does: the digests that runs report, over set-ups that are written,
//! placed and started in another way each, and over set-ups of which one thing is another.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::support::launch::{Job, alone, mpirun};
use crate::support::made::{Random, S};
use crate::support::report::Report;
use crate::support::run::Work;

/// Keys that count, as every set-up has them.
const COUNTS: [(&str, &str, &str); 7] = [
    ("moe", "backend", "simd"),
    ("moe", "combine", "slot"),
    ("moe", "activation", "situ:4,25"),
    ("dispatch", "chunk_tokens", "4"),
    ("dispatch", "num_max_tokens_per_rank", "64"),
    ("dispatch", "combine_dtype", "f32"),
    ("timeouts", "step_s", "45"),
];

fn below(random: &mut Random, n: usize) -> usize {
    usize::try_from(random.bits() % n as u64).expect("small")
}

fn coin(random: &mut Random) -> bool {
    random.bits().is_multiple_of(2)
}

fn shuffle<T>(random: &mut Random, items: &mut [T]) {
    for last in (1..items.len()).rev() {
        items.swap(last, below(random, last + 1));
    }
}

/// The same object with its keys in another order at every level, and other blanks.
fn shuffled_json(random: &mut Random, value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<(&String, &Value)> = map.iter().collect();
            shuffle(random, &mut entries);
            let blank = if coin(random) { "\n  " } else { "" };
            let entry = |(key, value): (&String, &Value)| {
                format!("{blank}{}: {}", Value::from(key.as_str()), shuffled_json(random, value))
            };
            format!("{{{}}}", entries.into_iter().map(entry).collect::<Vec<_>>().join(","))
        }
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(|item| shuffled_json(random, item)).collect();
            format!("[{}]", items.join(", "))
        }
        other => other.to_string(),
    }
}

/// What all set-ups have in common.
struct Common {
    work: Work,
    checkpoint: PathBuf,
    input: PathBuf,
}

/// One way to write, place and start the same.
struct SetUp {
    dir: PathBuf,
    words: Vec<String>,
    variables: Vec<(String, String)>,
}

impl Common {
    fn new() -> Self {
        let work = Work::new();
        let s = S::new(4, 32, 32);
        let checkpoint = work.checkpoint(&s.checkpoint());
        let input = work.tensors("input", &[("x".to_string(), s.tokens(6, 1.0))].into());
        Self { work, checkpoint, input }
    }

    fn set_up(&self, random: &mut Random) -> SetUp {
        let dir = self.work.path(&format!("set-up-{:x}", random.bits()));
        let nested = dir.join(if coin(random) { "a/b c" } else { "conf" });
        fs::create_dir_all(&nested).expect("directories");
        let (mut file, mut variables, mut words) = (Vec::new(), Vec::new(), Vec::new());
        let mut keys = COUNTS.to_vec();
        shuffle(random, &mut keys);
        for (section, key, value) in keys {
            match below(random, 6) {
                0 => variables.push((format!("LOCKSTEP_{}", key.to_uppercase()), value.to_owned())),
                1 => words.push(format!("--set={section}.{key}={value}")),
                _ => file.push((section, key, value)),
            }
        }
        let deployment = nested.join(format!("deployment-{}.yaml", below(random, 1000)));
        fs::write(&deployment, yaml(random, &file)).expect("written");
        let checkpoint = self.place_checkpoint(random, &dir);
        // A path may be relative to where the rank starts.
        let shown = |path: &Path| match path.strip_prefix(&dir) {
            Ok(inside) => inside.display().to_string(),
            Err(_) => path.display().to_string(),
        };
        words.push(format!("--deployment={}", shown(&deployment)));
        words.push(format!("--{{checkpoint}}={}", shown(&checkpoint)));
        shuffle(random, &mut words);
        variables.extend(informational(random, &dir));
        shuffle(random, &mut variables);
        SetUp { dir, words, variables }
    }

    /// The checkpoint somewhere else: linked, or copied with its config's keys in another order.
    fn place_checkpoint(&self, random: &mut Random, dir: &Path) -> PathBuf {
        let placed = dir.join(format!("model-{}", below(random, 1000)));
        if coin(random) {
            symlink(&self.checkpoint, &placed).expect("linked");
            return placed;
        }
        fs::create_dir(&placed).expect("a directory");
        for entry in fs::read_dir(&self.checkpoint).expect("the checkpoint") {
            let from = entry.expect("an entry").path();
            let to = placed.join(from.file_name().expect("a name"));
            if from.extension().is_some_and(|extension| extension == "json") {
                let value: Value = serde_json::from_slice(&fs::read(&from).expect("read")).expect("JSON");
                fs::write(to, shuffled_json(random, &value)).expect("written");
            } else {
                fs::copy(from, to).expect("copied");
            }
        }
        placed
    }
}

/// The keys in any order and style.
fn yaml(random: &mut Random, keys: &[(&str, &str, &str)]) -> String {
    let mut sections: Vec<&str> = keys.iter().map(|(section, ..)| *section).collect();
    sections.sort_unstable();
    sections.dedup();
    shuffle(random, &mut sections);
    let name = format!("name: \"a name {}\"\n", random.bits());
    let version = "version: 1\n".to_owned();
    let mut blocks = vec![name, version, "log: {level: warn}\n".to_owned(), "# nothing\n".to_owned()];
    for section in sections {
        let of_section = keys.iter().filter(|(of, ..)| *of == section);
        let is_flow = coin(random);
        let entries: Vec<String> = of_section
            .map(|(_, key, value)| {
                let is_word = value.starts_with(|c: char| c.is_ascii_alphabetic());
                let quoted = value.contains(',') || (is_word && coin(random));
                format!("{key}: {}", if quoted { format!("\"{value}\"") } else { (*value).to_owned() })
            })
            .collect();
        blocks.push(match is_flow {
            true => format!("{section}: {{{}}}\n", entries.join(", ")),
            false => format!("{section}:\n  {}\n", entries.join("   # a comment\n  ")),
        });
    }
    shuffle(random, &mut blocks);
    let text = blocks.concat();
    match below(random, 3) {
        0 => text.replace('\n', "\r\n"),
        1 => format!("\u{feff}{text}"),
        _ => text,
    }
}

/// Variables that differ between hosts and change nothing.
fn informational(random: &mut Random, dir: &Path) -> Vec<(String, String)> {
    let number = random.bits() % 1000;
    let all = [
        ("HOME", dir.display().to_string()),
        ("XDG_CACHE_HOME", format!("/nowhere/{number}")),
        ("LOCKSTEP_CACHE_DIR", format!("cache-{number}")),
        ("LOCKSTEP_LEVEL", "error".to_owned()),
        ("LOCKSTEP_NAME", format!("run {number}")),
        ("LOCKSTEP_THREADS", (1 + number % 2).to_string()),
        ("SLURM_JOB_ID", number.to_string()),
        ("CUDA_VISIBLE_DEVICES", (number % 8).to_string()),
        ("NCCL_DEBUG", "WARN".to_owned()),
        ("UCX_LOG_LEVEL", "error".to_owned()),
        ("SHELL_LEVEL", number.to_string()),
    ];
    all.into_iter().filter(|_| coin(random)).map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The descriptions of two ranks, in any order of keys and with hosts of any name.
fn described(random: &mut Random) -> String {
    let mut rank = || {
        let mut rank: Map<String, Value> = Map::new();
        rank.insert("host".into(), format!("host{}", random.bits() % 100).into());
        rank.insert("instruction_set".into(), "avx2".into());
        rank.insert("gpu".into(), Value::Null);
        let libraries =
            json!({"mpi": format!("4.1.{}", random.bits() % 9), "driver": null, "nccl": null, "nvrtc": null});
        rank.insert("libraries".into(), libraries);
        rank.insert("flags".into(), json!([]));
        rank.insert("variables".into(), json!({"SLURM_PROCID": (random.bits() % 9).to_string(), "HOME": "/x"}));
        rank.insert("info".into(), json!({"cores": (random.bits() % 99).to_string()}));
        shuffled_json(random, &rank.into())
    };
    format!("[{}, {}]", rank(), rank())
}

impl SetUp {
    /// The words with the checkpoint's option under this name.
    fn words(&self, checkpoint: &str) -> impl Iterator<Item = String> {
        self.words.iter().map(move |word| word.replace("--{checkpoint}", checkpoint))
    }
}

/// A digest of `resolve` for each of 100 set-ups, all in one process each.
#[test]
fn a_hundred_equal_set_ups_resolve_to_one_digest() {
    let common = Common::new();
    let mut random = Random::new(100);
    let digests: BTreeSet<String> = (0..100)
        .map(|_| {
            let set_up = common.set_up(&mut random);
            let environment = set_up.dir.join("ranks.json");
            fs::write(&environment, described(&mut random)).expect("written");
            let mut job = alone().dir(&set_up.dir).args(["resolve", "--json", "--environment", "ranks.json"]);
            job = job.args(set_up.words("--model"));
            job = set_up.variables.iter().fold(job, |job, (name, value)| job.env(name, value));
            let outcome = job.run().expect_code(0);
            let resolved: Value = serde_json::from_str(&outcome.stdout).expect("resolve prints JSON");
            resolved["digest"].as_str().expect("a digest").to_owned()
        })
        .collect();
    assert_eq!(digests.len(), 1, "{digests:?}");
}

/// Runs in which every rank has a set-up of its own: they have to agree, and every run of a size on the same digests.
#[track_caller]
fn runs_agree(sizes: impl Iterator<Item = usize>, seed: u64) {
    let common = Common::new();
    let mut random = Random::new(seed);
    let mut digests: [BTreeSet<(String, String)>; 5] = Default::default();
    for (idx, ranks) in sizes.enumerate() {
        let [output, report] = ["output.safetensors", "report.json"].map(|name| common.work.path(name));
        let mut job = mpirun(ranks).args(["run"]);
        for (option, path) in [("input", &common.input), ("output", &output), ("report", &report)] {
            job = job.args([format!("--{option}={}", path.display())]);
        }
        let hosts: Vec<String> = (0..ranks).map(|rank| format!("{rank}:start:host=h{}", random.bits() % 100)).collect();
        job = job.env("LOCKSTEP_FAULT", &hosts.join(";"));
        for rank in 0..ranks {
            job = start_as(job, rank, &common.set_up(&mut random));
        }
        job.run().expect_code(0);
        let report = Report::read(&report);
        let digest = |name: &str| report.at(&format!("/decided/{name}")).as_str().expect("a digest").to_owned();
        digests[ranks].insert((digest("selection"), digest("session")));
        assert_eq!(digests[ranks].len(), 1, "run {idx} of {ranks} ranks: {:?}", digests[ranks]);
    }
}

fn start_as(mut job: Job, rank: usize, set_up: &SetUp) -> Job {
    for (name, value) in &set_up.variables {
        job = job.env_of(rank, name, value);
    }
    for word in set_up.words("--checkpoint") {
        job = job.arg_of(rank, word);
    }
    job.dir_of(rank, &set_up.dir)
}

#[test]
fn ranks_with_set_ups_of_their_own_agree_on_one_fingerprint() {
    runs_agree([2, 3, 4, 2, 3, 4, 2, 2].into_iter(), 8);
}

/// `cargo nextest run --test ranks --run-ignored only -- a_hundred_runs`, or
/// `cargo test --test ranks -- --ignored a_hundred_runs`
#[test]
#[ignore = "a hundred launches take minutes; its short form is ranks_with_set_ups_of_their_own_agree_on_one_fingerprint"]
fn a_hundred_runs_agree_on_one_fingerprint() {
    runs_agree((0..100).map(|run| 2 + run % 3), 1);
}

/// The session's digest of a run on so many ranks.
fn session(common: &Common, ranks: usize, checkpoint: &Path, words: &[&str]) -> String {
    let [output, report] = ["output.safetensors", "report.json"].map(|name| common.work.path(name));
    let mut job = if ranks == 1 { alone() } else { mpirun(ranks) }.args(["run"]);
    let paths = [("checkpoint", checkpoint), ("input", &common.input), ("output", &output), ("report", &report)];
    for (option, path) in paths {
        job = job.args([format!("--{option}={}", path.display())]);
    }
    job.args(words.iter().copied()).run().expect_code(0);
    Report::read(&report).at("/decided/session").as_str().expect("a digest").to_owned()
}

/// Every one of these runs has a session of its own. Fields that no option reaches, such as the build, are changed in the
/// tests of `layer::selected` and `select::fingerprint`, which compare their tables with the list of encoded fields.
#[test]
fn any_single_change_of_a_run_gives_another_session() {
    let common = Common::new();
    let situ = "--activation=situ:4,25";
    let mut sessions: Vec<(String, String)> = Vec::new();
    let mut add = |what: &str, digest: String| sessions.push((what.to_owned(), digest));
    add("nothing", session(&common, 1, &common.checkpoint, &[situ]));
    for (what, words) in [
        ("beta in the last bit", &["--activation=situ:4.0000005,25"][..]),
        ("linear_beta in the last bit", &["--activation=situ:4,25.000002"]),
        ("activation", &["--activation=swiglu"]),
        ("chunk size", &[situ, "--chunk-tokens=4"]),
        ("capacity", &[situ, "--num-max-tokens-per-rank=8191"]),
        ("payload", &[situ, "--payload=f32"]),
        ("dtype of rows", &[situ, "--combine-dtype=bf16"]),
        ("backend", &[situ, "--backend=reference"]),
        ("combine", &[situ, "--combine=rank"]),
        ("part", &[situ, "--part=routed"]),
        ("activations", &[situ, "--activations=quantised"]),
    ] {
        add(what, session(&common, 1, &common.checkpoint, words));
    }
    for (what, other) in
        [("top-k", S::new(4, 32, 32).topk(2)), ("experts", S::new(5, 32, 32)), ("width", S::new(4, 32, 48))]
    {
        let checkpoint = common.work.checkpoint(&other.checkpoint());
        add(what, session(&common, 1, &checkpoint, &[situ]));
    }
    add("expert split", session(&common, 2, &common.checkpoint, &[situ]));
    let distinct: BTreeSet<&String> = sessions.iter().map(|(_, digest)| digest).collect();
    assert_eq!(distinct.len(), sessions.len(), "two of these have one digest: {sessions:#?}");
    // And once more the first: nothing of a run is in it.
    assert_eq!(session(&common, 1, &common.checkpoint, &[situ]), sessions[0].1);
}
