// What a block of grouped_gemm_wgmma.cu is: its warpgroups, its stages in shared memory, and the tile that it computes.
//
// Defined before this file: as for grouped_gemm_wgmma.cu.
#pragma once

#include "base.cuh"
#include "experts.cuh"
#include "hopper.cuh"
#include "image.cuh"
#include "weights.cuh"

static_assert(HIDDEN % 16 == 0 && INTERMEDIATE % 16 == 0, "NVFP4 blocks divide both widths");
static_assert(WEIGHT_BITS == 4 || WEIGHT_BITS == 16, "weights are NVFP4 or bf16");
static_assert(NUM_STAGES >= 2, "a stage is copied while another is multiplied");

// One warpgroup copies, two multiply, and one gathers; the sums of 256 rows leave no registers for a fourth, so that
// there half of the first gathers. A warpgroup's tile is 64 weight rows high, of 16 a warp: with two tiles a warp has
// whole units, with one, which 256 rows leave registers for, a unit's two tiles are two warps'.
constexpr u32 kGroupThreads = 128;
constexpr u32 kWarpgroups = BLOCK_ROWS == 256 ? 3 : 4;
constexpr u32 kThreads = kWarpgroups * kGroupThreads;
constexpr u32 kCopyWarps = kWarpgroups == 4 ? 4 : 2;
constexpr u32 kGatherThreads = kWarpgroups == 4 ? kGroupThreads : kGroupThreads / 2;
constexpr u32 kTiles = BLOCK_ROWS == 256 ? 1 : 2;
constexpr u32 kGroupUnits = 2 * kTiles;
constexpr u32 kUnitsPerBlock = 2 * kGroupUnits;

/// The narrowest width, in rows, that a tile may be computed as and that is wider than `width`.
constexpr u32 next_width(u32 width) {
    u32 next = width + 16;
    while (next < BLOCK_ROWS && (WIDTHS >> (next / 16 - 1) & 1) == 0) next += 16;
    return next;
}

constexpr u32 kFc1Steps = (HIDDEN + kStepK - 1) / kStepK;
constexpr u32 kFc2Steps = (INTERMEDIATE + kStepK - 1) / kStepK;

// Few rows leave little to do between two waits: then a stage is two steps, where both widths allow it.
constexpr u32 kStageSteps = WEIGHT_BITS == 4 && BLOCK_ROWS <= 64 && kFc1Steps % 2 == 0 && kFc2Steps % 2 == 0 ? 2 : 1;
constexpr u32 kRowsBytes = BLOCK_ROWS * kImageRowBytes;
constexpr u32 kWeightBytes = WEIGHT_BITS == 4 ? kStepBytes : kBf16StepBytes;
constexpr u32 kUnitBytes = kStageSteps * kWeightBytes;
constexpr u32 kWeightsAt = NUM_STAGES * kStageSteps * kRowsBytes;
constexpr u32 kInnerAt = kWeightsAt + NUM_STAGES * kUnitsPerBlock * kUnitBytes;
// FC1's output is gathered into chunks of 64 columns: one a warpgroup, or one of both.
constexpr u32 kStorers = kTiles;
constexpr u32 kAmaxAt = kInnerAt + kTiles * kRowsBytes;
constexpr u32 kSharedBytes = kAmaxAt + (QUANTISE && kTiles == 1 ? 8 * BLOCK_ROWS * 4 : 0);
static_assert(kSharedBytes + 1024 == SHARED_BYTES && kThreads == NUM_THREADS, "the host launches what this file describes");
static_assert(kSharedBytes + 1024 <= 232448 - 48 * NUM_STAGES, "a block's shared memory on sm_90 is 227 KB");

// NOTE: setmaxnreg.inc waits for ever if the warpgroups together ask for more than the block was launched with.
constexpr u32 kLaunchRegisters = kWarpgroups == 4 ? 128 : 168, kCopyRegisters = kWarpgroups == 4 ? 40 : 56;
constexpr u32 kGatherRegisters = kWarpgroups == 4 ? 56 : 0, kMultiplyRegisters = kWarpgroups == 4 ? 208 : 224;
static_assert(kCopyRegisters + kGatherRegisters + 2 * kMultiplyRegisters <= kWarpgroups * kLaunchRegisters,
              "registers are only moved");


template <bool kIsFc1>
struct Gemm {
    static constexpr u32 kSteps = kIsFc1 ? kFc1Steps : kFc2Steps;
    static constexpr u32 kUnits = kIsFc1 ? INTERMEDIATE / 16 : (HIDDEN + kUnitRows - 1) / kUnitRows;
    static constexpr u32 kWeightBlocks = (kUnits + kUnitsPerBlock - 1) / kUnitsPerBlock;
};

// A group of 8 rows is gathered in parts, so that the first rows are soon there. The count of a tile's first group goes
// on: by one for every chunk of activations, and by one for every warp that has waited for those of FC2's tiles.
constexpr u32 kParts = 2, kPartSteps = (kFc1Steps + kParts - 1) / kParts;
constexpr u32 kRowCopiers = kStageSteps;
// Stages before a tile's last at which the next tile is asked for: the answer takes longer than one.
constexpr u32 kAskStages = 4;
// The step of the next tile behind which a tile's activations are there, mostly.
constexpr u32 kTellStep = 4;
constexpr u32 kActivated = kParts + Gemm<true>::kWeightBlocks * kStorers;
constexpr u32 kRead = kActivated + Gemm<false>::kWeightBlocks * kRowCopiers;

/// Whether every block of weight rows has all of its units.
template <bool kIsFc1>
constexpr bool kAreUnitsWhole = Gemm<kIsFc1>::kUnits % kUnitsPerBlock == 0;

// A tile has a stage or more, and is asked for once more when its last has been emptied.
constexpr u32 kWorks = NUM_STAGES + 1;

/// Shared memory of a block, and where in the ring of stages a warp is.
struct Pipeline {
    u32 shared;
    /// Filled by copies, emptied by warps; NUM_STAGES each.
    u32 full;
    u32 empty;
    /// `[kWorks]` what a tile is, of those that have begun; then two words, one a storer.
    u32 works;
    u32 stage;
    u32 parity;
    /// Which of `works` is this tile's.
    u32 turn;

    DEVICE u32 full_barrier() const { return full + 8 * stage; }
    DEVICE u32 empty_barrier() const { return empty + 8 * stage; }
    DEVICE u32 work() const { return works + 32 * turn; }
    DEVICE u32 stored(u32 storer) const { return works + 32 * kWorks + 4 * storer; }
    DEVICE u32 rows(u32 step) const { return shared + (stage * kStageSteps + step) * kRowsBytes; }
    DEVICE u32 unit(u32 unit) const { return shared + kWeightsAt + (stage * kUnitsPerBlock + unit) * kUnitBytes; }

    DEVICE void advance() {
        if (++stage == NUM_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }

    DEVICE void next_tile() {
        if (++turn == kWorks) turn = 0;
    }
};

/// A tile as the copying warps have found it: multiplying warps take it from there, since finding one takes as long as
/// several steps of K.
struct Work {
    u32 expert;
    u32 weight_block;
    u32 first_row;
    u32 num_rows;
    /// The rows' first group in the expert's image, and the image's groups.
    u32 first_group;
    u32 num_groups;
    u32 padded_row;

    template <u32 kWeightBlocks>
    DEVICE static Work of(const Place& place) {
        const Tile tile = weight_major<kWeightBlocks, BLOCK_ROWS>(place);
        return {tile.expert,   tile.weight_block, tile.first_row, tile.num_rows, tile.row_in_expert / kGroupRows,
                ceil_div(place.num_rows, kGroupRows), place.padded_row};
    }

    /// No tile: there is none left.
    DEVICE static Work none() { return {0, 0, 0, 0, 0, 0, 0}; }

    DEVICE void put(u32 at) const {
        store_shared4(at, {{expert, weight_block, first_row, num_rows}});
        store_shared4(at + 16, {{first_group, num_groups, padded_row, 0}});
    }

    DEVICE static Work get(u32 at) {
        const Word4 a = load_shared4(at), b = load_shared4(at + 16);
        return {a.v[0], a.v[1], a.v[2], a.v[3], b.v[0], b.v[1], b.v[2]};
    }

    /// What the block's next tile is lies beside this one.
    DEVICE static void put_next(u32 at, u32 next) { store_shared(at + 28, next); }
    DEVICE static u32 get_next(u32 at) { return load_shared(at + 28); }

    /// `num_rows` alone: what is needed of a tile before its sums are there takes registers from them.
    DEVICE static u32 get_rows(u32 at) { return load_shared(at + 12); }

    /// Bytes of one step's rows: whole groups of 8, as many as the expert has left.
    DEVICE u32 rows_bytes() const { return min_of<u32>(BLOCK_ROWS / kGroupRows, num_groups - first_group) * kGroupBytes; }

    /// The rows' first group among all groups, whose count says what there is of the tile's rows.
    DEVICE u32 group_idx() const { return padded_row / kGroupRows + first_group; }

    /// Where step 0 of the rows lies in an image of `kSteps`.
    template <u32 kSteps>
    DEVICE u64 image_at() const {
        return image_start<kSteps>(padded_row) + image_step(0, first_group, num_groups);
    }
};

/// Where a multiplying warp stands: `unit` of the block's, and with one tile a warp, which tile of it.
struct Seat {
    u32 group;
    u32 unit;
    u32 tile;
    u32 lane;

    DEVICE static Seat mine() {
        const u32 group = threadIdx.x / kGroupThreads - 1, warp = threadIdx.x % kGroupThreads / kWarp;
        const u32 lane = threadIdx.x % kWarp;
        if (kTiles == 2) return {group, group * kGroupUnits + warp, 0, lane};
        return {group, group * kGroupUnits + warp / 2, warp % 2, lane};
    }

    /// Whether this thread stores activations: of a chunk of 64 columns one does.
    DEVICE bool is_storer() const { return threadIdx.x % kGroupThreads == 0 && group < kStorers; }

    /// Whether a thread of this warp does. A vote, so that the compiler knows that no warp parts here.
    DEVICE bool is_storing() const { return __any_sync(kAllLanes, is_storer()); }
};

/// What scales sums back to weights' values before their global scale. A power of two: it may be applied to either factor.
constexpr float kSumFactor = WEIGHT_BITS == 4 ? kDecodeFactor : 1.0f;
