// What grouped GEMM kernels are given, and which tile of which expert a block computes.
#pragma once

#include "base.cuh"

/// One local expert; mirrored by `ExpertEntry` in src/backend/cuda.
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

/// The arguments of every grouped GEMM; mirrored by `GroupedGemmArgs` in src/backend/cuda.
struct GroupedGemmArgs {
    /// `[num_experts]`
    const Expert* experts;
    /// `[num_experts + 1]` where each expert's rows start.
    const u32* expert_offsets;
    /// `[num_rows]` the token that each row reads.
    const u32* row_token;
    /// `[num_tokens, HIDDEN]` bf16; the wgmma schedules take the image that `gather_tokens` makes instead.
    const u8* tokens;
    /// FC2's input, bf16: `[num_rows, INTERMEDIATE]`, or an image.
    u8* inner;
    /// `[num_rows, HIDDEN]` unweighted FC2 rows, f32 or bf16.
    u8* out;
    /// `[2]` block scales that saturated and that became 0 while FC2's input was quantised; added to.
    u64* counts;
    /// Joins and barriers of the small schedule, zero before the first launch.
    u32* scratch;
    /// Multiplies every token value.
    float token_scale;
    u32 num_experts;
};

static_assert(sizeof(GroupedGemmArgs) == 72, "GroupedGemmArgs has the size that the host passes");

/// A block of weight rows times a block of an expert's rows.
struct Tile {
    u32 expert;
    /// Which block of weight rows.
    u32 weight_block;
    /// The first row, among all experts' rows, and how many there are (at most the size of a block of rows).
    u32 first_row;
    u32 num_rows;
    /// Rows of earlier experts, each expert's rounded up to 8.
    u32 padded_start;
    /// The expert's rows, and where in them the tile starts.
    u32 expert_rows;
    u32 row_in_expert;
};

/// Finds tiles in ascending order, expert > weight block > row block, so that an expert's weights stay in L2.
///
/// A warp looks at 32 experts at a time, and every warp of a block by itself: no barrier, and no limit on experts.
struct TileCursor {
    u32 first_expert;
    u32 tiles_before;
    u32 padded_before;

    DEVICE static TileCursor start() { return TileCursor{0, 0, 0}; }

    /// The tile of number `wanted`, not below an earlier call's; false when there are no more. All lanes call it.
    template <u32 kWeightBlocks, u32 kBlockRows>
    DEVICE bool find(const GroupedGemmArgs& args, u32 wanted, Tile& tile) {
        const u32 lane = threadIdx.x % kWarp;
        while (first_expert < args.num_experts) {
            const u32 expert = first_expert + lane;
            u32 start = 0, num_rows = 0, num_tiles = 0;
            if (expert < args.num_experts) {
                start = args.expert_offsets[expert];
                num_rows = args.expert_offsets[expert + 1] - start;
                if (args.experts[expert].fc1 != nullptr) num_tiles = ceil_div(num_rows, kBlockRows) * kWeightBlocks;
            }
            const u32 padded_rows = ceil_div(num_rows, 8u) * 8;
            u32 tiles_through = num_tiles, padded_through = padded_rows;
            for (u32 distance = 1; distance < kWarp; distance *= 2) {
                const u32 tiles = __shfl_up_sync(kAllLanes, tiles_through, distance);
                const u32 padded = __shfl_up_sync(kAllLanes, padded_through, distance);
                if (lane >= distance) {
                    tiles_through += tiles;
                    padded_through += padded;
                }
            }
            const u32 holders = __ballot_sync(kAllLanes, wanted < tiles_before + tiles_through);
            if (holders != 0) {
                const u32 holder = __ffs(holders) - 1;
                const u32 index = wanted - tiles_before - __shfl_sync(kAllLanes, tiles_through - num_tiles, holder);
                tile.expert = first_expert + holder;
                tile.expert_rows = __shfl_sync(kAllLanes, num_rows, holder);
                tile.padded_start = padded_before + __shfl_sync(kAllLanes, padded_through - padded_rows, holder);
                const u32 row_blocks = ceil_div(tile.expert_rows, kBlockRows);
                tile.weight_block = index / row_blocks;
                tile.row_in_expert = index % row_blocks * kBlockRows;
                tile.first_row = __shfl_sync(kAllLanes, start, holder) + tile.row_in_expert;
                tile.num_rows = min_of(kBlockRows, tile.expert_rows - tile.row_in_expert);
                return true;
            }
            first_expert += kWarp;
            tiles_before += __shfl_sync(kAllLanes, tiles_through, kWarp - 1);
            padded_before += __shfl_sync(kAllLanes, padded_through, kWarp - 1);
        }
        return false;
    }
};
