//! `lockstep run`: layers applied to an input over all ranks; output and report appear whole or not at all.

use std::io::Write;
use std::path::Path;

use half::bf16;

use crate::checkpoint::{self, CheckpointError, OutputData, OutputTensor};
use crate::exit::{Classify, Exit, Known};
use crate::fault::Stage;
use crate::report::{self, RunReport};
use crate::world::{Refusal, World};

use crate::env::EnvVars;

use super::failure::Failure;
use super::job::{self, Job, JobError, LayerRows, Results};
use super::options::RunArgs;
use super::output::{self as door, OutputError};
use super::progress::Progress;
use super::values::{LayerChoice, OutputDtype};
use super::world::in_world;

/// What can end `run`.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The work itself.
    #[error(transparent)]
    Job(#[from] JobError),
    /// Some rank failed; all end.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

impl Classify for RunError {
    fn exit(&self) -> Exit {
        match self {
            Self::Job(error) => error.exit(),
            Self::Refused(error) => error.exit(),
        }
    }

    fn known(&self) -> Known {
        match self {
            Self::Job(error) => error.known(),
            Self::Refused(error) => error.known(),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// What it fails with, after the other ranks have been told.
pub fn command(args: &RunArgs, env: &EnvVars) -> Result<Exit, Failure> {
    let asked = vec![
        ("command", "run".to_owned()),
        ("layers", args.layers.to_string()),
        ("steps", args.steps.to_string()),
        ("output-dtype", format!("{:?}", args.output_dtype)),
        ("trace", args.trace.is_some().to_string()),
    ];
    in_world(env, (&args.common, args.work.asked(asked)), |world, started| {
        let layers = match &args.layers {
            LayerChoice::All => None,
            LayerChoice::List(layers) => Some(layers.clone()),
        };
        let progress = Progress::new(args.common.log.progress, world.rank().0);
        let job = Job::new(&args.work, started, layers, &progress);
        let report = run(world, args, &Job { steps: args.steps as u64, trace: args.trace.is_some(), ..job })?;
        let shown = report.as_ref().map_or(Ok(()), |report| show(report, args.common.json));
        world.agree(shown)?;
        let exit = report.map_or(Exit::Fine, |report| report.exit());
        let all = world.all_gather_u64([u64::from(exit.code())]);
        Ok(Exit::from_code(u8::try_from(all[0][0]).unwrap_or(u8::MAX)))
    })
}

fn show(report: &RunReport, as_json: bool) -> Result<(), OutputError> {
    if as_json { door::json(report) } else { door::line(report.to_string().trim_end()) }
}

/// Runs the job and writes what was asked for; collective. Rank 0 gets the report.
///
/// # Errors
/// The same on all ranks.
pub fn run(world: &World, args: &RunArgs, job: &Job<'_>) -> Result<Option<RunReport>, RunError> {
    let results = job::execute(world, job)?;
    world.enter(job::file_phase("write", job.deployment));
    world.begin(format!("writing {}", args.output.display()));
    world.agree(world.fault(Stage::Write))?;
    world.begin(format!("writing {}", args.output.display()));
    let publishing = || world.fault(Stage::Publish).map_err(std::io::Error::other);
    let written = if world.is_root() { write(args, &results, &publishing) } else { Ok(()) };
    world.agree(written)?;
    world.begin("printing the report");
    Ok(results.report)
}

fn write(
    args: &RunArgs,
    Results { layers, report, trace }: &Results,
    publishing: &dyn Fn() -> std::io::Result<()>,
) -> Result<(), CheckpointError> {
    let outputs: Vec<_> = layers.iter().map(|rows| output(rows, args.output_dtype)).collect();
    checkpoint::write_outputs(&args.output, &outputs, publishing)?;
    if let Some(path) = &args.export_topk {
        checkpoint::write_outputs(path, &layers.iter().flat_map(topk).collect::<Vec<_>>(), &|| Ok(()))?;
    }
    for path in &args.report {
        let Some(report) = report else { continue };
        checkpoint::write_atomically(path, &|out| write_report(out, path, report))?;
    }
    if let (Some(path), Some(trace)) = (&args.trace, trace) {
        checkpoint::write_atomically(path, &|out| trace.write(out))?;
    }
    Ok(())
}

/// A page for people where the name says so, else JSON.
fn write_report(out: &mut dyn Write, path: &Path, report: &RunReport) -> std::io::Result<()> {
    if is_page(path) {
        return out.write_all(report::page(report).as_bytes());
    }
    serde_json::to_writer_pretty(&mut *out, report)?;
    out.write_all(b"\n")
}

fn is_page(path: &Path) -> bool {
    path.extension().is_some_and(|extension| ["html", "htm"].iter().any(|page| extension.eq_ignore_ascii_case(page)))
}

/// `layers.N.output` in the dtype asked for.
fn output(rows: &LayerRows, dtype: OutputDtype) -> (String, OutputTensor) {
    let data = match dtype {
        OutputDtype::F32 => OutputData::F32(rows.values.clone()),
        OutputDtype::Bf16 => OutputData::Bf16(rows.values.iter().map(|&value| bf16::from_f32(value)).collect()),
    };
    let shape = shape(rows.values.len(), rows.width);
    (format!("layers.{}.output", rows.layer.0), OutputTensor { shape, data })
}

/// The experts that were used, in the form of `--topk`.
fn topk(rows: &LayerRows) -> Vec<(String, OutputTensor)> {
    let Some(topk) = &rows.topk else { return Vec::new() };
    let tensor = |name: &str, data: OutputData| {
        let shape = shape(topk.idx.len(), topk.num_topk);
        (format!("layers.{}.{name}", rows.layer.0), OutputTensor { shape, data })
    };
    vec![
        tensor("topk_idx", OutputData::I32(topk.idx.clone())),
        tensor("topk_weights", OutputData::F32(topk.weights.clone())),
    ]
}

fn shape(num_values: usize, width: usize) -> Vec<usize> {
    vec![num_values / width.max(1), width]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_a_page_where_its_name_says_so() {
        for (name, wanted) in
            [("a.html", true), ("a.b.HTM", true), ("a.json", false), ("html", false), ("a.html.txt", false)]
        {
            assert_eq!(is_page(Path::new(name)), wanted, "{name}");
        }
    }
}
