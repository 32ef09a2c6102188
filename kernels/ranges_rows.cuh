// What the warps of a block of grouped_gemm_ranges.cu have in common: a run's rows in shared memory, and what they leave to each
// other of units that several of them share.
//
// Defined before this file: as for grouped_gemm_ranges.cu.
#pragma once

#include "base.cuh"
#include "experts.cuh"
#include "hopper.cuh"
#include "ranges_feed.cuh"
#include "small_plan.cuh"
#include "weights.cuh"

/// Counts of a block, in shared memory.
struct Common {
    /// A slice of the rows has come; as many arrivals as lanes.
    u64 come[kSlices];
    /// A warp has left what it leaves to others of a run: once a run.
    u64 left[kWarps];
    /// Warps that are done with a slice of a run's rows.
    u32 done[kSlices];
    /// The tokens that rows of FC1's planned runs read.
    u32 tokens[kMaxRuns][BLOCK_ROWS];

    /// One thread calls it.
    DEVICE void init() {
        for (u32 i = 0; i < kSlices; ++i) {
            barrier_init(shared_address(come + i), kWarp);
            done[i] = 0;
        }
        for (u32 i = 0; i < kWarps; ++i) barrier_init(shared_address(left + i), 1);
    }
};

/// Rows of a run: `[row][kRowBytes]`. A slice of the next run's comes as soon as the last warp is done with this one's.
template <bool kIsFc1>
struct Rows {
    using G = Gemm<kIsFc1>;
    u32 shared;
    Common& common;

    /// Asks for a slice. All lanes of a warp call it.
    DEVICE void load(const GroupedGemmArgs& args, const Plan<kIsFc1>& plan, u32 run_idx, u32 slice) const {
        constexpr u32 kStepRowBytes = kStepK * 2;
        const Run& run = plan.runs[run_idx];
        const u32 lane = threadIdx.x % kWarp, at = lane % 8 * 16;
        const u32 first = G::steps_before(slice), num_steps = G::steps_before(slice + 1) - first;
#pragma unroll
        for (u32 row = lane / 8; row < BLOCK_ROWS; row += 4) {
            // Rows beyond the last are whatever was there: a row's sums depend on no other one, and theirs are not stored.
            if (row >= run.num_rows) continue;
            const u64 source = kIsFc1 ? common.tokens[run_idx][row] : run.first_row + row;
            const u8* from = (kIsFc1 ? args.tokens : args.inner) + source * (G::kWidth * 2);
            const u32 to = shared + row * G::kRowBytes + first * kStepRowBytes + at;
#pragma unroll
            for (u32 step = 0; step < G::kSlice; ++step) {
                if (!G::kIsEven && step >= num_steps) break;
                const u32 k_bytes = (first + step) * kStepRowBytes + at;
                const bool is_there = G::kWidth % kStepK == 0 || k_bytes < G::kWidth * 2;
                copy_async16(to + step * kStepRowBytes, is_there ? from + k_bytes : from, is_there);
            }
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(come(slice)) : "memory");
    }

    DEVICE void wait(u32 slice, u32 parity) const { barrier_wait(come(slice), parity); }

    /// Looks up what FC1's rows read. All warps call it, before a barrier of the block.
    DEVICE void find_tokens(const GroupedGemmArgs& args, const Plan<true>& plan, u32 warp) const {
        const u32 lane = threadIdx.x % kWarp;
        for (u32 i = warp; i < plan.num_runs; i += kWarps) {
            const Run& run = plan.runs[i];
            if (lane < run.num_rows) common.tokens[i][lane] = args.row_token[run.first_row + lane];
        }
    }

    /// A warp is done with a slice; the last one asks for that of the run that follows.
    ///
    /// NOTE: it has to have come, also for a warp that has no use for it: who went on without could be two runs ahead of others,
    /// where a barrier's parity says nothing any more.
    DEVICE void leave(const GroupedGemmArgs& args, const Plan<kIsFc1>& plan, u32 next, u32 slice, u32 parity) const {
        wait(slice, parity);
        __syncwarp();
        u32 num_done = 0;
        if (threadIdx.x % kWarp == 0) {
            __threadfence_block();
            num_done = atomicAdd(common.done + slice, 1) + 1;
            if (num_done == kWarps) common.done[slice] = 0;
            __threadfence_block();
        }
        if (__shfl_sync(kAllLanes, num_done, 0) == kWarps) load(args, plan, next, slice);
        __syncwarp();
    }

private:
    DEVICE u32 come(u32 slice) const { return shared_address(common.come + slice); }
};

/// A unit's sums in a warp: `[tile][row tile][register]` of an MMA's fragment.
struct Sums {
    float v[2][kRowTiles][4];

    DEVICE void clear() {
#pragma unroll
        for (u32 i = 0; i < 8 * kRowTiles; ++i) v[i / (4 * kRowTiles)][i / 4 % kRowTiles][i % 4] = 0.0f;
    }

    DEVICE void add(const Sums& other) {
#pragma unroll
        for (u32 i = 0; i < 8 * kRowTiles; ++i) {
            const u32 j = i / (4 * kRowTiles), n = i / 4 % kRowTiles, c = i % 4;
            v[j][n][c] += other.v[j][n][c];
        }
    }
};

/// Sums that warps of a block leave to each other, in global memory, that is in L2: `[kParts][2 row tiles][lane][4]`.
class Parts {
public:
    /// One for each piece of a short run.
    static constexpr u32 kParts = kWarps * kSlices;
    static constexpr u32 kPartBytes = 2 * kRowTiles * kWarp * 16;

    DEVICE Parts(const GroupedGemmArgs& args, Common& common)
        : at_(args.parts + static_cast<u64>(blockIdx.x) * (kParts * kPartBytes) + threadIdx.x % kWarp * 16),
          common_(common) {}

    DEVICE void put(u32 part, const Sums& sums) const {
#pragma unroll
        for (u32 i = 0; i < 2 * kRowTiles; ++i) {
            const float(&v)[4] = sums.v[i / kRowTiles][i % kRowTiles];
            const Word4 words = {{as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3])}};
            store_global4_cg(at_ + part * kPartBytes + i * (kWarp * 16), words);
        }
    }

    DEVICE Sums get(u32 part) const {
        Sums sums;
#pragma unroll
        for (u32 i = 0; i < 2 * kRowTiles; ++i) {
            const Word4 words = load_global4_cg(at_ + part * kPartBytes + i * (kWarp * 16));
#pragma unroll
            for (u32 c = 0; c < 4; ++c) sums.v[i / kRowTiles][i % kRowTiles][c] = as_float(words.v[c]);
        }
        return sums;
    }

    /// Says that this warp has put what it will of this run; before it leaves a slice of its rows, and once a slice has come.
    DEVICE void tell(u32 warp) const {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) barrier_arrive(shared_address(common_.left + warp));
    }

    /// Waits until another warp has said so.
    DEVICE void wait(u32 warp, u32 parity) const { barrier_wait(shared_address(common_.left + warp), parity); }

private:
    u8* at_;
    Common& common_;
};

static_assert(Parts::kParts * Parts::kPartBytes <= PARTS_BYTES, "the host makes room for each block's parts");
