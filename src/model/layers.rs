//! Which decoder layers a config says are MoE layers.

use super::error::ModelError;
use super::fields::{CONFIG, Fields, wrong_type};
use crate::ids::LayerIdx;

/// No model has more decoder layers; a lying config must not size a loop.
const MAX_LAYERS: usize = 10_000;

/// The decoder layers of a model, and which of them are MoE layers by its config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerRule {
    /// Decoder layers, multi-token-prediction layers behind them not counted; absent where the config does not say.
    pub num_layers: Option<usize>,
    /// The MoE layers in ascending order; empty where `num_layers` is absent.
    pub moe_layers: Vec<LayerIdx>,
}

/// Reads `num_hidden_layers` and the keys that thin the MoE layers out.
pub(super) fn layer_rule(fields: &Fields) -> Result<LayerRule, ModelError> {
    let Some(num_layers) = fields.size(&["num_hidden_layers"], MAX_LAYERS)? else {
        return Ok(LayerRule { num_layers: None, moe_layers: Vec::new() });
    };
    let first = fields.count(&["first_k_dense_replace"], MAX_LAYERS)?.map_or(0, |found| found.value);
    let sparse_step = fields.size(&["decoder_sparse_step"], MAX_LAYERS)?.map_or(1, |found| found.value);
    let dense = index_list(fields, "mlp_only_layers")?.unwrap_or_default();
    let frequency = frequency(fields)?;
    let is_moe = |layer: usize| {
        layer >= first && (layer + 1).is_multiple_of(sparse_step) && !dense.contains(&layer) && frequency.allows(layer)
    };
    let moe_layers = (0..num_layers.value).filter(|&layer| is_moe(layer)).map(LayerIdx::from_index).collect();
    Ok(LayerRule { num_layers: Some(num_layers.value), moe_layers })
}

/// `moe_layer_freq`: every n-th layer, or a list with one 0 or 1 a layer.
enum Frequency {
    Every(usize),
    PerLayer(Vec<usize>),
}

impl Frequency {
    fn allows(&self, layer: usize) -> bool {
        match self {
            Self::Every(step) => layer.is_multiple_of(*step),
            Self::PerLayer(marks) => marks.get(layer).is_some_and(|&mark| mark != 0),
        }
    }
}

fn frequency(fields: &Fields) -> Result<Frequency, ModelError> {
    const KEY: &str = "moe_layer_freq";
    if fields.get(KEY).is_some_and(serde_json::Value::is_array) {
        return Ok(Frequency::PerLayer(index_list(fields, KEY)?.unwrap_or_default()));
    }
    Ok(Frequency::Every(fields.size(&[KEY], MAX_LAYERS)?.map_or(1, |found| found.value)))
}

fn index_list(fields: &Fields, key: &'static str) -> Result<Option<Vec<usize>>, ModelError> {
    let Some(value) = fields.get(key) else { return Ok(None) };
    let numbers = value.as_array().and_then(|list| {
        list.iter().map(|item| item.as_u64().and_then(|number| usize::try_from(number).ok())).collect()
    });
    numbers.map(Some).ok_or_else(|| wrong_type(CONFIG, key, "a list of layer numbers", value))
}
