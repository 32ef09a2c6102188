// What grouped GEMM kernels are given, and which tile of which expert a block computes.
//
// Defined before this file: ARGUMENTS_BYTES, the size of the host's `GroupedGemmArgs`.
#pragma once

#include "base.cuh"
#include "expert.cuh"

/// The arguments of every grouped GEMM; mirrored by `GroupedGemmArgs` in src/jit/kernels/grouped_gemm.rs.
struct GroupedGemmArgs {
    /// `[num_experts]`
    const Expert* experts;
    /// `[num_experts + 1]` where each expert's rows start.
    const u32* expert_offsets;
    /// `[num_rows]` the token that each row reads.
    const u32* row_token;
    /// `[num_tokens, HIDDEN]` bf16.
    const u8* tokens;
    /// The image of all rows (image.cuh), which is gathered from tokens; null where the schedule reads tokens.
    u8* image;
    /// How much is there of each of the image's groups of 8 rows, in counts of grouped_gemm_wgmma.cu, or of the activations of each
    /// block of rows, at its first group, in counts of grouped_gemm_small.cu; zero whenever no kernel runs.
    u32* gathered;
    /// FC2's input, bf16: `[num_rows, INTERMEDIATE]`, or an image.
    u8* inner;
    /// `[num_rows, HIDDEN]` unweighted FC2 rows, f32 or bf16.
    u8* out;
    /// `[3]` block scales that saturated and that became 0 while FC2's input was quantised, and rows whose FC2 was stored:
    /// what ran, told by what ran. Added to.
    u64* counts;
    /// What warps of a block of grouped_gemm_small.cu leave to each other: `[blocks, PARTS_BYTES]`, of no use between kernels.
    u8* parts;
    /// `[1]` tiles of grouped_gemm_wgmma.cu that its blocks have asked for; zero whenever no kernel runs.
    u32* given_out;
    /// What this launch does, where only the device knows that; else null.
    const Dealt* dealt;
    /// Multiplies every token value.
    float token_scale;
    u32 num_experts;
};

static_assert(sizeof(GroupedGemmArgs) == ARGUMENTS_BYTES, "GroupedGemmArgs is the host's");

/// Whether there is anything to do: a launch that was queued before anybody knew ends at once.
DEVICE bool has_rows(const GroupedGemmArgs& args) { return args.dealt == nullptr || args.dealt->num_blocks != 0; }

/// Blocks that take part.
DEVICE u32 num_blocks_of(const GroupedGemmArgs& args) {
    return args.dealt == nullptr ? gridDim.x : args.dealt->num_blocks;
}

/// Counts a tile's rows as stored; one thread of one block does, for each block of rows.
DEVICE void count_rows(const GroupedGemmArgs& args, u32 num_rows) {
    atomicAdd(args.counts + 2, static_cast<u64>(num_rows));
}

/// Where a tile lies: `index` counts the tiles of its expert.
struct Place {
    u32 expert;
    u32 index;
    /// The expert's first row among all experts' rows, and how many it has.
    u32 first_row;
    u32 num_rows;
    /// Rows of earlier experts, each expert's rounded up to 8.
    u32 padded_row;
};

/// Finds tiles in ascending order, expert by expert. An expert has `kTiles` for each `kBlockRows` rows, the last of which
/// may be fewer; none where it has no rows or is of another format.
///
/// A warp looks at 32 experts at a time, and every warp of a block by itself: no barrier, and no limit on experts.
template <u32 kTiles, u32 kBlockRows>
class TileCursor {
public:
    DEVICE explicit TileCursor(const GroupedGemmArgs& args) : args_(args) {}

    /// The tile of number `wanted`, which is not below an earlier call's; false when there are no more. All lanes call it.
    DEVICE bool find(u32 wanted, Place& place) {
        while (first_expert_ < args_.num_experts) {
            const Experts experts = look();
            const u32 holders = __ballot_sync(kAllLanes, wanted < tiles_before_ + experts.tiles_through);
            if (holders != 0) {
                const u32 holder = __ffs(holders) - 1;
                const u32 tiles_before = tiles_before_ + experts.tiles_through - experts.num_tiles;
                place.expert = first_expert_ + holder;
                place.index = wanted - __shfl_sync(kAllLanes, tiles_before, holder);
                place.first_row = __shfl_sync(kAllLanes, experts.first_row, holder);
                place.num_rows = __shfl_sync(kAllLanes, experts.num_rows, holder);
                place.padded_row = padded_before_ + __shfl_sync(kAllLanes, experts.padded_through, holder) -
                                   ceil_div(place.num_rows, 8u) * 8;
                return true;
            }
            pass(experts);
        }
        return false;
    }

    /// All tiles from here on.
    DEVICE u32 count() {
        while (first_expert_ < args_.num_experts) pass(look());
        return tiles_before_;
    }

private:
    /// What lane i sees of expert `first_expert_ + i`; `through` sums include it and the lanes below.
    struct Experts {
        u32 first_row;
        u32 num_rows;
        u32 num_tiles;
        u32 tiles_through;
        u32 padded_through;
    };

    DEVICE Experts look() const {
        const u32 lane = threadIdx.x % kWarp, expert = first_expert_ + lane;
        Experts seen = {0, 0, 0, 0, 0};
        if (expert < args_.num_experts) {
            seen.first_row = args_.expert_offsets[expert];
            seen.num_rows = args_.expert_offsets[expert + 1] - seen.first_row;
            if (args_.experts[expert].fc1 != nullptr) seen.num_tiles = ceil_div(seen.num_rows, kBlockRows) * kTiles;
        }
        seen.tiles_through = seen.num_tiles;
        seen.padded_through = ceil_div(seen.num_rows, 8u) * 8;
        for (u32 distance = 1; distance < kWarp; distance *= 2) {
            const u32 tiles = __shfl_up_sync(kAllLanes, seen.tiles_through, distance);
            const u32 padded = __shfl_up_sync(kAllLanes, seen.padded_through, distance);
            if (lane >= distance) {
                seen.tiles_through += tiles;
                seen.padded_through += padded;
            }
        }
        return seen;
    }

    DEVICE void pass(const Experts& experts) {
        first_expert_ += kWarp;
        tiles_before_ += __shfl_sync(kAllLanes, experts.tiles_through, kWarp - 1);
        padded_before_ += __shfl_sync(kAllLanes, experts.padded_through, kWarp - 1);
    }

    const GroupedGemmArgs& args_;
    u32 first_expert_ = 0;
    u32 tiles_before_ = 0;
    u32 padded_before_ = 0;
};

/// A block of weight rows times a block of an expert's rows.
struct Tile {
    u32 expert;
    u32 weight_block;
    /// The first row among all experts' rows, and how many there are (at most the size of a block of rows).
    u32 first_row;
    u32 num_rows;
    /// The first row in the expert.
    u32 row_in_expert;
};

/// Rows of an expert that are gone through for all weights before the next: more would not stay in L2.
constexpr u32 kBandRows = 2048;

/// Tiles in the order expert > band of rows > weight block > row block: what is read of a band stays in L2 until it is done.
template <u32 kWeightBlocks, u32 kBlockRows>
DEVICE Tile weight_major(const Place& place) {
    constexpr u32 kBandBlocks = kBandRows / kBlockRows, kBandTiles = kBandBlocks * kWeightBlocks;
    const u32 first_block = place.index / kBandTiles * kBandBlocks, in_band = place.index % kBandTiles;
    const u32 row_blocks = min_of(kBandBlocks, ceil_div(place.num_rows, kBlockRows) - first_block);
    Tile tile;
    tile.expert = place.expert;
    tile.weight_block = in_band / row_blocks;
    tile.row_in_expert = (first_block + in_band % row_blocks) * kBlockRows;
    tile.first_row = place.first_row + tile.row_in_expert;
    tile.num_rows = min_of(kBlockRows, place.num_rows - tile.row_in_expert);
    return tile;
}
