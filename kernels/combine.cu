// Rows of experts back to one row a token: weight * row, added in slot order in fp32, multiplied and then added.
//
// The same kernel adds a token's slots at its home and, over the slots that a rank hosts, at the owner. Any number of
// blocks of 256 threads; each takes tokens blockIdx.x, blockIdx.x + gridDim.x, ...
//
// Defined before this file:
//   ARGUMENTS_BYTES   the size of the host's `CombineArgs`
//   HIDDEN            width, a multiple of 16
//   NUM_TOPK          slots a token
//   ROW_BITS          32: rows are f32; 16: bf16
//   OUTPUT_BITS       see store.cuh

#include "base.cuh"
#include "store.cuh"

static_assert(HIDDEN % 16 == 0, "rows are made of whole blocks");
static_assert(ROW_BITS == 16 || ROW_BITS == 32, "rows are bf16 or f32");

constexpr u32 kNoRow = 0xffffffffu;

/// The kernel's argument.
struct CombineArgs {
    /// `[num_rows, HIDDEN]`
    const u8* rows;
    /// `[num_tokens, NUM_TOPK]` the row of each slot; kNoRow where the slot is masked or another rank's.
    const u32* slot_row;
    /// `[num_tokens, NUM_TOPK]`
    const float* weights;
    /// `[num_tokens, HIDDEN]`
    u8* out;
    u64 num_tokens;
};

static_assert(sizeof(CombineArgs) == ARGUMENTS_BYTES, "CombineArgs is the host's");

/// Four columns of a row.
DEVICE void load_columns(const u8* row, u32 column, float (&v)[4]) {
#if ROW_BITS == 32
    const Word4 words = *reinterpret_cast<const Word4*>(row + column * 4);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[i] = as_float(words.v[i]);
#else
    const u64 words = *reinterpret_cast<const u64*>(row + column * 2);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[i] = as_float(static_cast<u32>(words >> (16 * i)) << 16);
#endif
}

extern "C" __global__ void __launch_bounds__(256) combine_rows(const __grid_constant__ CombineArgs args) {
    for (u64 token = blockIdx.x; token < args.num_tokens; token += gridDim.x) {
        const u32* slot_row = args.slot_row + token * NUM_TOPK;
        const float* weights = args.weights + token * NUM_TOPK;
        for (u32 column = threadIdx.x * 4; column < HIDDEN; column += blockDim.x * 4) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (u32 slot = 0; slot < NUM_TOPK; ++slot) {
                const u32 row = slot_row[slot];
                if (row == kNoRow) continue;
                float v[4];
                load_columns(args.rows + static_cast<u64>(row) * (HIDDEN * ROW_BITS / 8), column, v);
                // NOTE: not fused: the host rounds the product, and bits are promised alike.
#pragma unroll
                for (u32 i = 0; i < 4; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weights[slot], v[i]));
            }
            store_columns(args.out + (token * HIDDEN + column) * (OUTPUT_BITS / 8), sum);
        }
    }
}
