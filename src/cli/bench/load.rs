//! `lockstep bench --load`: how fast the routed experts of a checkpoint are read and packed, beside what its files and the way
//! to the GPU give in the same process. One process plays the rank that holds all of them.

use std::cell::RefCell;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use super::super::failure::Failure;
use super::figures::{median, show};
use super::{BenchArgs, EXPERTS_ALONE, markdown, repeats};
use crate::backend::{Backend, BackendError, ExpertsSpec, Machine, build, cuda};
use crate::checkpoint::{Checkpoint, LayerManifest};
use crate::env::EnvVars;
use crate::exit::Exit;
use crate::gpu::feed::{Feed, SLOT_BYTES};
use crate::gpu::{Gpu, GpuError};
use crate::host;
use crate::layer::{ExpertsLoader, read_experts};
use crate::numerics::activation::Activation;

/// Loads that count, unless asked for otherwise.
const REPEATS: usize = 5;

/// Slots that the rate of the way to the GPU is measured with.
const LINK_SLOTS: usize = 8;

/// Options of `--load`.
#[derive(Debug, Clone, Args)]
pub struct LoadArgs {
    /// Times the loading of all routed experts of a checkpoint instead, by --backend with --threads: reading, checking of
    /// scales, packing, and the way to the GPU. Files that lie in no cache are read from disk the first time alone.
    #[arg(long, value_name = "CHECKPOINT", conflicts_with_all = EXPERTS_ALONE,
        conflicts_with_all = ["agreement", "travel", "geometry", "rows", "activations", "plot"])]
    pub load: Option<PathBuf>,
}

/// What was loaded, and how fast.
#[derive(Debug, Clone, Serialize)]
pub struct LoadReport {
    /// The technique that it was packed for.
    pub technique: &'static str,
    /// The GPU, where it is for one.
    pub device: Option<String>,
    /// Threads.
    pub num_threads: usize,
    /// MoE layers.
    pub num_layers: usize,
    /// Routed experts over all layers.
    pub num_experts: usize,
    /// Their bytes in the checkpoint, scales counted.
    pub num_bytes: u64,
    /// What the first reading took: from disk, where no cache held the files.
    pub first_read_s: f64,
    /// Copying all bytes out of the mapped files, on all threads, and nothing else; the median.
    pub read_s: f64,
    /// As many bytes from pinned memory to the GPU; the median.
    pub link_s: Option<f64>,
    /// What the first loading took, which also gets pinned memory.
    pub first_load_s: f64,
    /// Every other loading, as it came.
    pub load_s: Vec<f64>,
    /// The median of these.
    pub median_s: f64,
    /// The longer of reading and link over that median: 1 where loading costs what the slower of them does.
    pub floor_share: f64,
    /// The largest resident set of this process; mapped files count.
    pub peak_rss_bytes: u64,
}

impl LoadReport {
    fn gbyte_per_s(&self, seconds: f64) -> f64 {
        self.num_bytes as f64 / seconds / 1e9
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { technique, num_threads, num_layers, num_experts, .. } = self;
        let device = self.device.as_ref().map(|device| format!(" on {device}")).unwrap_or_default();
        writeln!(
            f,
            "{technique}{device}: {num_experts} experts of {num_layers} layers, {:.2} GB, {num_threads} threads, {} loads",
            self.num_bytes as f64 / 1e9,
            self.load_s.len(),
        )?;
        let row = |what: &str, seconds: f64, share: Option<f64>| {
            let share = share.map(|share| format!("{:.0} %", 100.0 * share)).unwrap_or_default();
            [what.to_owned(), format!("{seconds:.4}"), format!("{:.2}", self.gbyte_per_s(seconds)), share]
        };
        let link = self.link_s.map(|link_s| row("pinned memory to the GPU", link_s, None));
        let rows =
            [row("first reading", self.first_read_s, None), row("files, copied by all threads", self.read_s, None)];
        let loads =
            [row("first loading", self.first_load_s, None), row("loading", self.median_s, Some(self.floor_share))];
        let rows = rows.into_iter().chain(link).chain(loads);
        let table = markdown::table(&["", "seconds", "GB/s", "of floor"], &[0], rows);
        writeln!(f, "{table}")?;
        writeln!(
            f,
            "floor = the slower of files and link, at once; peak memory {:.2} GB",
            self.peak_rss_bytes as f64 / 1e9
        )
    }
}

/// Measures and prints.
pub(super) fn command(checkpoint: &Path, args: &BenchArgs, env: &EnvVars) -> Result<Exit, Failure> {
    let report = run(checkpoint, args, env)?;
    show(&report, args.json)?;
    Ok(Exit::Fine)
}

fn run(checkpoint: &Path, args: &BenchArgs, env: &EnvVars) -> Result<LoadReport, Failure> {
    let repeats = repeats(args, REPEATS)?;
    let checkpoint = Checkpoint::open(checkpoint)?;
    let layers = checkpoint.moe_layers();
    let layers = layers.into_iter().map(|layer| checkpoint.layer(layer)).collect::<Result<Vec<_>, _>>()?;
    let gpu = cuda::family(&args.backend).map(|_| Gpu::open(0, &args.kernels(env))).transpose()?;
    let machine = Machine { num_threads: args.threads, isa: args.isa, gpu: gpu.clone() };
    let backend = build(&args.backend, &machine)?;
    let work = Work { checkpoint: &checkpoint, layers: &layers, backend: &*backend };
    let feed = gpu.as_ref().map(|gpu| Feed::new(gpu.device(), LINK_SLOTS));
    let num_bytes = work.num_bytes()?;
    let send = || feed.as_ref().map(|feed| send(feed, num_bytes)).transpose().map_err(BackendError::from);
    let first_read_s = work.read()?.as_secs_f64();
    send()?;
    let first_load_s = work.load()?.as_secs_f64();
    let (mut read_s, mut link_s, mut load_s) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..repeats {
        read_s.push(work.read()?.as_secs_f64());
        link_s.extend(send()?.map(|elapsed| elapsed.as_secs_f64()));
        load_s.push(work.load()?.as_secs_f64());
    }
    let (read_s, median_s) = (median(&read_s), median(&load_s));
    let link_s = (!link_s.is_empty()).then(|| median(&link_s));
    Ok(LoadReport {
        technique: backend.technique(),
        device: gpu.map(|gpu| gpu.device().facts().name.clone()),
        num_threads: backend.pool().current_num_threads(),
        num_layers: layers.len(),
        num_experts: layers.iter().map(|layer| layer.experts.len()).sum(),
        num_bytes,
        first_read_s,
        read_s,
        link_s,
        first_load_s,
        load_s,
        median_s,
        floor_share: link_s.unwrap_or(0.0).max(read_s) / median_s,
        peak_rss_bytes: host::peak_rss_bytes().unwrap_or_default(),
    })
}

/// The experts, and what packs them.
struct Work<'a> {
    checkpoint: &'a Checkpoint,
    layers: &'a [LayerManifest],
    backend: &'a dyn Backend,
}

impl Work<'_> {
    fn num_bytes(&self) -> Result<u64, Failure> {
        let mut num_bytes = 0;
        for layer in self.layers {
            for expert in 0..layer.experts.len() {
                num_bytes += self.checkpoint.expert_bytes(layer, crate::ids::ExpertIdx::from_index(expert))?;
            }
        }
        Ok(num_bytes)
    }

    /// Copies all bytes to where a core has them at hand.
    fn read(&self) -> Result<Duration, Failure> {
        thread_local! {
            static TARGET: RefCell<Vec<u8>> = RefCell::new(vec![0; SLOT_BYTES]);
        }
        let copy = |bytes: &[u8]| TARGET.with_borrow_mut(|target| target[..bytes.len()].copy_from_slice(bytes));
        let start = Instant::now();
        for layer in self.layers {
            let experts = 0..layer.experts.len();
            read_experts((self.checkpoint, layer), self.backend.pool(), experts, SLOT_BYTES, copy)?;
        }
        Ok(start.elapsed())
    }

    /// Loads all experts, as a session does, and lets go of them.
    fn load(&self) -> Result<Duration, Failure> {
        let geometry = &self.checkpoint.model().geometry;
        let spec = ExpertsSpec {
            hidden: geometry.expert_hidden,
            intermediate: geometry.intermediate,
            activation: Activation::Swiglu,
            quantise_activations: false,
            batch_invariant: false,
        };
        let loader = ExpertsLoader { checkpoint: self.checkpoint, backend: self.backend, progress: &|_| {} };
        let mut loaded = Vec::new();
        let start = Instant::now();
        for layer in self.layers {
            loaded.push(loader.load(layer, spec, 0..layer.experts.len())?);
        }
        Ok(start.elapsed())
    }
}

/// So many bytes from pinned memory to the GPU, whatever they are.
fn send(feed: &Feed, num_bytes: u64) -> Result<Duration, GpuError> {
    let start = Instant::now();
    let mut num_left = usize::try_from(num_bytes).unwrap_or(usize::MAX);
    while num_left > 0 {
        let len = num_left.min(SLOT_BYTES);
        drop(feed.take(len)?.send(len)?);
        num_left -= len;
    }
    feed.finish()?;
    Ok(start.elapsed())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::sample::{Geometry, SampleSpec};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: BenchArgs,
    }

    #[test]
    fn a_sample_is_loaded_by_both_cpu_backends() {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = SampleSpec::of(Geometry::Qwen3);
        (spec.hidden, spec.intermediate, spec.num_experts, spec.num_topk) = (64, 48, 20, 2);
        (spec.num_layers, spec.num_tokens) = (2, 1);
        spec.fit_groups();
        spec.plan().unwrap().write(dir.path(), &|_| {}).unwrap();
        for backend in ["simd", "reference"] {
            let path = dir.path().to_str().unwrap();
            let line = ["bench", "--load", path, "--backend", backend, "--threads", "2", "--repeats", "2"];
            let args = Line::try_parse_from(line).unwrap().args;
            let report = run(dir.path(), &args, &EnvVars::default()).unwrap();
            assert_eq!((report.technique, report.num_threads), (backend, 2));
            assert_eq!((report.num_layers, report.num_experts, report.load_s.len()), (2, 40, 2));
            // Codes, block scales, and two scales of f32 a projection.
            assert_eq!(report.num_bytes, 40 * 3 * (64 * 48 / 2 + 64 * 48 / 16 + 8));
            assert!((report.floor_share - report.read_s / report.median_s).abs() < 1e-9 && report.link_s.is_none());
            let text = report.to_string();
            for part in ["40 experts of 2 layers", "files, copied by all threads", "of floor", "GB/s"] {
                assert!(text.contains(part), "{part} is not in\n{text}");
            }
            assert_eq!(serde_json::to_value(&report).unwrap()["num_experts"], 40);
        }
        assert!(Line::try_parse_from(["bench", "--load", "x", "--geometry", "kimi-k3"]).is_err());
    }
}
