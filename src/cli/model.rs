//! What `--model` names: a checkpoint's directory, of which headers are read alone, or a geometry.

use std::path::Path;

use clap::ValueEnum;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::exit::{Classify, Exit};
use crate::sample::Geometry;

/// A model without its weights.
#[derive(Debug)]
pub enum Model {
    /// A checkpoint whose headers were read.
    Checkpoint(Box<Checkpoint>),
    /// The published sizes of a family.
    Geometry(Geometry),
}

/// Why there is no such model.
#[derive(Debug, thiserror::Error)]
pub enum ModelArgError {
    /// Neither a directory nor a geometry.
    #[error(
        "--model {model} is neither a directory nor a geometry; give a checkpoint's directory or one of {}",
        geometries()
    )]
    Unknown {
        /// What was given.
        model: String,
    },
    /// The checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

impl Classify for ModelArgError {
    fn exit(&self) -> Exit {
        match self {
            Self::Unknown { .. } => Exit::BadInput,
            Self::Checkpoint(error) => error.exit(),
        }
    }
}

fn geometries() -> String {
    Geometry::value_variants().iter().map(|geometry| geometry.name()).collect::<Vec<_>>().join(", ")
}

impl Model {
    /// Opens what `text` names.
    ///
    /// # Errors
    /// If it names nothing, or the checkpoint's headers are refused.
    pub fn open(text: &str) -> Result<Self, ModelArgError> {
        let path = Path::new(text);
        if path.is_dir() {
            return Ok(Self::Checkpoint(Box::new(Checkpoint::open(path)?)));
        }
        let unknown = |_| ModelArgError::Unknown { model: text.to_owned() };
        Geometry::from_str(text, true).map(Self::Geometry).map_err(unknown)
    }
}
