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
    /// `[2 * num_ranks + num_experts]` tokens and slots for each rank, rows of each expert. Only sent tagged.
    const u32* totals;
    /// `[num_ranks, num_words]` on the host: what each rank told. Only heard; absent where no counts are.
    u32* host_counts;
    /// Where counts lie in a region; from rank to rank, in words.
    u64 counts_at;
    u32 num_words;
    /// Words of each rank's counts that the host is to have, a multiple of 4.
    u32 num_heard;
    /// What leaves, by destination. Only sent tagged.
    const u8* packed;
    /// From token to token of it, a multiple of 16; likewise of what is taken.
    u64 row_bytes;
    /// Where tagged tokens of rank 0 lie in a region; from rank to rank.
    u64 tagged_at;
    u64 tagged_bytes;
    /// Where plain ones do; from rank to rank.
    u64 rooms_at;
    u64 room_bytes;
};

static_assert(sizeof(NvlinkArgs) == ARGUMENTS_BYTES, "NvlinkArgs is the host's");

constexpr u32 kHearWarps = 8;
constexpr u32 kTaggedParts = 16;
constexpr u32 kTaggedThreads = 256;
/// From a thread's word to its next; and words that are under way at once.
constexpr u32 kTaggedStride = kTaggedParts * kTaggedThreads, kTaggedBatch = 4;

/// A thread a rank: says who this one is where its counts go.
extern "C" __global__ void __launch_bounds__(kMaxPeers) greet(const __grid_constant__ NvlinkArgs args) {
    if (threadIdx.x >= args.num_ranks) return;
    const u64 region = args.regions[threadIdx.x];
    reinterpret_cast<u32*>(region + args.counts_at)[static_cast<u64>(args.rank) * args.num_words] = args.rank + 1;
    fence_system();
    store_release_system(region + args.flags_at + 8 * args.rank, word_of(args));
}

/// Words of tokens that lie between this rank and another, if there is room for so many: what a rank told may be nonsense,
/// which the host refuses.
DEVICE u64 num_words_of(const NvlinkArgs& args, u32 num_tokens) {
    return min_of(num_tokens * (args.row_bytes / 4), args.tagged_bytes / 8);
}

/// kTaggedParts blocks a rank: stores this rank's tokens there, each word with its chunk's epoch in one store.
///
/// NOTE: an aligned access of 8 bytes is single; of 16 the halves are two accesses to the memory model.
extern "C" __global__ void __launch_bounds__(kTaggedThreads) send_tagged(const __grid_constant__ NvlinkArgs args) {
    const u32 to = blockIdx.x / kTaggedParts, part = blockIdx.x % kTaggedParts;
    u32 before = 0;
    for (u32 rank = 0; rank < to; ++rank) before += args.totals[rank];
    const u32* words = reinterpret_cast<const u32*>(args.packed + before * args.row_bytes);
    const u64 room = args.regions[to] + args.tagged_at + args.rank * args.tagged_bytes;
    const u64 tag = word_of(args) & 0xffffffff00000000ull, num_words = num_words_of(args, args.totals[to]);
    for (u64 first = part * kTaggedThreads + threadIdx.x; first < num_words; first += kTaggedBatch * kTaggedStride) {
        u32 values[kTaggedBatch];
#pragma unroll
        for (u32 i = 0; i < kTaggedBatch; ++i) values[i] = words[min_of(first + i * kTaggedStride, num_words - 1)];
#pragma unroll
        for (u32 i = 0; i < kTaggedBatch; ++i) {
            const u64 word = first + i * kTaggedStride;
            if (word >= num_words) break;
            asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(room + 8 * word), "l"(tag | values[i]) : "memory");
        }
    }
}

DEVICE u64 load_relaxed_system(u64 address) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

/// Waits for a tagged word that has not come yet. If it does not, the alarm is raised, once a block.
DEVICE bool wait_for_word(const NvlinkArgs& args, u32 source, u64 from, u64& seen, u32* is_raised) {
    const u64 begin = now_ns(), wanted = word_of(args);
    const u64 alarm = args.regions[args.rank] + args.alarms_at + 8 * kWordsOfAlarm * source;
    for (u32 round = 0;; ++round) {
        seen = load_relaxed_system(from);
        if (seen >> 32 == wanted >> 32) return true;
        if (round <= 64) continue;
        pause();
        const u64 state = load_acquire_system(alarm);
        if (state == 0 && now_ns() - begin <= args.limit_ns) continue;
        if (atomicExch(is_raised, 1u) != 0) return false;
        const u64* cell = reinterpret_cast<const u64*>(alarm);
        const u64 late = 1ull << 63 | kLate << 56 | static_cast<u64>(args.phase) << 48 |
                         static_cast<u64>(args.rank) << 24 | source;
        // Layer and step are not in a tag: of what came last the epoch alone is known.
        if (state != 0) raise_alarm(args, source, state, cell[1], cell[2]);
        else raise_alarm(args, source, late, wanted, seen & 0xffffffff00000000ull);
        return false;
    }
}

/// kTaggedParts blocks a rank: waits for its tokens, of which the counts have come, and makes plain ones of them.
extern "C" __global__ void __launch_bounds__(kTaggedThreads) take_tagged(const __grid_constant__ NvlinkArgs args) {
    __shared__ u32 is_raised;
    const u32 source = blockIdx.x / kTaggedParts, part = blockIdx.x % kTaggedParts;
    const u64 own = args.regions[args.rank];
    if (threadIdx.x == 0) is_raised = 0;
    __syncthreads();
    const u32* told = reinterpret_cast<const u32*>(own + args.counts_at) + static_cast<u64>(source) * args.num_words;
    const u64 num_words = num_words_of(args, *reinterpret_cast<const volatile u32*>(told));
    const u64 room = own + args.tagged_at + source * args.tagged_bytes;
    u32* plain = reinterpret_cast<u32*>(own + args.rooms_at + source * args.room_bytes);
    const u64 tag = word_of(args) >> 32;
    bool has_come = true;
    for (u64 first = part * kTaggedThreads + threadIdx.x; has_come && first < num_words;
         first += kTaggedBatch * kTaggedStride) {
        u64 seen[kTaggedBatch];
#pragma unroll
        for (u32 i = 0; i < kTaggedBatch; ++i) {
            seen[i] = load_relaxed_system(room + 8 * min_of(first + i * kTaggedStride, num_words - 1));
        }
#pragma unroll
        for (u32 i = 0; i < kTaggedBatch; ++i) {
            const u64 word = first + i * kTaggedStride;
            if (word >= num_words || !has_come) break;
            if (seen[i] >> 32 != tag) has_come = wait_for_word(args, source, room + 8 * word, seen[i], &is_raised);
            plain[word] = static_cast<u32>(seen[i]);
        }
    }
    // What is queued behind is held back, as `hear` does.
    if (__syncthreads_or(!has_come) != 0 && threadIdx.x == 0) hold_back(args);
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
