//! Experts on NVIDIA GPUs.

pub mod pack;
