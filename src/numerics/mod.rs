//! Number formats, activations and the measures that results are judged by.
//!
//! Pure functions on plain values: knows nothing of models, files or ranks.

pub mod activation;
pub mod nvfp4;
