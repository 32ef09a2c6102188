// What a warp of grouped_gemm_ranges.cu reads and when: its share of what its block computes, and the order in which slots are
// filled.
//
// Every unit's K is cut into kSlices slices. A slice of a unit is a piece: what one warp adds up by itself, from zero. Pieces of
// a run are numbered unit by unit; each warp has a range of them.
//
// Defined before this file: as for grouped_gemm_ranges.cu.
#pragma once

#include "base.cuh"
#include "experts.cuh"
#include "hopper.cuh"
#include "small_plan.cuh"
#include "weights.cuh"

constexpr u32 kSlices = 8;
static_assert(kWarps >= kSlices && kWarps % 4 == 0, "a slice of the first rows for each warp; schedulers have equal shares");

template <bool kIsFc1>
struct Gemm : Widths<kIsFc1> {
    using Widths<kIsFc1>::kSteps;
    /// The most steps that a slice has, in how many slots they come, and the most steps of a slot.
    static constexpr u32 kSlice = (kSteps + kSlices - 1) / kSlices;
    static constexpr u32 kSlots = (kSlice + SLOT_STEPS - 1) / SLOT_STEPS;
    static constexpr u32 kSlotSteps = (kSlice + kSlots - 1) / kSlots;
    static constexpr bool kIsEven = kSteps % kSlices == 0;
    /// Of a row in shared memory. NOTE: the 16 bytes more spread what a warp reads over all banks.
    static constexpr u32 kRowBytes = kSteps * kStepK * 2 + 16;

    /// Steps before a piece of a run.
    DEVICE static u32 steps_before(u32 piece) { return kIsEven ? kSlice * piece : kSteps * piece / kSlices; }
};

/// Of rows, then of all warps' rings.
constexpr u32 kRowsBytes = BLOCK_ROWS * max_of(Gemm<true>::kRowBytes, Gemm<false>::kRowBytes);
constexpr u32 kSlotBytes = kStepBytes * max_of(Gemm<true>::kSlotSteps, Gemm<false>::kSlotSteps);
constexpr u32 kSharedBytes = kRowsBytes + kWarps * NUM_STAGES * kSlotBytes;
static_assert(kSharedBytes == SHARED_BYTES, "the host launches what this file describes");
static_assert(kSharedBytes <= 232448 - 4096, "a block's shared memory on sm_90 is 227 KB");

using Ring = SlotRing<kSlotBytes>;

/// A warp's pieces of a run: those from `first` to `end`.
struct Share {
    u32 first;
    u32 end;

    DEVICE static Share of(u32 num_units, u32 warp) {
        const u32 num_pieces = num_units * kSlices;
        if (num_pieces < kWarps) return {min_of(warp, num_pieces), min_of(warp + 1, num_pieces)};
        return {num_pieces * warp / kWarps, num_pieces * (warp + 1) / kWarps};
    }

    DEVICE bool is_empty() const { return first == end; }

    /// Its units are done from the last one down: the last one's other slices are the next warp's, for which that is then the last
    /// thing to do.
    DEVICE u32 first_unit() const { return first / kSlices; }
    DEVICE u32 last_unit() const { return (end - 1) / kSlices; }

    /// Its slices of a unit: from `low` to `high`.
    DEVICE u32 low(u32 unit) const { return first > unit * kSlices ? first - unit * kSlices : 0; }
    DEVICE u32 high(u32 unit) const { return min_of(end - unit * kSlices, kSlices); }
};

/// Fills a ring with a warp's pieces of both plans: FC2's weights follow FC1's without a gap. One lane's, for which its whole
/// warp waits: hence one state for both products, and little to do for a slot.
class Feed {
public:
    DEVICE Feed(const Plan<true>& fc1, const Plan<false>& fc2, u32 warp) : fc2_(fc2), warp_(warp) { go_on(fc1); }

    /// Whether FC1 is planned to its end.
    DEVICE bool is_fc1_planned() const { return is_fc1_planned_; }

    /// Takes what was planned last, of the product that is being computed.
    template <bool kIsFc1>
    DEVICE void go_on(const Plan<kIsFc1>& plan) {
        run_ = plan.runs;
        end_ = run_ + plan.num_runs;
        steps_ = Gemm<kIsFc1>::kSteps;
        slot_bytes_ = Gemm<kIsFc1>::kSlotSteps * kStepBytes;
        is_fc1_planned_ = !kIsFc1 || plan.next == plan.end;
        is_in_fc2_ = !kIsFc1;
    }

    /// Fills one slot, if anything is left.
    DEVICE void fill(Ring& ring) {
        while (piece_bytes_ == 0) {
            if (!begin_piece()) return;
        }
        const u32 num_bytes = min_of(slot_bytes_, piece_bytes_);
        ring.fill(from_, num_bytes);
        from_ += num_bytes;
        piece_bytes_ -= num_bytes;
    }

private:
    DEVICE bool begin_piece() {
        if (pieces_left_ == 0 && !begin_unit()) return false;
        --pieces_left_;
        remainder_ += steps_;
        piece_bytes_ = remainder_ / kSlices * kStepBytes;
        remainder_ %= kSlices;
        return true;
    }

    DEVICE bool begin_unit() {
        while (units_left_ == 0) {
            if (run_ == end_ && is_fc1_planned_ && !is_in_fc2_) go_on(fc2_);
            if (run_ == end_) return false;
            share_ = Share::of(run_->num_units, warp_);
            weights_ = run_->weights;
            units_left_ = share_.is_empty() ? 0 : share_.last_unit() + 1 - share_.first_unit();
            ++run_;
        }
        --units_left_;
        const u32 unit = share_.first_unit() + units_left_, low = share_.low(unit);
        pieces_left_ = share_.high(unit) - low;
        const u32 eighths = (unit * kSlices + low) * steps_;
        from_ = weights_ + static_cast<u64>(eighths / kSlices) * kStepBytes;
        remainder_ = eighths % kSlices;
        return true;
    }

    const Plan<false>& fc2_;
    u32 warp_;
    const Run* run_;
    const Run* end_;
    Share share_;
    const u8* weights_;
    const u8* from_ = nullptr;
    u32 units_left_ = 0;
    u32 pieces_left_ = 0;
    u32 piece_bytes_ = 0;
    /// Steps before this piece, in eighths, beyond whole ones.
    u32 remainder_ = 0;
    u32 steps_;
    u32 slot_bytes_;
    bool is_fc1_planned_;
    bool is_in_fc2_;
};
