// `gather_tokens` writes the image that wgmma schedules of many rows read; those of few gather as they go.
//
// Any number of blocks of 256 threads; each takes groups of 8 rows blockIdx.x, blockIdx.x + gridDim.x, ...
//
// Defined before this file:
//   HIDDEN   width, a multiple of 16

#include "base.cuh"
#include "experts.cuh"
#include "gather.cuh"
#include "image.cuh"

constexpr u32 kThreads = 256;

/// Reads `args.tokens`, writes `args.image`.
extern "C" __global__ void __launch_bounds__(kThreads) gather_tokens(const __grid_constant__ GroupedGemmArgs args) {
    if (!has_rows(args)) return;
    TileCursor<1, kGroupRows> cursor(args);
    Place place;
    for (u32 index = blockIdx.x; cursor.find(index, place); index += gridDim.x) {
        gather_group<kThreads>(args, place, place.index, 0, kTokenSteps);
    }
}
