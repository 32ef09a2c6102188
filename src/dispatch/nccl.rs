//! NCCL between the GPUs of ranks, as a carrier of bytes that lie on hosts.
//!
//! Tokens are packed and unpacked on the host in this version: they cross PCIe to the sender's GPU, go from GPU to GPU, and
//! cross PCIe again. A rank's own tokens stay on its host.

use std::cell::RefCell;
use std::time::Duration;

use super::carrier::{Carrier, CarryError};
use super::staging::{Piece, Staging};
use crate::config::Transport;
use crate::cuda::{DeviceBuffer, PinnedBuffer};
use crate::gpu::Gpu;
use crate::nccl::{Communicator, Library, NcclError, Place, Progress, Transfer, UniqueId};
use crate::world::{Exchanged, Parts, World};

/// What a rank joins with, from its own means alone.
#[derive(Debug, Clone)]
pub struct NcclOptions {
    /// Its GPU.
    pub gpu: Gpu,
    /// NCCL, or the directory that it lies in; absent: where the loader finds it.
    pub library: Option<String>,
}

/// All that a rank needs before it can join the others. Fails here alone, before any other rank waits.
#[derive(Debug)]
pub struct Prepared {
    library: Library,
    /// What the ranks meet by: rank 0's.
    id: Option<UniqueId>,
    staging: Staging,
    buffers: Buffers,
    gpu: Gpu,
}

/// Memory for one round, on the device and pinned on the host.
#[derive(Debug)]
struct Buffers {
    send: DeviceBuffer<u8>,
    receive: DeviceBuffer<u8>,
    host_send: PinnedBuffer<u8>,
    host_receive: PinnedBuffer<u8>,
}

impl Prepared {
    /// Loads the library and takes the memory; rank 0 makes the id.
    ///
    /// # Errors
    /// If there is no NCCL, or not the memory.
    pub fn new(world: &World, options: &NcclOptions, staging: Staging) -> Result<Self, NcclError> {
        let library = Library::load(options.library.as_deref())?;
        let device = options.gpu.device();
        let len = staging.buffer_bytes();
        let buffers = Buffers {
            send: DeviceBuffer::uninitialised(device, len)?,
            receive: DeviceBuffer::uninitialised(device, len)?,
            host_send: PinnedBuffer::zeroed(device, len)?,
            host_receive: PinnedBuffer::zeroed(device, len)?,
        };
        let id = if world.is_root() { Some(UniqueId::new(&library)?) } else { None };
        Ok(Self { library, id, staging, buffers, gpu: options.gpu.clone() })
    }

    /// What rank 0 has to tell the others; empty on those.
    #[must_use]
    pub fn told(&self) -> Vec<u8> {
        self.id.map_or_else(Vec::new, |id| id.bytes().to_vec())
    }

    /// Joins the ranks that were told the same by rank 0, within `limit`; every rank has to call it.
    ///
    /// # Errors
    /// If NCCL fails, or some rank does not come.
    pub fn join(self, world: &World, told: &[u8], limit: Duration) -> Result<NcclCarrier, NcclError> {
        let Self { library, staging, buffers, gpu, .. } = self;
        let id = UniqueId::from_bytes(told).ok_or(NcclError::NoId { len: told.len() })?;
        let place = Place { rank: world.rank().index(), num_ranks: world.size() };
        let communicator = Communicator::begin(&library, id, place, gpu.stream())?;
        let joined = world.poll_within("joining of GPUs over NCCL", limit, || {
            match communicator.progress("joining the ranks' GPUs") {
                Ok(Progress::Pending) => None,
                Ok(Progress::Done) => Some(Ok(())),
                Err(error) => Some(Err(error)),
            }
        });
        match joined {
            Some(Ok(())) => {
                let (communicator, buffers) = (RefCell::new(Some(communicator)), RefCell::new(buffers));
                let carrier = NcclCarrier { communicator, buffers, staging, gpu };
                carrier.greet(world)?;
                tracing::debug!(library = library.found_as(), version = library.version(), "joined over NCCL");
                Ok(carrier)
            }
            Some(Err(error)) => {
                communicator.abort();
                Err(error)
            }
            None => {
                communicator.abort();
                Err(NcclError::Late { limit_s: limit.as_secs() })
            }
        }
    }
}

/// This rank's end.
#[derive(Debug)]
pub struct NcclCarrier {
    /// There until it is given up.
    communicator: RefCell<Option<Communicator>>,
    buffers: RefCell<Buffers>,
    staging: Staging,
    gpu: Gpu,
}

impl NcclCarrier {
    /// Gives the communicator up.
    fn give_up(&self) {
        if let Some(communicator) = self.communicator.borrow_mut().take() {
            communicator.abort();
        }
    }

    /// Sends every rank this one's number and checks theirs. NCCL connects two ranks at the first bytes between them, 0.27 s
    /// (two H200, 2026-11-30): here they are connected, or fail to be, before any rank is in a step.
    fn greet(&self, world: &World) -> Result<(), NcclError> {
        let mine = (world.rank().index() as u64).to_le_bytes();
        let counts = vec![mine.len(); world.size()];
        let (received, _) =
            self.exchange(world, Parts { bytes: &mine.repeat(world.size()), counts: &counts }, &counts)?;
        let is_wrong = |(peer, found): (usize, &[u8])| found != (peer as u64).to_le_bytes();
        match received.chunks_exact(mine.len()).enumerate().position(is_wrong) {
            None => Ok(()),
            Some(peer) => {
                self.give_up();
                Err(NcclError::Garbled { peer })
            }
        }
    }

    /// All rounds: what arrived, and what went to and came from others.
    fn exchange(
        &self,
        world: &World,
        send: Parts<'_>,
        recv_counts: &[usize],
    ) -> Result<(Vec<u8>, Exchanged), NcclError> {
        let rank = world.rank().index();
        let mut received = vec![0u8; recv_counts.iter().sum()];
        let start = |counts: &[usize]| -> usize { counts[..rank].iter().sum() };
        let (from, to, len) = (start(send.counts), start(recv_counts), recv_counts[rank]);
        // This rank's own do not travel.
        received[to..to + len].copy_from_slice(&send.bytes[from..from + len]);
        let num_rounds = self.staging.num_rounds(rank, [send.counts, recv_counts]);
        let mut carried = Exchanged { rounds: num_rounds as u64, ..Exchanged::default() };
        for round in 0..num_rounds {
            let pieces = [send.counts, recv_counts].map(|counts| self.staging.pieces(rank, counts, round));
            let bytes_of = |pieces: &[Piece]| -> u64 { pieces.iter().map(|piece| piece.bytes.len() as u64).sum() };
            carried.sent_bytes += bytes_of(&pieces[0]);
            carried.received_bytes += bytes_of(&pieces[1]);
            if let Err(error) = self.round(world, send.bytes, &mut received, [&pieces[0], &pieces[1]]) {
                // What was begun would never end, and whatever waits for the device with it.
                self.give_up();
                return Err(error);
            }
        }
        Ok((received, carried))
    }

    /// One round: to the device, from device to device, to the host.
    fn round(
        &self,
        world: &World,
        send: &[u8],
        received: &mut [u8],
        [sends, receives]: [&[Piece]; 2],
    ) -> Result<(), NcclError> {
        let communicator = self.communicator.borrow();
        let communicator = communicator.as_ref().ok_or(NcclError::GivenUp)?;
        let mut buffers = self.buffers.borrow_mut();
        let Buffers { send: device_send, receive: device_receive, host_send, host_receive } = &mut *buffers;
        for piece in sends {
            host_send[piece.staged.clone()].copy_from_slice(&send[piece.bytes.clone()]);
        }
        let end = |pieces: &[Piece]| pieces.last().map_or(0, |piece| piece.staged.end);
        // SAFETY: `host_send` is written above in a later round only, which comes when the stream is done. Where it fails, no
        // round comes any more, and freeing pinned memory waits for the device.
        unsafe { device_send.upload_pinned(self.gpu.stream(), 0, &host_send[..end(sends)]) }?;
        let transfers = |pieces: &[Piece]| -> Vec<Transfer> {
            pieces.iter().map(|piece| Transfer { peer: piece.peer, bytes: piece.staged.clone() }).collect()
        };
        let (sends, arriving) = (transfers(sends), transfers(receives));
        communicator.begin_transfers(self.gpu.stream(), (device_send, &sends), (device_receive, &arriving))?;
        // The stream has the transfers only when NCCL says so: what is queued before would run ahead of them.
        self.watch(world, communicator, || Ok(true))?;
        // SAFETY: `host_receive` is read below, when the stream is done; else as `host_send`.
        unsafe { device_receive.download_pinned(self.gpu.stream(), 0, &mut host_receive[..end(receives)]) }?;
        self.watch(world, communicator, || Ok(self.gpu.stream().is_done()?))?;
        for piece in receives {
            received[piece.bytes.clone()].copy_from_slice(&host_receive[piece.staged.clone()]);
        }
        Ok(())
    }

    /// Waits until NCCL has nothing pending and `done` says yes, under the phase's limit.
    fn watch(
        &self,
        world: &World,
        communicator: &Communicator,
        done: impl Fn() -> Result<bool, NcclError>,
    ) -> Result<(), NcclError> {
        world.poll("NCCL exchange of rows", || match communicator.progress("exchanging bytes between GPUs") {
            Ok(Progress::Pending) => None,
            Ok(Progress::Done) => match done() {
                Ok(false) => None,
                Ok(true) => Some(Ok(())),
                Err(error) => Some(Err(error)),
            },
            Err(error) => Some(Err(error)),
        })
    }
}

impl Carrier for NcclCarrier {
    fn transport(&self) -> Transport {
        Transport::Nccl
    }

    fn close(&self) {
        self.give_up();
    }

    fn all_to_all_bytes(
        &self,
        world: &World,
        send: Parts<'_>,
        recv_counts: &[usize],
        _max_run_bytes: usize,
    ) -> Result<Vec<u8>, CarryError> {
        let (received, carried) = self.exchange(world, send, recv_counts)?;
        world.count_carried(carried);
        Ok(received)
    }
}
