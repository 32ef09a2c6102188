// An expert of a rank, as tables of them have it, and what the device deals to a launch.
#pragma once

#include "base.cuh"

/// One local expert; mirrored by `ExpertEntry` in src/jit/kernels/grouped_gemm.rs.
struct Expert {
    /// Images of gate with up, and of down; null: the expert is of another format, and none of its rows are touched.
    const u8* fc1;
    const u8* fc2;
    /// Global scales of the weights.
    float gate_scale;
    float up_scale;
    float down_scale;
    /// FC2's `input_scale`; read where its input goes through NVFP4.
    float input_scale;
};

static_assert(sizeof(Expert) == 32, "Expert is ExpertEntry");

/// What a launch does that was queued before anybody knew; mirrored by `Dealt` in src/jit/kernels/deal.rs.
struct Dealt {
    /// Blocks that take part: none where there is nothing to do, fewer than were launched where another launch runs at once.
    u32 num_blocks;
    /// Whether the next launch may begin before this one has ended.
    u32 lets_next;
};
