//! Many bytes on their way to the device: filled into pinned memory by any number of threads, copied behind each thread's
//! back, and worked on there beside the copies of others.
//!
//! A *slot* is pinned memory, as much of the device's, and a stream of its own. Their number bounds what is under way. Slots
//! are lent to whoever fills them and come back as soon as their work is queued; the oldest is lent first, and waited for.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};

use bytemuck::Pod;
use rayon::prelude::*;

use super::GpuError;
use crate::cuda::{Device, DeviceBuffer, PinnedBuffer, Stream};

/// Bytes of a slot to begin with. On PCIe 5 copies of 4 MiB come within 3 % of the rate of the largest, those of 1 MiB within
/// 13 %; what a piece costs beside its copy makes 6 MiB faster than 4 (docs/measurements/2026-12-01-load.md).
pub const SLOT_BYTES: usize = 6 << 20;

/// Slots, shared by all threads that load. They are made as they are needed.
#[derive(Debug)]
pub struct Feed {
    device: Device,
    max_slots: usize,
    slots: Mutex<Slots>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct Slots {
    /// Those that nobody fills, the oldest first.
    idle: VecDeque<Slot>,
    num_made: usize,
}

#[derive(Debug)]
struct Slot {
    stream: Stream,
    host: PinnedBuffer<u8>,
    twin: DeviceBuffer<u8>,
}

/// A slot to be filled. Dropped, it goes back.
#[derive(Debug)]
pub struct Load<'a> {
    feed: &'a Feed,
    slot: Option<Slot>,
}

/// A slot whose bytes are on their way; work on them may be queued behind. Dropped, it goes back.
#[derive(Debug)]
pub struct Sent<'a>(Load<'a>);

impl Feed {
    /// Up to `max_slots` slots, at least one; a session's is [`Gpu::feed`](super::Gpu::feed).
    #[must_use]
    pub fn new(device: &Device, max_slots: usize) -> Self {
        let (slots, returned) = (Mutex::default(), Condvar::new());
        Self { device: device.clone(), max_slots: max_slots.max(1), slots, returned }
    }

    /// A slot with room for `num_bytes`, whose last work is done: an idle one, a new one, or the oldest, which is waited for.
    ///
    /// # Errors
    /// If that work has failed, or there is no memory.
    pub fn take(&self, num_bytes: usize) -> Result<Load<'_>, GpuError> {
        let mut load = Load { feed: self, slot: self.lend()? };
        load.prepare(num_bytes)?;
        Ok(load)
    }

    /// A slot whose work may still be under way; none where one is to be made.
    fn lend(&self) -> Result<Option<Slot>, GpuError> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            // Others wait for this lock: the driver is asked no more than it has to be.
            if slots.num_made < self.max_slots {
                let is_done = slots.idle.front().map(|slot| slot.stream.is_done()).transpose()?;
                if is_done != Some(true) {
                    slots.num_made += 1;
                    return Ok(None);
                }
            }
            if let Some(slot) = slots.idle.pop_front() {
                return Ok(Some(slot));
            }
            slots = self.returned.wait(slots).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Copies `parts`, one behind the other, to the beginning of `target`, on all threads of the current pool, and waits.
    ///
    /// # Errors
    /// If a copy fails, or there is no memory.
    ///
    /// # Panics
    /// If they don't fit.
    pub fn upload<T: Pod>(&self, target: &mut DeviceBuffer<T>, parts: &[&[u8]]) -> Result<(), GpuError> {
        let num_bytes: usize = parts.iter().map(|part| part.len()).sum();
        assert!(num_bytes <= target.num_bytes(), "{num_bytes} bytes into {}", target.num_bytes());
        let mut pieces = Vec::new();
        let mut address = target.address();
        for piece in parts.iter().flat_map(|part| part.chunks(SLOT_BYTES)) {
            pieces.push((address, piece));
            address += piece.len() as u64;
        }
        let sent = pieces.par_iter().with_max_len(1).try_for_each(|(address, piece)| {
            let mut load = self.take(piece.len())?;
            load.bytes()[..piece.len()].copy_from_slice(piece);
            // SAFETY: the pieces lie one behind the other in `target`, which is borrowed until the wait below is over.
            unsafe { load.send_to(piece.len(), *address) }
        });
        // Also where a piece failed: others are on their way.
        self.finish().and(sent)
    }

    /// Waits until all that was sent is done, with what was queued behind it. Nobody may hold a slot.
    ///
    /// # Errors
    /// If some of it has failed.
    pub fn finish(&self) -> Result<(), GpuError> {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        debug_assert_eq!(slots.idle.len(), slots.num_made, "a slot is lent");
        // All of them, also behind one that failed.
        let waits: Vec<_> = slots.idle.iter().map(|slot| slot.stream.synchronise()).collect();
        Ok(waits.into_iter().collect::<Result<(), _>>()?)
    }

    /// Bytes of pinned memory that it holds, and of the device's, while nobody holds a slot.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.idle.iter().map(|slot| slot.host.len()).sum()
    }
}

impl Drop for Feed {
    /// Pinned memory must outlive the copies from it.
    fn drop(&mut self) {
        // What failed comes out of whatever is queued next.
        drop(self.finish());
    }
}

impl<'a> Load<'a> {
    fn slot(&mut self) -> &mut Slot {
        self.slot.as_mut().unwrap_or_else(|| unreachable!("`take` hands none out without one"))
    }

    /// Makes the slot, waits for it, or makes it larger.
    fn prepare(&mut self, num_bytes: usize) -> Result<(), GpuError> {
        if let Some(slot) = &self.slot {
            slot.stream.synchronise()?;
            if slot.host.len() >= num_bytes {
                return Ok(());
            }
        }
        let (device, len) = (&self.feed.device, num_bytes.max(SLOT_BYTES));
        // The old one goes first.
        self.slot = None;
        self.slot = Some(Slot {
            stream: Stream::new(device)?,
            host: PinnedBuffer::zeroed(device, len)?,
            twin: DeviceBuffer::uninitialised(device, len)?,
        });
        Ok(())
    }

    /// The memory to fill.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.slot().host
    }

    /// Queues the first `num_bytes` to the slot's own memory on the device, at [`Sent::address`].
    ///
    /// # Errors
    /// If the driver fails.
    pub fn send(mut self, num_bytes: usize) -> Result<Sent<'a>, GpuError> {
        let Slot { stream, host, twin } = self.slot();
        // SAFETY: the pinned memory is neither lent nor freed before `prepare`, `finish` or `drop` has waited for the stream.
        unsafe { twin.upload_pinned(stream, 0, &host[..num_bytes])? };
        Ok(Sent(self))
    }
}

impl Load<'_> {
    /// Queues the first `num_bytes` to another place on the device.
    ///
    /// # Errors
    /// If the driver fails.
    ///
    /// # Safety
    /// There is room, nobody else uses it, and it stays until [`Feed::finish`] is over.
    unsafe fn send_to(mut self, num_bytes: usize, address: u64) -> Result<(), GpuError> {
        let Slot { stream, host, .. } = self.slot();
        // SAFETY: the pinned memory stays as `send` says; the caller answers for the target.
        unsafe { host.send(stream, num_bytes, address)? };
        Ok(())
    }
}

impl Sent<'_> {
    /// Where the bytes are on the device, once the stream has come so far; until the slot is lent again.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.0.slot.as_ref().map_or(0, |slot| slot.twin.address())
    }

    /// What work on them is queued in.
    #[must_use]
    pub fn stream(&mut self) -> &Stream {
        &self.0.slot().stream
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        let mut slots = self.feed.slots.lock().unwrap_or_else(PoisonError::into_inner);
        match self.slot.take() {
            Some(slot) => slots.idle.push_back(slot),
            // It could not be made.
            None => slots.num_made -= 1,
        }
        self.feed.returned.notify_one();
    }
}
