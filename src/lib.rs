//! Lockstep runs the mixture-of-experts layers of large models across MPI ranks.
//!
//! The modules, in reading order; imports point to earlier lines only.

pub mod backend;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod env;
pub mod exit;
pub mod ids;
pub mod model;
pub mod numerics;
pub mod routing;
pub mod sample;
pub mod select;
