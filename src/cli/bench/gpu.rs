//! The bench of a GPU's kernels: graphs of the local layer with cold weights, beside what memory and tensor cores give.

use std::thread;
use std::time::Duration;

use crate::backend::cuda::{Dense, Gpu, LocalLayer, LocalSize, LocalTokens, LocalWork, Reading};
use crate::backend::{BackendError, ExpertsSpec};
use crate::cuda::blas::BlasError;
use crate::env::EnvVars;
use crate::gpu;
use crate::numerics::nvfp4;

use super::figures::{fastest, median, us};
use super::gpu_report::{DenseBaseline, GpuCeilings, GpuReport, GpuRow};
use super::rows::{RowForm, read_counts};
use super::work::{Noise, TOKEN_SCALE};
use super::{BenchArgs, BenchError, repeats};

/// Sets of weights: with two, the smaller layers would still be read from L2.
const NUM_SETS: usize = 4;

/// Different experts; more would take longer to make and change nothing.
const NUM_PATTERNS: usize = 4;

/// Different tokens, likewise.
const NUM_TOKENS: usize = 1024;

/// Replays that count, unless asked for otherwise.
pub(super) const REPEATS: usize = 30;

/// Replays before those that count.
const NUM_WARM: usize = 2;

/// How long a card rests before what is measured alone: its clock follows its heat.
const REST: Duration = Duration::from_millis(50);

/// A line of the table that is being measured.
struct Line<'a> {
    form: Option<RowForm>,
    rows_per_expert: usize,
    counts: Vec<usize>,
    work: LocalWork<'a>,
    times_us: Vec<f64>,
}

/// Records every line, and replays them in turn, or each by itself.
pub(super) fn run(
    technique: &'static str,
    args: &BenchArgs,
    spec: ExpertsSpec,
    env: &EnvVars,
) -> Result<GpuReport, BenchError> {
    let device = gpu::Gpu::open(0, &args.kernels(env)).map_err(BackendError::from)?;
    let gpu = Gpu::new(technique, &device, args.threads)?;
    let mut noise = Noise(1);
    let patterns: Vec<_> = (0..NUM_PATTERNS.min(args.experts)).map(|_| noise.expert(&spec)).collect();
    let size = LocalSize { num_experts: args.experts, num_sets: NUM_SETS };
    let layer = LocalLayer::new(&gpu, spec, &patterns, size)?;
    drop(patterns);
    let (values, scale) = tokens(&spec, &mut noise);
    let tokens = LocalTokens { values: &values, scale };

    let wanted = wanted(args)?;
    layer.load(wanted.iter().map(|wanted| &wanted.counts[..]))?;
    let mut lines = Vec::new();
    for Wanted { form, rows_per_expert, counts } in wanted {
        let mut work = if args.dealt { layer.dealt_work(&counts, tokens)? } else { layer.work(&counts, tokens)? };
        for _ in 0..NUM_WARM {
            work.run()?;
        }
        work.check()?;
        lines.push(Line { form, rows_per_expert, counts, work, times_us: Vec::new() });
    }
    let (dense, baseline) = dense(&layer, env.cublaslt(), &values)?;
    let mut beside = Beside { reading: layer.reading()?, dense, reading_us: Vec::new(), dense_us: Vec::new() };
    let repeats = repeats(args, REPEATS)?;
    if args.alone {
        beside.run_alone(repeats)?;
        for line in &mut lines {
            alone(repeats, || line.work.run(), &mut line.times_us)?;
        }
        beside.run_alone(repeats)?;
    } else {
        for _ in 0..repeats {
            for line in &mut lines {
                line.times_us.push(us(line.work.run()?));
            }
            beside.run()?;
        }
    }
    let ceilings = beside.ceilings(layer.expert_bytes() as f64 * args.experts as f64);
    let rows = lines.into_iter().map(|line| row(&layer, &spec, ceilings, line)).collect();
    let facts = layer.stream().device().facts();
    Ok(GpuReport {
        implementation: layer.identity().to_string(),
        device: facts.name.clone(),
        num_multiprocessors: facts.num_multiprocessors,
        num_experts: args.experts,
        hidden: spec.hidden,
        intermediate: spec.intermediate,
        activations: args.activations,
        batch_invariant: spec.batch_invariant,
        num_sets: NUM_SETS,
        repeats,
        alone: args.alone,
        dealt: args.dealt,
        expert_bytes: layer.expert_bytes(),
        ceilings,
        dense: baseline,
        rows,
    })
}

/// Replays one thing after the card has rested, and then nothing else.
fn alone(
    repeats: usize,
    run: impl Fn() -> Result<Duration, BackendError>,
    times_us: &mut Vec<f64>,
) -> Result<(), BackendError> {
    thread::sleep(REST);
    for repeat in 0..NUM_WARM + repeats {
        let took = run()?;
        if repeat >= NUM_WARM {
            times_us.push(us(took));
        }
    }
    Ok(())
}

/// What lines are compared with.
struct Beside<'a> {
    reading: Reading<'a>,
    dense: Option<Dense<'a>>,
    reading_us: Vec<f64>,
    dense_us: Vec<f64>,
}

impl Beside<'_> {
    fn run(&mut self) -> Result<(), BackendError> {
        self.reading_us.push(us(self.reading.run()?));
        if let Some(dense) = &self.dense {
            self.dense_us.push(us(dense.run()?));
        }
        Ok(())
    }

    fn run_alone(&mut self, repeats: usize) -> Result<(), BackendError> {
        alone(repeats, || self.reading.run(), &mut self.reading_us)?;
        if let Some(dense) = &self.dense {
            alone(repeats, || dense.run(), &mut self.dense_us)?;
        }
        Ok(())
    }

    /// Of weights of so many bytes.
    fn ceilings(self, num_bytes: f64) -> GpuCeilings {
        GpuCeilings {
            read_tbyte_per_s: num_bytes / median(&self.reading_us) / 1e6,
            dense_tflops: self.dense.is_some().then(|| Dense::FLOPS / median(&self.dense_us) / 1e6),
        }
    }
}

/// A line that is asked for.
struct Wanted {
    form: Option<RowForm>,
    rows_per_expert: usize,
    counts: Vec<usize>,
}

fn wanted(args: &BenchArgs) -> Result<Vec<Wanted>, BenchError> {
    if let Some(path) = &args.counts {
        let lines = read_counts(path, args.experts)?;
        let mean = |counts: &[usize]| counts.iter().sum::<usize>().div_ceil(counts.len());
        let given = |counts: Vec<usize>| Wanted { form: None, rows_per_expert: mean(&counts), counts };
        return Ok(lines.into_iter().map(given).collect());
    }
    let of_form = |&form: &RowForm| {
        let counts = move |rows| form.counts(args.experts, rows);
        let wanted = move |&rows: &usize| Wanted { form: Some(form), rows_per_expert: rows, counts: counts(rows) };
        args.rows_per_expert.iter().map(wanted)
    };
    Ok(args.rows.iter().flat_map(of_form).collect())
}

/// What the rate of dense products is measured with. A machine without cublasLt is one without that rate.
fn dense<'a>(
    layer: &'a LocalLayer,
    setting: Option<&str>,
    values: &[u16],
) -> Result<(Option<Dense<'a>>, DenseBaseline), BackendError> {
    match layer.dense(setting, values) {
        Ok(dense) => {
            let version = dense.library().version();
            Ok((Some(dense), DenseBaseline::Cublaslt(version)))
        }
        Err(error @ BlasError::Cuda(_)) => Err(error.into()),
        Err(error) => Ok((None, DenseBaseline::Missing(error.to_string()))),
    }
}

fn row(layer: &LocalLayer, spec: &ExpertsSpec, ceilings: GpuCeilings, line: Line<'_>) -> GpuRow {
    let Line { form, rows_per_expert, counts, work, times_us } = line;
    let num_experts_hit = counts.iter().filter(|rows| **rows > 0).count();
    let num_rows = counts.iter().sum::<usize>();
    let median_us = median(&times_us);
    GpuRow {
        form,
        rows_per_expert,
        counts,
        num_rows,
        num_experts_hit,
        schedules: work.schedules().iter().map(ToString::to_string).collect(),
        median_us,
        min_us: fastest(&times_us),
        ..ceilings.row(
            2.0 * 3.0 * spec.hidden as f64 * spec.intermediate as f64 * num_rows as f64,
            layer.expert_bytes() as f64 * num_experts_hit as f64,
            median_us,
        )
    }
}

/// bf16 values, and what multiplies them.
fn tokens(spec: &ExpertsSpec, noise: &mut Noise) -> (Vec<u16>, f32) {
    let mut values: Vec<f32> = (0..NUM_TOKENS * spec.hidden).map(|_| noise.value()).collect();
    let mut scale = 1.0;
    if spec.quantise_activations {
        scale = TOKEN_SCALE;
        let unscaled = values.clone();
        nvfp4::quantise_unscaled(&unscaled, scale, &mut values);
    }
    (values.into_iter().map(|value| half::bf16::from_f32(value).to_bits()).collect(), scale)
}
