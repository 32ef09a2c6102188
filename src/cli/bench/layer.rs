//! The bench of a whole layer, from router to output: replayed as a CUDA graph, next to the same steps followed by hosts.
//!
//! Two sessions over one checkpoint, which differ in `moe.cuda_graph` alone; their outputs are compared bit for bit. Under a
//! launcher, over all its ranks, whose tokens then travel by nvlink.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use crate::backend::cuda;
use crate::checkpoint::Checkpoint;
use crate::cli::failure::Failure;
use crate::cli::world::with_world;
use crate::config::{Activations, BackendFamily, Choice as _, CudaGraph, Deployment, Device, Transport};
use crate::env::EnvVars;
use crate::exit::Exit;
use crate::facts;
use crate::ids::LayerIdx;
use crate::layer::{JitOptions, LayerError, LayerStats, Part, Session, SessionOptions};
use crate::report::time;
use crate::world::World;

use super::figures::show_at_root;
use super::turns::{Turned, Turns, in_turns};
use super::{BenchActivations, BenchArgs, BenchError, EXPERTS_ALONE, gpu, markdown, overlap, repeats};

/// Options of `--layer`.
#[derive(Debug, Clone, Args)]
pub struct LayerArgs {
    /// Times a whole layer of this checkpoint instead, its first, on GPUs: replayed as a CUDA graph and followed by hosts; under
    /// a launcher over all its ranks.
    #[arg(long, value_name = "DIR", conflicts_with_all = EXPERTS_ALONE,
        conflicts_with_all = ["agreement", "travel", "load", "geometry", "rows", "isa", "threads", "plot"])]
    pub layer: Option<PathBuf>,
    /// Tokens of a rank; a line of the table each. The most is the declared capacity.
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_value = "1,8,64,512", requires = "layer")]
    pub layer_tokens: Vec<usize>,
    /// Times its routed part instead with chunks that travel over this while others are computed, next to whole steps.
    #[arg(long, value_name = "TRANSPORT", value_parser = ["host", "nccl", "nvlink"], requires = "layer")]
    pub layer_overlap: Option<String>,
}

/// What is timed, and how often.
pub(super) struct Asked<'a> {
    pub checkpoint: &'a Path,
    backend: BackendFamily,
    pub args: &'a BenchArgs,
    pub repeats: usize,
}

/// The table.
#[derive(Debug, Serialize)]
pub struct LayerReport {
    /// Rank 0's GPU.
    device: String,
    checkpoint: String,
    num_ranks: usize,
    /// Tokens of a rank that its layer is recorded for.
    capacity: usize,
    repeats: usize,
    rows: Vec<LayerRow>,
}

/// One number of tokens. Times are medians of the slowest rank of each step.
#[derive(Debug, Serialize)]
pub struct LayerRow {
    num_tokens: usize,
    /// From the call to rows on the host.
    eager_us: f64,
    graph_us: f64,
    /// From router to output, between events of the device.
    eager_device_us: f64,
    graph_device_us: f64,
    /// Of the rank with the fewest.
    num_replays: u64,
    /// On every rank, every step's output has the bits of the others'.
    is_alike: bool,
}

/// Runs the benchmark on all ranks; rank 0 prints.
///
/// # Errors
/// If an option makes no sense, a session can't be opened, a step fails, or standard output can't be written.
pub(super) fn command(checkpoint: &Path, args: &BenchArgs, env: &EnvVars) -> Result<Exit, Failure> {
    with_world(env, |world| {
        let asked = world.agree(Asked::new(checkpoint, args))?;
        if let Some(transport) = args.layer.layer_overlap.as_deref().and_then(Transport::from_name) {
            return overlap::command(world, &asked, (transport, env));
        }
        let report = measure(world, &asked, env)?;
        show_at_root(world, &report, args.json)?;
        Ok(if report.rows.iter().all(LayerRow::is_fine) { Exit::Fine } else { Exit::WrongResult })
    })
}

impl<'a> Asked<'a> {
    fn new(checkpoint: &'a Path, args: &'a BenchArgs) -> Result<Self, BenchError> {
        let on_cpus = || BenchError::Layer { backend: args.backend.clone() };
        let on_gpus = cuda::family(&args.backend).and(BackendFamily::from_name(&args.backend));
        let (backend, repeats) = (on_gpus.ok_or_else(on_cpus)?, repeats(args, gpu::REPEATS)?);
        if args.layer.layer_tokens.contains(&0) {
            return Err(BenchError::Zero { option: "--layer-tokens" });
        }
        Ok(Self { checkpoint, backend, args, repeats })
    }

    pub fn capacity(&self) -> usize {
        self.args.layer.layer_tokens.iter().copied().max().unwrap_or(1)
    }

    pub fn deployment(&self, num_ranks: usize, cuda_graph: CudaGraph) -> Deployment {
        let mut deployment = Deployment::default();
        deployment.cluster.device = Device::Gpu;
        deployment.moe.backend = self.backend;
        deployment.moe.activations = match self.args.activations {
            BenchActivations::Bf16 => Activations::Bf16,
            BenchActivations::Quantised => Activations::Quantised,
        };
        deployment.moe.cuda_graph = cuda_graph;
        deployment.dispatch.num_max_tokens_per_rank = self.capacity();
        if num_ranks > 1 {
            // A carrier's sizes come from hosts: nothing else can be replayed.
            deployment.dispatch.transport = Transport::Nvlink;
        }
        deployment
    }
}

/// What opens sessions over the first layer of a checkpoint.
pub(super) struct Opener<'a> {
    pub world: &'a World,
    pub asked: &'a Asked<'a>,
    env: &'a EnvVars,
    machine: facts::Machine,
    first: Option<LayerIdx>,
}

impl<'a> Opener<'a> {
    pub fn new(world: &'a World, asked: &'a Asked<'a>, env: &'a EnvVars) -> Result<Self, Failure> {
        let machine = world.agree(facts::machine(world, env, None))?;
        let checkpoint = world.agree(Checkpoint::open(asked.checkpoint))?;
        let first = checkpoint.moe_layers().first().copied();
        Ok(Self { world, asked, env, machine, first })
    }

    /// The name of this rank's GPU.
    pub fn device(&self) -> String {
        self.machine.environment.gpu.present().map_or_else(String::new, |gpu| gpu.name.clone())
    }

    pub fn open(&self, deployment: Deployment) -> Result<Session, LayerError> {
        let Self { asked, env, machine, .. } = self;
        let options = SessionOptions {
            checkpoint: asked.checkpoint.to_owned(),
            layers: self.first.map(|layer| vec![layer]),
            deployment,
            num_threads: env.available_parallelism,
            gpu_ordinal: machine.gpu_ordinal,
            jit: JitOptions { cache_dir: asked.args.cache_dir.clone(), nvrtc: env.nvrtc().map(str::to_owned) },
            nccl: env.nccl().map(str::to_owned),
            cublaslt: env.cublaslt().map(str::to_owned),
            environment: machine.environment.clone(),
            input_is_bf16: true,
            part: Part::Block,
            num_tokens: Some(asked.capacity()),
            progress: &|_, _| {},
        };
        Session::open(self.world, &options)
    }
}

fn measure(world: &World, asked: &Asked<'_>, env: &EnvVars) -> Result<LayerReport, Failure> {
    let opener = Opener::new(world, asked, env)?;
    let deployments = [CudaGraph::Off, CudaGraph::On].map(|cuda_graph| asked.deployment(world.size(), cuda_graph));
    let rows = in_turns(&opener, deployments, |turns, num_tokens| row(turns, (num_tokens, asked.repeats), world))?;
    Ok(LayerReport {
        device: opener.device(),
        checkpoint: asked.checkpoint.display().to_string(),
        num_ranks: world.size(),
        capacity: asked.capacity(),
        repeats: asked.repeats,
        rows,
    })
}

/// Followed by hosts, and replayed.
fn row(turns: &mut Turns<'_>, (num_tokens, repeats): (usize, usize), world: &World) -> Result<LayerRow, Failure> {
    let on_device = |stats: &LayerStats| stats.times.by_name().into_iter().map(|(_, time)| time).sum();
    let mut num_replays = 0;
    let Turned { medians_us: [[eager_us, eager_device_us], [graph_us, graph_device_us]], is_alike } = turns.measure(
        (num_tokens, repeats),
        |took, stats| [took, on_device(stats)],
        |stats| num_replays += stats.num_graph_replays,
    )?;
    let num_replays = world.all_gather_u64([num_replays]).into_iter().map(|[num]| num).min().unwrap_or(0);
    Ok(LayerRow { num_tokens, eager_us, graph_us, eager_device_us, graph_device_us, num_replays, is_alike })
}

impl LayerRow {
    fn is_fine(&self) -> bool {
        self.is_alike && self.num_replays > 0
    }
}

impl fmt::Display for LayerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, checkpoint, num_ranks, capacity, repeats, .. } = self;
        writeln!(
            f,
            "{device} · {num_ranks} ranks · {checkpoint} · recorded for {capacity} tokens a rank · median of {repeats}"
        )?;
        let head =
            ["tokens", "hosts follow", "replayed", "of it: hosts follow", "replayed", "faster", "replays", "same bits"];
        let rows = self.rows.iter().map(|row| {
            [
                row.num_tokens.to_string(),
                time(row.eager_us),
                time(row.graph_us),
                time(row.eager_device_us),
                time(row.graph_device_us),
                format!("{:.2} x", row.eager_us / row.graph_us.max(1e-9)),
                row.num_replays.to_string(),
                if row.is_alike { "yes" } else { "NO" }.to_owned(),
            ]
        });
        let table = markdown::table(&head, &[7], rows);
        write!(
            f,
            "{table}\nThe first two from the call to rows on the host; the others on the device, from router to output."
        )
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: BenchArgs,
    }

    fn args(line: &str) -> BenchArgs {
        Line::try_parse_from(["bench", "--layer", "k3"].into_iter().chain(line.split_whitespace())).unwrap().args
    }

    #[test]
    fn what_is_asked_for_is_what_a_session_is_opened_with() {
        let args = args("--backend mma_sync --activations quantised --layer-tokens 4,64,8");
        let asked = Asked::new(Path::new("k3"), &args).unwrap();
        assert_eq!(asked.repeats, gpu::REPEATS);
        let [alone, of_two] = [1, 2].map(|num_ranks| asked.deployment(num_ranks, CudaGraph::On));
        assert_eq!((alone.moe.backend, alone.moe.cuda_graph), (BackendFamily::MmaSync, CudaGraph::On));
        assert_eq!((alone.moe.activations, alone.cluster.device), (Activations::Quantised, Device::Gpu));
        assert_eq!(alone.dispatch.num_max_tokens_per_rank, 64);
        assert_eq!((alone.dispatch.transport, of_two.dispatch.transport), (Transport::Auto, Transport::Nvlink));
    }

    #[test]
    fn what_can_not_be_timed_is_refused() {
        for (line, message) in [
            ("", "--layer times GPUs, and simd runs on CPUs: give --backend wgmma or mma_sync"),
            ("--backend wgmma --layer-tokens 1,0", "--layer-tokens is 0; nothing would be timed"),
            ("--backend wgmma --repeats 0", "--repeats is 0; nothing would be timed"),
        ] {
            assert_eq!(Asked::new(Path::new("k3"), &args(line)).err().unwrap().to_string(), message);
        }
    }

    #[test]
    fn steps_that_differ_or_were_not_replayed_stand_out() {
        let row = |is_alike, num_replays| LayerRow {
            num_tokens: 8,
            eager_us: 300.0,
            graph_us: 150.0,
            eager_device_us: 120.0,
            graph_device_us: 110.0,
            num_replays,
            is_alike,
        };
        assert!(row(true, 31).is_fine() && !row(false, 31).is_fine() && !row(true, 0).is_fine());
        let report = LayerReport {
            device: "NVIDIA H200".to_owned(),
            checkpoint: "k3".to_owned(),
            num_ranks: 2,
            capacity: 64,
            repeats: 30,
            rows: vec![row(true, 31), row(false, 0)],
        };
        let text = report.to_string();
        for part in
            ["NVIDIA H200 · 2 ranks", "64 tokens a rank", "2.00 x", " 31 ", "| yes", "| NO", "from router to output"]
        {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }
}
