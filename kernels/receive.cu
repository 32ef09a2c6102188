// Tokens that have arrived into rows for experts: which row reads which token, in the order (expert, source rank, token,
// slot), and the tokens as experts read them. Bit for bit what src/dispatch/plan.rs and src/dispatch/layout.rs make of them.
//
// Three kernels in this order: index_slots, sum_tiles, unpack_tokens.
//
// Defined before this file:
//   ARGUMENTS_BYTES   the size of the host's `ReceiveArgs`
//   HIDDEN            width, a multiple of 16
//   PAYLOAD_BITS      32: values travel as f32; 16: as bf16; 4: as NVFP4
//   QUANTISE          1: values that travel unquantised go through NVFP4 here

#include "base.cuh"
#include "nvfp4.cuh"
#include "payload.cuh"
#include "peers.cuh"
#include "requantise.cuh"
#include "tiles.cuh"

static_assert(PAYLOAD_BITS != 4 || !QUANTISE, "what travels as NVFP4 is quantised already");

constexpr u32 kThreads = 256;

/// The argument of all three; mirrored by `ReceiveArgs` in src/jit/kernels/dispatch.rs.
struct ReceiveArgs {
    /// `[num_tokens]` rows as they were packed, by source rank.
    Run packed[kMaxPeers];
    /// The same where only the device knows them; else null.
    const Run* live_packed;
    /// How many tokens there are, likewise.
    const u32* live_tokens;
    /// `[num_experts + 1]` where each expert's rows start.
    const u32* expert_offsets;
    /// `[num_experts + 1, num_tiles]` rows of each expert, then of all.
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
    /// From token to token of `packed`, a multiple of 16.
    u64 row_bytes;
    /// Tokens, or the most that there may be.
    u32 num_tokens;
    u32 num_topk;
    /// Experts of this rank.
    u32 num_experts;
    /// Tokens of a tile.
    u32 tile_tokens;
    u32 num_tiles;
    /// The global scale that values are quantised with.
    float input_scale;
};

static_assert(sizeof(ReceiveArgs) == ARGUMENTS_BYTES, "ReceiveArgs is the host's");

DEVICE const u8* row_of(const ReceiveArgs& args, u32 token) {
    const Run* packed = args.live_packed != nullptr ? args.live_packed : args.packed;
    return reinterpret_cast<const u8*>(run_of(packed, token) + token * args.row_bytes);
}

DEVICE u32 num_tokens_of(const ReceiveArgs& args) {
    return static_cast<u32>(number_of(args.live_tokens, args.num_tokens));
}

DEVICE u32 id_of(const u8* row, u32 slot) { return reinterpret_cast<const u32*>(row + kIdsAt)[slot]; }

/// A warp a tile. Dynamic shared memory: a word an expert.
extern "C" __global__ void __launch_bounds__(kWarp) index_slots(const __grid_constant__ ReceiveArgs args) {
    extern __shared__ u32 num_rows[];
    const u32 lane = threadIdx.x, tile = blockIdx.x;
    for (u32 expert = lane; expert < args.num_experts; expert += kWarp) num_rows[expert] = 0;
    u32 num_hosted = 0;
    __syncwarp();

    const u32 first = tile * args.tile_tokens;
    const u32 end = min_of(num_tokens_of(args), first + args.tile_tokens);
    for (u32 token = first; token < end; ++token) {
        const u8* row = row_of(args, token);
        for (u32 first_slot = 0; first_slot < args.num_topk; first_slot += kWarp) {
            const u32 slot = first_slot + lane;
            const u32 expert = slot < args.num_topk ? id_of(row, slot) : kNoRow;
            const bool is_hosted = expert < args.num_experts;
            const u32 peers = __match_any_sync(kAllLanes, is_hosted ? expert : kNoRow);
            const u32 hosted = __ballot_sync(kAllLanes, is_hosted);
            const u32 place = is_hosted ? num_rows[expert] + __popc(peers & lanes_below()) : kNoRow;
            // What is read above is written below, by one lane an expert.
            __syncwarp();
            if (is_hosted && (peers & lanes_below()) == 0) num_rows[expert] += __popc(peers);
            __syncwarp();
            if (slot < args.num_topk) {
                const u64 at = static_cast<u64>(token) * args.num_topk + slot;
                args.slot_place[at] = place;
                args.slot_order[at] = num_hosted + __popc(hosted & lanes_below());
            }
            num_hosted += __popc(hosted);
        }
    }
    for (u32 expert = lane; expert < args.num_experts; expert += kWarp) {
        args.tiles[static_cast<u64>(expert) * args.num_tiles + tile] = num_rows[expert];
    }
    if (lane == 0) args.tiles[static_cast<u64>(args.num_experts) * args.num_tiles + tile] = num_hosted;
}

/// A warp a column.
extern "C" __global__ void __launch_bounds__(kThreads) sum_tiles(const __grid_constant__ ReceiveArgs args) {
    const u32 column = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
    if (column > args.num_experts) return;
    const u32 base = column < args.num_experts ? args.expert_offsets[column] : 0;
    sum_column(args.tiles + static_cast<u64>(column) * args.num_tiles, args.num_tiles, base);
}

#if QUANTISE
/// 16 values of a token.
DEVICE void load_block(const u8* row, u32 block, float (&v)[16]) {
    constexpr u32 kWords = PAYLOAD_BITS / 8;
    const Word4* words = reinterpret_cast<const Word4*>(row) + block * kWords;
#pragma unroll
    for (u32 i = 0; i < kWords; ++i) {
        const Word4 word = words[i];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
#if PAYLOAD_BITS == 32
            v[4 * i + j] = as_float(word.v[j]);
#else
            v[8 * i + 2 * j] = as_float(word.v[j] << 16);
            v[8 * i + 2 * j + 1] = as_float(word.v[j] & 0xffff0000u);
#endif
        }
    }
}
#endif

#if PAYLOAD_BITS == 4
/// The value of an e2m1 code: as if its exponent were f32's, then scaled by 2^126, which is exact.
DEVICE float e2m1_value(u32 code) {
    const float magnitude = __fmul_rn(as_float((code & 7u) << 22), as_float((127u + 126u) << 23));
    return as_float(as_bits(magnitude) | (code & 8u) << 28);
}
#endif

/// A token's values to bf16. All threads of a block call it.
DEVICE void unpack_values(const ReceiveArgs& args, const u8* row, u8* to) {
#if PAYLOAD_BITS == 4
    for (u32 block = threadIdx.x; block < kBlocks; block += kThreads) {
        const u64 codes = reinterpret_cast<const u64*>(row)[block];
        const float scale = nvfp4::e4m3_decode(row[HIDDEN / 2 + block]);
        Word4 words[2];
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const u32 pair = static_cast<u32>(codes >> (8 * i)) & 0xffu;
            // Six significant bits: exact in bf16.
            const float low = __fmul_rn(e2m1_value(pair & 15u), scale), high = __fmul_rn(e2m1_value(pair >> 4), scale);
            words[i / 4].v[i % 4] = pack_bf16(low, high);
        }
        reinterpret_cast<Word4*>(to)[2 * block] = words[0];
        reinterpret_cast<Word4*>(to)[2 * block + 1] = words[1];
    }
#elif QUANTISE
    const float inverse_scale = __fdiv_rn(1.0f, args.input_scale);
    QuantCounts counts = {0, 0};
    for (u32 block = threadIdx.x; block < kBlocks; block += kThreads) {
        float v[16];
        load_block(row, block, v);
        u32 amax_bits = 0;
#pragma unroll
        for (u32 i = 0; i < 16; ++i) amax_bits = max(amax_bits, nvfp4::magnitude_bits(v[i]));
        const BlockScale scale = block_scale(amax_bits, inverse_scale);
        counts.add(scale);
        Word4 words[2];
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            words[i / 4].v[i % 4] = pack_bf16(requantise(v[2 * i], scale), requantise(v[2 * i + 1], scale));
        }
        reinterpret_cast<Word4*>(to)[2 * block] = words[0];
        reinterpret_cast<Word4*>(to)[2 * block + 1] = words[1];
    }
    counts.flush(args.counts);
#elif PAYLOAD_BITS == 32
    for (u32 column = threadIdx.x * 4; column < HIDDEN; column += kThreads * 4) {
        const Word4 words = *reinterpret_cast<const Word4*>(row + column * 4);
        const u64 low = pack_bf16(as_float(words.v[0]), as_float(words.v[1]));
        const u64 high = pack_bf16(as_float(words.v[2]), as_float(words.v[3]));
        *reinterpret_cast<u64*>(to + column * 2) = high << 32 | low;
    }
#else
    for (u32 piece = threadIdx.x; piece < HIDDEN / 8; piece += kThreads) {
        reinterpret_cast<Word4*>(to)[piece] = reinterpret_cast<const Word4*>(row)[piece];
    }
#endif
}

/// A block a token, any number of blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 4) unpack_tokens(const __grid_constant__ ReceiveArgs args) {
    const u32 num_tokens = num_tokens_of(args);
    for (u32 token = blockIdx.x; token < num_tokens; token += gridDim.x) {
        const u8* row = row_of(args, token);
        const u32 tile = token / args.tile_tokens;
        for (u32 slot = threadIdx.x; slot < args.num_topk; slot += kThreads) {
            const u64 at = static_cast<u64>(token) * args.num_topk + slot;
            const u32 place = args.slot_place[at];
            u32 computed = kNoRow;
            if (place != kNoRow) {
                const u32* hosted = args.tiles + static_cast<u64>(args.num_experts) * args.num_tiles;
                computed = args.tiles[static_cast<u64>(id_of(row, slot)) * args.num_tiles + tile] + place;
                args.row_token[computed] = token;
                args.return_rows[hosted[tile] + args.slot_order[at]] = computed;
            }
            args.slot_row[at] = computed;
            args.weights[at] = reinterpret_cast<const float*>(row + kIdsAt)[args.num_topk + slot];
        }
        unpack_values(args, row, args.tokens + static_cast<u64>(token) * (HIDDEN * 2));
    }
}
