//! Why a layer's tensors are not those of a MoE layer that Lockstep runs.

use std::path::PathBuf;

use crate::exit::{Classify, Exit};
use crate::ids::{ExpertIdx, LayerIdx};

/// What is wrong with names, shapes or dtypes.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// No experts anywhere.
    #[error(
        "the checkpoint has no MoE layer: no tensor is named like model.layers.N.mlp.experts.E.gate_proj.weight or \
         model.layers.N.block_sparse_moe.experts.E.w1.weight{hint}"
    )]
    NoMoeLayers {
        /// Names that come near.
        hint: String,
    },
    /// Layers that the config makes MoE layers have no experts.
    #[error(
        "layers {layers} are MoE layers by config.json, but no tensor holds their experts: finish the download, or correct {keys}"
    )]
    MissingLayers {
        /// Their numbers.
        layers: String,
        /// The keys that decide.
        keys: &'static str,
    },
    /// One layer under two prefixes.
    #[error(
        "{layer} has experts under {block} and under {other_block}: which are the model's cannot be told; remove one"
    )]
    TwoBlocks {
        /// The layer.
        layer: LayerIdx,
        /// One module.
        block: String,
        /// The other.
        other_block: String,
    },
    /// A tensor is missing.
    #[error("{layer}: tensor {tensor} is missing{because}")]
    MissingTensor {
        /// The layer.
        layer: LayerIdx,
        /// The tensor.
        tensor: String,
        /// Why it is needed, from a comma on.
        because: String,
    },
    /// More or fewer experts than the config says.
    #[error("{layer} holds {found} experts ({detail}), config.json says {wanted}")]
    NumExperts {
        /// The layer.
        layer: LayerIdx,
        /// The config's number.
        wanted: usize,
        /// Experts found.
        found: usize,
        /// Which are missing or too many.
        detail: String,
    },
    /// A tensor beside the experts' own whose meaning is not implemented.
    #[error("{layer}: tensor {tensor}: {reason}")]
    RefusedTensor {
        /// The layer.
        layer: LayerIdx,
        /// The tensor.
        tensor: String,
        /// Why, and the cure.
        reason: &'static str,
    },
    /// Two tensors for one role, under two naming schemes.
    #[error("{layer}: tensors {tensor} and {other} are the same projection under two names: remove one")]
    NamedTwice {
        /// The layer.
        layer: LayerIdx,
        /// One name.
        tensor: String,
        /// The other.
        other: String,
    },
    /// Another shape.
    #[error("tensor {tensor} in {path} has shape {found:?}, expected {wanted:?} ({meaning}){hint}")]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape wanted.
        wanted: Box<[usize]>,
        /// The shape found.
        found: Box<[usize]>,
        /// What the dimensions stand for.
        meaning: &'static str,
        /// A likely cause, from a colon on.
        hint: &'static str,
    },
    /// Another dtype.
    #[error("tensor {tensor} in {path} has dtype {found}, expected {wanted}{hint}")]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What would do.
        wanted: String,
        /// The dtype found.
        found: String,
        /// A likely cause or cure, from a colon on.
        hint: &'static str,
    },
    /// A width that blocks of 16 do not divide.
    #[error(
        "{layer}: the experts' {dimension} is {found}, and NVFP4 has one scale a block of 16 along it: {found} is not a multiple of 16"
    )]
    BlockWidth {
        /// The layer.
        layer: LayerIdx,
        /// Which width.
        dimension: &'static str,
        /// Its value.
        found: usize,
    },
    /// Packed weights that no config file declares.
    #[error(
        "{layer}: module {module} is stored in packed form (U8), but {declaration}: restore the hf_quant_config.json that belongs to \
         these tensors"
    )]
    Undeclared {
        /// The layer.
        layer: LayerIdx,
        /// The module.
        module: String,
        /// What the config files say.
        declaration: String,
    },
    /// A projection in another format than its expert's others.
    #[error("{layer}: {module} is stored in {found}, the other projections of the expert in {wanted}")]
    MixedExpert {
        /// The layer.
        layer: LayerIdx,
        /// The module.
        module: String,
        /// The others' format.
        wanted: &'static str,
        /// Its format.
        found: &'static str,
    },
    /// Some experts have no activation scale.
    #[error(
        "{layer}: {num_missing} of {num_projections} NVFP4 projections have no input_scale while the others have one; {expert} lacks \
         {tensors}: calibrate again so that every expert is reached, or remove all input_scale tensors to run weights only"
    )]
    MissingInputScale {
        /// The layer.
        layer: LayerIdx,
        /// The first such expert.
        expert: ExpertIdx,
        /// The tensors that this expert lacks.
        tensors: String,
        /// Projections without one.
        num_missing: usize,
        /// NVFP4 projections of the layer.
        num_projections: usize,
    },
    /// As `MissingInputScale`, for the shared expert.
    #[error(
        "{layer}: the shared expert lacks {tensors} while its other projections have an input_scale: calibrate again, or remove them all"
    )]
    MissingSharedInputScale {
        /// The layer.
        layer: LayerIdx,
        /// The missing tensors.
        tensors: String,
    },
    /// A part that the config does not know, or the tensors lack.
    #[error("{layer}: config.json says {config}, but the checkpoint {found} ({tensor})")]
    PartMismatch {
        /// The layer.
        layer: LayerIdx,
        /// What the config says.
        config: &'static str,
        /// has or lacks
        found: &'static str,
        /// The tensor in question.
        tensor: String,
    },
}

impl Classify for LayoutError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}
