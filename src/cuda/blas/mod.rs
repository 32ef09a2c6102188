//! cublasLt: dense products of bf16 matrices on a device.
//!
//! The library is loaded when somebody asks for it, never linked: a machine without one, or with one that lacks a function
//! used here, is a value that can be printed. Functions are looked up one by one, as NCCL's are, because `cudarc` panics at
//! a missing one.
//!
//! *Invariant:* a product's algorithm is chosen once, when its weights are loaded, from shapes that all ranks share. It
//! splits no sum and has no workspace, and it serves every number of rows: what a row becomes does not follow from how many
//! there are.

mod error;
mod library;
mod matmul;

pub use error::BlasError;
pub use library::Library;
pub use matmul::{Blas, Matmul, MatmulShape};
