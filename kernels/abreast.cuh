// Whether a batch's two launches, of few rows and of many, run at once, and how many multiprocessors each then has: bit for bit what
// src/jit/kernels/abreast.rs computes, which says why.
#pragma once

#include "base.cuh"

/// As there.
constexpr u32 kMaxRowsAtOnce = 1 << 12;
constexpr u64 kSmallFixedNs = 12000;
constexpr u64 kLargeFixedNs = 6000;
constexpr u64 kMemoryBytesPerNs = 4600;
constexpr u64 kSmallPsPerByte = 26;
constexpr u64 kSmallTileNs = 250;
constexpr u64 kMeasuredWidth = 3584;
constexpr u32 kBesidePercent = 32;
constexpr u32 kMinGainPercent = 92;
constexpr u32 kGrain = 4;

/// Experts' widths, and the machine.
struct Sizes {
    u64 expert_bytes;
    u32 hidden;
    u32 intermediate;
    u32 num_multiprocessors;
};

/// The tiles of one block of weights: all of them one behind the other, and the longest.
struct TileTimes {
    u64 all_ns;
    u64 longest_ns;
};

/// What the launch of few rows takes.
struct SmallTime {
    u64 memory_ns;
    u64 tiles_ns;

    DEVICE static SmallTime of(const Sizes& sizes, u32 num_experts, const TileTimes& times) {
        return {num_experts * sizes.expert_bytes / kMemoryBytesPerNs,
                times.all_ns * sizes.expert_bytes / kSmallTileNs * kSmallPsPerByte / 1000};
    }

    DEVICE u64 on(u32 num_multiprocessors) const {
        const u64 tiles = tiles_ns / num_multiprocessors;
        return kSmallFixedNs + (memory_ns > tiles ? memory_ns : tiles);
    }
};

/// What the launch of many rows takes.
struct LargeTime {
    u64 tiles_ns;
    u64 longest_fc1_ns;
    u64 longest_fc2_ns;

    DEVICE static LargeTime of(const Sizes& sizes, const TileTimes& times, u32 fc1_blocks, u32 fc2_blocks) {
        const u64 fc1 = times.all_ns * sizes.hidden / kMeasuredWidth * fc1_blocks;
        const u64 fc2 = times.all_ns * sizes.intermediate / kMeasuredWidth * fc2_blocks;
        return {fc1 + fc2, times.longest_ns * sizes.hidden / kMeasuredWidth,
                times.longest_ns * sizes.intermediate / kMeasuredWidth};
    }

    DEVICE u64 on(u32 num_multiprocessors) const {
        const u64 chain = longest_fc1_ns + longest_fc2_ns;
        const u64 together = tiles_ns / num_multiprocessors + longest_fc1_ns / 2;
        return kLargeFixedNs + (chain > together ? chain : together);
    }
};

DEVICE u64 at_once_ns(const SmallTime& few, const LargeTime& many, u32 of_large, u32 num_multiprocessors, u32 beside) {
    const u32 of_small = num_multiprocessors - of_large;
    const u64 small = few.on(of_small), large = many.on(of_large) * (100 + beside * of_small / num_multiprocessors) / 100;
    return small > large ? small : large;
}

/// How many multiprocessors the launch of many rows gets; 0: one behind the other is as fast. All lanes of a warp call it, and all
/// get it.
DEVICE u32 multiprocessors_of_large(const SmallTime& few, const LargeTime& many, u32 num_multiprocessors) {
    u64 least = ~0ull;
    u32 best = 0;
    for (u32 of_large = kGrain * (1 + threadIdx.x % kWarp); of_large < num_multiprocessors; of_large += kGrain * kWarp) {
        const u64 takes = at_once_ns(few, many, of_large, num_multiprocessors, kBesidePercent);
        if (takes < least) {
            least = takes;
            best = of_large;
        }
    }
    for (u32 distance = kWarp / 2; distance > 0; distance /= 2) {
        const u64 other_least = __shfl_xor_sync(kAllLanes, least, distance);
        const u32 other = __shfl_xor_sync(kAllLanes, best, distance);
        if (other_least < least || (other_least == least && other < best)) {
            least = other_least;
            best = other;
        }
    }
    if (best == 0) return 0;
    const u64 in_turn = few.on(num_multiprocessors) + many.on(num_multiprocessors);
    return at_once_ns(few, many, best, num_multiprocessors, 0) * 100 < in_turn * kMinGainPercent ? best : 0;
}
