// A token's values from the words that travel to bf16 as experts read them: whoever has the words says where they are.
//
// Defined before this file:
//   QUANTISE          1: values that travel unquantised go through NVFP4 here
#pragma once

#include "base.cuh"
#include "nvfp4.cuh"
#include "payload.cuh"
#include "requantise.cuh"

static_assert(PAYLOAD_BITS != 4 || !QUANTISE, "what travels as NVFP4 is quantised already");

/// What a thread makes at once: values, the words that they come in, and those that they become.
constexpr u32 kReadValues = PAYLOAD_BITS == 4 || QUANTISE ? 16 : PAYLOAD_BITS == 16 ? 8 : 4;
constexpr u32 kReadWords = kReadValues * PAYLOAD_BITS / 32;
constexpr u32 kReadPieces = HIDDEN / kReadValues;
constexpr u32 kMadeWords = kReadValues / 2;
constexpr bool kReadsScales = PAYLOAD_BITS == 4;

#if PAYLOAD_BITS == 4
/// The value of an e2m1 code: as if its exponent were f32's, then scaled by 2^126, which is exact.
DEVICE float e2m1_value(u32 code) {
    const float magnitude = __fmul_rn(as_float((code & 7u) << 22), as_float((127u + 126u) << 23));
    return as_float(as_bits(magnitude) | (code & 8u) << 28);
}
#endif

/// Value `i` of words of a piece that travels unquantised.
DEVICE float value_of(const u32 (&words)[kReadWords], u32 i) {
#if PAYLOAD_BITS == 32
    return as_float(words[i]);
#else
    return as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
#endif
}

/// `scale` are the bits of NVFP4's block scale; `inverse_scale` is that of the global scale that values are quantised with.
DEVICE void unpack_piece(const u32 (&words)[kReadWords], u32 scale, float inverse_scale, QuantCounts& counts,
                         u32 (&made)[kMadeWords]) {
#if PAYLOAD_BITS == 4
    const float of_block = nvfp4::e4m3_decode(scale);
#pragma unroll
    for (u32 i = 0; i < kMadeWords; ++i) {
        const u32 pair = words[i / 4] >> (8 * (i % 4)) & 0xffu;
        // Six significant bits: exact in bf16.
        made[i] = pack_bf16(__fmul_rn(e2m1_value(pair & 15u), of_block), __fmul_rn(e2m1_value(pair >> 4), of_block));
    }
#elif QUANTISE
    u32 amax_bits = 0;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) amax_bits = max(amax_bits, nvfp4::magnitude_bits(value_of(words, i)));
    const BlockScale of_block = block_scale(amax_bits, inverse_scale);
    counts.add(of_block);
#pragma unroll
    for (u32 i = 0; i < kMadeWords; ++i) {
        made[i] = pack_bf16(requantise(value_of(words, 2 * i), of_block), requantise(value_of(words, 2 * i + 1), of_block));
    }
#elif PAYLOAD_BITS == 32
#pragma unroll
    for (u32 i = 0; i < kMadeWords; ++i) made[i] = pack_bf16(value_of(words, 2 * i), value_of(words, 2 * i + 1));
#else
#pragma unroll
    for (u32 i = 0; i < kMadeWords; ++i) made[i] = words[i];
#endif
}
