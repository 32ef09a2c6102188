// A token's values and slots into the words that travel, as src/dispatch/layout.rs lays them out: whoever stores them says where.
#pragma once

#include "base.cuh"
#include "nvfp4.cuh"
#include "payload.cuh"
#include "requantise.cuh"
#include "tiles.cuh"

/// What a thread makes at once: values, and words of them.
constexpr u32 kPieceValues = PAYLOAD_BITS == 4 ? 16 : PAYLOAD_BITS == 16 ? 8 : 4;
constexpr u32 kPieceWords = kPieceValues * PAYLOAD_BITS / 32;
constexpr u32 kPieces = HIDDEN / kPieceValues;
/// Block scales are bytes; each word of them is made by the lanes of four blocks, zeros behind the last.
constexpr bool kHasScales = PAYLOAD_BITS == 4;
constexpr u32 kScalesAtWord = HIDDEN / 8;
/// Bytes of values, padding included, that whole pieces and scales write.
static_assert(kIdsAt == 4 * (kPieces * kPieceWords + (kHasScales ? ceil_div(kPieces, 4u) : 0)), "nothing is left out");

struct Piece {
    u32 words[kPieceWords];
    /// The bits of its block scale.
    u32 scale;
    bool saturated;
    bool zeroed;
};

DEVICE void load_values(const float* values, u32 piece, float (&v)[kPieceValues]) {
#pragma unroll
    for (u32 i = 0; i < kPieceValues / 4; ++i) {
        const Word4 words = reinterpret_cast<const Word4*>(values + piece * kPieceValues)[i];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) v[4 * i + j] = as_float(words.v[j]);
    }
}

/// `inverse_scale` is that of NVFP4's global scale.
DEVICE Piece pack_piece(const float (&v)[kPieceValues], float inverse_scale) {
    Piece piece = {{}, 0, false, false};
#if PAYLOAD_BITS == 4
    u32 amax_bits = 0;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) amax_bits = max(amax_bits, nvfp4::magnitude_bits(v[i]));
    const nvfp4::BlockScale scale = nvfp4::block_scale(amax_bits, inverse_scale);
    piece.words[0] = nvfp4::pack_eight(v, scale.factor);
    piece.words[1] = nvfp4::pack_eight(v + 8, scale.factor);
    piece.scale = scale.bits;
    piece.saturated = scale.saturated;
    piece.zeroed = scale.zeroed;
#else
#pragma unroll
    for (u32 i = 0; i < kPieceWords; ++i) {
        piece.words[i] = PAYLOAD_BITS == 32 ? as_bits(v[i]) : pack_bf16(v[2 * i], v[2 * i + 1]);
    }
#endif
    return piece;
}

/// The scales of the four lanes around this one, whose first has a piece whose number is a multiple of 4. All lanes of a warp
/// call it, those without a piece with 0.
DEVICE u32 four_scales(u32 scale) {
    u32 word = scale << (8 * (threadIdx.x % 4));
    word |= __shfl_xor_sync(kAllLanes, word, 1);
    return word | __shfl_xor_sync(kAllLanes, word, 2);
}

/// Packs piece `at`, of which a lane without one has a number that is too large, and has `store(word, words)` and
/// `store_scales(word, bits)` store it for all of the token's `num_targets`: what happened to block scales counts for each.
/// Whole warps call it; their first lane's number is a multiple of 4.
template <typename Store, typename StoreScales>
DEVICE void pack_values(const float (&v)[kPieceValues], u32 at, float inverse_scale, u32 num_targets, QuantCounts& counts,
                        const Store& store, const StoreScales& store_scales) {
    const bool is_here = at < kPieces;
    const Piece piece = pack_piece(v, inverse_scale);
    if (is_here) store(at * kPieceWords, piece.words);
    if (!kHasScales) return;
    const u32 scales = four_scales(is_here ? piece.scale : 0);
    if (is_here && at % 4 == 0) store_scales(kScalesAtWord + at / 4, scales);
    counts.num_saturated += is_here && piece.saturated ? num_targets : 0;
    counts.num_zeroed += is_here && piece.zeroed ? num_targets : 0;
}

/// A word behind a token's values, of what goes to `rank`: local ids, then weights, -1 and 0 where another rank hosts the
/// slot, then zeros.
template <typename Slot>
DEVICE u32 slot_word(const Slot* slots, u32 num_topk, u32 rank, u32 word) {
    if (word >= 2 * num_topk) return 0;
    const bool is_id = word < num_topk;
    const Slot slot = slots[is_id ? word : word - num_topk];
    if (slot.rank != rank) return is_id ? kNoRow : 0;
    return is_id ? slot.local_idx : as_bits(slot.weight);
}
