// What a warp of grouped_gemm_small.cu reads and when: its ring of slots, its slice of K, what its block computes, and the
// order in which slots are filled.
//
// Defined before this file: as for grouped_gemm_small.cu.
#pragma once

#include "base.cuh"
#include "experts.cuh"
#include "hopper.cuh"
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
    float inverse_input_scale;
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
                if constexpr (kIsFc1 && QUANTISE) run.inverse_input_scale = __fdiv_rn(1.0f, expert.input_scale);
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

/// Fills a ring with a warp's slices of both plans: FC2's weights follow FC1's without a gap. One lane's, for which its whole
/// warp waits: hence one state for both products, and little to do for a slot.
class Feed {
public:
    DEVICE Feed(const Plan<true>& fc1, const Plan<false>& fc2) : fc2_(fc2) { go_on(fc1); }

    /// Whether FC1 is planned to its end.
    DEVICE bool is_fc1_planned() const { return is_fc1_planned_; }

    /// Takes what was planned last, of the product that is being computed.
    template <bool kIsFc1>
    DEVICE void go_on(const Plan<kIsFc1>& plan) {
        const Slice<kIsFc1> slice = Slice<kIsFc1>::mine();
        run_ = plan.runs;
        end_ = slice.num_steps == 0 ? run_ : run_ + plan.num_runs;
        first_ = slice.first_step * kStepBytes;
        slice_bytes_ = slice.num_steps * kStepBytes;
        slot_bytes_ = Gemm<kIsFc1>::kSlotSteps * kStepBytes;
        unit_bytes_ = Gemm<kIsFc1>::kSteps * kStepBytes;
        is_fc1_planned_ = !kIsFc1 || plan.next == plan.end;
        is_in_fc2_ = !kIsFc1;
    }

    /// Fills one slot, if anything is left.
    DEVICE void fill(Ring& ring) {
        if (units_left_ == 0 && !begin_run()) return;
        if constexpr (kMostSlots == 1) {
            ring.fill(unit_, slice_bytes_);
        } else {
            ring.fill(unit_ + at_, min_of(slot_bytes_, slice_bytes_ - at_));
            at_ += slot_bytes_;
            if (at_ < slice_bytes_) return;
            at_ = 0;
        }
        unit_ += unit_bytes_;
        --units_left_;
    }

private:
    static constexpr u32 kMostSlots = Gemm<true>::kSlots > Gemm<false>::kSlots ? Gemm<true>::kSlots : Gemm<false>::kSlots;

    DEVICE bool begin_run() {
        if (run_ == end_ && is_fc1_planned_ && !is_in_fc2_) go_on(fc2_);
        if (run_ == end_) return false;
        units_left_ = run_->num_units;
        unit_ = run_->weights + first_;
        ++run_;
        return true;
    }

    const Plan<false>& fc2_;
    const Run* run_;
    const Run* end_;
    const u8* unit_ = nullptr;
    u32 units_left_ = 0;
    u32 at_ = 0;
    u32 first_;
    u32 slice_bytes_;
    u32 slot_bytes_;
    u32 unit_bytes_;
    bool is_fc1_planned_;
    bool is_in_fc2_;
};
