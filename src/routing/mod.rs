//! Routing: router logits to top-k expert ids and weights.
//!
//! Pure: knows nothing of tensors on disk, ranks or backends.

/// How scores select experts and become weights. Formulae: see `docs/routing.md`'s table, from the models' public code.
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
