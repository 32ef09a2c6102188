//! Small tables on their way to the device: written into a ring of pinned memory, from which copies are queued that nobody
//! waits for.

use bytemuck::Pod;

use super::GpuError;
use crate::cuda::{Device, PinnedBuffer};

/// Bytes of the ring to begin with: tables of a layer of 896 experts take some hundred KiB.
const MIN_BYTES: usize = 1 << 20;

/// Tables begin at multiples of this.
const ALIGN: usize = 16;

/// Pinned memory in which the oldest is overwritten once the device has read it. Places count on for ever: a place is its
/// remainder.
#[derive(Debug)]
pub(super) struct Ring {
    bytes: PinnedBuffer<u8>,
    head: u64,
    /// What lies before has been read.
    tail: u64,
}

impl Ring {
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        Ok(Self { bytes: PinnedBuffer::zeroed(device, MIN_BYTES)?, head: 0, tail: 0 })
    }

    /// Everything that has been handed out.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// What lies before `place` has been read.
    pub fn release(&mut self, place: u64) {
        self.tail = self.tail.max(place);
    }

    /// Whether `len` bytes fit beside what is still to be read.
    pub fn has_room(&self, len: usize) -> bool {
        let num_bytes = self.bytes.len();
        len <= num_bytes && place(self.head, len, num_bytes) + len as u64 - self.tail <= num_bytes as u64
    }

    /// Writes a table for which there is room, and shows it where it lies.
    ///
    /// # Panics
    /// If there is none.
    pub fn write<T: Pod>(&mut self, table: &[T]) -> &[T] {
        let len = size_of_val(table);
        assert!(self.has_room(len), "{len} bytes don't fit");
        let at = place(self.head, len, self.bytes.len());
        let start = offset(at, self.bytes.len());
        self.head = at + len.next_multiple_of(ALIGN) as u64;
        let staged = &mut self.bytes[start..start + len];
        staged.copy_from_slice(bytemuck::cast_slice(table));
        bytemuck::cast_slice(staged)
    }

    /// Makes room for `len` bytes; nothing may be left to be read.
    pub fn empty(&mut self, device: &Device, len: usize) -> Result<(), GpuError> {
        self.tail = self.head;
        if !self.has_room(len) {
            // Twice: a table never is cut by the end, and skips what is left there.
            let num_bytes = (2 * len).next_power_of_two().max(self.bytes.len());
            *self = Self { bytes: PinnedBuffer::zeroed(device, num_bytes)?, head: 0, tail: 0 };
        }
        Ok(())
    }
}

fn offset(place: u64, num_bytes: usize) -> usize {
    usize::try_from(place % num_bytes as u64).unwrap_or(0)
}

/// Where `len` bytes go, which the ring's end must not cut.
fn place(head: u64, len: usize, num_bytes: usize) -> u64 {
    let start = offset(head, num_bytes);
    if start + len > num_bytes { head + (num_bytes - start) as u64 } else { head }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_not_cut_by_the_end() {
        assert_eq!(place(0, 64, 64), 0);
        assert_eq!(place(48, 16, 64), 48);
        assert_eq!(place(48, 17, 64), 64, "from the beginning again");
        assert_eq!(place(64 * 3 + 16, 48, 64), 64 * 3 + 16);
    }
}
