// The grouped GEMM of `lockstep.wgmma.grouped_gemm.{nvfp4,w4a16_nvfp4,none}` for any number of rows, sm_90a.
//
// Decoded weights are wgmma's A operand in registers, rows its B operand in shared memory. Both `image` and `inner` are
// images (image.cuh): FC1 writes the second, FC2 writes rows. One block a multiprocessor, each of kThreads threads; it
// takes a tile as soon as it has copied the last: tiles differ in what they take. Dynamic shared memory:
// kSharedBytes + 1024.
//
// One launch, `fc1_fc2`, for both products: blocks that find no more tiles of FC1 go on with FC2's, whose first weights
// come while FC1's last are multiplied. The image of rows comes from warps that gather for all blocks meanwhile. A tile
// waits for its rows, so that all blocks have to run at once: the launch is cooperative, or as turns.cuh says.
//
// Defined before this file:
//   HIDDEN, INTERMEDIATE   widths, multiples of 16
//   WEIGHT_BITS, QUANTISE, OUTPUT_BITS   as in grouped_gemm_mma.cu
//   BLOCK_ROWS             rows a tile: 64, 128 or 256. It changes no bits: every output is one chain over K
//   WIDTHS                 bit i: a tile may be computed as 16 (i + 1) rows, if it has no more. It changes no bits either
//   NUM_STAGES             stages of weights and rows under way
//   NUM_THREADS, SHARED_BYTES   what the host launches with, compared with this file's own
//   ACTIVATION, ...        see activation.cuh

#include "base.cuh"
#include "experts.cuh"
#include "gather.cuh"
#include "hopper.cuh"
#include "turns.cuh"
#include "wgmma_epilogue.cuh"
#include "wgmma_tiles.cuh"

/// Whether a copying warp brings rows: the last does, or with two steps a stage the first two, a step each.
DEVICE bool copies_rows(u32 warp) { return kStageSteps == 1 ? warp == kCopyWarps - 1 : warp < kStageSteps; }

/// Copies all stages of a tile. One lane of each copying warp: warp w brings units 2 w, 2 w + 1 of the block; copies
/// issued in straight lines by four warps were 2 to 8 % faster than by one.
///
/// Some stages before the end thread 0 asks for the block's next tile, so that the answer is there when the last is on its
/// way; asked for earlier it would be this block's while others have nothing to do.
///
/// NOTE: every instruction here takes its turn from a warp that decodes. With addresses computed anew at every step this was
/// 80 of them, and the whole layer 4 to 8 % slower than with pointers that move on.
template <bool kIsFc1>
DEVICE u32 copy_tile(const GroupedGemmArgs& args, const Work& work, Pipeline& ring) {
    using G = Gemm<kIsFc1>;
    constexpr u32 kUnitsPerWarp = kUnitsPerBlock / kCopyWarps;
    const u32 warp = threadIdx.x / kWarp, first = warp * kUnitsPerWarp, first_unit = work.weight_block * kUnitsPerBlock;
    const u32 num_units = min_of(kUnitsPerBlock, G::kUnits - first_unit);
    const Expert& expert = args.experts[work.expert];
    const u8* weights =
        (kIsFc1 ? expert.fc1 : expert.fc2) + static_cast<u64>(first_unit + first) * (G::kSteps * kWeightBytes);
    const u64 step_stride = static_cast<u64>(work.num_groups) * kGroupBytes;
    const u32 rows_step = kStageSteps == 1 ? 0 : warp;
    const u8* rows = (kIsFc1 ? args.image : args.inner) + work.image_at<G::kSteps>() + rows_step * step_stride;
    const u32 step_bytes = work.rows_bytes();
    const u32 stage_bytes = kStageSteps * (step_bytes + num_units * kWeightBytes);
    u32 units_to = ring.shared + kWeightsAt + first * kUnitBytes, rows_to = ring.shared + rows_step * kRowsBytes;
    asm volatile("" : "+r"(units_to), "+r"(rows_to));  // else they are computed again at every step
    const bool is_first = warp == 0, has_rows = copies_rows(warp);
    constexpr u32 kStages = (G::kSteps + kStageSteps - 1) / kStageSteps;
    constexpr u32 kAskStep = (kStages > kAskStages ? kStages - kAskStages : 0) * kStageSteps;
    u32 next = 0;
#pragma unroll 2
    for (u32 step = 0; step < G::kSteps; step += kStageSteps) {
        const u32 stage = ring.stage;
        barrier_wait(ring.empty_barrier(), ring.parity ^ 1);
        const u32 full = ring.full_barrier();
        if (is_first) {
            if (step == 0) work.put(ring.work());
            if (step == kAskStep) next = num_blocks_of(args) + atomicAdd(args.given_out, 1);
            barrier_expect(full, stage_bytes);
        }
#pragma unroll
        for (u32 i = 0; i < kUnitsPerWarp; ++i) {
            if (kAreUnitsWhole<kIsFc1> || first + i < num_units) {
                bulk_load(units_to + (stage * kUnitsPerBlock + i) * kUnitBytes,
                          weights + static_cast<u64>(i * G::kSteps) * kWeightBytes, kUnitBytes, full);
            }
        }
        weights += kUnitBytes;
        if (has_rows) bulk_load(rows_to + stage * (kStageSteps * kRowsBytes), rows, step_bytes, full);
        rows += kStageSteps * step_stride;
        ring.advance();
    }
    return next;
}

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
    Shifts shifts;

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
        decode16(words[0].v[2 * kHalf], words[0].v[2 * kHalf + 1], scale_pair<0>(scales), scale_pair<1>(scales), shifts,
                 a[0][0], a[0][1]);
        if constexpr (kTiles == 2) {
            decode16(words[1].v[2 * kHalf], words[1].v[2 * kHalf + 1], scale_pair<2>(scales), scale_pair<3>(scales),
                     shifts, a[1][0], a[1][1]);
        }
    }
};
#else
struct Weights {
    u32 unit;
    u32 tile;
    Shifts shifts;

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

/// Multiplies all steps of a tile, K ascending. The first stage has come.
///
/// Half a step is decoded while the other half's group of MMAs runs: the two sets of fragments are never the same
/// registers, and one group is always under way. A step's weights are loaded before the last step's MMAs are waited for.
template <bool kIsFc1, u32 kRowTiles>
DEVICE void multiply_tile(const GroupedGemmArgs& args, const Seat& seat, const Shifts& shifts, Pipeline& ring,
                          float (&acc)[kTiles][kRowTiles][4]) {
    constexpr u32 kSteps = Gemm<kIsFc1>::kSteps;
    constexpr u32 kStageBytes = kUnitsPerBlock * kUnitBytes;
    const u32 place = weights_place(seat), scales_place = Weights::scales_place(seat, place);
    u32 first[kTiles][2][4], second[kTiles][2][4];
    u32 previous_empty = 0;
    u32 accumulate = 0;
    Weights weights;
    weights.shifts = shifts;
    const u32 stage_shared = ring.shared + ring.stage * kStageBytes;
    weights.load(stage_shared + place, stage_shared + scales_place, seat);
    const bool is_storing = kIsFc1 && seat.is_storing();
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
                    Wgmma<kRowTiles * 8>::multiply(acc[j], first[j][q], rows + q * kDescriptorK16,
                                                   i + q > 0 ? 1 : accumulate);
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
                    Wgmma<kRowTiles * 8>::multiply(acc[j], second[j][q], rows + (2 + q) * kDescriptorK16, 1);
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
        if (kIsFc1 && step == kTellStep && is_storing) tell_stored(args, ring, seat);
    }
    wgmma_wait<0>();
#pragma unroll
    for (u32 j = 0; j < kTiles; ++j) wgmma_hold<kRowTiles>(acc[j]);
    if (seat.lane == 0) barrier_arrive(previous_empty);
}

/// A tile from its first stage to its last store, as kWidth rows: the fewest that hold those that it has.
template <bool kIsFc1, u32 kWidth = next_width(0)>
DEVICE void compute_tile(const GroupedGemmArgs& args, u32 num_rows, const Seat& seat, const Shifts& shifts,
                         Pipeline& ring, QuantCounts& counts) {
    using G = Gemm<kIsFc1>;
    if constexpr (kWidth < BLOCK_ROWS) {
        // A vote, so that the compiler knows that no warp parts here.
        if (__all_sync(kAllLanes, num_rows > kWidth)) {
            compute_tile<kIsFc1, next_width(kWidth)>(args, num_rows, seat, shifts, ring, counts);
            return;
        }
    }
    float acc[kTiles][kWidth / 8][4] = {};
    multiply_tile<kIsFc1>(args, seat, shifts, ring, acc);
    const Work work = Work::get(ring.work());
    if constexpr (kIsFc1) {
        const Expert& expert = args.experts[work.expert];
        const bool is_real = work.weight_block * kUnitsPerBlock + seat.unit < G::kUnits;
        activate_tile(args, expert, is_real, acc);
        if constexpr (QUANTISE) requantise_tile(seat, work, expert.input_scale, ring.shared + kAmaxAt, acc, counts);
        store_inner(args, work, seat, ring, acc);
    } else {
        store_tile(args, work, seat, acc);
        if (work.weight_block == 0 && threadIdx.x == kGroupThreads) count_rows(args, work.num_rows);
    }
}

/// Gathers this block's share of all rows.
DEVICE void gather(const GroupedGemmArgs& args) {
    TileCursor<kParts, kGroupRows> cursor(args);
    Place place;
    const u32 num_blocks = num_blocks_of(args);
    for (u32 index = blockIdx.x; cursor.find(index, place); index += num_blocks) {
        const u32 group_idx = place.index / kParts, first = place.index % kParts * kPartSteps;
        gather_group<kGatherThreads>(args, place, group_idx, first, min_of(kFc1Steps, first + kPartSteps));
        named_barrier<kGatherThreads>(7);
        if (threadIdx.x % kGatherThreads == 0) {
            add_release(args.gathered + place.padded_row / kGroupRows + group_idx, 1);
        }
    }
}

/// Waits until all rows of a tile are gathered. All lanes of a warp call it.
DEVICE void wait_gathered(const GroupedGemmArgs& args, const Work& work) {
    const u32 lane = threadIdx.x % kWarp, first = work.group_idx();
    if (lane < min_of<u32>(BLOCK_ROWS / kGroupRows, work.num_groups - work.first_group)) {
        while (load_acquire(args.gathered + first + lane) < kParts) {
        }
    }
    __syncwarp();
    fence_async();
}

/// Waits until all activations of a tile's rows are there, and counts that it has. All lanes of a warp call it; returns
/// to lane 0 what was counted before.
DEVICE u32 wait_activated(const GroupedGemmArgs& args, const Work& work) {
    u32* const count = args.gathered + work.group_idx();
    while (load_acquire(count) < kActivated) {
    }
    __syncwarp();
    fence_async();
    return threadIdx.x % kWarp == 0 ? atomicAdd(count, 1) : 0;
}

/// Sets the counts of a tile's rows back to zero, where nobody waits for them any more.
DEVICE void forget_rows(const GroupedGemmArgs& args, const Work& work, u32 num_before) {
    const u32 lane = threadIdx.x % kWarp;
    if (__shfl_sync(kAllLanes, num_before, 0) != kRead - 1) return;
    if (lane < min_of<u32>(BLOCK_ROWS / kGroupRows, work.num_groups - work.first_group)) {
        args.gathered[work.group_idx() + lane] = 0;
    }
}

/// Copies tiles of one product, of which `index` is the block's next; both products' count together, and `num_before`
/// are the other's. When one has been copied the block takes whichever no block has. Returns how many tiles the product has.
template <bool kIsFc1>
DEVICE u32 copy_tiles(const GroupedGemmArgs& args, Pipeline& ring, u32& index, u32 num_before) {
    TileCursor<Gemm<kIsFc1>::kWeightBlocks, BLOCK_ROWS> cursor(args);
    Place place;
    while (cursor.find(index - num_before, place)) {
        const Work work = Work::of<Gemm<kIsFc1>::kWeightBlocks>(place);
        const bool has_rows = copies_rows(threadIdx.x / kWarp);
        u32 num_waited = 0, next = 0;
        if (kIsFc1 && has_rows) wait_gathered(args, work);
        if (!kIsFc1 && has_rows) num_waited = wait_activated(args, work);
        if (threadIdx.x % kWarp == 0) next = copy_tile<kIsFc1>(args, work, ring);
        if (!kIsFc1 && has_rows) forget_rows(args, work, num_waited);
        if (threadIdx.x == 0) Work::put_next(ring.work(), next);
        named_barrier<kCopyWarps * kWarp>(6);
        index = Work::get_next(ring.work());
        ring.next_tile();
    }
    // A stage without a tile: there are no more
    if (threadIdx.x == 0) {
        barrier_wait(ring.empty_barrier(), ring.parity ^ 1);
        Work::none().put(ring.work());
        barrier_arrive(ring.full_barrier());
    }
    ring.advance();
    ring.next_tile();
    return cursor.count();
}

/// Multiplies tiles of one product until there are no more for this block.
template <bool kIsFc1>
DEVICE void multiply_tiles(const GroupedGemmArgs& args, const Seat& seat, const Shifts& shifts, Pipeline& ring) {
    QuantCounts counts = {0, 0};
    while (true) {
        barrier_wait(ring.full_barrier(), ring.parity);
        const u32 num_rows = Work::get_rows(ring.work());
        // A vote, so that the compiler knows that no warp parts here.
        if (__all_sync(kAllLanes, num_rows == 0)) break;
        compute_tile<kIsFc1>(args, num_rows, seat, shifts, ring, counts);
        ring.next_tile();
    }
    if (seat.lane == 0) barrier_arrive(ring.empty_barrier());
    ring.advance();
    ring.next_tile();
    if (kIsFc1 && seat.is_storing()) tell_stored(args, ring, seat);
    if constexpr (kIsFc1 && QUANTISE) counts.flush(args.counts);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fc1_fc2(const __grid_constant__ GroupedGemmArgs args) {
    if (!takes_part(args)) return;
    extern __shared__ Word4 shared_memory[];
    __shared__ alignas(8) u64 barriers[2 * NUM_STAGES];
    __shared__ Word4 works[2 * kWorks + 1];
    // The swizzle counts from addresses that 1024 divides.
    Pipeline ring = {(shared_address(shared_memory) + 1023) & ~1023u, shared_address(barriers),
                     shared_address(barriers + NUM_STAGES), shared_address(works), 0, 0, 0};
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < NUM_STAGES; ++i) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, 2 * kGroupThreads / kWarp);
        }
        for (u32 storer = 0; storer < kStorers; ++storer) store_shared(ring.stored(storer), 0);
    }
    barrier_init_done();
    __syncthreads();

    const u32 warp = warp_idx();
    if (warp < kGroupThreads / kWarp) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopyRegisters));
        if (warp < kCopyWarps) {
            u32 index = blockIdx.x;
            const u32 num_fc1 = copy_tiles<true>(args, ring, index, 0);
            const u32 num_fc2 = copy_tiles<false>(args, ring, index, num_fc1);
            // Every tile that was begun asked for one: this was the last to ask.
            if (threadIdx.x == 0 && index == num_blocks_of(args) + num_fc1 + num_fc2 - 1) *args.given_out = 0;
        } else {
            gather(args);
        }
    } else if (warp >= 3 * kGroupThreads / kWarp) {
        if constexpr (kWarpgroups == 4) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kGatherRegisters));
            gather(args);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyRegisters));
        const Seat seat = Seat::mine();
        const Shifts shifts = Shifts::as_factors(args);
        multiply_tiles<true>(args, seat, shifts, ring);
        multiply_tiles<false>(args, seat, shifts, ring);
    }
}
