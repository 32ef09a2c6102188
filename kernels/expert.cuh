// An expert of a rank, as tables of them have it.
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
