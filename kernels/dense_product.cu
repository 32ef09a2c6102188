// Dense projections in bf16 with f32 sums: `out[row, n] = sum over k of x[row, k] * weight[n, k]`, sm_80 and up.
//
// Weights and rows may be sums of several bf16 parts, which together hold all bits of f32 values; the products of the
// smallest are summed first. Tensor cores cut off what does not fit their sum, which shows over thousands of K: so 64 of K are
// summed there and added, rounded to nearest, to a sum in registers.
//
// Any number of blocks of 128 threads; each takes tiles blockIdx.x, blockIdx.x + gridDim.x, ... Dynamic shared memory:
// NUM_STAGES * kStageBytes.
//
// Defined before this file:
//   ARGUMENTS_BYTES   the size of the host's `DenseProductArgs`
//   BLOCK_ROWS        rows a tile: 16 or 64. It changes no bits: every output is one chain over parts and K
//   NUM_STAGES        steps of K under way, 2 or more
//   SHARED_BYTES      what the host launches with

#include "base.cuh"

static_assert(BLOCK_ROWS == 16 || BLOCK_ROWS == 64, "row blocks of pairs of MMAs");
static_assert(NUM_STAGES >= 2, "a step is copied while another is multiplied");

/// Mirrored by `DenseProductArgs` in src/jit/kernels/dense.rs.
struct DenseProductArgs {
    /// bf16 `[num_weight_parts, num_features, width]`
    const u8* weights;
    /// bf16 `[num_x_parts, num_rows, width]`
    const u8* x;
    /// `[num_rows, num_features]`
    float* out;
    /// How many rows there are, where only the device knows; else null.
    const u32* live_rows;
    /// Rows of a part of `x`: as many as there are, or may be.
    u64 num_rows;
    u32 num_features;
    /// What is summed; a multiple of 8.
    u32 width;
    u32 num_weight_parts;
    u32 num_x_parts;
};

static_assert(sizeof(DenseProductArgs) == ARGUMENTS_BYTES, "DenseProductArgs is the host's");

constexpr u32 kThreads = 128;
constexpr u32 kStepK = 64;
constexpr u32 kStepBytes = kStepK * 2;
/// Weight rows a block, 16 for each warp.
constexpr u32 kFeatures = kThreads / kWarp * 16;
constexpr u32 kStageBytes = (kFeatures + BLOCK_ROWS) * kStepBytes;
static_assert(NUM_STAGES * kStageBytes == SHARED_BYTES, "the host launches what this file describes");
constexpr u32 kRowTiles = BLOCK_ROWS / 8;

/// Four 8 x 8 matrices of bf16, a row of one from each lane's address.
DEVICE void load_matrices(u32 address, u32 (&m)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address));
}

/// Piece c of 16 bytes of a row of a step lies at c ^ (row % 8): eight rows of one piece meet all banks.
DEVICE u32 place(u32 row, u32 piece) { return row * kStepBytes + ((piece ^ (row % 8)) * 16); }

/// Copies kRows rows of a step of K; zeros beyond the matrix.
template <u32 kRows>
DEVICE void copy_rows(u32 shared, const u8* matrix, u64 first, u64 num_rows, u32 k, u32 width) {
    const u32 piece = threadIdx.x % 8;
#pragma unroll
    for (u32 row = threadIdx.x / 8; row < kRows; row += kThreads / 8) {
        const bool is_there = first + row < num_rows && k + piece * 8 < width;
        const u64 from = is_there ? (first + row) * width + k + piece * 8 : 0;
        copy_async16(shared + place(row, piece), matrix + from * 2, is_there);
    }
}

/// The steps of a tile: parts, the smallest first, and K within them.
struct Steps {
    u32 num_weight_parts;
    u32 num_x_parts;
    u32 weight_part;
    u32 x_part;
    u32 k;

    DEVICE explicit Steps(const DenseProductArgs& args)
        : num_weight_parts(args.num_weight_parts), num_x_parts(args.num_x_parts),
          weight_part(args.num_weight_parts - 1), x_part(args.num_x_parts - 1), k(0) {}

    /// Parts whose numbers add up to the same are of the same size: those come one after the other.
    DEVICE void advance(u32 width) {
        k += kStepK;
        if (k < width) return;
        k = 0;
        const u32 level = weight_part + x_part;
        if (weight_part > 0 && x_part + 1 < num_x_parts) {
            --weight_part;
            ++x_part;
        } else if (level > 0) {
            weight_part = min_of(level - 1, num_weight_parts - 1);
            x_part = level - 1 - weight_part;
        }
    }
};

/// Multiplies a step: 16 weight rows of a warp by all rows of the tile.
DEVICE void multiply(u32 weights, u32 rows, float (&sums)[kRowTiles][4]) {
    const u32 lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * 16;
    float acc[kRowTiles][4] = {};
#pragma unroll
    for (u32 q = 0; q < kStepK / 16; ++q) {
        u32 a[4];
        load_matrices(weights + place(first + lane % 16, 2 * q + lane / 16), a);
#pragma unroll
        for (u32 n = 0; n < kRowTiles; n += 2) {
            u32 b[4];
            load_matrices(rows + place(n * 8 + lane / 16 * 8 + lane % 8, 2 * q + lane / 8 % 2), b);
            mma_m16n8k16(acc[n], a, b[0], b[1]);
            mma_m16n8k16(acc[n + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) sums[n][i] = __fadd_rn(sums[n][i], acc[n][i]);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) dense_product(const __grid_constant__ DenseProductArgs args) {
    extern __shared__ Word4 shared_memory[];
    const u32 shared = shared_address(shared_memory);
    const u32 lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const u32 num_steps = ceil_div(args.width, kStepK) * args.num_weight_parts * args.num_x_parts;
    const u64 num_rows = number_of(args.live_rows, args.num_rows);
    const u64 row_blocks = ceil_div(num_rows, static_cast<u64>(BLOCK_ROWS));
    const u64 num_tiles = row_blocks * ceil_div(args.num_features, kFeatures);
    for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        const u32 first_feature = static_cast<u32>(tile / row_blocks) * kFeatures;
        const u64 first_row = tile % row_blocks * BLOCK_ROWS;
        Steps next(args);
        const auto copy = [&](u32 step) {
            if (step < num_steps) {
                const u32 stage = shared + step % NUM_STAGES * kStageBytes;
                const u64 of_weights = static_cast<u64>(next.weight_part) * args.num_features * args.width;
                const u64 of_x = next.x_part * args.num_rows * args.width;
                copy_rows<kFeatures>(stage, args.weights + of_weights * 2, first_feature, args.num_features, next.k,
                                     args.width);
                copy_rows<BLOCK_ROWS>(stage + kFeatures * kStepBytes, args.x + of_x * 2, first_row, num_rows, next.k,
                                      args.width);
                next.advance(args.width);
            }
            copy_async_commit();
        };

        // Fill the pipeline
#pragma unroll
        for (u32 step = 0; step + 1 < NUM_STAGES; ++step) copy(step);

        // Multiply, the smallest parts first, K ascending
        float sums[kRowTiles][4] = {};
#pragma unroll 1
        for (u32 step = 0; step < num_steps; ++step) {
            copy_async_wait<NUM_STAGES - 2>();
            __syncthreads();  // the step is there for all, and all are done with the slot that is filled next
            copy(step + NUM_STAGES - 1);
            const u32 stage = shared + step % NUM_STAGES * kStageBytes;
            multiply(stage, stage + kFeatures * kStepBytes, sums);
        }
        __syncthreads();  // the next tile refills slots that slower warps still read

        // Store: features g and g + 8 of a warp's 16, rows 8 n + 2 t + {0, 1}
#pragma unroll
        for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 feature = first_feature + threadIdx.x / kWarp * 16 + g + i / 2 * 8;
                const u64 row = first_row + n * 8 + 2 * t + i % 2;
                if (feature < args.num_features && row < num_rows) {
                    args.out[row * args.num_features + feature] = sums[n][i];
                }
            }
        }
    }
}
