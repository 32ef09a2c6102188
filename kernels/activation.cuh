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
/// The smaller of both; NaN if one is.
DEVICE float min_or_nan(float a, float b) {
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
    return smaller;
}

/// SiTU with both limits small: one reciprocal for tanh, sigmoid and tanh. With e = exp(-2 gate / beta), s = exp(-gate) and f
/// for up as e for gate, tanh(gate / beta) = (1 - e) / (1 + e) and sigmoid = 1 / (1 + s).
///
/// NOTE: exponents (of 2) end where tanh is -1 and sigmoid 0 but for less than counts, so that the product of all
/// denominators stays below 2^107. `1 - e` errs by 2e-7 near 0, which both limits multiply.
DEVICE float situ_linear(float gate, float up) {
    constexpr float beta = __builtin_bit_cast(float, BETA_BITS), linear_beta = __builtin_bit_cast(float, LINEAR_BETA_BITS);
    constexpr float limits = beta * linear_beta;
    const float e = exp2_approx(min_or_nan(gate * (-2.0f * kLog2E / beta), 26.0f));
    const float f = exp2_approx(min_or_nan(up * (-2.0f * kLog2E / linear_beta), 28.0f));
    float below;
    if constexpr (beta == 4.0f) {
        below = fmaf(e, e, 1.0f);  // s is e * e
    } else {
        below = 1.0f + exp2_approx(min_or_nan(gate * -kLog2E, 52.0f));
    }
    below = fmaf(e, below, below);
    const float above = fmaf(e, -limits, limits);
    return fmaf(-f, above, above) * rcp_approx(fmaf(below, f, below));
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
