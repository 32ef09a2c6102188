//! Who carries bytes between ranks. Packing and unpacking are the same for all of them: see [`super::transport`].

use std::fmt;

use crate::config::{Choice, Transport};
use crate::exit::{Classify, Exit};
use crate::nccl::NcclError;
use crate::world::{Parts, World};

/// Bytes did not arrive. The peers of the rank that sees this may still wait for it: it has to end the job.
#[derive(Debug, thiserror::Error)]
pub enum CarryError {
    /// NCCL or the GPU failed.
    #[error("tokens can't travel over nccl")]
    Nccl(#[source] Box<NcclError>),
}

impl From<NcclError> for CarryError {
    fn from(error: NcclError) -> Self {
        Self::Nccl(Box::new(error))
    }
}

impl Classify for CarryError {
    fn exit(&self) -> Exit {
        match self {
            Self::Nccl(error) => error.exit(),
        }
    }
}

/// Carries bytes between ranks. All ranks of a session use the same.
pub trait Carrier: fmt::Debug {
    /// Its name in deployments and reports.
    fn transport(&self) -> Transport;

    /// Sends each rank its run and returns the runs received, in rank order; collective. `recv_counts` are the lengths of
    /// those, and `max_run_bytes`, equal on all ranks, bounds every run between any two.
    ///
    /// # Errors
    /// If a device or a network fails. A peer that does not come ends the job at the phase's limit.
    fn all_to_all_bytes(
        &self,
        world: &World,
        send: Parts<'_>,
        recv_counts: &[usize],
        max_run_bytes: usize,
    ) -> Result<Vec<u8>, CarryError>;

    /// Lets go of what it holds with other ranks. Right once every rank is through with it, as behind a barrier, or where
    /// one could not build its own.
    fn close(&self) {}

    /// Its name.
    fn name(&self) -> &'static str {
        self.transport().name()
    }
}

/// MPI between hosts: works anywhere.
#[derive(Debug, Clone, Copy)]
pub struct Mpi;

impl Carrier for Mpi {
    fn transport(&self) -> Transport {
        Transport::Host
    }

    fn all_to_all_bytes(
        &self,
        world: &World,
        send: Parts<'_>,
        recv_counts: &[usize],
        max_run_bytes: usize,
    ) -> Result<Vec<u8>, CarryError> {
        Ok(world.all_to_all_bytes(send, recv_counts, max_run_bytes))
    }
}
