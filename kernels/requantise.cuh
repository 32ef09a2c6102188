// A block of FC2's input through NVFP4 and back, bit for bit as src/numerics/nvfp4.rs: the value without its global scale.
#pragma once

#include "base.cuh"
#include "nvfp4.cuh"

/// A block's scale and what becomes of its values.
struct BlockScale {
    /// The e4m3 scale, as a float.
    float value;
    nvfp4::BlockScale block;
};

/// The scale of a block whose largest magnitude has the bits `amax_bits`; `inverse_scale` is `1 / input_scale`.
DEVICE BlockScale block_scale(u32 amax_bits, float inverse_scale) {
    const nvfp4::BlockScale block = nvfp4::block_scale(amax_bits, inverse_scale);
    return {nvfp4::e4m3_decode(block.bits), block};
}

/// The nearest e2m1 value, as `nvfp4::e2m1_encode` rounds it, without taking the way over its code.
DEVICE float round_e2m1(float x) {
    float magnitude = fabsf(x);
    magnitude = magnitude < nvfp4::kE2m1Max ? magnitude : nvfp4::kE2m1Max;
    const float magic = __fmul_rn(nvfp4::binade_of(magnitude > 1.0f ? magnitude : 1.0f), 6291456.0f);
    const float rounded = __fadd_rn(__fadd_rn(magnitude, magic), -magic);
    return as_float(as_bits(rounded) | (as_bits(x) & 0x80000000u));
}

/// What a block's values are multiplied by before and after they are rounded.
struct BlockFactors {
    float before;
    float after;
};

/// Those of a scale that another lane has made. All lanes of a warp call it.
DEVICE BlockFactors factors_of(const BlockScale& scale, u32 lane) {
    return {__shfl_sync(kAllLanes, scale.block.factor, lane), __shfl_sync(kAllLanes, scale.value, lane)};
}

/// `e2m1(x * factor) * scale`, exact in bf16.
DEVICE float requantise(float x, const BlockFactors& factors) {
    return __fmul_rn(round_e2m1(__fmul_rn(x, factors.before)), factors.after);
}

DEVICE float requantise(float x, const BlockScale& scale) {
    return requantise(x, BlockFactors{scale.block.factor, scale.value});
}

/// What happened to the block scales that a thread has made.
struct QuantCounts {
    u32 num_saturated;
    u32 num_zeroed;

    DEVICE void add(const BlockScale& scale) {
        num_saturated += scale.block.saturated;
        num_zeroed += scale.block.zeroed;
    }

    /// Adds a warp's counts to `total` `[2]`. Integers: the order of additions changes nothing.
    DEVICE void flush(u64* total) const {
        const u32 saturated = __reduce_add_sync(kAllLanes, num_saturated);
        const u32 zeroed = __reduce_add_sync(kAllLanes, num_zeroed);
        if (threadIdx.x % kWarp == 0 && saturated != 0) atomicAdd(total, static_cast<u64>(saturated));
        if (threadIdx.x % kWarp == 0 && zeroed != 0) atomicAdd(total + 1, static_cast<u64>(zeroed));
    }
};
