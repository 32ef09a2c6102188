//! `lockstep bench`: the expert computation of one rank, on its cores or its GPU, next to what the machine could do at best;
//! what agreement costs all ranks; what dispatch and combine cost their GPUs; how fast a checkpoint's experts are loaded; or
//! what a whole layer of one takes.
//!
//! Needs no checkpoint but for the last two: weights and tokens are made up. Only what ranks do together needs MPI.

mod agreement;
mod figures;
mod gpu;
mod gpu_report;
mod layer;
mod load;
mod markdown;
mod overlap;
mod plot;
mod report;
mod rows;
mod travel;
mod turns;
mod work;

use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::backend::{self, BackendError, Experts, ExpertsSpec, best_instruction_set, build, cuda};
use crate::checkpoint::{self, CheckpointError};
use crate::config::{Choice, Tuning};
use crate::env::EnvVars;
use crate::exit::{Classify, Exit};
use crate::gpu::Kernels;
use crate::numerics::activation::Activation;
use crate::select::InstructionSet;
use crate::select::tactics::TacticError;

use super::failure::Failure;
use figures::{show, us};
pub use gpu_report::{DenseBaseline, GpuCeilings, GpuReport, GpuRow};
pub use layer::LayerArgs;
pub use load::{LoadArgs, LoadReport};
use plot::Plot;
use report::Ceilings;
pub use report::{BenchReport, BenchRow};
pub use rows::{CountsError, RowForm};
pub use travel::TravelArgs;
use work::{Machine, Noise, Work, pack};

/// Measurements on CPUs, unless asked for otherwise.
const REPEATS: usize = 9;

/// Memory that is read to find the machine's bandwidth: beyond any cache.
const READ_BYTES: usize = 512 << 20;

/// Options that only the expert computation reads. What else is timed refuses them: ignored, they would pass for heeded.
const EXPERTS_ALONE: [&str; 9] =
    ["hidden", "intermediate", "experts", "rows_per_expert", "counts", "tuning", "batch_invariant", "alone", "dealt"];

/// Times the expert computation over made-up weights, beside the machine's bandwidth and its peak of arithmetic; with
/// --agreement, what it costs ranks to agree; with --travel, dispatch and combine; with --load, the loading of a checkpoint's
/// experts; with --layer, a whole layer.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// Times the agreements of a session over Kimi K3's 92 layers instead, and counts what they exchange; under a
    /// launcher, over all its ranks.
    #[arg(long, conflicts_with_all = EXPERTS_ALONE,
        conflicts_with_all = ["geometry", "rows", "backend", "isa", "threads", "activations", "cache_dir", "plot"])]
    pub agreement: bool,
    /// The model whose expert widths and activation are taken.
    #[arg(long, value_enum, required_unless_present_all = ["hidden", "intermediate"],
        required_unless_present_any = ["agreement", "load", "layer"])]
    pub geometry: Option<BenchGeometry>,
    /// Width of the experts' input and output.
    #[arg(long, value_name = "N")]
    pub hidden: Option<usize>,
    /// Width between FC1 and FC2.
    #[arg(long, value_name = "N")]
    pub intermediate: Option<usize>,
    /// Experts of the rank.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub experts: usize,
    /// Rows of an expert, on average; one line of the table each.
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_value = "1,4,16,64,256")]
    pub rows_per_expert: Vec<usize>,
    /// How rows fall on experts, on GPUs; on CPUs all experts have as many.
    #[arg(long, value_enum, value_name = "FORM,...", value_delimiter = ',', default_value = "uniform")]
    pub rows: Vec<RowForm>,
    /// Rows of each expert on a GPU, a line of the table for each list in this JSON file: [[rows of expert 0, ...], ...].
    #[arg(long, value_name = "FILE", conflicts_with_all = ["rows", "rows_per_expert"])]
    pub counts: Option<PathBuf>,
    /// The technique: simd, reference, wgmma or mma_sync. The last two time what a GPU does, with weights that no cache
    /// holds, as replays of a graph.
    #[arg(long, value_name = "NAME", default_value = "simd")]
    pub backend: String,
    /// The instruction set of simd: scalar, avx2 or avx512; absent: the machine's best.
    #[arg(long, value_name = "ISA")]
    pub isa: Option<InstructionSet>,
    /// Threads; 0: one a core.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub threads: usize,
    /// Whether FC1's and FC2's inputs go through NVFP4.
    #[arg(long, value_enum, default_value = "bf16")]
    pub activations: BenchActivations,
    /// Whether the backend's tactics are timed first, and the fastest is measured: off or on.
    #[arg(long, value_name = "off|on", value_parser = tuning, default_value = "off")]
    pub tuning: Tuning,
    /// One order over K for every number of rows, also where another is faster.
    #[arg(long)]
    pub batch_invariant: bool,
    /// Measurements of which the median is printed; absent: 9, on GPUs 30, with --travel 9, with --load 5.
    #[arg(long, value_name = "N")]
    pub repeats: Option<usize>,
    /// Leaves it to a GPU to find out which kernels compute which rows, as in steps that are replayed: all are queued that may run.
    #[arg(long)]
    pub dealt: bool,
    /// Measures a GPU's lines one after the other, each on a card that has rested, instead of in turns.
    #[arg(long)]
    pub alone: bool,
    /// Where a GPU's compiled kernels are looked for and kept, as `lockstep warmup` fills it; absent: all are compiled.
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Also draws time against rows, or with --travel tokens, into this file, as SVG, with what memory and arithmetic, or the link,
    /// allow.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Prints one JSON object instead of the table.
    #[arg(long)]
    pub json: bool,
    /// What --load times.
    #[command(flatten)]
    pub load: LoadArgs,
    /// What --travel times.
    #[command(flatten)]
    pub travel: TravelArgs,
    /// What --layer times.
    #[command(flatten)]
    pub layer: LayerArgs,
}

impl BenchArgs {
    /// Where a GPU's kernels come from.
    fn kernels(&self, env: &EnvVars) -> Kernels {
        let nvrtc = env.nvrtc().map(str::to_owned);
        match self.cache_dir.clone() {
            Some(cache_dir) => Kernels::Kept { nvrtc, cache_dir },
            None => Kernels::OnDemand(nvrtc),
        }
    }
}

/// Models whose experts can be timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchGeometry {
    /// 3584 x 3072, SiTU.
    KimiK3,
    /// 7168 x 2048, SwiGLU.
    DeepseekV3,
    /// 4096 x 1536, SwiGLU.
    #[value(name = "qwen3-235b")]
    Qwen3_235b,
}

impl BenchGeometry {
    const fn widths(self) -> (usize, usize) {
        match self {
            Self::KimiK3 => (3584, 3072),
            Self::DeepseekV3 => (7168, 2048),
            Self::Qwen3_235b => (4096, 1536),
        }
    }

    const fn activation(self) -> Activation {
        match self {
            Self::KimiK3 => Activation::Situ { beta: 4.0, linear_beta: Some(25.0) },
            Self::DeepseekV3 | Self::Qwen3_235b => Activation::Swiglu,
        }
    }
}

/// Whether activations are quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BenchActivations {
    /// Weights only.
    Bf16,
    /// FC1's and FC2's inputs go through NVFP4.
    Quantised,
}

/// Why nothing could be timed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A count of zero.
    #[error("{option} is 0; nothing would be timed")]
    Zero {
        /// The option.
        option: &'static str,
    },
    /// Widths are needed.
    #[error("{option} is missing; give --geometry, or both --hidden and --intermediate")]
    Width {
        /// The option.
        option: &'static str,
    },
    /// CPUs time one form alone.
    #[error("--rows has a form for GPUs alone, and {backend} runs on CPUs: give --backend wgmma or mma_sync")]
    Rows {
        /// As given.
        backend: String,
    },
    /// CPUs time even rows.
    #[error("--counts is for GPUs alone, and {backend} runs on CPUs: give --backend wgmma or mma_sync")]
    CountsOnCpu {
        /// As given.
        backend: String,
    },
    /// The file of `--counts`.
    #[error("--counts")]
    Counts(#[from] CountsError),
    /// Whole layers are timed on GPUs.
    #[error("--layer times GPUs, and {backend} runs on CPUs: give --backend wgmma or mma_sync")]
    Layer {
        /// As given.
        backend: String,
    },
    /// The backend refuses.
    #[error("cannot set up the expert computation")]
    Backend(#[from] BackendError),
    /// No tactic can be chosen.
    #[error(transparent)]
    Tactics(#[from] TacticError),
    /// The picture can't be written.
    #[error("cannot write --plot")]
    Plot(#[from] CheckpointError),
}

/// The value of `--tuning`.
fn tuning(text: &str) -> Result<Tuning, String> {
    Tuning::from_name(text).ok_or_else(|| "give off or on".to_owned())
}

impl Classify for BenchError {
    fn exit(&self) -> Exit {
        match self {
            Self::Zero { .. }
            | Self::Width { .. }
            | Self::Rows { .. }
            | Self::Layer { .. }
            | Self::CountsOnCpu { .. }
            | Self::Counts(_) => Exit::BadInput,
            Self::Backend(error) => error.exit(),
            Self::Tactics(error) => error.exit(),
            Self::Plot(error) => error.exit(),
        }
    }
}

/// Runs the benchmark and prints it.
///
/// # Errors
/// As [`run`], or if standard output cannot be written.
pub fn command(args: &BenchArgs, env: &EnvVars) -> Result<Exit, Failure> {
    if args.agreement {
        return agreement::command(args, env);
    }
    if let Some(checkpoint) = &args.load.load {
        return load::command(checkpoint, args, env);
    }
    if let Some(checkpoint) = &args.layer.layer {
        return layer::command(checkpoint, args, env);
    }
    if let (true, Some(geometry)) = (args.travel.travel, args.geometry) {
        return travel::command(args, geometry, env);
    }
    let gpu = [cuda::WGMMA, cuda::MMA_SYNC].into_iter().find(|technique| *technique == args.backend);
    match gpu {
        Some(technique) => {
            let report = gpu::run(technique, args, checked(args)?, env)?;
            draw(args, || report.plot())?;
            show(&report, args.json)?;
        }
        None => {
            let report = run(args)?;
            draw(args, || report.plot())?;
            show(&report, args.json)?;
        }
    }
    Ok(Exit::Fine)
}

/// Measurements: as many as asked for, else `default`.
fn repeats(args: &BenchArgs, default: usize) -> Result<usize, BenchError> {
    match args.repeats.unwrap_or(default) {
        0 => Err(BenchError::Zero { option: "--repeats" }),
        repeats => Ok(repeats),
    }
}

/// Writes the picture that was asked for.
fn draw(args: &BenchArgs, plot: impl Fn() -> Plot) -> Result<(), BenchError> {
    let Some(path) = &args.plot else { return Ok(()) };
    Ok(checkpoint::write_atomically(path, &|out| out.write_all(plot().svg().as_bytes()))?)
}

/// Packs experts, times them, and measures the ceilings in between.
///
/// # Errors
/// If an option makes no sense, or the backend refuses.
pub fn run(args: &BenchArgs) -> Result<BenchReport, BenchError> {
    run_reading(args, READ_BYTES)
}

fn run_reading(args: &BenchArgs, read_bytes: usize) -> Result<BenchReport, BenchError> {
    let (spec, isa) = (checked(args)?, args.isa.unwrap_or_else(best_instruction_set));
    if args.rows != [RowForm::Uniform] {
        return Err(BenchError::Rows { backend: args.backend.clone() });
    }
    if args.counts.is_some() {
        return Err(BenchError::CountsOnCpu { backend: args.backend.clone() });
    }
    let repeats = repeats(args, REPEATS)?;
    let host = backend::Machine { num_threads: args.threads, isa: Some(isa), ..backend::Machine::default() };
    let backend = build(&args.backend, &host)?;
    let mut noise = Noise(1);
    let experts = pack(&backend, spec, args.experts, &mut noise)?;
    let machine = Machine::new(args.threads, isa, read_bytes)?;
    let mut works: Vec<Work> =
        args.rows_per_expert.iter().map(|rows| Work::new(&spec, args.experts, *rows, &mut noise)).collect();
    let mut implementation = String::new();
    for work in &mut works {
        // Fills caches, buffers and branch predictors; not counted.
        implementation = work.run(&*experts)?;
        if args.tuning == Tuning::On {
            work.tune(&*experts)?;
        }
    }
    let (mut read_gbyte_per_s, mut fma_gflops) = (0.0_f64, 0.0_f64);
    for _ in 0..repeats {
        read_gbyte_per_s = read_gbyte_per_s.max(machine.read_gbyte_per_s());
        fma_gflops = fma_gflops.max(machine.fma_gflops());
        for work in &mut works {
            let start = Instant::now();
            work.run(&*experts)?;
            work.times_us.push(us(start.elapsed()));
        }
    }
    let ceilings = Ceilings { weight_bytes: experts.weight_bytes() as f64, read_gbyte_per_s, fma_gflops };
    Ok(BenchReport {
        implementation,
        isa: isa.name(),
        num_threads: machine.simd.num_threads(),
        num_experts: args.experts,
        hidden: spec.hidden,
        intermediate: spec.intermediate,
        activations: args.activations,
        repeats,
        weight_bytes: experts.weight_bytes(),
        read_gbyte_per_s,
        fma_gflops,
        rows: works.into_iter().map(|work| row(&ceilings, &*experts, work)).collect(),
    })
}

fn row(ceilings: &Ceilings, experts: &dyn Experts, work: Work) -> BenchRow {
    let tactic = experts.tactics()[work.tactic.index()];
    BenchRow { tactic, tactics_us: work.tactics_us, ..ceilings.row(work.rows_per_expert, work.flops, &work.times_us) }
}

/// The spec, of options that make sense.
fn checked(args: &BenchArgs) -> Result<ExpertsSpec, BenchError> {
    for (option, is_zero) in
        [("--experts", args.experts == 0), ("--rows-per-expert", args.rows_per_expert.contains(&0))]
    {
        if is_zero {
            return Err(BenchError::Zero { option });
        }
    }
    spec(args)
}

fn spec(args: &BenchArgs) -> Result<ExpertsSpec, BenchError> {
    let widths = args.geometry.map(BenchGeometry::widths);
    let width = |given: Option<usize>, of_model: Option<usize>, option: &'static str| {
        given.or(of_model).ok_or(BenchError::Width { option })
    };
    Ok(ExpertsSpec {
        hidden: width(args.hidden, widths.map(|widths| widths.0), "--hidden")?,
        intermediate: width(args.intermediate, widths.map(|widths| widths.1), "--intermediate")?,
        activation: args.geometry.map_or(Activation::Swiglu, BenchGeometry::activation),
        quantise_activations: args.activations == BenchActivations::Quantised,
        batch_invariant: args.batch_invariant,
    })
}

#[cfg(test)]
mod tests;
