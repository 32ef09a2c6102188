// Adjacent columns of an FC2 row, in the output's format.
//
// Defined before this file: OUTPUT_BITS, 32 for f32 or 16 for bf16.
#pragma once

#include "base.cuh"

static_assert(OUTPUT_BITS == 16 || OUTPUT_BITS == 32, "rows are bf16 or f32");

DEVICE void store_columns(u8* to, const float (&v)[4]) {
#if OUTPUT_BITS == 32
    *reinterpret_cast<Word4*>(to) = Word4{{as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3])}};
#else
    *reinterpret_cast<u64*>(to) = static_cast<u64>(pack_bf16(v[2], v[3])) << 32 | pack_bf16(v[0], v[1]);
#endif
}

DEVICE void store_columns(u8* to, const float (&v)[2]) {
#if OUTPUT_BITS == 32
    *reinterpret_cast<u64*>(to) = static_cast<u64>(as_bits(v[1])) << 32 | as_bits(v[0]);
#else
    *reinterpret_cast<u32*>(to) = pack_bf16(v[0], v[1]);
#endif
}
