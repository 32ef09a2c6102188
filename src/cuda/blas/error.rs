//! What goes wrong between this process and cublasLt.

use super::super::error::CudaError;
use super::matmul::MatmulShape;
use crate::exit::{Classify, Exit};

/// Why a call of this door failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlasError {
    /// No library can be loaded.
    #[error(
        "no cublasLt{}: {}; install it, or name it with LOCKSTEP_CUBLASLT",
        setting.as_deref().map_or(String::new(), |setting| format!(" where LOCKSTEP_CUBLASLT={setting} says")),
        tried.join("; ")
    )]
    NotFound {
        /// Every name tried, with the loader's words.
        tried: Vec<String>,
        /// `LOCKSTEP_CUBLASLT`.
        setting: Option<String>,
    },
    /// The library lacks functions.
    #[error("{library} lacks {}; install cublasLt 12 or later, or name another with LOCKSTEP_CUBLASLT", missing.join(", "))]
    Lacks {
        /// The library.
        library: String,
        /// Names of the functions.
        missing: Vec<&'static str>,
    },
    /// A call failed.
    #[error(
        "{operation}: cublasLt {version} says {text} ({code}); to compute dense projections without it, set \
         moe.batch_invariant: true or name an empty directory with LOCKSTEP_CUBLASLT"
    )]
    Call {
        /// What was being done.
        operation: &'static str,
        /// The library's version.
        version: String,
        /// The number of the result.
        code: i32,
        /// The library's words for it.
        text: String,
    },
    /// There is no algorithm for a product.
    #[error("cublasLt {version} has no algorithm for {shape} and {} rows", shape.num_rows)]
    NoProduct {
        /// The library's version.
        version: String,
        /// The product.
        shape: MatmulShape,
    },
    /// The GPU or its driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl Classify for BlasError {
    fn exit(&self) -> Exit {
        match self {
            Self::Cuda(error) => error.exit(),
            Self::NotFound { .. } | Self::Lacks { .. } | Self::Call { .. } | Self::NoProduct { .. } => {
                Exit::Environment
            }
        }
    }
}
