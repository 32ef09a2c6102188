// What comes to a rank, from what every rank told: how many tokens, where they lie, where each expert's rows start, and where
// rows go home to. Bit for bit what src/dispatch/counts.rs and the host's tables of runs say, for steps in which no host asks.
#pragma once

#include "base.cuh"
#include "live.cuh"
#include "peers.cuh"

/// Warps of a block that settles, at most.
constexpr u32 kMaxSettlers = 8;

/// Where it is told and settled; mirrored by `SettleArgs` there.
struct SettleArgs {
    /// Of rank r the address of its home, before rows of any rank.
    u64 homes[kMaxPeers];
    /// `[num_ranks, num_words]`: tokens, the row of its home at which this rank's begin, rows of each expert.
    const u32* told;
    /// Null: the host knows all of it.
    Live* live;
    /// `[num_experts + 1]`
    u32* expert_offsets;
    /// Where tokens of rank 0 lie; from rank to rank; from token to token.
    u64 arrived_at;
    u64 room_bytes;
    u64 row_bytes;
    /// From row to row that goes home.
    u64 return_bytes;
    u32 num_words;
    u32 num_ranks;
    /// This rank's.
    u32 num_experts;
    /// 1: each slot's row goes home by itself; 0: one row a token.
    u32 per_slot;
    /// The most tokens that a rank brings, and the most rows that there is room for.
    u32 max_tokens;
    u32 max_rows;
};

/// The words of a rank. Flags of counts have been heard, by a kernel before this one.
DEVICE u32 told_of(const SettleArgs& args, u32 rank, u32 word) {
    return args.told[static_cast<u64>(rank) * args.num_words + word];
}

/// Where tokens of every rank lie, for a block.
struct Arrived {
    Run runs[kMaxPeers];
    u32 num_tokens[kMaxPeers];
};

/// Finds it from what was told, and how many tokens come: none if a rank told of more than it may bring. All threads of the block
/// call it.
DEVICE u32 find_arrived(const SettleArgs& args, Arrived& arrived) {
    const u32 rank = threadIdx.x;
    if (rank < kMaxPeers) arrived.num_tokens[rank] = rank < args.num_ranks ? told_of(args, rank, 0) : 0;
    __syncthreads();
    if (rank < kMaxPeers) {
        u64 before = 0;
        for (u32 other = 0; other < min_of(rank, args.num_ranks); ++other) before += arrived.num_tokens[other];
        const u64 address = args.arrived_at + rank * args.room_bytes;
        arrived.runs[rank] = rank < args.num_ranks
                                 ? run_behind(address, before, arrived.num_tokens[rank], args.row_bytes) : Run{0, ~0ull};
    }
    const bool is_over = rank < args.num_ranks && arrived.num_tokens[rank] > args.max_tokens;
    return __syncthreads_or(is_over) != 0 ? 0 : static_cast<u32>(arrived.runs[args.num_ranks - 1].end);
}

/// What is settled for the kernels behind this one. All threads of one block call it.
DEVICE void settle(const SettleArgs& args, Arrived& arrived) {
    __shared__ u32 rows_of[kMaxPeers], sums[kMaxSettlers], is_over;
    const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
    const u32 num_tokens = find_arrived(args, arrived);

    // Rows of each source; 64 bits, so that nonsense is seen
    for (u32 rank = warp; rank < args.num_ranks; rank += num_warps) {
        u64 rows = 0;
#pragma unroll 8
        for (u32 expert = lane; expert < args.num_experts; expert += kWarp) rows += told_of(args, rank, 2 + expert);
#pragma unroll
        for (u32 distance = 1; distance < kWarp; distance *= 2) rows += __shfl_xor_sync(kAllLanes, rows, distance);
        if (lane == 0) rows_of[rank] = rows > args.max_rows ? args.max_rows + 1 : static_cast<u32>(rows);
    }
    __syncthreads();

    // Where they lie and go
    if (threadIdx.x < kMaxPeers) {
        const u32 rank = threadIdx.x;
        u64 tokens_before = 0, rows_before = 0;
        for (u32 other = 0; other < min_of(rank, args.num_ranks); ++other) {
            tokens_before += arrived.num_tokens[other];
            rows_before += rows_of[other];
        }
        Run home = {0, ~0ull};
        if (rank < args.num_ranks) {
            const u64 home_at = args.homes[rank] + told_of(args, rank, 1) * args.return_bytes;
            home = args.per_slot != 0
                       ? run_behind(home_at, rows_before, rows_of[rank], args.return_bytes)
                       : run_behind(home_at, tokens_before, arrived.num_tokens[rank], args.return_bytes);
        }
        args.live->arrived[rank] = arrived.runs[rank];
        args.live->homes[rank] = home;
    }
    if (threadIdx.x == 0) {
        u64 num_rows = 0;
        bool is_too_much = false;
        for (u32 rank = 0; rank < args.num_ranks; ++rank) {
            num_rows += rows_of[rank];
            is_too_much = is_too_much || arrived.num_tokens[rank] > args.max_tokens || rows_of[rank] > args.max_rows;
        }
        is_over = is_too_much || num_rows > args.max_rows;
        args.live->num_received = is_over != 0 ? 0 : num_tokens;
        args.live->num_rows = is_over != 0 ? 0 : static_cast<u32>(num_rows);
        args.live->is_over = is_over;
    }
    __syncthreads();

    // Rows of each expert become where they start
    u32 before = 0;
    for (u32 first = 0; first <= args.num_experts; first += blockDim.x) {
        const u32 expert = first + threadIdx.x;
        u32 mine = 0;
        if (expert < args.num_experts && is_over == 0) {
#pragma unroll 8
            for (u32 rank = 0; rank < args.num_ranks; ++rank) mine += told_of(args, rank, 2 + expert);
        }
        u32 through = sum_through(mine);
        if (lane == kWarp - 1) sums[warp] = through;
        __syncthreads();
        u32 total = 0;
        for (u32 other = 0; other < num_warps; ++other) {
            if (other == warp) through += before + total;
            total += sums[other];
        }
        if (expert <= args.num_experts) args.expert_offsets[expert] = through - mine;
        before += total;
        __syncthreads();
    }
}
