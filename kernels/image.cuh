// The row image that the wgmma schedules read as their B operand.
//
// An expert's rows, rounded up to 8, start at its padded row times the row's bytes. There lies, for each 64 of K,
// [group of 8 rows][row 8][128 bytes]: one bulk copy brings any run of groups of a step. Inside a row's 128 bytes K is
// permuted like the weights' (weights.cuh): place 16 q + 8 h + 2 t + e holds K 16 t + 4 q + 2 h + e. So 16-byte piece
// c holds the words c, 8 + c, 16 + c, 24 + c; it lies at c ^ row, the tensor core's swizzle of 128 bytes.
#pragma once

#include "base.cuh"

constexpr u32 kGroupRows = 8;
constexpr u32 kImageRowBytes = 128;
constexpr u32 kGroupBytes = kGroupRows * kImageRowBytes;

/// Where an expert's image of rows of `kSteps` steps starts.
template <u32 kSteps>
DEVICE u64 image_start(u32 padded_row) {
    return static_cast<u64>(padded_row) * (kSteps * kImageRowBytes);
}

/// Where groups from `group` on of one step start, in an expert's image of `num_groups` groups.
DEVICE u64 image_step(u32 step, u32 group, u32 num_groups) {
    return (static_cast<u64>(step) * num_groups + group) * kGroupBytes;
}

/// Where in a group the piece lies that a row has of unit `unit % 4` of 16 columns and `g` of 8: two columns, 4 bytes.
DEVICE u32 image_pair(u32 row_in_group, u32 unit_of_step, u32 g) {
    return row_in_group * kImageRowBytes + ((g ^ row_in_group) * 16) + 4 * unit_of_step;
}
