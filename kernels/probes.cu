// What the epilogues compute, alone, for tests: `activate_values` and `requantise_blocks`.
//
// Any number of blocks of a multiple of 32 threads, one value or block of 16 a thread.
//
// Defined before this file:
//   ARGUMENTS_BYTES    the size of the host's `ProbeArgs`
//   ACTIVATION, ...    see activation.cuh

#include "activation.cuh"
#include "base.cuh"
#include "requantise.cuh"

/// Mirrored by `ProbeArgs` in src/jit/kernels/probes.rs.
struct ProbeArgs {
    /// Gate values, or what is quantised.
    const float* x;
    /// Up values.
    const float* up;
    /// Activations, or `e2m1 * e4m3` products.
    float* out;
    /// `[2]` block scales that saturated and that became 0; added to.
    u64* counts;
    u32 num_threads;
    float input_scale;
};

static_assert(sizeof(ProbeArgs) == ARGUMENTS_BYTES, "ProbeArgs is the host's");

extern "C" __global__ void activate_values(const __grid_constant__ ProbeArgs args) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < args.num_threads) args.out[i] = activate(args.x[i], args.up[i]);
}

extern "C" __global__ void requantise_blocks(const __grid_constant__ ProbeArgs args) {
    const u32 block = blockIdx.x * blockDim.x + threadIdx.x;
    QuantCounts counts = {0, 0};
    if (block < args.num_threads) {
        const float* x = args.x + block * 16ull;
        u32 amax = 0;
        for (u32 i = 0; i < 16; ++i) amax = max(amax, nvfp4::magnitude_bits(x[i]));
        const BlockScale scale = block_scale(amax, __fdiv_rn(1.0f, args.input_scale));
        counts.add(scale);
        for (u32 i = 0; i < 16; ++i) args.out[block * 16ull + i] = requantise(x[i], scale);
    }
    counts.flush(args.counts);
}
