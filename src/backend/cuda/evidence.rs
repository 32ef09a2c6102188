//! What ran, told by what ran: counters of the device, read when the host waits for it anyway.

use crate::cuda::{CudaError, DeviceBuffer, PinnedBuffer, Stream};

/// Counters of a program: block scales that saturated, that became 0, rows stored.
pub(super) const NUM_COUNTERS: usize = 3;

/// The counters of a group's programs.
pub(super) struct Evidence {
    /// `[num_programs, NUM_COUNTERS]`, added to by kernels.
    device: DeviceBuffer<u64>,
    /// A copy, once the device has come so far.
    host: PinnedBuffer<u64>,
    /// `[num_programs]` rows queued since the counters were last read.
    queued: Vec<u64>,
}

/// What a program did.
pub(super) struct Counted {
    /// Block scales that saturated.
    pub num_saturated: u64,
    /// Block scales that became 0.
    pub num_zeroed: u64,
    /// Rows that kernels stored.
    pub stored: u64,
    /// Rows that they were given.
    pub queued: u64,
}

impl Evidence {
    pub fn new(stream: &Stream, num_programs: usize) -> Result<Self, CudaError> {
        let len = num_programs * NUM_COUNTERS;
        let device = DeviceBuffer::zeroed(stream, len)?;
        Ok(Self { device, host: PinnedBuffer::zeroed(stream.device(), len)?, queued: vec![0; num_programs] })
    }

    /// Where a program's counters lie.
    pub fn counters(&self, program_idx: usize) -> Result<u64, CudaError> {
        self.device.address_of(program_idx * NUM_COUNTERS..(program_idx + 1) * NUM_COUNTERS)
    }

    /// Counts rows that a program is given.
    pub fn expect(&mut self, program_idx: usize, num_rows: u64) {
        self.queued[program_idx] += num_rows;
    }

    /// Queues their way to the host; they count from zero again behind it.
    pub fn queue(&mut self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: whoever reads them has waited for the stream.
        unsafe { self.device.download_pinned(stream, 0, &mut self.host) }?;
        self.device.fill_bytes(stream, 0)
    }

    /// What each program did. The stream has come past [`Evidence::queue`].
    pub fn take(&mut self) -> Vec<Counted> {
        let queued = self.queued.iter_mut().map(std::mem::take);
        let counted = self.host.chunks_exact(NUM_COUNTERS).zip(queued);
        let of_program = |(counters, queued): (&[u64], u64)| Counted {
            num_saturated: counters[0],
            num_zeroed: counters[1],
            stored: counters[2],
            queued,
        };
        counted.map(of_program).collect()
    }
}
