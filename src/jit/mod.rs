//! Kernels compiled at run time: what is to be compiled, under which key, by which compiler, with what result.
//!
//! A [`KernelRequest`] says everything that decides a kernel's machine code but the compiler; with the compiler's identity it
//! has a [`Key`]. It knows nothing of GPUs: a cubin is made and kept on machines without one.

mod arch;
pub mod cache;
pub mod kernels;
mod key;
mod nvrtc;
pub mod prepare;
mod request;
mod source;
#[cfg(test)]
mod testing;
mod usage;

pub use arch::{Arch, ParseArchError};
pub use key::{Key, KeyParts};
pub use nvrtc::{Compiled, Compiler, CompilerId, NvrtcError, num_compiled};
pub use prepare::{JitError, PrepareSettings, Prepared, prepare};
pub use request::{Define, KernelRequest};
pub use source::{Header, KernelSource};
pub use usage::Usage;
