//! MPI between the GPUs of ranks: through pinned memory of the hosts. Works wherever MPI does, also between ranks that share
//! a GPU.

use std::cell::RefCell;

use super::carrier::{Carrier, CarryError, Runs};
use crate::config::Transport;
use crate::cuda::{DeviceBuffer, PinnedBuffer};
use crate::gpu::{Gpu, GpuError, Mark};
use crate::world::{Parts, World};

/// This rank's end.
#[derive(Debug)]
pub struct Staged {
    buffers: RefCell<Buffers>,
}

/// What leaves and what has arrived, without a rank's own; grown as exchanges need it.
#[derive(Debug)]
struct Buffers {
    leaving: PinnedBuffer<u8>,
    arrived: PinnedBuffer<u8>,
    mark: Mark,
}

impl Staged {
    /// Between the GPUs of a session's ranks.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let empty = || PinnedBuffer::zeroed(gpu.device(), 0);
        let buffers = Buffers { leaving: empty()?, arrived: empty()?, mark: gpu.mark()? };
        Ok(Self { buffers: RefCell::new(buffers) })
    }
}

fn grow(gpu: &Gpu, buffer: &mut PinnedBuffer<u8>, len: usize) -> Result<(), GpuError> {
    if buffer.len() < len {
        *buffer = PinnedBuffer::zeroed(gpu.device(), len)?;
    }
    Ok(())
}

impl Carrier for Staged {
    fn transport(&self) -> Transport {
        Transport::Host
    }

    fn exchange(
        &self,
        world: &World,
        lane: &Gpu,
        sent: Runs<'_, &DeviceBuffer<u8>>,
        arrived: Runs<'_, &mut DeviceBuffer<u8>>,
        max_run_bytes: usize,
    ) -> Result<(), CarryError> {
        let rank = world.rank().index();
        let mut buffers = self.buffers.borrow_mut();
        let Buffers { leaving, arrived: staged, mark } = &mut *buffers;
        let stream = lane.stream();
        // A rank's own run is left out: what lies before it comes first, and at once behind that what lies after it.
        let (own, len) = (sent.range(rank), sent.counts.iter().sum::<usize>());
        let (before, after) = (own.start, len - own.end);
        grow(lane, leaving, before + after)?;
        // SAFETY: `leaving` is read below when the mark has been waited for. Freeing pinned memory waits for the device.
        unsafe { sent.buffer.download_pinned(stream, 0, &mut leaving[..before]) }?;
        // SAFETY: as above.
        unsafe { sent.buffer.download_pinned(stream, own.end, &mut leaving[before..before + after]) }?;
        lane.move_mark(mark)?;
        // The mark is behind the uploads of the exchange before, also where another lane had it: lanes follow each other from step
        // to step. `staged` may be overwritten.
        lane.wait(world, "copy of rows from the GPU", mark)?;
        let without_own = |counts: &[usize]| -> Vec<usize> {
            counts.iter().enumerate().map(|(peer, &count)| if peer == rank { 0 } else { count }).collect()
        };
        let (send_counts, recv_counts) = (without_own(sent.counts), without_own(arrived.counts));
        let own = arrived.range(rank);
        let (before, after) = (own.start, arrived.counts.iter().sum::<usize>() - own.end);
        grow(lane, staged, before + after)?;
        let num_leaving = send_counts.iter().sum();
        let send = Parts { bytes: &leaving[..num_leaving], counts: &send_counts };
        world.all_to_all_bytes_into(send, (&mut staged[..before + after], &recv_counts), max_run_bytes);
        // SAFETY: `staged` is written in the next exchange, behind its mark. Freeing pinned memory waits for the device.
        unsafe { arrived.buffer.upload_pinned(stream, 0, &staged[..before]) }?;
        // SAFETY: as above.
        unsafe { arrived.buffer.upload_pinned(stream, own.end, &staged[before..before + after]) }?;
        Ok(())
    }
}
