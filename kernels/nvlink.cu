// What ranks of one NVLink domain tell each other through regions of memory that all of them have mapped: counts of what
// leaves, and that rows are there.
//
// The layout of a region, the words of flags and the cells of alarms are src/dispatch/region.rs's.
//
// Defined before this file:
//   ARGUMENTS_BYTES   the size of the host's `NvlinkArgs`

#include "base.cuh"
#include "peers.cuh"

/// The argument of both; mirrored by `NvlinkArgs` in src/jit/kernels/nvlink.rs.
struct NvlinkArgs {
    /// `[num_ranks]` where each rank's region lies, as this device sees it.
    u64 regions[kMaxPeers];
    /// `[2 * num_ranks + num_experts]` tokens and slots for each rank, rows of each expert. Only told.
    const u32* totals;
    /// The same of the whole step, where it was cut and this is its first chunk; else null. Only told.
    const u32* of_step;
    /// `[num_ranks, num_words]` on the host: what each rank told. Only heard; absent where no counts are.
    u32* host_counts;
    /// `[num_ranks, 4]` on the host: why a rank was waited for in vain.
    u64* host_alarms;
    /// Where counts of this phase, its flags and alarms lie in a region.
    u64 counts_at;
    u64 flags_at;
    u64 alarms_at;
    /// What a flag of this phase holds when it is raised.
    u64 word;
    /// Where that lies instead, of a step that is replayed; else null.
    const u64* live_word;
    /// How long a flag is waited for.
    u64 limit_ns;
    /// How long what is queued behind is held back after an alarm, so that the host can end the job before anything reads
    /// rows that have not come. 0: nothing is behind.
    u64 hold_ns;
    /// 0: counts; 1: tokens; 2: rows.
    u32 phase;
    /// This rank.
    u32 rank;
    u32 num_ranks;
    u32 num_experts;
    /// From rank to rank of counts, in words.
    u32 num_words;
    /// 1: each slot's row comes home by itself; 0: one row a rank.
    u32 per_slot;
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
    /// Words of each rank's counts that the host is to have, a multiple of 4.
    u32 num_heard;
    u32 padding;
};

static_assert(sizeof(NvlinkArgs) == ARGUMENTS_BYTES, "NvlinkArgs is the host's");

constexpr u32 kTellThreads = 128;
constexpr u32 kHearWarps = 8;
constexpr u32 kTaggedParts = 16;
constexpr u32 kTaggedThreads = 256;
/// From a thread's word to its next; and words that are under way at once.
constexpr u32 kTaggedStride = kTaggedParts * kTaggedThreads, kTaggedBatch = 4;
constexpr u32 kWordsOfAlarm = 4;
/// Kinds of alarms.
constexpr u64 kLate = 1, kOther = 2;

DEVICE u64 now_ns() {
    u64 ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

DEVICE void pause() { asm volatile("nanosleep.u32 200;"); }

/// What a flag of this phase holds.
DEVICE u64 word_of(const NvlinkArgs& args) { return args.live_word != nullptr ? *args.live_word : args.word; }

/// The first expert of a rank: src/dispatch/placement.rs.
DEVICE u32 first_expert(const NvlinkArgs& args, u32 rank) {
    const u32 base = args.num_experts / args.num_ranks, extra = args.num_experts % args.num_ranks;
    return rank * base + min_of(rank, extra);
}

/// A block a rank: tells it how many tokens come, where in this rank's home its rows begin, and the rows of each of its
/// experts, and those of the whole step where they are known.
extern "C" __global__ void __launch_bounds__(kTellThreads) tell(const __grid_constant__ NvlinkArgs args) {
    const u32 to = blockIdx.x;
    const u64 region = args.regions[to];
    u32* counts = reinterpret_cast<u32*>(region + args.counts_at) + static_cast<u64>(args.rank) * args.num_words;
    if (threadIdx.x == 0) {
        const u32* home = args.per_slot != 0 ? args.totals + args.num_ranks : args.totals;
        u32 before = 0;
        for (u32 rank = 0; rank < to; ++rank) before += home[rank];
        counts[0] = args.totals[to];
        counts[1] = before;
    }
    const u32 first = first_expert(args, to), end = first_expert(args, to + 1);
    for (u32 expert = first + threadIdx.x; expert < end; expert += kTellThreads) {
        const u32 at = 2 * args.num_ranks + expert;
        counts[2 + expert - first] = args.totals[at];
        if (args.of_step != nullptr) counts[2 + end - first + expert - first] = args.of_step[at];
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    fence_system();
    store_release_system(region + args.flags_at + 8 * args.rank, word_of(args));
}

/// An alarm of this rank, for its own host and for every rank that may wait for it.
DEVICE void raise_alarm(const NvlinkArgs& args, u32 source, u64 state, u64 wanted, u64 seen) {
    for (u32 rank = 0; rank <= args.num_ranks; ++rank) {
        // The host's cell last: when it is seen the others have theirs.
        u64* cell = rank == args.num_ranks
                        ? args.host_alarms + source * kWordsOfAlarm
                        : reinterpret_cast<u64*>(args.regions[rank] + args.alarms_at) + args.rank * kWordsOfAlarm;
        cell[1] = wanted;
        cell[2] = seen;
        fence_system();
        store_release_system(reinterpret_cast<u64>(cell), state);
    }
}

/// Whether the flag of `source` has come. If not, the alarm is raised.
DEVICE bool wait_for(const NvlinkArgs& args, u32 source) {
    const u64 own = args.regions[args.rank];
    const u64 flag = own + args.flags_at + 8 * source;
    const u64 alarm = own + args.alarms_at + 8 * kWordsOfAlarm * source;
    const u64 begin = now_ns(), word = word_of(args);
    for (u32 round = 0;; ++round) {
        const u64 seen = load_acquire_system(flag);
        if (seen == word) return true;
        const u32 ahead = static_cast<u32>(seen >> 32) - static_cast<u32>(word >> 32);
        const bool is_other = seen != 0 && ahead < 0x80000000u;
        const bool is_late = !is_other && now_ns() - begin > args.limit_ns;
        if (is_other || is_late) {
            const u64 kind = is_other ? kOther : kLate;
            const u64 state = 1ull << 63 | kind << 56 | static_cast<u64>(args.phase) << 48 |
                              static_cast<u64>(args.rank) << 24 | source;
            raise_alarm(args, source, state, word, seen);
            return false;
        }
        // Whoever is waited for may itself wait in vain: then that is the cause.
        const u64 state = load_acquire_system(alarm);
        if (state != 0) {
            const u64* cell = reinterpret_cast<const u64*>(alarm);
            raise_alarm(args, source, state, cell[1], cell[2]);
            return false;
        }
        if (round > 64) pause();
    }
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
    if (__syncthreads_or(!has_come) == 0 || threadIdx.x != 0 || args.hold_ns == 0) return;
    const u64 begin = now_ns();
    while (now_ns() - begin < args.hold_ns) pause();
    asm volatile("trap;");
}

DEVICE Word4 load_volatile4(u64 address) {
    Word4 w;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3]) : "l"(address) : "memory");
    return w;
}

/// A warp a rank: waits until it has raised its flag, and hands its counts on to the host where there are any.
extern "C" __global__ void __launch_bounds__(kHearWarps * kWarp) hear(const __grid_constant__ NvlinkArgs args) {
    const u32 source = blockIdx.x * kHearWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (source >= args.num_ranks) return;
    const bool has_come = __shfl_sync(kAllLanes, lane == 0 ? wait_for(args, source) : true, 0);
    if (!has_come) {
        if (lane != 0 || args.hold_ns == 0) return;
        const u64 begin = now_ns();
        while (now_ns() - begin < args.hold_ns) pause();
        // NOTE: the host has had its time. What is queued behind must not run on rows that are not there.
        asm volatile("trap;");
    }
    if (args.host_counts == nullptr) return;
    // Several at once: one after the other each would wait for the memory.
    constexpr u32 kBatch = 8;
    const u64 first = static_cast<u64>(source) * args.num_words;
    const u64 counts = args.regions[args.rank] + args.counts_at + 4 * first;
    Word4* host = reinterpret_cast<Word4*>(args.host_counts + first);
    for (u32 at = lane; at < args.num_heard / 4; at += kBatch * kWarp) {
        Word4 words[kBatch];
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            words[i] = load_volatile4(counts + 16 * min_of(at + i * kWarp, args.num_heard / 4 - 1));
        }
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            if (at + i * kWarp < args.num_heard / 4) host[at + i * kWarp] = words[i];
        }
    }
}
