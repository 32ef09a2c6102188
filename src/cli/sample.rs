//! `lockstep sample`: a checkpoint and inputs of a chosen geometry.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde_json::json;

use super::failure::Failure;
use super::logging::LogSettings;
use super::options::LogArgs;
use super::output;
use super::progress::Progress;
use super::values::{positive, seed};
use super::world::prepare_to_end;
use crate::config::Effective;
use crate::env::EnvVars;
use crate::exit::Exit;
use crate::sample::{Geometry, SampleError, SampleFormat, SampleSpec};

/// Writes a checkpoint of a model's layout, with random weights, and inputs for it.
#[derive(Debug, Clone, Args)]
pub struct SampleArgs {
    /// The model whose names, sizes and formats it takes.
    #[arg(long, value_enum)]
    pub geometry: Geometry,
    /// Where it is written; a directory that is new or empty.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Divides the number of experts.
    #[arg(long, value_name = "1/N", value_parser = scale, conflicts_with = "experts")]
    pub scale: Option<usize>,
    /// Width of the residual stream.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub hidden: Option<usize>,
    /// Width between FC1 and FC2 of one expert.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub intermediate: Option<usize>,
    /// Routed experts of a layer.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub experts: Option<usize>,
    /// Experts a token; the routing groups shrink to fit.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub topk: Option<usize>,
    /// Width of Kimi K3's latent.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub latent: Option<usize>,
    /// MoE layers; they are numbered from where the model's begin.
    #[arg(long, value_name = "N", value_parser = positive, default_value = "1")]
    pub layers: usize,
    /// Rows of `hidden` in inputs.safetensors.
    #[arg(long, value_name = "N", value_parser = positive, default_value = "64")]
    pub tokens: usize,
    /// What the contents are drawn from: equal options give equal files.
    #[arg(long, value_name = "N", value_parser = seed, default_value = "0")]
    pub seed: u64,
    /// How the experts are stored.
    #[arg(long, value_enum, default_value = "nvfp4")]
    pub format: SampleFormat,
    /// Prints one JSON object instead of text.
    #[arg(long, help_heading = "Printing")]
    pub json: bool,
    /// Logs and progress.
    #[command(flatten)]
    pub log: LogArgs,
}

/// `1/N`, or `1`.
fn scale(text: &str) -> Result<usize, String> {
    let divisor = if text == "1" { Some("1") } else { text.strip_prefix("1/") };
    divisor.ok_or_else(|| "write a fraction as in 1/16".to_owned()).and_then(positive)
}

impl SampleArgs {
    fn spec(&self) -> Result<SampleSpec, SampleError> {
        let mut spec = SampleSpec::of(self.geometry);
        if let Some(divisor) = self.scale {
            if !spec.num_experts.is_multiple_of(divisor) {
                return Err(SampleError::Scale { num_experts: spec.num_experts, divisor });
            }
            spec.num_experts /= divisor;
        }
        let sizes = [
            (&mut spec.hidden, self.hidden),
            (&mut spec.intermediate, self.intermediate),
            (&mut spec.num_experts, self.experts),
            (&mut spec.num_topk, self.topk),
        ];
        for (size, given) in sizes {
            *size = given.unwrap_or(*size);
        }
        spec.latent = self.latent.or(spec.latent);
        (spec.num_layers, spec.num_tokens) = (self.layers, self.tokens);
        (spec.seed, spec.format) = (self.seed, self.format);
        spec.fit_groups();
        Ok(spec)
    }
}

/// Writes the sample and prints what it is.
///
/// # Errors
/// If the sizes are no model's, or the sample cannot be written.
pub fn run(args: &SampleArgs, env: &EnvVars) -> Result<Exit, Failure> {
    LogSettings::new(args.log, env, &Effective::default()).start()?;
    prepare_to_end(env)?;
    let spec = args.spec()?;
    let plan = spec.clone().plan()?;
    let bar = Progress::new(args.log.progress, 0).bytes("writing the sample", plan.num_bytes());
    let start = Instant::now();
    let written = plan.write(&args.out, &|num_bytes| bar.inc(num_bytes))?;
    bar.finish();
    let seconds = start.elapsed().as_secs_f64();
    tracing::debug!(seconds, num_bytes = written.num_bytes, "wrote the sample");
    let layers = spec.layers();
    if args.json {
        output::json(&json!({
            "dir": args.out, "geometry": spec.geometry.name(), "num_bytes": written.num_bytes,
            "num_tensors": written.num_tensors, "num_shards": written.num_shards,
            "layers": layers.clone().collect::<Vec<_>>(), "num_experts": spec.num_experts, "num_topk": spec.num_topk,
            "num_groups": spec.num_groups, "topk_group": spec.topk_group, "hidden": spec.hidden,
            "latent": spec.latent, "intermediate": spec.intermediate, "num_tokens": spec.num_tokens,
            "seed": spec.seed, "seconds": seconds,
        }))?;
        return Ok(Exit::Fine);
    }
    let megabytes = written.num_bytes as f64 / 1e6;
    output::line(format_args!(
        "{}: {} tensors in {} shards, {megabytes:.1} MB in {seconds:.1} s ({:.0} MB/s)",
        args.out.display(),
        written.num_tensors,
        written.num_shards,
        megabytes / seconds,
    ))?;
    output::line(format_args!(
        "{}: layers {}, {} experts of {} x {}, top-{}; try it with\n  lockstep run --checkpoint {dir} --input {dir}/inputs.safetensors:hidden --output out.safetensors",
        spec.geometry.name(),
        layers.clone().map(|layer| layer.to_string()).collect::<Vec<_>>().join(", "),
        spec.num_experts,
        spec.latent.unwrap_or(spec.hidden),
        spec.intermediate,
        spec.num_topk,
        dir = args.out.display(),
    ))?;
    Ok(Exit::Fine)
}
