// Quantises rows of activations to NVFP4, bit for bit as numerics::nvfp4::quantise_row does on hosts.
//
// One thread takes a block of 16 values: it reads 32 or 64 bytes and writes 8 bytes of codes and a scale. No thread needs
// another one's values, so that nothing but the copy is waited for.
//
// Defines: INPUT_BF16 (1: values are bf16, 0: f32), ARGUMENTS_BYTES (size of the host's struct).
#include "nvfp4.cuh"

using nvfp4::u32;
using nvfp4::u64;
using nvfp4::u8;

// The host's struct of the same name, src/backend side; see ARGUMENTS_BYTES.
struct QuantiseArguments {
    const u8* input;      // rows of bf16 or f32
    u8* packed;           // rows of codes, two a byte, the even element low
    u8* scales;           // rows of e4m3 scales
    u64* counts;          // [2]: blocks with a clipped scale, blocks that vanished; added to
    u64 input_stride;     // bytes from row to row, a multiple of 16
    u64 packed_stride;    // bytes from row to row, a multiple of 8
    u64 scales_stride;    // bytes from row to row
    u64 num_rows;
    u32 num_blocks;       // blocks of 16 values a row
    float input_scale;    // global scale of the activations, a multiplier
};

static_assert(sizeof(QuantiseArguments) == ARGUMENTS_BYTES, "host and device agree on the arguments");

// 16 values as f32.
__device__ __forceinline__ void load_block(const u8* source, float (&values)[nvfp4::kBlock]) {
#if INPUT_BF16
    const uint4* words = reinterpret_cast<const uint4*>(source);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 word = words[i];
        const u32 pairs[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            values[8 * i + 2 * j] = __uint_as_float(pairs[j] << 16);
            values[8 * i + 2 * j + 1] = __uint_as_float(pairs[j] & 0xffff0000u);
        }
    }
#else
    const float4* words = reinterpret_cast<const float4*>(source);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float4 word = words[i];
        values[4 * i] = word.x;
        values[4 * i + 1] = word.y;
        values[4 * i + 2] = word.z;
        values[4 * i + 3] = word.w;
    }
#endif
}

__device__ __forceinline__ void add_count(u64* total, u32 count) {
    const u32 of_warp = __reduce_add_sync(0xffffffffu, count);
    if (threadIdx.x % 32 == 0 && of_warp != 0) atomicAdd(total, static_cast<u64>(of_warp));
}

// NOTE: the block's size is a multiple of 32: counts are added up by whole warps.
extern "C" __global__ void __launch_bounds__(256) quantise(const __grid_constant__ QuantiseArguments arguments) {
    constexpr u64 kBlockBytes = nvfp4::kBlock * (INPUT_BF16 ? 2 : 4);
    const float inverse_scale = __fdiv_rn(1.0f, arguments.input_scale);
    const u64 num_blocks = arguments.num_rows * arguments.num_blocks;
    const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
    u32 num_saturated = 0;
    u32 num_zeroed = 0;

    for (u64 at = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; at < num_blocks; at += stride) {
        const u64 row = at / arguments.num_blocks;
        const u64 block = at - row * arguments.num_blocks;
        float values[nvfp4::kBlock];
        load_block(arguments.input + row * arguments.input_stride + block * kBlockBytes, values);

        u32 amax_bits = 0;
#pragma unroll
        for (int i = 0; i < nvfp4::kBlock; ++i) amax_bits = max(amax_bits, nvfp4::magnitude_bits(values[i]));
        const nvfp4::BlockScale scale = nvfp4::block_scale(amax_bits, inverse_scale);
        num_saturated += scale.saturated;
        num_zeroed += scale.zeroed;

        u8* packed = arguments.packed + row * arguments.packed_stride + block * (nvfp4::kBlock / 2);
        *reinterpret_cast<uint2*>(packed) =
            make_uint2(nvfp4::pack_eight(values, scale.factor), nvfp4::pack_eight(values + 8, scale.factor));
        arguments.scales[row * arguments.scales_stride + block] = static_cast<u8>(scale.bits);
    }

    add_count(arguments.counts, num_saturated);
    add_count(arguments.counts + 1, num_zeroed);
}
