//! From a layer's decision to the forms of what travels and the sizes of its buffers: once, for runs and for plans. Pure.

use crate::dispatch::capacity::{BufferSizes, ForwardSizes};
use crate::dispatch::combine::{CombineMode, RowForm};
use crate::dispatch::layout::{CombineForm, PayloadForm, TokenLayout};
use crate::dispatch::placement::Placement;
use crate::model::MoeGeometry;
use crate::select::{LayerDecision, TokenForm};

/// How a layer's tokens reach its experts and rows come back: equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Travel {
    /// Who owns what.
    pub placement: Placement,
    /// The form of a travelling token's values.
    pub payload: PayloadForm,
    /// Where weights are applied.
    pub mode: CombineMode,
    /// A row that comes back.
    pub row_form: RowForm,
}

impl Travel {
    /// The bytes of a token with so many slots.
    #[must_use]
    pub fn layout(&self, num_topk: usize) -> TokenLayout {
        TokenLayout { payload: self.payload, hidden: self.row_form.hidden, num_topk }
    }
}

/// The form of a travelling token's values. `input_scale` is FC1's, which sizes do not depend on.
#[must_use]
pub fn payload_form(decision: &LayerDecision, input_scale: f32) -> PayloadForm {
    match decision.token_form {
        TokenForm::F32 => PayloadForm::F32,
        TokenForm::Bf16 => PayloadForm::Bf16,
        TokenForm::Nvfp4 => PayloadForm::Nvfp4 { input_scale },
    }
}

/// The form of a row that comes back.
#[must_use]
pub fn row_form(geometry: &MoeGeometry, decision: &LayerDecision) -> RowForm {
    RowForm { hidden: geometry.expert_hidden, form: combine_form(decision) }
}

/// The form of its values.
#[must_use]
pub fn combine_form(decision: &LayerDecision) -> CombineForm {
    if decision.combine_bf16 { CombineForm::Bf16 } else { CombineForm::F32 }
}

/// Where the routing weights are applied.
#[must_use]
pub fn combine_mode(decision: &LayerDecision) -> CombineMode {
    if decision.combine_at_home { CombineMode::Slot } else { CombineMode::Rank }
}

/// The bytes of a travelling token.
#[must_use]
pub fn token_layout(geometry: &MoeGeometry, decision: &LayerDecision) -> TokenLayout {
    TokenLayout { payload: payload_form(decision, 1.0), hidden: geometry.expert_hidden, num_topk: geometry.num_topk }
}

/// What decides the buffers of a rank with `num_local_experts` in a world of `num_ranks`, that passes on what `forwards` says.
#[must_use]
pub fn buffer_sizes(
    geometry: &MoeGeometry,
    decision: &LayerDecision,
    (num_ranks, num_local_experts): (usize, usize),
    forwards: Option<ForwardSizes>,
) -> BufferSizes {
    let row_form = row_form(geometry, decision);
    BufferSizes {
        num_ranks,
        num_local_experts,
        num_topk: geometry.num_topk,
        hidden: geometry.expert_hidden,
        intermediate: geometry.intermediate,
        token_bytes: token_layout(geometry, decision).row_bytes(),
        return_bytes: row_form.form.row_bytes(row_form.hidden),
        per_slot: decision.combine_at_home,
        forwards,
    }
}
