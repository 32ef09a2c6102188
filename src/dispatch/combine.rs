//! From computed rows back to one row a token, in a fixed order of sums. Pure.
//!
//! `slot`: each slot's row comes home unweighted, and home adds weight * row in slot order. The bits do not depend on
//! where experts live. `rank`: the owner adds weight * row over the token's slots it hosts, in slot order; home adds the
//! ranks' rows in ascending order. Fewer bytes travel, and the bits are fixed for a given placement.
//! Both multiply, then add, in fp32.

use crate::dispatch::layout::CombineForm;
use crate::dispatch::placement::Placement;
use crate::dispatch::plan::{ComputePlan, DispatchPlan, Slots};

/// Where the routing weights are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CombineMode {
    /// At the token's home, slot by slot.
    Slot,
    /// At the experts' rank.
    Rank,
}

impl CombineMode {
    /// The name of `combine:`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Slot => "slot",
            Self::Rank => "rank",
        }
    }

    /// Rows at most that come back from one rank for a token.
    #[must_use]
    pub const fn max_rows(self, num_topk: usize) -> usize {
        match self {
            Self::Slot => num_topk,
            Self::Rank => 1,
        }
    }

    /// Rows of `plan` that come back from each rank.
    #[must_use]
    pub fn rows_from(self, plan: &DispatchPlan) -> Vec<usize> {
        match self {
            Self::Slot => plan.num_slots.clone(),
            Self::Rank => plan.num_tokens_to(),
        }
    }
}

/// `[num_rows]` rows of one width and form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowForm {
    /// Values of a row.
    pub hidden: usize,
    /// Their form on the way.
    pub form: CombineForm,
}

impl RowForm {
    fn row<'a>(&self, bytes: &'a [u8], row: usize) -> &'a [u8] {
        let row_bytes = self.form.row_bytes(self.hidden);
        &bytes[row * row_bytes..(row + 1) * row_bytes]
    }

    fn rows_mut<'a>(&self, bytes: &'a mut [u8]) -> impl Iterator<Item = &'a mut [u8]> + use<'a> {
        bytes.chunks_exact_mut(self.form.row_bytes(self.hidden))
    }
}

/// Writes what the owner sends back in `slot` mode: the unweighted rows in the order (received token, slot).
#[must_use]
pub fn return_slots(rows: &[f32], plan: &ComputePlan, form: RowForm) -> Vec<u8> {
    let mut out = vec![0; plan.num_rows() * form.form.row_bytes(form.hidden)];
    for (&row, bytes) in plan.return_rows.iter().zip(form.rows_mut(&mut out)) {
        form.form.encode(values(rows, row, form.hidden), bytes);
    }
    out
}

/// Writes what the owner sends back in `rank` mode: one weighted sum a received token.
///
/// `weights` are those of the rows in return order.
#[must_use]
pub fn return_sums(rows: &[f32], plan: &ComputePlan, weights: &[f32], form: RowForm) -> Vec<u8> {
    let num_received = plan.token_offsets.len() - 1;
    let mut out = vec![0; num_received * form.form.row_bytes(form.hidden)];
    let mut sum = vec![0f32; form.hidden];
    for (token, bytes) in form.rows_mut(&mut out).enumerate() {
        sum.fill(0.0);
        let places = plan.token_offsets[token]..plan.token_offsets[token + 1];
        for (&row, &weight) in plan.return_rows[places.clone()].iter().zip(&weights[places]) {
            add_weighted(&mut sum, weight, values(rows, row, form.hidden));
        }
        form.form.encode(&sum, bytes);
    }
    out
}

/// Adds the rows that came home into `out` `[num_tokens, hidden]`, which starts at zero.
///
/// `returned[r]` holds rank `r`'s rows. Masked slots add nothing.
pub fn add_slots(returned: &[&[u8]], placement: Placement, slots: Slots<'_>, form: RowForm, out: &mut [f32]) {
    // Rows of a rank come in the order (token, slot), the order of this walk: one cursor a rank finds each row.
    let mut next = vec![0usize; placement.num_ranks()];
    let mut row = vec![0f32; form.hidden];
    for (token, sum) in out.chunks_exact_mut(form.hidden).enumerate() {
        for (expert, weight) in slots.of(token) {
            let Some(expert) = expert else { continue };
            let rank = placement.owner(expert).rank.index();
            form.form.decode(form.row(returned[rank], next[rank]), &mut row);
            next[rank] += 1;
            add_weighted(sum, weight, &row);
        }
    }
}

/// Adds the ranks' sums into `out` `[num_tokens, hidden]`, which starts at zero, in ascending order of ranks.
pub fn add_sums(returned: &[&[u8]], plan: &DispatchPlan, form: RowForm, out: &mut [f32]) {
    let mut row = vec![0f32; form.hidden];
    for (rank, bytes) in returned.iter().enumerate() {
        for (place, &token) in plan.tokens_to(rank).iter().enumerate() {
            form.form.decode(form.row(bytes, place), &mut row);
            let sum = &mut out[token as usize * form.hidden..][..form.hidden];
            for (sum, value) in sum.iter_mut().zip(&row) {
                *sum += value;
            }
        }
    }
}

fn values(rows: &[f32], row: u32, hidden: usize) -> &[f32] {
    &rows[row as usize * hidden..][..hidden]
}

fn add_weighted(sum: &mut [f32], weight: f32, row: &[f32]) {
    for (sum, value) in sum.iter_mut().zip(row) {
        *sum += weight * value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORM: RowForm = RowForm { hidden: 1, form: CombineForm::F32 };

    #[test]
    fn case_h1_sums_follow_slot_order() {
        // 2^24 + 1 rounds back to 2^24: in slot order the ones vanish, the large pair first would leave 2.
        let idx = [0, 1, 2, 3];
        let placement = Placement::new(4, 1);
        let slots = Slots { num_topk: 4, idx: &idx, weights: &[1.0; 4] };
        let returned: Vec<u8> = [16_777_216f32, 1.0, 1.0, -16_777_216.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut out = [0.0];
        add_slots(&[&returned], placement, slots, FORM, &mut out);
        assert_eq!(out, [0.0]);
    }

    /// Added in this order they give 1, the second having vanished; backwards, or with the ones first, they give 0.
    const ONE_IN_ORDER: [f32; 4] = [33_554_432.0, 1.0, -33_554_432.0, 1.0];

    #[test]
    fn case_h1_owners_add_in_slot_order() {
        let slots = [2, 0, 3, 1];
        let mut rows = [0.0; 4];
        slots.iter().zip(ONE_IN_ORDER).for_each(|(&expert, value)| rows[expert] = value);
        let plan = ComputePlan::new(4, 4, &slots.map(|expert| i32::try_from(expert).unwrap()));
        assert_eq!(return_sums(&rows, &plan, &[1.0; 4], FORM), 1f32.to_le_bytes());
    }

    #[test]
    fn case_h1_homes_add_in_rank_order() {
        let placement = Placement::new(4, 4);
        let slots = Slots { num_topk: 4, idx: &[2, 0, 3, 1], weights: &[1.0; 4] };
        let plan = DispatchPlan::new(placement, slots);
        let returned = ONE_IN_ORDER.map(f32::to_le_bytes);
        let mut out = [0.0];
        add_sums(&returned.each_ref().map(|bytes| &bytes[..]), &plan, FORM, &mut out);
        assert_eq!(out, [1.0]);
    }

    #[test]
    fn both_modes_add_every_slot_once() {
        let idx = [2, 0, -1, 3, 1, 1];
        let weights = [0.5, 0.25, 9.0, 1.0, 2.0, 4.0];
        let placement = Placement::new(4, 2);
        let slots = Slots { num_topk: 3, idx: &idx, weights: &weights };
        let dispatch = DispatchPlan::new(placement, slots);
        let expected = [0.5 * 30.0 + 0.25 * 10.0, 40.0 + 2.0 * 20.0 + 4.0 * 20.0];
        for mode in [CombineMode::Slot, CombineMode::Rank] {
            let returned: Vec<Vec<u8>> =
                (0..2).map(|rank| owner_returns(mode, placement, slots, &dispatch, rank)).collect();
            let returned: Vec<&[u8]> = returned.iter().map(Vec::as_slice).collect();
            let mut out = [0.0; 2];
            match mode {
                CombineMode::Slot => add_slots(&returned, placement, slots, FORM, &mut out),
                CombineMode::Rank => add_sums(&returned, &dispatch, FORM, &mut out),
            }
            assert_eq!(out, expected, "{mode:?}");
        }
    }

    /// What `rank` sends back where expert e's row is the number 10 * (e + 1).
    fn owner_returns(
        mode: CombineMode,
        placement: Placement,
        slots: Slots<'_>,
        dispatch: &DispatchPlan,
        rank: usize,
    ) -> Vec<u8> {
        let (mut local_idx, mut hosted_weights) = (Vec::new(), Vec::new());
        for &token in dispatch.tokens_to(rank) {
            for (expert, weight) in slots.of(token as usize) {
                let owner = expert.map(|expert| placement.owner(expert));
                match owner {
                    Some(owner) if owner.rank.index() == rank => {
                        local_idx.push(i32::try_from(owner.local_idx).unwrap());
                        hosted_weights.push(weight);
                    }
                    _ => local_idx.push(-1),
                }
            }
        }
        let plan = ComputePlan::new(2, 3, &local_idx);
        let mut rows = vec![0.0; plan.num_rows()];
        for expert in 0..2u8 {
            let value = 10.0 * f32::from(u8::try_from(rank * 2).unwrap() + expert + 1);
            rows[plan.expert_offsets[usize::from(expert)]..plan.expert_offsets[usize::from(expert) + 1]].fill(value);
        }
        match mode {
            CombineMode::Slot => return_slots(&rows, &plan, FORM),
            CombineMode::Rank => return_sums(&rows, &plan, &hosted_weights, FORM),
        }
    }
}
