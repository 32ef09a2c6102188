// The gated activations, in fp32, within 1e-4 * max(1, |value|) of the formulas in src/numerics/activation.rs.
//
// Defined before this file:
//   ACTIVATION         0 SwiGLU, 1 SwiGLU with a clamp, 2 SiTU, 3 SiTU with linear_beta
//   LIMIT_BITS         the clamp, as the bits of an f32, where ACTIVATION is 1
//   BETA_BITS          SiTU's beta
//   LINEAR_BETA_BITS   SiTU's linear_beta, where ACTIVATION is 3
#pragma once

#include "base.cuh"

#define ACTIVATION_SWIGLU 0
#define ACTIVATION_SWIGLU_CLAMP 1
#define ACTIVATION_SITU 2
#define ACTIVATION_SITU_LINEAR 3

static_assert(ACTIVATION >= ACTIVATION_SWIGLU && ACTIVATION <= ACTIVATION_SITU_LINEAR, "ACTIVATION is one of four");

constexpr float kLog2E = 1.4426950408889634f;

/// `1 / (1 + exp(-x))`; neither end overflows to NaN.
DEVICE float sigmoid(float x) { return rcp_approx(1.0f + exp2_approx(-kLog2E * x)); }

/// `limit * tanh(x / limit)`.
///
/// NOTE: `tanh.approx` errs by 5e-4, times linear_beta: too much. `1 - 2 / (exp(2z) + 1)` cancels near 0, which a
/// large limit would multiply; there an odd polynomial stands in (relative error below 1e-7 up to 0.55).
DEVICE float soft_limit(float x, float limit, float inverse_limit) {
    const float z = x * inverse_limit;
    const float magnitude = fabsf(z);
    const float s = z * z;
    float p = fmaf(1.57394409e-2f, s, -5.23025580e-2f);
    p = fmaf(p, s, 1.33152470e-1f);
    p = fmaf(p, s, -3.33327681e-1f);
    const float near = fmaf(p * s, z, z);
    const float far = copysignf(1.0f - 2.0f * rcp_approx(exp2_approx(2.0f * kLog2E * magnitude) + 1.0f), z);
    return limit * (magnitude < 0.55f ? near : far);
}

#if ACTIVATION == ACTIVATION_SITU_LINEAR
/// SiTU with both limits small: one reciprocal for tanh, sigmoid and tanh. With z = |gate| / beta, e = exp(-2 z) and
/// s = exp(-|gate|), tanh(z) = (1 - e) / (1 + e) and sigmoid = 1 / (1 + s), or s / (1 + s) of a negative gate.
///
/// NOTE: exponents are never positive, so that nothing overflows. `1 - e` errs by 2e-7 near 0, which both limits multiply.
DEVICE float situ_linear(float gate, float up) {
    constexpr float beta = __builtin_bit_cast(float, BETA_BITS), linear_beta = __builtin_bit_cast(float, LINEAR_BETA_BITS);
    const float e = exp2_approx(fabsf(gate) * (-2.0f * kLog2E / beta));
    // With beta 4, which K3 has, s is e * e.
    const float s = beta == 4.0f ? e * e : exp2_approx(fabsf(gate) * -kLog2E);
    const float f = exp2_approx(fabsf(up) * (-2.0f * kLog2E / linear_beta));
    const float above = (gate < 0.0f ? s : 1.0f) * (1.0f - e) * (1.0f - f);
    const float below = (1.0f + e) * (1.0f + s) * (1.0f + f);
    const float magnitude = above * (beta * linear_beta) * rcp_approx(below);
    return as_float(as_bits(magnitude) ^ ((as_bits(gate) ^ as_bits(up)) & 0x80000000u));
}
#endif

/// The activation of one gate and one up value.
DEVICE float activate(float gate, float up) {
#if ACTIVATION == ACTIVATION_SWIGLU
    return gate * sigmoid(gate) * up;
#elif ACTIVATION == ACTIVATION_SWIGLU_CLAMP
    const float limit = as_float(LIMIT_BITS);
    // Comparisons rather than min and max, which would replace a NaN by the limit.
    const float g = gate > limit ? limit : gate;
    const float u = up > limit ? limit : up < -limit ? -limit : up;
    return g * sigmoid(g) * u;
#else
#if ACTIVATION == ACTIVATION_SITU_LINEAR
    constexpr float kLimits = __builtin_bit_cast(float, BETA_BITS) * __builtin_bit_cast(float, LINEAR_BETA_BITS);
    if constexpr (kLimits <= 250.0f) return situ_linear(gate, up);
#endif
    const float beta = as_float(BETA_BITS);
    const float gated = soft_limit(gate, beta, 1.0f / beta) * sigmoid(gate);
#if ACTIVATION == ACTIVATION_SITU
    return gated * up;
#else
    const float linear_beta = as_float(LINEAR_BETA_BITS);
    return gated * soft_limit(up, linear_beta, 1.0f / linear_beta);
#endif
#endif
}
