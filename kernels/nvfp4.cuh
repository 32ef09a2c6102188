// NVFP4 on the device: e2m1 codes, e4m3 block scales, bit for bit what src/numerics computes on hosts.
//
// All arithmetic is fp32, IEEE, in the host's order. NOTE: products and sums are written as __fmul_rn and __fadd_rn, because
// the compiler would otherwise fuse a product into the sum behind it, and the rounding of that sum is the code.
#pragma once

namespace nvfp4 {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "codes and counts have fixed widths");

// Values that share a block scale.
constexpr int kBlock = 16;

constexpr float kE2m1Max = 6.0f;
constexpr float kE4m3Max = 448.0f;
constexpr float kE4m3MinNormal = 0.015625f;
constexpr u32 kE4m3Nan = 0x7fu;
// Up to here 448 is the nearest e4m3 value; above, a scale was clipped.
constexpr float kLargestUnclippedScale = 464.0f;

constexpr u32 kExponentBits = 0x7f800000u;

// The power of two at or below a positive normal float.
__device__ __forceinline__ float binade_of(float x) { return __uint_as_float(__float_as_uint(x) & kExponentBits); }

// The code of the nearest e2m1 value, ties to the even code, saturating at 6; in the low 4 bits. Zero keeps its sign. NaN
// becomes the largest value: the block scale carries it.
__device__ __forceinline__ u32 e2m1_encode(float x) {
    float magnitude = fabsf(x);
    magnitude = magnitude < kE2m1Max ? magnitude : kE2m1Max;
    const float binade = binade_of(magnitude > 1.0f ? magnitude : 1.0f);
    // 1.5 * 2^22: the last bit of a float in [2^22, 2^23) weighs a half, so that the addition rounds.
    const float sum = __fadd_rn(magnitude, __fmul_rn(binade, 6291456.0f));
    const u32 above_one = (__float_as_uint(binade) >> 23) - 127u;
    const u32 code = (__float_as_uint(sum) & 7u) + 2u * above_one;
    return (code | ((__float_as_uint(x) >> 28) & 8u)) & 15u;
}

// The code of the nearest e4m3 value, ties to the even code, saturating at 448. Zero keeps its sign; NaN becomes 0x7F.
__device__ __forceinline__ u32 e4m3_encode(float x) {
    float magnitude = fabsf(x);
    magnitude = magnitude > kE4m3Max ? kE4m3Max : magnitude;
    const float binade = binade_of(magnitude > kE4m3MinNormal ? magnitude : kE4m3MinNormal);
    // 1.5 * 2^20: the last bit of a float in [2^20, 2^21) weighs an eighth.
    const float sum = __fadd_rn(magnitude, __fmul_rn(binade, 1572864.0f));
    // Exponents of f32 and e4m3 differ by 120; the smallest binade is that of exponent 1.
    const u32 above_min = (__float_as_uint(binade) >> 23) - 121u;
    const u32 code = (__float_as_uint(sum) & 31u) + 8u * above_min;
    return x != x ? kE4m3Nan : code | ((__float_as_uint(x) >> 24) & 0x80u);
}

// The value of an e4m3 code, exactly. Both NaN codes become NaN.
__device__ __forceinline__ float e4m3_decode(u32 code) {
    const u32 magnitude = code & 0x7fu;
    const u32 sign = (code & 0x80u) << 24;
    // As if its exponent were f32's, then scaled by 2^120: exact, subnormals included.
    const float value = __fmul_rn(__uint_as_float(magnitude << 20), __uint_as_float((127u + 120u) << 23));
    return __uint_as_float(magnitude == 0x7fu ? sign | 0x7fc00000u : sign | __float_as_uint(value));
}

// A larger magnitude has larger bits, and NaN the largest: the maximum of magnitudes as integers does not lose a NaN.
__device__ __forceinline__ u32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// A block's scale, and what its values are multiplied by before they are rounded to e2m1.
struct BlockScale {
    u32 bits;
    float factor;
    // The scale was clipped to 448: values saturate.
    bool saturated;
    // A value is not zero and the scale is: values vanish.
    bool zeroed;
};

// `amax_bits`: the largest magnitude_bits of the block; `inverse_scale`: 1 / input_scale.
__device__ __forceinline__ BlockScale block_scale(u32 amax_bits, float inverse_scale) {
    const float amax = __uint_as_float(amax_bits);
    const float wanted = __fmul_rn(__fdiv_rn(amax, kE2m1Max), inverse_scale);
    const u32 bits = e4m3_encode(wanted);
    const float scale = e4m3_decode(bits);
    const bool is_zero = scale == 0.0f;
    return {bits, is_zero ? 0.0f : __fdiv_rn(inverse_scale, scale), wanted > kLargestUnclippedScale,
            is_zero && amax > 0.0f};
}

// Eight values into eight codes, the first in the lowest nibble.
__device__ __forceinline__ u32 pack_eight(const float* values, float factor) {
    u32 packed = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) packed |= e2m1_encode(__fmul_rn(values[i], factor)) << (4 * i);
    return packed;
}

}  // namespace nvfp4
