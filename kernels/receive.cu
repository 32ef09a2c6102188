// Tokens that have arrived into rows for experts: which row reads which token, in the order (expert, source rank, token,
// slot), and the tokens as experts read them. Bit for bit what src/dispatch/plan.rs and src/dispatch/layout.rs make of them.
//
// Two kernels in this order: index_slots, unpack_tokens. Where no host knows what comes, the first waits for it and settles what it
// is.
//
// Defined before this file:
//   ARGUMENTS_BYTES   the size of the host's `ReceiveArgs`
//   HIDDEN            width, a multiple of 16
//   PAYLOAD_BITS      32: values travel as f32; 16: as bf16; 4: as NVFP4
//   QUANTISE          1: values that travel unquantised go through NVFP4 here

#include "base.cuh"
#include "hear.cuh"
#include "payload.cuh"
#include "peers.cuh"
#include "settle.cuh"
#include "tiles.cuh"
#include "unpack_values.cuh"

constexpr u32 kThreads = 256;
/// Blocks of unpack_tokens on a multiprocessor: values that go through NVFP4 take more registers.
constexpr u32 kUnpackers = QUANTISE ? 5 : 6;

/// The argument of both; mirrored by `ReceiveArgs` in src/jit/kernels/dispatch.rs.
struct ReceiveArgs {
    /// `[num_tokens]` rows as they were packed, by source rank.
    Run packed[kMaxPeers];
    /// Whose tokens are waited for.
    Hear hear;
    /// What comes, where only the device knows.
    SettleArgs settle;
    /// `packed` where only the device knows it; else null.
    const Run* live_packed;
    /// How many tokens there are, likewise. Settled.
    const u32* live_tokens;
    /// `[num_experts + 1]` where each expert's rows start.
    const u32* expert_offsets;
    /// `[num_experts + 1, kMaxTiles]` rows of each expert, then of all.
    u32* tiles;
    /// `[num_tokens, num_topk]` in its tile, which of its expert's rows it is; kNoRow where it is not hosted here.
    u32* slot_place;
    /// `[num_tokens, num_topk]` in its tile, which of the hosted slots it is.
    u32* slot_order;
    /// `[num_tokens, HIDDEN]` bf16; of quantised values e2m1 * e4m3, without the global scale.
    u8* tokens;
    /// `[num_tokens, num_topk]`
    float* weights;
    /// `[num_rows]` the token that each row reads.
    u32* row_token;
    /// `[num_rows]` the row at each place of the order (token, slot), in which rows go back.
    u32* return_rows;
    /// `[num_tokens, num_topk]` the row of each slot; kNoRow where it is not hosted here.
    u32* slot_row;
    /// `[2]` block scales that saturated and that became 0. Added to.
    u64* counts;
    /// `[num_totals]` what left, and where the host reads it when the step is over; null: it has it already.
    const u32* totals;
    u32* host_totals;
    /// The same of what ranks told, a multiple of 4 words of each.
    u32* host_told;
    /// From token to token of `packed`, a multiple of 16.
    u64 row_bytes;
    /// Tokens, or the most that there may be.
    u32 num_tokens;
    u32 num_topk;
    /// Experts of this rank.
    u32 num_experts;
    /// Tiles at most; `tile_tokens_of` says how many tokens each has.
    u32 num_tiles;
    u32 num_totals;
    u32 num_told;
    /// The global scale that values are quantised with.
    float input_scale;
    u32 padding;
};

static_assert(sizeof(ReceiveArgs) == ARGUMENTS_BYTES, "ReceiveArgs is the host's");

/// A token of those that lie in `runs`.
DEVICE const u8* row_of(const ReceiveArgs& args, const Run* runs, u32 token) {
    return reinterpret_cast<const u8*>(run_of(runs, token) + token * args.row_bytes);
}

DEVICE u32 num_tokens_of(const ReceiveArgs& args) {
    return static_cast<u32>(number_of(args.live_tokens, args.num_tokens));
}

DEVICE u32 id_of(const u8* row, u32 slot) { return reinterpret_cast<const u32*>(row + kIdsAt)[slot]; }

/// Walks slots in ascending order, 32 at once, and goes on with the rows of experts, and of all of them, that are counted. Once to
/// count them; once more, from what is before, to write the places.
template <bool kPlaces>
DEVICE void walk(const ReceiveArgs& args, const Run* runs, Part part, u32* num_rows, u32* num_hosted) {
    // Several at once: one after the other each would wait for the memory.
    constexpr u32 kBatch = 4;
    const u32 lane = threadIdx.x % kWarp, num_slots = (part.end - part.first) * args.num_topk;
    u32 hosted_before = *num_hosted;
    for (u32 batch = 0; batch < num_slots; batch += kBatch * kWarp) {
        u32 experts[kBatch];
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 slot = batch + i * kWarp + lane;
            experts[i] = kNoRow;
            if (slot < num_slots) {
                experts[i] = id_of(row_of(args, runs, part.first + slot / args.num_topk), slot % args.num_topk);
            }
        }
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            if (batch + i * kWarp >= num_slots) break;
            const u32 slot = batch + i * kWarp + lane, expert = experts[i];
            const bool is_hosted = expert < args.num_experts;
            const u32 hosted = __ballot_sync(kAllLanes, is_hosted);
            if (kPlaces) {
                const u32 peers = __match_any_sync(kAllLanes, is_hosted ? expert : kNoRow);
                const u32 before = is_hosted ? num_rows[expert] : 0;
                // What is read above is written below, by one lane an expert.
                __syncwarp();
                if (is_hosted && (peers & lanes_below()) == 0) num_rows[expert] = before + __popc(peers);
                __syncwarp();
                if (slot < num_slots) {
                    const u64 at = static_cast<u64>(part.first) * args.num_topk + slot;
                    args.slot_place[at] = is_hosted ? before + __popc(peers & lanes_below()) : kNoRow;
                    args.slot_order[at] = hosted_before + __popc(hosted & lanes_below());
                }
            } else if (is_hosted) {
                atomicAdd(num_rows + expert, 1u);
            }
            hosted_before += __popc(hosted);
        }
    }
    __syncwarp();
    if (lane == 0) *num_hosted = hosted_before;
}

/// A block a tile, a warp a part of it, and where no host knows what comes a last block that settles it. Dynamic shared memory: for
/// each warp a word an expert, and one.
extern "C" __global__ void __launch_bounds__(kThreads) index_slots(const __grid_constant__ ReceiveArgs args) {
    extern __shared__ u32 of_experts[];
    __shared__ Arrived arrived;
    if (blockIdx.x == args.num_tiles) {
        settle(args.settle, arrived);
        return;
    }
    const u32 num_warps = blockDim.x / kWarp, stride = args.num_experts + 1;
    for (u32 word = threadIdx.x; word < num_warps * stride; word += blockDim.x) of_experts[word] = 0;
    const bool is_live = args.settle.live != nullptr;
    const u32 num_tokens = is_live ? find_arrived(args.settle, arrived) : args.num_tokens;
    const Run* runs = args.live_packed != nullptr ? arrived.runs : args.packed;
    if (threadIdx.x < kWarp) wait_for_all(args.hear);
    __syncthreads();
    const Part part = part_of_tile(blockIdx.x, num_tokens, tile_tokens_of(num_tokens, args.num_tiles));
    u32* num_rows = of_experts + threadIdx.x / kWarp * stride;
    walk<false>(args, runs, part, num_rows, num_rows + args.num_experts);
    __syncthreads();

    sum_warps(of_experts, stride, stride, args.tiles);
    __syncthreads();
    walk<true>(args, runs, part, num_rows, num_rows + args.num_experts);
}

/// A token's values to bf16. All threads of a block call it.
DEVICE void unpack_values(const ReceiveArgs& args, const u8* row, u8* to) {
    const float inverse_scale = QUANTISE ? __fdiv_rn(1.0f, args.input_scale) : 0.0f;
    QuantCounts counts = {0, 0};
    for (u32 piece = threadIdx.x; piece < kReadPieces; piece += kThreads) {
        u32 words[kReadWords], made[kMadeWords];
        load_words(row + piece * kReadWords * 4, words);
        const u32 scale = kReadsScales ? row[HIDDEN / 2 + piece] : 0;
        unpack_piece(words, scale, inverse_scale, counts, made);
        store_words(to + piece * kMadeWords * 4, made);
    }
    if (QUANTISE) counts.flush(args.counts);
}

/// What the host reads of a step that it did not follow.
DEVICE void tell_host(const ReceiveArgs& args) {
    for (u32 word = threadIdx.x; word < args.num_totals; word += kThreads) args.host_totals[word] = args.totals[word];
    if (args.host_told == nullptr) return;
    const u32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    for (u32 rank = warp; rank < args.settle.num_ranks; rank += kThreads / kWarp) {
        const u64 first = static_cast<u64>(rank) * args.settle.num_words;
        const u64 told = reinterpret_cast<u64>(args.settle.told + first);
        copy_to_host<2>(told, args.host_told + first, args.num_told / 4, {lane, kWarp});
    }
}

/// A block a token, any number of blocks, and where the host reads of the step when it is over a first block for that.
extern "C" __global__ void __launch_bounds__(kThreads, kUnpackers) unpack_tokens(const __grid_constant__ ReceiveArgs args) {
    const u32 num_before = args.host_totals != nullptr ? 1 : 0, num_blocks = gridDim.x - num_before;
    if (blockIdx.x < num_before) {
        tell_host(args);
        return;
    }
    constexpr u32 kColumns = kThreads / kColumnLanes;
    const Run* runs = args.live_packed != nullptr ? args.live_packed : args.packed;
    const u32 num_tokens = num_tokens_of(args), tile_tokens = tile_tokens_of(num_tokens, args.num_tiles);
    const u32 column = threadIdx.x / kColumnLanes;
    const u32* hosted_tiles = args.tiles + static_cast<u64>(args.num_experts) * kMaxTiles;
    for (u32 token = blockIdx.x - num_before; token < num_tokens; token += num_blocks) {
        const u8* row = row_of(args, runs, token);
        const u32 tile = token / tile_tokens;
        // On its way while values are.
        u32 expert = column < args.num_topk ? id_of(row, column) : kNoRow;
        unpack_values(args, row, args.tokens + static_cast<u64>(token) * (HIDDEN * 2));

        // Lanes that read a column of tiles together take a slot
        for (u32 first = 0; first < args.num_topk; first += kColumns) {
            const u32 slot = first + column;
            if (first != 0) expert = slot < args.num_topk ? id_of(row, slot) : kNoRow;
            const bool is_hosted = expert < args.num_experts;
            const Word4 of_expert = load_tiles(args.tiles + static_cast<u64>(expert) * kMaxTiles, is_hosted ? tile : 0);
            const Word4 of_all = load_tiles(hosted_tiles, tile);
            const bool writes = slot < args.num_topk && threadIdx.x % kColumnLanes == 0;
            const u64 at = static_cast<u64>(token) * args.num_topk + slot;
            u32 computed = kNoRow, order = 0;
            if (writes && is_hosted) {
                computed = args.expert_offsets[expert] + args.slot_place[at];
                order = args.slot_order[at];
            }
            const u32 rows_before = sum_of_tiles(of_expert), hosted_before = sum_of_tiles(of_all);
            if (!writes) continue;
            if (is_hosted) {
                computed += rows_before;
                args.row_token[computed] = token;
                args.return_rows[hosted_before + order] = computed;
            }
            args.slot_row[at] = computed;
            args.weights[at] = reinterpret_cast<const float*>(row + kIdsAt)[args.num_topk + slot];
        }
    }
}
