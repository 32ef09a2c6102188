// The side of few.cu that sends. Every block finds out by itself where all tokens up to its own go.
#pragma once

#include "few.cuh"
#include "pack_values.cuh"

/// Blocks that a token's values take; one more has its slots.
constexpr u32 kSendParts = ceil_div(kPieces, kThreads);

/// What a block reads of all tokens, asked for at once.
struct Asked {
    u32 num_tokens;
    u64 tag;
    u32 experts[kSlotsOfThread];
};

DEVICE Asked ask(const FewArgs& args, u32 num_slots) {
    Asked asked;
#pragma unroll
    for (u32 i = 0; i < kSlotsOfThread; ++i) {
        const u32 slot = threadIdx.x + i * kThreads;
        asked.experts[i] = slot < num_slots ? args.ids[slot] : kNoRow;
    }
    asked.num_tokens = static_cast<u32>(number_of(args.live_tokens, args.num_tokens));
    asked.tag = word_of(args.hear) & kEpoch;
    return asked;
}

DEVICE Placement placement_of(const FewArgs& args) { return {args.num_experts, args.hear.num_ranks}; }

/// `to_ranks` `[kMaxPeers]`: bit t of a rank says that token t goes there. All threads of a block call it.
DEVICE void find_targets(const FewArgs& args, const Asked& asked, u32* to_ranks) {
    if (threadIdx.x < kMaxPeers) to_ranks[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < kSlotsOfThread; ++i) {
        if (asked.experts[i] >= args.num_experts) continue;
        const u32 token = (threadIdx.x + i * kThreads) / args.num_topk;
        if (token < asked.num_tokens) atomicOr(to_ranks + placement_of(args).owner_of(asked.experts[i]).rank, 1u << token);
    }
    __syncthreads();
}

/// The ranks that a token goes to, a bit each. All lanes of a warp call it.
DEVICE u64 targets_of(const u32* to_ranks, u32 token) {
    const u32 lane = threadIdx.x % kWarp;
    const u64 low = __ballot_sync(kAllLanes, to_ranks[lane] >> token & 1u);
    return static_cast<u64>(__ballot_sync(kAllLanes, to_ranks[kWarp + lane] >> token & 1u)) << 32 | low;
}

static_assert(kMaxPeers == 2 * kWarp && kMaxTokens <= 32, "two lanes' worth of ranks, a bit a token");

/// Where a token comes to lie at a rank.
DEVICE u64 row_at(const FewArgs& args, const u32* to_ranks, u32 token, u32 rank) {
    const u32 in_rank = __popc(to_ranks[rank] & ((1u << token) - 1));
    return tagged_token(args, tagged_of(args, rank, args.hear.rank), in_rank);
}

DEVICE void send_values(const FewArgs& args, u32 token, u32 part, u32* to_ranks) {
    const Asked asked = ask(args, (token + 1) * args.num_topk);
    const u32 at = part * kThreads + threadIdx.x;
    float v[kPieceValues];
    load_values(args.values + static_cast<u64>(token) * HIDDEN, min_of(at, kPieces - 1), v);
    find_targets(args, asked, to_ranks);
    const u64 targets = targets_of(to_ranks, token);
    if (targets == 0) return;
    QuantCounts counts = {0, 0};
    pack_values(
        v, at, kHasScales ? __fdiv_rn(1.0f, args.input_scale) : 0.0f, __popcll(targets), counts,
        [&](u32 word, const u32(&words)[kPieceWords]) {
            for (u64 rest = targets; rest != 0; rest &= rest - 1) {
                const u64 to = row_at(args, to_ranks, token, __ffsll(rest) - 1) + 8 * word;
#pragma unroll
                for (u32 i = 0; i < kPieceWords; i += 2) store_tagged2(to + 8 * i, asked.tag, words[i], words[i + 1]);
            }
        },
        [&](u32 word, u32 scales) {
            for (u64 rest = targets; rest != 0; rest &= rest - 1) {
                store_tagged(row_at(args, to_ranks, token, __ffsll(rest) - 1) + 8 * word, asked.tag, scales);
            }
        });
    if (kHasScales) counts.flush(args.counts);
}

/// A slot of the token that a block sends.
struct SentSlot {
    u32 rank;
    u32 local_idx;
    float weight;
};

DEVICE void send_slots(const FewArgs& args, u32 token, u32* to_ranks) {
    __shared__ SentSlot slots[kMaxTopk];
    const u32 first = token * args.num_topk;
    const Asked asked = ask(args, first + args.num_topk);
    if (threadIdx.x < args.num_topk) {
        const u32 expert = args.ids[first + threadIdx.x];
        const float weight = args.weights[first + threadIdx.x];
        const Owner owner = expert < args.num_experts ? placement_of(args).owner_of(expert) : Owner{kNoRow, kNoRow};
        slots[threadIdx.x] = {owner.rank, owner.local_idx, weight};
    }
    find_targets(args, asked, to_ranks);
    const u32 num_words = static_cast<u32>(args.row_bytes - kIdsAt) / 4;
    u32 target = 0;
    // A warp a rank.
    for (u64 rest = targets_of(to_ranks, token); rest != 0; rest &= rest - 1, ++target) {
        if (target % kWarps != threadIdx.x / kWarp) continue;
        const u32 rank = __ffsll(rest) - 1;
        const u64 to = row_at(args, to_ranks, token, rank) + 2 * kIdsAt;
        for (u32 word = threadIdx.x % kWarp; word < num_words; word += kWarp) {
            store_tagged(to + 8 * word, asked.tag, slot_word(slots, args.num_topk, rank, word));
        }
    }
}

/// How many of the bytes before the `end`-th of `words` are `byte`.
DEVICE u32 num_equal(const u32* words, u32 end, u32 byte) {
    u32 num = 0;
    for (u32 i = 0; i * 4 < end; ++i) {
        const u32 other = words[i] ^ byte * 0x01010101u;
        // The top bit of each byte that is zero.
        u32 equal = ~(((other & 0x7f7f7f7fu) + 0x7f7f7f7fu) | other | 0x7f7f7f7fu);
        if (end - i * 4 < 4) equal &= (1u << (8 * (end - i * 4))) - 1;
        num += __popc(equal);
    }
    return num;
}

/// What this rank counts and every rank is told. `rows` `[num_experts]` in shared memory.
DEVICE void tell_few(const FewArgs& args, u32* to_ranks, u32* rows) {
    __shared__ u32 num_slots_of[kMaxPeers], tokens_before[kMaxPeers], slots_before[kMaxPeers];
    __shared__ u32 rank_of[kMaxTokens * kMaxTopk / 4];
    const Hear& hear = args.hear;
    const Placement placement = placement_of(args);
    const u32 num_ranks = hear.num_ranks, thread = threadIdx.x;
    const Asked asked = ask(args, args.num_tokens * args.num_topk);
    for (u32 expert = thread; expert < args.num_experts; expert += kThreads) rows[expert] = 0;
    if (thread < kMaxPeers) to_ranks[thread] = num_slots_of[thread] = 0;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < kSlotsOfThread; ++i) {
        const u32 slot = thread + i * kThreads, expert = asked.experts[i], token = slot / args.num_topk;
        const bool is_hosted = expert < args.num_experts && token < asked.num_tokens;
        const u32 rank = is_hosted ? placement.owner_of(expert).rank : 0xffu;
        reinterpret_cast<u8*>(rank_of)[slot] = static_cast<u8>(rank);
        if (!is_hosted) continue;
        atomicOr(to_ranks + rank, 1u << token);
        atomicAdd(num_slots_of + rank, 1u);
        atomicAdd(rows + expert, 1u);
    }
    __syncthreads();

    // Tokens for each rank
    if (thread < num_ranks) {
        u32 tokens = 0, slots = 0;
        for (u32 rank = 0; rank < thread; ++rank) {
            tokens += __popc(to_ranks[rank]);
            slots += num_slots_of[rank];
        }
        const u32 num_tokens = __popc(to_ranks[thread]), home = args.per_slot != 0 ? slots : tokens;
        store_tagged2(tagged_of(args, thread, hear.rank), asked.tag, num_tokens, home);
        u32* told = reinterpret_cast<u32*>(hear.regions[thread] + args.counts_at) + hear.rank * args.num_words;
        told[0] = num_tokens;
        told[1] = home;
        args.totals[thread] = args.host_totals[thread] = num_tokens;
        args.totals[num_ranks + thread] = args.host_totals[num_ranks + thread] = num_slots_of[thread];
        tokens_before[thread] = tokens;
        slots_before[thread] = slots;
    }

    // Rows of each expert
    for (u32 expert = thread; expert < args.num_experts; expert += kThreads) {
        const Owner owner = placement.owner_of(expert);
        u32* told = reinterpret_cast<u32*>(hear.regions[owner.rank] + args.counts_at) + hear.rank * args.num_words;
        told[2 + owner.local_idx] = rows[expert];
        if (args.of_step != nullptr) {
            told[2 + placement.num_experts_of(owner.rank) + owner.local_idx] = args.of_step[2 * num_ranks + expert];
        }
        args.totals[2 * num_ranks + expert] = args.host_totals[2 * num_ranks + expert] = rows[expert];
    }
    __syncthreads();
    if (thread < num_ranks) {
        fence_system();
        store_release_system(hear.regions[thread] + hear.flags_at + 8 * hear.rank, word_of(hear));
    }

    // Where rows come home
    for (u32 slot = thread; slot < asked.num_tokens * args.num_topk; slot += kThreads) {
        const u32 token = slot / args.num_topk;
        u32 home_row = kNoRow;
        if (args.per_slot != 0) {
            const u32 rank = reinterpret_cast<const u8*>(rank_of)[slot];
            if (rank != 0xffu) home_row = slots_before[rank] + num_equal(rank_of, slot, rank);
        } else {
            u32 rank = 0;
            for (u32 rest = slot % args.num_topk + 1; rank < num_ranks; ++rank) {
                rest -= to_ranks[rank] >> token & 1u;
                if (rest == 0) break;
            }
            if (rank < num_ranks) home_row = tokens_before[rank] + __popc(to_ranks[rank] & ((1u << token) - 1));
        }
        args.home_rows[slot] = home_row;
    }
}

/// Block `block` of those that send.
DEVICE void send_few(const FewArgs& args, u32 block, u32* room) {
    __shared__ u32 to_ranks[kMaxPeers];
    if (block == 0) {
        tell_few(args, to_ranks, room);
        return;
    }
    const u32 token = (block - 1) / (kSendParts + 1), part = (block - 1) % (kSendParts + 1);
    if (part == 0) send_slots(args, token, to_ranks);
    else send_values(args, token, part - 1, to_ranks);
}
