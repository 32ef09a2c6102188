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
static_assert(kSharedBytes <= 232448 - 8 * kWarps * NUM_STAGES - 2048, "a block's shared memory on sm_90 is 227 KB");

/// A warp's slots, filled and read in turn.
struct Ring {
    u32 slots;
    u32 barriers;
    u32 fill_slot;
    u32 read_slot;
    u32 read_parity;
    u64 policy;

    /// One lane calls it.
    DEVICE void fill(const u8* from, u32 num_bytes) {
        barrier_expect(barriers + 8 * fill_slot, num_bytes);
        bulk_load(slots + fill_slot * kSlotBytes, from, num_bytes, barriers + 8 * fill_slot, policy);
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

/// Units of a range that read the same rows.
struct Run {
    /// The first unit's.
    const u8* weights;
    u32 first_unit;
    u32 num_units;
    u32 first_row;
    u32 num_rows;
    /// What multiplies gate's and up's sums, or down's.
    float scales[2];
    float input_scale;
};

/// A block has few runs: about two, and one more for each expert that fits its share of units whole.
constexpr u32 kMaxRuns = 16;

/// What a block computes: units `next` to `end` in the order expert > row block > unit, of which `runs` are planned.
/// In shared memory, so that no warp looks for its runs while weights could be on their way.
template <bool kIsFc1>
struct Plan {
    Run runs[kMaxRuns];
    u32 num_runs;
    u32 next;
    u32 end;

    /// Plans this block's share. All lanes of one warp call it.
    DEVICE void start(const GroupedGemmArgs& args) {
        const u64 num_units = TileCursor<1, BLOCK_ROWS>(args).count() * static_cast<u64>(Gemm<kIsFc1>::kUnits);
        if (threadIdx.x % kWarp == 0) {
            next = static_cast<u32>(num_units * blockIdx.x / gridDim.x);
            end = static_cast<u32>(num_units * (blockIdx.x + 1) / gridDim.x);
        }
        __syncwarp();
        go_on(args);
    }

    /// Plans what comes next, as far as there is room. All lanes of one warp call it.
    DEVICE void go_on(const GroupedGemmArgs& args) {
        using G = Gemm<kIsFc1>;
        TileCursor<G::kUnits, BLOCK_ROWS> cursor(args);
        Place place;
        u32 index = next, count = 0;
        const u32 last = end;
        for (; count < kMaxRuns && index < last && cursor.find(index, place); ++count) {
            const Expert& expert = args.experts[place.expert];
            const u32 row_in_expert = place.index / G::kUnits * BLOCK_ROWS, unit = place.index % G::kUnits;
            const u32 num_units = min_of(G::kUnits - unit, last - index);
            if (threadIdx.x % kWarp == 0) {
                Run& run = runs[count];
                run.weights = (kIsFc1 ? expert.fc1 : expert.fc2) + static_cast<u64>(unit) * (G::kSteps * kStepBytes);
                run.first_unit = unit;
                run.num_units = num_units;
                run.first_row = place.first_row + row_in_expert;
                run.num_rows = min_of<u32>(BLOCK_ROWS, place.num_rows - row_in_expert);
                run.input_scale = expert.input_scale;
                if constexpr (kIsFc1) {
                    run.scales[0] = args.token_scale * expert.gate_scale;
                    run.scales[1] = args.token_scale * expert.up_scale;
                } else {
                    run.scales[0] = QUANTISE ? expert.down_scale * expert.input_scale : expert.down_scale;
                }
            }
            index += num_units;
        }
        __syncwarp();
        if (threadIdx.x % kWarp == 0) {
            num_runs = count;
            next = index;
        }
    }
};

/// Fills a ring with a warp's slices of a plan. One lane's.
template <bool kIsFc1>
class Feed {
    using G = Gemm<kIsFc1>;

public:
    DEVICE explicit Feed(const Plan<kIsFc1>& plan)
        : run_(plan.runs), end_(plan.runs + plan.num_runs), slice_(Slice<kIsFc1>::mine()) {}

    /// Fills one slot; false when nothing is left.
    DEVICE bool fill(Ring& ring) {
        if (slice_.num_steps == 0) return false;
        if (units_left_ == 0) {
            if (run_ == end_) return false;
            units_left_ = run_->num_units;
            unit_ = run_->weights + slice_.first_step * kStepBytes;
            ++run_;
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
    const Run* run_;
    const Run* end_;
    Slice<kIsFc1> slice_;
    const u8* unit_ = nullptr;
    u32 units_left_ = 0;
    u32 step_ = 0;
};

/// The rows that a lane reads of a run: where they lie among the tokens, or in FC2's input.
template <bool kIsFc1>
struct Sources {
    u32 row[kRowTiles];

    DEVICE void find(const GroupedGemmArgs& args, const Run& run) {
        const u32 g = threadIdx.x % kWarp / 4;
#pragma unroll
        for (u32 n = 0; n < kRowTiles; ++n) {
            // Beyond the rows the last one again: its sums are not stored.
            row[n] = run.first_row + min_of(n * 8 + g, run.num_rows - 1);
            if constexpr (kIsFc1) row[n] = args.row_token[row[n]];
        }
    }
};

/// A warp's slice of a run's rows, as B fragments: `[step][MMA][row tile][2]`.
template <bool kIsFc1>
struct Rows {
    using G = Gemm<kIsFc1>;
    u32 b[G::kSlice][4][kRowTiles][2];

    DEVICE void load(const GroupedGemmArgs& args, const Sources<kIsFc1>& sources, const Slice<kIsFc1>& slice) {
        const u32 t = threadIdx.x % 4;
#pragma unroll
        for (u32 n = 0; n < kRowTiles; ++n) {
            const u8* values =
                (kIsFc1 ? args.tokens : args.inner) + static_cast<u64>(sources.row[n]) * (G::kWidth * 2);
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
DEVICE void store_fc1(const GroupedGemmArgs& args, const Run& run, u32 unit, u32 sums, QuantCounts& counts) {
    const u32 lane = threadIdx.x % kWarp, t = threadIdx.x / kWarp % 4;
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
        const u32 row = n * 8 + 2 * t + lane % 2;
        float halves[2];
        add_slices(sums, n, halves);
        float value = activate(halves[0] * run.scales[0], halves[1] * run.scales[1]);
        if constexpr (QUANTISE) {
            // The lanes of a row hold a block. As integers magnitudes order like their bits, and NaN wins.
            u32 amax = nvfp4::magnitude_bits(value);
#pragma unroll
            for (u32 distance = 2; distance < kWarp; distance *= 2) {
                amax = max(amax, __shfl_xor_sync(kAllLanes, amax, distance));
            }
            const BlockScale scale = block_scale(amax, __fdiv_rn(1.0f, run.input_scale));
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
DEVICE void store_fc2(const GroupedGemmArgs& args, const Run& run, u32 unit, u32 sums) {
    const u32 lane = threadIdx.x % kWarp, t = threadIdx.x / kWarp % 4;
    const u32 column = unit * kUnitRows + 2 * (lane / 2);
#pragma unroll
    for (u32 n = 0; n < kRowTiles; ++n) {
        const u32 row = n * 8 + 2 * t + lane % 2;
        float v[2];
        add_slices(sums, n, v);
        v[0] *= run.scales[0];
        v[1] *= run.scales[0];
        // HIDDEN may end in the middle of the last unit, never inside four columns.
        if (row < run.num_rows && column < HIDDEN) {
            store_columns(args.out + (static_cast<u64>(run.first_row + row) * HIDDEN + column) * (OUTPUT_BITS / 8), v);
        }
    }
}

/// Both feeds: FC2's weights follow FC1's without a gap. One lane's.
struct Feeds {
    Feed<true> fc1;
    Feed<false> fc2;
    bool is_fc2_planned;

    DEVICE void fill(Ring& ring) {
        if (!fc1.fill(ring) && is_fc2_planned) fc2.fill(ring);
    }
};

/// Computes what is planned. `turn` says which half of the warps reduces and which half of the sums is written.
template <bool kIsFc1>
DEVICE void compute(const GroupedGemmArgs& args, const Plan<kIsFc1>& plan, Ring& ring, Feeds& feeds, u32 sums,
                    u32& turn, QuantCounts& counts) {
    using G = Gemm<kIsFc1>;
    const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const Slice<kIsFc1> slice = Slice<kIsFc1>::mine();
    const u32 num_runs = plan.num_runs;
    Sources<kIsFc1> sources;
    Rows<kIsFc1> rows;
    if (num_runs > 0) sources.find(args, plan.runs[0]);
    for (u32 r = 0; r < num_runs; ++r) {
        const Run& run = plan.runs[r];
        rows.load(args, sources, slice);
        // The next rows' places are found while this run is computed.
        if (r + 1 < num_runs) sources.find(args, plan.runs[r + 1]);
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
                if (lane == 0) feeds.fill(ring);
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
            if (warp / 4 == turn) {
                if constexpr (kIsFc1) {
                    store_fc1(args, run, run.first_unit + i, unit_sums, counts);
                } else {
                    store_fc2(args, run, run.first_unit + i, unit_sums);
                }
            }
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
    // NOTE: bulk copies to addresses that 128 does not divide are slower.
    alignas(128) extern __shared__ Word4 shared_memory[];
    __shared__ alignas(8) u64 barriers[kWarps * NUM_STAGES];
    __shared__ Plan<true> fc1;
    __shared__ Plan<false> fc2;
    const u32 shared = shared_address(shared_memory), warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

    // Plan both products at once, and set up the ring
    Ring ring = {shared + warp * NUM_STAGES * kSlotBytes, shared_address(barriers) + warp * NUM_STAGES * 8, 0, 0, 0,
                 evict_first()};
    if (lane == 0) {
        for (u32 i = 0; i < NUM_STAGES; ++i) barrier_init(ring.barriers + 8 * i, 1);
    }
    barrier_init_done();
    if (warp == 0) fc1.start(args);
    if (warp == 1) fc2.start(args);
    __syncthreads();

    // FC1, which rarely takes more than one plan
    QuantCounts counts = {0, 0};
    u32 turn = 0;
    const u32 sums = shared + kSumsAt;
    Feeds feeds = {Feed<true>(fc1), Feed<false>(fc2), fc1.next == fc1.end};
    while (true) {
        if (lane == 0) {
            for (u32 i = 0; i < NUM_STAGES; ++i) feeds.fill(ring);
        }
        __syncwarp();
        compute<true>(args, fc1, ring, feeds, sums, turn, counts);
        if (feeds.is_fc2_planned) break;
        __syncthreads();
        if (warp == 0) fc1.go_on(args);
        __syncthreads();
        feeds.fc1 = Feed<true>(fc1);
        feeds.is_fc2_planned = fc1.next == fc1.end;
    }
    if (QUANTISE) counts.flush(args.counts);
    grid_barrier(args.barrier);

    // FC2, whose first weights are here or on their way
    compute<false>(args, fc2, ring, feeds, sums, turn, counts);
    while (fc2.next != fc2.end) {
        __syncthreads();
        if (warp == 0) fc2.go_on(args);
        __syncthreads();
        feeds.fc2 = Feed<false>(fc2);
        if (lane == 0) {
            for (u32 i = 0; i < NUM_STAGES; ++i) feeds.fill(ring);
        }
        __syncwarp();
        compute<false>(args, fc2, ring, feeds, sums, turn, counts);
    }
}
