//! Who carries bytes between the devices of ranks. Packing and unpacking are the same for all of them: see [`super::device`].

use std::fmt;

use crate::config::{Choice, Transport};
use crate::cuda::{CudaError, DeviceBuffer};
use crate::dispatch::counts::Miscount;
use crate::dispatch::nvlink::NvlinkError;
use crate::dispatch::passing::ForwardError;
use crate::exit::{Classify, Exit, Known};
use crate::gpu::{Gpu, GpuError};
use crate::nccl::NcclError;
use crate::world::World;

/// Tokens or rows did not arrive. The peers of the rank that sees this may still wait for it: it has to end the job.
#[derive(Debug, thiserror::Error)]
pub enum CarryError {
    /// NCCL failed.
    #[error("tokens can't travel over nccl")]
    Nccl(#[source] Box<NcclError>),
    /// Ranks wait in vain for what others store, or can't store it.
    #[error("tokens can't travel over nvlink")]
    Nvlink(#[source] Box<NvlinkError>),
    /// This rank's GPU failed.
    #[error("tokens can't be packed or unpacked")]
    Gpu(#[source] Box<GpuError>),
    /// This rank's GPU is not to be trusted.
    #[error(transparent)]
    Miscount(#[from] Miscount),
    /// Tokens were not passed on.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// What a step that no host followed has found differs from what it was told.
    #[error(
        "the device found {found_rows} rows of {found_tokens} tokens where it was told {num_rows} of {num_tokens}: its results \
         can't be trusted; report this with the GPU's name and driver"
    )]
    Unsettled {
        /// Tokens that the device unpacked.
        found_tokens: usize,
        /// Rows that it computed.
        found_rows: usize,
        /// Tokens that ranks told.
        num_tokens: usize,
        /// Rows that ranks told.
        num_rows: usize,
    },
}

impl From<NcclError> for CarryError {
    fn from(error: NcclError) -> Self {
        Self::Nccl(Box::new(error))
    }
}

impl From<NvlinkError> for CarryError {
    fn from(error: NvlinkError) -> Self {
        Self::Nvlink(Box::new(error))
    }
}

impl From<GpuError> for CarryError {
    fn from(error: GpuError) -> Self {
        Self::Gpu(Box::new(error))
    }
}

impl From<CudaError> for CarryError {
    fn from(error: CudaError) -> Self {
        GpuError::from(error).into()
    }
}

impl Classify for CarryError {
    fn exit(&self) -> Exit {
        match self {
            Self::Nccl(error) => error.exit(),
            Self::Nvlink(error) => error.exit(),
            Self::Gpu(error) => error.exit(),
            Self::Miscount(_) | Self::Unsettled { .. } => Exit::WrongResult,
            Self::Forward(error) => error.exit(),
        }
    }

    fn known(&self) -> Known {
        match self {
            Self::Forward(error) => error.known(),
            Self::Nccl(_) | Self::Nvlink(_) | Self::Gpu(_) | Self::Miscount(_) | Self::Unsettled { .. } => Known::Here,
        }
    }
}

/// Runs of bytes on a device, one a rank, in rank order.
#[derive(Debug)]
pub struct Runs<'a, Buffer> {
    /// All runs, one behind the other.
    pub buffer: Buffer,
    /// `[num_ranks]` length of each.
    pub counts: &'a [usize],
}

impl<Buffer> Runs<'_, Buffer> {
    /// Where the run of `rank` lies.
    pub fn range(&self, rank: usize) -> std::ops::Range<usize> {
        let start = self.counts[..rank].iter().sum();
        start..start + self.counts[rank]
    }

    /// Bytes of all runs but that of `rank`.
    pub fn bytes_of_others(&self, rank: usize) -> u64 {
        (self.counts.iter().sum::<usize>() - self.counts[rank]) as u64
    }
}

/// Carries bytes between the devices of ranks. All ranks of a session use the same.
pub trait Carrier: fmt::Debug {
    /// Its name in deployments and reports.
    fn transport(&self) -> Transport;

    /// Sends every other rank its run, behind what is queued in this lane of the rank's GPU, and receives theirs, so that what is
    /// queued there afterwards sees them; collective. A rank's own run stays where it is. `max_run_bytes`, equal on all ranks, bounds every
    /// run between any two.
    ///
    /// # Errors
    /// If a device or a network fails. A peer that does not come ends the job at the phase's limit, in this wait or the next.
    fn exchange(
        &self,
        world: &World,
        lane: &Gpu,
        sent: Runs<'_, &DeviceBuffer<u8>>,
        arrived: Runs<'_, &mut DeviceBuffer<u8>>,
        max_run_bytes: usize,
    ) -> Result<(), CarryError>;

    /// Lets go of what it holds with other ranks. Right once every rank is through with it, as behind a barrier, or where
    /// one could not build its own.
    fn close(&self) {}

    /// Its name.
    fn name(&self) -> &'static str {
        self.transport().name()
    }
}
