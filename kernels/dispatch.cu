// Tokens into what leaves for other ranks: counted, then packed as src/dispatch/layout.rs lays them out, bit for bit what the
// host packs.
//
// A token goes once to each rank that hosts one of its experts; a rank's tokens are in ascending order. Three kernels in this
// order: count_tokens, sum_tiles, pack_tokens. The last packs into memory of this device, for others to carry, or straight into
// the regions of other ranks.
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
#include "nvfp4.cuh"
#include "payload.cuh"
#include "peers.cuh"
#include "tiles.cuh"

constexpr u32 kThreads = 256;

/// The argument of all three; mirrored by `DispatchArgs` in src/jit/kernels/dispatch.rs.
struct DispatchArgs {
    /// `[num_ranks]` where each rank has room for this one's tokens; only if `raise` goes to somebody.
    u64 rooms[kMaxPeers];
    /// Who hears that the tokens are there.
    Raise raise;
    /// `[num_tokens]` values of tokens, from one to the next `value_bytes`: `[HIDDEN]` f32, or as they travel.
    const u8* values;
    /// `[num_tokens, num_topk]` experts; what is no expert is masked. From token to token `slot_stride` words.
    const u32* ids;
    /// `[num_tokens, num_topk]`, likewise.
    const float* weights;
    /// `[num_ranks]` the rank through which this one's tokens come to each, under the experts' own ids; null: none but itself,
    /// under its local ids.
    const u32* entries;
    /// `[2 * num_ranks + num_experts]` tokens and slots for each rank, rows of each expert; the last are added to.
    u32* totals;
    /// `[2 * num_ranks, num_tiles]` tokens for each rank, then slots.
    u32* tiles;
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
    /// Tokens of a tile.
    u32 tile_tokens;
    u32 num_tiles;
    /// 1: each slot's row comes home by itself; 0: one row a rank.
    u32 per_slot;
    /// The global scale that values are quantised with.
    float input_scale;
};

static_assert(sizeof(DispatchArgs) == ARGUMENTS_BYTES, "DispatchArgs is the host's");

/// An expert as the rank that a token goes to for it numbers it.
struct Owner {
    u32 rank;
    u32 local_idx;
};

/// Contiguous blocks of experts, the first ranks' one larger where they don't divide: src/dispatch/placement.rs.
DEVICE Owner owner_of(const DispatchArgs& args, u32 expert) {
    const u32 base = args.num_experts / args.num_ranks, extra = args.num_experts % args.num_ranks;
    const u32 in_larger = extra * (base + 1);
    if (expert < in_larger) return {expert / (base + 1), expert % (base + 1)};
    const u32 rest = expert - in_larger;
    return {extra + rest / base, rest % base};
}

/// Where a token goes for an expert.
DEVICE Owner destination_of(const DispatchArgs& args, u32 expert) {
    const Owner owner = owner_of(args, expert);
    return args.entries == nullptr ? owner : Owner{args.entries[owner.rank], expert};
}

DEVICE u32 num_tokens_of(const DispatchArgs& args) {
    return static_cast<u32>(number_of(args.live_tokens, args.num_tokens));
}

/// A warp a tile. Dynamic shared memory: three words a rank.
extern "C" __global__ void __launch_bounds__(kWarp) count_tokens(const __grid_constant__ DispatchArgs args) {
    extern __shared__ u32 of_ranks[];
    u32* num_tokens = of_ranks;
    u32* num_slots = of_ranks + args.num_ranks;
    u32* last_token = of_ranks + 2 * args.num_ranks;
    const u32 lane = threadIdx.x, tile = blockIdx.x;
    for (u32 rank = lane; rank < args.num_ranks; rank += kWarp) {
        num_tokens[rank] = 0;
        num_slots[rank] = 0;
        last_token[rank] = kNoRow;
    }
    __syncwarp();

    const u32 first = tile * args.tile_tokens;
    const u32 end = min_of(num_tokens_of(args), first + args.tile_tokens);
    for (u32 token = first; token < end; ++token) {
        for (u32 first_slot = 0; first_slot < args.num_topk; first_slot += kWarp) {
            const u32 slot = first_slot + lane;
            const u64 at = static_cast<u64>(token) * args.num_topk + slot;
            const u32 expert = slot < args.num_topk ? args.ids[token * args.slot_stride + slot] : kNoRow;
            const bool is_hosted = expert < args.num_experts;
            const u32 rank = is_hosted ? destination_of(args, expert).rank : kNoRow;
            const u32 peers = __match_any_sync(kAllLanes, rank);
            u32 place = kNoRow, row = kNoRow;
            bool is_new = false;
            if (is_hosted) {
                is_new = last_token[rank] != token;
                place = num_tokens[rank] - (is_new ? 0 : 1);
                row = num_slots[rank] + __popc(peers & lanes_below());
                atomicAdd(args.totals + 2 * args.num_ranks + expert, 1u);
            }
            // What is read above is written below, by one lane a rank.
            __syncwarp();
            if (is_hosted && (peers & lanes_below()) == 0) {
                num_slots[rank] += __popc(peers);
                if (is_new) num_tokens[rank] += 1;
                last_token[rank] = token;
            }
            __syncwarp();
            if (slot < args.num_topk) {
                args.slot_token[at] = place;
                args.slot_row[at] = row;
            }
        }
    }
    for (u32 rank = lane; rank < args.num_ranks; rank += kWarp) {
        args.tiles[static_cast<u64>(rank) * args.num_tiles + tile] = num_tokens[rank];
        args.tiles[static_cast<u64>(args.num_ranks + rank) * args.num_tiles + tile] = num_slots[rank];
    }
}

/// A warp a column.
extern "C" __global__ void __launch_bounds__(kThreads) sum_tiles(const __grid_constant__ DispatchArgs args) {
    const u32 column = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
    if (column >= 2 * args.num_ranks) return;
    const u32 total = sum_column(args.tiles + static_cast<u64>(column) * args.num_tiles, args.num_tiles, 0);
    if (threadIdx.x % kWarp == 0) args.totals[column] = total;
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
    const float* values = reinterpret_cast<const float*>(from);
#if PAYLOAD_BITS == 4
    const float inverse_scale = __fdiv_rn(1.0f, args.input_scale);
    u32 num_saturated = 0, num_zeroed = 0;
    for (u32 block = threadIdx.x; block < kBlocks; block += kThreads) {
        float v[16];
        u32 amax_bits = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const Word4 words = reinterpret_cast<const Word4*>(values + block * 16)[i];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                v[4 * i + j] = as_float(words.v[j]);
                amax_bits = max(amax_bits, nvfp4::magnitude_bits(v[4 * i + j]));
            }
        }
        const nvfp4::BlockScale scale = nvfp4::block_scale(amax_bits, inverse_scale);
        num_saturated += scale.saturated ? num_targets : 0;
        num_zeroed += scale.zeroed ? num_targets : 0;
        const u64 low = nvfp4::pack_eight(v, scale.factor), high = nvfp4::pack_eight(v + 8, scale.factor);
        for (u32 target = 0; target < num_targets; ++target) {
            u8* row = targets[target].row;
            reinterpret_cast<u64*>(row)[block] = high << 32 | low;
            row[HIDDEN / 2 + block] = static_cast<u8>(scale.bits);
        }
    }
    // NOTE: whole warps come here, with or without a block.
    num_saturated = __reduce_add_sync(kAllLanes, num_saturated);
    num_zeroed = __reduce_add_sync(kAllLanes, num_zeroed);
    if (threadIdx.x % kWarp == 0 && num_saturated != 0) atomicAdd(args.counts, static_cast<u64>(num_saturated));
    if (threadIdx.x % kWarp == 0 && num_zeroed != 0) atomicAdd(args.counts + 1, static_cast<u64>(num_zeroed));
#elif PAYLOAD_BITS == 32
    for (u32 column = threadIdx.x * 4; column < HIDDEN; column += kThreads * 4) {
        const Word4 words = *reinterpret_cast<const Word4*>(values + column);
        for (u32 target = 0; target < num_targets; ++target) {
            *reinterpret_cast<Word4*>(targets[target].row + column * 4) = words;
        }
    }
#else
    for (u32 column = threadIdx.x * 8; column < HIDDEN; column += kThreads * 8) {
        const Word4 low = *reinterpret_cast<const Word4*>(values + column);
        const Word4 high = *reinterpret_cast<const Word4*>(values + column + 4);
        Word4 words;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            words.v[i] = pack_bf16(as_float(low.v[2 * i]), as_float(low.v[2 * i + 1]));
            words.v[2 + i] = pack_bf16(as_float(high.v[2 * i]), as_float(high.v[2 * i + 1]));
        }
        for (u32 target = 0; target < num_targets; ++target) {
            *reinterpret_cast<Word4*>(targets[target].row + column * 2) = words;
        }
    }
#endif
}
#endif

/// Local ids and weights of all slots, -1 and 0 where another rank hosts them, and zeros around them.
DEVICE void pack_slots(const DispatchArgs& args, const Slot* slots, const Target* targets, u32 num_targets) {
    const u32 weights_at = kIdsAt + 4 * args.num_topk, end = weights_at + 4 * args.num_topk;
    for (u32 i = threadIdx.x; i < num_targets * args.num_topk; i += kThreads) {
        const Target target = targets[i / args.num_topk];
        const u32 slot = i % args.num_topk;
        const bool is_here = slots[slot].rank == target.rank;
        u8* row = target.row;
        *reinterpret_cast<u32*>(row + kIdsAt + 4 * slot) = is_here ? slots[slot].local_idx : kNoRow;
        *reinterpret_cast<float*>(row + weights_at + 4 * slot) = is_here ? slots[slot].weight : 0.0f;
    }
    for (u32 target = threadIdx.x; target < num_targets; target += kThreads) {
        u8* row = targets[target].row;
        for (u32 at = kPayloadBytes; at < kIdsAt; ++at) row[at] = 0;
        for (u32 at = end; at < args.row_bytes; at += 4) *reinterpret_cast<u32*>(row + at) = 0;
    }
}

/// What lies before a rank in a row of `totals`.
DEVICE u32 before_rank(const u32* totals, u32 rank) {
    u32 sum = 0;
    for (u32 other = 0; other < rank; ++other) sum += totals[other];
    return sum;
}

/// A block a token, any number of blocks. Dynamic shared memory: a Target and a Slot for each slot.
extern "C" __global__ void __launch_bounds__(kThreads) pack_tokens(const __grid_constant__ DispatchArgs args) {
    extern __shared__ u64 of_token[];
    __shared__ u32 num_targets;
    Target* targets = reinterpret_cast<Target*>(of_token);
    Slot* slots = reinterpret_cast<Slot*>(targets + args.num_topk);
    const u32 num_tokens = num_tokens_of(args);
    for (u32 token = blockIdx.x; token < num_tokens; token += gridDim.x) {
        const u64 first_slot = static_cast<u64>(token) * args.num_topk;
        const u32 tile = token / args.tile_tokens;
        // The token before is through with what is shared.
        __syncthreads();
        if (threadIdx.x == 0) num_targets = 0;
        for (u32 slot = threadIdx.x; slot < args.num_topk; slot += kThreads) {
            const u64 at = first_slot + slot;
            const u32 in_tile = args.slot_token[at];
            const u64 brought_at = token * args.slot_stride + slot;
            Slot mine = {kNoRow, kNoRow, args.weights[brought_at], kNoRow, kNoRow, 0};
            u32 home_row = kNoRow;
            if (in_tile != kNoRow) {
                const Owner owner = destination_of(args, args.ids[brought_at]);
                const u32* tiles = args.tiles + static_cast<u64>(owner.rank) * args.num_tiles + tile;
                mine.rank = owner.rank;
                mine.local_idx = owner.local_idx;
                mine.in_rank = *tiles + in_tile;
                mine.place = before_rank(args.totals, owner.rank) + mine.in_rank;
                home_row = before_rank(args.totals + args.num_ranks, owner.rank) +
                           tiles[static_cast<u64>(args.num_ranks) * args.num_tiles] + args.slot_row[at];
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
        __syncthreads();
        pack_values(args, args.values + token * args.value_bytes, targets, num_targets);
        pack_slots(args, slots, targets, num_targets);
    }
    raise_when_done(args.raise);
}
