// The grouped GEMM of `lockstep.wgmma.grouped_gemm.{nvfp4,w4a16_nvfp4}` for few rows an expert, sm_90a: what matters is
// that weights stream at the full rate of memory.
//
// One launch, `fc1_fc2`, for both products. A block goes on with FC2 when all blocks are done with FC1 of the rows that it reads
// then; its first weights are on their way while that is waited for. One block of kThreads threads a multiprocessor, launched
// cooperatively, or as turns.cuh says; more rows an expert than BLOCK_ROWS are right, but read weights again. Dynamic shared memory: kSharedBytes.
//
// A block's units of 32 weight rows that read the same rows are a run; the rows lie in shared memory. K of every unit is cut
// into 8 slices, whatever the run. A run's slices go to the warps in even ranges, which may end within a unit: then a warp leaves its
// sums to the next one. Weights come into a ring of each warp's own. No warp waits for all others of its block before the end of
// FC1: the next run's rows come slice by slice as the last warp is done with this one's.
//
// Defined before this file:
//   HIDDEN, INTERMEDIATE   widths, multiples of 16
//   QUANTISE, OUTPUT_BITS  as in grouped_gemm_mma.cu
//   BLOCK_ROWS             8 or 16. It changes no bits: slices of K are added in ascending order, each from zero
//   NUM_STAGES             slots of a warp's ring
//   SLOT_STEPS             the most steps of a slot
//   NUM_THREADS            how many warps share a run; it changes no bits either
//   SHARED_BYTES, PARTS_BYTES   what the host launches with and makes room for, compared with this file's own
//   ACTIVATION, ...        see activation.cuh

#include "activation.cuh"
#include "base.cuh"
#include "experts.cuh"
#include "hopper.cuh"
#include "ranges_feed.cuh"
#include "ranges_rows.cuh"
#include "requantise.cuh"
#include "small_plan.cuh"
#include "store.cuh"
#include "turns.cuh"
#include "weights.cuh"

/// Multiplies one step: its weights and its rows in shared memory, `rows` at this lane's of the first row tile.
template <u32 kRowBytes>
DEVICE void multiply_step(u32 weights, u32 rows, Sums& sums) {
    const u32 lane = threadIdx.x % kWarp;
    const Word4 words[2] = {load_shared4(weights + lane * 16), load_shared4(weights + kTileBytes + lane * 16)};
    const u32 scales = load_shared(weights + kScalesAt + lane * 4);
    Word4 b[kRowTiles][2];
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
        b[n][0] = load_shared4(rows + n * (8 * kRowBytes));
        b[n][1] = load_shared4(rows + n * (8 * kRowBytes) + 16);
    }
    const u32 s[2][2] = {{scale_pair<0>(scales), scale_pair<1>(scales)}, {scale_pair<2>(scales), scale_pair<3>(scales)}};
#pragma unroll
    for (u32 q = 0; q < 4; q += 2) {
        u32 a[2][2][4];
#pragma unroll
        for (u32 j = 0; j < 2; ++j) decode16(words[j].v[q], words[j].v[q + 1], s[j][0], s[j][1], a[j][0], a[j][1]);
        // What adds to one sum lies as far apart as can be.
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
#pragma unroll
            for (u32 n = 0; n < kRowTiles; ++n) {
                const Word4& words_of_q = b[n][q / 2];
#pragma unroll
                for (u32 j = 0; j < 2; ++j) mma_m16n8k16(sums.v[j][n], a[j][i], words_of_q.v[2 * i], words_of_q.v[2 * i + 1]);
            }
        }
    }
}

/// Multiplies a piece, from zero.
template <bool kIsFc1>
DEVICE Sums multiply_piece(u32 slice, u32 rows, Ring& ring, Feed& feed) {
    using G = Gemm<kIsFc1>;
    const u32 first = G::steps_before(slice), num_steps = G::steps_before(slice + 1) - first;
    Sums sums;
    sums.clear();
#pragma unroll
    for (u32 slot = 0; slot < G::kSlots; ++slot) {
        if (!G::kIsEven && slot * G::kSlotSteps >= num_steps) break;
        const u32 weights = ring.wait();
#pragma unroll
        for (u32 s = 0; s < G::kSlotSteps; ++s) {
            const u32 step = slot * G::kSlotSteps + s;
            if (step < G::kSlice && (G::kIsEven || step < num_steps)) {
                multiply_step<G::kRowBytes>(weights + s * kStepBytes, rows + (first + step) * (kStepK * 2), sums);
            }
        }
        ring.release();
        if (threadIdx.x % kWarp == 0) feed.fill(ring);
    }
    return sums;
}

/// Sends a unit's columns through NVFP4, a block a row: `values[n][c][j]` is column 2 g + j of row 8 n + 2 t + c.
///
/// The lanes of one t hold 2 kRowTiles blocks between them; of each, the lane 4 (n + kRowTiles c) + t makes the scale.
DEVICE void requantise_unit(const Run& run, float (&values)[kRowTiles][2][2], QuantCounts& counts) {
    const u32 lane = threadIdx.x % kWarp, t = lane % 4, n = kRowTiles == 2 ? lane / 4 % 2 : 0;
    const u32 c = lane / (4 * kRowTiles) % 2;
    // As integers magnitudes order like their bits, and NaN wins.
    u32 amax[kRowTiles][2];
#pragma unroll
    for (u32 i = 0; i < 2 * kRowTiles; ++i) {
        const float(&pair)[2] = values[i / 2][i % 2];
        amax[i / 2][i % 2] = max(nvfp4::magnitude_bits(pair[0]), nvfp4::magnitude_bits(pair[1]));
    }
    u32 of_row[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 first = amax[0][i], last = amax[kRowTiles - 1][i];
        of_row[i] = first;
        if constexpr (kRowTiles == 2) {
            of_row[i] = max(n == 0 ? first : last, __shfl_xor_sync(kAllLanes, n == 0 ? last : first, 4));
        }
    }
    u32 bits = max(c == 0 ? of_row[0] : of_row[1],
                   __shfl_xor_sync(kAllLanes, c == 0 ? of_row[1] : of_row[0], 4 * kRowTiles));
#pragma unroll
    for (u32 distance = 8 * kRowTiles; distance < kWarp; distance *= 2) {
        bits = max(bits, __shfl_xor_sync(kAllLanes, bits, distance));
    }
    const BlockScale scale = block_scale(bits, run.inverse_input_scale);
    if (lane < 8 * kRowTiles && 8 * n + 2 * t + c < run.num_rows) counts.add(scale);
#pragma unroll
    for (u32 i = 0; i < 2 * kRowTiles; ++i) {
        const BlockFactors factors = factors_of(scale, 4 * (i / 2 + kRowTiles * (i % 2)) + t);
#pragma unroll
        for (u32 j = 0; j < 2; ++j) values[i / 2][i % 2][j] = requantise(values[i / 2][i % 2][j], factors);
    }
}

/// Stores a unit of FC1: columns 16 unit + 2 g + {0, 1} of rows 8 n + 2 t + {0, 1}.
DEVICE void store_fc1(const GroupedGemmArgs& args, const Run& run, u32 unit, const Sums& sums, QuantCounts& counts) {
    const u32 lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    float values[kRowTiles][2][2];
#pragma unroll
    for (u32 i = 0; i < 4 * kRowTiles; ++i) {
        const u32 n = i / 4, c = i / 2 % 2, j = i % 2;
        const float gate = sums.v[j][n][c] * kDecodeFactor, up = sums.v[j][n][2 + c] * kDecodeFactor;
        values[n][c][j] = activate(gate * run.scales[0], up * run.scales[1]);
    }
    if constexpr (QUANTISE) requantise_unit(run, values, counts);
#pragma unroll
    for (u32 i = 0; i < 2 * kRowTiles; ++i) {
        const u32 row = i / 2 * 8 + 2 * t + i % 2;
        if (row < run.num_rows) {
            const u64 at = static_cast<u64>(run.first_row + row) * INTERMEDIATE + unit * 16 + 2 * g;
            *reinterpret_cast<u32*>(args.inner + at * 2) = pack_bf16(values[i / 2][i % 2][0], values[i / 2][i % 2][1]);
        }
    }
}

/// Stores a unit of FC2: columns 32 unit + 4 g + {0, 1, 2, 3} of the same rows.
DEVICE void store_fc2(const GroupedGemmArgs& args, const Run& run, u32 unit, const Sums& sums) {
    const u32 lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, column = unit * kUnitRows + 4 * g;
#pragma unroll
    for (u32 i = 0; i < 2 * kRowTiles; ++i) {
        const u32 n = i / 2, c = i % 2, row = n * 8 + 2 * t + c;
        float v[4];
#pragma unroll
        for (u32 k = 0; k < 4; ++k) v[k] = sums.v[k / 2][n][k % 2 * 2 + c] * kDecodeFactor * run.scales[0];
        // HIDDEN may end in the middle of the last unit, never inside four columns.
        if (row < run.num_rows && column < HIDDEN) {
            store_columns(args.out + (static_cast<u64>(run.first_row + row) * HIDDEN + column) * (OUTPUT_BITS / 8), v);
        }
    }
}

/// A warp's place, and what it has in common with its block.
struct Seat {
    u32 warp;
    u32 rows;
    Common& common;
    Parts parts;
    /// Of the run's barriers.
    u32 parity;
};

/// Computes a warp's share of a run, and asks for rows of the next one, if there is one.
///
/// In a short run most warps have less than a unit: what they add up goes piece by piece to whoever has the unit's last slice. In
/// a longer one a unit is shared by two warps at most, and what the first of them has added up of it has long been there
/// when the other one comes to it.
template <bool kIsFc1>
DEVICE void compute_run(const GroupedGemmArgs& args, const Plan<kIsFc1>& plan, u32 run_idx, const Seat& seat,
                        Ring& ring, Feed& feed, QuantCounts& counts) {
    using G = Gemm<kIsFc1>;
    const Run& run = plan.runs[run_idx];
    const u32 next = run_idx + 1;
    const bool is_last_run = next == plan.num_runs;
    const Rows<kIsFc1> rows = {seat.rows, seat.common};
    const Parts& parts = seat.parts;
    const Share share = Share::of(run.num_units, seat.warp);
    const u32 lane = threadIdx.x % kWarp, own_rows = seat.rows + lane / 4 * G::kRowBytes + lane % 4 * 32;
    const bool is_short = run.num_units < kWarps;
    u32 num_left = 0;
    const u32 num_units = share.is_empty() ? 0 : share.last_unit() + 1 - share.first_unit();
    const bool puts = num_units > 0 && share.high(share.last_unit()) < kSlices;
    rows.wait(0, seat.parity);
    if (!puts) parts.tell(seat.warp);
#pragma unroll 1
    for (u32 i = 0; i < num_units; ++i) {
        const u32 unit = share.last_unit() - i, low = share.low(unit), high = share.high(unit);
        const bool is_last = i + 1 == num_units, is_in_parts = is_short && high - low < kSlices;
        Sums sums;
        sums.clear();
        if (low > 0 && !is_short) {
            parts.wait(seat.warp - 1, seat.parity);
            sums = parts.get(seat.warp - 1);
        }
#pragma unroll 1
        for (u32 slice = low; slice < high; ++slice) {
            if (i < 2) rows.wait(slice, seat.parity);
            const Sums piece = multiply_piece<kIsFc1>(slice, own_rows, ring, feed);
            if (is_in_parts) {
                parts.put(unit * kSlices + slice, piece);
            } else {
                sums.add(piece);
            }
            if (is_last && !is_short && !is_last_run) {
                for (; num_left <= slice; ++num_left) rows.leave(args, plan, next, num_left, seat.parity);
            }
        }
        if (high < kSlices && !is_short) parts.put(seat.warp, sums);
        if (i == 0 && puts) parts.tell(seat.warp);
        if (high < kSlices) continue;
        if (is_in_parts) {
            for (u32 other = seat.warp; Share::of(run.num_units, other).first > unit * kSlices;) {
                parts.wait(--other, seat.parity);
            }
#pragma unroll 4
            for (u32 slice = 0; slice < kSlices; ++slice) sums.add(parts.get(unit * kSlices + slice));
        }
        if constexpr (kIsFc1) {
            store_fc1(args, run, run.first_unit + unit, sums, counts);
        } else {
            store_fc2(args, run, run.first_unit + unit, sums);
            if (run.first_unit + unit == 0 && lane == 0) count_rows(args, run.num_rows);
        }
    }
    if (is_last_run) return;
    for (; num_left < kSlices; ++num_left) rows.leave(args, plan, next, num_left, seat.parity);
}

/// Computes what is planned. All threads of the block call it.
template <bool kIsFc1>
DEVICE void compute(const GroupedGemmArgs& args, const Plan<kIsFc1>& plan, Seat& seat, Ring& ring, Feed& feed,
                    QuantCounts& counts) {
    const Rows<kIsFc1> rows = {seat.rows, seat.common};
    const u32 num_runs = plan.num_runs;
    if constexpr (kIsFc1) {
        rows.find_tokens(args, plan, seat.warp);
        __syncthreads();
    }
    if (num_runs > 0 && seat.warp < kSlices) rows.load(args, plan, 0, seat.warp);
    __syncwarp();
#pragma unroll 1
    for (u32 r = 0; r < num_runs; ++r) {
        compute_run<kIsFc1>(args, plan, r, seat, ring, feed, counts);
        seat.parity ^= 1;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fc1_fc2(const __grid_constant__ GroupedGemmArgs args) {
    if (!takes_part(args)) return;
    // NOTE: bulk copies to addresses that 128 does not divide are slower.
    alignas(128) extern __shared__ Word4 shared_memory[];
    __shared__ alignas(8) u64 barriers[kWarps * NUM_STAGES];
    __shared__ Common common;
    __shared__ Plan<true> fc1;
    __shared__ Plan<false> fc2;
    const u32 shared = shared_address(shared_memory), warp = warp_idx(), lane = threadIdx.x % kWarp;

    // Plan both products at once, and set up the ring
    Ring ring = {shared + kRowsBytes + warp * NUM_STAGES * kSlotBytes,
                 shared_address(barriers) + warp * NUM_STAGES * 8, 0, 0, 0, evict_first()};
    if (lane == 0) {
        for (u32 i = 0; i < NUM_STAGES; ++i) barrier_init(ring.barriers + 8 * i, 1);
    }
    if (threadIdx.x == 0) common.init();
    barrier_init_done();
    if (warp == 0) fc1.start(args);
    if (warp == 1) fc2.start(args);
    __syncthreads();

    // FC1, which rarely takes more than one plan
    QuantCounts counts = {0, 0};
    Seat seat = {warp, shared, common, Parts(args, common), 0};
    Feed feed(fc1, fc2, warp);
    while (true) {
        if (lane == 0) {
            for (u32 i = 0; i < NUM_STAGES; ++i) feed.fill(ring);
        }
        __syncwarp();
        compute<true>(args, fc1, seat, ring, feed, counts);
        __syncthreads();
        if (warp == 0) tell_activated(args, fc1);
        if (feed.is_fc1_planned()) break;
        if (warp == 0) fc1.go_on(args);
        __syncthreads();
        feed.go_on(fc1);
    }
    if (QUANTISE) counts.flush(args.counts);
    if (warp == 0) wait_activated(args, fc2);
    __syncthreads();

    // FC2, whose first weights are here or on their way
    compute<false>(args, fc2, seat, ring, feed, counts);
    while (fc2.next != fc2.end) {
        __syncthreads();
        if (warp == 0) {
            fc2.go_on(args);
            wait_activated(args, fc2);
        }
        __syncthreads();
        feed.go_on(fc2);
        if (lane == 0) {
            for (u32 i = 0; i < NUM_STAGES; ++i) feed.fill(ring);
        }
        __syncwarp();
        compute<false>(args, fc2, seat, ring, feed, counts);
    }
}
