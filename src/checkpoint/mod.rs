//! The only reader of checkpoints: config files, safetensors headers and memory-mapped tensor bytes.
//!
//! [`Checkpoint::open`] reads config files and all headers, and maps nothing. [`Checkpoint::layer`] checks names, shapes and dtypes of
//! all experts of a layer from headers alone, so every rank reaches one verdict; the `read_*` functions map a tensor's own bytes and
//! check its scales. The files of inputs, expected values and outputs are read and written here too.
//!
//! Knows nothing of ranks: a caller asks for the experts it owns.

mod activations;
#[cfg(test)]
mod cases;
mod declared;
mod error;
mod faults;
mod files;
mod header;
mod header_error;
mod index;
mod layout_error;
mod manifest;
mod map;
mod modules;
mod naming;
mod parts;
mod projection;
mod read;
mod roles;
mod scales;
mod scan;
mod survey;
mod table;
pub mod tensors;
#[cfg(test)]
mod testing;
mod warning;
mod write;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use activations::{Activations, Matrix, MatrixDtype, read_activations, read_topk};
pub use error::CheckpointError;
pub use header_error::HeaderError;
pub use index::INPUTS;
pub use layout_error::LayoutError;
pub use manifest::LayerManifest;
pub use modules::ModuleCounts;
pub use naming::ProjectionKind;
pub use projection::ExpertFormat;
pub use read::BytesRead;
pub use safetensors::Dtype;
pub use scales::{
    GlobalScaleSummary, IMPLAUSIBLE_GLOBAL_SCALE, LayerScales, ProjectionScales, ScaleError, ScaleSummary,
};
pub use scan::{FileSummary, LayerScan, PartShape, Scan, scan};
pub use warning::Warning;
pub use write::{
    OutputData, OutputTensor, TensorView, Unfinished, remove_unfinished, write_atomically, write_outputs, write_tensors,
};

use crate::ids::LayerIdx;
use crate::model::ModelDescription;
use faults::Faults;
use read::ReadCounters;
use table::TensorTable;

/// A checkpoint whose config files and headers were read and checked.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    table: TensorTable,
    model: ModelDescription,
    blocks: BTreeMap<LayerIdx, String>,
    warnings: Vec<Warning>,
    counters: ReadCounters,
}

impl Checkpoint {
    /// Opens the checkpoint in `dir`: `config.json`, `hf_quant_config.json`, the shard index, and all headers.
    ///
    /// With a `model.safetensors.index.json`, the files that it names count and it decides where each tensor lies; without one,
    /// every `*.safetensors` in `dir` counts. Links are followed. No tensor is mapped.
    ///
    /// # Errors
    /// If a file is missing, unreadable or lies about itself, if index and files disagree, if the config describes a model that
    /// Lockstep does not run, or if a MoE layer is missing.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let survey::Survey { table, model, blocks, warnings } = survey::survey(dir, &mut Faults::Stop)?;
        // A stopping policy returns all parts or an error.
        let (Some(table), Some(model)) = (table, model) else { unreachable!("a fault was not returned") };
        Ok(Self { dir: dir.to_owned(), table, model, blocks, warnings, counters: ReadCounters::default() })
    }

    /// The directory, as given.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The model, as its config files describe it.
    #[must_use]
    pub fn model(&self) -> &ModelDescription {
        &self.model
    }

    /// The MoE layers, ascending. Which layers these are comes from the tensors; layers behind the model's last (multi-token
    /// prediction) are left out.
    #[must_use]
    pub fn moe_layers(&self) -> Vec<LayerIdx> {
        self.blocks.keys().copied().collect()
    }

    /// What is odd about the checkpoint as a whole. A layer's own are in its [`LayerManifest::warnings`].
    #[must_use]
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// How many modules of the whole checkpoint are stored in which format.
    #[must_use]
    pub fn module_counts(&self) -> ModuleCounts {
        modules::count_modules(&self.table)
    }

    /// Bytes of the matrices around a layer's routed experts, shared ones left out: router and latent projections.
    #[must_use]
    pub fn dense_bytes(&self, manifest: &LayerManifest) -> u64 {
        manifest.parts.matrices().map(|entry| self.table.entry(entry).num_bytes()).sum()
    }

    /// Checks one MoE layer from headers alone: that all experts are there and whole, with the right shapes and dtypes, and that
    /// router, shared expert and latent projections are those of the config.
    ///
    /// # Errors
    /// If `layer` is no MoE layer, or the first fault found in it.
    pub fn layer(&self, layer: LayerIdx) -> Result<LayerManifest, CheckpointError> {
        let Some(block) = self.blocks.get(&layer) else {
            let present: Vec<_> = self.blocks.keys().map(|layer| layer.0.to_string()).collect();
            return Err(CheckpointError::NoSuchLayer { layer, present: present.join(", ") });
        };
        let survey = manifest::survey(&self.table, &self.model, (layer, block), &mut Faults::Stop)?;
        let Some(manifest) = survey.into_manifest(layer, block.clone()) else {
            unreachable!("a fault was not returned")
        };
        Ok(manifest)
    }
}
