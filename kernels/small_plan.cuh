// What the kernels of few rows, grouped_gemm_small.cu and grouped_gemm_ranges.cu, have in common: a warp's ring of slots, what a block
// computes, and how its FC2 waits for others' FC1.
//
// Defined before this file: as for either of them.
#pragma once

#include "base.cuh"
#include "experts.cuh"
#include "hopper.cuh"
#include "weights.cuh"

static_assert(HIDDEN % 16 == 0 && INTERMEDIATE % 16 == 0, "NVFP4 blocks divide both widths");
static_assert(BLOCK_ROWS == 8 || BLOCK_ROWS == 16, "rows of one or two MMAs");

constexpr u32 kThreads = NUM_THREADS;
constexpr u32 kWarps = kThreads / kWarp;
constexpr u32 kRowTiles = BLOCK_ROWS / 8;

template <bool kIsFc1>
struct Widths {
    static constexpr u32 kWidth = kIsFc1 ? HIDDEN : INTERMEDIATE;
    static constexpr u32 kSteps = (kWidth + kStepK - 1) / kStepK;
    static constexpr u32 kUnits = kIsFc1 ? INTERMEDIATE / 16 : (HIDDEN + kUnitRows - 1) / kUnitRows;
};

constexpr u32 max_of(u32 a, u32 b) { return a > b ? a : b; }

/// A warp's slots, filled and read in turn.
template <u32 kSlotBytes>
struct SlotRing {
    u32 slots;
    u32 barriers;
    u32 fill_slot;
    u32 read_slot;
    u32 read_parity;
    u64 policy;

    /// One lane calls it.
    DEVICE void fill(const u8* from, u32 num_bytes) {
        barrier_expect(barriers + 8 * fill_slot, num_bytes);
        bulk_load(slots + fill_slot * kSlotBytes, from, num_bytes, barriers + 8 * fill_slot, policy);
        if (++fill_slot == NUM_STAGES) fill_slot = 0;
    }

    DEVICE u32 wait() const {
        barrier_wait(barriers + 8 * read_slot, read_parity);
        return slots + read_slot * kSlotBytes;
    }

    DEVICE void release() {
        __syncwarp();
        if (++read_slot == NUM_STAGES) {
            read_slot = 0;
            read_parity ^= 1;
        }
    }
};

/// Units of a range that read the same rows.
struct Run {
    /// The first unit's.
    const u8* weights;
    u32 first_unit;
    u32 num_units;
    u32 first_row;
    u32 num_rows;
    /// Where its rows' activations are counted.
    u32 group;
    /// What multiplies gate's and up's sums, or down's.
    float scales[2];
    float inverse_input_scale;
};

/// A block has few runs: about two, and one more for each expert that fits its share of units whole.
constexpr u32 kMaxRuns = 16;

/// What a block computes: units `next` to `end` in the order expert > row block > unit, of which `runs` are planned.
/// In shared memory, so that no warp looks for its runs while weights could be on their way.
template <bool kIsFc1>
struct Plan {
    Run runs[kMaxRuns];
    u32 num_runs;
    u32 next;
    u32 end;

    /// Plans this block's share. All lanes of one warp call it.
    DEVICE void start(const GroupedGemmArgs& args) {
        const u64 num_units = TileCursor<1, BLOCK_ROWS>(args).count() * static_cast<u64>(Widths<kIsFc1>::kUnits);
        if (threadIdx.x % kWarp == 0) {
            const u32 num_blocks = num_blocks_of(args);
            next = static_cast<u32>(num_units * blockIdx.x / num_blocks);
            end = static_cast<u32>(num_units * (blockIdx.x + 1) / num_blocks);
        }
        __syncwarp();
        go_on(args);
    }

    /// Plans what comes next, as far as there is room. All lanes of one warp call it, which then see it.
    DEVICE void go_on(const GroupedGemmArgs& args) {
        using G = Widths<kIsFc1>;
        TileCursor<G::kUnits, BLOCK_ROWS> cursor(args);
        Place place;
        u32 index = next, count = 0;
        const u32 last = end;
        for (; count < kMaxRuns && index < last && cursor.find(index, place); ++count) {
            const Expert& expert = args.experts[place.expert];
            const u32 row_in_expert = place.index / G::kUnits * BLOCK_ROWS, unit = place.index % G::kUnits;
            const u32 num_units = min_of(G::kUnits - unit, last - index);
            if (threadIdx.x % kWarp == 0) {
                Run& run = runs[count];
                run.weights = (kIsFc1 ? expert.fc1 : expert.fc2) + static_cast<u64>(unit) * (G::kSteps * kStepBytes);
                run.first_unit = unit;
                run.num_units = num_units;
                run.first_row = place.first_row + row_in_expert;
                run.num_rows = min_of<u32>(BLOCK_ROWS, place.num_rows - row_in_expert);
                run.group = (place.padded_row + row_in_expert) / 8;
                if constexpr (kIsFc1 && QUANTISE) run.inverse_input_scale = __fdiv_rn(1.0f, expert.input_scale);
                if constexpr (kIsFc1) {
                    run.scales[0] = args.token_scale * expert.gate_scale;
                    run.scales[1] = args.token_scale * expert.up_scale;
                } else {
                    run.scales[0] = QUANTISE ? expert.down_scale * expert.input_scale : expert.down_scale;
                }
            }
            index += num_units;
        }
        __syncwarp();
        if (threadIdx.x % kWarp == 0) {
            num_runs = count;
            next = index;
        }
        __syncwarp();
    }
};

/// Says that FC1 is done of what was planned. All lanes of one warp call it, behind a barrier of the block.
DEVICE void tell_activated(const GroupedGemmArgs& args, const Plan<true>& plan) {
    const u32 lane = threadIdx.x % kWarp;
    if (lane < plan.num_runs) add_release(args.gathered + plan.runs[lane].group, plan.runs[lane].num_units);
    __syncwarp();
}

/// Waits until all activations that planned runs read are there, and counts that it has: the last of all blocks to do so sets the
/// count back. All lanes of one warp call it, before a barrier of the block.
///
/// NOTE: a barrier of all blocks in its place took 2 to 4 us more (one H200, 2026-12-01): blocks wait for their neighbours alone.
DEVICE void wait_activated(const GroupedGemmArgs& args, const Plan<false>& plan) {
    constexpr u32 kActivated = Widths<true>::kUnits, kRead = kActivated + Widths<false>::kUnits;
    const u32 lane = threadIdx.x % kWarp;
    if (lane < plan.num_runs) {
        u32* const count = args.gathered + plan.runs[lane].group;
        while (load_acquire(count) < kActivated) {
        }
        const u32 num_units = plan.runs[lane].num_units;
        if (atomicAdd(count, num_units) + num_units == kRead) *count = 0;
    }
    __threadfence();
    __syncwarp();
}
