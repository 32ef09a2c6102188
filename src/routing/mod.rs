//! Routing: router logits to top-k expert ids and weights.
//!
//! Pure: knows nothing of tensors on disk, ranks or backends.
//!
//! | method | selection | weights |
//! |---|---|---|
//! | default | top-k of softmax(l) | the softmax values |
//! | renormalize | top-k of l | softmax over the chosen k |
//! | deepseek_v3 | s = sigmoid(l), c = s + bias; a group scores the sum of its 2 best c; top-k of c in the topk_group best groups | s / (sum + 1e-20) * scaling |
//! | kimi_k3 | deepseek_v3 with one group | the same |
//! | deepseek_v4 | s = sqrt(softplus(l)); top-k of s + bias | s / sum * scaling |
//! | minimax_m2 | s = sigmoid(l); top-k of s + bias | s / sum |
//! | sigmoid_renorm | top-k of sigmoid(l) | s / sum |
//! | llama4 | top-k of l | sigmoid(l) |
//!
//! The formulae are those of the models' public code. Scores, biased scores and weights are f32; the elementary functions
//! and the normaliser are computed in f64 in software and rounded once, so that all hosts agree on bits. Ties go to the lower
//! expert, ties between groups to the lower group, and slots are sorted by descending weight, then ascending expert.
//!
//! **Logits that are not finite.** An infinity counts as `f32::MAX`. A NaN is never chosen before an expert whose logit is
//! not NaN, adds nothing to a normaliser, and weighs 0. A row in which every logit is NaN or minus infinity, or whose
//! normaliser is 0, chooses experts 0 to k - 1 with weights of 0: its routed output is exactly zero. Every other row is what
//! the table says, bit for bit.

mod error;
mod scores;
mod select;

#[cfg(test)]
pub(crate) mod tests;

pub use error::RoutingError;

use scores::Scorer;
use select::Selector;

/// How scores select experts and become weights; the formulae are in the [module's](self) table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RoutingMethod {
    /// Top-k of softmax(l); the softmax values are the weights.
    Default,
    /// Top-k of l; softmax over the chosen k (Qwen3, Mixtral).
    Renormalize,
    /// s = sigmoid(l), c = s + bias; group-limited top-k of c; s / (sum + 1e-20) * scaling.
    DeepseekV3 {
        /// Groups the experts are split into.
        num_groups: usize,
        /// Groups kept, by the sum of their two best c.
        topk_group: usize,
        /// Multiplies the normalised weights.
        scaling: f32,
    },
    /// `DeepseekV3` with one group.
    KimiK3 {
        /// Multiplies the normalised weights.
        scaling: f32,
    },
    /// s = sqrt(softplus(l)); top-k of s + bias; s / sum * scaling.
    DeepseekV4 {
        /// Multiplies the normalised weights.
        scaling: f32,
    },
    /// s = sigmoid(l); top-k of s + bias; s / sum.
    MinimaxM2,
    /// Top-k of sigmoid(l), divided by their sum.
    SigmoidRenorm,
    /// Top-k of l; sigmoid(l).
    Llama4,
}

impl RoutingMethod {
    /// The name of the method, as in the module's table.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Renormalize => "renormalize",
            Self::DeepseekV3 { .. } => "deepseek_v3",
            Self::KimiK3 { .. } => "kimi_k3",
            Self::DeepseekV4 { .. } => "deepseek_v4",
            Self::MinimaxM2 => "minimax_m2",
            Self::SigmoidRenorm => "sigmoid_renorm",
            Self::Llama4 => "llama4",
        }
    }

    /// Whether a correction bias takes part in the selection. It is optional: without one it is 0.
    #[must_use]
    pub const fn takes_bias(self) -> bool {
        matches!(self, Self::DeepseekV3 { .. } | Self::KimiK3 { .. } | Self::DeepseekV4 { .. } | Self::MinimaxM2)
    }

    /// What the normalised weights are multiplied by; 1 where nothing is.
    #[must_use]
    pub const fn scaling(self) -> f32 {
        match self {
            Self::DeepseekV3 { scaling, .. } | Self::KimiK3 { scaling } | Self::DeepseekV4 { scaling } => scaling,
            _ => 1.0,
        }
    }

    /// What keeps the weights' normaliser from zero; 0 where nothing does.
    #[must_use]
    pub const fn epsilon(self) -> f64 {
        match self {
            Self::DeepseekV3 { .. } | Self::KimiK3 { .. } => 1e-20,
            _ => 0.0,
        }
    }

    /// The number of groups of experts and how many of them are kept, where the method limits them.
    #[must_use]
    pub const fn group_limit(self) -> Option<(usize, usize)> {
        match self.groups() {
            Some(Groups { num_groups, topk_group }) => Some((num_groups, topk_group)),
            None => None,
        }
    }

    /// The groups of experts and how many are kept, where the method limits them.
    const fn groups(self) -> Option<Groups> {
        match self {
            // All groups kept is no limit, and one group is always kept.
            Self::DeepseekV3 { num_groups, topk_group, .. } if topk_group < num_groups => {
                Some(Groups { num_groups, topk_group })
            }
            _ => None,
        }
    }
}

/// A limit on the groups a token's experts may come from.
#[derive(Debug, Clone, Copy)]
struct Groups {
    num_groups: usize,
    topk_group: usize,
}

/// The experts of every token, slots by descending weight, ties to the lower expert.
#[derive(Debug, Clone, PartialEq)]
pub struct TopK {
    /// Slots a token.
    pub num_topk: usize,
    /// `[num_tokens, num_topk]` expert ids; -1 masks a slot.
    pub idx: Vec<i32>,
    /// `[num_tokens, num_topk]` weights.
    pub weights: Vec<f32>,
}

impl TopK {
    /// Tokens that are routed.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.idx.len().checked_div(self.num_topk).unwrap_or(0)
    }

    /// Checks ids and weights that come from outside: an id is -1 (a masked slot) or below `num_experts`, a weight finite,
    /// of masked slots too. The same expert may occur twice.
    ///
    /// # Errors
    /// Names the first token and slot that is wrong, or the lengths that do not fit together.
    pub fn validate(&self, num_experts: usize) -> Result<(), RoutingError> {
        let (num_ids, num_weights) = (self.idx.len(), self.weights.len());
        if self.num_topk == 0 || num_ids != num_weights || !num_ids.is_multiple_of(self.num_topk) {
            return Err(RoutingError::TopkLengths { num_topk: self.num_topk, num_ids, num_weights });
        }
        for (i, (&id, &weight)) in self.idx.iter().zip(&self.weights).enumerate() {
            let (token, slot) = (i / self.num_topk, i % self.num_topk);
            let in_range = usize::try_from(id).is_ok_and(|id| id < num_experts);
            if id != -1 && !in_range {
                return Err(RoutingError::ExpertId { token, slot, id, num_experts });
            }
            if !weight.is_finite() {
                return Err(RoutingError::Weight { token, slot, weight });
            }
        }
        Ok(())
    }
}

/// Checks what a model's config says of its router, before anything is loaded or any rank waits for another.
///
/// # Errors
/// If k is not between 1 and the number of experts, groups do not divide the experts, more groups are kept than there are
/// or too few to hold k experts, or the scaling is not finite and positive.
pub fn validate(method: RoutingMethod, num_experts: usize, num_topk: usize) -> Result<(), RoutingError> {
    if num_topk == 0 || num_topk > num_experts {
        return Err(RoutingError::NumTopk { num_topk, num_experts });
    }
    if i32::try_from(num_experts).is_err() {
        return Err(RoutingError::NumExperts { num_experts });
    }
    if let RoutingMethod::DeepseekV3 { num_groups, topk_group, .. } = method {
        if num_groups == 0 || !num_experts.is_multiple_of(num_groups) {
            return Err(RoutingError::Groups { num_groups, num_experts });
        }
        if topk_group == 0 || topk_group > num_groups {
            return Err(RoutingError::TopkGroup { topk_group, num_groups });
        }
        let num_kept_experts = topk_group * (num_experts / num_groups);
        if num_topk > num_kept_experts {
            return Err(RoutingError::KeptExperts { num_topk, topk_group, num_kept_experts });
        }
    }
    let scaling = method.scaling();
    if !(scaling.is_finite() && scaling > 0.0) {
        return Err(RoutingError::Scaling { method: method.name(), scaling });
    }
    Ok(())
}

/// Routes tokens: `logits` `[num_tokens, num_experts]` to the experts and weights of every token.
///
/// `bias` `[num_experts]` corrects the selection of the methods that [take one](RoutingMethod::takes_bias), never a weight. A
/// token's result depends on its own logits alone.
///
/// # Errors
/// What [`validate`] refuses; logits that are not whole rows; a bias of another length, with a value that is not finite, or
/// for a method that takes none.
pub fn route(
    method: RoutingMethod,
    num_experts: usize,
    num_topk: usize,
    logits: &[f32],
    bias: Option<&[f32]>,
) -> Result<TopK, RoutingError> {
    validate(method, num_experts, num_topk)?;
    if let Some(bias) = bias {
        check_bias(method, num_experts, bias)?;
    }
    if !logits.len().is_multiple_of(num_experts) {
        return Err(RoutingError::LogitsLength { found: logits.len(), num_experts });
    }
    let num_slots = logits.len() / num_experts * num_topk;
    let mut topk = TopK { num_topk, idx: vec![0; num_slots], weights: vec![0.0; num_slots] };
    let mut router = RowRouter {
        scorer: Scorer::new(method, num_experts),
        selector: Selector::new(num_experts, method.groups()),
        slots: Vec::with_capacity(num_topk),
        bias,
    };
    let rows = topk.idx.chunks_exact_mut(num_topk).zip(topk.weights.chunks_exact_mut(num_topk));
    for (logits, (idx, weights)) in logits.chunks_exact(num_experts).zip(rows) {
        router.route(logits, idx, weights);
    }
    Ok(topk)
}

fn check_bias(method: RoutingMethod, num_experts: usize, bias: &[f32]) -> Result<(), RoutingError> {
    if !method.takes_bias() {
        return Err(RoutingError::UnusedBias { method: method.name() });
    }
    if bias.len() != num_experts {
        return Err(RoutingError::BiasLength { found: bias.len(), num_experts });
    }
    match bias.iter().position(|b| !b.is_finite()) {
        Some(expert) => Err(RoutingError::Bias { expert, value: bias[expert] }),
        None => Ok(()),
    }
}

/// One chosen expert of a token.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Slot {
    expert: i32,
    weight: f32,
}

/// Routes a row at a time; holds the buffers that rows share.
struct RowRouter<'a> {
    scorer: Scorer,
    selector: Selector,
    slots: Vec<Slot>,
    bias: Option<&'a [f32]>,
}

impl RowRouter<'_> {
    fn route(&mut self, logits: &[f32], idx: &mut [i32], weights: &mut [f32]) {
        let num_topk = idx.len();
        self.slots.clear();
        if self.scorer.score(logits) {
            let chosen = self.selector.select(self.scorer.scores(), self.bias, num_topk);
            self.scorer.weigh(chosen, &mut self.slots);
        }
        if self.slots.is_empty() {
            // The row is dead: see the module's rule for logits that are not finite.
            self.slots.extend((0..).take(num_topk).map(|expert| Slot { expert, weight: 0.0 }));
        }
        self.slots.sort_unstable_by(|a, b| b.weight.total_cmp(&a.weight).then(a.expert.cmp(&b.expert)));
        for ((slot, idx), weight) in self.slots.iter().zip(idx).zip(weights) {
            (*idx, *weight) = (slot.expert, slot.weight);
        }
    }
}
