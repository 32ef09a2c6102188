//! What goes wrong between this process and NCCL.

use crate::cuda::CudaError;
use crate::exit::{Classify, Exit};

/// Why a call of this door failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NcclError {
    /// No library can be loaded.
    #[error(
        "no NCCL{}: {}; install it, name it with LOCKSTEP_NCCL, or set dispatch.transport: host",
        setting.as_deref().map_or(String::new(), |setting| format!(" where LOCKSTEP_NCCL={setting} says")),
        tried.join("; ")
    )]
    NotFound {
        /// Every name tried, with the loader's words.
        tried: Vec<String>,
        /// `LOCKSTEP_NCCL`.
        setting: Option<String>,
    },
    /// The library lacks functions.
    #[error("{library} lacks {}; install NCCL {oldest} or later, or name another with LOCKSTEP_NCCL", missing.join(", "))]
    Lacks {
        /// The library.
        library: String,
        /// Names of the functions.
        missing: Vec<&'static str>,
        /// The oldest that has them all.
        oldest: &'static str,
    },
    /// A call failed; also one that failed asynchronously before it.
    #[error("{operation}: NCCL says {text} ({code}){}", detail_text(detail))]
    Call {
        /// What was being done.
        operation: &'static str,
        /// The number of the result.
        code: i32,
        /// NCCL's words for it.
        text: String,
        /// What NCCL last logged about it; empty where nothing.
        detail: String,
        /// Another rank or its network is at fault, as far as NCCL knows.
        is_remote: bool,
    },
    /// Ranks did not join in time.
    #[error(
        "the ranks' GPUs have not joined within {limit_s} s: some rank has failed, or their network does not let NCCL \
         through (NCCL_DEBUG=INFO shows it; NCCL_SOCKET_IFNAME names the interface); timeouts.start_s is twice the limit"
    )]
    Late {
        /// The limit.
        limit_s: u64,
    },
    /// What rank 0 told is no id.
    #[error("rank 0 sent {len} bytes to meet by, which are no NCCL id: a bug")]
    NoId {
        /// How many.
        len: usize,
    },
    /// A peer's bytes are not what it sent.
    #[error(
        "rank {peer} sent its number over NCCL, and another arrived; set dispatch.transport: host, and test the GPUs"
    )]
    Garbled {
        /// The rank.
        peer: usize,
    },
    /// Used after it had failed, or was closed.
    #[error("the ranks' communicator was given up before: a bug")]
    GivenUp,
    /// The GPU or its driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

fn detail_text(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(": {detail}") }
}

impl Classify for NcclError {
    fn exit(&self) -> Exit {
        match self {
            Self::Cuda(error) => error.exit(),
            Self::Call { is_remote: true, .. } => Exit::PeerFailed,
            Self::NoId { .. } | Self::GivenUp => Exit::Bug,
            Self::Late { .. } => Exit::PeerFailed,
            Self::NotFound { .. } | Self::Lacks { .. } | Self::Call { .. } | Self::Garbled { .. } => Exit::Environment,
        }
    }
}
