//! The door to the CUDA driver: the only place that names `cudarc`. Beside it lies cublasLt ([`blas`]).
//!
//! The driver is loaded when somebody asks for it, never linked: a machine without one, or with one that lacks a function
//! used here, is a fact ([`Devices::probe`]) and not a panic. What is here is what kernels need and no more: a device, its
//! streams, typed buffers, modules and their functions, events, graphs. It knows nothing of experts, layers, ranks or of
//! how a kernel came to be compiled.
//!
//! *Invariant:* a call makes the device's context current first, so that any thread may make it.

pub mod blas;
mod buffer;
mod device;
mod error;
mod graph;
mod ipc;
mod library;
mod module;
mod pinned;
mod probe;
mod stream;

pub use buffer::{DeviceBuffer, held_bytes, poison_fresh_memory};
pub use device::{Device, MemoryInfo};
pub use error::CudaError;
pub use graph::Graph;
pub use ipc::{PeerMemory, SHARED_GRANULE_BYTES, SharedHandle};
pub use module::{Function, FunctionAttributes, LaunchShape, Module, num_modules_loaded};
pub use pinned::PinnedBuffer;
pub use probe::{CudaVersion, DeviceFacts, Devices, Driver};
pub use stream::{Event, Stream};
