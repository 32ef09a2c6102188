// Tokens into what leaves for other ranks: counted, then packed as src/dispatch/layout.rs lays them out, bit for bit what the
// host packs.
//
// A token goes once to each rank that hosts one of its experts; a rank's tokens are in ascending order. Two kernels in this
// order: count_tokens, whose last block also tells other ranks where they hear of it by stores, and pack_tokens, which packs
// into memory of this device, for others to carry, or straight into the regions of other ranks, once it has heard of their counts.
//
// In two levels a token goes once to each node, by the ranks through which it enters them (`entries`); those pass it on as it
// came (`ENCODED`), with the ids of who reads it.
//
// Defined before this file:
//   ARGUMENTS_BYTES   the size of the host's `DispatchArgs`
//   HIDDEN            width, a multiple of 16
//   PAYLOAD_BITS      32: values travel as f32; 16: as bf16; 4: as NVFP4
//   ENCODED           1: tokens have come as they travel, to be passed on

#include "base.cuh"
#include "hear.cuh"
#include "pack_values.cuh"
#include "payload.cuh"
#include "peers.cuh"
#include "placement.cuh"
#include "tiles.cuh"

constexpr u32 kThreads = 256;

/// The argument of both; mirrored by `DispatchArgs` in src/jit/kernels/dispatch.rs.
struct DispatchArgs {
    /// `[num_ranks]` where each rank has room for this one's tokens; only if `raise` goes to somebody.
    u64 rooms[kMaxPeers];
    /// Who hears that the tokens are there.
    Raise raise;
    /// Whose counts are waited for before tokens are stored, and who is told of this rank's.
    Hear hear;
    Tell tell;
    /// `[num_tokens]` values of tokens, from one to the next `value_bytes`: `[HIDDEN]` f32, or as they travel.
    const u8* values;
    /// `[num_tokens, num_topk]` experts; what is no expert is masked. From token to token `slot_stride` words.
    const u32* ids;
    /// `[num_tokens, num_topk]`, likewise.
    const float* weights;
    /// `[num_ranks]` the rank through which this one's tokens come to each, under the experts' own ids; null: none but itself,
    /// under its local ids.
    const u32* entries;
    /// `[2 * num_ranks + num_experts]` tokens and slots for each rank, rows of each expert.
    u32* totals;
    /// The same on the host, of which so many words are wanted; null: none.
    u32* host_totals;
    /// `[2 * num_ranks]` tokens, and slots, for the ranks below.
    u32* starts;
    /// `[2 * num_ranks, kMaxTiles]` tokens for each rank, then slots: what is in the tiles before.
    u32* tiles;
    /// `[num_experts]` rows that blocks have counted, then blocks that are through; 0 before and after.
    u32* scratch;
    /// `[num_tokens, num_topk]` in its tile, which of the rank's tokens it goes with; kNoRow where it is masked.
    u32* slot_token;
    /// `[num_tokens, num_topk]` in its tile, which of the rank's slots it is.
    u32* slot_row;
    /// What leaves, by destination, if it is not stored into rooms; null: nothing leaves, `home_rows` are wanted.
    u8* packed;
    /// `[num_tokens, num_topk]` where rows come home: of each slot, or of the token's ranks in ascending order; then kNoRow.
    /// Null: they come by another way.
    u32* home_rows;
    /// `[2]` block scales that saturated and that became 0, once for each destination. Added to.
    u64* counts;
    /// How many tokens there are, where only the device knows; else null.
    const u32* live_tokens;
    /// From token to token of `packed`, a multiple of 16.
    u64 row_bytes;
    u64 value_bytes;
    u64 slot_stride;
    /// Tokens, or the most that there may be.
    u32 num_tokens;
    u32 num_topk;
    u32 num_ranks;
    u32 num_experts;
    /// Tiles at most; `tile_tokens_of` says how many tokens each has.
    u32 num_tiles;
    u32 num_host_words;
    /// 1: each slot's row comes home by itself; 0: one row a rank.
    u32 per_slot;
    /// The global scale that values are quantised with.
    float input_scale;
};

static_assert(sizeof(DispatchArgs) == ARGUMENTS_BYTES, "DispatchArgs is the host's");

DEVICE Placement placement_of(const DispatchArgs& args) { return {args.num_experts, args.num_ranks}; }

/// Where a token goes for an expert.
DEVICE Owner destination_of(const DispatchArgs& args, u32 expert) {
    const Owner owner = placement_of(args).owner_of(expert);
    return args.entries == nullptr ? owner : Owner{args.entries[owner.rank], expert};
}

DEVICE u32 num_tokens_of(const DispatchArgs& args) {
    return static_cast<u32>(number_of(args.live_tokens, args.num_tokens));
}

/// What a warp has counted for each rank.
struct Counted {
    u32* num_tokens;
    u32* num_slots;
    /// The token that it has counted last, where a token is walked in several pieces.
    u32* last_token;
};

/// Walks tokens in ascending order, as many at once as have room for their slots in a warp, and goes on with what is counted.
/// Once to count what there is and the rows of experts; once more, from what is before, to write the places.
template <bool kPlaces>
DEVICE void walk(const DispatchArgs& args, Part part, Counted counted) {
    // Several at once: one after the other each would wait for the memory.
    constexpr u32 kBatch = 4;
    const u32 lane = threadIdx.x % kWarp;
    const u32 width = min_of(args.num_topk, kWarp), pieces = ceil_div(args.num_topk, kWarp), at_once = kWarp / width;
    const u32 ahead = lane / width, in_width = lane % width;
    const u32 of_token = (width == kWarp ? kAllLanes : (1u << width) - 1) << (ahead * width);
    const u32 num_walks = ceil_div(part.end - part.first, at_once) * pieces;
    for (u32 rank = lane; rank < args.num_ranks; rank += kWarp) counted.last_token[rank] = kNoRow;
    __syncwarp();
    for (u32 batch = 0; batch < num_walks; batch += kBatch) {
        u32 experts[kBatch];
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 token = part.first + (batch + i) / pieces * at_once + ahead;
            const u32 slot = (batch + i) % pieces * kWarp + in_width;
            const bool is_there = ahead < at_once && token < part.end && slot < args.num_topk;
            experts[i] = is_there ? args.ids[token * args.slot_stride + slot] : kNoRow;
        }
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            if (batch + i >= num_walks) break;
            const u32 token = part.first + (batch + i) / pieces * at_once + ahead;
            const u32 slot = (batch + i) % pieces * kWarp + in_width;
            const u32 expert = experts[i];
            const bool is_hosted = expert < args.num_experts;
            const u32 rank = is_hosted ? destination_of(args, expert).rank : kNoRow;
            const u32 peers = __match_any_sync(kAllLanes, rank);
            const bool is_first = is_hosted && (peers & of_token & lanes_below()) == 0;
            // Of whole tokens none was there before.
            const bool is_new = is_first && (pieces == 1 || counted.last_token[rank] != token);
            const u32 new_ones = peers & __ballot_sync(kAllLanes, is_new);
            u32 num_tokens = 0, num_slots = 0;
            if (is_hosted) {
                num_tokens = counted.num_tokens[rank];
                num_slots = counted.num_slots[rank];
                if (!kPlaces) atomicAdd(args.scratch + expert, 1u);
            }
            // What is read above is written below, by one lane a rank.
            __syncwarp();
            if (is_hosted && (peers & lanes_below()) == 0) {
                counted.num_tokens[rank] = num_tokens + __popc(new_ones);
                counted.num_slots[rank] = num_slots + __popc(peers);
                counted.last_token[rank] = token;
            }
            __syncwarp();
            if (kPlaces && ahead < at_once && token < part.end && slot < args.num_topk) {
                const u64 at = static_cast<u64>(token) * args.num_topk + slot;
                const u32 through = lanes_below() << 1 | 1u;
                args.slot_token[at] = is_hosted ? num_tokens + __popc(new_ones & through) - 1 : kNoRow;
                args.slot_row[at] = is_hosted ? num_slots + __popc(peers & lanes_below()) : kNoRow;
            }
        }
    }
}

/// Whether this block comes here last of all: then it sees what the others have written. All threads call it.
DEVICE bool is_last_block(u32* done) {
    __shared__ u32 is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(done, 1u) + 1 == gridDim.x;
        if (is_last != 0) *done = 0;
        __threadfence();
    }
    __syncthreads();
    return is_last != 0;
}

/// Counts of tiles become what is in the tiles before; `totals` `[2 * num_ranks]` and `starts` for this block and others.
DEVICE void sum_tiles(const DispatchArgs& args, u32* totals, u32* starts) {
    const u32 num_columns = 2 * args.num_ranks, lane = threadIdx.x % kColumnLanes;
    const u32 step = blockDim.x / kColumnLanes;
    for (u32 first = 0; first < num_columns; first += step) {
        const u32 column = first + threadIdx.x / kColumnLanes;
        u32* tiles = args.tiles + static_cast<u64>(column) * kMaxTiles;
        Word4 counts = load_tiles(tiles, column < num_columns ? args.num_tiles : 0);
        u32 through = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            through += counts.v[i];
            counts.v[i] = through - counts.v[i];
        }
        const u32 mine = through;
        through = sum_through<kColumnLanes>(mine);
        if (column >= num_columns) continue;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) counts.v[i] += through - mine;
        reinterpret_cast<Word4*>(tiles)[lane] = counts;
        if (lane == kColumnLanes - 1) totals[column] = through;
    }
    __syncthreads();
    for (u32 column = threadIdx.x; column < num_columns; column += blockDim.x) {
        u32 before = 0;
        for (u32 other = column < args.num_ranks ? 0 : args.num_ranks; other < column; ++other) before += totals[other];
        starts[column] = before;
        args.starts[column] = before;
        args.totals[column] = totals[column];
        if (args.host_totals != nullptr && column < args.num_host_words) args.host_totals[column] = totals[column];
    }
    __syncthreads();
}

/// Where a rank hears of this one's counts.
DEVICE u32* counts_at(const DispatchArgs& args, u32 rank) {
    const u64 counts = args.hear.regions[rank] + args.tell.counts_at;
    return reinterpret_cast<u32*>(counts) + static_cast<u64>(args.hear.rank) * args.tell.num_words;
}

/// What the blocks have counted, for this device, for the host and for other ranks. All threads of the last block call it.
DEVICE void hand_out(const DispatchArgs& args, const u32* totals, const u32* starts) {
    const bool is_told = args.tell.is_told != 0;
    if (is_told && threadIdx.x < args.num_ranks) {
        u32* counts = counts_at(args, threadIdx.x);
        counts[0] = totals[threadIdx.x];
        counts[1] = starts[(args.per_slot != 0 ? args.num_ranks : 0) + threadIdx.x];
    }
    constexpr u32 kBatch = 4;
    const u32 in_totals = 2 * args.num_ranks;
    for (u32 first = threadIdx.x; first < args.num_experts; first += kBatch * blockDim.x) {
        u32 rows[kBatch], of_step[kBatch];
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 expert = min_of(first + i * blockDim.x, args.num_experts - 1);
            rows[i] = load_global_cg(args.scratch + expert);
            of_step[i] = args.tell.of_step != nullptr ? args.tell.of_step[in_totals + expert] : 0;
        }
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 expert = first + i * blockDim.x;
            if (expert >= args.num_experts) break;
            const u32 at = in_totals + expert;
            args.scratch[expert] = 0;
            args.totals[at] = rows[i];
            if (args.host_totals != nullptr && at < args.num_host_words) args.host_totals[at] = rows[i];
            if (!is_told) continue;
            const Owner owner = placement_of(args).owner_of(expert);
            u32* counts = counts_at(args, owner.rank) + 2 + owner.local_idx;
            *counts = rows[i];
            if (args.tell.of_step != nullptr) counts[placement_of(args).num_experts_of(owner.rank)] = of_step[i];
        }
    }
    if (!is_told) return;
    __syncthreads();
    if (threadIdx.x >= args.num_ranks) return;
    fence_system();
    const u64 flag = args.hear.regions[threadIdx.x] + args.hear.flags_at + 8 * args.hear.rank;
    store_release_system(flag, word_of(args.hear));
}

/// A block a tile, a warp a part of it. Dynamic shared memory: three words a rank for each warp, and four.
extern "C" __global__ void __launch_bounds__(kThreads) count_tokens(const __grid_constant__ DispatchArgs args) {
    extern __shared__ u32 of_ranks[];
    const u32 num_warps = blockDim.x / kWarp, num_columns = 2 * args.num_ranks, stride = 3 * args.num_ranks;
    u32* mine = of_ranks + threadIdx.x / kWarp * stride;
    for (u32 word = threadIdx.x; word < num_warps * stride; word += blockDim.x) of_ranks[word] = 0;
    __syncthreads();
    const u32 num_tokens = num_tokens_of(args);
    const Part part = part_of_tile(blockIdx.x, num_tokens, tile_tokens_of(num_tokens, args.num_tiles));
    const Counted counted = {mine, mine + args.num_ranks, mine + num_columns};
    walk<false>(args, part, counted);
    __syncthreads();

    sum_warps(of_ranks, stride, num_columns, args.tiles);
    if (is_last_block(args.scratch + args.num_experts)) {
        u32* totals = of_ranks + num_warps * stride;
        sum_tiles(args, totals, totals + num_columns);
        hand_out(args, totals, totals + num_columns);
    }
    // Others go on by the counts: places come last
    walk<true>(args, part, counted);
}

/// A slot of the token that a block packs.
struct Slot {
    u32 rank;
    u32 local_idx;
    float weight;
    /// Which of its rank's tokens its token is.
    u32 in_rank;
    /// Which of all tokens that leave.
    u32 place;
    /// The first of the token's slots with that rank.
    u32 is_first;
};

/// A rank that the token goes to, and where.
struct Target {
    u8* row;
    u32 rank;
    u32 padding;
};

#if ENCODED
/// Writes a token's values as they came to all of its targets.
DEVICE void pack_values(const DispatchArgs&, const u8* from, const Target* targets, u32 num_targets) {
    // Tokens begin at multiples of 16 bytes; what lies between values and ids has come as zeros.
    constexpr u32 kPieces = kIdsAt / 16;
    for (u32 piece = threadIdx.x; piece < kPieces; piece += kThreads) {
        const Word4 words = reinterpret_cast<const Word4*>(from)[piece];
        for (u32 target = 0; target < num_targets; ++target) reinterpret_cast<Word4*>(targets[target].row)[piece] = words;
    }
    for (u32 word = kPieces * 4 + threadIdx.x; word < kIdsAt / 4; word += kThreads) {
        const u32 bits = reinterpret_cast<const u32*>(from)[word];
        for (u32 target = 0; target < num_targets; ++target) reinterpret_cast<u32*>(targets[target].row)[word] = bits;
    }
}
#else
/// Writes a token's values to all of its targets, and counts what happened to block scales.
DEVICE void pack_values(const DispatchArgs& args, const u8* from, const Target* targets, u32 num_targets) {
    const float inverse_scale = kHasScales ? __fdiv_rn(1.0f, args.input_scale) : 0.0f;
    QuantCounts counts = {0, 0};
    // Whole warps go on together where lanes make a word of scales.
    for (u32 at = threadIdx.x; at - (kHasScales ? threadIdx.x % kWarp : 0) < kPieces; at += kThreads) {
        float v[kPieceValues];
        load_values(reinterpret_cast<const float*>(from), min_of(at, kPieces - 1), v);
        pack_values(
            v, at, inverse_scale, num_targets, counts,
            [&](u32 word, const u32(&words)[kPieceWords]) {
                for (u32 target = 0; target < num_targets; ++target) store_words(targets[target].row + 4 * word, words);
            },
            [&](u32 word, u32 scales) {
                for (u32 target = 0; target < num_targets; ++target) {
                    reinterpret_cast<u32*>(targets[target].row)[word] = scales;
                }
            });
    }
    if (kHasScales) counts.flush(args.counts);
}
#endif

/// Local ids and weights of all slots, -1 and 0 where another rank hosts them, and zeros behind them.
DEVICE void pack_slots(const DispatchArgs& args, const Slot* slots, const Target* targets, u32 num_targets) {
    const u32 num_words = static_cast<u32>(args.row_bytes - kIdsAt) / 4;
    for (u32 i = threadIdx.x; i < num_targets * num_words; i += kThreads) {
        const Target target = targets[i / num_words];
        const u32 word = i % num_words;
        reinterpret_cast<u32*>(target.row + kIdsAt)[word] = slot_word(slots, args.num_topk, target.rank, word);
    }
}

/// A block a token, any number of blocks. Dynamic shared memory: a Target and a Slot for each slot.
extern "C" __global__ void __launch_bounds__(kThreads) pack_tokens(const __grid_constant__ DispatchArgs args) {
    extern __shared__ u64 of_token[];
    __shared__ u32 num_targets;
    Target* targets = reinterpret_cast<Target*>(of_token);
    Slot* slots = reinterpret_cast<Slot*>(targets + args.num_topk);
    const u32 num_tokens = num_tokens_of(args);
    const u32 tile_tokens = tile_tokens_of(num_tokens, args.num_tiles);
    // The last warp hears, while others find out where the first token goes.
    const bool hears = threadIdx.x >= kThreads - kWarp;
    bool has_heard = args.hear.num_ranks == 0;
    for (u32 token = blockIdx.x; token < num_tokens; token += gridDim.x) {
        const u64 first_slot = static_cast<u64>(token) * args.num_topk;
        const u32 tile = token / tile_tokens;
        // The token before is through with what is shared.
        __syncthreads();
        if (threadIdx.x == 0) num_targets = 0;
        for (u32 slot = threadIdx.x; slot < args.num_topk; slot += kThreads) {
            const u64 at = first_slot + slot;
            const u64 brought_at = token * args.slot_stride + slot;
            const u32 expert = args.ids[brought_at];
            const u32 token_in_tile = args.slot_token[at], row_in_tile = args.slot_row[at];
            Slot mine = {kNoRow, kNoRow, args.weights[brought_at], kNoRow, kNoRow, 0};
            u32 home_row = kNoRow;
            if (expert < args.num_experts) {
                const Owner owner = destination_of(args, expert);
                const u32* tiles = args.tiles + static_cast<u64>(owner.rank) * kMaxTiles + tile;
                const u32 start = args.starts[owner.rank], home_start = args.starts[args.num_ranks + owner.rank];
                mine.rank = owner.rank;
                mine.local_idx = owner.local_idx;
                mine.in_rank = *tiles + token_in_tile;
                mine.place = start + mine.in_rank;
                home_row = home_start + tiles[static_cast<u64>(args.num_ranks) * kMaxTiles] + row_in_tile;
            }
            slots[slot] = mine;
            if (args.home_rows != nullptr) args.home_rows[at] = args.per_slot != 0 ? home_row : kNoRow;
        }
        __syncthreads();
        for (u32 slot = threadIdx.x; slot < args.num_topk; slot += kThreads) {
            bool is_first = slots[slot].rank != kNoRow;
            for (u32 other = 0; other < slot; ++other) is_first = is_first && slots[other].rank != slots[slot].rank;
            slots[slot].is_first = is_first;
        }
        __syncthreads();
        for (u32 slot = threadIdx.x; slot < args.num_topk; slot += kThreads) {
            const Slot mine = slots[slot];
            if (mine.is_first == 0) continue;
            u32 num_lower = 0;
            for (u32 other = 0; other < args.num_topk; ++other) {
                num_lower += slots[other].is_first != 0 && slots[other].rank < mine.rank;
            }
            u8* row = args.raise.num_ranks == 0
                          ? args.packed + mine.place * args.row_bytes
                          : reinterpret_cast<u8*>(args.rooms[mine.rank] + mine.in_rank * args.row_bytes);
            targets[num_lower] = {row, mine.rank, 0};
            // A rank's row comes home to where its token lies in what left.
            if (args.per_slot == 0 && args.home_rows != nullptr) args.home_rows[first_slot + num_lower] = mine.place;
            if (args.packed != nullptr || args.raise.num_ranks != 0) atomicAdd(&num_targets, 1u);
        }
        // Nobody stores tokens of a chunk without everybody's counts of it.
        if (hears && !has_heard) wait_for_all(args.hear);
        has_heard = true;
        __syncthreads();
        pack_values(args, args.values + token * args.value_bytes, targets, num_targets);
        pack_slots(args, slots, targets, num_targets);
    }
    if (hears && !has_heard) wait_for_all(args.hear);
    raise_when_done(args.raise);
}
