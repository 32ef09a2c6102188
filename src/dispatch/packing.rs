//! The bytes of tokens that leave a host: by destination, in either level. Pure, and what GPUs are held to.

use crate::dispatch::layout::TokenLayout;
use crate::dispatch::placement::Placement;
use crate::dispatch::plan::{DispatchPlan, NOT_HERE, Slots};
use crate::dispatch::two_level::{ForwardPlan, TwoLevelPlan};
use crate::ids::ExpertIdx;
use crate::numerics::nvfp4::QuantCounts;

/// The id of an expert on a rank that hosts it.
pub fn local_id(placement: Placement) -> impl Fn(usize, ExpertIdx) -> Option<u32> {
    move |rank, expert| {
        let owner = placement.owner(expert);
        (owner.rank.index() == rank).then_some(owner.local_idx)
    }
}

/// The bytes of all tokens that leave, by destination; `id_of` gives an expert's id there, if it is there.
#[must_use]
pub fn pack(
    layout: &TokenLayout,
    (plan, slots): (&DispatchPlan, Slots<'_>),
    values: &[f32],
    id_of: impl Fn(usize, ExpertIdx) -> Option<u32>,
) -> (Vec<u8>, QuantCounts) {
    let hidden = layout.hidden;
    let mut bytes = vec![0; plan.tokens.len() * layout.row_bytes()];
    let mut quant = QuantCounts::default();
    let mut rows = bytes.chunks_exact_mut(layout.row_bytes());
    for rank in 0..plan.num_slots.len() {
        for (&token, row) in plan.tokens_to(rank).iter().zip(&mut rows) {
            let token = token as usize;
            let there = slots_for(slots, token, |expert| id_of(rank, expert));
            quant += layout.encode(&values[token * hidden..][..hidden], there, row);
        }
    }
    (bytes, quant)
}

/// The second hop's plan and bytes, of what came in the first, `num_entered[r]` tokens of rank `r`: the values as they came,
/// the ids as their receivers number them.
#[must_use]
pub fn pack_forward(
    plans: TwoLevelPlan<'_>,
    layout: &TokenLayout,
    entered: &[u8],
    num_entered: &[usize],
) -> (ForwardPlan, Vec<u8>) {
    let row_bytes = layout.row_bytes();
    let rows = || entered.chunks_exact(row_bytes);
    let idx: Vec<i32> = rows().flat_map(|row| layout.local_idx(row)).collect();
    let weights: Vec<f32> = rows().flat_map(|row| layout.weights(row)).collect();
    let slots = Slots { num_topk: layout.num_topk, idx: &idx, weights: &weights };
    let forward = plans.forward(slots, num_entered);
    let id_of = local_id(plans.placement);
    let mut bytes = vec![0; forward.plan.tokens.len() * row_bytes];
    let mut out = bytes.chunks_exact_mut(row_bytes);
    for rank in plans.nodes.peers(plans.rank).iter().map(|peer| peer.index()) {
        for (&token, out) in forward.plan.tokens_to(rank).iter().zip(&mut out) {
            let token = token as usize;
            out.copy_from_slice(&entered[token * row_bytes..][..row_bytes]);
            layout.encode_slots(slots_for(slots, token, |expert| id_of(rank, expert)), out);
        }
    }
    (forward, bytes)
}

/// The slots of a token under the ids of whoever it goes to; what is not there is masked and weighs nothing.
fn slots_for<'a, F: Fn(ExpertIdx) -> Option<u32>>(
    slots: Slots<'a>,
    token: usize,
    id_of: F,
) -> impl Iterator<Item = (i32, f32)> + use<'a, F> {
    slots.of(token).map(move |(expert, weight)| match expert.and_then(&id_of) {
        Some(id) => (i32::try_from(id).unwrap_or(NOT_HERE), weight),
        None => (NOT_HERE, 0.0),
    })
}
