//! The work that `run` and `verify` share: deal the input, open a session, run the steps, gather rows and counts.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::checkpoint::CheckpointError;
use crate::config::Deployment;
use crate::exit::{Classify, Exit, Known};
use crate::ids::LayerIdx;
use crate::layer::{JitOptions, LayerError, LayerInput, LayerOutput, LayerStats, Part, Session, SessionOptions};
use crate::report::{LayerOutcome, LinkBytes, RunReport, Trace};
use crate::routing::{RoutingError, TopK};
use crate::select::Environment;
use crate::world::{Cargo, Phase, Refusal, World};

use super::options::WorkArgs;
use super::progress::Progress;
use super::values::{self, InputRef, Split};
use super::world::Started;

use joined::{decided, join, new_report};
use share::{Share, check_width, deal, read_topk};
use trace::Recorder;

pub use share::sampled;

mod joined;
mod share;
mod trace;

/// What can end a job.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// Reading input or checkpoint.
    #[error(transparent)]
    Read(#[from] CheckpointError),
    /// The session.
    #[error(transparent)]
    Layer(Box<LayerError>),
    /// Some rank failed; all end.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// `--split` does not deal the input.
    #[error(
        "--split deals {dealt} rows to {parts} ranks, but the input has {rows} rows and the world {num_ranks} ranks"
    )]
    Split {
        /// Sum of the parts.
        dealt: usize,
        /// Number of parts.
        parts: usize,
        /// Rows of the input.
        rows: usize,
        /// Ranks of the world.
        num_ranks: usize,
    },
    /// The input is not the model's.
    #[error(
        "{} has rows of {found} values, the model's hidden size is {wanted}; give hidden states of this model",
        path.display()
    )]
    Hidden {
        /// The input.
        path: PathBuf,
        /// Its width.
        found: usize,
        /// The model's.
        wanted: usize,
    },
    /// F32 input with a payload that would round it.
    #[error(
        "{} holds F32 values, which payload {payload} would round; give BF16 values or set dispatch.payload: f32",
        path.display()
    )]
    InputDtype {
        /// The input.
        path: PathBuf,
        /// The payload asked for.
        payload: &'static str,
    },
    /// `--topk` does not fit the input.
    #[error("{} has {found} rows of top-k for an input of {rows} rows; give one row a token", path.display())]
    TopkRows {
        /// The file.
        path: PathBuf,
        /// Its rows.
        found: usize,
        /// The input's.
        rows: usize,
    },
    /// `--topk` names what is not there.
    #[error("{}", path.display())]
    Topk {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: RoutingError,
    },
}

impl From<LayerError> for JobError {
    fn from(error: LayerError) -> Self {
        // Boxed: it is far larger than what most jobs end with.
        Self::Layer(Box::new(error))
    }
}

impl Classify for JobError {
    fn exit(&self) -> Exit {
        match self {
            Self::Read(error) => error.exit(),
            Self::Layer(error) => error.exit(),
            Self::Refused(error) => error.exit(),
            Self::Topk { source, .. } => source.exit(),
            Self::Split { .. } | Self::Hidden { .. } | Self::InputDtype { .. } | Self::TopkRows { .. } => {
                Exit::BadInput
            }
        }
    }

    fn known(&self) -> Known {
        match self {
            Self::Layer(error) => error.known(),
            Self::Refused(error) => error.known(),
            _ => Known::Here,
        }
    }
}

/// What to do.
#[derive(Debug)]
pub struct Job<'a> {
    /// How to run.
    pub deployment: &'a Deployment,
    /// The checkpoint's directory.
    pub checkpoint: &'a Path,
    /// The layers; absent: all.
    pub layers: Option<Vec<LayerIdx>>,
    /// Hidden states of all ranks.
    pub input: &'a InputRef,
    /// How rows are dealt to ranks.
    pub split: &'a Split,
    /// Of the input's rows so many, spread evenly over it ([`sampled`]); absent: all.
    pub num_rows: Option<usize>,
    /// What is computed.
    pub part: Part,
    /// Top-k from a file instead of the router.
    pub topk: Option<&'a Path>,
    /// How often the whole is repeated.
    pub steps: u64,
    /// Every phase of every rank is kept.
    pub trace: bool,
    /// Threads of this rank.
    pub num_threads: usize,
    /// The number in this process of this rank's GPU, where it drives one.
    pub gpu_ordinal: u32,
    /// Where kernels are kept and what compiles them.
    pub jit: &'a JitOptions,
    /// NCCL, where it was named.
    pub nccl: Option<&'a str>,
    /// cublasLt, likewise.
    pub cublaslt: Option<&'a str>,
    /// What this rank is.
    pub environment: &'a Environment,
    /// Bars on rank 0.
    pub progress: &'a Progress,
}

impl<'a> Job<'a> {
    /// What `work` asks for, of `layers`.
    #[must_use]
    pub fn new(
        work: &'a WorkArgs,
        started: &'a Started,
        layers: Option<Vec<LayerIdx>>,
        progress: &'a Progress,
    ) -> Self {
        Self {
            deployment: started.deployment(),
            checkpoint: &work.checkpoint,
            layers,
            input: &work.input,
            split: &work.split,
            num_rows: None,
            part: work.part.into(),
            topk: work.topk.as_deref(),
            steps: 1,
            trace: false,
            num_threads: started.num_threads,
            gpu_ordinal: started.gpu_ordinal,
            jit: &started.jit,
            nccl: started.nccl.as_deref(),
            cublaslt: started.cublaslt.as_deref(),
            environment: &started.environment,
            progress,
        }
    }
}

/// One layer's output, complete on rank 0 and empty elsewhere.
#[derive(Debug)]
pub struct LayerRows {
    /// The layer.
    pub layer: LayerIdx,
    /// Values of a row.
    pub width: usize,
    /// `[num_tokens, width]`
    pub values: Vec<f32>,
    /// The experts that were used; absent for the shared part.
    pub topk: Option<TopK>,
}

/// What a job yields: on rank 0 everything, elsewhere nothing.
pub struct Results {
    /// Each layer's rows.
    pub layers: Vec<LayerRows>,
    /// What was done, on rank 0.
    pub report: Option<RunReport>,
    /// When it was done, on rank 0, where it was asked for.
    pub trace: Option<Trace>,
}

/// Runs `job`; collective.
///
/// # Errors
/// The same on all ranks.
pub fn execute(world: &World, job: &Job<'_>) -> Result<Results, JobError> {
    let begin = Instant::now();
    world.begin(format!("reading {}", job.input.path.display()));
    let share = world.agree(deal(world, job))?;
    let bar = job.progress.bytes("loading experts", 0);
    let session = Session::open(
        world,
        &SessionOptions {
            checkpoint: job.checkpoint.to_owned(),
            layers: job.layers.clone(),
            deployment: job.deployment.clone(),
            num_threads: job.num_threads,
            gpu_ordinal: job.gpu_ordinal,
            jit: job.jit.clone(),
            nccl: job.nccl.map(str::to_owned),
            cublaslt: job.cublaslt.map(str::to_owned),
            environment: job.environment.clone(),
            input_is_bf16: share.is_bf16,
            part: job.part,
            num_tokens: Some(share.most_rows),
            progress: &|done, total| bar.advance(done, total),
        },
    )?;
    bar.finish();
    world.agree(check_width(job, &session, &share))?;
    let topk = world.agree(read_topk(job, &session, &share))?;
    let load = begin.elapsed();
    session.enter_steps(world);
    let mut recorder = job.trace.then(|| Recorder::start(world, begin, load));
    let before = world.traffic();
    let mut steps = run_steps(world, job, (&session, &share), (&topk, recorder.as_mut()))?;
    let moved = world.traffic() - before;
    let mut report = new_report(world, job, &session, &share, load.as_secs_f64());
    for (layer, done) in session.layers().iter().zip(&steps.layers) {
        let first_expert = layer.travel().placement.local_experts(world.rank()).start;
        report.add_layer(layer.decision().layer, first_expert, &done.stats, done.outcome);
    }
    let carried = [Cargo::Tokens, Cargo::Rows].map(|cargo| world.carried_to(cargo));
    report.links = LinkBytes::new(session.nodes(), world.rank(), &carried);
    report.bytes_to = carried[0].iter().zip(&carried[1]).map(|(tokens, rows)| tokens + rows).collect();
    let of_peer = |(rank, bytes): (usize, &u64)| if rank == world.rank().index() { 0 } else { *bytes };
    report.dispatch_bytes_sent = report.bytes_to.iter().enumerate().map(of_peer).sum();
    report.step_collectives = moved.collectives;
    report.peak_rss_bytes = crate::host::peak_rss_bytes().unwrap_or_default();
    let decided = decided(world, job, &session);
    let trace = recorder.and_then(|recorder| recorder.finish(&decided));
    let joined = join(world, &report, decided, std::mem::take(&mut steps.step_us));
    let layers = gather_rows(world, (&session, &share), steps.layers);
    session.close(world);
    Ok(Results { layers, report: joined, trace })
}

/// The phase of something that waits for files: a file system may be as slow as for loading.
#[must_use]
pub fn file_phase(name: &'static str, deployment: &Deployment) -> Phase {
    Phase { name, limit: Duration::from_secs(deployment.timeouts.load_s), key: "timeouts.load_s" }
}

/// One layer over all steps.
struct Done {
    output: LayerOutput,
    stats: LayerStats,
    outcome: LayerOutcome,
}

struct Steps {
    layers: Vec<Done>,
    step_us: Vec<f64>,
}

fn run_steps(
    world: &World,
    job: &Job<'_>,
    (session, share): (&Session, &Share),
    (topk, mut recorder): (&[Option<TopK>], Option<&mut Recorder<'_>>),
) -> Result<Steps, JobError> {
    let bar = job.progress.bar("running steps");
    let mut steps = Steps { layers: Vec::new(), step_us: Vec::new() };
    for step in 0..job.steps.max(1) {
        world.barrier();
        let begin = Instant::now();
        // Of the layers alone: what is kept and compared of a step is none of it.
        let mut elapsed = Duration::ZERO;
        for (position, layer) in session.layers().iter().enumerate() {
            let topk = topk[position].as_ref();
            let (part, record_spans) = (job.part, recorder.is_some());
            let input = LayerInput { hidden: &share.hidden, topk, part, step, record_spans };
            let layer_begin = Instant::now();
            let mut output = layer.forward(world, session.capacity(), &input)?;
            elapsed += layer_begin.elapsed();
            if let Some(recorder) = &mut recorder {
                recorder.layer((step, layer.decision().layer.0), layer_begin, &mut output);
            }
            record(&mut steps.layers, position, output);
        }
        steps.step_us.push(elapsed.as_secs_f64() * 1e6);
        if let Some(recorder) = &mut recorder {
            recorder.step(step, begin);
        }
        bar.advance(step + 1, job.steps);
    }
    bar.finish();
    Ok(steps)
}

/// Adds a call's counts to its layer and keeps the newest rows.
fn record(layers: &mut Vec<Done>, position: usize, output: LayerOutput) {
    let stats = output.stats.clone();
    let num_slots = output.topk.as_ref().map_or(0, |topk| topk.idx.iter().filter(|&&id| id >= 0).count() as u64);
    let num_not_finite = output.values.iter().filter(|value| !value.is_finite()).count() as u64;
    match layers.get_mut(position) {
        Some(done) => {
            done.stats.add(&stats);
            done.outcome.num_slots += num_slots;
            done.outcome.num_not_finite += num_not_finite;
            done.outcome.num_steps_off += u64::from(!same_bits(&done.output.values, &output.values));
            done.output = output;
        }
        None => {
            let outcome = LayerOutcome { num_slots, num_not_finite, num_steps_off: 0 };
            layers.push(Done { output, stats, outcome });
        }
    }
}

/// Whether two steps of one input gave the same; a NaN is the same as itself.
fn same_bits(one: &[f32], other: &[f32]) -> bool {
    bytemuck::cast_slice::<f32, u8>(one) == bytemuck::cast_slice::<f32, u8>(other)
}

/// Every layer's rows and top-k at rank 0, in the order of the input.
fn gather_rows(world: &World, (session, share): (&Session, &Share), layers: Vec<Done>) -> Vec<LayerRows> {
    let gather = |bytes: &[u8], row_bytes: usize| -> Vec<u8> {
        world.gather_bytes(bytes, share.most_rows * row_bytes).map(|all| all.concat()).unwrap_or_default()
    };
    session
        .layers()
        .iter()
        .zip(layers)
        .map(|(layer, Done { output, .. })| {
            let values = gather(bytemuck::cast_slice(&output.values), output.width * 4);
            let topk = output.topk.map(|topk| {
                let idx = gather(bytemuck::cast_slice(&topk.idx), topk.num_topk * 4);
                let weights = gather(bytemuck::cast_slice(&topk.weights), topk.num_topk * 4);
                TopK {
                    num_topk: topk.num_topk,
                    idx: bytemuck::pod_collect_to_vec(&idx),
                    weights: bytemuck::pod_collect_to_vec(&weights),
                }
            });
            let layer = layer.decision().layer;
            LayerRows { layer, width: output.width, values: bytemuck::pod_collect_to_vec(&values), topk }
        })
        .collect()
}

impl From<values::Part> for Part {
    fn from(part: values::Part) -> Self {
        match part {
            values::Part::Routed => Self::Routed,
            values::Part::Shared => Self::Shared,
            values::Part::Block => Self::Block,
        }
    }
}
