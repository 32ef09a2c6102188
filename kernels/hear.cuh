// What ranks tell each other of a chunk, waits for the flags that they raise, and the alarms that end a wait in vain.
//
// A rank's region, the words of its flags and the cells of its alarms are src/dispatch/region.rs's.
#pragma once

#include "base.cuh"
#include "peers.cuh"

/// A wait for flags of every rank in this one's region; mirrored by `Hear` in src/jit/kernels/nvlink.rs.
struct Hear {
    /// `[num_ranks]` where each rank's region lies, as this device sees it.
    u64 regions[kMaxPeers];
    /// `[num_ranks, 4]` on the host: why a rank was waited for in vain.
    u64* host_alarms;
    /// 1 once an alarm is raised, of kernels in which many blocks wait; null where each wait raises its own.
    u32* is_raised;
    /// Where flags of this phase and alarms lie in a region.
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
    /// 0: nobody is waited for.
    u32 num_ranks;
    u32 padding;
};

/// Where counts go that ranks tell each other; mirrored by `Tell` there.
struct Tell {
    /// `[2 * num_ranks + num_experts]` the counts of a whole step, where it was cut and this is its first chunk; else null.
    const u32* of_step;
    /// Where counts lie in a region; from rank to rank, in words. Of each: tokens, the row of its home at which the listener's
    /// begin, rows of the listener's experts, and those of the whole step.
    u64 counts_at;
    u32 num_words;
    /// 1: counts are told.
    u32 is_told;
};

constexpr u32 kWordsOfAlarm = 4;
/// Kinds of alarms.
constexpr u64 kLate = 1, kOther = 2;
/// The phase of tagged tokens.
constexpr u64 kTokens = 1;

DEVICE u64 now_ns() {
    u64 ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

DEVICE void pause() { asm volatile("nanosleep.u32 200;"); }

/// What a flag of this phase holds.
DEVICE u64 word_of(const Hear& hear) { return hear.live_word != nullptr ? *hear.live_word : hear.word; }

/// An alarm of this rank, for its own host and for every rank that may wait for it.
DEVICE void raise_alarm(const Hear& hear, u32 source, u64 state, u64 wanted, u64 seen) {
    if (hear.is_raised != nullptr && atomicExch(hear.is_raised, 1u) != 0) return;
    for (u32 rank = 0; rank <= hear.num_ranks; ++rank) {
        // The host's cell last: when it is seen the others have theirs.
        u64* cell = rank == hear.num_ranks
                        ? hear.host_alarms + source * kWordsOfAlarm
                        : reinterpret_cast<u64*>(hear.regions[rank] + hear.alarms_at) + hear.rank * kWordsOfAlarm;
        cell[1] = wanted;
        cell[2] = seen;
        fence_system();
        store_release_system(reinterpret_cast<u64>(cell), state);
    }
}

/// Whether the flag of `source` has come. If not, the alarm is raised.
DEVICE bool wait_for(const Hear& hear, u32 source) {
    const u64 own = hear.regions[hear.rank];
    const u64 flag = own + hear.flags_at + 8 * source;
    const u64 alarm = own + hear.alarms_at + 8 * kWordsOfAlarm * source;
    const u64 begin = now_ns(), word = word_of(hear);
    for (u32 round = 0;; ++round) {
        const u64 seen = load_acquire_system(flag);
        if (seen == word) return true;
        const u32 ahead = static_cast<u32>(seen >> 32) - static_cast<u32>(word >> 32);
        const bool is_other = seen != 0 && ahead < 0x80000000u;
        const bool is_late = !is_other && now_ns() - begin > hear.limit_ns;
        if (is_other || is_late) {
            const u64 kind = is_other ? kOther : kLate;
            const u64 state = 1ull << 63 | kind << 56 | static_cast<u64>(hear.phase) << 48 |
                              static_cast<u64>(hear.rank) << 24 | source;
            raise_alarm(hear, source, state, word, seen);
            return false;
        }
        // Whoever is waited for may itself wait in vain: then that is the cause.
        const u64 state = load_acquire_system(alarm);
        if (state != 0) {
            const u64* cell = reinterpret_cast<const u64*>(alarm);
            raise_alarm(hear, source, state, cell[1], cell[2]);
            return false;
        }
        if (round > 64) pause();
    }
}

/// Holds back what is queued behind a wait in vain, unless nothing is.
DEVICE void hold_back(const Hear& hear) {
    if (hear.hold_ns == 0) return;
    const u64 begin = now_ns();
    while (now_ns() - begin < hear.hold_ns) pause();
    // NOTE: the host has had its time. What is queued behind must not run on rows that are not there.
    asm volatile("trap;");
}

/// Waits for every rank's flag. All lanes of a warp call it, of any number of blocks: none of them goes on to what is guarded
/// before all flags are there, and if one is not there in time the kernel does not end.
DEVICE void wait_for_all(const Hear& hear) {
    for (u32 source = threadIdx.x % kWarp; source < hear.num_ranks; source += kWarp) {
        if (!wait_for(hear, source)) hold_back(hear);
    }
    __syncwarp();
}

DEVICE u64 load_relaxed_system(u64 address) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

/// Whether a tagged word is not that of the chunk whose flags hold `word`.
DEVICE bool is_missing(u64 seen, u64 word) { return (seen ^ word) >> 32 != 0; }

/// Of a thread that reads tagged words again and again until all have come.
struct Patience {
    u64 begin = 0;
    u32 round = 0;

    /// Whether to read again what `source` has not sent; `seen` is there instead. If not, the alarm is raised, once a block.
    DEVICE bool lasts(const Hear& hear, u32 source, u64 seen, u32* is_raised) {
        if (++round <= 64) return true;
        if (begin == 0) begin = now_ns();
        pause();
        const u64 alarm = hear.regions[hear.rank] + hear.alarms_at + 8 * kWordsOfAlarm * source;
        const u64 state = load_acquire_system(alarm);
        if (state == 0 && now_ns() - begin <= hear.limit_ns) return true;
        if (atomicExch(is_raised, 1u) != 0) return false;
        const u64* cell = reinterpret_cast<const u64*>(alarm);
        const u64 late = 1ull << 63 | kLate << 56 | kTokens << 48 | static_cast<u64>(hear.rank) << 24 | source;
        // Layer and step are not in a tag: of what came last the epoch alone is known.
        if (state != 0) raise_alarm(hear, source, state, cell[1], cell[2]);
        else raise_alarm(hear, source, late, word_of(hear), seen & 0xffffffff00000000ull);
        return false;
    }
};

DEVICE Word4 load_volatile4(u64 address) {
    Word4 w;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3]) : "l"(address) : "memory");
    return w;
}

/// The threads that share work: this one's number, and how many there are.
struct Sharers {
    u32 idx;
    u32 num;
};

/// So many words of 16 bytes to the host, `kBatch` at once: one after the other each would wait for the memory.
template <u32 kBatch>
DEVICE void copy_to_host(u64 from, u32* to, u32 num_words, Sharers threads) {
    for (u32 at = threads.idx; at < num_words; at += kBatch * threads.num) {
        Word4 words[kBatch];
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            words[i] = load_volatile4(from + 16 * min_of(at + i * threads.num, num_words - 1));
        }
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 word = at + i * threads.num;
            if (word < num_words) reinterpret_cast<Word4*>(to)[word] = words[i];
        }
    }
}
