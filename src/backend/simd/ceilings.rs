//! What the machine can do at best, for the bench to compare with: reads of memory and fused multiply-adds.
//!
//! Does the work on all threads and says how much it was; the caller holds the clock.

use std::hint::black_box;

use super::Simd;
use super::pack::Pages;
use crate::backend::BackendError;

/// Independent sums of a reading thread: enough for the compiler's widest vectors.
const READ_SUMS: usize = 32;

/// Memory to read, of the kind that packed weights lie in.
#[derive(Debug)]
pub struct ReadBuffer(Pages);

impl ReadBuffer {
    /// `bytes` of memory, all of it touched.
    ///
    /// # Errors
    /// If the system has no such memory.
    pub fn new(bytes: usize) -> Result<Self, BackendError> {
        let mut pages = Pages::new(bytes)?;
        pages.fill(1);
        Ok(Self(pages))
    }
}

impl Simd {
    /// Runs `rounds` rounds of fused multiply-adds in registers on every thread; returns the flops done.
    #[must_use]
    pub fn fma_flops(&self, rounds: u64) -> u64 {
        let work = self.shared.pool.broadcast(|_| {
            let (flops, value) = self.shared.kernels.fma_peak(rounds);
            black_box(value);
            flops
        });
        work.into_iter().sum()
    }

    /// Reads `buffer` once, every thread its part; returns the bytes read.
    #[must_use]
    pub fn read_bytes(&self, buffer: &ReadBuffer) -> u64 {
        let buffer: &[u64] = bytemuck::cast_slice(&buffer.0);
        let part_len = buffer.len().div_ceil(self.shared.num_threads).max(1);
        self.shared.pool.broadcast(|thread| {
            let start = buffer.len().min(thread.index() * part_len);
            let part = &buffer[start..buffer.len().min(start + part_len)];
            let mut sums = [0_u64; READ_SUMS];
            for values in part.as_chunks::<READ_SUMS>().0 {
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = sum.wrapping_add(*value);
                }
            }
            black_box(sums);
        });
        size_of_val(buffer) as u64
    }
}
