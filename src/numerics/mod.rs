//! Number formats, activations and the measures that results are judged by.
//!
//! Pure functions on plain values: knows nothing of models, files or ranks. Nothing here calls the system's
//! mathematics library, whose last bit differs between hosts.

pub mod activation;
pub mod budget;
pub mod e2m1;
pub mod e4m3;
pub mod metrics;
pub mod nvfp4;

#[cfg(test)]
pub(crate) mod fixtures;
