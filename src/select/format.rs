//! A layer's format when it is loaded against the one it was selected for.

use super::problem::Quantisation;
use super::resolve::Selection;
use crate::exit::{Classify, Exit};
use crate::ids::LayerIdx;

/// A layer that is not what was selected for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The format moved after selection.
    #[error(
        "{layer} was selected as {selected}, but holds {found}; the checkpoint changed while it was read, or its config \
         does not describe it: start again, and correct the config if that does not help"
    )]
    Moved {
        /// The layer.
        layer: LayerIdx,
        /// What it was selected for.
        selected: Quantisation,
        /// What it is.
        found: Quantisation,
    },
    /// Nothing was selected for the layer.
    #[error("nothing was selected for {layer}, which holds {found}; select it before it is loaded")]
    NotSelected {
        /// The layer.
        layer: LayerIdx,
        /// What it is.
        found: Quantisation,
    },
}

impl Classify for FormatError {
    fn exit(&self) -> Exit {
        match self {
            Self::Moved { .. } => Exit::BadInput,
            Self::NotSelected { .. } => Exit::Bug,
        }
    }
}

/// Checks that a layer that is loaded holds what it was selected for.
///
/// # Errors
/// If its format is another, or it was not selected.
pub fn check_format(selection: &Selection, layer: LayerIdx, found: &Quantisation) -> Result<(), FormatError> {
    match selection.layer(layer).map(|selected| &selected.problem.quantisation) {
        Some(selected) if selected == found => Ok(()),
        Some(selected) => Err(FormatError::Moved { layer, selected: selected.clone(), found: found.clone() }),
        None => Err(FormatError::NotSelected { layer, found: found.clone() }),
    }
}
