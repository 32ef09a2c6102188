// Rows into the order in which experts read them: groups of 8 rows of the image that wgmma schedules take.
//
// Defined before this file: HIDDEN.
#pragma once

#include "base.cuh"
#include "experts.cuh"
#include "image.cuh"
#include "weights.cuh"

/// Steps of a row of tokens.
constexpr u32 kTokenSteps = (HIDDEN + kStepK - 1) / kStepK;

/// Writes steps `first` to `end` of group `group_idx` of a place's rows into the image. `kThreads` threads call it, a
/// multiple of 64. Rows and K beyond the end are zero.
template <u32 kThreads>
DEVICE void gather_group(const GroupedGemmArgs& args, const Place& place, u32 group_idx, u32 first, u32 end) {
    // A thread writes piece `thread % 8` of one row, at every `kThreads / 64`th step.
    const u32 thread = threadIdx.x % kThreads, piece = thread % 8, row_in_group = thread / 8 % kGroupRows;
    const u32 row = group_idx * kGroupRows + row_in_group;
    const bool is_real = row < place.num_rows;
    const u64 token = is_real ? args.row_token[place.first_row + row] : 0;
    const u8* from = args.tokens + token * (HIDDEN * 2);
    const u32 num_groups = ceil_div(place.num_rows, kGroupRows);
    u8* to = args.image + image_start<kTokenSteps>(place.padded_row) + row_in_group * kImageRowBytes +
             (piece ^ row_in_group) * 16;
#pragma unroll 8
    for (u32 step = first + thread / 64; step < end; step += kThreads / 64) {
        Word4 words;
#pragma unroll
        for (u32 t = 0; t < 4; ++t) {
            const u32 k = step * kStepK + 16 * t;
            const bool is_there = is_real && k < HIDDEN;
            words.v[t] = is_there ? reinterpret_cast<const u32*>(from + k * 2)[piece] : 0;
        }
        *reinterpret_cast<Word4*>(to + image_step(step, group_idx, num_groups)) = words;
    }
}
