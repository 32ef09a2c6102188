//! What can go wrong with a session's GPU.

use crate::cuda::CudaError;
use crate::exit::{Classify, Exit};
use crate::jit::NvrtcError;

/// Why the GPU or a kernel can't be had, or failed.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// The GPU or its driver.
    #[error(transparent)]
    Cuda(Box<CudaError>),
    /// The compiler of kernels.
    #[error(transparent)]
    Compile(Box<NvrtcError>),
    /// A kernel that the session did not get, though it follows from the layer.
    #[error("{kernel} was not prepared, a bug: what a layer needs and what is loaded for it differ")]
    NotPrepared {
        /// What is missing.
        kernel: String,
    },
    /// A GPU without kernels.
    #[error(
        "no kernel is made for compute capability {found} ({name}); choose a backend that runs on the host's cores"
    )]
    Capability {
        /// The GPU's name.
        name: String,
        /// What it has.
        found: String,
    },
}

impl From<CudaError> for GpuError {
    fn from(error: CudaError) -> Self {
        Self::Cuda(Box::new(error))
    }
}

impl From<NvrtcError> for GpuError {
    fn from(error: NvrtcError) -> Self {
        Self::Compile(Box::new(error))
    }
}

impl Classify for GpuError {
    fn exit(&self) -> Exit {
        match self {
            Self::Cuda(error) => error.exit(),
            Self::Compile(error) => error.exit(),
            Self::NotPrepared { .. } => Exit::Bug,
            Self::Capability { .. } => Exit::Environment,
        }
    }
}
