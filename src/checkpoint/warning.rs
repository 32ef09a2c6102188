//! What is odd about a checkpoint, though it stops nothing.

use std::fmt;
use std::path::PathBuf;

use crate::ids::LayerIdx;
use crate::model::ModelWarning;

/// Something that a person should know about a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Warning {
    /// About the config files.
    Model(ModelWarning),
    /// Safetensors files that the index does not name.
    ExtraShards {
        /// Their names.
        files: Vec<String>,
    },
    /// Tensors of indexed files that the index does not name, or names elsewhere.
    ExtraTensors {
        /// How many.
        count: usize,
        /// One of them.
        first: String,
        /// Where it lies.
        path: PathBuf,
    },
    /// Exclusion patterns that match no module.
    UnmatchedPatterns {
        /// As written.
        patterns: Vec<String>,
    },
    /// MoE layers behind the model's last: multi-token prediction.
    LayersBeyondModel {
        /// Their numbers.
        layers: Vec<LayerIdx>,
        /// The model's layers.
        num_layers: usize,
    },
    /// Experts where the config expects a dense layer.
    UnexpectedMoeLayers {
        /// Their numbers.
        layers: Vec<LayerIdx>,
    },
    /// Experts under a prefix that is not the text model's.
    ForeignExperts {
        /// How many tensors.
        count: usize,
        /// One of them.
        first: String,
    },
    /// Block scales stored as plain bytes.
    ScalesAsU8 {
        /// How many tensors.
        count: usize,
        /// One of them.
        first: String,
    },
    /// Modules kept in bf16 that no exclusion names.
    UndeclaredBf16 {
        /// How many modules.
        count: usize,
        /// One of them.
        first: String,
    },
    /// Modules excluded from quantisation that are stored in NVFP4.
    ExcludedButQuantised {
        /// How many modules.
        count: usize,
        /// One of them.
        first: String,
        /// The pattern that excludes it.
        pattern: String,
    },
    /// The config asks for quantised activations, and the layer has no `input_scale`.
    NoInputScales {
        /// The layer.
        layer: LayerIdx,
    },
    /// Global scales too large for multipliers.
    ImplausibleScales {
        /// How many tensors.
        count: usize,
        /// One of them.
        first: String,
        /// Its value's bits.
        value_bits: u32,
    },
}

impl Warning {
    /// Whether it is routine rather than a reason to look at the checkpoint.
    #[must_use]
    pub const fn is_note(&self) -> bool {
        matches!(self, Self::LayersBeyondModel { .. })
    }
}

impl From<ModelWarning> for Warning {
    fn from(warning: ModelWarning) -> Self {
        Self::Model(warning)
    }
}

/// Names listed; longer lists are cut.
const NUM_LISTED: usize = 5;

struct Listed<'a>(&'a [String]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0[..self.0.len().min(NUM_LISTED)].join(", "))?;
        match self.0.len().checked_sub(NUM_LISTED) {
            Some(more) if more > 0 => write!(f, " and {more} more"),
            _ => Ok(()),
        }
    }
}

fn numbers(layers: &[LayerIdx]) -> Vec<String> {
    layers.iter().map(|layer| layer.0.to_string()).collect()
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Model(warning) => warning.fmt(f),
            Self::ExtraShards { files } => {
                write!(f, "not named by model.safetensors.index.json and not read: {}", Listed(files))
            }
            Self::ExtraTensors { count, first, path } => write!(
                f,
                "{count} tensors lie in files where model.safetensors.index.json does not look for them and are not read, the first {first} in {}",
                path.display()
            ),
            Self::UnmatchedPatterns { patterns } => {
                write!(f, "exclusion patterns that match no module of the checkpoint: {}", Listed(patterns))
            }
            Self::LayersBeyondModel { layers, num_layers } => write!(
                f,
                "MoE layers {} lie behind the model's {num_layers} layers (multi-token prediction) and are not run",
                Listed(&numbers(layers))
            ),
            Self::UnexpectedMoeLayers { layers } => {
                write!(
                    f,
                    "layers {} hold experts though config.json makes them dense; the tensors are followed",
                    Listed(&numbers(layers))
                )
            }
            Self::ForeignExperts { count, first } => {
                write!(f, "{count} expert tensors lie outside the text model and are not read, the first {first}")
            }
            Self::ScalesAsU8 { count, first } => write!(
                f,
                "{count} tensors of block scales are stored as U8, the first {first}; they are read as e4m3 bits, as shape and declared format say"
            ),
            Self::UndeclaredBf16 { count, first } => {
                write!(
                    f,
                    "{count} modules are stored in bf16 though the config declares them NVFP4, the first {first}; they run in bf16"
                )
            }
            Self::ExcludedButQuantised { count, first, pattern } => write!(
                f,
                "{count} modules are stored in NVFP4 though the config excludes them, the first {first} by `{pattern}`; they run in NVFP4"
            ),
            Self::NoInputScales { layer } => write!(
                f,
                "{layer}: the config declares quantised activations but no expert has an input_scale; its activations stay unquantised"
            ),
            Self::ImplausibleScales { count, first, value_bits } => write!(
                f,
                "{count} global scales are implausibly large for multipliers, the first {first} = {}; a divisor (as compressed-tensors stores) under ModelOpt's name?",
                f32::from_bits(*value_bits)
            ),
        }
    }
}
