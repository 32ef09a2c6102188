//! Why a checkpoint, or a file of inputs or outputs, is refused.

use std::path::PathBuf;

use super::header_error::HeaderError;
use super::layout_error::LayoutError;
use super::scales::ScaleError;
use crate::exit::{Classify, Exit};
use crate::ids::{ExpertIdx, LayerIdx};
use crate::model::ModelError;

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The config files.
    #[error("the checkpoint's config is not one that Lockstep runs")]
    Model(#[from] ModelError),
    /// A safetensors file.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// A layer's tensors.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A scale.
    #[error(transparent)]
    Scale(#[from] ScaleError),
    /// The directory cannot be listed.
    #[error("cannot list the checkpoint directory {dir}")]
    List {
        /// The directory.
        dir: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// No config.
    #[error("{dir} has no config.json; {hint}")]
    NoConfig {
        /// The directory.
        dir: PathBuf,
        /// What was probably meant.
        hint: String,
    },
    /// A text file cannot be read.
    #[error("cannot read {path}")]
    ReadText {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A text file is longer than any of its kind.
    #[error("{path} holds {found_bytes} bytes, at most {max_bytes} are read: is it the right file?")]
    TextTooLong {
        /// The file.
        path: PathBuf,
        /// Its length.
        found_bytes: u64,
        /// The limit.
        max_bytes: u64,
    },
    /// No tensors.
    #[error("{dir} holds no *.safetensors file")]
    NoShards {
        /// The directory.
        dir: PathBuf,
    },
    /// The index is malformed.
    #[error("{path} is not a shard index (an object with a weight_map from tensor names to file names)")]
    IndexJson {
        /// The index.
        path: PathBuf,
        /// Where it went wrong.
        #[source]
        source: serde_json::Error,
    },
    /// The index points outside the directory.
    #[error(
        "{path}: weight_map names the file `{file}`; only plain file names of the checkpoint's own directory are opened"
    )]
    IndexEscapes {
        /// The index.
        path: PathBuf,
        /// As written.
        file: String,
    },
    /// The index names a tensor twice.
    #[error("{path}: weight_map names tensor {tensor} twice")]
    IndexDoubled {
        /// The index.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A shard is missing.
    #[error(
        "{file} is missing (or a link to nothing), and {path} places {num_tensors} tensors in it: finish the download"
    )]
    MissingShard {
        /// The index.
        path: PathBuf,
        /// The missing file.
        file: PathBuf,
        /// Tensors it should hold.
        num_tensors: usize,
    },
    /// Tensors are missing from a shard.
    #[error(
        "{path} lacks tensor {tensor}, which model.safetensors.index.json places there ({num_missing} such tensors): download it again"
    )]
    MissingIndexed {
        /// The shard.
        path: PathBuf,
        /// The first missing tensor.
        tensor: String,
        /// How many are missing from this shard.
        num_missing: usize,
    },
    /// Two copies of a tensor.
    #[error(
        "tensor {tensor} lies in {path} and in {other_path}, and no index says which counts: remove one of the files"
    )]
    TensorInTwoFiles {
        /// The tensor.
        tensor: String,
        /// One file.
        path: PathBuf,
        /// The other.
        other_path: PathBuf,
    },
    /// Mapping or reading a tensor failed.
    #[error("cannot read {num_bytes} bytes of tensor {tensor} from {path}")]
    ReadTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its length.
        num_bytes: u64,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A value that must be finite is not.
    #[error("tensor {tensor} in {path}: value {position} is {value}; it must be finite")]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The first such value's position.
        position: usize,
        /// The value.
        value: f32,
    },
    /// The file changed since its header was read.
    #[error("{path} shrank from {expected_bytes} to {found_bytes} bytes while it was being read")]
    Shrank {
        /// The file.
        path: PathBuf,
        /// Its length when it was opened.
        expected_bytes: u64,
        /// Its length now.
        found_bytes: u64,
    },
    /// The layer asked for is not a MoE layer.
    #[error("{layer} is not a MoE layer of this checkpoint, which has: {present}")]
    NoSuchLayer {
        /// The layer.
        layer: LayerIdx,
        /// The layers there are.
        present: String,
    },
    /// The expert asked for does not exist.
    #[error("{layer} has experts 0..{num_experts}, {expert} is not one of them")]
    NoSuchExpert {
        /// The layer.
        layer: LayerIdx,
        /// The expert.
        expert: ExpertIdx,
        /// Experts of the layer.
        num_experts: usize,
    },
    /// A tensor of an input or expected file is not there, or there are several.
    #[error("{path}: {reason}; it holds: {present}")]
    PickTensor {
        /// The file.
        path: PathBuf,
        /// What was looked for.
        reason: String,
        /// Its tensors.
        present: String,
    },
    /// A tensor of an input or expected file has another form.
    #[error("{path}: tensor {tensor} is {found}; {wanted} is needed")]
    TensorForm {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What would do.
        wanted: String,
        /// Dtype and shape found.
        found: String,
    },
    /// A value of a top-k file cannot be used.
    #[error("{path}: tensor {tensor}, token {token}, slot {slot}: {found} is not {wanted}")]
    TopkValue {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The row.
        token: usize,
        /// The column.
        slot: usize,
        /// The value.
        found: String,
        /// What would do.
        wanted: &'static str,
    },
    /// An output's length is not its shape's.
    #[error("output tensor {tensor} is {shape:?} but holds {found} values")]
    OutputShape {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Values or bytes given.
        found: usize,
    },
    /// Two outputs share a name.
    #[error("output tensor {tensor} is given twice")]
    OutputDoubled {
        /// The tensor.
        tensor: String,
    },
    /// Writing failed; the file is not there, or is the old one.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
}

impl Classify for CheckpointError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}
