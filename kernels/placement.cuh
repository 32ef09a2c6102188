// Which rank has which experts: contiguous blocks, the first ranks' one larger where they don't divide, as
// src/dispatch/placement.rs has them.
#pragma once

#include "base.cuh"

/// An expert as the rank that a token goes to for it numbers it.
struct Owner {
    u32 rank;
    u32 local_idx;
};

/// Experts over ranks.
struct Placement {
    u32 num_experts;
    u32 num_ranks;

    DEVICE Owner owner_of(u32 expert) const {
        const u32 base = num_experts / num_ranks, extra = num_experts % num_ranks;
        const u32 in_larger = extra * (base + 1);
        if (expert < in_larger) return {expert / (base + 1), expert % (base + 1)};
        const u32 rest = expert - in_larger;
        return {extra + rest / base, rest % base};
    }

    /// How many a rank hosts.
    DEVICE u32 num_experts_of(u32 rank) const { return num_experts / num_ranks + (rank < num_experts % num_ranks ? 1 : 0); }
};
