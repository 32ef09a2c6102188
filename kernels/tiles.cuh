// Places in lists that are made in parallel and come out in one order: that of tokens, and of slots in a token.
//
// Tokens are cut into tiles. A warp walks a tile token by token and numbers what it finds inside the tile; then each column
// of the tiles' counts becomes its running sum; a place is the sum before the tile plus the number inside it. How large a
// tile is changes nothing.
#pragma once

#include "base.cuh"

/// A slot that is masked, or another rank's.
constexpr u32 kNoRow = 0xffffffffu;

/// The lanes below this one.
DEVICE u32 lanes_below() { return (1u << (threadIdx.x % kWarp)) - 1; }

/// `counts` `[num_tiles]` of one column becomes what lies before each tile, from `base` on; returns what lies before the
/// end. All lanes of a warp call it.
DEVICE u32 sum_column(u32* counts, u32 num_tiles, u32 base) {
    const u32 lane = threadIdx.x % kWarp;
    u32 before = base;
    for (u32 first = 0; first < num_tiles; first += kWarp) {
        const u32 tile = first + lane;
        const u32 mine = tile < num_tiles ? counts[tile] : 0;
        u32 through = mine;
        for (u32 distance = 1; distance < kWarp; distance *= 2) {
            const u32 other = __shfl_up_sync(kAllLanes, through, distance);
            if (lane >= distance) through += other;
        }
        if (tile < num_tiles) counts[tile] = before + through - mine;
        before += __shfl_sync(kAllLanes, through, kWarp - 1);
    }
    return before;
}
