// Where the parts of a travelling token lie: values, then ids, then weights, as src/dispatch/layout.rs has them. Who packs
// and who unpacks read it here.
//
// Defined before this file:
//   HIDDEN            width, a multiple of 16
//   PAYLOAD_BITS      32: values travel as f32; 16: as bf16; 4: as NVFP4
#pragma once

#include "base.cuh"

static_assert(HIDDEN % 16 == 0, "tokens are made of whole blocks");
static_assert(PAYLOAD_BITS == 32 || PAYLOAD_BITS == 16 || PAYLOAD_BITS == 4, "tokens are f32, bf16 or NVFP4");

constexpr u32 kBlocks = HIDDEN / 16;
/// Bytes of a token's values, or of its codes and scales; what follows is aligned to words.
constexpr u32 kPayloadBytes = PAYLOAD_BITS == 4 ? HIDDEN / 2 + kBlocks : HIDDEN * PAYLOAD_BITS / 8;
constexpr u32 kIdsAt = ceil_div(kPayloadBytes, 4u) * 4;

/// Words into memory that is aligned to as many bytes, 16 at a time where there are so many.
template <u32 kWords>
DEVICE void store_words(u8* to, const u32 (&words)[kWords]) {
    static_assert(kWords == 2 || kWords % 4 == 0, "8 bytes, or a multiple of 16");
    if constexpr (kWords == 2) {
        *reinterpret_cast<u64*>(to) = static_cast<u64>(words[1]) << 32 | words[0];
    } else {
#pragma unroll
        for (u32 i = 0; i < kWords / 4; ++i) {
            reinterpret_cast<Word4*>(to)[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
        }
    }
}

/// The same from there.
template <u32 kWords>
DEVICE void load_words(const u8* from, u32 (&words)[kWords]) {
    static_assert(kWords == 2 || kWords % 4 == 0, "8 bytes, or a multiple of 16");
    if constexpr (kWords == 2) {
        const u64 both = *reinterpret_cast<const u64*>(from);
        words[0] = static_cast<u32>(both);
        words[1] = static_cast<u32>(both >> 32);
    } else {
#pragma unroll
        for (u32 i = 0; i < kWords / 4; ++i) {
            const Word4 four = reinterpret_cast<const Word4*>(from)[i];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) words[4 * i + j] = four.v[j];
        }
    }
}
