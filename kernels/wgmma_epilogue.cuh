// What becomes of a tile's sums: FC1's activations, quantised or not, into the image that FC2 reads; FC2's rows.
//
// Defined before this file: as for grouped_gemm_wgmma.cu.
#pragma once

#include "activation.cuh"
#include "base.cuh"
#include "requantise.cuh"
#include "store.cuh"
#include "wgmma_tiles.cuh"

/// Replaces gate sums by the activation: acc[j][n][c] is column 16 unit + 2 g + j of row 8 n + 2 t + c.
template <u32 kRowTiles>
DEVICE void activate_tile(const GroupedGemmArgs& args, const Expert& expert, bool is_real,
                          float (&acc)[kTiles][kRowTiles][4]) {
    const float gate_scale = args.token_scale * expert.gate_scale * kSumFactor;
    const float up_scale = args.token_scale * expert.up_scale * kSumFactor;
#pragma unroll
    for (u32 j = 0; j < kTiles; ++j) {
#pragma unroll
        for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
            for (u32 c = 0; c < 2; ++c) {
                const float value = activate(acc[j][n][c] * gate_scale, acc[j][n][2 + c] * up_scale);
                // Beyond the last unit the image is zero: FC2's padded weights must not meet a stray NaN.
                acc[j][n][c] = kAreUnitsWhole<true> || is_real ? value : 0.0f;
            }
        }
    }
}

/// Row tiles whose block scales a warp finds together: the lane of g has that of row `8 n + 2 t + c` where g is 2 n + c.
constexpr u32 kScaleTiles = 4;

/// Halves a list of maxima: a lane keeps the half that bit `kDistance` of its number names, with what its partner has of it.
template <u32 kDistance, u32 kCount>
DEVICE void share_maxima(u32 (&bits)[2 * kScaleTiles], u32 lane) {
    const bool is_upper = (lane & kDistance) != 0;
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) {
        const u32 keep = is_upper ? bits[kCount + i] : bits[i], give = is_upper ? bits[i] : bits[kCount + i];
        bits[i] = max(keep, __shfl_xor_sync(kAllLanes, give, kDistance));
    }
}

/// The largest magnitude of a warp's part of a block, for the row that this lane has of row tiles `kScaleTiles * group` ..
template <u32 kRowTiles>
DEVICE u32 warp_maximum(const float (&acc)[kTiles][kRowTiles][4], u32 group, u32 lane) {
    // As integers magnitudes order like their bits, and NaN wins.
    u32 bits[2 * kScaleTiles];
#pragma unroll
    for (u32 i = 0; i < 2 * kScaleTiles; ++i) {
        const u32 n = group * kScaleTiles + i / 2, c = i % 2;
        bits[i] = 0;
        if (n < kRowTiles) {
            bits[i] = nvfp4::magnitude_bits(acc[0][n][c]);
            if constexpr (kTiles == 2) bits[i] = max(bits[i], nvfp4::magnitude_bits(acc[kTiles - 1][n][c]));
        }
    }
    share_maxima<16, 4>(bits, lane);
    share_maxima<8, 2>(bits, lane);
    share_maxima<4, 1>(bits, lane);
    return bits[0];
}

/// Sends the activations of a tile through NVFP4: a unit's 16 columns are a block.
///
/// A lane makes the scale of one row in eight and tells the others: to make them all took longer than everything else here.
template <u32 kRowTiles>
DEVICE void requantise_tile(const Seat& seat, const Work& work, float input_scale, u32 amax_shared,
                            float (&acc)[kTiles][kRowTiles][4], QuantCounts& counts) {
    constexpr u32 kScaleGroups = (kRowTiles + kScaleTiles - 1) / kScaleTiles;
    const u32 g = seat.lane / 4, t = seat.lane % 4;
    const float inverse_scale = __fdiv_rn(1.0f, input_scale);
    u32 amax[kScaleGroups];
#pragma unroll
    for (u32 group = 0; group < kScaleGroups; ++group) amax[group] = warp_maximum(acc, group, seat.lane);
    if constexpr (kTiles == 1) {
        // With one tile a warp both warps of a unit need both maxima, which meet in shared memory.
        const u32 warp = threadIdx.x / kWarp - kGroupThreads / kWarp, at = amax_shared + seat.lane * 4;
#pragma unroll
        for (u32 group = 0; group < kScaleGroups; ++group) {
            store_shared(at + (warp * kScaleGroups + group) * (kWarp * 4), amax[group]);
        }
        named_barrier<kGroupThreads>(2 + seat.group);
#pragma unroll
        for (u32 group = 0; group < kScaleGroups; ++group) {
            amax[group] = max(amax[group], load_shared(at + ((warp ^ 1) * kScaleGroups + group) * (kWarp * 4)));
        }
        // The next tile's store barrier stands between these reads and the next writes.
    }
#pragma unroll
    for (u32 group = 0; group < kScaleGroups; ++group) {
        const BlockScale own = block_scale(amax[group], inverse_scale);
        if (seat.tile == 0 && (group * kScaleTiles + g / 2) * 8 + 2 * t + g % 2 < work.num_rows) counts.add(own);
#pragma unroll
        for (u32 i = 0; i < 2 * kScaleTiles; ++i) {
            const u32 n = group * kScaleTiles + i / 2, c = i % 2;
            if (n >= kRowTiles) continue;
            const BlockFactors factors = factors_of(own, 4 * i + t);
#pragma unroll
            for (u32 j = 0; j < kTiles; ++j) acc[j][n][c] = requantise(acc[j][n][c], factors);
        }
    }
}

/// Tells of the activations that a storer has stored last, once they are there. FC2's tiles wait for it; at once it
/// would stall the storer's warp, since the copy takes a while. All lanes of that warp call it.
///
/// NOTE: with branches here, what all lanes have in common left the uniform registers: 20 % more instructions a step.
DEVICE void tell_stored(const GroupedGemmArgs& args, const Pipeline& ring, const Seat& seat) {
    bulk_store_wait();
    const u32 at = ring.stored(seat.group), is_storer = seat.is_storer() ? 1 : 0;
    u32 group = 0;  // the word is the storer's own: no other lane reads it
    asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %1, 0;\n @p ld.shared.u32 %0, [%2];\n}"
                 : "+r"(group)
                 : "r"(is_storer), "r"(at)
                 : "memory");
    fence_async();
    __threadfence();
    asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %0, 0;\n @p red.release.gpu.global.add.u32 [%1], 1;\n"
                 " @p st.shared.u32 [%2], 0;\n}" ::"r"(group), "l"(args.gathered + group - 1), "r"(at) : "memory");
}

/// Writes a tile's activations into the image: gathered in shared memory to a chunk of 64 columns, then one copy.
template <u32 kRowTiles>
DEVICE void store_inner(const GroupedGemmArgs& args, const Work& work, const Seat& seat, const Pipeline& ring,
                        const float (&acc)[kTiles][kRowTiles][4]) {
    constexpr u32 kStoreThreads = kTiles == 2 ? kGroupThreads : 2 * kGroupThreads;
    const u32 g = seat.lane / 4, t = seat.lane % 4;
    const u32 chunk_shared = ring.shared + kInnerAt + (kTiles == 2 ? seat.group * kRowsBytes : 0);
    const u32 chunk = kTiles == 2 ? work.weight_block * 2 + seat.group : work.weight_block;
    const bool is_storer = seat.is_storer();
    const u32 number = kTiles == 2 ? 4 + seat.group : 4;
    if (seat.is_storing()) tell_stored(args, ring, seat);  // the last tile's chunk has left
    named_barrier<kStoreThreads>(number);
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (u32 c = 0; c < 2; ++c) {
            const u32 at = chunk_shared + n * kGroupBytes + image_pair(2 * t + c, seat.unit % 4, g);
            if constexpr (kTiles == 2) {
                store_shared(at, pack_bf16(acc[0][n][c], acc[kTiles - 1][n][c]));
            } else {
                store_shared_u16(at + 2 * seat.tile, static_cast<u16>(pack_bf16(acc[0][n][c], 0.0f)));
            }
        }
    }
    fence_async_shared();
    named_barrier<kStoreThreads>(number);
    if (!is_storer) return;
    if (chunk < kFc2Steps) {
        u8* to = args.inner + work.image_at<kFc2Steps>() + static_cast<u64>(chunk) * work.num_groups * kGroupBytes;
        bulk_store(to, chunk_shared, work.rows_bytes());
    }
    store_shared(ring.stored(seat.group), work.group_idx() + 1);
}

/// Writes columns 32 unit + 4 g + 2 j + {0, 1} of rows 8 n + 2 t + c; all of them, or those that there are.
template <bool kIsWhole, u32 kRowTiles>
DEVICE void store_rows(u8* to, u32 num_rows, float scale, const float (&acc)[kTiles][kRowTiles][4]) {
    const u32 t = threadIdx.x % 4;
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (u32 c = 0; c < 2; ++c) {
            if (!kIsWhole && n * 8 + 2 * t + c >= num_rows) continue;
            float v[2 * kTiles];
#pragma unroll
            for (u32 i = 0; i < 2 * kTiles; ++i) v[i] = acc[i / 2][n][2 * (i % 2) + c] * scale;
            store_columns(to + (n * 8 + c) * (HIDDEN * (OUTPUT_BITS / 8)), v);
        }
    }
}

template <u32 kRowTiles>
DEVICE void store_tile(const GroupedGemmArgs& args, const Work& work, const Seat& seat,
                       const float (&acc)[kTiles][kRowTiles][4]) {
    const u32 g = seat.lane / 4, t = seat.lane % 4;
    const Expert& expert = args.experts[work.expert];
    const float scale = (QUANTISE ? expert.down_scale * expert.input_scale : expert.down_scale) * kSumFactor;
    const u32 column = (work.weight_block * kUnitsPerBlock + seat.unit) * kUnitRows + 4 * g + 2 * seat.tile;
    // HIDDEN may end in the middle of the last unit, never inside four columns.
    if (HIDDEN % (kUnitsPerBlock * kUnitRows) != 0 && column >= HIDDEN) return;
    u8* to = args.out + (static_cast<u64>(work.first_row + 2 * t) * HIDDEN + column) * (OUTPUT_BITS / 8);
    if (work.num_rows == kRowTiles * 8) {
        store_rows<true>(to, kRowTiles * 8, scale, acc);
    } else {
        store_rows<false>(to, work.num_rows, scale, acc);
    }
}
