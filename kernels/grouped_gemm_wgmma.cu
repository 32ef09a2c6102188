// The grouped GEMM of `lockstep.wgmma.grouped_gemm.{nvfp4,w4a16_nvfp4,none}` for any number of rows, sm_90a.
//
// Decoded weights are wgmma's A operand in registers, rows its B operand in shared memory. Both `tokens` and `inner` are
// images (image.cuh): `gather_tokens` of permute.cu writes the first, `fc1` the second, `fc2` writes rows. One block a
// multiprocessor, each of kThreads threads; it takes tiles blockIdx.x, blockIdx.x + gridDim.x, ... Dynamic shared
// memory: kSharedBytes + 1024.
//
// Defined before this file:
//   HIDDEN, INTERMEDIATE   widths, multiples of 16
//   WEIGHT_BITS, QUANTISE, OUTPUT_BITS   as in grouped_gemm_mma.cu
//   BLOCK_ROWS             rows a tile: 16, 32, 64, 128 or 256. It changes no bits: every output is one chain over K
//   NUM_STAGES             stages of weights and rows under way
//   NUM_THREADS, SHARED_BYTES   what the host launches with, compared with this file's own
//   ACTIVATION, ...        see activation.cuh

#include "activation.cuh"
#include "base.cuh"
#include "experts.cuh"
#include "hopper.cuh"
#include "image.cuh"
#include "requantise.cuh"
#include "store.cuh"
#include "weights.cuh"

static_assert(HIDDEN % 16 == 0 && INTERMEDIATE % 16 == 0, "NVFP4 blocks divide both widths");
static_assert(WEIGHT_BITS == 4 || WEIGHT_BITS == 16, "weights are NVFP4 or bf16");
static_assert(NUM_STAGES >= 2, "a stage is copied while another is multiplied");

// One warpgroup copies, two multiply. A warpgroup's tile is 64 weight rows high, of 16 a warp: with two tiles a warp has
// whole units, with one, which 256 rows leave registers for, a unit's two tiles are two warps'.
constexpr u32 kGroupThreads = 128;
constexpr u32 kThreads = 3 * kGroupThreads;
constexpr u32 kTiles = BLOCK_ROWS == 256 ? 1 : 2;
constexpr u32 kGroupUnits = 2 * kTiles;
constexpr u32 kUnitsPerBlock = 2 * kGroupUnits;
constexpr u32 kRowTiles = BLOCK_ROWS / 8;

constexpr u32 kFc1Steps = (HIDDEN + kStepK - 1) / kStepK;
constexpr u32 kFc2Steps = (INTERMEDIATE + kStepK - 1) / kStepK;

// Few rows leave little to do between two waits: then a stage is two steps, where both widths allow it.
constexpr u32 kStageSteps = WEIGHT_BITS == 4 && BLOCK_ROWS <= 64 && kFc1Steps % 2 == 0 && kFc2Steps % 2 == 0 ? 2 : 1;
constexpr u32 kRowsBytes = BLOCK_ROWS * kImageRowBytes;
constexpr u32 kWeightBytes = WEIGHT_BITS == 4 ? kStepBytes : kBf16StepBytes;
constexpr u32 kUnitBytes = kStageSteps * kWeightBytes;
constexpr u32 kWeightsAt = NUM_STAGES * kStageSteps * kRowsBytes;
constexpr u32 kInnerAt = kWeightsAt + NUM_STAGES * kUnitsPerBlock * kUnitBytes;
// FC1's output is gathered into chunks of 64 columns: one a warpgroup, or one of both.
constexpr u32 kAmaxAt = kInnerAt + kTiles * kRowsBytes;
constexpr u32 kSharedBytes = kAmaxAt + (QUANTISE && kTiles == 1 ? 8 * BLOCK_ROWS * 4 : 0);
static_assert(kSharedBytes + 1024 == SHARED_BYTES && kThreads == NUM_THREADS, "the host launches what this file describes");
static_assert(kSharedBytes + 1024 <= 232448 - 48 * NUM_STAGES, "a block's shared memory on sm_90 is 227 KB");

// NOTE: setmaxnreg.inc waits for ever if the warpgroups together ask for more than the block was launched with.
constexpr u32 kLaunchRegisters = 168, kCopyRegisters = 40, kMultiplyRegisters = 232;
static_assert(kCopyRegisters + 2 * kMultiplyRegisters <= 3 * kLaunchRegisters, "registers are only moved");

template <bool kIsFc1>
struct Gemm {
    static constexpr u32 kSteps = kIsFc1 ? kFc1Steps : kFc2Steps;
    static constexpr u32 kUnits = kIsFc1 ? INTERMEDIATE / 16 : (HIDDEN + kUnitRows - 1) / kUnitRows;
    static constexpr u32 kWeightBlocks = (kUnits + kUnitsPerBlock - 1) / kUnitsPerBlock;
};

/// Shared memory of a block, and where in the ring of stages a warp is.
struct Pipeline {
    u32 shared;
    /// Filled by copies, emptied by warps; NUM_STAGES each.
    u32 full;
    u32 empty;
    /// `[NUM_STAGES]` what the tile is that begins with a stage.
    u32 works;
    u32 stage;
    u32 parity;

    DEVICE u32 full_barrier() const { return full + 8 * stage; }
    DEVICE u32 empty_barrier() const { return empty + 8 * stage; }
    DEVICE u32 work() const { return works + 32 * stage; }
    DEVICE u32 rows(u32 step) const { return shared + (stage * kStageSteps + step) * kRowsBytes; }
    DEVICE u32 unit(u32 unit) const { return shared + kWeightsAt + (stage * kUnitsPerBlock + unit) * kUnitBytes; }

    DEVICE void advance() {
        if (++stage == NUM_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/// A tile as the copying warps have found it: multiplying warps take it from there, since finding one takes as long as
/// several steps of K.
struct Work {
    u32 expert;
    u32 weight_block;
    u32 first_row;
    u32 num_rows;
    /// The rows' first group in the expert's image, and the image's groups.
    u32 first_group;
    u32 num_groups;
    u32 padded_row;

    DEVICE static Work of(const Place& place) {
        const Tile tile = weight_major<BLOCK_ROWS>(place);
        return {tile.expert,   tile.weight_block, tile.first_row, tile.num_rows, tile.row_in_expert / kGroupRows,
                ceil_div(place.num_rows, kGroupRows), place.padded_row};
    }

    /// No tile: there is none left.
    DEVICE static Work none() { return {0, 0, 0, 0, 0, 0, 0}; }

    DEVICE void put(u32 at) const {
        store_shared4(at, {{expert, weight_block, first_row, num_rows}});
        store_shared4(at + 16, {{first_group, num_groups, padded_row, 0}});
    }

    DEVICE static Work get(u32 at) {
        const Word4 a = load_shared4(at), b = load_shared4(at + 16);
        return {a.v[0], a.v[1], a.v[2], a.v[3], b.v[0], b.v[1], b.v[2]};
    }

    /// Bytes of one step's rows: whole groups of 8, as many as the expert has left.
    DEVICE u32 rows_bytes() const { return min_of<u32>(BLOCK_ROWS / kGroupRows, num_groups - first_group) * kGroupBytes; }

    /// Where step 0 of the rows lies in an image of `kSteps`.
    template <u32 kSteps>
    DEVICE u64 image_at() const {
        return image_start<kSteps>(padded_row) + image_step(0, first_group, num_groups);
    }
};

/// Copies all stages of a tile. One lane of each of four warps: warp w brings units kTiles w .. of the block; copies
/// issued in straight lines by four warps were 2 to 8 % faster than by one.
template <bool kIsFc1>
DEVICE void copy_tile(const GroupedGemmArgs& args, const Work& work, Pipeline& ring) {
    using G = Gemm<kIsFc1>;
    constexpr u32 kUnitsPerWarp = kUnitsPerBlock / 4;
    const u32 warp = threadIdx.x / kWarp;
    const u32 first_unit = work.weight_block * kUnitsPerBlock, num_units = min_of(kUnitsPerBlock, G::kUnits - first_unit);
    const Expert& expert = args.experts[work.expert];
    const u8* weights = (kIsFc1 ? expert.fc1 : expert.fc2) +
                        static_cast<u64>(first_unit + warp * kUnitsPerWarp) * (G::kSteps * kWeightBytes);
    const u8* rows = (kIsFc1 ? args.tokens : args.inner) + work.image_at<G::kSteps>();
    const u32 step_bytes = work.rows_bytes();
    const u32 stage_bytes = kStageSteps * (step_bytes + num_units * kWeightBytes);
#pragma unroll 1
    for (u32 step = 0; step < G::kSteps; step += kStageSteps) {
        barrier_wait(ring.empty_barrier(), ring.parity ^ 1);
        const u32 full = ring.full_barrier();
        if (warp == 0) {
            if (step == 0) work.put(ring.work());
            barrier_expect(full, stage_bytes);
        }
#pragma unroll
        for (u32 i = 0; i < kUnitsPerWarp; ++i) {
            const u32 unit = warp * kUnitsPerWarp + i;
            if (unit < num_units) {
                bulk_load(ring.unit(unit), weights + static_cast<u64>(i * G::kSteps + step) * kWeightBytes, kUnitBytes, full);
            }
        }
#pragma unroll
        for (u32 i = 0; i < kStageSteps; ++i) {
            if (warp == (kStageSteps == 1 ? 3 : i)) {
                bulk_load(ring.rows(i), rows + static_cast<u64>(step + i) * work.num_groups * kGroupBytes, step_bytes, full);
            }
        }
        ring.advance();
    }
}

/// Where a multiplying warp stands: `unit` of the block's, and with one tile a warp, which tile of it.
struct Seat {
    u32 group;
    u32 unit;
    u32 tile;
    u32 lane;

    DEVICE static Seat mine() {
        const u32 group = threadIdx.x / kGroupThreads - 1, warp = threadIdx.x % kGroupThreads / kWarp;
        const u32 lane = threadIdx.x % kWarp;
        if (kTiles == 2) return {group, group * kGroupUnits + warp, 0, lane};
        return {group, group * kGroupUnits + warp / 2, warp % 2, lane};
    }
};

/// Where a warp's weights of a step lie, less where its stage starts.
DEVICE u32 weights_place(const Seat& seat) {
    const u32 unit = kWeightsAt + seat.unit * kUnitBytes;
    u32 place = WEIGHT_BITS == 4 ? unit + seat.tile * kTileBytes + seat.lane * 16 : unit;
    asm volatile("" : "+r"(place));  // else it is computed again at every step, before anything is decoded
    return place;
}

/// A warp's weights of one step.
#if WEIGHT_BITS == 4
struct Weights {
    Word4 words[kTiles];
    u32 scales;

    DEVICE void load(u32 at, u32 scales_at, const Seat&) {
#pragma unroll
        for (u32 i = 0; i < kTiles; ++i) words[i] = load_shared4(at + i * kTileBytes);
        scales = kTiles == 2 ? load_shared(scales_at) : load_shared_u16(scales_at);
    }

    /// Where a step's scales lie, by its codes.
    DEVICE static u32 scales_place(const Seat& seat, u32 place) {
        u32 scales = place - seat.tile * kTileBytes - seat.lane * 16 + kScalesAt + seat.lane * 4 + seat.tile * 2;
        asm volatile("" : "+r"(scales));
        return scales;
    }

    /// The A fragments of MMAs `2 * kHalf` and `2 * kHalf + 1`.
    template <u32 kHalf>
    DEVICE void decode(u32 (&a)[kTiles][2][4]) const {
        decode16(words[0].v[2 * kHalf], words[0].v[2 * kHalf + 1], scale_pair<0>(scales), scale_pair<1>(scales), a[0][0],
                 a[0][1]);
        if constexpr (kTiles == 2) {
            decode16(words[1].v[2 * kHalf], words[1].v[2 * kHalf + 1], scale_pair<2>(scales), scale_pair<3>(scales),
                     a[1][0], a[1][1]);
        }
    }
};
#else
struct Weights {
    u32 unit;
    u32 tile;

    DEVICE void load(u32 at, u32, const Seat& seat) {
        unit = at;
        tile = seat.tile;
    }

    DEVICE static u32 scales_place(const Seat&, u32) { return 0; }

    template <u32 kHalf>
    DEVICE void decode(u32 (&a)[kTiles][2][4]) const {
#pragma unroll
        for (u32 i = 0; i < kTiles; ++i) {
#pragma unroll
            for (u32 q = 0; q < 2; ++q) load_fragment(unit, tile + i, 2 * kHalf + q, a[i][q]);
        }
    }
};
#endif

/// What scales sums back to weights' values before their global scale. A power of two: it may be applied to either factor.
constexpr float kSumFactor = WEIGHT_BITS == 4 ? kDecodeFactor : 1.0f;

/// Multiplies all steps of a tile, K ascending. The first stage has come.
///
/// Half a step is decoded while the other half's group of MMAs runs: the two sets of fragments are never the same
/// registers, and one group is always under way. A step's weights are loaded before the last step's MMAs are waited for.
template <u32 kSteps>
DEVICE void multiply_tile(const Seat& seat, Pipeline& ring, float (&acc)[kTiles][kRowTiles][4]) {
    constexpr u32 kStageBytes = kUnitsPerBlock * kUnitBytes;
    const u32 place = weights_place(seat), scales_place = Weights::scales_place(seat, place);
    u32 first[kTiles][2][4], second[kTiles][2][4];
    u32 previous_empty = 0;
    u32 accumulate = 0;
    Weights weights;
    weights.load(ring.shared + place + ring.stage * kStageBytes, ring.shared + scales_place + ring.stage * kStageBytes, seat);
#pragma unroll 1
    for (u32 step = 0; step < kSteps; step += kStageSteps) {
        const u32 empty = ring.empty_barrier();
#pragma unroll
        for (u32 i = 0; i < kStageSteps; ++i) {
            const u64 rows = row_descriptor(ring.rows(i));
            weights.decode<0>(first);
            wgmma_fence();
#pragma unroll
            for (u32 q = 0; q < 2; ++q) {
#pragma unroll
                for (u32 j = 0; j < kTiles; ++j) {
                    Wgmma<BLOCK_ROWS>::multiply(acc[j], first[j][q], rows + q * kDescriptorK16, i + q > 0 ? 1 : accumulate);
                }
            }
            wgmma_commit();
            wgmma_wait<1>();  // the previous stage's last group is done with its shared memory
            if (i == 0 && step > 0 && seat.lane == 0) barrier_arrive(previous_empty);
            weights.decode<1>(second);
            wgmma_fence();
#pragma unroll
            for (u32 q = 0; q < 2; ++q) {
#pragma unroll
                for (u32 j = 0; j < kTiles; ++j) {
                    Wgmma<BLOCK_ROWS>::multiply(acc[j], second[j][q], rows + (2 + q) * kDescriptorK16, 1);
                }
            }
            wgmma_commit();
            if (i + 1 < kStageSteps) {
                const u32 at = ring.stage * kStageBytes + (i + 1) * kWeightBytes;
                weights.load(ring.shared + place + at, ring.shared + scales_place + at, seat);
            } else {
                ring.advance();
                if (step + kStageSteps < kSteps) {
                    barrier_wait(ring.full_barrier(), ring.parity);
                    const u32 at = ring.stage * kStageBytes;
                    weights.load(ring.shared + place + at, ring.shared + scales_place + at, seat);
                }
            }
            wgmma_wait<1>();
        }
        accumulate = 1;
        previous_empty = empty;
    }
    wgmma_wait<0>();
#pragma unroll
    for (u32 j = 0; j < kTiles; ++j) wgmma_hold(acc[j]);
    if (seat.lane == 0) barrier_arrive(previous_empty);
}

/// Replaces gate sums by the activation: acc[j][n][c] is column 16 unit + 2 g + j of row 8 n + 2 t + c.
DEVICE void activate_tile(const GroupedGemmArgs& args, const Expert& expert, bool is_real,
                          float (&acc)[kTiles][kRowTiles][4]) {
    const float gate_scale = args.token_scale * expert.gate_scale * kSumFactor;
    const float up_scale = args.token_scale * expert.up_scale * kSumFactor;
#pragma unroll
    for (u32 j = 0; j < kTiles; ++j) {
#pragma unroll
        for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
            for (u32 c = 0; c < 2; ++c) {
                const float value = activate(acc[j][n][c] * gate_scale, acc[j][n][2 + c] * up_scale);
                // Beyond the last unit the image is zero: FC2's padded weights must not meet a stray NaN.
                acc[j][n][c] = is_real ? value : 0.0f;
            }
        }
    }
}

/// Sends the activations of a tile through NVFP4: a unit's 16 columns are a block.
DEVICE void requantise_tile(const Seat& seat, const Work& work, float input_scale, u32 amax_shared,
                            float (&acc)[kTiles][kRowTiles][4], QuantCounts& counts) {
    const u32 g = seat.lane / 4, t = seat.lane % 4;
    const float inverse_scale = __fdiv_rn(1.0f, input_scale);
    // As integers magnitudes order like their bits, and NaN wins.
    const auto amax_of_warp = [&](u32 n, u32 c) {
        u32 bits = nvfp4::magnitude_bits(acc[0][n][c]);
        if constexpr (kTiles == 2) bits = max(bits, nvfp4::magnitude_bits(acc[kTiles - 1][n][c]));
#pragma unroll
        for (u32 distance = 4; distance < kWarp; distance *= 2) {
            bits = max(bits, __shfl_xor_sync(kAllLanes, bits, distance));
        }
        return bits;
    };
    // With one tile a warp both warps of a unit need both maxima, which meet in shared memory.
    [[maybe_unused]] const u32 mine = amax_shared + (threadIdx.x / kWarp - 4) * BLOCK_ROWS * 4;
    [[maybe_unused]] const u32 others = amax_shared + ((threadIdx.x / kWarp - 4) ^ 1) * BLOCK_ROWS * 4;
    if constexpr (kTiles == 1) {
#pragma unroll
        for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
            for (u32 c = 0; c < 2; ++c) {
                const u32 bits = amax_of_warp(n, c);
                if (g == 0) store_shared(mine + (n * 8 + 2 * t + c) * 4, bits);
            }
        }
        named_barrier<kGroupThreads>(2 + seat.group);
    }
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (u32 c = 0; c < 2; ++c) {
            const u32 row = n * 8 + 2 * t + c;
            u32 bits;
            if constexpr (kTiles == 2) {
                bits = amax_of_warp(n, c);
            } else {
                bits = max(load_shared(mine + row * 4), load_shared(others + row * 4));
            }
            const BlockScale scale = block_scale(bits, inverse_scale);
            if (g == 0 && seat.tile == 0 && row < work.num_rows) counts.add(scale);
#pragma unroll
            for (u32 j = 0; j < kTiles; ++j) acc[j][n][c] = requantise(acc[j][n][c], scale);
        }
    }
    // The next tile's store barrier stands between these reads and the next writes.
}

/// Writes a tile's activations into the image: gathered in shared memory to a chunk of 64 columns, then one copy.
DEVICE void store_inner(const GroupedGemmArgs& args, const Work& work, const Seat& seat, u32 shared,
                        const float (&acc)[kTiles][kRowTiles][4]) {
    constexpr u32 kStoreThreads = kTiles == 2 ? kGroupThreads : 2 * kGroupThreads;
    const u32 g = seat.lane / 4, t = seat.lane % 4;
    const u32 chunk_shared = shared + kInnerAt + (kTiles == 2 ? seat.group * kRowsBytes : 0);
    const u32 chunk = kTiles == 2 ? work.weight_block * 2 + seat.group : work.weight_block;
    const bool is_storer = threadIdx.x % kGroupThreads == 0 && (kTiles == 2 || seat.group == 0);
    const u32 number = kTiles == 2 ? 4 + seat.group : 4;
    if (is_storer) bulk_store_wait_read();  // the last tile's chunk has left
    named_barrier<kStoreThreads>(number);
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (u32 c = 0; c < 2; ++c) {
            const u32 at = chunk_shared + n * kGroupBytes + image_pair(2 * t + c, seat.unit % 4, g);
            if constexpr (kTiles == 2) {
                store_shared(at, pack_bf16(acc[0][n][c], acc[kTiles - 1][n][c]));
            } else {
                store_shared_u16(at + 2 * seat.tile, static_cast<u16>(pack_bf16(acc[0][n][c], 0.0f)));
            }
        }
    }
    fence_async_shared();
    named_barrier<kStoreThreads>(number);
    if (is_storer && chunk < kFc2Steps) {
        u8* to = args.inner + work.image_at<kFc2Steps>() + static_cast<u64>(chunk) * work.num_groups * kGroupBytes;
        bulk_store(to, chunk_shared, work.rows_bytes());
    }
}

/// Writes columns 32 unit + 4 g + 2 j + {0, 1} of rows 8 n + 2 t + c; all of them, or those that there are.
template <bool kIsWhole>
DEVICE void store_rows(u8* to, u32 num_rows, float scale, const float (&acc)[kTiles][kRowTiles][4]) {
    const u32 t = threadIdx.x % 4;
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (u32 c = 0; c < 2; ++c) {
            if (!kIsWhole && n * 8 + 2 * t + c >= num_rows) continue;
            float v[2 * kTiles];
#pragma unroll
            for (u32 i = 0; i < 2 * kTiles; ++i) v[i] = acc[i / 2][n][2 * (i % 2) + c] * scale;
            store_columns(to + (n * 8 + c) * (HIDDEN * (OUTPUT_BITS / 8)), v);
        }
    }
}

DEVICE void store_tile(const GroupedGemmArgs& args, const Work& work, const Seat& seat,
                       const float (&acc)[kTiles][kRowTiles][4]) {
    const u32 g = seat.lane / 4, t = seat.lane % 4;
    const Expert& expert = args.experts[work.expert];
    const float scale = (QUANTISE ? expert.down_scale * expert.input_scale : expert.down_scale) * kSumFactor;
    const u32 column = (work.weight_block * kUnitsPerBlock + seat.unit) * kUnitRows + 4 * g + 2 * seat.tile;
    // HIDDEN may end in the middle of the last unit, never inside four columns.
    if (column >= HIDDEN) return;
    u8* to = args.out + (static_cast<u64>(work.first_row + 2 * t) * HIDDEN + column) * (OUTPUT_BITS / 8);
    if (work.num_rows == BLOCK_ROWS) {
        store_rows<true>(to, BLOCK_ROWS, scale, acc);
    } else {
        store_rows<false>(to, work.num_rows, scale, acc);
    }
}

template <bool kIsFc1>
DEVICE void grouped_gemm(const GroupedGemmArgs& args) {
    using G = Gemm<kIsFc1>;
    extern __shared__ Word4 shared_memory[];
    __shared__ alignas(8) u64 barriers[2 * NUM_STAGES];
    __shared__ Word4 works[2 * NUM_STAGES];
    // The swizzle counts from addresses that 1024 divides.
    Pipeline ring = {(shared_address(shared_memory) + 1023) & ~1023u, shared_address(barriers),
                     shared_address(barriers + NUM_STAGES), shared_address(works), 0, 0};
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < NUM_STAGES; ++i) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, 2 * kGroupThreads / kWarp);
        }
    }
    barrier_init_done();
    __syncthreads();

    if (threadIdx.x < kGroupThreads) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopyRegisters));
        TileCursor<G::kWeightBlocks, BLOCK_ROWS> cursor(args);
        Place place;
        for (u32 index = blockIdx.x; cursor.find(index, place); index += gridDim.x) {
            if (threadIdx.x % kWarp == 0) copy_tile<kIsFc1>(args, Work::of(place), ring);
            __syncwarp();
        }
        if (threadIdx.x == 0) {
            barrier_wait(ring.empty_barrier(), ring.parity ^ 1);
            Work::none().put(ring.work());
            barrier_arrive(ring.full_barrier());
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyRegisters));
        const Seat seat = Seat::mine();
        QuantCounts counts = {0, 0};
        while (true) {
            barrier_wait(ring.full_barrier(), ring.parity);
            const Work work = Work::get(ring.work());
            // A vote, so that the compiler knows that no warp parts here.
            if (__all_sync(kAllLanes, work.num_rows == 0)) break;
            float acc[kTiles][kRowTiles][4];
            multiply_tile<G::kSteps>(seat, ring, acc);
            if constexpr (kIsFc1) {
                const Expert& expert = args.experts[work.expert];
                const bool is_real = work.weight_block * kUnitsPerBlock + seat.unit < G::kUnits;
                activate_tile(args, expert, is_real, acc);
                if constexpr (QUANTISE) {
                    requantise_tile(seat, work, expert.input_scale, ring.shared + kAmaxAt, acc, counts);
                }
                store_inner(args, work, seat, ring.shared, acc);
            } else {
                store_tile(args, work, seat, acc);
                if (work.weight_block == 0 && threadIdx.x == kGroupThreads) count_rows(args, work.num_rows);
            }
        }
        if constexpr (kIsFc1) bulk_store_wait();
        if constexpr (kIsFc1 && QUANTISE) counts.flush(args.counts);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fc1(const __grid_constant__ GroupedGemmArgs args) {
    grouped_gemm<true>(args);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fc2(const __grid_constant__ GroupedGemmArgs args) {
    grouped_gemm<false>(args);
}
