//! Why a sample is not written.

use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use crate::exit::{Classify, Exit};

/// Why a sample is not written.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// A size of nothing.
    #[error("{name} is 0; a model has at least 1")]
    Zero {
        /// The option.
        name: &'static str,
    },
    /// NVFP4 scales blocks of 16.
    #[error("{name} is {size}, which is no multiple of NVFP4's blocks of 16; use {nearest}, or --format bf16")]
    NotBlocks {
        /// The option.
        name: &'static str,
        /// What was asked for.
        size: usize,
        /// The next size that works.
        nearest: usize,
    },
    /// More slots than experts.
    #[error("top-k is {num_topk} but there are {num_experts} experts; lower --topk, or ask for more experts")]
    TopK {
        /// Slots a token.
        num_topk: usize,
        /// Routed experts.
        num_experts: usize,
    },
    /// A scale that leaves a part of an expert.
    #[error("{num_experts} experts do not divide by {divisor}; choose a --scale that divides them, or give --experts")]
    Scale {
        /// Routed experts of the model.
        num_experts: usize,
        /// The scale's denominator.
        divisor: usize,
    },
    /// A latent where the model has none.
    #[error("{geometry} has no latent; leave out --latent, or choose --geometry kimi-k3")]
    NoLatent {
        /// The geometry.
        geometry: &'static str,
    },
    /// The directory holds something.
    #[error("{dir} exists and is not empty; name a new directory, or empty it first")]
    NotEmpty {
        /// The directory.
        dir: PathBuf,
    },
    /// The disk is full.
    #[error(
        "no space left for {path}: the sample takes {needed_bytes} bytes; free some, name another disk, or ask for fewer --layers or --experts"
    )]
    NoSpace {
        /// What was being written.
        path: PathBuf,
        /// Bytes of the whole sample.
        needed_bytes: u64,
        /// What the system says.
        #[source]
        source: Error,
    },
    /// Something cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// What.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: Error,
    },
}

impl SampleError {
    /// What became of writing `path`.
    pub(super) fn of_write(path: &Path, source: Error) -> Self {
        let path = path.to_path_buf();
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Self::NoSpace { path, needed_bytes: 0, source },
            _ => Self::Write { path, source },
        }
    }

    /// Names the size of the whole, where space ran out.
    pub(super) fn with_total(self, needed_bytes: u64) -> Self {
        match self {
            Self::NoSpace { path, source, .. } => Self::NoSpace { path, needed_bytes, source },
            other => other,
        }
    }
}

impl Classify for SampleError {
    fn exit(&self) -> Exit {
        match self {
            Self::NoSpace { .. } => Exit::Environment,
            _ => Exit::BadInput,
        }
    }
}
