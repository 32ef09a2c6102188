//! What ranks of one NVLink domain tell each other: `kernels/nvlink.cu`, and the tables by which kernels store rows into each
//! other's memory, `kernels/peers.cuh`.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::KernelRequest;
use super::super::source::{BASE, HEAR, KernelSource, PEERS};
use crate::cuda::LaunchShape;
use crate::dispatch::overlap::NUM_TRAVEL_MULTIPROCESSORS;
use crate::dispatch::region::MAX_PEERS;

const SOURCE: KernelSource =
    KernelSource { name: "nvlink", main: include_str!("../../../kernels/nvlink.cu"), headers: &[BASE, HEAR, PEERS] };

/// Rows that lie one behind the other; see the struct of that name in `kernels/peers.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Run {
    /// Where row 0 of the whole list would lie, were all of it in this run.
    pub address: u64,
    /// The row behind its last.
    pub end: u64,
}

impl Run {
    /// All rows of a list, one behind the other.
    #[must_use]
    pub fn whole(address: u64) -> [Self; MAX_PEERS] {
        [Self { address, end: u64::MAX }; MAX_PEERS]
    }

    /// Runs of `lengths` rows of `row_bytes` each, of which run `r` begins at `address(r)`.
    ///
    /// # Panics
    /// If there are more than [`MAX_PEERS`], which no transport builds.
    #[must_use]
    pub fn of(lengths: &[usize], row_bytes: usize, address: impl Fn(usize) -> u64) -> [Self; MAX_PEERS] {
        assert!(lengths.len() <= MAX_PEERS, "{} runs", lengths.len());
        let mut runs = Self::whole(0);
        let mut first = 0;
        for (rank, (run, &len)) in runs.iter_mut().zip(lengths).enumerate() {
            *run = Self { address: address(rank).wrapping_sub(first * row_bytes as u64), end: first + len as u64 };
            first += len as u64;
        }
        runs
    }
}

/// Flags that a kernel raises when all of its rows are stored; see the struct of that name in `kernels/peers.cuh`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernels' header says what each is")]
pub struct Raise {
    pub flags: [u64; MAX_PEERS],
    pub word: u64,
    pub live_word: u64,
    pub done: u64,
    pub num_ranks: u32,
    pub padding: u32,
}

impl Raise {
    /// None.
    #[must_use]
    pub fn none() -> Self {
        Self::zeroed()
    }
}

/// A wait for flags of all ranks; see the struct of that name in `kernels/hear.cuh`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernels' header says what each is")]
pub struct Hear {
    pub regions: [u64; MAX_PEERS],
    pub host_alarms: u64,
    pub is_raised: u64,
    pub flags_at: u64,
    pub alarms_at: u64,
    pub word: u64,
    pub live_word: u64,
    pub limit_ns: u64,
    pub hold_ns: u64,
    pub phase: u32,
    pub rank: u32,
    pub num_ranks: u32,
    pub padding: u32,
}

/// Where counts go; see the struct of that name in `kernels/hear.cuh`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernels' header says what each is")]
pub struct Tell {
    pub of_step: u64,
    pub counts_at: u64,
    pub num_words: u32,
    pub is_told: u32,
}

impl Hear {
    /// Nobody is waited for.
    #[must_use]
    pub fn none() -> Self {
        Self::zeroed()
    }
}

impl Tell {
    /// Nothing is told.
    #[must_use]
    pub fn none() -> Self {
        Self::zeroed()
    }
}

/// The argument of the kernels of `kernels/nvlink.cu`; see the struct of that name there.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct NvlinkArgs {
    pub hear: Hear,
    pub host_counts: u64,
    pub counts_at: u64,
    pub num_words: u32,
    pub num_heard: u32,
}

/// `kHearWarps` of `kernels/nvlink.cu`.
const HEAR_WARPS: u32 = 8;
const WARP: u32 = 32;
/// A thread a rank.
const GREET_THREADS: u32 = 64;
const _: () = assert!(MAX_PEERS == GREET_THREADS as usize, "greet has a thread for each rank");
const _: () = assert!(MAX_PEERS <= (HEAR_WARPS * NUM_TRAVEL_MULTIPROCESSORS) as usize, "hear takes too many blocks");

/// The kernels by which ranks tell each other what is where.
#[derive(Debug, Clone, Copy)]
pub struct NvlinkKernels;

impl NvlinkKernels {
    /// Says to every rank who this one is.
    pub const GREET: &'static str = "greet";
    /// Waits for what every rank tells; a warp a rank.
    pub const HEAR: &'static str = "hear";

    /// The launch of `greet`.
    pub const GREET_SHAPE: LaunchShape = LaunchShape::rows(1, GREET_THREADS);

    /// The launch of `hear`: no more blocks than experts leave multiprocessors while chunks overlap, since they are there for as
    /// long as a rank waits, and where they lie an expert's block may have no room.
    #[must_use]
    pub fn hear_shape(num_ranks: u32) -> LaunchShape {
        LaunchShape::rows(num_ranks.div_ceil(HEAR_WARPS), HEAR_WARPS * WARP)
    }

    /// What to compile.
    #[must_use]
    pub fn request(self, arch: Arch) -> KernelRequest {
        KernelRequest::new(SOURCE, arch).with_arguments::<NvlinkArgs>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `run_of` of `kernels/peers.cuh` finds a row.
    fn place(runs: &[Run], row: u64, row_bytes: u64) -> u64 {
        let run = runs.iter().find(|run| row < run.end).expect("a run");
        run.address.wrapping_add(row * row_bytes)
    }

    #[test]
    fn rows_lie_in_their_runs() {
        // Empty runs at the start, the middle and the end.
        let runs = Run::of(&[0, 2, 0, 3, 0], 16, |rank| 1000 * rank as u64);
        let places: Vec<u64> = (0..5).map(|row| place(&runs, row, 16)).collect();
        assert_eq!(places, [1000, 1016, 3000, 3016, 3032]);
        let whole = Run::whole(64);
        assert_eq!((place(&whole, 0, 16), place(&whole, 9, 16)), (64, 208));
    }
}
