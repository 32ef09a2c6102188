// What the epilogues compute, alone, for tests: `activate_values` and `requantise_blocks`. One thread a value or block.
//
// Defined before this file: see activation.cuh.

#include "activation.cuh"
#include "base.cuh"
#include "requantise.cuh"

extern "C" __global__ void activate_values(const float* gate, const float* up, float* out, u32 num_values) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < num_values) out[i] = activate(gate[i], up[i]);
}

/// `out[i] = e2m1 * e4m3` of `x[i]`, blocks of 16; `counts` `[2]` is added to. blockDim.x is a multiple of 32.
extern "C" __global__ void requantise_blocks(const float* x, float input_scale, float* out, u64* counts, u32 num_blocks) {
    const u32 block = blockIdx.x * blockDim.x + threadIdx.x;
    QuantCounts local = {0, 0};
    if (block < num_blocks) {
        u32 amax = 0;
        for (u32 i = 0; i < 16; ++i) amax = max(amax, as_bits(fabsf(x[block * 16ull + i])));
        const BlockScale scale = block_scale(amax, __fdiv_rn(1.0f, input_scale));
        local.add(scale);
        for (u32 i = 0; i < 16; ++i) out[block * 16ull + i] = requantise(x[block * 16ull + i], scale);
    }
    local.flush(counts);
}
