// What a GPU's memory gives: every byte of a buffer read once, and nothing computed. What kernels that stream weights are
// compared with.
//
// By bulk copies into shared memory, as grouped_gemm_small.cu reads weights: one block of 256 threads a multiprocessor.
// Or by loads into registers: any number of blocks.
//
// Defined before this file:
//   BULK           1: bulk copies, which want sm_90 and 192 KB of shared memory; 0: loads
//   SHARED_BYTES   what the host launches with, compared with this file's own
//   ARGUMENTS_BYTES

#include "base.cuh"
#include "hopper.cuh"

struct ReadArgs {
    /// A multiple of 16 bytes.
    const u8* data;
    u64 num_bytes;
    /// Written if the bytes happen to fold to one value, so that they have to be read.
    u32* sink;
};

static_assert(sizeof(ReadArgs) == ARGUMENTS_BYTES, "ReadArgs is the host's");

constexpr u32 kThreads = 256;

#if BULK

constexpr u32 kWarps = kThreads / kWarp;
constexpr u32 kSlots = 3;
constexpr u32 kSlotBytes = 8192;
static_assert(kWarps * kSlots * kSlotBytes == SHARED_BYTES, "the host launches what this file describes");

extern "C" __global__ void __launch_bounds__(kThreads, 1) read_all(const __grid_constant__ ReadArgs args) {
    alignas(128) extern __shared__ Word4 shared_memory[];
    __shared__ alignas(8) u64 barriers[kWarps * kSlots];
    const u32 warp = threadIdx.x / kWarp;
    const u32 slots = shared_address(shared_memory) + warp * kSlots * kSlotBytes;
    const u32 full = shared_address(barriers + warp * kSlots);
    if (threadIdx.x % kWarp != 0) return;
    for (u32 i = 0; i < kSlots; ++i) barrier_init(full + 8 * i, 1);
    barrier_init_done();

    // A block's pieces are neighbours; its warps take them in turn.
    const u64 num_pieces = (args.num_bytes + kSlotBytes - 1) / kSlotBytes;
    const u64 end = num_pieces * (blockIdx.x + 1) / gridDim.x;
    u64 fill = num_pieces * blockIdx.x / gridDim.x + warp, read = fill;
    u32 fill_slot = 0, read_slot = 0, parity = 0;
    while (read < end) {
        for (; fill < end && fill < read + kSlots * kWarps; fill += kWarps) {
            const u64 left = args.num_bytes - fill * kSlotBytes;
            const u32 num_bytes = left < kSlotBytes ? static_cast<u32>(left) : kSlotBytes;
            barrier_expect(full + 8 * fill_slot, num_bytes);
            bulk_load(slots + fill_slot * kSlotBytes, args.data + fill * kSlotBytes, num_bytes, full + 8 * fill_slot);
            if (++fill_slot == kSlots) fill_slot = 0;
        }
        barrier_wait(full + 8 * read_slot, parity);
        read += kWarps;
        if (++read_slot == kSlots) {
            read_slot = 0;
            parity ^= 1;
        }
    }
}

#else

static_assert(SHARED_BYTES == 0, "the host launches what this file describes");
constexpr u32 kPending = 8;

extern "C" __global__ void __launch_bounds__(kThreads) read_all(const __grid_constant__ ReadArgs args) {
    const u64 num_words = args.num_bytes / sizeof(Word4), stride = static_cast<u64>(gridDim.x) * kThreads;
    u32 fold = 0;
    for (u64 at = static_cast<u64>(blockIdx.x) * kThreads + threadIdx.x; at < num_words; at += stride * kPending) {
        Word4 words[kPending];
#pragma unroll
        for (u32 i = 0; i < kPending; ++i) {
            const u64 from = at + i * stride;
            words[i] = load_global4_cg(args.data + (from < num_words ? from : at) * sizeof(Word4));
        }
#pragma unroll
        for (u32 i = 0; i < kPending; ++i) fold ^= words[i].v[0] ^ words[i].v[1] ^ words[i].v[2] ^ words[i].v[3];
    }
    if (fold == 0x12345678u) *args.sink = fold;
}

#endif
