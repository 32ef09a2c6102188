//! A look at all of a checkpoint that goes on past faults, for `inspect`.
//!
//! Runs the checks of loading under a policy that notes faults, and reads every scale of every expert. Weights are not read.

use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::error::CheckpointError;
use super::faults::Faults;
use super::files;
use super::manifest::{self, LayerSurvey, format_of};
use super::modules::{ModuleCounts, count_modules};
use super::projection::{ExpertFormat, ProjectionEntries};
use super::read::{Owner, ReadCounters, Reader};
use super::scales::LayerScales;
use super::survey::survey;
use super::table::{EntryIdx, TensorTable};
use super::warning::Warning;
use crate::ids::{ExpertIdx, LayerIdx};
use crate::model::ModelDescription;

/// Experts between two calls of the progress callback.
const CHUNK: usize = 64;

/// What was found in a checkpoint, and everything that is wrong with it.
#[derive(Debug, Default)]
pub struct Scan {
    /// The model, unless its config files are refused.
    pub model: Option<ModelDescription>,
    /// The safetensors files that could be read.
    pub files: Vec<FileSummary>,
    /// Modules by format.
    pub modules: ModuleCounts,
    /// The MoE layers.
    pub layers: Vec<LayerScan>,
    /// What is odd.
    pub warnings: Vec<Warning>,
    /// What is wrong.
    pub problems: Vec<CheckpointError>,
}

/// A safetensors file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSummary {
    /// Where it lies.
    pub path: PathBuf,
    /// Its length.
    pub num_bytes: u64,
    /// Tensors that count.
    pub num_tensors: usize,
}

/// A MoE layer.
#[derive(Debug, Clone)]
pub struct LayerScan {
    /// The layer.
    pub layer: LayerIdx,
    /// The module that holds it.
    pub block: String,
    /// Experts in NVFP4.
    pub num_nvfp4: usize,
    /// Experts in bf16.
    pub num_bf16: usize,
    /// Experts whose names, shapes or dtypes have a fault.
    pub num_faulty: usize,
    /// The shared expert's format.
    pub shared: Option<ExpertFormat>,
    /// Whether the checkpoint asks for quantised activations in the routed experts.
    pub quantise_activations: bool,
    /// Whether every NVFP4 projection has an `input_scale`.
    pub has_input_scales: bool,
    /// Shapes and dtypes of the first whole expert and of what surrounds the experts.
    pub shapes: Vec<PartShape>,
    /// Bytes of the routed experts.
    pub expert_bytes: u64,
    /// Bytes of what every rank reads.
    pub replicated_bytes: u64,
    /// The routed experts' scales.
    pub scales: LayerScales,
    /// The shared expert's scales.
    pub shared_scales: LayerScales,
}

/// The form of one tensor.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PartShape {
    /// Its name behind the block's.
    pub tensor: String,
    /// Its dtype.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// Examines the checkpoint in `dir`. `progress` is told (experts done, experts in all), at least once a layer.
///
/// # Errors
/// Only if `dir` cannot be listed; everything else is among the problems.
pub fn scan(dir: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Scan, CheckpointError> {
    files::list_safetensors(dir)?;
    let mut faults = Faults::Collect(Vec::new());
    let mut found = Scan::default();
    // A collecting policy turns every fault into a note, so this is Ok; were it not, the fault would still be shown.
    let result = scan_into(dir, &mut found, &mut faults, progress);
    let noted = if let Faults::Collect(noted) = faults { noted } else { Vec::new() };
    found.problems = noted.into_iter().chain(result.err()).collect();
    Ok(found)
}

fn scan_into(
    dir: &Path,
    found: &mut Scan,
    faults: &mut Faults,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), CheckpointError> {
    let survey = survey(dir, faults)?;
    found.warnings = survey.warnings;
    let Some(table) = survey.table else {
        found.model = survey.model;
        return Ok(());
    };
    found.files = file_summaries(&table);
    found.modules = count_modules(&table);
    if let Some(model) = &survey.model {
        let total = (survey.blocks.len() * model.geometry.num_experts) as u64;
        let mut done = 0;
        let mut step = |experts: usize| {
            done += experts as u64;
            progress(done, total);
        };
        for (&layer, block) in &survey.blocks {
            let scan = scan_layer(&table, model, (layer, block), faults, &mut step)?;
            found.warnings.extend(scan.1);
            found.layers.push(scan.0);
        }
    }
    found.model = survey.model;
    Ok(())
}

fn file_summaries(table: &TensorTable) -> Vec<FileSummary> {
    let mut counts = vec![0; table.shards().len()];
    for entry in table.entries() {
        counts[entry.shard as usize] += 1;
    }
    let shards = table.shards().iter().zip(counts);
    shards
        .map(|(shard, num_tensors)| FileSummary { path: shard.path.clone(), num_bytes: shard.num_bytes, num_tensors })
        .collect()
}

fn scan_layer(
    table: &TensorTable,
    model: &ModelDescription,
    (layer, block): (LayerIdx, &str),
    faults: &mut Faults,
    step: &mut dyn FnMut(usize),
) -> Result<(LayerScan, Vec<Warning>), CheckpointError> {
    let mut survey = manifest::survey(table, model, (layer, block), faults)?;
    let counters = ReadCounters::default();
    let reader = Reader { table, counters: &counters };
    let mut scales = LayerScales::default();
    for (chunk, experts) in survey.experts.chunks(CHUNK).enumerate() {
        let first = chunk * CHUNK;
        let scanned: Vec<_> = experts
            .par_iter()
            .enumerate()
            .map(|(at, entries)| scan_expert(reader, entries.as_ref(), Some(ExpertIdx::from_index(first + at))))
            .collect();
        for (expert, noted) in scanned {
            scales.merge(&expert);
            noted.into_iter().try_for_each(|fault| faults.raise(fault))?;
        }
        step(experts.len());
    }
    let (shared_scales, noted) = scan_expert(reader, survey.parts.shared.as_ref(), None);
    noted.into_iter().try_for_each(|fault| faults.raise(fault))?;
    let mut warnings = std::mem::take(&mut survey.warnings);
    warnings.extend(scales.warning().into_iter().chain(shared_scales.warning()));
    Ok((summarise(table, &survey, (layer, block), [scales, shared_scales]), warnings))
}

/// The scales of one expert and their faults; bf16 and faulty experts have neither.
fn scan_expert(
    reader: Reader<'_>,
    entries: Option<&[ProjectionEntries; 3]>,
    owner: Owner,
) -> (LayerScales, Vec<CheckpointError>) {
    let mut scales = LayerScales::default();
    let mut faults = Faults::Collect(Vec::new());
    let Some(entries) = entries else { return (scales, Vec::new()) };
    let mut summaries = [None; 3];
    for (projection, summary) in entries.iter().zip(&mut summaries) {
        let Some(of) = projection.scales else { continue };
        match reader.scales(of, owner, &mut faults) {
            Ok(checked) => *summary = checked.map(|checked| checked.summary),
            Err(fault) => return (scales, vec![fault]),
        }
    }
    reader.note(entries, summaries, &mut scales);
    let noted = if let Faults::Collect(noted) = faults { noted } else { Vec::new() };
    (scales, noted)
}

fn summarise(
    table: &TensorTable,
    survey: &LayerSurvey,
    (layer, block): (LayerIdx, &str),
    [scales, shared_scales]: [LayerScales; 2],
) -> LayerScan {
    let bytes = |entries: &[ProjectionEntries; 3]| -> u64 {
        entries.iter().flat_map(ProjectionEntries::all).map(|idx| table.entry(idx).num_bytes()).sum()
    };
    let whole = || survey.experts.iter().flatten();
    let num_of = |format| whole().filter(|entries| format_of(entries) == format).count();
    let around = survey.parts.around();
    let shape = |idx: EntryIdx| {
        let entry = table.entry(idx);
        let inside = entry.name.strip_prefix(block).and_then(|rest| rest.strip_prefix('.')).unwrap_or(&entry.name);
        PartShape { tensor: inside.to_owned(), dtype: entry.dtype.to_string(), shape: entry.shape.to_vec() }
    };
    let shared = survey.parts.shared.as_ref();
    let examples = whole().next().into_iter().chain(shared);
    let shown = examples.flatten().flat_map(ProjectionEntries::all).chain(around.iter().copied());
    LayerScan {
        layer,
        block: block.to_owned(),
        num_nvfp4: num_of(ExpertFormat::Nvfp4),
        num_bf16: num_of(ExpertFormat::Bf16),
        num_faulty: survey.experts.len() - whole().count(),
        shared: shared.map(format_of),
        quantise_activations: survey.quantise_activations(),
        has_input_scales: survey.inputs.have_scales,
        shapes: shown.map(shape).collect(),
        expert_bytes: whole().map(bytes).sum(),
        replicated_bytes: shared.map_or(0, bytes) + around.iter().map(|&idx| table.entry(idx).num_bytes()).sum::<u64>(),
        scales,
        shared_scales,
    }
}
