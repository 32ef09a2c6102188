//! Why there is no plan, or none that fits.

use crate::dispatch::capacity::CapacityError;
use crate::exit::{Classify, Exit};
use crate::select::SelectError;

use super::fit::Misfit;

/// Why there is no plan, or none that fits.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// More tokens than declared.
    #[error(transparent)]
    Capacity(#[from] CapacityError),
    /// A layer that can't do what is asked, or a world that can't be.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// No MoE layers.
    #[error("{model} has no MoE layers; there is nothing to plan")]
    NoLayers {
        /// The model.
        model: String,
    },
    /// More than a rank's device holds.
    #[error("{0}")]
    Memory(Box<Misfit>),
}

impl Classify for PlanError {
    fn exit(&self) -> Exit {
        match self {
            Self::Capacity(error) => error.exit(),
            Self::Select(error) => error.exit(),
            Self::NoLayers { .. } => Exit::BadInput,
            Self::Memory(_) => Exit::Environment,
        }
    }
}
