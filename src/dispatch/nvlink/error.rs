//! What goes wrong between GPUs that store into each other's memory.

use crate::cuda::CudaError;
use crate::dispatch::region::{Alarm, MAX_PEERS};
use crate::exit::{Classify, Exit};
use crate::gpu::GpuError;
use crate::ids::Rank;

/// Why ranks can't store into each other's memory, or why what one stores does not come.
#[derive(Debug, thiserror::Error)]
pub enum NvlinkError {
    /// More ranks than tables have room for.
    #[error("nvlink connects at most {MAX_PEERS} ranks, the world has {num_ranks}")]
    TooManyRanks {
        /// Ranks of the world.
        num_ranks: usize,
    },
    /// Memory is shared between processes of one host.
    #[error("{peer} is on host {found}, this one on {own}: nvlink connects GPUs of one host")]
    OtherHost {
        /// The rank.
        peer: Rank,
        /// Its host.
        found: String,
        /// This rank's.
        own: String,
    },
    /// The two are not connected.
    #[error("{own} has no peer access to {other} of {peer}")]
    NoPeerAccess {
        /// The rank.
        peer: Rank,
        /// This rank's GPU.
        own: String,
        /// That rank's.
        other: String,
    },
    /// A handle does not open.
    #[error("the GPU memory of {peer} can't be opened ({source})")]
    Open {
        /// The rank.
        peer: Rank,
        /// What the driver says.
        #[source]
        source: CudaError,
    },
    /// What a rank told is not what it must be.
    #[error("{peer} told {len} bytes of its memory, which can't be read: a bug")]
    Untold {
        /// The rank.
        peer: Rank,
        /// How many.
        len: usize,
    },
    /// A peer's words are not what it stored.
    #[error(
        "{peer} stored its number into this rank's memory, and {found} arrived; set dispatch.transport: nccl, and test the GPUs"
    )]
    Garbled {
        /// The rank.
        peer: Rank,
        /// What lies there.
        found: u32,
    },
    /// Counts that can't be: buffers are sized by them.
    #[error(
        "{peer} told of {num_tokens} tokens and {num_rows} rows for {num_topk} slots a token: its GPU can't be trusted"
    )]
    Implausible {
        /// The rank.
        peer: Rank,
        /// Tokens that come.
        num_tokens: usize,
        /// Their rows.
        num_rows: usize,
        /// Slots of a token.
        num_topk: usize,
    },
    /// A wait was in vain.
    #[error("{0}")]
    Alarm(Alarm),
    /// The GPU.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

impl From<CudaError> for NvlinkError {
    fn from(error: CudaError) -> Self {
        Self::Gpu(error.into())
    }
}

impl Classify for NvlinkError {
    fn exit(&self) -> Exit {
        match self {
            Self::TooManyRanks { .. }
            | Self::OtherHost { .. }
            | Self::NoPeerAccess { .. }
            | Self::Open { .. }
            | Self::Garbled { .. } => Exit::Environment,
            Self::Untold { .. } => Exit::Bug,
            Self::Implausible { .. } => Exit::WrongResult,
            Self::Alarm(alarm) if alarm.is_drift() => Exit::Disagreement,
            Self::Alarm(_) => Exit::PeerFailed,
            Self::Gpu(error) => error.exit(),
        }
    }
}
