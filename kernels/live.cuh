// Numbers of a step that lie on the device.
#pragma once

#include "base.cuh"
#include "peers.cuh"

/// Mirrored by `Live` in src/jit/kernels/live.rs.
struct Live {
    /// What flags hold, from the host.
    u64 word;
    /// Tokens that this rank brings, from the host.
    u32 num_tokens;
    u32 unused;
    /// Tokens that come, and rows of this rank's experts.
    u32 num_received;
    u32 num_rows;
    /// 1: more than there is room for were told; then none come.
    u32 is_over;
    u32 padding;
    /// Where what comes lies, by source.
    Run arrived[kMaxPeers];
    /// Where rows go home to.
    Run homes[kMaxPeers];
};

static_assert(sizeof(Live) == 32 + 2 * kMaxPeers * sizeof(Run), "Live has no holes");

/// A run that begins behind `first` rows.
DEVICE Run run_behind(u64 address, u64 first, u64 count, u64 bytes) { return {address - first * bytes, first + count}; }
