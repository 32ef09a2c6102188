//! Opening a checkpoint: config files, headers, and which of its layers are MoE layers.

use std::collections::BTreeMap;
use std::path::Path;

use super::error::CheckpointError;
use super::faults::Faults;
use super::files;
use super::index;
use super::layout_error::LayoutError;
use super::modules::unmatched_patterns;
use super::naming::{Place, expert_place};
use super::table::TensorTable;
use super::warning::Warning;
use crate::ids::LayerIdx;
use crate::model::{ConfigTexts, CorrectionBias, ModelDescription};

/// What could be learned of a checkpoint; parts that have a fault are absent.
#[derive(Debug)]
pub(crate) struct Survey {
    pub(crate) table: Option<TensorTable>,
    pub(crate) model: Option<ModelDescription>,
    /// The MoE layers of the model and the modules that hold them.
    pub(crate) blocks: BTreeMap<LayerIdx, String>,
    pub(crate) warnings: Vec<Warning>,
}

/// Reads config files and all headers of `dir`.
pub(crate) fn survey(dir: &Path, faults: &mut Faults) -> Result<Survey, CheckpointError> {
    let mut warnings = Vec::new();
    let configs = faults.take(files::read_configs(dir))?;
    let table = index::read_table(dir, faults, &mut warnings);
    let table = faults.take(table)?;
    let mut blocks = match &table {
        Some(table) => find_blocks(table, faults, &mut warnings)?,
        None => BTreeMap::new(),
    };
    let bias = table.as_ref().map_or(CorrectionBias::Unknown, |table| correction_bias(table, &blocks));
    let model = match &configs {
        None => None,
        Some(configs) => {
            let texts = ConfigTexts { config: &configs.config, hf_quant_config: configs.hf_quant_config.as_deref() };
            faults.take(ModelDescription::from_texts(texts, bias))?
        }
    };
    if let (Some(model), Some(table)) = (&model, &table) {
        warnings.extend(model.warnings.iter().cloned().map(Warning::from));
        compare_layers(model, &mut blocks, faults, &mut warnings)?;
        let patterns = unmatched_patterns(table, &model.quantisation);
        if !patterns.is_empty() {
            warnings.push(Warning::UnmatchedPatterns { patterns });
        }
    }
    Ok(Survey { table, model, blocks, warnings })
}

/// The modules that hold experts, by layer.
fn find_blocks(
    table: &TensorTable,
    faults: &mut Faults,
    warnings: &mut Vec<Warning>,
) -> Result<BTreeMap<LayerIdx, String>, CheckpointError> {
    let mut blocks: BTreeMap<LayerIdx, String> = BTreeMap::new();
    let mut foreign: Option<(usize, String)> = None;
    for entry in table.entries() {
        match expert_place(&entry.name) {
            None => {}
            Some(Place::Foreign) => foreign.get_or_insert_with(|| (0, entry.name.to_string())).0 += 1,
            Some(Place::Block(layer, block)) => match blocks.get(&layer) {
                Some(known) if known == block => {}
                None => {
                    blocks.insert(layer, block.to_owned());
                }
                Some(known) => {
                    let (block, other_block) = (known.clone(), block.to_owned());
                    faults.raise(LayoutError::TwoBlocks { layer, block, other_block })?;
                }
            },
        }
    }
    if blocks.is_empty() {
        let hint = foreign.map_or_else(String::new, |(_, first)| format!("; the nearest is {first}"));
        faults.raise(LayoutError::NoMoeLayers { hint })?;
    } else if let Some((count, first)) = foreign {
        warnings.push(Warning::ForeignExperts { count, first });
    }
    Ok(blocks)
}

fn correction_bias(table: &TensorTable, blocks: &BTreeMap<LayerIdx, String>) -> CorrectionBias {
    const NAMES: [&str; 2] = ["gate.e_score_correction_bias", "e_score_correction_bias"];
    let has_one = |block: &String| NAMES.iter().any(|name| table.find(&format!("{block}.{name}")).is_some());
    if blocks.values().any(has_one) { CorrectionBias::Present } else { CorrectionBias::Absent }
}

/// Compares the layers that hold experts with those that should, and drops those behind the model's last.
fn compare_layers(
    model: &ModelDescription,
    blocks: &mut BTreeMap<LayerIdx, String>,
    faults: &mut Faults,
    warnings: &mut Vec<Warning>,
) -> Result<(), CheckpointError> {
    let Some(num_layers) = model.layers.num_layers else { return Ok(()) };
    // DeepSeek and its kin store the layers that predict further tokens behind the others, under the next numbers.
    let beyond: Vec<_> = blocks.keys().copied().filter(|layer| layer.index() >= num_layers).collect();
    blocks.retain(|layer, _| layer.index() < num_layers);
    if !beyond.is_empty() {
        warnings.push(Warning::LayersBeyondModel { layers: beyond, num_layers });
    }
    let expected = &model.layers.moe_layers;
    let unexpected: Vec<_> = blocks.keys().copied().filter(|layer| expected.binary_search(layer).is_err()).collect();
    if !unexpected.is_empty() {
        warnings.push(Warning::UnexpectedMoeLayers { layers: unexpected });
    }
    let missing: Vec<_> =
        expected.iter().filter(|layer| !blocks.contains_key(layer)).map(|layer| layer.0.to_string()).collect();
    // Without any MoE layer that was said already.
    if missing.is_empty() || blocks.is_empty() {
        return Ok(());
    }
    let keys = "num_hidden_layers, first_k_dense_replace, moe_layer_freq, decoder_sparse_step or mlp_only_layers";
    faults.raise(LayoutError::MissingLayers { layers: missing.join(", "), keys })
}
