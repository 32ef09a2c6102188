// The portable grouped GEMM: `lockstep.mma_sync.grouped_gemm.{nvfp4,w4a16_nvfp4,none}`, sm_80 and up.
//
// Two launches: `fc1` gathers tokens and writes activation(gate, up), `fc2` reads that and writes rows. Any number of
// blocks of kThreads threads; each takes tiles blockIdx.x, blockIdx.x + gridDim.x, ... Dynamic shared memory: NUM_STAGES * kStageBytes.
//
// Defined before this file:
//   HIDDEN, INTERMEDIATE   widths, multiples of 16
//   WEIGHT_BITS            4: the image of weights.cuh; 16: its image of bf16
//   QUANTISE               1: FC2's input goes through NVFP4 with each expert's input_scale; 0: it is rounded to bf16
//   OUTPUT_BITS            32: rows are f32; 16: bf16
//   BLOCK_ROWS             rows a tile: 8, 16, 32 or 64. It changes no bits: every output is one chain of MMAs over K
//   NUM_STAGES             steps of K under way, 2 or more
//   NUM_THREADS, SHARED_BYTES   what the host launches with, compared with this file's own
//   ACTIVATION, ...        see activation.cuh

#include "activation.cuh"
#include "base.cuh"
#include "experts.cuh"
#include "requantise.cuh"
#include "store.cuh"
#include "weights.cuh"

static_assert(HIDDEN % 16 == 0 && INTERMEDIATE % 16 == 0, "NVFP4 blocks divide both widths");
static_assert(WEIGHT_BITS == 4 || WEIGHT_BITS == 16, "weights are NVFP4 or bf16");
static_assert(BLOCK_ROWS == 8 || BLOCK_ROWS == 16 || BLOCK_ROWS == 32 || BLOCK_ROWS == 64, "row blocks of whole MMAs");
static_assert(NUM_STAGES >= 2, "a step is copied while another is multiplied");
static_assert(!QUANTISE || WEIGHT_BITS == 4, "activations are quantised for NVFP4 weights only");

// NOTE: 64 rows want about 160 registers a thread. Two blocks of 8 warps would leave 128 and spill; one of 12 leaves 168.
// bf16 weights would then take more shared memory than consumer parts have.
constexpr u32 kWarps = BLOCK_ROWS == 64 && WEIGHT_BITS == 4 ? 12 : 8;
constexpr u32 kThreads = kWarps * kWarp;
constexpr u32 kBlocksPerSm = BLOCK_ROWS == 64 ? 1 : 2;

constexpr u32 kWeightBytes = WEIGHT_BITS == 4 ? kStepBytes : kBf16StepBytes;
constexpr u32 kRowBytes = kStepK * 2;
constexpr u32 kStageBytes = kWarps * kWeightBytes + BLOCK_ROWS * kRowBytes;
static_assert(NUM_STAGES * kStageBytes == SHARED_BYTES && kThreads == NUM_THREADS, "the host launches what this file describes");
constexpr u32 kRowTiles = BLOCK_ROWS / 8;

/// A product of a layer: `weights [units] x rows`.
template <bool kIsFc1>
struct Gemm {
    static constexpr u32 kWidth = kIsFc1 ? HIDDEN : INTERMEDIATE;
    static constexpr u32 kSteps = (kWidth + kStepK - 1) / kStepK;
    static constexpr u32 kUnits = kIsFc1 ? INTERMEDIATE / 16 : (HIDDEN + kUnitRows - 1) / kUnitRows;
    static constexpr u32 kWeightBlocks = (kUnits + kWarps - 1) / kWarps;
};

/// Where a thread's 16-byte pieces of a tile's rows come from.
///
/// Thread i copies piece i % 8 of rows i / 8, i / 8 + kThreads / 8, ...: eight threads read 128 contiguous bytes of a row.
template <bool kIsFc1>
struct RowPieces {
    static constexpr u32 kRows = (BLOCK_ROWS * 8 + kThreads - 1) / kThreads;
    static constexpr u32 kNoRow = 0xffffffffu;
    u32 row[kRows];

    DEVICE RowPieces(const GroupedGemmArgs& args, const Tile& tile) {
#pragma unroll
        for (u32 i = 0; i < kRows; ++i) {
            const u32 at = threadIdx.x / 8 + i * (kThreads / 8);
            const u32 in_batch = tile.first_row + at;
            row[i] = at >= tile.num_rows ? kNoRow : kIsFc1 ? args.row_token[in_batch] : in_batch;
        }
    }

    /// NOTE: rows are stored with piece c of row r at c ^ (r % 8): the reader's lanes of two rows then meet all banks.
    DEVICE void copy(const u8* base, u32 shared, u32 step) const {
        constexpr u32 kWidth = Gemm<kIsFc1>::kWidth;
        const u32 piece = threadIdx.x % 8;
        const u32 k = step * kStepK + piece * 8;
#pragma unroll
        for (u32 i = 0; i < kRows; ++i) {
            const u32 at = threadIdx.x / 8 + i * (kThreads / 8);
            if (at < BLOCK_ROWS) {
                // Zeros beyond the rows and beyond K: a stray NaN times a padded weight would be NaN.
                const bool is_there = row[i] != kNoRow && k < kWidth;
                const u64 from = is_there ? static_cast<u64>(row[i]) * kWidth + k : 0;
                copy_async16(shared + at * kRowBytes + ((piece ^ (at % 8)) * 16), base + from * 2, is_there);
            }
        }
    }
};

/// Copies a warp's unit of one step; only this warp reads it.
DEVICE void copy_weights(u32 shared, const u8* unit, u32 step) {
    const u8* from = unit + static_cast<u64>(step) * kWeightBytes;
    const u32 lane = threadIdx.x % kWarp;
#pragma unroll
    for (u32 at = 0; at < kWeightBytes; at += kWarp * 16) {
        if (at + lane * 16 < kWeightBytes) copy_async16(shared + at + lane * 16, from + at + lane * 16, true);
    }
}

/// The A fragments of MMAs `2 * kHalf` and `2 * kHalf + 1` of both tiles.
template <u32 kHalf>
DEVICE void weight_fragments(u32 unit, u32 (&a)[2][2][4]) {
#if WEIGHT_BITS == 4
    const u32 lane = threadIdx.x % kWarp;
    const Word4 q0 = load_shared4(unit + lane * 16), q1 = load_shared4(unit + kTileBytes + lane * 16);
    const u32 scales = load_shared(unit + kScalesAt + lane * 4);
    decode16(q0.v[2 * kHalf], q0.v[2 * kHalf + 1], scale_pair<0>(scales), scale_pair<1>(scales), a[0][0], a[0][1]);
    decode16(q1.v[2 * kHalf], q1.v[2 * kHalf + 1], scale_pair<2>(scales), scale_pair<3>(scales), a[1][0], a[1][1]);
#else
#pragma unroll
    for (u32 tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (u32 q = 0; q < 2; ++q) {
            load_fragment(unit, tile, 2 * kHalf + q, a[tile][q]);
        }
    }
#endif
}

/// Multiplies half a step: 32 of K.
template <u32 kHalf>
DEVICE void multiply_half(u32 unit, u32 rows, float (&acc)[2][kRowTiles][4]) {
    const u32 lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    u32 a[2][2][4];
    weight_fragments<kHalf>(unit, a);
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
        // K 16 t + 8 half .. + 7 of row 8 n + g: columns 2 t, 8 + 2 t of two MMAs.
        const Word4 b = load_shared4(rows + (n * 8 + g) * kRowBytes + (((2 * t + kHalf) ^ g) * 16));
#pragma unroll
        for (u32 q = 0; q < 2; ++q) {
            mma_m16n8k16(acc[0][n], a[0][q], b.v[2 * q], b.v[2 * q + 1]);
            mma_m16n8k16(acc[1][n], a[1][q], b.v[2 * q], b.v[2 * q + 1]);
        }
    }
}

/// Sums of a warp's unit, scaled back to weights' values before their global scale.
DEVICE float unscaled(float sum) { return WEIGHT_BITS == 4 ? sum * kDecodeFactor : sum; }

/// Writes the activation of a unit of FC1: columns 16 unit + 2 g + {0, 1} of rows 8 n + 2 t + {0, 1}.
DEVICE void store_inner(const GroupedGemmArgs& args, const Tile& tile, u32 unit, const float (&acc)[2][kRowTiles][4],
                        QuantCounts& counts) {
    const u32 lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const Expert& expert = args.experts[tile.expert];
    const float gate_scale = args.token_scale * expert.gate_scale, up_scale = args.token_scale * expert.up_scale;
#if QUANTISE
    const float inverse_scale = __fdiv_rn(1.0f, expert.input_scale);
#endif
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (u32 c = 0; c < 2; ++c) {
            const u32 row = n * 8 + 2 * t + c;
            float even = activate(unscaled(acc[0][n][c]) * gate_scale, unscaled(acc[0][n][2 + c]) * up_scale);
            float odd = activate(unscaled(acc[1][n][c]) * gate_scale, unscaled(acc[1][n][2 + c]) * up_scale);
#if QUANTISE
            // The unit's 16 columns are one block. As integers magnitudes order like their bits, and NaN wins.
            u32 amax = max(nvfp4::magnitude_bits(even), nvfp4::magnitude_bits(odd));
#pragma unroll
            for (u32 distance = 4; distance < kWarp; distance *= 2) {
                amax = max(amax, __shfl_xor_sync(kAllLanes, amax, distance));
            }
            const BlockScale scale = block_scale(amax, inverse_scale);
            if (g == 0 && row < tile.num_rows) counts.add(scale);
            even = requantise(even, scale);
            odd = requantise(odd, scale);
#endif
            if (row < tile.num_rows) {
                const u64 at = static_cast<u64>(tile.first_row + row) * INTERMEDIATE + unit * 16 + 2 * g;
                *reinterpret_cast<u32*>(args.inner + at * 2) = pack_bf16(even, odd);
            }
        }
    }
}

/// Writes a unit of FC2: columns 32 unit + 4 g + {0, 1, 2, 3} of rows 8 n + 2 t + {0, 1}.
DEVICE void store_rows(const GroupedGemmArgs& args, const Tile& tile, u32 unit, const float (&acc)[2][kRowTiles][4]) {
    const u32 lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const Expert& expert = args.experts[tile.expert];
    const float scale = QUANTISE ? expert.down_scale * expert.input_scale : expert.down_scale;
    const u32 column = unit * kUnitRows + 4 * g;
    // HIDDEN may end in the middle of the last unit, never inside four columns.
    if (column >= HIDDEN) return;
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (u32 c = 0; c < 2; ++c) {
            const u32 row = n * 8 + 2 * t + c;
            if (row >= tile.num_rows) continue;
            const u64 at = static_cast<u64>(tile.first_row + row) * HIDDEN + column;
            float v[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) v[i] = unscaled(acc[i / 2][n][2 * (i % 2) + c]) * scale;
            store_columns(args.out + at * (OUTPUT_BITS / 8), v);
        }
    }
}

template <bool kIsFc1>
DEVICE void grouped_gemm(const GroupedGemmArgs& args) {
    using G = Gemm<kIsFc1>;
    extern __shared__ Word4 shared_memory[];
    const u32 shared = shared_address(shared_memory);
    const u32 warp = threadIdx.x / kWarp;
    QuantCounts counts = {0, 0};
    TileCursor<G::kWeightBlocks, BLOCK_ROWS> cursor(args);
    Place place;
    for (u32 index = blockIdx.x; cursor.find(index, place); index += gridDim.x) {
        const Tile tile = weight_major<G::kWeightBlocks, BLOCK_ROWS>(place);
        const u32 unit = tile.weight_block * kWarps + warp;
        // A warp beyond the last unit copies its share of the rows and multiplies the last unit again, unseen.
        const u32 read_unit = min_of(unit, G::kUnits - 1);
        const Expert& expert = args.experts[tile.expert];
        const u8* weights =
            (kIsFc1 ? expert.fc1 : expert.fc2) + static_cast<u64>(read_unit) * G::kSteps * kWeightBytes;
        const RowPieces<kIsFc1> pieces(args, tile);
        const auto copy = [&](u32 step) {
            if (step < G::kSteps) {
                const u32 stage = shared + step % NUM_STAGES * kStageBytes;
                copy_weights(stage + warp * kWeightBytes, weights, step);
                pieces.copy(kIsFc1 ? args.tokens : args.inner, stage + kWarps * kWeightBytes, step);
            }
            copy_async_commit();
        };

        // Fill the pipeline
#pragma unroll
        for (u32 step = 0; step + 1 < NUM_STAGES; ++step) copy(step);

        // Multiply, K ascending
        float acc[2][kRowTiles][4] = {};
#pragma unroll 1
        for (u32 step = 0; step < G::kSteps; ++step) {
            copy_async_wait<NUM_STAGES - 2>();
            __syncthreads();  // the step is there for all, and all are done with the slot that is filled next
            copy(step + NUM_STAGES - 1);
            const u32 stage = shared + step % NUM_STAGES * kStageBytes;
            multiply_half<0>(stage + warp * kWeightBytes, stage + kWarps * kWeightBytes, acc);
            multiply_half<1>(stage + warp * kWeightBytes, stage + kWarps * kWeightBytes, acc);
        }
        __syncthreads();  // the next tile refills slots that slower warps still read

        // Scale, activate, store
        if (unit < G::kUnits) {
            if (kIsFc1) {
                store_inner(args, tile, unit, acc, counts);
            } else {
                store_rows(args, tile, unit, acc);
                if (unit == 0 && threadIdx.x == 0) count_rows(args, tile.num_rows);
            }
        }
    }
    if (kIsFc1 && QUANTISE) counts.flush(args.counts);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm) fc1(const __grid_constant__ GroupedGemmArgs args) {
    if (has_rows(args)) grouped_gemm<true>(args);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm) fc2(const __grid_constant__ GroupedGemmArgs args) {
    if (has_rows(args)) grouped_gemm<false>(args);
}
