// Rows of experts back to one row a token: weight * row, added in slot order in fp32, multiplied and then added. Bit for bit
// what src/dispatch/combine.rs computes.
//
// At the owner give_back, at home add; exchange is both, for ranks that store into each other's memory, in one launch whose
// blocks run all at once; and of a rank alone add_own. Any number of blocks of kThreads threads.
//
// Defined before this file:
//   ARGUMENTS_BYTES   the size of the host's `CombineArgs`
//   HIDDEN            width, a multiple of 16
//   RETURN_BITS       32: rows go back as f32; 16: as bf16
//   PER_SLOT          1: each slot's row goes home by itself; 0: one weighted sum a token

#include "base.cuh"
#include "hear.cuh"
#include "peers.cuh"
#include "tiles.cuh"

static_assert(HIDDEN % 16 == 0, "rows are made of whole blocks");
static_assert(RETURN_BITS == 16 || RETURN_BITS == 32, "rows are bf16 or f32");

constexpr u32 kThreads = 256, kWarps = kThreads / kWarp;
/// Blocks that run on a multiprocessor at once, by registers: 16 loads of each thread are under way.
constexpr u32 kBlocks = 2;
/// Columns of a row that a lane loads at once, and a warp; how many of the latter a row has.
constexpr u32 kLaneColumns = 4, kPieceColumns = kLaneColumns * kWarp;
constexpr u32 kPieces = ceil_div(static_cast<u32>(HIDDEN), kPieceColumns);

/// What a half of the way reads.
struct Half {
    /// `[.., HIDDEN]`: computed rows, f32, or what came home.
    const u8* rows;
    /// `[num_tokens, num_topk]` the row of each slot, kNoRow where there is none; `[num_tokens]` of rows that go back one by one; of a
    /// rank alone by what is in `home_rows`.
    const u32* slot_row;
    /// `[num_tokens, num_topk]`; sums of ranks have none; of a rank alone that sums, by token that was received.
    const float* weights;
    /// How many tokens there are, where only the device knows; else null.
    const u32* live_tokens;
    /// Tokens, or rows that go back one by one; or the most that there may be.
    u64 num_tokens;
};

/// The argument of all; mirrored by `CombineArgs` in src/jit/kernels/dispatch.rs.
struct CombineArgs {
    /// At the owner, and at home; the latter is a rank's that is alone.
    Half owner;
    Half home;
    /// `[num_tokens, num_topk]` of a rank alone: where rows would come home to, of each slot, or first of the token.
    const u32* home_rows;
    /// `[num_tokens, HIDDEN]` f32: at home.
    u8* sums;
    /// `[num_tokens, HIDDEN]`: what goes back, by the rank that it goes to.
    Run out[kMaxPeers];
    /// The same where only the device knows; else null.
    const Run* live_out;
    /// Who hears that what goes back is there.
    Raise raise;
    /// Whose rows are waited for, where nothing before this kernel has.
    Hear hear;
    u32 num_topk;
    u32 padding;
};

static_assert(sizeof(CombineArgs) == ARGUMENTS_BYTES, "CombineArgs is the host's");

// ---- which warp does what ----

/// Pieces of tokens over all warps of the grid: an item is `per_item` pieces of one token, or fewer at its end. How many changes no
/// bit.
struct Items {
    u32 per_item;
    u32 per_token;
    u32 first;
    u32 stride;
    u32 end;
};

/// The parts of a token with which the warp that has most to do has least. All lanes call it.
DEVICE Items items_of(u32 num_tokens) {
    const u32 stride = gridDim.x * kWarps;
    const u32 per_item = ceil_div(kPieces, threadIdx.x % kWarp + 1);
    const u32 num_rounds = ceil_div(num_tokens * ceil_div(kPieces, per_item), stride);
    // A token's slots are read again for each part of it.
    const u32 cost = num_rounds * (per_item + 1);
    const u32 best = __reduce_min_sync(kAllLanes, cost << 8 | per_item) & 0xffu;
    const u32 per_token = ceil_div(kPieces, best);
    // Neighbours on different multiprocessors: few tokens are read by many.
    return {best, per_token, warp_idx() * gridDim.x + blockIdx.x, stride, num_tokens * per_token};
}

/// Where what goes back of a row goes, from row 0 on. All lanes call it.
DEVICE u8* place_of(const CombineArgs& args, u64 row) {
    if (args.live_out == nullptr) return reinterpret_cast<u8*>(run_of(args.out, row));
    // As run_of finds it, a run in each lane: one after the other they would wait for the memory.
    for (u32 first = 0;; first += kWarp) {
        const Run run = args.live_out[first + threadIdx.x % kWarp];
        const u32 behind = __ballot_sync(kAllLanes, row < run.end);
        if (behind == 0) continue;
        return reinterpret_cast<u8*>(__shfl_sync(kAllLanes, run.address, __ffs(behind) - 1));
    }
}

// ---- rows ----

/// Four columns of a row, as they lie there.
template <u32 kBits>
struct Columns {
    u32 v[kBits / 8];
};

/// Read past L1: once, and maybe from what another rank has just stored. Zeros, and nothing is read, where `take` is false.
///
/// NOTE: of what only some paths define the compiler keeps registers over all loops.
DEVICE void load_columns(Columns<32>& w, const u8* from, bool take) {
    w = {};
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(w.v[0]), "+r"(w.v[1]), "+r"(w.v[2]), "+r"(w.v[3]) : "l"(from), "r"(static_cast<u32>(take)));
}

DEVICE void load_columns(Columns<16>& w, const u8* from, bool take) {
    w = {};
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.cg.v2.u32 {%0, %1}, [%2]; }"
                 : "+r"(w.v[0]), "+r"(w.v[1]) : "l"(from), "r"(static_cast<u32>(take)));
}

DEVICE float value_of(const Columns<32>& w, u32 i) { return as_float(w.v[i]); }
DEVICE float value_of(const Columns<16>& w, u32 i) {
    return as_float(i % 2 == 0 ? w.v[i / 2] << 16 : w.v[i / 2] & 0xffff0000u);
}

/// A value as it would come home.
template <u32 kBits>
DEVICE float returned(float value) { return kBits == 32 ? value : as_float(pack_bf16(value, value) << 16); }

template <u32 kBits>
DEVICE void store_columns(u8* row, u32 column, const float (&v)[4]) {
    u8* to = row + column * (kBits / 8);
    if constexpr (kBits == 32) {
        *reinterpret_cast<Word4*>(to) = Word4{{as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3])}};
    } else {
        *reinterpret_cast<u64*>(to) = static_cast<u64>(pack_bf16(v[2], v[3])) << 32 | pack_bf16(v[0], v[1]);
    }
}

/// A slot that has a row.
struct Entry {
    u32 row;
    float weight;
};

/// What sums are of.
enum class Sums {
    /// Computed rows of each token's experts, to be given back.
    kReturned,
    /// Rows of slots that came home, or sums of ranks.
    kHome,
    /// Rows that need not go anywhere.
    kOwn,
};

template <Sums kSums>
DEVICE constexpr bool is_weighted() { return PER_SLOT || kSums != Sums::kHome; }

template <Sums kSums>
DEVICE Entry entry_of(const CombineArgs& args, const Half& half, u32 token, u32 slot) {
    Entry entry = {kNoRow, 0.0f};
    if (slot >= args.num_topk) return entry;
    u64 at = static_cast<u64>(token) * args.num_topk + slot;
    if constexpr (kSums == Sums::kOwn && !PER_SLOT) {
        const u32 received = args.home_rows[static_cast<u64>(token) * args.num_topk];
        if (received == kNoRow) return entry;
        at = static_cast<u64>(received) * args.num_topk + slot;
    }
    if constexpr (kSums == Sums::kOwn && PER_SLOT) {
        const u32 place = args.home_rows[at];
        if (place != kNoRow) entry.row = half.slot_row[place];
    } else {
        entry.row = half.slot_row[at];
    }
    if constexpr (is_weighted<kSums>()) entry.weight = half.weights[at];
    return entry;
}

/// Lists the slots of all lanes that have a row, in order; returns how many. All lanes call it.
DEVICE u32 list_entries(Entry* list, const Entry& entry) {
    const bool is_there = entry.row != kNoRow;
    const u32 there = __ballot_sync(kAllLanes, is_there);
    // What the list held has been read.
    __syncwarp();
    if (is_there) list[__popc(there & lanes_below())] = entry;
    __syncwarp();
    return __popc(there);
}

/// Adds `num` rows of a list, at `kAtOnce` pieces from `column` on, `kRows` rows under way at once.
template <Sums kSums, u32 kAtOnce, u32 kRows>
DEVICE void add_rows(const u8* rows, const Entry* list, u32 num, u32 column, u32 end, float (&sum)[kAtOnce][4]) {
    constexpr u32 kBits = kSums == Sums::kHome ? RETURN_BITS : 32;
    static_assert(kWarp % kRows == 0, "a list has room for the last rows");
    const u8* columns = rows + column * (kBits / 8);
#pragma unroll 1
    for (u32 first = 0; first < num; first += kRows) {
        Columns<kBits> got[kRows][kAtOnce];
#pragma unroll
        for (u32 i = 0; i < kRows; ++i) {
            const u8* row = columns + static_cast<u64>(list[first + i].row) * (HIDDEN * kBits / 8);
#pragma unroll
            for (u32 piece = 0; piece < kAtOnce; ++piece) {
                const bool take = first + i < num && column + piece * kPieceColumns < end;
                load_columns(got[i][piece], row + piece * (kPieceColumns * kBits / 8), take);
            }
        }
#pragma unroll
        for (u32 i = 0; i < kRows; ++i) {
            if (first + i >= num) break;
            const float weight = list[first + i].weight;
#pragma unroll
            for (u32 piece = 0; piece < kAtOnce; ++piece) {
#pragma unroll
                for (u32 k = 0; k < 4; ++k) {
                    float v = value_of(got[i][piece], k);
                    if constexpr (kSums == Sums::kOwn && PER_SLOT) v = returned<RETURN_BITS>(v);
                    // NOTE: not fused: the host rounds the product, and bits are promised alike.
                    if constexpr (is_weighted<kSums>()) v = __fmul_rn(weight, v);
                    sum[piece][k] = __fadd_rn(sum[piece][k], v);
                }
            }
        }
    }
}

/// The columns from `first` to `end` of one token: `num` rows of a list, or where there are more slots than that has room for, all
/// lists of the token.
template <Sums kSums, u32 kAtOnce, u32 kRows, bool kMany = false>
DEVICE void sum_columns(const CombineArgs& args, const Half& half, Entry* list, u32 num, u32 token, u32 first, u32 end, u8* out) {
    constexpr u32 kOutBits = kSums == Sums::kReturned ? RETURN_BITS : 32;
    const u32 lane = threadIdx.x % kWarp;
#pragma unroll 1
    for (u32 column = first + lane * kLaneColumns; column - lane * kLaneColumns < end; column += kAtOnce * kPieceColumns) {
        float sum[kAtOnce][4] = {};
        if constexpr (kMany) {
            for (u32 slot = lane; slot - lane < args.num_topk; slot += kWarp) {
                num = list_entries(list, entry_of<kSums>(args, half, token, slot));
                add_rows<kSums, kAtOnce, kRows>(half.rows, list, num, column, end, sum);
            }
        } else {
            add_rows<kSums, kAtOnce, kRows>(half.rows, list, num, column, end, sum);
        }
#pragma unroll
        for (u32 piece = 0; piece < kAtOnce; ++piece) {
            const u32 at = column + piece * kPieceColumns;
            if constexpr (kSums == Sums::kOwn && !PER_SLOT) {
                // Home adds it to nothing: of -0 that makes 0.
#pragma unroll
                for (u32 k = 0; k < 4; ++k) sum[piece][k] = __fadd_rn(0.0f, returned<RETURN_BITS>(sum[piece][k]));
            }
            if (at < end) store_columns<kOutBits>(out, at, sum[piece]);
        }
    }
}

/// Adds up the rows of each token's slots, once they are there.
template <Sums kSums>
DEVICE void sum_slots(const CombineArgs& args, const Half& half) {
    constexpr u64 kOutBytes = HIDDEN * (kSums == Sums::kReturned ? RETURN_BITS : 32) / 8;
    __shared__ Entry lists[kWarps][kWarp];
    const u32 lane = threadIdx.x % kWarp;
    Entry* list = lists[warp_idx()];
    const Items items = items_of(static_cast<u32>(number_of(half.live_tokens, half.num_tokens)));
    Entry next = {kNoRow, 0.0f};
    if (items.first < items.end) next = entry_of<kSums>(args, half, items.first / items.per_token, lane);
    if constexpr (kSums == Sums::kHome) {
        if (threadIdx.x < kWarp) wait_for_all(args.hear);
        __syncthreads();
    }

    for (u32 item = items.first; item < items.end; item += items.stride) {
        const u32 token = item / items.per_token, first = item % items.per_token * items.per_item * kPieceColumns;
        const u32 end = min_of(first + items.per_item * kPieceColumns, static_cast<u32>(HIDDEN));
        const u32 num = list_entries(list, next);
        // The slots of the next item come while rows of this one do.
        if (item + items.stride < items.end) {
            next = entry_of<kSums>(args, half, (item + items.stride) / items.per_token, lane);
        }
        u8* out = (kSums == Sums::kReturned ? place_of(args, token) : args.sums) + token * kOutBytes;
        if (args.num_topk > kWarp) sum_columns<kSums, 1, 8, true>(args, half, list, num, token, first, end, out);
        else if (num > 2) sum_columns<kSums, 1, 16>(args, half, list, num, token, first, end, out);
        else sum_columns<kSums, 4, 2>(args, half, list, num, token, first, end, out);
    }
}

/// Copies rows to where each goes.
DEVICE void return_slots(const CombineArgs& args) {
    constexpr u32 kAtOnce = 8;
    const Items items = items_of(static_cast<u32>(number_of(args.owner.live_tokens, args.owner.num_tokens)));
    const u32 lane = threadIdx.x % kWarp;
    u32 next = items.first < items.end ? args.owner.slot_row[items.first / items.per_token] : 0;
    for (u32 item = items.first; item < items.end; item += items.stride) {
        const u32 place = item / items.per_token, first = item % items.per_token * items.per_item * kPieceColumns;
        const u32 end = min_of(first + items.per_item * kPieceColumns, static_cast<u32>(HIDDEN));
        const u8* row = args.owner.rows + static_cast<u64>(next) * (HIDDEN * 4);
        if (item + items.stride < items.end) next = args.owner.slot_row[(item + items.stride) / items.per_token];
        u8* out = place_of(args, place) + static_cast<u64>(place) * (HIDDEN * RETURN_BITS / 8);
        for (u32 column = first + lane * kLaneColumns; column < end; column += kAtOnce * kPieceColumns) {
            Columns<32> got[kAtOnce];
#pragma unroll
            for (u32 piece = 0; piece < kAtOnce; ++piece) {
                const u32 at = column + piece * kPieceColumns;
                load_columns(got[piece], row + at * 4, at < end);
            }
#pragma unroll
            for (u32 piece = 0; piece < kAtOnce; ++piece) {
                const u32 at = column + piece * kPieceColumns;
                float v[4];
#pragma unroll
                for (u32 k = 0; k < 4; ++k) v[k] = value_of(got[piece], k);
                if (at < end) store_columns<RETURN_BITS>(out, at, v);
            }
        }
    }
}

DEVICE void return_all(const CombineArgs& args) {
#if PER_SLOT
    return_slots(args);
#else
    sum_slots<Sums::kReturned>(args, args.owner);
#endif
    raise_when_done(args.raise);
}

// ---- kernels ----

/// Owner: rows in the order in which they go back, or one weighted sum a token.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) give_back(const __grid_constant__ CombineArgs args) {
    return_all(args);
}

/// Home: weighted rows of slots, or sums of ranks.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) add(const __grid_constant__ CombineArgs args) {
    sum_slots<Sums::kHome>(args, args.home);
}

/// Both. Blocks wait for each other, by way of flags.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) exchange(const __grid_constant__ CombineArgs args) {
    return_all(args);
    sum_slots<Sums::kHome>(args, args.home);
}

/// A rank alone.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) add_own(const __grid_constant__ CombineArgs args) {
    sum_slots<Sums::kOwn>(args, args.home);
}
