//! The only reader of checkpoints: config files, safetensors headers and memory-mapped tensor bytes.
//!
//! Knows nothing of ranks: a caller asks for the experts it owns.

pub mod tensors;
