// The packed weight image of NVFP4 weights, as src/backend/cuda/pack.rs writes it, and its decoding to bf16.
//
// A unit is 32 weight rows, a step 64 of K. An expert's image is [unit][step][kStepBytes]: a unit's K is contiguous, and
// any run of steps is one copy. A step holds two tiles of 16 rows, 32 lanes x 16 bytes of codes each, then 32 lanes x 4
// scale bytes. Lane = 4 g + t holds, of tile j, the rows (j, half 0, g) and (j, half 1, g) at k = 16 t .. 16 t + 15: one
// block of 16 and so one scale a row. MMA q of 4 takes k = 16 t + 4 q + {0, 1} as its columns 2 t + {0, 1} and
// k = 16 t + 4 q + {2, 3} as columns 8 + 2 t + {0, 1}; the order of K inside a step is thus a permutation, which the
// tokens follow. It is the A fragment of mma.sync.m16n8k16 and of wgmma.m64nNk16 alike.
//
// Rows of FC1: (j, 0, g) is gate's, (j, 1, g) up's row 16 unit + 2 g + j, so that a thread has both values of a column.
// Rows of FC2: (j, half, g) is row 32 unit + 4 g + 2 j + half, so that a thread has four adjacent columns.
#pragma once

#include "base.cuh"

constexpr u32 kStepK = 64;
constexpr u32 kUnitRows = 32;
constexpr u32 kTileBytes = 512;
constexpr u32 kScalesAt = 2 * kTileBytes;
constexpr u32 kStepBytes = kScalesAt + 128;

/// bf16 weights: a step of a unit is [tile 2][MMA 4][lane 32][16 bytes], each lane's A fragment; rows and K as for NVFP4.
constexpr u32 kBf16StepBytes = 8 * kTileBytes;

/// The decoded products are 2^-8 of the weights' (before their global scale).
constexpr float kDecodeFactor = 256.0f;

/// Byte `kByte` of `packed`, an unsigned e5m3 of bias 9, as two bf16 of its value times 2^118.
///
/// NOTE: codes decode to bf16's subnormal pattern, 2^-126 of their value, and the product must come back into range.
/// 2^126 in the scale alone would overflow: hence 2^118, and kDecodeFactor in the epilogue.
template <u32 kByte>
DEVICE u32 scale_pair(u32 packed) {
    constexpr u32 kSelect = 0x4040u + 0x0101u * kByte;
    return __byte_perm(packed, 0, kSelect) * 16u + 0x76007600u;
}

/// The product of two bf16 pairs, exact here. An fma because mul.bf16x2 wants sm_90; it keeps subnormals.
DEVICE u32 multiply_bf16(u32 a, u32 b) {
    u32 product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

/// What stands for the left shifts of `decode16`: factors. Another unit than that of shifts and masks multiplies.
struct Shifts {
    u32 by3;
    u32 by5;
    u32 by6;

    /// NOTE: the compiler must not know that they are powers of two, else it shifts.
    template <typename Args>
    DEVICE static Shifts as_factors(const Args& args) {
        const u32 zero = args.num_experts >> 31;
        return {8 + zero, 32 + zero, 64 + zero};
    }
};

/// Two words, 16 codes, as the A fragments of MMAs q (even) and q + 1; `s0` and `s1` are the scales of halves 0 and 1.
///
/// A code's bits s e1 e0 m belong at 15, 8, 7, 6 of a 16-bit half. Each word holds three codes a half that one shift
/// each brings there, and the bits that are left make the fourth of both: 26 instructions for 16 weights.
///   w0: a0 in place {15 | 8, 7, 6}; a1 rotr 5 {other half's 4 | 13, 12, 11}; a2 shl 6 {9 | 2, 1, 0};
///       left {10, 3}: s, e1 of a3 (shl 5); {other half's 5, 14}: s, e1 of b3 (rotr 6)
///   w1: b0 in place; b1 shl 3 {12 | 5, 4, 3}; b2 shl 6; left {14, 13}: e0, m of a3 (shr 7); {11, 10}: of b3 (shr 4)
DEVICE void decode16(u32 w0, u32 w1, u32 s0, u32 s1, const Shifts& left, u32 (&a)[4], u32 (&b)[4]) {
    constexpr u32 kCode = 0x81C081C0u, kHigh = 0x81008100u, kLow = 0x00C000C0u;
    a[0] = multiply_bf16(w0 & kCode, s0);
    a[1] = multiply_bf16(__funnelshift_r(w0, w0, 5) & kCode, s1);
    a[2] = multiply_bf16((w0 * left.by6) & kCode, s0);
    a[3] = multiply_bf16(((w1 >> 7) & kLow) | ((w0 * left.by5) & kHigh), s1);
    b[0] = multiply_bf16(w1 & kCode, s0);
    b[1] = multiply_bf16((w1 * left.by3) & kCode, s1);
    b[2] = multiply_bf16((w1 * left.by6) & kCode, s0);
    b[3] = multiply_bf16(((w1 >> 4) & kLow) | (__funnelshift_r(w0, w0, 6) & kHigh), s1);
}

/// The same where the compiler may choose between shifts and factors.
DEVICE void decode16(u32 w0, u32 w1, u32 s0, u32 s1, u32 (&a)[4], u32 (&b)[4]) {
    decode16(w0, w1, s0, s1, Shifts{8, 32, 64}, a, b);
}

/// The A fragment of MMA `q` of a tile of bf16 weights.
DEVICE void load_fragment(u32 unit, u32 tile, u32 q, u32 (&a)[4]) {
    const Word4 words = load_shared4(unit + (tile * 4 + q) * kTileBytes + threadIdx.x % kWarp * 16);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) a[i] = words.v[i];
}
