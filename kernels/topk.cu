// Router logits to experts and weights, as src/routing chooses them: scores rounded to f32 once, ties to the lower expert,
// slots by descending weight. A warp takes a token.
//
// Any number of blocks of a multiple of 32 threads; warps take tokens by their number, in strides of all warps.
//
// Defined before this file:
//   ARGUMENTS_BYTES         the size of the host's `TopkArgs`
//   NUM_EXPERTS, NUM_TOPK   at most 32 slots
//   SCORE                   0 softmax of all, 1 the logit, 2 sigmoid, 3 sqrt(softplus)
//   WEIGHT                  0 the score, 1 softmax over the chosen logits, 2 score / (sum + epsilon) * scaling,
//                           3 sigmoid of the logit
//   EPSILON_BITS, SCALING_BITS   f32, of WEIGHT 2
//   NUM_GROUPS, TOPK_GROUP  groups of experts, and how many of them are kept; equal: no limit

#include "base.cuh"

static_assert(NUM_TOPK >= 1 && NUM_TOPK <= 32 && NUM_TOPK <= NUM_EXPERTS, "a lane holds a slot");
static_assert(NUM_EXPERTS % NUM_GROUPS == 0 && TOPK_GROUP <= NUM_GROUPS, "groups are of one size");

/// The kernel's argument; mirrored by `TopkArgs` in src/jit/kernels/topk.rs.
struct TopkArgs {
    /// `[num_tokens, NUM_EXPERTS]`
    const float* logits;
    /// `[NUM_EXPERTS]` what takes part in the choice; null: nothing.
    const float* bias;
    /// `[num_tokens, NUM_TOPK]` experts.
    int* idx;
    /// `[num_tokens, NUM_TOPK]`
    float* weights;
    /// How many tokens there are, where only the device knows; else null.
    const u32* live_tokens;
    /// Tokens, or the most that there may be.
    u64 num_tokens;
};

static_assert(sizeof(TopkArgs) == ARGUMENTS_BYTES, "TopkArgs is the host's");

constexpr u32 kPerLane = (NUM_EXPERTS + kWarp - 1) / kWarp;
constexpr u32 kGroupSize = NUM_EXPERTS / NUM_GROUPS;
constexpr float kMax = 3.402823466e38f;

DEVICE float infinity() { return as_float(0x7f800000u); }

/// An integer that orders like the value: NaN below all, then minus infinity; the zeros are equal.
DEVICE u32 order(float value) {
    if (value != value) return 0;
    const u32 bits = as_bits(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// Orders like (value, descending index).
DEVICE u64 key(float value, u32 index) { return static_cast<u64>(order(value)) << 32 | static_cast<u32>(~index); }

DEVICE u64 warp_max(u64 value) {
#pragma unroll
    for (u32 distance = 1; distance < kWarp; distance *= 2) {
        const u64 other = __shfl_xor_sync(kAllLanes, value, distance);
        value = other > value ? other : value;
    }
    return value;
}

DEVICE double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

/// A lane's experts: lane + 32 j.
struct Scores {
    float logit[kPerLane];
    float score[kPerLane];
    u64 key[kPerLane];
};

/// Reads a row and scores it; false where no logit is above minus infinity. Sums are f64 and the score is rounded once.
DEVICE bool score_row(const float* logits, const float* bias, Scores& row) {
    const u32 lane = threadIdx.x % kWarp;
    float most = -infinity();
#pragma unroll
    for (u32 j = 0; j < kPerLane; ++j) {
        const u32 expert = lane + kWarp * j;
        const float logit = expert < NUM_EXPERTS ? logits[expert] : -infinity();
        row.logit[j] = logit == infinity() ? kMax : logit;
        most = fmaxf(most, row.logit[j]);
    }
#pragma unroll
    for (u32 distance = 1; distance < kWarp; distance *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, distance));
    if (most == -infinity()) return false;

    double sum = 0.0;
    if (SCORE == 0) {
#pragma unroll
        for (u32 j = 0; j < kPerLane; ++j) {
            const double e = exp(static_cast<double>(row.logit[j]) - most);
            if (e == e) sum += e;
        }
#pragma unroll
        for (u32 distance = 1; distance < kWarp; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
#pragma unroll
    for (u32 j = 0; j < kPerLane; ++j) {
        const u32 expert = lane + kWarp * j;
        const double x = row.logit[j];
        double score = x;
        if (SCORE == 0) score = exp(x - most) / sum;
        if (SCORE == 2) score = sigmoid(x);
        if (SCORE == 3) score = sqrt(fmax(x, 0.0) + log1p(exp(-fabs(x))));
        if (row.logit[j] != row.logit[j]) score = x;
        row.score[j] = static_cast<float>(score);
        const bool is_biased = bias != nullptr && expert < NUM_EXPERTS;
        const float chosen_by = is_biased ? __fadd_rn(row.score[j], bias[expert]) : row.score[j];
        row.key[j] = expert < NUM_EXPERTS ? key(chosen_by, expert) : 0;
    }
    return true;
}

/// The value that a key was made of; NaN as minus infinity.
DEVICE float value_of(u64 key) {
    const u32 order = static_cast<u32>(key >> 32);
    if (order == 0) return -infinity();
    return as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

/// Experts outside the best groups become minus infinity. A group scores the sum of its two best; NaN counts for nothing.
DEVICE void mask_groups(Scores& row) {
    const u32 lane = threadIdx.x % kWarp;
    u64 group_key[NUM_GROUPS];
#pragma unroll
    for (u32 group = 0; group < NUM_GROUPS; ++group) {
        float best = -infinity(), second = -infinity();
        const auto offer = [&](float value) {
            second = value > best ? best : fmaxf(second, value);
            best = fmaxf(best, value);
        };
#pragma unroll
        for (u32 j = 0; j < kPerLane; ++j) {
            if ((lane + kWarp * j) / kGroupSize == group) offer(value_of(row.key[j]));
        }
#pragma unroll
        for (u32 distance = 1; distance < kWarp; distance *= 2) {
            const float other_best = __shfl_xor_sync(kAllLanes, best, distance);
            const float other_second = __shfl_xor_sync(kAllLanes, second, distance);
            second = fmaxf(fminf(best, other_best), fmaxf(second, other_second));
            best = fmaxf(best, other_best);
        }
        group_key[group] = key(kGroupSize == 1 ? best : __fadd_rn(best, second), group);
    }
#pragma unroll
    for (u32 group = 0; group < NUM_GROUPS; ++group) {
        u32 num_better = 0;
#pragma unroll
        for (u32 other = 0; other < NUM_GROUPS; ++other) num_better += group_key[other] > group_key[group];
        if (num_better < TOPK_GROUP) continue;
        const u64 masked = static_cast<u64>(order(-infinity())) << 32;
#pragma unroll
        for (u32 j = 0; j < kPerLane; ++j) {
            const u32 expert = lane + kWarp * j;
            const u64 lowered = masked | static_cast<u32>(~expert);
            if (expert < NUM_EXPERTS && expert / kGroupSize == group && row.key[j] > lowered) row.key[j] = lowered;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) select_topk(const __grid_constant__ TopkArgs args) {
    const u32 lane = threadIdx.x % kWarp;
    // 32 bits, which all tokens fit that have logits in a GPU's memory: there is no register left for more.
    const u32 num_warps = gridDim.x * (blockDim.x / kWarp);
    const u32 num_tokens = static_cast<u32>(number_of(args.live_tokens, args.num_tokens));
    for (u32 token = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp; token < num_tokens; token += num_warps) {
        Scores row;
        const bool has_any = score_row(args.logits + static_cast<u64>(token) * NUM_EXPERTS, args.bias, row);
        if (TOPK_GROUP < NUM_GROUPS && has_any) mask_groups(row);

        // The best, one by one; lane i keeps the i-th
        u32 expert = 0;
        float score = 0.0f, logit = 0.0f;
        for (u32 slot = 0; slot < NUM_TOPK; ++slot) {
            u64 mine = 0;
            float my_score = 0.0f, my_logit = 0.0f;
#pragma unroll
            for (u32 j = 0; j < kPerLane; ++j) {
                if (row.key[j] > mine) {
                    mine = row.key[j];
                    my_score = row.score[j];
                    my_logit = row.logit[j];
                }
            }
            const u64 best = warp_max(mine);
            const u32 owner = __ffs(__ballot_sync(kAllLanes, mine == best)) - 1;
            const float best_score = __shfl_sync(kAllLanes, my_score, owner);
            const float best_logit = __shfl_sync(kAllLanes, my_logit, owner);
            if (lane == slot) {
                expert = ~static_cast<u32>(best);
                score = best_score;
                logit = best_logit;
            }
#pragma unroll
            for (u32 j = 0; j < kPerLane; ++j) {
                if (row.key[j] == best) row.key[j] = 0;
            }
        }

        // Weights, summed in f64 in the order of choice
        double term = WEIGHT == 3 ? sigmoid(static_cast<double>(logit)) : static_cast<double>(score);
        if (WEIGHT == 1) {
            float most = lane < NUM_TOPK ? logit : -infinity();
#pragma unroll
            for (u32 distance = 1; distance < kWarp; distance *= 2) {
                most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, distance));
            }
            term = exp(static_cast<double>(logit) - most);
        }
        double divisor = WEIGHT == 2 ? static_cast<double>(as_float(EPSILON_BITS)) : 0.0;
        double sum = 0.0;
        for (u32 slot = 0; slot < NUM_TOPK; ++slot) {
            const double other = __shfl_sync(kAllLanes, term, slot);
            if (other == other) sum += other;
        }
        divisor += sum;
        bool has_slots = has_any;
        if (WEIGHT == 1 || WEIGHT == 2) {
            has_slots = has_any && divisor > 0.0;
            term = term / divisor * (WEIGHT == 2 ? static_cast<double>(as_float(SCALING_BITS)) : 1.0);
        }
        float weight = static_cast<float>(term);
        if (weight != weight) weight = 0.0f;

        // Slots by descending weight
        const u64 mine = lane < NUM_TOPK ? key(weight, expert) : 0;
        u32 slot = 0;
        for (u32 other = 0; other < NUM_TOPK; ++other) slot += __shfl_sync(kAllLanes, mine, other) > mine;
        if (lane < NUM_TOPK) {
            // Nothing to choose: the first experts, which weigh nothing.
            const u32 at = has_slots ? slot : lane;
            args.idx[static_cast<u64>(token) * NUM_TOPK + at] = static_cast<int>(has_slots ? expert : lane);
            args.weights[static_cast<u64>(token) * NUM_TOPK + at] = has_slots ? weight : 0.0f;
        }
    }
}
