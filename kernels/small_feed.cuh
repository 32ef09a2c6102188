// What a warp of grouped_gemm_small.cu reads and when: its slice of K, and the order in which slots are filled.
//
// Defined before this file: as for grouped_gemm_small.cu.
#pragma once

#include "base.cuh"
#include "experts.cuh"
#include "hopper.cuh"
#include "small_plan.cuh"
#include "weights.cuh"

static_assert(kWarps == 8, "warps that share K");

// A slot of 7 steps, 8 KB, keeps 3 of them in every warp's ring; with 2 slots the rate fell by 15 to 30 %.
constexpr u32 kMostSlotSteps = 7;

template <bool kIsFc1>
struct Gemm : Widths<kIsFc1> {
    using Widths<kIsFc1>::kSteps;
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
static_assert(kSharedBytes == SHARED_BYTES, "the host launches what this file describes");
static_assert(kSharedBytes <= 232448 - 8 * kWarps * NUM_STAGES - 2048, "a block's shared memory on sm_90 is 227 KB");

using Ring = SlotRing<kSlotBytes>;

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
