// Places in lists that are made in parallel and come out in one order: that of tokens, and of slots in a token.
//
// Tokens are cut into tiles. A block walks a tile and numbers what it finds inside the tile; a place is what is in the tiles
// before plus the number inside. Each column of counts has a word a tile. How large a tile is changes nothing.
#pragma once

#include "base.cuh"

/// A slot that is masked, or another rank's.
constexpr u32 kNoRow = 0xffffffffu;

/// From column to column of tiles' counts; `MAX_TILES` in src/dispatch/device/stages.rs.
constexpr u32 kMaxTiles = 64;
/// Tokens of a tile at least; `MIN_TILE_TOKENS` there.
constexpr u32 kMinTileTokens = 16;
/// Lanes that read a column together, a word of 16 bytes each.
constexpr u32 kColumnLanes = kMaxTiles / 4;

/// The lanes below this one.
DEVICE u32 lanes_below() { return (1u << (threadIdx.x % kWarp)) - 1; }

/// Tokens of a tile, where `num_tokens` are cut into `num_tiles` at most.
DEVICE u32 tile_tokens_of(u32 num_tokens, u32 num_tiles) {
    const u32 even = ceil_div(num_tokens, num_tiles);
    return even > kMinTileTokens ? even : kMinTileTokens;
}

/// This lane's four tiles of a column, of which those from `end` on count nothing.
DEVICE Word4 load_tiles(const u32* column, u32 end) {
    const u32 first = 4 * (threadIdx.x % kColumnLanes);
    Word4 counts = {{0, 0, 0, 0}};
    if (first < end) counts = load_global4_cg(column + first);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) counts.v[i] = first + i < end ? counts.v[i] : 0;
    return counts;
}

/// What such lanes have together. All lanes of a warp call it.
DEVICE u32 sum_of_tiles(const Word4& counts) {
    u32 sum = counts.v[0] + counts.v[1] + counts.v[2] + counts.v[3];
#pragma unroll
    for (u32 distance = 1; distance < kColumnLanes; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    return sum;
}

/// A part of a tile that a warp walks.
struct Part {
    u32 first;
    u32 end;
};

/// This warp's part of a tile of `num_tokens` tokens. What warps walk lies one behind the other.
DEVICE Part part_of_tile(u32 tile, u32 num_tokens, u32 tile_tokens) {
    const u32 part_tokens = ceil_div(tile_tokens, blockDim.x / kWarp);
    const u32 end_of_tile = min_of(num_tokens, (tile + 1) * tile_tokens);
    const u32 first = min_of(end_of_tile, tile * tile_tokens + threadIdx.x / kWarp * part_tokens);
    return {first, min_of(end_of_tile, first + part_tokens)};
}

/// What each warp of a tile's block has counted, `[warps, stride]` in shared memory, becomes what is before it in the tile; its tile
/// gets what they have together. All threads of the block call it.
DEVICE void sum_warps(u32* of_warps, u32 stride, u32 num_columns, u32* tiles) {
    const u32 num_warps = blockDim.x / kWarp;
    for (u32 column = threadIdx.x; column < num_columns; column += blockDim.x) {
        u32 before = 0;
        for (u32 warp = 0; warp < num_warps; ++warp) {
            u32* count = of_warps + warp * stride + column;
            const u32 in_part = *count;
            *count = before;
            before += in_part;
        }
        tiles[static_cast<u64>(column) * kMaxTiles + blockIdx.x] = before;
    }
}
