//! Why a router's configuration, its inputs or ids from outside are refused.

use crate::exit::{Classify, Exit};

/// Why routing is refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RoutingError {
    /// k out of range.
    #[error("top-k of {num_topk} over {num_experts} experts: k must be at least 1 and at most the number of experts")]
    NumTopk {
        /// k
        num_topk: usize,
        /// Experts of a layer.
        num_experts: usize,
    },
    /// Ids are 32 bits wide.
    #[error("{num_experts} experts are more than 32-bit expert ids can name")]
    NumExperts {
        /// Experts of a layer.
        num_experts: usize,
    },
    /// Groups of unequal size.
    #[error("{num_groups} expert groups do not divide {num_experts} experts: groups must be of equal size")]
    Groups {
        /// Groups.
        num_groups: usize,
        /// Experts of a layer.
        num_experts: usize,
    },
    /// Groups kept out of range.
    #[error(
        "topk_group of {topk_group} with {num_groups} expert groups: it must be at least 1 and at most their number"
    )]
    TopkGroup {
        /// Groups kept.
        topk_group: usize,
        /// Groups.
        num_groups: usize,
    },
    /// Fewer experts in the groups kept than slots to fill.
    #[error(
        "top-k of {num_topk} from {topk_group} expert groups that hold {num_kept_experts} experts: keep more groups or lower k"
    )]
    KeptExperts {
        /// k
        num_topk: usize,
        /// Groups kept.
        topk_group: usize,
        /// Experts in them.
        num_kept_experts: usize,
    },
    /// A scaling that is no factor.
    #[error("the {method} router's scaling factor is {scaling}; it must be finite and greater than 0")]
    Scaling {
        /// The method's name.
        method: &'static str,
        /// The value found.
        scaling: f32,
    },
    /// A bias for a method without one.
    #[error("the {method} router takes no correction bias, but one was given: check the model's routing method")]
    UnusedBias {
        /// The method's name.
        method: &'static str,
    },
    /// A bias of another length.
    #[error("the router's correction bias has {found} values for {num_experts} experts")]
    BiasLength {
        /// Values found.
        found: usize,
        /// Experts of a layer.
        num_experts: usize,
    },
    /// A bias that is not finite.
    #[error("the router's correction bias of expert {expert} is {value}; it must be finite")]
    Bias {
        /// The expert.
        expert: usize,
        /// The value found.
        value: f32,
    },
    /// Logits that are not whole rows.
    #[error("{found} router logits are not whole rows of {num_experts} experts")]
    LogitsLength {
        /// Logits found.
        found: usize,
        /// Experts of a layer.
        num_experts: usize,
    },
    /// Ids and weights from outside that do not fit together.
    #[error(
        "topk_idx has {num_ids} ids and topk_weights {num_weights} weights for {num_topk} slots a token: both must be \
         [num_tokens, {num_topk}] with at least one slot"
    )]
    TopkLengths {
        /// Slots a token.
        num_topk: usize,
        /// Ids found.
        num_ids: usize,
        /// Weights found.
        num_weights: usize,
    },
    /// An id from outside that names no expert.
    #[error(
        "topk_idx of token {token}, slot {slot} is {id}, but there are {num_experts} experts: ids are 0 to {}, or -1 for \
         a masked slot",
        .num_experts.saturating_sub(1)
    )]
    ExpertId {
        /// The token.
        token: usize,
        /// Its slot.
        slot: usize,
        /// The id found.
        id: i32,
        /// Experts of a layer.
        num_experts: usize,
    },
    /// A weight from outside that is not finite.
    #[error("topk_weights of token {token}, slot {slot} is {weight}: weights must be finite")]
    Weight {
        /// The token.
        token: usize,
        /// Its slot.
        slot: usize,
        /// The value found.
        weight: f32,
    },
}

impl Classify for RoutingError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}
