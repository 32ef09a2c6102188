// What comes to a rank, from what every rank told: how many tokens, where they lie, where each expert's rows start, and where
// rows go home to. Bit for bit what src/dispatch/counts.rs and the host's tables of runs say, for steps in which no host asks.
//
// One block of kThreads threads.
//
// Defined before this file: ARGUMENTS_BYTES, the size of the host's `SettleArgs`.

#include "base.cuh"
#include "peers.cuh"

constexpr u32 kThreads = 1024;
constexpr u32 kWarps = kThreads / kWarp;

/// Numbers of a step that lie on the device; mirrored by `Live` in src/jit/kernels/live.rs.
struct Live {
    /// What flags hold, from the host.
    u64 word;
    /// Tokens that this rank brings, from the host.
    u32 num_tokens;
    u32 unused;
    /// Tokens that come, and rows of this rank's experts.
    u32 num_received;
    u32 num_rows;
    /// 1: more than there is room for were told; then none come.
    u32 is_over;
    u32 padding;
    /// Where what comes lies, by source.
    Run arrived[kMaxPeers];
    /// Where rows go home to.
    Run homes[kMaxPeers];
};

/// The kernel's argument; mirrored by `SettleArgs` there.
struct SettleArgs {
    /// Of rank r the address of its home, before rows of any rank.
    u64 homes[kMaxPeers];
    /// `[num_ranks, num_words]`: tokens, the row of its home at which this rank's begin, rows of each expert.
    const u32* told;
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

static_assert(sizeof(Live) == 32 + 2 * kMaxPeers * sizeof(Run), "Live has no holes");
static_assert(sizeof(SettleArgs) == ARGUMENTS_BYTES, "SettleArgs is the host's");

/// The words of a rank, which may be another device's stores.
DEVICE u32 told_of(const SettleArgs& args, u32 rank, u32 word) {
    return *reinterpret_cast<const volatile u32*>(args.told + static_cast<u64>(rank) * args.num_words + word);
}

/// A run that begins behind `first` rows.
DEVICE Run run_behind(u64 address, u64 first, u64 count, u64 bytes) { return {address - first * bytes, first + count}; }

extern "C" __global__ void __launch_bounds__(kThreads) settle(const __grid_constant__ SettleArgs args) {
    __shared__ u32 rows_of[kMaxPeers], sums[kWarps], is_over;
    const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

    // Rows of each source; 64 bits, so that nonsense is seen
    for (u32 rank = warp; rank < args.num_ranks; rank += kWarps) {
        u64 rows = 0;
        for (u32 expert = lane; expert < args.num_experts; expert += kWarp) rows += told_of(args, rank, 2 + expert);
#pragma unroll
        for (u32 distance = 1; distance < kWarp; distance *= 2) rows += __shfl_xor_sync(kAllLanes, rows, distance);
        if (lane == 0) rows_of[rank] = rows > args.max_rows ? args.max_rows + 1 : static_cast<u32>(rows);
    }
    __syncthreads();

    // Where they lie and go
    if (threadIdx.x == 0) {
        u64 num_tokens = 0, num_rows = 0;
        bool is_too_much = false;
        for (u32 rank = 0; rank < kMaxPeers; ++rank) {
            Run arrived = {0, ~0ull}, home = {0, ~0ull};
            if (rank < args.num_ranks) {
                const u64 tokens = told_of(args, rank, 0), rows = rows_of[rank];
                const u64 home_at = args.homes[rank] + told_of(args, rank, 1) * args.return_bytes;
                arrived = run_behind(args.arrived_at + rank * args.room_bytes, num_tokens, tokens, args.row_bytes);
                home = args.per_slot != 0 ? run_behind(home_at, num_rows, rows, args.return_bytes)
                                          : run_behind(home_at, num_tokens, tokens, args.return_bytes);
                is_too_much = is_too_much || tokens > args.max_tokens || rows > args.max_rows;
                num_tokens += tokens;
                num_rows += rows;
            }
            args.live->arrived[rank] = arrived;
            args.live->homes[rank] = home;
        }
        is_over = is_too_much || num_rows > args.max_rows;
        args.live->num_received = is_over != 0 ? 0 : static_cast<u32>(num_tokens);
        args.live->num_rows = is_over != 0 ? 0 : static_cast<u32>(num_rows);
        args.live->is_over = is_over;
    }
    __syncthreads();

    // Rows of each expert become where they start
    u32 before = 0;
    for (u32 first = 0; first <= args.num_experts; first += kThreads) {
        const u32 expert = first + threadIdx.x;
        u32 mine = 0;
        if (expert < args.num_experts && is_over == 0) {
            for (u32 rank = 0; rank < args.num_ranks; ++rank) mine += told_of(args, rank, 2 + expert);
        }
        u32 through = mine;
#pragma unroll
        for (u32 distance = 1; distance < kWarp; distance *= 2) {
            const u32 other = __shfl_up_sync(kAllLanes, through, distance);
            if (lane >= distance) through += other;
        }
        if (lane == kWarp - 1) sums[warp] = through;
        __syncthreads();
        u32 total = 0;
        for (u32 other = 0; other < kWarps; ++other) {
            if (other == warp) through += before + total;
            total += sums[other];
        }
        if (expert <= args.num_experts) args.expert_offsets[expert] = through - mine;
        before += total;
        __syncthreads();
    }
}
