// What both sides of few.cu share: its argument, and words with tags.
#pragma once

#include "base.cuh"
#include "hear.cuh"
#include "live.cuh"
#include "payload.cuh"
#include "peers.cuh"
#include "placement.cuh"
#include "tiles.cuh"

/// The kernel's argument; mirrored by `FewArgs` in src/jit/kernels/few.rs.
struct FewArgs {
    /// Of counts.
    Hear hear;
    /// `[num_tokens, HIDDEN]`
    const float* values;
    /// `[num_tokens, num_topk]` experts; what is no expert is masked.
    const u32* ids;
    /// `[num_tokens, num_topk]`
    const float* weights;
    /// How many tokens there are, where only the device knows; else null.
    const u32* live_tokens;
    /// `[2 * num_ranks + num_experts]` tokens and slots for each rank, rows of each expert.
    u32* totals;
    /// The same on the host.
    u32* host_totals;
    /// The same of the whole step, where it was cut and this is its first chunk; else null.
    const u32* of_step;
    /// `[num_tokens, num_topk]` where rows come home: of each slot, or of the token's ranks in ascending order; then kNoRow.
    u32* home_rows;
    /// `[4]` block scales that saturated and that became 0, of what left and of what arrived. Added to.
    u64* counts;
    /// Numbers of a step that no host follows; else null.
    Live* live;
    /// `[num_local_experts + 1]` where each expert's rows start.
    u32* expert_offsets;
    /// `[num_received, HIDDEN]` bf16; of quantised values e2m1 * e4m3, without the global scale.
    u8* tokens;
    /// `[num_received, num_topk]`
    float* received_weights;
    /// `[num_rows]` the token that each row reads.
    u32* row_token;
    /// `[num_rows]` the row at each place of the order (token, slot), in which rows go back.
    u32* return_rows;
    /// `[num_received, num_topk]` the row of each slot; kNoRow where it is not hosted here.
    u32* slot_row;
    /// `[num_ranks, num_words]` on the host: what each rank told.
    u32* host_counts;
    /// Where counts, and tagged tokens of rank 0, lie in a region; from rank to rank of the latter; where rows come home.
    u64 counts_at;
    u64 tagged_at;
    u64 tagged_bytes;
    u64 home_at;
    /// From token to token, a multiple of 16; from row to row that goes home.
    u64 row_bytes;
    u64 return_bytes;
    /// Tokens of this rank, or the most that there may be; the most that any rank brings.
    u32 num_tokens;
    u32 max_tokens;
    u32 num_topk;
    u32 num_experts;
    u32 num_local_experts;
    /// From rank to rank of counts, in words; of those the host is to have so many, a multiple of 4.
    u32 num_words;
    u32 num_heard;
    /// 1: each slot's row comes home by itself; 0: one row a rank.
    u32 per_slot;
    /// Blocks that send: none, or 1 and kSendParts + 1 a token. Behind them, those that take.
    u32 num_send_blocks;
    u32 num_take_blocks;
    /// The global scales that values are quantised with, where they leave and where they arrive.
    float input_scale;
    float arrived_scale;
};

static_assert(sizeof(FewArgs) == ARGUMENTS_BYTES, "FewArgs is the host's");

constexpr u32 kThreads = 512, kWarps = kThreads / kWarp;
/// Tokens of a rank and slots of a token, at most: src/dispatch/region.rs.
constexpr u32 kMaxTokens = 16, kMaxTopk = 64;
constexpr u32 kSlotsOfThread = kMaxTokens * kMaxTopk / kThreads;
/// Before a rank's tagged tokens lie two tagged words: how many they are, and the row of its home at which theirs begin.
constexpr u32 kHeadBytes = 16;
constexpr u64 kEpoch = 0xffffffff00000000ull;

/// Where what `source` sends lies in the region of `rank`.
DEVICE u64 tagged_of(const FewArgs& args, u32 rank, u32 source) {
    return args.hear.regions[rank] + args.tagged_at + source * args.tagged_bytes;
}

/// Where its `i`-th token lies there.
DEVICE u64 tagged_token(const FewArgs& args, u64 tagged, u32 i) { return tagged + kHeadBytes + i * (2 * args.row_bytes); }

DEVICE void store_tagged(u64 address, u64 tag, u32 word) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(tag | word) : "memory");
}

/// Aligned to 16 bytes.
DEVICE void store_tagged2(u64 address, u64 tag, u32 first, u32 second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(tag | first), "l"(tag | second)
                 : "memory");
}

DEVICE void load_tagged2(u64 address, u64& first, u64& second) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(address) : "memory");
}
