// Weight rows as a checkpoint has them, into the image of weights.cuh: `pack_nvfp4` and `pack_bf16`, for the time of loading.
//
// Any number of blocks of 256 threads; a warp takes one step of one unit at a time, a lane its bytes of both tiles.
// src/backend/cuda/pack.rs does the same on a host, and is what the tests hold this to.
//
// Defined before this file: ARGUMENTS_BYTES, the size of the host's `PackArgs`.

#include "base.cuh"
#include "weights.cuh"

/// Mirrored by `PackArgs` in src/jit/kernels/pack.rs.
struct PackArgs {
    /// The rows that the halves of a unit's tiles take: gate's and up's for FC1, twice the same for FC2. `[num_rows, width / 2]`
    /// codes, or `[num_rows, width]` bf16. Aligned to 16 bytes.
    const u8* rows[2];
    /// `[num_rows, width / 16]` e4m3, no NaN among them; nothing for bf16.
    const u8* scales[2];
    /// `[num_units, ceil(width / 64), step]`, all of which is written.
    u8* image;
    u32 num_units;
    /// Rows of each half's matrix that are there; those behind them are zero.
    u32 num_rows;
    /// A multiple of 16.
    u32 width;
    /// 1: a unit takes 16 rows of each half's matrix (FC1); 0: 32 of one (FC2).
    u32 is_pair;
};

static_assert(sizeof(PackArgs) == ARGUMENTS_BYTES, "PackArgs is the host's");

constexpr u32 kThreads = 256;

/// Two words, one after the other.
struct alignas(8) Word2 {
    u32 v[2];
};

/// A finite e4m3's magnitude as an unsigned e5m3 of bias 9; zero and -0 have codes of zero beside them.
DEVICE u32 device_scale(u32 bits) {
    const u32 exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (exponent != 0) return (exponent + 2) << 3 | mantissa;
    if (mantissa >= 4) return 2 << 3 | (mantissa - 4) * 2;
    if (mantissa >= 2) return 1 << 3 | (mantissa - 2) * 4;
    return 0;
}

/// Eight codes of each half as the words that `decode16` takes apart (its comment says which bit goes where).
DEVICE Word2 fragment_words(const u32 (&halves)[2]) {
    Word2 words{{0, 0}};
#pragma unroll
    for (u32 e = 0; e < 2; ++e) {
        auto code = [&](u32 mma, u32 r, u32 at) { return halves[r % 2] >> (4 * (4 * mma + 2 * (r / 2) + at)) & 15; };
        auto place = [](u32 code, u32 sign_at, u32 at) { return code >> 3 << sign_at | (code & 7) << at; };
        auto bit = [](u32 code, u32 from, u32 at) { return (code >> from & 1) << at; };
        auto a = [&](u32 r) { return code(0, r, e); };
        auto b = [&](u32 r) { return code(1, r, e); };
        const u32 h0 = place(a(0), 15, 6) | (a(1) & 7) << 11 | bit(code(0, 1, 1 - e), 3, 4) | place(a(2), 9, 0) |
                       bit(a(3), 3, 10) | bit(a(3), 2, 3) | bit(b(3), 2, 14) | bit(code(1, 3, 1 - e), 3, 5);
        const u32 h1 = place(b(0), 15, 6) | place(b(1), 12, 3) | place(b(2), 9, 0) | bit(a(3), 1, 14) | bit(a(3), 0, 13) |
                       bit(b(3), 1, 11) | bit(b(3), 0, 10);
        words.v[0] |= h0 << (16 * e);
        words.v[1] |= h1 << (16 * e);
    }
    return words;
}

/// Where a lane of a warp is: its step of its unit.
struct Place {
    u32 unit;
    u32 step;
    u32 g;
    u32 t;

    /// The row of a half's matrix that lies in a tile here.
    DEVICE u32 row(const PackArgs& args, u32 tile, u32 half) const {
        return args.is_pair ? 16 * unit + 2 * g + tile : 32 * unit + 4 * g + 2 * tile + half;
    }
};

/// Calls `pack(place, step's bytes)` for every step of every unit.
template <typename Pack>
DEVICE void for_steps(const PackArgs& args, u32 step_bytes, const Pack& pack) {
    const u32 num_steps = ceil_div(args.width, kStepK), lane = threadIdx.x % kWarp;
    const u32 num_places = args.num_units * num_steps, stride = gridDim.x * (kThreads / kWarp);
    for (u32 i = (blockIdx.x * kThreads + threadIdx.x) / kWarp; i < num_places; i += stride) {
        const Place place{i / num_steps, i % num_steps, lane / 4, lane % 4};
        pack(place, args.image + static_cast<u64>(i) * step_bytes);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) pack_nvfp4(const __grid_constant__ PackArgs args) {
    const u32 num_blocks = args.width / 16, lane = threadIdx.x % kWarp;
    for_steps(args, kStepBytes, [&](const Place& place, u8* step) {
        const u32 block = 4 * place.step + place.t;
        u32 scales = 0;
#pragma unroll
        for (u32 tile = 0; tile < 2; ++tile) {
            u32 codes[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 row = place.row(args, tile, half);
                if (block >= num_blocks || row >= args.num_rows) continue;
                const u64 at = static_cast<u64>(row) * num_blocks + block;
                const u32 scale = args.scales[half][at];
                const Word2 raw = reinterpret_cast<const Word2*>(args.rows[half])[at];
                // A scale's sign moves to its codes; beside a scale of zero they become zero.
                const u32 flip = scale & 0x80 ? 0x88888888u : 0;
                const bool is_zero = (scale & 0x7f) == 0;
                codes[half][0] = is_zero ? 0 : raw.v[0] ^ flip;
                codes[half][1] = is_zero ? 0 : raw.v[1] ^ flip;
                scales |= device_scale(scale & 0x7f) << (8 * (2 * tile + half));
            }
            Word4 out;
#pragma unroll
            for (u32 q = 0; q < 2; ++q) {
                const u32 halves[2] = {codes[0][q], codes[1][q]};
                const Word2 words = fragment_words(halves);
                out.v[2 * q] = words.v[0];
                out.v[2 * q + 1] = words.v[1];
            }
            reinterpret_cast<Word4*>(step + tile * kTileBytes)[lane] = out;
        }
        reinterpret_cast<u32*>(step + kScalesAt)[lane] = scales;
    });
}

extern "C" __global__ void __launch_bounds__(kThreads) pack_bf16(const __grid_constant__ PackArgs args) {
    const u32 lane = threadIdx.x % kWarp;
    for_steps(args, kBf16StepBytes, [&](const Place& place, u8* step) {
        const u32 k = kStepK * place.step + 16 * place.t;
#pragma unroll
        for (u32 tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (u32 q = 0; q < 4; ++q) {
                Word4 out{{0, 0, 0, 0}};
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    const u32 row = place.row(args, tile, half);
                    if (k >= args.width || row >= args.num_rows) continue;
                    const u64 at = (static_cast<u64>(row) * args.width + k) / 4 + q;
                    const Word2 raw = reinterpret_cast<const Word2*>(args.rows[half])[at];
                    out.v[half] = raw.v[0];
                    out.v[half + 2] = raw.v[1];
                }
                reinterpret_cast<Word4*>(step + (4 * tile + q) * kTileBytes)[lane] = out;
            }
        }
    });
}
