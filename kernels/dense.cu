// What surrounds dense products: f32 values to bf16 parts and back, the norm of a latent, NVFP4 of the
// shared experts' input, a sum of two.
//
// Any number of blocks of 256 threads. Widths are arguments: every kernel here waits for memory, not for arithmetic.
//
// Defined before this file: ARGUMENTS_BYTES, the size of the host's `DenseArgs`.

#include "base.cuh"
#include "requantise.cuh"

/// The one argument of all kernels here; mirrored by `DenseArgs` in src/jit/kernels/dense.rs.
struct DenseArgs {
    const void* in;
    /// The norm's weight, what is added, or `[2]` counts of block scales that saturated and that became 0.
    void* other;
    void* out;
    /// How many rows there are, where only the device knows; else null.
    const u32* live_rows;
    /// Rows, or the most that there may be, of which parts are made.
    u64 num_rows;
    /// Values of a row.
    u32 width;
    /// bf16 parts of a value.
    u32 num_parts;
    /// The norm's epsilon, or the `input_scale` of NVFP4.
    float constant;
    u32 unused;
};

static_assert(sizeof(DenseArgs) == ARGUMENTS_BYTES, "DenseArgs is the host's");

constexpr u32 kThreads = 256;

DEVICE u64 num_rows_of(const DenseArgs& args) { return number_of(args.live_rows, args.num_rows); }

DEVICE u16 bf16_of(float value) { return static_cast<u16>(pack_bf16(value, 0.0f)); }

DEVICE bool is_finite(float value) { return (as_bits(value) & 0x7f800000u) != 0x7f800000u; }

/// `num_parts` bf16 planes of `[num_rows, width]` whose sum is the f32 value: three hold all of its 24 bits. The first
/// alone is the value rounded, ties to even.
extern "C" __global__ void __launch_bounds__(kThreads) split_parts(const __grid_constant__ DenseArgs args) {
    const u64 num_values = num_rows_of(args) * args.width, part_values = args.num_rows * args.width;
    const float* in = static_cast<const float*>(args.in);
    u16* out = static_cast<u16*>(args.out);
    for (u64 i = blockIdx.x * static_cast<u64>(kThreads) + threadIdx.x; i < num_values;
         i += gridDim.x * static_cast<u64>(kThreads)) {
        float rest = in[i];
        for (u32 part = 0; part < args.num_parts; ++part) {
            u16 bits = bf16_of(rest);
            float taken = as_float(static_cast<u32>(bits) << 16);
            if (args.num_parts > 1 && is_finite(rest) && !is_finite(taken)) {
                // The largest values would round to infinity, which no second part could mend.
                taken = as_float(as_bits(rest) & 0xffff0000u);
                bits = static_cast<u16>(as_bits(taken) >> 16);
            }
            out[part * part_values + i] = bits;
            rest = is_finite(taken) ? __fsub_rn(rest, taken) : 0.0f;
        }
    }
}

/// bf16 rows `[num_rows, width]` to f32.
extern "C" __global__ void __launch_bounds__(kThreads) widen_rows(const __grid_constant__ DenseArgs args) {
    const u64 num_values = num_rows_of(args) * args.width;
    const u16* in = static_cast<const u16*>(args.in);
    float* out = static_cast<float*>(args.out);
    for (u64 i = blockIdx.x * static_cast<u64>(kThreads) + threadIdx.x; i < num_values;
         i += gridDim.x * static_cast<u64>(kThreads)) {
        out[i] = as_float(static_cast<u32>(in[i]) << 16);
    }
}

/// f32 rows `[num_rows, width]` through NVFP4: bf16 `e2m1 * e4m3`, without the global scale. A thread takes a block of 16.
extern "C" __global__ void __launch_bounds__(kThreads) quantise_rows(const __grid_constant__ DenseArgs args) {
    const u64 num_blocks = num_rows_of(args) * (args.width / 16);
    const float inverse_scale = __fdiv_rn(1.0f, args.constant);
    QuantCounts counts = {0, 0};
    for (u64 i = blockIdx.x * static_cast<u64>(kThreads) + threadIdx.x; i < num_blocks;
         i += gridDim.x * static_cast<u64>(kThreads)) {
        const float* in = static_cast<const float*>(args.in) + i * 16;
        u32* out = static_cast<u32*>(args.out) + i * 8;
        float x[16];
        u32 amax = 0;
#pragma unroll
        for (u32 j = 0; j < 16; ++j) {
            x[j] = in[j];
            amax = max(amax, nvfp4::magnitude_bits(x[j]));
        }
        const BlockScale scale = block_scale(amax, inverse_scale);
        counts.add(scale);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) out[j] = pack_bf16(requantise(x[2 * j], scale), requantise(x[2 * j + 1], scale));
    }
    counts.flush(static_cast<u64*>(args.other));
}

/// `x * weight / sqrt(mean(x^2) + epsilon)` of rows, rounded to bf16; squares are summed in f64. A block takes a row.
extern "C" __global__ void __launch_bounds__(kThreads) rms_norm(const __grid_constant__ DenseArgs args) {
    __shared__ double of_warp[kThreads / kWarp];
    const float* weight = static_cast<const float*>(args.other);
    u16* out = static_cast<u16*>(args.out);
    const u64 num_rows = num_rows_of(args);
    for (u64 row = blockIdx.x; row < num_rows; row += gridDim.x) {
        const float* in = static_cast<const float*>(args.in) + row * args.width;
        double sum = 0.0;
        for (u32 i = threadIdx.x; i < args.width; i += kThreads) sum += static_cast<double>(in[i]) * in[i];
#pragma unroll
        for (u32 distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
        if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = sum;
        __syncthreads();
        double total = 0.0;
#pragma unroll
        for (u32 warp = 0; warp < kThreads / kWarp; ++warp) total += of_warp[warp];
        const double scale = 1.0 / sqrt(total / args.width + args.constant);
        for (u32 i = threadIdx.x; i < args.width; i += kThreads) {
            const float normed = static_cast<float>(in[i] * scale);
            out[row * args.width + i] = bf16_of(__fmul_rn(normed, weight[i]));
        }
        __syncthreads();  // the next row's sums take the same places
    }
}

/// `out += other`, `[num_rows, width]` f32.
extern "C" __global__ void __launch_bounds__(kThreads) add_rows(const __grid_constant__ DenseArgs args) {
    const u64 num_values = num_rows_of(args) * args.width;
    const float* other = static_cast<const float*>(args.other);
    float* out = static_cast<float*>(args.out);
    for (u64 i = blockIdx.x * static_cast<u64>(kThreads) + threadIdx.x; i < num_values;
         i += gridDim.x * static_cast<u64>(kThreads)) {
        out[i] = __fadd_rn(out[i], other[i]);
    }
}
