//! The bench of a whole layer, from router to output: replayed as a CUDA graph, next to the same steps followed by hosts.
//!
//! Two sessions over one checkpoint, which differ in `moe.cuda_graph` alone; their outputs are compared bit for bit. Under a
//! launcher, over all its ranks, whose tokens then travel by nvlink.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use crate::checkpoint::Checkpoint;
use crate::cli::failure::Failure;
use crate::cli::world::with_world;
use crate::config::{Activations, BackendFamily, Choice as _, CudaGraph, Deployment, Device, Transport};
use crate::env::EnvVars;
use crate::exit::Exit;
use crate::facts;
use crate::layer::{JitOptions, LayerInput, LayerOutput, Part, Session, SessionOptions};
use crate::report::{new_table, time};
use crate::world::{Phase, World};

use super::work::Noise;
use super::{BenchActivations, show};

/// Steps before those that count: the second records what the third replays.
const NUM_WARM: usize = 3;

/// Options of `--layer`.
#[derive(Debug, Clone, Args)]
pub struct LayerArgs {
    /// Times a whole layer of this checkpoint instead, its first, on GPUs: replayed as a CUDA graph and followed by hosts; under
    /// a launcher over all its ranks.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["geometry", "agreement", "travel", "hidden", "rows_per_expert"])]
    pub layer: Option<PathBuf>,
    /// Tokens of a rank; a line of the table each. The most is the declared capacity.
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_value = "1,8,64,512", requires = "layer")]
    pub layer_tokens: Vec<usize>,
    /// Where its compiled kernels are kept; absent: nowhere.
    #[arg(long, value_name = "DIR", requires = "layer")]
    pub layer_cache_dir: Option<PathBuf>,
}

/// What is timed, and how often.
pub(super) struct Asked<'a> {
    pub checkpoint: &'a Path,
    pub cache_dir: Option<&'a Path>,
    pub tokens: &'a [usize],
    pub backend: &'a str,
    pub activations: BenchActivations,
    pub repeats: usize,
    pub json: bool,
}

/// The table.
#[derive(Debug, Serialize)]
pub struct LayerReport {
    device: String,
    checkpoint: String,
    num_ranks: usize,
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
    num_replays: u64,
    /// Every step's output has the bits of the others'.
    is_alike: bool,
}

pub(super) fn command(asked: &Asked<'_>, env: &EnvVars) -> Result<Exit, Failure> {
    with_world(env, |world| {
        let report = measure(world, asked, env)?;
        let is_fine = report.rows.iter().all(|row| row.is_alike && row.num_replays > 0);
        if world.is_root() {
            show(&report, asked.json)?;
        }
        Ok(if is_fine { Exit::Fine } else { Exit::WrongResult })
    })
}

fn deployment(world: &World, asked: &Asked<'_>, capacity: usize, cuda_graph: CudaGraph) -> Deployment {
    let mut deployment = Deployment::default();
    deployment.cluster.device = Device::Gpu;
    deployment.moe.backend = BackendFamily::from_name(asked.backend).unwrap_or(BackendFamily::Wgmma);
    deployment.moe.activations = match asked.activations {
        BenchActivations::Bf16 => Activations::Bf16,
        BenchActivations::Quantised => Activations::Quantised,
    };
    deployment.moe.cuda_graph = cuda_graph;
    deployment.dispatch.num_max_tokens_per_rank = capacity;
    if world.size() > 1 {
        deployment.dispatch.transport = Transport::Nvlink;
    }
    deployment
}

fn measure(world: &World, asked: &Asked<'_>, env: &EnvVars) -> Result<LayerReport, Failure> {
    let capacity = asked.tokens.iter().copied().max().unwrap_or(1);
    let machine = world.agree(facts::machine(world, env, None))?;
    let device = machine.environment.gpu.present().map_or_else(String::new, |gpu| gpu.name.clone());
    let checkpoint = world.agree(Checkpoint::open(asked.checkpoint))?;
    let first = checkpoint.moe_layers().first().copied();
    let open = |cuda_graph| {
        let options = SessionOptions {
            checkpoint: asked.checkpoint.to_owned(),
            layers: first.map(|layer| vec![layer]),
            deployment: deployment(world, asked, capacity, cuda_graph),
            num_threads: env.available_parallelism,
            gpu_ordinal: machine.gpu_ordinal,
            jit: JitOptions { cache_dir: asked.cache_dir.map(Path::to_owned), nvrtc: env.nvrtc().map(str::to_owned) },
            nccl: env.nccl().map(str::to_owned),
            cublaslt: env.cublaslt().map(str::to_owned),
            environment: machine.environment.clone(),
            input_is_bf16: true,
            part: Part::Block,
            num_tokens: Some(capacity),
            progress: &|_, _| {},
        };
        Session::open(world, &options)
    };
    let sessions = [open(CudaGraph::Off)?, open(CudaGraph::On)?];
    world.enter(Phase { name: "step", limit: Duration::from_secs(60), key: "the bench's own limit" });
    let mut noise = Noise(u64::from(world.rank().0) + 1);
    let mut rows = Vec::new();
    let mut step = 0;
    for &num_tokens in asked.tokens {
        let hidden: Vec<f32> = (0..num_tokens * sessions[0].geometry().hidden)
            .map(|_| half::bf16::from_f32(noise.value()).to_f32())
            .collect();
        let mut times: [Vec<[f64; 2]>; 2] = [Vec::new(), Vec::new()];
        let (mut first, mut is_alike, mut num_replays): (Option<Vec<f32>>, bool, u64) = (None, true, 0);
        for repeat in 0..NUM_WARM + asked.repeats {
            for (session, times) in sessions.iter().zip(&mut times) {
                step += 1;
                let (took, output) = run(world, session, &hidden, step)?;
                is_alike &= *first.get_or_insert_with(|| output.values.clone()) == output.values;
                num_replays += output.stats.num_graph_replays;
                if repeat >= NUM_WARM {
                    times.push(took);
                }
            }
        }
        let [eager, graph] = times.map(|times| [0, 1].map(|at| median(times.iter().map(|took| took[at]))));
        rows.push(LayerRow {
            num_tokens,
            eager_us: eager[0],
            graph_us: graph[0],
            eager_device_us: eager[1],
            graph_device_us: graph[1],
            num_replays,
            is_alike,
        });
    }
    sessions.into_iter().for_each(|session| session.close(world));
    Ok(LayerReport {
        device,
        checkpoint: asked.checkpoint.display().to_string(),
        num_ranks: world.size(),
        capacity,
        repeats: asked.repeats,
        rows,
    })
}

/// A step, and how long it took the slowest rank: for its host, and for its device.
fn run(world: &World, session: &Session, hidden: &[f32], step: u64) -> Result<([f64; 2], LayerOutput), Failure> {
    let [layer] = session.layers() else { unreachable!("one layer was asked for") };
    world.barrier();
    let begin = Instant::now();
    let input = LayerInput { hidden, topk: None, part: Part::Block, step, record_spans: false };
    let output = layer.forward(world, session.capacity(), &input)?;
    let took = begin.elapsed();
    let on_device: Duration = output.stats.times.by_name().into_iter().map(|(_, time)| time).sum();
    let us = |time: Duration| (time.as_secs_f64() * 1e6).to_bits();
    let all = world.all_gather_u64([us(took), us(on_device)]);
    let slowest = |at: usize| all.iter().map(|of_rank| f64::from_bits(of_rank[at])).fold(0.0, f64::max);
    Ok(([slowest(0), slowest(1)], output))
}

fn median(times: impl Iterator<Item = f64>) -> f64 {
    let mut times: Vec<f64> = times.collect();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

impl fmt::Display for LayerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, checkpoint, num_ranks, capacity, repeats, .. } = self;
        writeln!(
            f,
            "{device} · {num_ranks} ranks · {checkpoint} · recorded for {capacity} tokens a rank · median of {repeats}"
        )?;
        let head = ["tokens", "hosts follow", "replayed", "of it: hosts follow", "replayed", "faster", "same bits"];
        let mut table = new_table(&head);
        for row in &self.rows {
            table.add_row(vec![
                row.num_tokens.to_string(),
                time(row.eager_us),
                time(row.graph_us),
                time(row.eager_device_us),
                time(row.graph_device_us),
                format!("{:.2} x", row.eager_us / row.graph_us.max(1e-9)),
                if row.is_alike { "yes" } else { "NO" }.to_owned(),
            ]);
        }
        write!(
            f,
            "{table}\nThe first two from the call to rows on the host; the others on the device, from router to output."
        )
    }
}
