// Memory of other ranks that this one stores into, and the flags that say when all of it is there.
//
// A rank's region and the words of its flags are src/dispatch/region.rs's. Whoever stores rows of a chunk into regions ends
// with raise_when_done; whoever reads them has had the flag by the kernel `hear` of nvlink.cu, earlier in its stream, or by
// wait_for_all of hear.cuh.
#pragma once

#include "base.cuh"

/// The most ranks that store into each other; `MAX_PEERS` in src/dispatch/region.rs.
constexpr u32 kMaxPeers = 64;

/// Rows that lie one behind the other: row `i` of a list that is cut into runs lies at `address + i * row_bytes` of the first
/// run whose `end` is greater than `i`.
struct Run {
    u64 address;
    u64 end;
};

/// Flags that are raised once every block of a kernel has stored its rows.
struct Raise {
    /// `[num_ranks]` in each rank's region.
    u64 flags[kMaxPeers];
    /// What they then hold.
    u64 word;
    /// Where that lies instead, of a step that is replayed; else null.
    const u64* live_word;
    /// Blocks that are through; 0 before and after.
    u32* done;
    /// 0: the rows go to nobody.
    u32 num_ranks;
    u32 padding;
};

/// The run of row `i`; the last one's end is beyond every row.
DEVICE u64 run_of(const Run* runs, u64 i) {
    u32 run = 0;
    while (i >= runs[run].end) ++run;
    return runs[run].address;
}

/// What this thread has stored or seen stored comes before what it stores from here on, for every device and host.
DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

DEVICE void store_release_system(u64 address, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

DEVICE u64 load_acquire_system(u64 address) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

/// All threads of all blocks call it last.
DEVICE void raise_when_done(const Raise& raise) {
    if (raise.num_ranks == 0) return;
    __shared__ u32 is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        fence_system();
        is_last = atomicAdd(raise.done, 1u) + 1 == gridDim.x;
        if (is_last != 0) *raise.done = 0;
    }
    __syncthreads();
    if (is_last == 0) return;
    // The other blocks' rows are seen to be stored; they come before the flags.
    fence_system();
    const u64 word = raise.live_word != nullptr ? *raise.live_word : raise.word;
    for (u32 rank = threadIdx.x; rank < raise.num_ranks; rank += blockDim.x) {
        store_release_system(raise.flags[rank], word);
    }
}
