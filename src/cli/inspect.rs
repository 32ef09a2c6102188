//! `lockstep inspect`: what is in a checkpoint, and everything that is wrong with it.
//!
//! [`report`] makes the report as a value that serialises and displays; [`command`] prints it.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::Args;
use comfy_table::{Table, presets};
use serde::Serialize;

use crate::checkpoint::{
    CheckpointError, ExpertFormat, GlobalScaleSummary, LayerScales, LayerScan, ModuleCounts, PartShape, ProjectionKind,
    ScaleSummary, scan,
};
use crate::config::Effective;
use crate::env::EnvVars;
use crate::exit::Exit;
use crate::model::ModelDescription;
use crate::numerics::activation::Activation;
use crate::routing::RoutingMethod;

use super::failure::Failure;
use super::logging::LogSettings;
use super::options::LogArgs;
use super::output;
use super::progress::Progress;

/// Says what is in a checkpoint, and everything that is wrong with it.
#[derive(Debug, Clone, Args)]
pub struct InspectArgs {
    /// The checkpoint's directory.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Prints one JSON object instead of tables.
    #[arg(long, help_heading = "Printing")]
    pub json: bool,
    /// Logs and progress.
    #[command(flatten)]
    pub log: LogArgs,
}

/// Examines the checkpoint and prints the report; a checkpoint with problems ends with the code of bad input.
///
/// # Errors
/// If the directory cannot be listed, or standard output cannot be written.
pub fn command(args: &InspectArgs, env: &EnvVars) -> Result<Exit, Failure> {
    LogSettings::new(args.log, env, &Effective::default()).start()?;
    let bar = Progress::new(args.log.progress, 0).bar("reading scales");
    let report = report(&args.dir, &mut |done, total| bar.advance(done, total))?;
    bar.finish();
    if args.json {
        output::json(&report)?
    } else {
        output::line(&report)?
    }
    Ok(if report.has_problems() { Exit::BadInput } else { Exit::Fine })
}

/// What was found in a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct InspectReport {
    /// The directory, as given.
    pub checkpoint: String,
    /// The model; absent where its config files are refused.
    pub model: Option<ModelReport>,
    /// The safetensors files that could be read.
    pub files: Vec<FileReport>,
    /// Linear modules of the whole checkpoint by format.
    pub modules: ModuleCounts,
    /// The MoE layers.
    pub layers: Vec<LayerReport>,
    /// What is odd, and stops nothing.
    pub warnings: Vec<String>,
    /// What is wrong: each stops a run that needs the part.
    pub problems: Vec<String>,
}

/// The model's geometry.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[expect(missing_docs, reason = "the fields are the geometry's, documented at `MoeGeometry`")]
pub struct ModelReport {
    pub model_type: String,
    pub hidden: usize,
    pub expert_hidden: usize,
    pub intermediate: usize,
    pub num_experts: usize,
    pub num_topk: usize,
    pub shared_intermediate: Option<usize>,
    pub has_latent: bool,
    pub routing: String,
    pub router_has_bias: bool,
    pub activation: String,
    /// `quant_algo`, absent for an unquantised model.
    pub quantisation: Option<String>,
}

/// A safetensors file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileReport {
    /// Its path.
    pub path: String,
    /// Its length.
    pub num_bytes: u64,
    /// Tensors read from it.
    pub num_tensors: usize,
}

/// A MoE layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerReport {
    /// Its number.
    pub layer: u32,
    /// The module that holds it.
    pub block: String,
    /// Experts in NVFP4.
    pub num_nvfp4: usize,
    /// Experts in bf16.
    pub num_bf16: usize,
    /// Experts with a fault in names, shapes or dtypes.
    pub num_faulty: usize,
    /// The shared expert's format.
    pub shared: Option<ExpertFormat>,
    /// Whether the checkpoint asks for quantised activations.
    pub quantise_activations: bool,
    /// Whether every NVFP4 projection has an `input_scale`.
    pub has_input_scales: bool,
    /// Bytes of the routed experts.
    pub expert_bytes: u64,
    /// Bytes of what every rank reads.
    pub replicated_bytes: u64,
    /// The scales of the routed experts, by projection; empty without NVFP4 experts.
    pub scales: Vec<ScaleReport>,
    /// The scales of the shared expert.
    pub shared_scales: Vec<ScaleReport>,
    /// NVFP4 experts whose scales are whole.
    pub num_pairs: u64,
    /// Those whose gate and up differ in `weight_scale_2`.
    pub num_pairs_differing: u64,
    /// Shapes and dtypes of the first whole expert and of what surrounds the experts.
    pub shapes: Vec<PartShape>,
}

/// The scales of one kind of projection.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScaleReport {
    /// gate, up or down
    pub projection: ProjectionKind,
    /// `weight_scale`
    pub weight_scale: ScaleSummary,
    /// `weight_scale_2`
    pub weight_scale_2: GlobalScaleSummary,
    /// `input_scale`
    pub input_scale: GlobalScaleSummary,
}

impl InspectReport {
    /// Whether anything is wrong.
    #[must_use]
    pub fn has_problems(&self) -> bool {
        !self.problems.is_empty()
    }
}

/// Examines the checkpoint in `dir`, going on past faults. `progress` is told (experts done, experts in all).
///
/// # Errors
/// Only if `dir` cannot be listed; everything else is among the report's problems.
pub fn report(dir: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<InspectReport, CheckpointError> {
    let scan = scan(dir, progress)?;
    let files = scan.files.iter().map(|file| FileReport {
        path: file.path.display().to_string(),
        num_bytes: file.num_bytes,
        num_tensors: file.num_tensors,
    });
    Ok(InspectReport {
        checkpoint: dir.display().to_string(),
        model: scan.model.as_ref().map(model_report),
        files: files.collect(),
        modules: scan.modules,
        layers: scan.layers.into_iter().map(layer_report).collect(),
        warnings: scan.warnings.iter().map(ToString::to_string).collect(),
        problems: scan.problems.iter().map(|problem| chain(problem)).collect(),
    })
}

/// An error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn model_report(model: &ModelDescription) -> ModelReport {
    let geometry = &model.geometry;
    ModelReport {
        model_type: model.model_type.clone(),
        hidden: geometry.hidden,
        expert_hidden: geometry.expert_hidden,
        intermediate: geometry.intermediate,
        num_experts: geometry.num_experts,
        num_topk: geometry.num_topk,
        shared_intermediate: geometry.shared.map(|shared| shared.intermediate),
        has_latent: geometry.latent.is_some(),
        routing: routing_text(geometry.routing),
        router_has_bias: model.router_has_bias,
        activation: activation_text(geometry.activation),
        quantisation: model.quantisation.algorithm.clone(),
    }
}

fn routing_text(method: RoutingMethod) -> String {
    match method {
        RoutingMethod::Default => "default".to_owned(),
        RoutingMethod::Renormalize => "renormalize".to_owned(),
        RoutingMethod::DeepseekV3 { num_groups, topk_group, scaling } => {
            format!("deepseek_v3, {topk_group} of {num_groups} groups, scaling {scaling}")
        }
        RoutingMethod::KimiK3 { scaling } => format!("kimi_k3, scaling {scaling}"),
        RoutingMethod::DeepseekV4 { scaling } => format!("deepseek_v4, scaling {scaling}"),
        RoutingMethod::MinimaxM2 => "minimax_m2".to_owned(),
        RoutingMethod::SigmoidRenorm => "sigmoid_renorm".to_owned(),
        RoutingMethod::Llama4 => "llama4".to_owned(),
    }
}

fn activation_text(activation: Activation) -> String {
    match activation {
        Activation::Swiglu => "SwiGLU".to_owned(),
        Activation::SwigluClamp { limit } => format!("SwiGLU clamped at {limit}"),
        Activation::Situ { beta, linear_beta: None } => format!("SiTU {beta}"),
        Activation::Situ { beta, linear_beta: Some(linear_beta) } => format!("SiTU {beta} / {linear_beta}"),
    }
}

fn layer_report(scan: LayerScan) -> LayerReport {
    LayerReport {
        layer: scan.layer.0,
        block: scan.block,
        num_nvfp4: scan.num_nvfp4,
        num_bf16: scan.num_bf16,
        num_faulty: scan.num_faulty,
        shared: scan.shared,
        quantise_activations: scan.quantise_activations,
        has_input_scales: scan.has_input_scales,
        expert_bytes: scan.expert_bytes,
        replicated_bytes: scan.replicated_bytes,
        scales: scale_reports(&scan.scales),
        shared_scales: scale_reports(&scan.shared_scales),
        num_pairs: scan.scales.num_pairs,
        num_pairs_differing: scan.scales.num_pairs_differing,
        shapes: scan.shapes,
    }
}

fn scale_reports(scales: &LayerScales) -> Vec<ScaleReport> {
    let present = ProjectionKind::ALL.into_iter().filter(|&kind| scales.of(kind).blocks.count > 0);
    present
        .map(|projection| {
            let of = scales.of(projection);
            ScaleReport { projection, weight_scale: of.blocks, weight_scale_2: of.global, input_scale: of.input }
        })
        .collect()
}

/// Problems and warnings shown to a person; all are in the serialised report.
const NUM_SHOWN: usize = 200;

impl fmt::Display for InspectReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.checkpoint)?;
        if let Some(model) = &self.model {
            model.fmt(f)?;
        }
        let num_bytes: u64 = self.files.iter().map(|file| file.num_bytes).sum();
        let num_tensors: usize = self.files.iter().map(|file| file.num_tensors).sum();
        writeln!(f, "{} in {}, {num_tensors} tensors", human_bytes(num_bytes), counted(self.files.len(), "file"))?;
        let ModuleCounts { nvfp4, bf16, other } = self.modules;
        writeln!(f, "modules: {nvfp4} NVFP4, {bf16} bf16, {other} other")?;
        if !self.layers.is_empty() {
            writeln!(f, "\n{}\n\n{}", layer_table(&self.layers), scale_table(&self.layers))?;
            write_shapes(f, &self.layers)?;
        }
        write_list(f, "warning", &self.warnings)?;
        write_list(f, "problem", &self.problems)?;
        if self.problems.is_empty() {
            writeln!(f, "\nno problem found")?;
        }
        Ok(())
    }
}

impl fmt::Display for ModelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: hidden {}, ", self.model_type, self.hidden)?;
        if self.has_latent {
            write!(f, "latent {}, ", self.expert_hidden)?;
        }
        write!(f, "intermediate {}, {} experts, top-{}", self.intermediate, self.num_experts, self.num_topk)?;
        if let Some(width) = self.shared_intermediate {
            write!(f, ", shared {width}")?;
        }
        writeln!(f)?;
        writeln!(f, "routing {}, activation {}", self.routing, self.activation)?;
        writeln!(f, "quantisation {}", self.quantisation.as_deref().unwrap_or("none"))
    }
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header(header);
    table
}

fn layer_table(layers: &[LayerReport]) -> Table {
    let mut rows = table(&[
        "layer",
        "NVFP4",
        "bf16",
        "faulty",
        "shared",
        "activations",
        "input_scale",
        "gate != up",
        "experts",
        "replicated",
    ]);
    for layer in layers {
        let activations = match (layer.quantise_activations, layer.num_nvfp4) {
            (true, _) => "quantised",
            (false, 0) => "none",
            (false, _) => "bf16",
        };
        rows.add_row([
            layer.layer.to_string(),
            layer.num_nvfp4.to_string(),
            layer.num_bf16.to_string(),
            layer.num_faulty.to_string(),
            layer.shared.map_or("-", ExpertFormat::name).to_owned(),
            activations.to_owned(),
            if layer.has_input_scales { "yes" } else { "no" }.to_owned(),
            format!("{} of {}", layer.num_pairs_differing, layer.num_pairs),
            human_bytes(layer.expert_bytes),
            human_bytes(layer.replicated_bytes),
        ]);
    }
    rows
}

fn scale_table(layers: &[LayerReport]) -> Table {
    let mut rows = table(&[
        "layer",
        "projection",
        "block scales",
        "smallest",
        "largest",
        "saturated",
        "zero",
        "2^n",
        "weight_scale_2",
        "input_scale",
    ]);
    for layer in layers {
        let routed = layer.scales.iter().map(|scales| ("", scales));
        for (owner, of) in routed.chain(layer.shared_scales.iter().map(|scales| ("shared ", scales))) {
            let ScaleSummary { count, smallest, largest, num_saturated, num_zero, powers_of_two } = of.weight_scale;
            rows.add_row([
                layer.layer.to_string(),
                format!("{owner}{}", of.projection.name()),
                count.to_string(),
                smallest.to_string(),
                largest.to_string(),
                num_saturated.to_string(),
                num_zero.to_string(),
                if powers_of_two { "yes" } else { "no" }.to_owned(),
                range(&of.weight_scale_2),
                range(&of.input_scale),
            ]);
        }
    }
    rows
}

fn range(scales: &GlobalScaleSummary) -> String {
    let GlobalScaleSummary { count, smallest, largest, powers_of_two } = *scales;
    let suffix = if powers_of_two { " (2^n)" } else { "" };
    if count == 0 {
        "-".to_owned()
    } else if smallest.to_bits() == largest.to_bits() {
        format!("{smallest:.4e}{suffix}")
    } else {
        format!("{smallest:.4e} to {largest:.4e}{suffix}")
    }
}

/// Shapes once for all layers that share them.
fn write_shapes(f: &mut fmt::Formatter<'_>, layers: &[LayerReport]) -> fmt::Result {
    let mut groups: Vec<(&[PartShape], Vec<String>)> = Vec::new();
    for layer in layers {
        match groups.iter_mut().find(|(shapes, _)| *shapes == layer.shapes) {
            Some((_, numbers)) => numbers.push(layer.layer.to_string()),
            None => groups.push((&layer.shapes, vec![layer.layer.to_string()])),
        }
    }
    for (shapes, numbers) in groups {
        writeln!(f, "\nshapes of {} {}", if numbers.len() == 1 { "layer" } else { "layers" }, numbers.join(", "))?;
        for PartShape { tensor, dtype, shape } in shapes {
            writeln!(f, "  {tensor}  {dtype} {shape:?}")?;
        }
    }
    Ok(())
}

fn write_list(f: &mut fmt::Formatter<'_>, what: &str, lines: &[String]) -> fmt::Result {
    if lines.is_empty() {
        return Ok(());
    }
    writeln!(f, "\n{}", counted(lines.len(), what))?;
    for line in lines.iter().take(NUM_SHOWN) {
        writeln!(f, "  - {line}")?;
    }
    if lines.len() > NUM_SHOWN {
        writeln!(f, "  and {} more; --json lists all", lines.len() - NUM_SHOWN)?;
    }
    Ok(())
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Decimal units, as disks and the models' own pages count.
#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
fn human_bytes(num_bytes: u64) -> String {
    const UNITS: [(u64, &str); 4] =
        [(1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
    let unit = UNITS.iter().find(|(size, _)| num_bytes >= *size);
    unit.map_or_else(
        || format!("{num_bytes} B"),
        |(size, unit)| format!("{:.2} {unit}", num_bytes as f64 / *size as f64),
    )
}

#[cfg(test)]
mod tests;
