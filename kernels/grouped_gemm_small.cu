// The grouped GEMM of `lockstep.wgmma.grouped_gemm.{nvfp4,w4a16_nvfp4}` for few rows an expert, sm_90a: what matters is
// that weights stream at the full rate of memory.
//
// One launch, `fc1_fc2`, for both products. A block goes on with FC2 when all blocks are done with FC1 of the rows that it reads
// then; its first weights are on their way while that is waited for. One block of kThreads threads a multiprocessor, launched
// cooperatively, or as turns.cuh says; more rows an expert than BLOCK_ROWS are right, but read weights again. Dynamic shared memory: kSharedBytes.
//
// Every unit of 32 weight rows is shared by 8 warps, each with a slice of K whose activations stay in its registers. A
// warp's slices come into a ring of its own: no warp waits for another one's copies.
//
// Defined before this file:
//   HIDDEN, INTERMEDIATE   widths, multiples of 16
//   QUANTISE, OUTPUT_BITS  as in grouped_gemm_mma.cu
//   BLOCK_ROWS             8 or 16. It changes no bits: slices of K are added in ascending order
//   NUM_STAGES             slots of a warp's ring
//   NUM_THREADS, SHARED_BYTES   what the host launches with, compared with this file's own
//   ACTIVATION, ...        see activation.cuh

#include "activation.cuh"
#include "base.cuh"
#include "experts.cuh"
#include "hopper.cuh"
#include "requantise.cuh"
#include "small_feed.cuh"
#include "small_plan.cuh"
#include "store.cuh"
#include "turns.cuh"
#include "weights.cuh"

/// The rows that a lane reads of a run: where they lie among the tokens, or in FC2's input.
template <bool kIsFc1>
struct Sources {
    u32 row[kRowTiles];

    DEVICE void find(const GroupedGemmArgs& args, const Run& run) {
        const u32 g = threadIdx.x % kWarp / 4;
#pragma unroll
        for (u32 n = 0; n < kRowTiles; ++n) {
            // Beyond the rows the last one again: its sums are not stored.
            row[n] = run.first_row + min_of(n * 8 + g, run.num_rows - 1);
            if constexpr (kIsFc1) row[n] = args.row_token[row[n]];
        }
    }
};

/// A warp's slice of a run's rows, as B fragments: `[step][MMA][row tile][2]`.
template <bool kIsFc1>
struct Rows {
    using G = Gemm<kIsFc1>;
    u32 b[G::kSlice][4][kRowTiles][2];

    DEVICE void load(const GroupedGemmArgs& args, const Sources<kIsFc1>& sources, const Slice<kIsFc1>& slice) {
        const u32 t = threadIdx.x % 4;
#pragma unroll
        for (u32 n = 0; n < kRowTiles; ++n) {
            const u8* values =
                (kIsFc1 ? args.tokens : args.inner) + static_cast<u64>(sources.row[n]) * (G::kWidth * 2);
#pragma unroll
            for (u32 step = 0; step < G::kSlice; ++step) {
                const u32 k = (slice.first_step + step) * kStepK + 16 * t;
                Word4 low = {{0, 0, 0, 0}}, high = {{0, 0, 0, 0}};
                if (slice.holds(step) && k < G::kWidth) {
                    low = load_global4_cg(values + k * 2);
                    high = load_global4_cg(values + k * 2 + 16);
                }
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    b[step][i / 2][n][i % 2] = low.v[i];
                    b[step][2 + i / 2][n][i % 2] = high.v[i];
                }
            }
        }
    }
};

/// Multiplies one step: its weights in shared memory, its rows in registers.
DEVICE void multiply_step(u32 weights, const u32 (&b)[4][kRowTiles][2], float (&acc)[2][kRowTiles][4]) {
    const u32 lane = threadIdx.x % kWarp;
    const Word4 words[2] = {load_shared4(weights + lane * 16), load_shared4(weights + kTileBytes + lane * 16)};
    const u32 scales = load_shared(weights + kScalesAt + lane * 4);
    const u32 s[2][2] = {{scale_pair<0>(scales), scale_pair<1>(scales)}, {scale_pair<2>(scales), scale_pair<3>(scales)}};
#pragma unroll
    for (u32 q = 0; q < 4; q += 2) {
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            u32 a[2][4];
            decode16(words[j].v[q], words[j].v[q + 1], s[j][0], s[j][1], a[0], a[1]);
#pragma unroll
            for (u32 n = 0; n < kRowTiles; ++n) {
                mma_m16n8k16(acc[j][n], a[0], b[q][n][0], b[q][n][1]);
                mma_m16n8k16(acc[j][n], a[1], b[q + 1][n][0], b[q + 1][n][1]);
            }
        }
    }
}

/// Where a lane's sum lies among a warp's. NOTE: the rotation spreads what a reducing warp reads over all banks.
DEVICE u32 sum_at(u32 j, u32 n, u32 c, u32 lane) {
    return (((j * kRowTiles + n) * 4 + c) * kWarp + (lane + c % 2 + 2 * j) % kWarp) * 4;
}

/// Adds all warps' sums of a unit, in the order of K. A warp reduces rows 2 t + {0, 1} of each row tile; its lane
/// 4 g + 2 j + c has columns (j, g) of row c: both halves' sums of all 8 warps.
DEVICE void add_slices(u32 sums, u32 n, float (&halves)[2]) {
    const u32 lane = threadIdx.x % kWarp, t = threadIdx.x / kWarp % 4, g = lane / 4, j = lane / 2 % 2, c = lane % 2;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        float sum = 0.0f;
#pragma unroll
        for (u32 warp = 0; warp < kWarps; ++warp) {
            sum += as_float(load_shared(sums + warp * (kSumsBytes / kWarps) + sum_at(j, n, 2 * half + c, 4 * g + t)));
        }
        halves[half] = sum * kDecodeFactor;
    }
}

/// Sends a unit's columns through NVFP4, a block a row: `values[n]` is a column of row 8 n + 2 t + c.
///
/// With two row tiles a lane makes the scale of the one that bit 1 of its number names, and is told the other's.
DEVICE void requantise_unit(const Run& run, u32 t, float (&values)[kRowTiles], QuantCounts& counts) {
    const u32 lane = threadIdx.x % kWarp, c = lane % 2, own = kRowTiles == 2 ? lane / 2 % 2 : 0;
    // The lanes of a row hold a block. As integers magnitudes order like their bits, and NaN wins.
    u32 amax[kRowTiles];
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) amax[n] = nvfp4::magnitude_bits(values[n]);
    const u32 first = amax[0], last = amax[kRowTiles - 1];
    u32 bits = max(own == 0 ? first : last, __shfl_xor_sync(kAllLanes, own == 0 ? last : first, 2));
#pragma unroll
    for (u32 distance = 4; distance < kWarp; distance *= 2) bits = max(bits, __shfl_xor_sync(kAllLanes, bits, distance));
    const BlockScale scale = block_scale(bits, run.inverse_input_scale);
    if (lane < 2 * kRowTiles && own * 8 + 2 * t + c < run.num_rows) counts.add(scale);
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) values[n] = requantise(values[n], factors_of(scale, c + 2 * n));
}

/// Stores a unit of FC1: one column of one row a lane, 16 unit + 2 g + j.
DEVICE void store_fc1(const GroupedGemmArgs& args, const Run& run, u32 unit, u32 sums, QuantCounts& counts) {
    const u32 lane = threadIdx.x % kWarp, t = threadIdx.x / kWarp % 4;
    float values[kRowTiles];
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
        float halves[2];
        add_slices(sums, n, halves);
        values[n] = activate(halves[0] * run.scales[0], halves[1] * run.scales[1]);
    }
    if constexpr (QUANTISE) requantise_unit(run, t, values, counts);
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
        const u32 row = n * 8 + 2 * t + lane % 2;
        const float odd = __shfl_xor_sync(kAllLanes, values[n], 2);
        if (lane / 2 % 2 == 0 && row < run.num_rows) {
            const u64 at = static_cast<u64>(run.first_row + row) * INTERMEDIATE + unit * 16 + 2 * (lane / 4);
            *reinterpret_cast<u32*>(args.inner + at * 2) = pack_bf16(values[n], odd);
        }
    }
}

/// Stores a unit of FC2: two columns of one row a lane, 32 unit + 4 g + 2 j + {0, 1}.
DEVICE void store_fc2(const GroupedGemmArgs& args, const Run& run, u32 unit, u32 sums) {
    const u32 lane = threadIdx.x % kWarp, t = threadIdx.x / kWarp % 4;
    const u32 column = unit * kUnitRows + 2 * (lane / 2);
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
        const u32 row = n * 8 + 2 * t + lane % 2;
        float v[2];
        add_slices(sums, n, v);
        v[0] *= run.scales[0];
        v[1] *= run.scales[0];
        // HIDDEN may end in the middle of the last unit, never inside four columns.
        if (row < run.num_rows && column < HIDDEN) {
            store_columns(args.out + (static_cast<u64>(run.first_row + row) * HIDDEN + column) * (OUTPUT_BITS / 8), v);
        }
    }
}

/// Computes what is planned. `turn` says which half of the warps reduces and which half of the sums is written.
template <bool kIsFc1>
DEVICE void compute(const GroupedGemmArgs& args, const Plan<kIsFc1>& plan, Ring& ring, Feed& feed, u32 sums,
                    u32& turn, QuantCounts& counts) {
    using G = Gemm<kIsFc1>;
    const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const Slice<kIsFc1> slice = Slice<kIsFc1>::mine();
    const u32 num_runs = plan.num_runs;
    Sources<kIsFc1> sources;
    Rows<kIsFc1> rows;
    if (num_runs > 0) sources.find(args, plan.runs[0]);
    for (u32 r = 0; r < num_runs; ++r) {
        const Run& run = plan.runs[r];
        rows.load(args, sources, slice);
        // The next rows' places are found while this run is computed.
        if (r + 1 < num_runs) sources.find(args, plan.runs[r + 1]);
#pragma unroll 1
        for (u32 i = 0; i < run.num_units; ++i) {
            // Multiply this warp's slice
            float acc[2][kRowTiles][4] = {};
#pragma unroll
            for (u32 slot = 0; slot < G::kSlots; ++slot) {
                if (!slice.holds(slot * G::kSlotSteps)) continue;
                const u32 weights = ring.wait();
#pragma unroll
                for (u32 s = 0; s < G::kSlotSteps; ++s) {
                    const u32 step = slot * G::kSlotSteps + s;
                    if (step < G::kSlice && slice.holds(step)) {
                        multiply_step(weights + s * kStepBytes, rows.b[step < G::kSlice ? step : 0], acc);
                    }
                }
                ring.release();
                if (lane == 0) feed.fill(ring);
            }

            // Hand its sums over; half of the warps add them up while the others go on
            const u32 unit_sums = sums + turn * kSumsBytes;
#pragma unroll
            for (u32 j = 0; j < 2; ++j) {
#pragma unroll
                for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
                    for (u32 c = 0; c < 4; ++c) {
                        store_shared(unit_sums + warp * (kSumsBytes / kWarps) + sum_at(j, n, c, lane),
                                     as_bits(acc[j][n][c]));
                    }
                }
            }
            __syncthreads();
            if (warp / 4 == turn) {
                if constexpr (kIsFc1) {
                    store_fc1(args, run, run.first_unit + i, unit_sums, counts);
                } else {
                    store_fc2(args, run, run.first_unit + i, unit_sums);
                }
            }
            if (!kIsFc1 && run.first_unit + i == 0 && threadIdx.x == 0) count_rows(args, run.num_rows);
            turn ^= 1;
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fc1_fc2(const __grid_constant__ GroupedGemmArgs args) {
    if (!takes_part(args)) return;
    // NOTE: bulk copies to addresses that 128 does not divide are slower.
    alignas(128) extern __shared__ Word4 shared_memory[];
    __shared__ alignas(8) u64 barriers[kWarps * NUM_STAGES];
    __shared__ Plan<true> fc1;
    __shared__ Plan<false> fc2;
    const u32 shared = shared_address(shared_memory), warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

    // Plan both products at once, and set up the ring
    Ring ring = {shared + warp * NUM_STAGES * kSlotBytes, shared_address(barriers) + warp * NUM_STAGES * 8, 0, 0, 0,
                 evict_first()};
    if (lane == 0) {
        for (u32 i = 0; i < NUM_STAGES; ++i) barrier_init(ring.barriers + 8 * i, 1);
    }
    barrier_init_done();
    if (warp == 0) fc1.start(args);
    if (warp == 1) fc2.start(args);
    __syncthreads();

    // FC1, which rarely takes more than one plan
    QuantCounts counts = {0, 0};
    u32 turn = 0;
    const u32 sums = shared + kSumsAt;
    Feed feed(fc1, fc2);
    while (true) {
        if (lane == 0) {
            for (u32 i = 0; i < NUM_STAGES; ++i) feed.fill(ring);
        }
        __syncwarp();
        compute<true>(args, fc1, ring, feed, sums, turn, counts);
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
    compute<false>(args, fc2, ring, feed, sums, turn, counts);
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
        compute<false>(args, fc2, ring, feed, sums, turn, counts);
    }
}
