// The side of few.cu that takes. What is told of a rank may be nonsense: nothing here goes beyond what there is room for, and the
// host refuses it.
#pragma once

#include "few.cuh"
#include "unpack_values.cuh"

/// Blocks that a token's values take.
constexpr u32 kTakeParts = ceil_div(kReadPieces, kThreads);
/// Steps of a warp of the index whose words are asked for at once.
constexpr u32 kBatch = 4;
constexpr u32 kNoId = 0xffff;

/// Whether there is an `i`-th token of a source that has said so.
DEVICE bool is_sent(const FewArgs& args, u64 head, u32 i) {
    return i < static_cast<u32>(head) && static_cast<u32>(head) <= args.max_tokens;
}

/// Part `unit % kTakeParts` of a token that a source may have sent. All threads of a block call it. False: it has not come.
DEVICE bool take_values(const FewArgs& args, u32 unit, u32* num_of, u32* is_raised) {
    const u32 part = unit % kTakeParts, i = unit / kTakeParts % args.max_tokens;
    const u32 source = unit / kTakeParts / args.max_tokens, thread = threadIdx.x, own = args.hear.rank;
    const u32 piece = part * kThreads + thread, near = min_of(piece, kReadPieces - 1);
    const u64 tagged = tagged_of(args, own, source), from = tagged_token(args, tagged, i);
    const u64 words_at = from + 8 * near * kReadWords, scales_at = from + 8 * (HIDDEN / 8 + near / 4);
    const u64 other_at = tagged_of(args, own, min_of(thread, source)), word = word_of(args.hear);

    // All that is read is asked for at once, until all of it has come: how many tokens, what this thread has of one
    u64 seen[kReadWords], scales = word, head, other;
    bool is_there = true;
    for (Patience patience;;) {
#pragma unroll
        for (u32 at = 0; at < kReadWords; at += 2) load_tagged2(words_at + 8 * at, seen[at], seen[at + 1]);
        if (kReadsScales) scales = load_relaxed_system(scales_at);
        head = load_relaxed_system(tagged);
        other = load_relaxed_system(other_at);
        u64 missing = is_missing(scales, word) ? scales : word;
#pragma unroll
        for (u32 at = 0; at < kReadWords; ++at) missing = is_missing(seen[at], word) ? seen[at] : missing;
        if (is_missing(head, word)) missing = head;
        else if (!is_sent(args, head, i)) missing = word;
        const bool waits_for_other = is_missing(other, word);
        if (!waits_for_other && !is_missing(missing, word)) break;
        is_there = patience.lasts(args.hear, waits_for_other ? min_of(thread, source) : source,
                                  waits_for_other ? other : missing, is_raised);
        if (!is_there) break;
    }

    // The unit before is through with what is shared.
    __syncthreads();
    if (thread <= source) num_of[thread] = static_cast<u32>(other);
    if (__syncthreads_and(is_there) == 0) return false;
    u32 before = 0;
    bool is_over = false;
    for (u32 rank = thread % kWarp; rank <= source; rank += kWarp) {
        before += rank < source ? num_of[rank] : 0;
        is_over = is_over || num_of[rank] > args.max_tokens;
    }
    before = __reduce_add_sync(kAllLanes, before);
    if (__any_sync(kAllLanes, is_over) || i >= num_of[source]) return true;
    QuantCounts counts = {0, 0};
    if (piece < kReadPieces) {
        u32 words[kReadWords], made[kMadeWords];
#pragma unroll
        for (u32 at = 0; at < kReadWords; ++at) words[at] = static_cast<u32>(seen[at]);
        const u32 scale = static_cast<u32>(scales) >> (8 * (piece % 4)) & 0xffu;
        const float inverse_scale = QUANTISE ? __fdiv_rn(1.0f, args.arrived_scale) : 0.0f;
        unpack_piece(words, scale, inverse_scale, counts, made);
        store_words(args.tokens + (static_cast<u64>(before + i) * HIDDEN + piece * kReadValues) * 2, made);
    }
    if (QUANTISE) counts.flush(args.counts + 2);
    return true;
}

/// Hands what every rank told to the host, once it is there: so that a rank at another layer or step is found, too.
DEVICE bool report_counts(const FewArgs& args) {
    const u32 num_ranks = args.hear.num_ranks, num_pieces = args.num_heard / 4;
    const bool is_there = threadIdx.x >= num_ranks || wait_for(args.hear, threadIdx.x);
    if (__syncthreads_and(is_there) == 0) return false;
    const u64 counts = args.hear.regions[args.hear.rank] + args.counts_at;
    for (u32 at = threadIdx.x; at < num_ranks * num_pieces; at += kThreads) {
        const u64 word = static_cast<u64>(at / num_pieces) * args.num_words + at % num_pieces * 4;
        *reinterpret_cast<Word4*>(args.host_counts + word) = load_volatile4(counts + 4 * word);
    }
    return true;
}

/// What the index shares.
struct Index {
    u32 num_of[kMaxPeers], home_of[kMaxPeers], before[kMaxPeers], rows_of[kMaxPeers];
    u32 num_hosted[kWarps], sums[kWarps];
    u32 num_rows, is_raised;
};

/// A slot of a token that a source may have sent: the `at`-th of all that there may be.
struct Place {
    u32 source;
    u32 i;
    u32 slot;

    DEVICE Place(const FewArgs& args, u32 at)
        : source(at / (args.max_tokens * args.num_topk)), i(at / args.num_topk % args.max_tokens), slot(at % args.num_topk) {}

    /// Where its id lies; its weight lies num_topk words behind.
    DEVICE u64 id_at(const FewArgs& args) const {
        return tagged_token(args, tagged_of(args, args.hear.rank, source), i) + 2 * kIdsAt + 8 * slot;
    }
};

/// What every rank has said of how many tokens come, and where their rows' home begins. All threads of a block call it.
DEVICE void share_heads(const FewArgs& args, u64 head, u64 home, Index& index) {
    const u32 thread = threadIdx.x, num_ranks = args.hear.num_ranks;
    const bool is_rank = thread < num_ranks;
    // More than there may be: then none come.
    const bool is_over = __syncthreads_or(is_rank && static_cast<u32>(head) > args.max_tokens) != 0;
    if (is_rank) {
        index.num_of[thread] = is_over ? 0 : static_cast<u32>(head);
        index.home_of[thread] = static_cast<u32>(home);
    }
    if (args.live != nullptr && thread == 0) args.live->is_over = is_over;
    __syncthreads();
    if (is_rank) {
        u32 before = 0;
        for (u32 rank = 0; rank < thread; ++rank) before += index.num_of[rank];
        index.before[thread] = before;
    }
    __syncthreads();
}

/// Numbers of the step, for what no host follows.
DEVICE void settle_few(const FewArgs& args, const Index& index) {
    const u32 rank = threadIdx.x, last = args.hear.num_ranks - 1;
    if (args.live == nullptr || rank >= kMaxPeers) return;
    Run home = {0, ~0ull};
    if (rank <= last) {
        u32 first = index.before[rank], count = index.num_of[rank];
        if (args.per_slot != 0) {
            first = 0;
            count = index.rows_of[rank];
            for (u32 other = 0; other < rank; ++other) first += index.rows_of[other];
        }
        const u64 home_at = args.hear.regions[rank] + args.home_at + index.home_of[rank] * args.return_bytes;
        home = run_behind(home_at, first, count, args.return_bytes);
    }
    args.live->homes[rank] = home;
    if (rank != 0) return;
    args.live->num_received = index.before[last] + index.num_of[last];
    args.live->num_rows = index.num_rows;
}

/// The index by expert. Warps have one range of slots behind the other, and number what they find by expert in `table`
/// `[kWarps, num_local_experts]`; columns become running sums; then each slot has its row. `ids` `[slots that there may be]`.
DEVICE bool index_few(const FewArgs& args, Index& index, u32* room) {
    const u32 thread = threadIdx.x, lane = thread % kWarp, warp = warp_idx(), own = args.hear.rank;
    const u32 num_experts = args.num_local_experts, num_ranks = args.hear.num_ranks;
    const u32 num_slots = num_ranks * args.max_tokens * args.num_topk;
    const u32 num_steps = ceil_div(num_slots, kThreads), first_slot = warp * num_steps * kWarp;
    u16* table = reinterpret_cast<u16*>(room);
    u16* ids = table + kWarps * num_experts;
    u16* of_warp = table + warp * num_experts;

    // What every slot holds
    for (u32 i = thread; i < kWarps * num_experts / 2; i += kThreads) room[i] = 0;
    if (thread < kMaxPeers) index.rows_of[thread] = 0;
    const u32 rank = min_of(thread, num_ranks - 1);
    const u64 word = word_of(args.hear), head_at = tagged_of(args, own, rank);
    bool is_there = true;
    u32 num_hosted = 0;
    for (u32 first = 0; first < num_steps; first += kBatch) {
        u64 id[kBatch], weight[kBatch], head, home;
        for (Patience patience; is_there;) {
            u64 missing = word;
            u32 missing_of = rank;
#pragma unroll
            for (u32 k = 0; k < kBatch; ++k) {
                id[k] = weight[k] = word;
                const u32 at = first_slot + (first + k) * kWarp + lane;
                if (first + k >= num_steps || at >= num_slots) continue;
                const Place place(args, at);
                const u64 id_at = place.id_at(args);
                const u64 of_source = load_relaxed_system(tagged_of(args, own, place.source));
                id[k] = load_relaxed_system(id_at);
                weight[k] = load_relaxed_system(id_at + 8 * args.num_topk);
                const bool is_told = !is_missing(of_source, word);
                const bool has_come = is_told && !is_missing(id[k], word) && !is_missing(weight[k], word);
                if (!has_come && !(is_told && !is_sent(args, of_source, place.i))) {
                    missing = is_missing(id[k], word) ? id[k] : is_missing(weight[k], word) ? weight[k] : of_source;
                    missing_of = place.source;
                }
            }
            load_tagged2(head_at, head, home);
            if (is_missing(head, word) || is_missing(home, word)) {
                missing = is_missing(head, word) ? head : home;
                missing_of = rank;
            }
            if (!is_missing(missing, word)) break;
            is_there = patience.lasts(args.hear, missing_of, missing, &index.is_raised);
        }
        if (__syncthreads_and(is_there) == 0) return false;
        if (first == 0) share_heads(args, head, home, index);
#pragma unroll
        for (u32 k = 0; k < kBatch; ++k) {
            if (first + k >= num_steps) break;
            const u32 at = first_slot + (first + k) * kWarp + lane;
            const Place place(args, min_of(at, num_slots - 1));
            u32 expert = kNoId;
            if (at < num_slots && place.i < index.num_of[place.source]) {
                const u32 token = index.before[place.source] + place.i;
                args.received_weights[token * args.num_topk + place.slot] = as_float(static_cast<u32>(weight[k]));
                if (static_cast<u32>(id[k]) < num_experts) expert = static_cast<u32>(id[k]);
            }
            const u32 peers = __match_any_sync(kAllLanes, expert), hosted = __ballot_sync(kAllLanes, expert != kNoId);
            num_hosted += __popc(hosted);
            if (at < num_slots) ids[at] = static_cast<u16>(expert);
            if (expert != kNoId && (peers & lanes_below()) == 0) of_warp[expert] += __popc(peers);
            if (args.per_slot != 0) {
                const u32 alike = __match_any_sync(kAllLanes, place.source) & hosted;
                if (expert != kNoId && (alike & lanes_below()) == 0) atomicAdd(index.rows_of + place.source, __popc(alike));
            }
            __syncwarp();
        }
    }
    if (lane == 0) index.num_hosted[warp] = num_hosted;
    __syncthreads();

    // Where each warp's rows of each expert start
    const u32 of_thread = ceil_div(num_experts + 1, kThreads), begin = thread * of_thread;
    const u32 end = min_of(begin + of_thread, num_experts + 1);
    u32 mine = 0;
    for (u32 expert = begin; expert < min_of(end, num_experts); ++expert) {
#pragma unroll
        for (u32 other = 0; other < kWarps; ++other) mine += table[other * num_experts + expert];
    }
    const u32 through = sum_through(mine);
    if (lane == kWarp - 1) index.sums[warp] = through;
    __syncthreads();
    u32 start = through - mine, hosted_before = 0;
#pragma unroll
    for (u32 other = 0; other < kWarps; ++other) {
        start += other < warp ? index.sums[other] : 0;
        hosted_before += other < warp ? index.num_hosted[other] : 0;
    }
    for (u32 expert = begin; expert < end; ++expert) {
        args.expert_offsets[expert] = start;
        if (expert == num_experts) {
            index.num_rows = start;
            break;
        }
#pragma unroll
        for (u32 other = 0; other < kWarps; ++other) {
            u16& cell = table[other * num_experts + expert];
            const u32 rows = cell;
            cell = static_cast<u16>(start);
            start += rows;
        }
    }
    __syncthreads();
    settle_few(args, index);

    // Rows of slots
    for (u32 step = 0; step < num_steps; ++step) {
        const u32 at = first_slot + step * kWarp + lane;
        const Place place(args, min_of(at, num_slots - 1));
        const u32 expert = at < num_slots ? ids[at] : kNoId;
        const u32 peers = __match_any_sync(kAllLanes, expert), hosted = __ballot_sync(kAllLanes, expert != kNoId);
        const u32 token = index.before[place.source] + place.i;
        u32 row = kNoRow;
        if (expert != kNoId) {
            row = of_warp[expert] + __popc(peers & lanes_below());
            args.row_token[row] = token;
            args.return_rows[hosted_before + __popc(hosted & lanes_below())] = row;
        }
        if (at < num_slots && place.i < index.num_of[place.source]) args.slot_row[token * args.num_topk + place.slot] = row;
        // What is read above is written below, by one lane an expert.
        __syncwarp();
        if (expert != kNoId && (peers & lanes_below()) == 0) of_warp[expert] += __popc(peers);
        hosted_before += __popc(hosted);
        __syncwarp();
    }
    return true;
}

/// Block `block` of those that take. False: something has not come.
DEVICE bool take_few(const FewArgs& args, u32 block, u32* room) {
    __shared__ Index index;
    if (threadIdx.x == 0) index.is_raised = 0;
    __syncthreads();
    if (block == 0) return index_few(args, index, room);
    if (block == 1) return report_counts(args);
    const u32 num_units = args.hear.num_ranks * args.max_tokens * kTakeParts;
    for (u32 unit = block - 2; unit < num_units; unit += args.num_take_blocks - 2) {
        if (!take_values(args, unit, index.num_of, &index.is_raised)) return false;
    }
    return true;
}
