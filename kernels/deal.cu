// Deals experts out to the kernels that compute them, by rows that the device alone has counted: a list of experts for each
// kernel that may run, of which most stay empty. Bit for bit what src/jit/kernels/deal.rs deals.
//
// Experts of one class, that is of one format and of few or of many rows, go to one kernel: the one whose tiles take least for
// all of them together. One block of kThreads threads.
//
// Defined before this file: ARGUMENTS_BYTES, the size of the host's `DealArgs`.

#include "base.cuh"
#include "expert.cuh"

constexpr u32 kThreads = 1024;
constexpr u32 kMaxPrograms = 16;
constexpr u32 kFormats = 2;
constexpr u32 kClasses = 2 * kFormats;

/// A kernel that may run.
struct Program {
    /// What one of its tiles takes, in any unit.
    double per_tile;
    /// Rows of a tile.
    u32 block_rows;
    /// The experts that it serves: twice their format, and 1 more for many rows.
    u32 of_class;
};

/// The kernel's argument; mirrored by `DealArgs` in src/jit/kernels/deal.rs.
struct DealArgs {
    Program programs[kMaxPrograms];
    /// `[num_experts + 1]` where each expert's rows start.
    const u32* expert_offsets;
    /// `[num_experts]`
    const Expert* experts;
    /// `[num_experts]`
    const u32* formats;
    /// `[num_programs, num_experts]` each program's experts; those of others are null.
    Expert* dealt;
    /// `[num_programs]` rows that each program has.
    u32* num_rows;
    u32 num_programs;
    u32 num_experts;
    /// `[kFormats]` the most rows that are few.
    u32 max_small_rows[kFormats];
};

static_assert(sizeof(DealArgs) == ARGUMENTS_BYTES, "DealArgs is the host's");
static_assert(sizeof(Expert) == 2 * sizeof(Word4), "an expert is copied as two words of 16 bytes");

/// An expert's rows, and whom they may go to; no class without rows.
struct Share {
    u32 num_rows;
    u32 of_class;

    DEVICE static Share of(const DealArgs& args, u32 expert) {
        const u32 num_rows = args.expert_offsets[expert + 1] - args.expert_offsets[expert];
        if (num_rows == 0) return {0, kClasses};
        const u32 format = args.formats[expert];
        return {num_rows, 2 * format + (num_rows > args.max_small_rows[format])};
    }
};

extern "C" __global__ void __launch_bounds__(kThreads) deal_experts(const __grid_constant__ DealArgs args) {
    __shared__ u32 num_tiles[kMaxPrograms], num_rows[kMaxPrograms], chosen[kClasses];
    if (threadIdx.x < kMaxPrograms) {
        num_tiles[threadIdx.x] = 0;
        num_rows[threadIdx.x] = 0;
    }
    __syncthreads();

    // Count the tiles that each program would have of its class
    for (u32 first = 0; first < args.num_experts; first += kThreads) {
        const u32 expert = first + threadIdx.x;
        const Share share = expert < args.num_experts ? Share::of(args, expert) : Share{0, kClasses};
        for (u32 program = 0; program < args.num_programs; ++program) {
            const bool is_served = share.of_class == args.programs[program].of_class;
            const u32 tiles = is_served ? ceil_div(share.num_rows, args.programs[program].block_rows) : 0;
            const u32 warp_tiles = __reduce_add_sync(kAllLanes, tiles);
            const u32 warp_rows = __reduce_add_sync(kAllLanes, is_served ? share.num_rows : 0);
            if (threadIdx.x % kWarp == 0 && warp_tiles != 0) {
                atomicAdd(num_tiles + program, warp_tiles);
                atomicAdd(num_rows + program, warp_rows);
            }
        }
    }
    __syncthreads();

    // Choose one a class: of equals the first
    if (threadIdx.x < kClasses) {
        u32 best = kMaxPrograms;
        double least = 0.0;
        for (u32 program = 0; program < args.num_programs; ++program) {
            if (args.programs[program].of_class != threadIdx.x) continue;
            const double takes = num_tiles[program] * args.programs[program].per_tile;
            if (best == kMaxPrograms || takes < least) {
                best = program;
                least = takes;
            }
        }
        chosen[threadIdx.x] = best;
    }
    __syncthreads();

    // Deal
    if (threadIdx.x < args.num_programs) {
        const bool is_chosen = chosen[args.programs[threadIdx.x].of_class] == threadIdx.x;
        args.num_rows[threadIdx.x] = is_chosen ? num_rows[threadIdx.x] : 0;
    }
    for (u32 first = 0; first < args.num_experts; first += kThreads) {
        const u32 expert = first + threadIdx.x;
        if (expert >= args.num_experts) break;
        const Share share = Share::of(args, expert);
        const u32 mine = share.of_class < kClasses ? chosen[share.of_class] : kMaxPrograms;
        const Word4* from = reinterpret_cast<const Word4*>(args.experts + expert);
        const Word4 words[2] = {from[0], from[1]};
        for (u32 program = 0; program < args.num_programs; ++program) {
            Word4* to = reinterpret_cast<Word4*>(args.dealt + static_cast<u64>(program) * args.num_experts + expert);
            to[0] = program == mine ? words[0] : Word4{{0, 0, 0, 0}};
            to[1] = program == mine ? words[1] : Word4{{0, 0, 0, 0}};
        }
    }
}
