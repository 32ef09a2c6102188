//! Lockstep runs the mixture-of-experts layers of large models across MPI ranks.
//!
//! The modules, in reading order; imports point to earlier lines only.

#![cfg_attr(rustfmt, rustfmt_skip)]

pub mod exit;
pub mod ids;
mod near;
#[cfg(test)]
mod random;
pub mod launched;
pub mod numerics;
pub mod routing;
pub mod model;
pub mod config;
pub mod select;
pub mod env;
pub mod host;
pub mod fault;
pub mod world;
pub mod checkpoint;
mod dylib;
pub mod cuda;
pub mod nccl;
pub mod jit;
pub mod gpu;
pub mod dispatch;
pub mod plan;
pub mod backend;
pub mod facts;
pub mod layer;
pub mod report;
pub mod sample;
pub mod cli;
