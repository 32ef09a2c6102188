// Rows into the order in which experts read them: `gather_tokens` writes the image that the wgmma schedules take.
//
// Any number of blocks of 256 threads; each takes groups of 8 rows blockIdx.x, blockIdx.x + gridDim.x, ...
//
// Defined before this file:
//   HIDDEN   width, a multiple of 16

#include "base.cuh"
#include "experts.cuh"
#include "image.cuh"
#include "weights.cuh"

constexpr u32 kThreads = 256;
constexpr u32 kSteps = (HIDDEN + kStepK - 1) / kStepK;

/// Reads `args.tokens` `[num_tokens, HIDDEN]` bf16, writes the image `args.inner`. Rows and K beyond the end are zero.
extern "C" __global__ void __launch_bounds__(kThreads) gather_tokens(const __grid_constant__ GroupedGemmArgs args) {
    // A thread writes piece `threadIdx.x % 8` of one row, at every fourth step.
    const u32 piece = threadIdx.x % 8, row_in_group = threadIdx.x / 8 % kGroupRows;
    TileCursor<1, kGroupRows> cursor(args);
    Place place;
    for (u32 index = blockIdx.x; cursor.find(index, place); index += gridDim.x) {
        const u32 row = place.index * kGroupRows + row_in_group;
        const bool is_real = row < place.num_rows;
        const u64 token = is_real ? args.row_token[place.first_row + row] : 0;
        const u8* from = args.tokens + token * (HIDDEN * 2);
        u8* image = args.inner + image_start<kSteps>(place.padded_row);
        const u32 num_groups = ceil_div(place.num_rows, kGroupRows);
        for (u32 step = threadIdx.x / 64; step < kSteps; step += kThreads / 64) {
            Word4 words;
#pragma unroll
            for (u32 t = 0; t < 4; ++t) {
                const u32 k = step * kStepK + 16 * t;
                const bool is_there = is_real && k < HIDDEN;
                words.v[t] = is_there ? reinterpret_cast<const u32*>(from + k * 2)[piece] : 0;
            }
            u8* group = image + image_step(step, place.index, num_groups);
            *reinterpret_cast<Word4*>(group + row_in_group * kImageRowBytes + (piece ^ row_in_group) * 16) = words;
        }
    }
}
