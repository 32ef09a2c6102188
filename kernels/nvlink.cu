// What ranks of one NVLink domain tell each other through regions of memory that all of them have mapped: counts of what
// leaves, and that rows are there.
//
// The layout of a region, the words of flags and the cells of alarms are src/dispatch/region.rs's.
//
// Defined before this file:
//   ARGUMENTS_BYTES   the size of the host's `NvlinkArgs`

#include "base.cuh"
#include "hear.cuh"
#include "peers.cuh"

/// The argument of all; mirrored by `NvlinkArgs` in src/jit/kernels/nvlink.rs.
struct NvlinkArgs : Hear {
    /// `[num_ranks, num_words]` on the host: what each rank told. Only heard; absent where no counts are.
    u32* host_counts;
    /// Where counts lie in a region; from rank to rank, in words.
    u64 counts_at;
    u32 num_words;
    /// Words of each rank's counts that the host is to have, a multiple of 4.
    u32 num_heard;
};

static_assert(sizeof(NvlinkArgs) == ARGUMENTS_BYTES, "NvlinkArgs is the host's");

constexpr u32 kHearWarps = 8;

/// A thread a rank: says who this one is where its counts go.
extern "C" __global__ void __launch_bounds__(kMaxPeers) greet(const __grid_constant__ NvlinkArgs args) {
    if (threadIdx.x >= args.num_ranks) return;
    const u64 region = args.regions[threadIdx.x];
    reinterpret_cast<u32*>(region + args.counts_at)[static_cast<u64>(args.rank) * args.num_words] = args.rank + 1;
    fence_system();
    store_release_system(region + args.flags_at + 8 * args.rank, word_of(args));
}

/// A warp a rank: waits until it has raised its flag, and hands its counts on to the host where there are any.
extern "C" __global__ void __launch_bounds__(kHearWarps * kWarp) hear(const __grid_constant__ NvlinkArgs args) {
    const u32 source = blockIdx.x * kHearWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (source >= args.num_ranks) return;
    const bool has_come = __shfl_sync(kAllLanes, lane == 0 ? wait_for(args, source) : true, 0);
    if (!has_come) {
        if (lane != 0 || args.hold_ns == 0) return;
        hold_back(args);
    }
    if (args.host_counts == nullptr) return;
    const u64 first = static_cast<u64>(source) * args.num_words;
    const u64 counts = args.regions[args.rank] + args.counts_at + 4 * first;
    copy_to_host<8>(counts, args.host_counts + first, args.num_heard / 4, {lane, kWarp});
}
