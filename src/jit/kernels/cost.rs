//! What a batch takes with each schedule, by a model: what hosts and devices choose by.
//!
//! Integers alone, so that whoever adds them up gets the same: `kernels/deal.cu` has the same arithmetic.

use super::grouped_gemm::Schedule;

/// What a schedule's tiles take, a tile being a block of weights times a block of an expert's rows: measured on one H200 with
/// Kimi K3's experts (docs/measurements/2026-12-01-h200-kernels-4.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileCost {
    /// The schedule.
    pub schedule: Schedule,
    /// Blocks of an expert's weights that go to multiprocessors one by one; 0 where they are cut into even shares.
    pub weight_blocks: u32,
    /// Of a tile, whatever its rows.
    pub tile_ns: u32,
    /// Of every 16 rows that it is computed as.
    pub rows_ns: u32,
    /// Of a launch, beyond what others of its order take.
    pub launch_ns: u32,
}

/// The blocks of rows that a schedule cuts experts into.
#[derive(Debug, Clone, Copy, Default)]
struct Blocks {
    num: u64,
    /// Sixteens of rows that all are computed as, and that the widest is.
    sixteens: u64,
    widest: u64,
}

/// Multiprocessors of the machine that costs were measured on: a choice is not to depend on the machine that makes it.
/// `kMultiprocessors` of `kernels/deal.cu`.
const NUM_MULTIPROCESSORS: u64 = 132;

const fn mma_sync(block_rows: u32, tile_ns: u32) -> TileCost {
    TileCost { schedule: Schedule::MmaSync { block_rows }, weight_blocks: 0, tile_ns, rows_ns: 0, launch_ns: 0 }
}

const fn small(block_rows: u32, tile_ns: u32) -> TileCost {
    TileCost { schedule: Schedule::Small { block_rows }, weight_blocks: 0, tile_ns, rows_ns: 0, launch_ns: 0 }
}

const fn ranges(block_rows: u32, tile_ns: u32, launch_ns: u32) -> TileCost {
    TileCost { schedule: Schedule::Ranges { block_rows }, weight_blocks: 0, tile_ns, rows_ns: 0, launch_ns }
}

const fn wgmma(block_rows: u32, [tile_ns, rows_ns]: [u32; 2]) -> TileCost {
    TileCost { schedule: Schedule::Wgmma { block_rows }, weight_blocks: 0, tile_ns, rows_ns, launch_ns: 0 }
}

pub(super) const MMA_SYNC: [TileCost; 4] = [mma_sync(8, 296), mma_sync(16, 348), mma_sync(32, 484), mma_sync(64, 792)];
/// NOTE: ranges are slower for up to some ten experts: their warps leave each other more, slice by slice
/// (docs/measurements/2026-12-01-h200-kernels-5.md).
pub(super) const SMALL: [TileCost; 3] = [small(8, 250), small(16, 300), ranges(16, 270, 700)];
/// Of FC1: FC2's are in proportion.
pub(super) const WGMMA: [TileCost; 3] =
    [wgmma(64, [17_000, 3_200]), wgmma(128, [17_280, 3_340]), wgmma(256, [14_400, 1_900])];

/// What the tiles of one block of weights take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TileTimes {
    /// All of them, one behind the other.
    pub all_ns: u64,
    /// The longest.
    pub longest_ns: u64,
}

impl TileCost {
    /// What all tiles take over all multiprocessors, and half of the longest one, at which some wait in the end; nothing is
    /// over before the longest is.
    #[must_use]
    pub fn takes_ns(&self, counts: impl Iterator<Item = usize>) -> u64 {
        let TileTimes { all_ns, longest_ns } = self.tiles(counts);
        if self.weight_blocks == 0 || all_ns == 0 {
            return if all_ns == 0 { 0 } else { all_ns + u64::from(self.launch_ns) };
        }
        longest_ns.max(all_ns * u64::from(self.weight_blocks) / NUM_MULTIPROCESSORS + longest_ns / 2)
    }

    pub(super) fn tiles(&self, counts: impl Iterator<Item = usize>) -> TileTimes {
        let Blocks { num, sixteens, widest } = self.blocks(counts);
        let [tile_ns, rows_ns] = [self.tile_ns, self.rows_ns].map(u64::from);
        TileTimes { all_ns: num * tile_ns + sixteens * rows_ns, longest_ns: tile_ns + widest * rows_ns }
    }

    fn blocks(&self, counts: impl Iterator<Item = usize>) -> Blocks {
        let block_rows = u64::from(self.schedule.block_rows());
        let mut blocks = Blocks::default();
        for count in counts {
            let (full, rest) = (count as u64 / block_rows, count as u64 % block_rows);
            let rest_sixteens = self.sixteens(rest);
            blocks.num += full + u64::from(rest > 0);
            blocks.sixteens += full * self.sixteens(block_rows) + rest_sixteens;
            blocks.widest = blocks.widest.max(if full > 0 { self.sixteens(block_rows) } else { rest_sixteens });
        }
        blocks
    }

    /// Sixteens of rows that a block of so many is computed as.
    fn sixteens(&self, num_rows: u64) -> u64 {
        if num_rows == 0 {
            return 0;
        }
        let narrower = (1 << (num_rows.div_ceil(16) - 1)) - 1;
        u64::from((self.schedule.width_bits() & !narrower).trailing_zeros()) + 1
    }
}
