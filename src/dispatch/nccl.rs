//! NCCL between the GPUs of ranks: from device memory to device memory, in a lane of a rank's work.

use std::cell::RefCell;
use std::time::Duration;

use super::carrier::{Carrier, CarryError, Runs};
use crate::config::Transport;
use crate::cuda::DeviceBuffer;
use crate::gpu::Gpu;
use crate::nccl::{Communicator, Library, NcclError, Place, Progress, Transfer, UniqueId};
use crate::world::{Exchanged, World};

/// What a rank joins with, from its own means alone.
#[derive(Debug, Clone)]
pub struct NcclOptions {
    /// Its GPU.
    pub gpu: Gpu,
    /// NCCL, or the directory that it lies in; absent: where the loader finds it.
    pub library: Option<String>,
    /// Multiprocessors that it may take at most; absent: as it sees fit.
    pub max_multiprocessors: Option<u32>,
}

/// All that a rank needs before it can join the others. Fails here alone, before any other rank waits.
#[derive(Debug)]
pub struct Prepared {
    library: Library,
    /// What the ranks meet by: rank 0's.
    id: Option<UniqueId>,
    gpu: Gpu,
    max_multiprocessors: Option<u32>,
}

impl Prepared {
    /// Loads the library; rank 0 makes the id.
    ///
    /// # Errors
    /// If there is no NCCL.
    pub fn new(world: &World, options: &NcclOptions) -> Result<Self, NcclError> {
        let library = Library::load(options.library.as_deref())?;
        let id = if world.is_root() { Some(UniqueId::new(&library)?) } else { None };
        let NcclOptions { gpu, max_multiprocessors, .. } = options.clone();
        Ok(Self { library, id, gpu, max_multiprocessors })
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
        let Self { library, gpu, max_multiprocessors, .. } = self;
        let id = UniqueId::from_bytes(told).ok_or(NcclError::NoId { len: told.len() })?;
        let place = Place { rank: world.rank().index(), num_ranks: world.size(), max_multiprocessors };
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
                let carrier = NcclCarrier { communicator: RefCell::new(Some(communicator)), gpu };
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
        let (rank, stream) = (world.rank().index(), self.gpu.stream());
        let mine = (rank as u64).to_le_bytes();
        let counts = vec![mine.len(); world.size()];
        let sent = DeviceBuffer::from_slice(stream, &mine.repeat(world.size()))?;
        // A rank's own does not travel: it is here already.
        let mut arrived = DeviceBuffer::from_slice(stream, &mine.repeat(world.size()))?;
        let arriving = Runs { buffer: &mut arrived, counts: &counts };
        self.transfer(world, &self.gpu, &Runs { buffer: &sent, counts: &counts }, arriving)?;
        world.poll("NCCL's first bytes", || match stream.is_done() {
            Ok(false) => None,
            Ok(true) => Some(Ok(())),
            Err(error) => Some(Err(error)),
        })?;
        let received = arrived.download(stream)?;
        let is_wrong = |(peer, found): (usize, &[u8])| found != (peer as u64).to_le_bytes();
        match received.chunks_exact(mine.len()).enumerate().position(is_wrong) {
            None => Ok(()),
            Some(peer) => {
                self.give_up();
                Err(NcclError::Garbled { peer })
            }
        }
    }

    /// Hands all runs but this rank's own to the stream, as one group.
    fn transfer(
        &self,
        world: &World,
        lane: &Gpu,
        sent: &Runs<'_, &DeviceBuffer<u8>>,
        arrived: Runs<'_, &mut DeviceBuffer<u8>>,
    ) -> Result<(), NcclError> {
        let rank = world.rank().index();
        let transfers = |counts: &[usize], range: &dyn Fn(usize) -> std::ops::Range<usize>| -> Vec<Transfer> {
            let peers = counts.iter().enumerate().filter(|(peer, count)| *peer != rank && **count > 0);
            peers.map(|(peer, _)| Transfer { peer, bytes: range(peer) }).collect()
        };
        let sends = transfers(sent.counts, &|peer| sent.range(peer));
        let receives = transfers(arrived.counts, &|peer| arrived.range(peer));
        if sends.is_empty() && receives.is_empty() {
            return Ok(());
        }
        let communicator = self.communicator.borrow();
        let communicator = communicator.as_ref().ok_or(NcclError::GivenUp)?;
        communicator.begin_transfers(lane.stream(), (sent.buffer, &sends), (arrived.buffer, &receives))?;
        // The stream has the transfers only when NCCL says so: what is queued before would run ahead of them.
        world.poll("NCCL exchange of rows", || match communicator.progress("exchanging bytes between GPUs") {
            Ok(Progress::Pending) => None,
            Ok(Progress::Done) => Some(Ok(())),
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

    fn exchange(
        &self,
        world: &World,
        lane: &Gpu,
        sent: Runs<'_, &DeviceBuffer<u8>>,
        arrived: Runs<'_, &mut DeviceBuffer<u8>>,
        _max_run_bytes: usize,
    ) -> Result<(), CarryError> {
        let rank = world.rank().index();
        let (sent_bytes, received_bytes) = (sent.bytes_of_others(rank), arrived.bytes_of_others(rank));
        if let Err(error) = self.transfer(world, lane, &sent, arrived) {
            // What was begun would never end, and whatever waits for the device with it.
            self.give_up();
            return Err(error.into());
        }
        world.count_carried(Exchanged { sent_bytes, received_bytes, rounds: 1 });
        Ok(())
    }
}
