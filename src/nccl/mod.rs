//! The door to NCCL: bytes between the GPUs of ranks.
//!
//! The library is loaded when somebody asks for it, never linked: a machine without one, or with one that lacks a function
//! used here, is a value that can be printed. `cudarc` has a wrapper too: it looks for `libnccl.so` alone, where the usual
//! packages hold `libnccl.so.2`, panics where it finds none, tears communicators down when they are dropped, and its errors
//! print nothing. So functions are looked up here, as NVRTC's are.
//!
//! Nothing here waits: initialisation and transfers are started, and whoever started them asks for their progress under a
//! limit of its own. It knows nothing of worlds, tokens or of what the bytes mean.

mod communicator;
mod error;
mod library;

pub use communicator::{Communicator, Place, Progress, Transfer, UniqueId};
pub use error::NcclError;
pub use library::Library;
