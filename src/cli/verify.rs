//! `lockstep verify`: one layer, compared with expected values or with the reference, and a verdict.

use std::fmt;
use std::path::PathBuf;

use half::bf16;
use serde::Serialize;

use crate::checkpoint::{self, CheckpointError};
use crate::config::{BackendFamily, Deployment, Device, Transport};
use crate::exit::{Classify, Exit, Known};
use crate::layer::Part;
use crate::numerics::metrics::{self, Comparison};
use crate::report::RunReport;
use crate::select::registry::Registry;
use crate::world::{Refusal, World};

use crate::env::EnvVars;

use super::failure::Failure;
use super::job::{self, Job, JobError, Results};
use super::options::VerifyArgs;
use super::output::{self, OutputError};
use super::progress::Progress;
use super::values::{OutputDtype, Split};
use super::world::in_world;

/// What can end `verify` without a verdict.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// The work itself.
    #[error(transparent)]
    Job(#[from] JobError),
    /// Some rank failed; all end.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The expected values can't be read.
    #[error(transparent)]
    Read(#[from] CheckpointError),
    /// The expected values have another shape.
    #[error(
        "{} is [{found_rows}, {found_cols}], but --part {part} of this input gives [{rows}, {cols}]",
        path.display()
    )]
    Shape {
        /// The file.
        path: PathBuf,
        /// Rows of the expected values.
        found_rows: usize,
        /// Columns of the expected values.
        found_cols: usize,
        /// The part.
        part: &'static str,
        /// Rows of the result.
        rows: usize,
        /// Columns of the result.
        cols: usize,
    },
}

impl Classify for VerifyError {
    fn exit(&self) -> Exit {
        match self {
            Self::Job(error) => error.exit(),
            Self::Refused(error) => error.exit(),
            Self::Read(error) => error.exit(),
            Self::Shape { .. } => Exit::BadInput,
        }
    }

    fn known(&self) -> Known {
        match self {
            Self::Job(error) => error.known(),
            Self::Refused(error) => error.known(),
            _ => Known::Here,
        }
    }
}

/// The figures and the verdict.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// |got - expected| / |expected|
    pub rel_l2: f64,
    /// |got| / |expected|
    pub norm_ratio: f64,
    /// The cosine of the angle between them.
    pub cosine: f64,
    /// The largest difference of a value.
    pub max_abs: f64,
    /// `[row, column]` of the largest difference.
    pub max_abs_at: [usize; 2],
    /// Rows that were compared.
    pub num_rows: usize,
    /// What `rel_l2` is held to.
    pub bound: f64,
    /// `rel_l2 <= bound` and the norms within 1 %.
    pub pass: bool,
    /// What it was compared with.
    pub against: String,
    /// What ran.
    pub ran: String,
    /// How the bound comes about.
    pub bound_terms: Vec<(String, f64)>,
}

/// Norms may differ by this much: it tells a wrong activation constant where relative L2 does not.
const NORM_TOLERANCE: f64 = 0.01;

/// Runs the command.
///
/// # Errors
/// What it fails with, after the other ranks have been told.
pub fn command(args: &VerifyArgs, env: &EnvVars) -> Result<Exit, Failure> {
    let asked = vec![
        ("command", "verify".to_owned()),
        ("layers", args.layer.0.to_string()),
        ("expected", args.expected.is_some().to_string()),
        ("output-dtype", format!("{:?}", args.output_dtype)),
        ("rows", args.rows.map_or("all".to_owned(), |rows| rows.to_string())),
    ];
    in_world(env, (&args.common, args.work.asked(asked)), |world, started| {
        let progress = Progress::new(args.common.log.progress, world.rank().0);
        let job = Job::new(&args.work, started, Some(vec![args.layer]), &progress);
        let (verdict, exit) = verify(world, args, &job)?;
        let shown = verdict.as_ref().map_or(Ok(()), |verdict| show(verdict, args.common.json));
        world.agree(shown)?;
        Ok(exit)
    })
}

fn show(verdict: &Verdict, as_json: bool) -> Result<(), OutputError> {
    if as_json { output::json(verdict) } else { output::line(verdict) }
}

/// Runs the layer and compares; collective. Rank 0 gets the verdict, the others its exit code only.
///
/// # Errors
/// The same on all ranks.
pub fn verify(world: &World, args: &VerifyArgs, job: &Job<'_>) -> Result<(Option<Verdict>, Exit), VerifyError> {
    let got = job::execute(world, job)?;
    let (expected, against) = match &args.expected {
        Some(expected) => (None, expected.to_string()),
        None => (Some(reference(world, job, args.rows)?), "the reference backend".to_owned()),
    };
    world.enter(job::file_phase("compare", job.deployment));
    world.begin(format!("comparing with {against}"));
    let judged = judge(args, job, (got, expected), against);
    let verdict = world.agree(judged)?;
    let pass = verdict.as_ref().is_none_or(|verdict| verdict.pass);
    let all = world.all_gather_u64([u64::from(pass)]);
    let exit = if all[0] == [1] { Exit::Fine } else { Exit::WrongResult };
    Ok((verdict, exit))
}

/// The same job on the oracle.
fn reference(world: &World, job: &Job<'_>, num_rows: Option<usize>) -> Result<Results, JobError> {
    let mut deployment: Deployment = job.deployment.clone();
    deployment.moe.backend = BackendFamily::Reference;
    deployment.moe.implementation = None;
    // The oracle runs on cores, between which MPI carries.
    deployment.cluster.device = Device::Auto;
    deployment.dispatch.transport = Transport::Auto;
    // A sample is dealt anew: a rank's part of it need not be of the rows that the rank has had.
    let split = if num_rows.is_some() { &Split::Even } else { job.split };
    job::execute(world, &Job { deployment: &deployment, layers: job.layers.clone(), steps: 1, num_rows, split, ..*job })
}

/// The verdict, on rank 0.
fn judge(
    args: &VerifyArgs,
    job: &Job<'_>,
    (got, expected): (Results, Option<Results>),
    against: String,
) -> Result<Option<Verdict>, VerifyError> {
    let (Some(report), Some(rows)) = (&got.report, got.layers.first()) else { return Ok(None) };
    let values = match args.output_dtype {
        OutputDtype::F32 => rows.values.clone(),
        OutputDtype::Bf16 => rows.values.iter().map(|&value| bf16::from_f32(value).to_f32()).collect(),
    };
    let num_rows = values.len() / rows.width.max(1);
    let sample = job::sampled(args.rows, num_rows);
    let of_sample = |values: Vec<f32>| match args.rows {
        Some(_) => sample.iter().flat_map(|row| &values[row * rows.width..(row + 1) * rows.width]).copied().collect(),
        None => values,
    };
    let values: Vec<f32> = of_sample(values);
    let expected = match (&args.expected, expected) {
        (Some(input), _) => of_sample(read_expected(input, job.part, (num_rows, rows.width))?),
        (None, Some(reference)) => reference.layers.into_iter().next().map(|rows| rows.values).unwrap_or_default(),
        (None, None) => Vec::new(),
    };
    let bound_terms = bound_terms(report, args.output_dtype);
    let bound = bound_terms.iter().map(|(_, term)| term).sum();
    let mut verdict = verdict(metrics::compare(&values, &expected), rows.width, (bound, bound_terms), report, against);
    verdict.num_rows = sample.len();
    verdict.max_abs_at[0] = sample.get(verdict.max_abs_at[0]).copied().unwrap_or_default();
    Ok(Some(verdict))
}

fn verdict(
    comparison: Comparison,
    width: usize,
    (bound, bound_terms): (f64, Vec<(String, f64)>),
    report: &RunReport,
    against: String,
) -> Verdict {
    let Comparison { rel_l2, norm_ratio, cosine, max_abs, max_abs_at } = comparison;
    let quant = report.decided.layers.first().map_or("", |layer| layer.quant.as_str());
    // Written so that a NaN fails.
    let pass = rel_l2 <= bound && (norm_ratio - 1.0).abs() <= NORM_TOLERANCE;
    Verdict {
        rel_l2,
        norm_ratio,
        cosine,
        max_abs,
        max_abs_at: [max_abs_at / width.max(1), max_abs_at % width.max(1)],
        num_rows: 0,
        bound,
        pass,
        against,
        ran: format!("lockstep.{}.grouped_gemm.{quant}", report.decided.technique),
        bound_terms,
    }
}

fn read_expected(
    input: &super::values::InputRef,
    part: Part,
    (rows, cols): (usize, usize),
) -> Result<Vec<f32>, VerifyError> {
    let matrix = checkpoint::read_activations(&input.path, input.tensor.as_deref())?;
    if (matrix.num_rows, matrix.num_columns) != (rows, cols) {
        return Err(VerifyError::Shape {
            path: input.path.clone(),
            found_rows: matrix.num_rows,
            found_cols: matrix.num_columns,
            part: part.name(),
            rows,
            cols,
        });
    }
    Ok(matrix.values)
}

/// What relative L2 may come to, by source of error.
fn bound_terms(report: &RunReport, output: OutputDtype) -> Vec<(String, f64)> {
    let mut terms = vec![("fp32 sums in another order".to_owned(), 1e-5)];
    let Some(layer) = report.decided.layers.first() else { return terms };
    let on_gpu = |id: &String| {
        Registry::builtin().descriptors().iter().any(|d| d.target.is_gpu() && d.identity.to_string() == *id)
    };
    let on_gpu = layer.identities.iter().any(on_gpu);
    let mut add = |name: &str, term: f64| terms.push((name.to_owned(), term));
    if on_gpu && layer.quant == "nvfp4" {
        // FC2's input is quantised from sums: a last-bit difference may flip a code, and so may a rounded latent.
        add("codes on a GPU that another order of sums moves", 1e-2);
    } else if on_gpu {
        add("tokens and FC2's input in bf16 on a GPU", GPU_ROUNDING);
    } else if report.decided.has_latent && report.decided.part != "shared" {
        if layer.quant == "nvfp4" {
            // The latent is computed before it is quantised: a last-bit difference may flip a code.
            add("a latent that is quantised after it was computed", 1e-2);
        }
        if layer.payload == "bf16" {
            add("a latent that travels as bf16", BF16_ROUNDING);
        }
    }
    if layer.combine_dtype == "bf16" && report.decided.part != "shared" {
        add("rows that come back as bf16", BF16_ROUNDING);
    }
    if output == OutputDtype::Bf16 {
        add("output in bf16", BF16_ROUNDING);
    }
    terms
}

/// Half a unit in the last place of bf16's 8 significant bits, relative: the most that one rounding costs.
const BF16_ROUNDING: f64 = 1.0 / 256.0;

/// GPUs round FC2's input to bf16, and tokens where they do not travel so. The roundings of many values partly cancel:
/// 1.7e-3 to 2.4e-3 were found on an H200, 2026-11-30.
const GPU_ROUNDING: f64 = 4e-3;

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let terms: Vec<String> = self.bound_terms.iter().map(|(name, term)| format!("{term:.1e} {name}")).collect();
        writeln!(f, "{} against {}, {} rows", self.ran, self.against, self.num_rows)?;
        writeln!(f, "  relative L2         {:.3e}   held to {:.1e} ({})", self.rel_l2, self.bound, terms.join(" + "))?;
        writeln!(f, "  norm ratio          {:.6}    held to 1 ± {NORM_TOLERANCE}", self.norm_ratio)?;
        writeln!(f, "  cosine              {:.9}", self.cosine)?;
        let [row, column] = self.max_abs_at;
        writeln!(f, "  largest difference  {:.3e}   at row {row}, column {column}", self.max_abs)?;
        write!(f, "{}", if self.pass { "ok" } else { "FAIL: the result is not the expected one" })
    }
}
