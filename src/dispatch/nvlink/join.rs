//! How ranks come to have each other's memory: each makes its own and says how it is opened; each opens the others'.

use std::time::Duration;

use super::{Functions, Nvlink, NvlinkError, State};
use crate::cuda::{Device, DeviceBuffer, PeerMemory, PinnedBuffer, SHARED_GRANULE_BYTES, SharedHandle};
use crate::dispatch::region::{ALARM_WORDS, MAX_PEERS, Region, Rooms};
use crate::gpu::Gpu;
use crate::ids::Rank;
use crate::world::World;

/// What a rank builds its end from; all but the GPU is equal on all ranks.
#[derive(Debug, Clone)]
pub struct NvlinkOptions {
    /// Its GPU.
    pub gpu: Gpu,
    /// Room for what chunks send.
    pub rooms: Rooms,
    /// The most experts that a rank has.
    pub num_local_experts: usize,
    /// How long a step waits.
    pub step_limit: Duration,
}

/// This rank's memory that others store into.
#[derive(Debug)]
pub(super) struct Own {
    pub buffer: DeviceBuffer<u8>,
    pub region: Region,
}

impl Own {
    /// Makes it, all zeros, so that it can be stored into at once.
    pub fn new(gpu: &Gpu, region: Region) -> Result<Self, NvlinkError> {
        let num_bytes = region.num_bytes().next_multiple_of(SHARED_GRANULE_BYTES);
        let buffer = DeviceBuffer::zeroed(gpu.stream(), num_bytes)?;
        gpu.stream().synchronise()?;
        Ok(Self { buffer, region })
    }

    /// What other ranks open it with.
    pub fn told(&self, world: &World) -> Result<Vec<u8>, NvlinkError> {
        let SharedHandle(handle) = self.buffer.share()?;
        let uuid = &self.buffer.device().facts().uuid;
        Ok([&handle[..], uuid.as_bytes(), b"\0", world.host().as_bytes()].concat())
    }
}

/// What a rank told of its memory.
struct Told {
    handle: SharedHandle,
    uuid: String,
    host: String,
}

impl Told {
    fn read(peer: Rank, bytes: &[u8]) -> Result<Self, NvlinkError> {
        let untold = || NvlinkError::Untold { peer, len: bytes.len() };
        let (handle, rest) = bytes.split_first_chunk::<64>().ok_or_else(untold)?;
        let text = std::str::from_utf8(rest).map_err(|_| untold())?;
        let (uuid, host) = text.split_once('\0').ok_or_else(untold)?;
        Ok(Self { handle: SharedHandle(*handle), uuid: uuid.to_owned(), host: host.to_owned() })
    }
}

/// Other ranks' memory, as this rank's device sees it.
#[derive(Debug)]
pub(super) struct Opened {
    /// `[num_ranks]` where each rank's region lies, this one's own too.
    pub regions: [u64; MAX_PEERS],
    /// Some ranks share a GPU.
    pub shares_gpus: bool,
    peers: Vec<PeerMemory>,
}

impl Opened {
    pub fn open(world: &World, own: &Own, told: &[Vec<u8>]) -> Result<Self, NvlinkError> {
        let device = own.buffer.device();
        let (mut regions, mut peers, mut uuids) = ([0; MAX_PEERS], Vec::new(), Vec::new());
        for (rank, bytes) in told.iter().enumerate() {
            let peer = Rank::from_index(rank);
            let told = Told::read(peer, bytes)?;
            regions[rank] = if peer == world.rank() {
                own.buffer.address()
            } else {
                let memory = open(world, device, (peer, &told))?;
                let address = memory.address();
                peers.push(memory);
                address
            };
            uuids.push(told.uuid);
        }
        uuids.sort();
        let shares_gpus = uuids.windows(2).any(|pair| pair[0] == pair[1]);
        Ok(Self { regions, shares_gpus, peers })
    }

    /// Nothing of other ranks is used any more.
    pub fn close(&mut self) {
        self.peers.clear();
    }
}

fn open(world: &World, device: &Device, (peer, told): (Rank, &Told)) -> Result<PeerMemory, NvlinkError> {
    if told.host != world.host() {
        return Err(NvlinkError::OtherHost { peer, found: told.host.clone(), own: world.host().to_owned() });
    }
    // A GPU that this process does not see can't be asked about: opening shows it.
    if device.reaches(&told.uuid)? == Some(false) {
        let own = device.facts().uuid.clone();
        return Err(NvlinkError::NoPeerAccess { peer, own, other: told.uuid.clone() });
    }
    PeerMemory::open(device, &told.handle).map_err(|source| NvlinkError::Open { peer, source })
}

/// All that a rank has before it knows of the others. Fails here alone, before any other rank waits.
#[derive(Debug)]
pub struct Prepared {
    options: NvlinkOptions,
    own: Own,
    told: Vec<u8>,
    functions: Functions,
}

impl Prepared {
    /// Makes this rank's memory.
    ///
    /// # Errors
    /// If there are too many ranks, or no room, or the driver can't share it.
    pub fn new(world: &World, options: NvlinkOptions) -> Result<Self, NvlinkError> {
        let num_ranks = world.size();
        if num_ranks > MAX_PEERS {
            return Err(NvlinkError::TooManyRanks { num_ranks });
        }
        let gpu = &options.gpu;
        let functions = Functions::load(gpu)?;
        let own = Own::new(gpu, Region::new(num_ranks, options.num_local_experts, options.rooms))?;
        let told = own.told(world)?;
        Ok(Self { options, own, told, functions })
    }

    /// What the other ranks have to know.
    #[must_use]
    pub fn told(&self) -> Vec<u8> {
        self.told.clone()
    }

    /// Opens the memory of all ranks, given what each of them told.
    ///
    /// # Errors
    /// If one is on another host, there is no peer access, or a handle does not open.
    pub fn open(self, world: &World, told: &[Vec<u8>]) -> Result<Nvlink, NvlinkError> {
        let Self { options, own, functions, .. } = self;
        let opened = Opened::open(world, &own, told)?;
        let device = options.gpu.device();
        let host_counts = PinnedBuffer::zeroed(device, world.size() * own.region.num_words())?;
        let host_alarms = PinnedBuffer::zeroed(device, world.size() * ALARM_WORDS)?;
        let done = DeviceBuffer::zeroed(options.gpu.stream(), 2)?;
        let mark = options.gpu.mark()?;
        let state = State { opened, own, host_counts, host_alarms, done, epoch: 0 };
        Ok(Nvlink::new(options, functions, mark, state))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_can_be_read() {
        let told = [&[7; 64][..], b"GPU-1\0host"].concat();
        let read = Told::read(Rank(1), &told).unwrap();
        assert_eq!((read.handle.0, &*read.uuid, &*read.host), ([7; 64], "GPU-1", "host"));
        for len in [0, 63, 64, 69] {
            let error = Told::read(Rank(1), &told[..len]).map(|_| ()).unwrap_err();
            assert!(error.to_string().contains(&format!("rank 1 told {len} bytes")), "{error}");
        }
    }
}
