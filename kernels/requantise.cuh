// A block of FC2's input through NVFP4 and back, bit for bit as src/numerics/nvfp4.rs: the value without its global scale.
#pragma once

#include "base.cuh"

/// Above this the nearest e4m3 value would be more than 448 if there were one.
constexpr float kLargestUnclippedScale = 464.0f;

/// A block's scale and what becomes of its values.
struct BlockScale {
    /// The e4m3 scale, as a float.
    float value;
    /// What values are multiplied by before they are rounded to e2m1; 0 where the scale is 0.
    float factor;
    bool is_saturated;
    bool is_zeroed;
};

/// `x` rounded to steps of an eighth (e4m3) or a half (e2m1) of the binade at or below it, ties to even: an addition whose
/// last mantissa bit weighs one step. `magic` is 1.5 * 2^20 or 1.5 * 2^22, `lowest` the lowest binade.
DEVICE float round_to_steps(float magnitude, float lowest, float magic) {
    const float floored = magnitude > lowest ? magnitude : lowest;
    const float offset = __fmul_rn(as_float(as_bits(floored) & 0x7f800000u), magic);
    return __fadd_rn(__fadd_rn(magnitude, offset), -offset);
}

/// The nearest e4m3 value of a magnitude, saturating at 448; NaN stays NaN.
DEVICE float round_e4m3(float magnitude) {
    return round_to_steps(magnitude > 448.0f ? 448.0f : magnitude, 0.015625f, 1572864.0f);
}

/// The nearest e2m1 value, saturating at 6, with its sign; NaN becomes 6, because the scale carries it.
DEVICE float round_e2m1(float x) {
    const float magnitude = fabsf(x);
    const float rounded = round_to_steps(magnitude < 6.0f ? magnitude : 6.0f, 1.0f, 6291456.0f);
    return as_float(as_bits(rounded) | (as_bits(x) & 0x80000000u));
}

/// The scale of a block whose largest magnitude has the bits `amax_bits`; `inverse_scale` is `1 / input_scale`.
DEVICE BlockScale block_scale(u32 amax_bits, float inverse_scale) {
    const float amax = as_float(amax_bits);
    const float wanted = __fmul_rn(__fdiv_rn(amax, 6.0f), inverse_scale);
    const float value = round_e4m3(wanted);
    BlockScale scale;
    scale.value = value;
    scale.factor = value == 0.0f ? 0.0f : __fdiv_rn(inverse_scale, value);
    scale.is_saturated = wanted > kLargestUnclippedScale;
    scale.is_zeroed = value == 0.0f && amax > 0.0f;
    return scale;
}

/// `e2m1(x * factor) * scale`, exact in bf16.
DEVICE float requantise(float x, const BlockScale& scale) {
    return __fmul_rn(round_e2m1(__fmul_rn(x, scale.factor)), scale.value);
}

/// What happened to the block scales that a thread has made.
struct QuantCounts {
    u32 num_saturated;
    u32 num_zeroed;

    DEVICE void add(const BlockScale& scale) {
        num_saturated += scale.is_saturated;
        num_zeroed += scale.is_zeroed;
    }

    /// Adds a warp's counts to `total` `[2]`. Integers: the order of additions changes nothing.
    DEVICE void flush(u64* total) const {
        const u32 saturated = __reduce_add_sync(kAllLanes, num_saturated);
        const u32 zeroed = __reduce_add_sync(kAllLanes, num_zeroed);
        if (threadIdx.x % kWarp == 0 && saturated != 0) atomicAdd(total, static_cast<u64>(saturated));
        if (threadIdx.x % kWarp == 0 && zeroed != 0) atomicAdd(total + 1, static_cast<u64>(zeroed));
    }
};
