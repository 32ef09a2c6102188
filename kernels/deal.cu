// Deals experts out to the kernels that compute them, by rows that the device alone has counted: a list of experts for each
// kernel that may run, of which most stay empty. Bit for bit what src/jit/kernels/deal.rs deals.
//
// Experts of one class, that is of one format and of few or of many rows, go to one kernel: the one whose tiles take least for
// all of them together. Two that have rows run at once where that is faster. One block of kThreads threads.
//
// Defined before this file: ARGUMENTS_BYTES, the size of the host's `DealArgs`.

#include "abreast.cuh"
#include "base.cuh"
#include "expert.cuh"

constexpr u32 kThreads = 1024;
constexpr u32 kMaxPrograms = 16;
constexpr u32 kFormats = 2;
constexpr u32 kClasses = 2 * kFormats;

/// What costs of tiles were measured on.
constexpr u32 kMultiprocessors = 132;

/// A kernel that may run, with its `TileCost` of src/jit/kernels/cost.rs.
struct Program {
    /// The experts that it serves: twice their format, and 1 more for many rows.
    u32 of_class;
    /// Rows of a tile, and bit i: it may be computed as 16 (i + 1) rows.
    u32 block_rows;
    u32 width_bits;
    /// Blocks of an expert's weights that go to multiprocessors one by one, or 0: FC1's and FC2's.
    u32 weight_blocks;
    u32 fc2_blocks;
    /// Of a tile, and of every 16 rows that it is computed as.
    u32 tile_ns;
    u32 rows_ns;
    /// Of a launch that has any.
    u32 launch_ns;

    /// Sixteens of rows that a block of so many is computed as.
    DEVICE u32 sixteens(u32 num_rows) const {
        const u32 needed = ceil_div(num_rows, 16u);
        return needed == 0 ? 0 : needed - 1 + __ffs(width_bits >> (needed - 1));
    }

    /// What so many blocks of rows take, of so many sixteens of rows, the widest of so many.
    DEVICE u64 takes_ns(u32 num_blocks, u32 num_sixteens, u32 widest) const {
        const TileTimes times = tiles(num_blocks, num_sixteens, widest);
        if (num_blocks == 0) return 0;
        if (weight_blocks == 0) return times.all_ns + launch_ns;
        const u64 together = times.all_ns * weight_blocks / kMultiprocessors + times.longest_ns / 2;
        return times.longest_ns > together ? times.longest_ns : together;
    }

    /// The same for one block of weights.
    DEVICE TileTimes tiles(u32 num_blocks, u32 num_sixteens, u32 widest) const {
        return {static_cast<u64>(num_blocks) * tile_ns + static_cast<u64>(num_sixteens) * rows_ns,
                tile_ns + static_cast<u64>(widest) * rows_ns};
    }
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
    /// `[num_programs]` what each program's launch does.
    Dealt* launches;
    Sizes sizes;
    u32 num_programs;
    u32 num_experts;
    /// `[kFormats]` the most rows that are few.
    u32 max_small_rows[kFormats];
    /// Whether launches may begin before the one before them has ended.
    u32 may_overlap;
    u32 unused;
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

extern "C" __global__ void __launch_bounds__(kThreads, 1) deal_experts(const __grid_constant__ DealArgs args) {
    __shared__ u32 num_blocks[kMaxPrograms], num_sixteens[kMaxPrograms], widest[kMaxPrograms], num_rows[kMaxPrograms];
    __shared__ u32 chosen[kClasses], num_few, of_large, lets_next;
    if (threadIdx.x < kMaxPrograms) {
        num_blocks[threadIdx.x] = 0;
        num_sixteens[threadIdx.x] = 0;
        widest[threadIdx.x] = 0;
        num_rows[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) num_few = 0;
    __syncthreads();

    // Count the blocks of rows that each program would have of its class
    for (u32 first = 0; first < args.num_experts; first += kThreads) {
        const u32 expert = first + threadIdx.x;
        const Share share = expert < args.num_experts ? Share::of(args, expert) : Share{0, kClasses};
        const u32 warp_few = __popc(__ballot_sync(kAllLanes, share.of_class == 0));
        if (threadIdx.x % kWarp == 0 && warp_few != 0) atomicAdd(&num_few, warp_few);
        for (u32 i = 0; i < args.num_programs; ++i) {
            const Program& program = args.programs[i];
            const u32 rows = share.of_class == program.of_class ? share.num_rows : 0;
            const u32 full = rows / program.block_rows, rest = program.sixteens(rows % program.block_rows);
            const u32 of_full = program.sixteens(program.block_rows);
            const u32 warp_rows = __reduce_add_sync(kAllLanes, rows);
            const u32 warp_blocks = __reduce_add_sync(kAllLanes, full + (rest > 0));
            const u32 warp_sixteens = __reduce_add_sync(kAllLanes, full * of_full + rest);
            const u32 warp_widest = __reduce_max_sync(kAllLanes, full > 0 ? of_full : rest);
            if (threadIdx.x % kWarp == 0 && warp_rows != 0) {
                atomicAdd(num_rows + i, warp_rows);
                atomicAdd(num_blocks + i, warp_blocks);
                atomicAdd(num_sixteens + i, warp_sixteens);
                atomicMax(widest + i, warp_widest);
            }
        }
    }
    __syncthreads();

    // Choose one a class: of equals the first
    if (threadIdx.x < kClasses) {
        u32 best = kMaxPrograms;
        u64 least = 0;
        for (u32 i = 0; i < args.num_programs; ++i) {
            const Program& program = args.programs[i];
            if (program.of_class != threadIdx.x) continue;
            const u64 takes_ns = program.takes_ns(num_blocks[i], num_sixteens[i], widest[i]);
            if (best == kMaxPrograms || takes_ns < least) {
                best = i;
                least = takes_ns;
            }
        }
        chosen[threadIdx.x] = best;
    }
    __syncthreads();

    // Find out whether two launches run at once
    if (threadIdx.x < kWarp) {
        const auto rows_of = [&](u32 of_class) { return chosen[of_class] < kMaxPrograms ? num_rows[chosen[of_class]] : 0; };
        const u32 few = rows_of(0), many = rows_of(1), other = rows_of(2) + rows_of(3);
        const u32 num_classes = (few != 0) + (many != 0) + (rows_of(2) != 0) + (rows_of(3) != 0);
        u32 found = 0;
        if (args.may_overlap && few != 0 && many != 0 && other == 0 && few + many <= kMaxRowsAtOnce) {
            const u32 s = chosen[0], l = chosen[1];
            const Program &small = args.programs[s], &large = args.programs[l];
            const TileTimes of_few = small.tiles(num_blocks[s], num_sixteens[s], widest[s]);
            const TileTimes of_many = large.tiles(num_blocks[l], num_sixteens[l], widest[l]);
            found = multiprocessors_of_large(SmallTime::of(args.sizes, num_few, of_few),
                                             LargeTime::of(args.sizes, of_many, large.weight_blocks, large.fc2_blocks),
                                             args.sizes.num_multiprocessors);
        }
        if (threadIdx.x == 0) {
            of_large = found;
            lets_next = args.may_overlap && (found != 0 || num_classes <= 1);
        }
    }
    __syncthreads();

    // Deal
    if (threadIdx.x < args.num_programs) {
        const u32 of_class = args.programs[threadIdx.x].of_class, all = args.sizes.num_multiprocessors;
        const bool has_rows = chosen[of_class] == threadIdx.x && num_rows[threadIdx.x] != 0;
        const u32 wanted = of_large == 0 ? all : of_class == 0 ? all - of_large : of_large;
        args.launches[threadIdx.x] = {has_rows ? wanted : 0, lets_next};
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
