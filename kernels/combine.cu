// Rows of experts back to one row a token: weight * row, added in slot order in fp32, multiplied and then added. Bit for bit
// what src/dispatch/combine.rs computes.
//
// At the owner: return_slots where each slot's row goes home by itself, or return_sums; at home add_slots or add_sums. Any
// number of blocks of 256 threads; each takes rows or tokens blockIdx.x, blockIdx.x + gridDim.x, ...
//
// Defined before this file:
//   ARGUMENTS_BYTES   the size of the host's `CombineArgs`
//   HIDDEN            width, a multiple of 16
//   RETURN_BITS       32: rows go back as f32; 16: as bf16

#include "base.cuh"
#include "peers.cuh"
#include "tiles.cuh"

static_assert(HIDDEN % 16 == 0, "rows are made of whole blocks");
static_assert(RETURN_BITS == 16 || RETURN_BITS == 32, "rows are bf16 or f32");

constexpr u32 kThreads = 256;

/// The argument of all four; mirrored by `CombineArgs` in src/jit/kernels/dispatch.rs.
struct CombineArgs {
    /// What is read, `[.., HIDDEN]`: computed rows, f32, or what came home.
    const u8* rows;
    /// `[num_tokens, num_topk]` the row of each slot, kNoRow where there is none; of return_slots `[num_tokens]`.
    const u32* slot_row;
    /// `[num_tokens, num_topk]`; sums of ranks have none.
    const float* weights;
    /// `[num_tokens, HIDDEN]`: what goes back, by the rank that it goes to, or sums, f32.
    Run out[kMaxPeers];
    /// Who hears that what goes back is there.
    Raise raise;
    /// Where it goes, where only the device knows; else null.
    const Run* live_out;
    /// How many there are, likewise.
    const u32* live_tokens;
    /// Tokens, or rows that go back one by one; or the most that there may be.
    u64 num_tokens;
    u32 num_topk;
    u32 padding;
};

static_assert(sizeof(CombineArgs) == ARGUMENTS_BYTES, "CombineArgs is the host's");

DEVICE const Run* out_of(const CombineArgs& args) { return args.live_out != nullptr ? args.live_out : args.out; }

/// Four columns of a row.
template <u32 kBits>
DEVICE void load_columns(const u8* rows, u64 row, u32 column, float (&v)[4]) {
    const u8* from = rows + (row * HIDDEN + column) * (kBits / 8);
    if constexpr (kBits == 32) {
        const Word4 words = *reinterpret_cast<const Word4*>(from);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) v[i] = as_float(words.v[i]);
    } else {
        const u64 words = *reinterpret_cast<const u64*>(from);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) v[i] = as_float(static_cast<u32>(words >> (16 * i)) << 16);
    }
}

template <u32 kBits>
DEVICE void store_columns(u8* rows, u64 row, u32 column, const float (&v)[4]) {
    u8* to = rows + (row * HIDDEN + column) * (kBits / 8);
    if constexpr (kBits == 32) {
        *reinterpret_cast<Word4*>(to) = Word4{{as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3])}};
    } else {
        *reinterpret_cast<u64*>(to) = static_cast<u64>(pack_bf16(v[2], v[3])) << 32 | pack_bf16(v[0], v[1]);
    }
}

/// Adds up the rows of each token's slots.
template <u32 kRowBits, u32 kOutBits, bool kWeighted>
DEVICE void sum_slots(const CombineArgs& args) {
    const u64 num_tokens = number_of(args.live_tokens, args.num_tokens);
    const Run* runs = out_of(args);
    for (u64 token = blockIdx.x; token < num_tokens; token += gridDim.x) {
        const u32* slot_row = args.slot_row + token * args.num_topk;
        u8* out = reinterpret_cast<u8*>(run_of(runs, token));
        for (u32 column = threadIdx.x * 4; column < HIDDEN; column += kThreads * 4) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (u32 slot = 0; slot < args.num_topk; ++slot) {
                const u32 row = slot_row[slot];
                if (row == kNoRow) continue;
                float v[4];
                load_columns<kRowBits>(args.rows, row, column, v);
                // NOTE: not fused: the host rounds the product, and bits are promised alike.
                if constexpr (kWeighted) {
                    const float weight = args.weights[token * args.num_topk + slot];
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) v[i] = __fmul_rn(weight, v[i]);
                }
#pragma unroll
                for (u32 i = 0; i < 4; ++i) sum[i] = __fadd_rn(sum[i], v[i]);
            }
            store_columns<kOutBits>(out, token, column, sum);
        }
    }
}

/// Owner: rows in the order in which they go back.
extern "C" __global__ void __launch_bounds__(kThreads) return_slots(const __grid_constant__ CombineArgs args) {
    const u64 num_rows = number_of(args.live_tokens, args.num_tokens);
    const Run* runs = out_of(args);
    for (u64 place = blockIdx.x; place < num_rows; place += gridDim.x) {
        u8* out = reinterpret_cast<u8*>(run_of(runs, place));
        for (u32 column = threadIdx.x * 4; column < HIDDEN; column += kThreads * 4) {
            float v[4];
            load_columns<32>(args.rows, args.slot_row[place], column, v);
            store_columns<RETURN_BITS>(out, place, column, v);
        }
    }
    raise_when_done(args.raise);
}

/// Owner: one weighted sum a token.
extern "C" __global__ void __launch_bounds__(kThreads) return_sums(const __grid_constant__ CombineArgs args) {
    sum_slots<32, RETURN_BITS, true>(args);
    raise_when_done(args.raise);
}

/// Home: weighted rows of slots.
extern "C" __global__ void __launch_bounds__(kThreads) add_slots(const __grid_constant__ CombineArgs args) {
    sum_slots<RETURN_BITS, 32, true>(args);
}

/// Home: sums of ranks.
extern "C" __global__ void __launch_bounds__(kThreads) add_sums(const __grid_constant__ CombineArgs args) {
    sum_slots<RETURN_BITS, 32, false>(args);
}
