// The grouped GEMM of `lockstep.wgmma.grouped_gemm.{nvfp4,w4a16_nvfp4}` for few rows an expert, sm_90a: what matters is
// that weights stream at the full rate of memory.
//
// One launch, `fc1_fc2`, for both products, with a barrier of all blocks between them: the first weights of FC2 are on
// their way while it is waited for. One block of kThreads threads a multiprocessor, launched cooperatively; more rows an
// expert than BLOCK_ROWS are right, but read weights again. Dynamic shared memory: kSharedBytes.
//
// Every unit of 32 weight rows is shared by 8 warps, each with a slice of K whose activations stay in its registers. A
// warp's slices come into a ring of its own: no warp waits for another one's copies.
//
// Defined before this file:
//   HIDDEN, INTERMEDIATE   widths, multiples of 16
//   QUANTISE, OUTPUT_BITS  as in grouped_gemm_mma.cu
//   BLOCK_ROWS             8 or 16. It changes no bits: slices of K are added in ascending order
//   NUM_STAGES             slots of a warp's ring
//   NUM_THREADS, SHARED_BYTES   what the host launches with, compared with this file's own
//   ACTIVATION, ...        see activation.cuh

#include "activation.cuh"
#include "base.cuh"
#include "experts.cuh"
#include "hopper.cuh"
#include "requantise.cuh"
#include "store.cuh"
#include "weights.cuh"

static_assert(HIDDEN % 16 == 0 && INTERMEDIATE % 16 == 0, "NVFP4 blocks divide both widths");
static_assert(BLOCK_ROWS == 8 || BLOCK_ROWS == 16, "rows of one or two MMAs");

constexpr u32 kWarps = 8;
constexpr u32 kThreads = kWarps * kWarp;
constexpr u32 kRowTiles = BLOCK_ROWS / 8;

// A slot of 7 steps, 8 KB, keeps 3 of them in every warp's ring; with 2 slots the rate fell by 15 to 30 %.
constexpr u32 kMostSlotSteps = 7;

template <bool kIsFc1>
struct Gemm {
    static constexpr u32 kWidth = kIsFc1 ? HIDDEN : INTERMEDIATE;
    static constexpr u32 kSteps = (kWidth + kStepK - 1) / kStepK;
    static constexpr u32 kUnits = kIsFc1 ? INTERMEDIATE / 16 : (HIDDEN + kUnitRows - 1) / kUnitRows;
    /// The most steps that a warp's slice has, in how many slots they come, and the most steps of a slot.
    static constexpr u32 kSlice = (kSteps + kWarps - 1) / kWarps;
    static constexpr u32 kSlots = (kSlice + kMostSlotSteps - 1) / kMostSlotSteps;
    static constexpr u32 kSlotSteps = (kSlice + kSlots - 1) / kSlots;
    static constexpr bool kIsEven = kSteps % kWarps == 0;
};

static_assert(Gemm<true>::kSlice * kRowTiles <= 16 && Gemm<false>::kSlice * kRowTiles <= 16,
              "a slice's activations fit registers");

constexpr u32 kSlotBytes =
    kStepBytes * (Gemm<true>::kSlotSteps > Gemm<false>::kSlotSteps ? Gemm<true>::kSlotSteps : Gemm<false>::kSlotSteps);
constexpr u32 kSumsAt = kWarps * NUM_STAGES * kSlotBytes;
/// Sums of a unit by all warps: [warp][tile][row tile][register][lane].
constexpr u32 kSumsBytes = kWarps * 8 * kRowTiles * kWarp * 4;
constexpr u32 kSharedBytes = kSumsAt + 2 * kSumsBytes;
static_assert(kSharedBytes == SHARED_BYTES && kThreads == NUM_THREADS, "the host launches what this file describes");
static_assert(kSharedBytes <= 232448 - 8 * kWarps * NUM_STAGES, "a block's shared memory on sm_90 is 227 KB");

/// A warp's slots, filled and read in turn.
struct Ring {
    u32 slots;
    u32 barriers;
    u32 fill_slot;
    u32 read_slot;
    u32 read_parity;

    DEVICE void fill(const u8* from, u32 num_bytes) {
        if (threadIdx.x % kWarp == 0) {
            barrier_expect(barriers + 8 * fill_slot, num_bytes);
            bulk_load(slots + fill_slot * kSlotBytes, from, num_bytes, barriers + 8 * fill_slot);
        }
        if (++fill_slot == NUM_STAGES) fill_slot = 0;
    }

    DEVICE u32 wait() const {
        barrier_wait(barriers + 8 * read_slot, read_parity);
        return slots + read_slot * kSlotBytes;
    }

    DEVICE void release() {
        __syncwarp();
        if (++read_slot == NUM_STAGES) {
            read_slot = 0;
            read_parity ^= 1;
        }
    }
};

/// A warp's slice of K.
template <bool kIsFc1>
struct Slice {
    u32 first_step;
    u32 num_steps;

    DEVICE static Slice mine() {
        constexpr u32 kSteps = Gemm<kIsFc1>::kSteps;
        const u32 warp = threadIdx.x / kWarp;
        const u32 first = kSteps * warp / kWarps;
        return {first, kSteps * (warp + 1) / kWarps - first};
    }

    DEVICE bool holds(u32 step) const { return Gemm<kIsFc1>::kIsEven || step < num_steps; }
};

/// The units from `index` to `end`, in the order expert > row block > unit: this block's share of all.
struct Range {
    u32 index;
    u32 end;

    DEVICE static Range of_block(u32 num_units) {
        const u64 all = num_units;
        return {static_cast<u32>(all * blockIdx.x / gridDim.x), static_cast<u32>(all * (blockIdx.x + 1) / gridDim.x)};
    }
};

/// The next units of a range that read the same rows.
template <bool kIsFc1>
struct Run {
    u32 expert;
    u32 first_unit;
    u32 num_units;
    u32 first_row;
    u32 num_rows;
};

template <bool kIsFc1>
class Runs {
public:
    DEVICE Runs(const GroupedGemmArgs& args, Range range) : cursor_(args), range_(range) {}

    /// All lanes call it.
    DEVICE bool next(Run<kIsFc1>& run) {
        constexpr u32 kUnits = Gemm<kIsFc1>::kUnits;
        Place place;
        if (range_.index >= range_.end || !cursor_.find(range_.index, place)) return false;
        const u32 row_in_expert = place.index / kUnits * BLOCK_ROWS;
        run.expert = place.expert;
        run.first_unit = place.index % kUnits;
        run.num_units = min_of(kUnits - run.first_unit, range_.end - range_.index);
        run.first_row = place.first_row + row_in_expert;
        run.num_rows = min_of<u32>(BLOCK_ROWS, place.num_rows - row_in_expert);
        range_.index += run.num_units;
        return true;
    }

private:
    TileCursor<Gemm<kIsFc1>::kUnits, BLOCK_ROWS> cursor_;
    Range range_;
};

/// Fills a ring with a warp's slices of a range.
template <bool kIsFc1>
class Feed {
    using G = Gemm<kIsFc1>;

public:
    DEVICE Feed(const GroupedGemmArgs& args, Range range)
        : args_(args), runs_(args, range), slice_(Slice<kIsFc1>::mine()) {}

    /// Fills one slot; false when nothing is left. All lanes call it.
    DEVICE bool fill(Ring& ring) {
        if (slice_.num_steps == 0) return false;
        if (units_left_ == 0) {
            Run<kIsFc1> run;
            if (!runs_.next(run)) return false;
            const Expert& expert = args_.experts[run.expert];
            units_left_ = run.num_units;
            unit_ = (kIsFc1 ? expert.fc1 : expert.fc2) +
                    (static_cast<u64>(run.first_unit) * G::kSteps + slice_.first_step) * kStepBytes;
        }
        ring.fill(unit_ + step_ * kStepBytes, min_of(G::kSlotSteps, slice_.num_steps - step_) * kStepBytes);
        step_ += G::kSlotSteps;
        if (step_ >= slice_.num_steps) {
            step_ = 0;
            unit_ += G::kSteps * kStepBytes;
            --units_left_;
        }
        return true;
    }

private:
    const GroupedGemmArgs& args_;
    Runs<kIsFc1> runs_;
    Slice<kIsFc1> slice_;
    const u8* unit_ = nullptr;
    u32 units_left_ = 0;
    u32 step_ = 0;
};

/// A warp's slice of a run's rows, as B fragments: `[step][MMA][row tile][2]`.
template <bool kIsFc1>
struct Rows {
    using G = Gemm<kIsFc1>;
    u32 b[G::kSlice][4][kRowTiles][2];

    DEVICE void load(const GroupedGemmArgs& args, const Run<kIsFc1>& run, const Slice<kIsFc1>& slice) {
        const u32 lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
        for (u32 n = 0; n < kRowTiles; ++n) {
            // Beyond the rows the last one again: its sums are not stored.
            const u32 row = run.first_row + min_of(n * 8 + g, run.num_rows - 1);
            const u64 from = kIsFc1 ? args.row_token[row] : row;
            const u8* values = (kIsFc1 ? args.tokens : args.inner) + from * (G::kWidth * 2);
#pragma unroll
            for (u32 step = 0; step < G::kSlice; ++step) {
                const u32 k = (slice.first_step + step) * kStepK + 16 * t;
                Word4 low = {{0, 0, 0, 0}}, high = {{0, 0, 0, 0}};
                if (slice.holds(step) && k < G::kWidth) {
                    low = load_global4_cg(values + k * 2);
                    high = load_global4_cg(values + k * 2 + 16);
                }
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    b[step][i / 2][n][i % 2] = low.v[i];
                    b[step][2 + i / 2][n][i % 2] = high.v[i];
                }
            }
        }
    }
};

/// Multiplies one step: its weights in shared memory, its rows in registers.
DEVICE void multiply_step(u32 weights, const u32 (&b)[4][kRowTiles][2], float (&acc)[2][kRowTiles][4]) {
    const u32 lane = threadIdx.x % kWarp;
    const Word4 words[2] = {load_shared4(weights + lane * 16), load_shared4(weights + kTileBytes + lane * 16)};
    const u32 scales = load_shared(weights + kScalesAt + lane * 4);
    const u32 s[2][2] = {{scale_pair<0>(scales), scale_pair<1>(scales)}, {scale_pair<2>(scales), scale_pair<3>(scales)}};
#pragma unroll
    for (u32 q = 0; q < 4; q += 2) {
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            u32 a[2][4];
            decode16(words[j].v[q], words[j].v[q + 1], s[j][0], s[j][1], a[0], a[1]);
#pragma unroll
            for (u32 n = 0; n < kRowTiles; ++n) {
                mma_m16n8k16(acc[j][n], a[0], b[q][n][0], b[q][n][1]);
                mma_m16n8k16(acc[j][n], a[1], b[q + 1][n][0], b[q + 1][n][1]);
            }
        }
    }
}

/// Where a lane's sum lies among a warp's. NOTE: the rotation spreads what a reducing warp reads over all banks.
DEVICE u32 sum_at(u32 j, u32 n, u32 c, u32 lane) {
    return (((j * kRowTiles + n) * 4 + c) * kWarp + (lane + c % 2 + 2 * j) % kWarp) * 4;
}

/// Adds all warps' sums of a unit, in the order of K. A warp reduces rows 2 t + {0, 1} of each row tile; its lane
/// 4 g + 2 j + c has columns (j, g) of row c: both halves' sums of all 8 warps.
DEVICE void add_slices(u32 sums, u32 n, float (&halves)[2]) {
    const u32 lane = threadIdx.x % kWarp, t = threadIdx.x / kWarp % 4, g = lane / 4, j = lane / 2 % 2, c = lane % 2;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        float sum = 0.0f;
#pragma unroll
        for (u32 warp = 0; warp < kWarps; ++warp) {
            sum += as_float(load_shared(sums + warp * (kSumsBytes / kWarps) + sum_at(j, n, 2 * half + c, 4 * g + t)));
        }
        halves[half] = sum * kDecodeFactor;
    }
}

/// Stores a unit of FC1: one column of one row a lane, 16 unit + 2 g + j.
DEVICE void store_unit(const GroupedGemmArgs& args, const Run<true>& run, u32 unit, u32 sums, QuantCounts& counts) {
    const u32 lane = threadIdx.x % kWarp, t = threadIdx.x / kWarp % 4;
    const Expert& expert = args.experts[run.expert];
    const float gate_scale = args.token_scale * expert.gate_scale, up_scale = args.token_scale * expert.up_scale;
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
        const u32 row = n * 8 + 2 * t + lane % 2;
        float halves[2];
        add_slices(sums, n, halves);
        float value = activate(halves[0] * gate_scale, halves[1] * up_scale);
        if constexpr (QUANTISE) {
            // The lanes of a row hold a block. As integers magnitudes order like their bits, and NaN wins.
            u32 amax = nvfp4::magnitude_bits(value);
#pragma unroll
            for (u32 distance = 2; distance < kWarp; distance *= 2) {
                amax = max(amax, __shfl_xor_sync(kAllLanes, amax, distance));
            }
            const BlockScale scale = block_scale(amax, __fdiv_rn(1.0f, expert.input_scale));
            if (lane < 2 && row < run.num_rows) counts.add(scale);
            value = requantise(value, scale);
        }
        const float odd = __shfl_xor_sync(kAllLanes, value, 2);
        if (lane / 2 % 2 == 0 && row < run.num_rows) {
            const u64 at = static_cast<u64>(run.first_row + row) * INTERMEDIATE + unit * 16 + 2 * (lane / 4);
            *reinterpret_cast<u32*>(args.inner + at * 2) = pack_bf16(value, odd);
        }
    }
}

/// Stores a unit of FC2: two columns of one row a lane, 32 unit + 4 g + 2 j + {0, 1}.
DEVICE void store_unit(const GroupedGemmArgs& args, const Run<false>& run, u32 unit, u32 sums, QuantCounts&) {
    const u32 lane = threadIdx.x % kWarp, t = threadIdx.x / kWarp % 4;
    const Expert& expert = args.experts[run.expert];
    const float scale = QUANTISE ? expert.down_scale * expert.input_scale : expert.down_scale;
    const u32 column = unit * kUnitRows + 2 * (lane / 2);
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
        const u32 row = n * 8 + 2 * t + lane % 2;
        float v[2];
        add_slices(sums, n, v);
        v[0] *= scale;
        v[1] *= scale;
        // HIDDEN may end in the middle of the last unit, never inside four columns.
        if (row < run.num_rows && column < HIDDEN) {
            store_columns(args.out + (static_cast<u64>(run.first_row + row) * HIDDEN + column) * (OUTPUT_BITS / 8), v);
        }
    }
}

/// Both feeds: FC2's weights follow FC1's without a gap.
struct Feeds {
    Feed<true> fc1;
    Feed<false> fc2;

    DEVICE void fill(Ring& ring) {
        if (!fc1.fill(ring)) fc2.fill(ring);
    }
};

/// Computes a range of units. `turn` says which half of the warps reduces and which half of the sums is written.
template <bool kIsFc1>
DEVICE void compute(const GroupedGemmArgs& args, Range range, Ring& ring, Feeds& feeds, u32 sums, u32& turn,
                    QuantCounts& counts) {
    using G = Gemm<kIsFc1>;
    const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const Slice<kIsFc1> slice = Slice<kIsFc1>::mine();
    Runs<kIsFc1> runs(args, range);
    Run<kIsFc1> run;
    Rows<kIsFc1> rows;
    while (runs.next(run)) {
        rows.load(args, run, slice);
#pragma unroll 1
        for (u32 i = 0; i < run.num_units; ++i) {
            // Multiply this warp's slice
            float acc[2][kRowTiles][4] = {};
#pragma unroll
            for (u32 slot = 0; slot < G::kSlots; ++slot) {
                if (!slice.holds(slot * G::kSlotSteps)) continue;
                const u32 weights = ring.wait();
#pragma unroll
                for (u32 s = 0; s < G::kSlotSteps; ++s) {
                    const u32 step = slot * G::kSlotSteps + s;
                    if (step < G::kSlice && slice.holds(step)) {
                        multiply_step(weights + s * kStepBytes, rows.b[step < G::kSlice ? step : 0], acc);
                    }
                }
                ring.release();
                feeds.fill(ring);
            }

            // Hand its sums over; half of the warps add them up while the others go on
            const u32 unit_sums = sums + turn * kSumsBytes;
#pragma unroll
            for (u32 j = 0; j < 2; ++j) {
#pragma unroll
                for (u32 n = 0; n < kRowTiles; ++n) {
#pragma unroll
                    for (u32 c = 0; c < 4; ++c) {
                        store_shared(unit_sums + warp * (kSumsBytes / kWarps) + sum_at(j, n, c, lane),
                                     as_bits(acc[j][n][c]));
                    }
                }
            }
            __syncthreads();
            if (warp / 4 == turn) store_unit(args, run, run.first_unit + i, unit_sums, counts);
            if (!kIsFc1 && run.first_unit + i == 0 && threadIdx.x == 0) count_rows(args, run.num_rows);
            turn ^= 1;
        }
    }
}

/// Waits until all blocks of the grid have come here. `barrier` `[2]`: arrivals, and a number that each crossing raises.
DEVICE void grid_barrier(u32* barrier) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 crossing, now;
        asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(crossing) : "l"(barrier + 1) : "memory");
        __threadfence();
        if (atomicAdd(barrier, 1) == gridDim.x - 1) {
            barrier[0] = 0;
            asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(barrier + 1), "r"(crossing + 1) : "memory");
        } else {
            do {
                asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(barrier + 1) : "memory");
            } while (now == crossing);
        }
        __threadfence();
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fc1_fc2(const __grid_constant__ GroupedGemmArgs args) {
    extern __shared__ Word4 shared_memory[];
    __shared__ alignas(8) u64 barriers[kWarps * NUM_STAGES];
    const u32 shared = shared_address(shared_memory), warp = threadIdx.x / kWarp;

    // Start the ring
    Ring ring = {shared + warp * NUM_STAGES * kSlotBytes, shared_address(barriers) + warp * NUM_STAGES * 8, 0, 0, 0};
    if (threadIdx.x % kWarp == 0) {
        for (u32 i = 0; i < NUM_STAGES; ++i) barrier_init(ring.barriers + 8 * i, 1);
    }
    barrier_init_done();
    __syncwarp();
    const u32 row_blocks = TileCursor<1, BLOCK_ROWS>(args).count();
    const Range fc1 = Range::of_block(row_blocks * Gemm<true>::kUnits);
    const Range fc2 = Range::of_block(row_blocks * Gemm<false>::kUnits);
    Feeds feeds = {Feed<true>(args, fc1), Feed<false>(args, fc2)};
    for (u32 i = 0; i < NUM_STAGES; ++i) feeds.fill(ring);

    // FC1, FC2
    QuantCounts counts = {0, 0};
    u32 turn = 0;
    compute<true>(args, fc1, ring, feeds, shared + kSumsAt, turn, counts);
    if (QUANTISE) counts.flush(args.counts);
    grid_barrier(args.barrier);
    compute<false>(args, fc2, ring, feeds, shared + kSumsAt, turn, counts);
}
