//! The k best of a row of scores, under a bias and a limit on groups.
//!
//! Knows nothing of what scores mean. Partial: of 896 scores only the 16 that are kept get sorted.

use std::cmp::Reverse;

use super::Groups;

/// Selects rows, one at a time.
pub(super) struct Selector {
    groups: Option<Groups>,
    num_experts: usize,
    /// One key an expert, in no particular order after a selection.
    keys: Vec<u64>,
    group_keys: Vec<u64>,
}

impl Selector {
    pub(super) fn new(num_experts: usize, groups: Option<Groups>) -> Self {
        let num_groups = groups.map_or(0, |g| g.num_groups);
        Self { groups, num_experts, keys: Vec::with_capacity(num_experts), group_keys: Vec::with_capacity(num_groups) }
    }

    /// The experts with the k largest `scores + bias`, best first; ties go to the lower expert, NaN comes after all else.
    pub(super) fn select(
        &mut self,
        scores: &[f32],
        bias: Option<&[f32]>,
        num_topk: usize,
    ) -> impl Iterator<Item = usize> + Clone + use<'_> {
        self.keys.clear();
        match bias {
            Some(bias) => self.keys.extend(scores.iter().zip(bias).zip(0..).map(|((s, b), expert)| key(s + b, expert))),
            None => self.keys.extend(scores.iter().zip(0..).map(|(&s, expert)| key(s, expert))),
        }
        if let Some(groups) = self.groups {
            self.mask_groups(groups);
        }
        let (best, _) = partial_sort(&mut self.keys, num_topk);
        best.iter().map(|&key| index(key))
    }

    /// Makes experts outside the best groups minus infinity (but leaves NaN, which is worse still).
    fn mask_groups(&mut self, groups: Groups) {
        let group_size = self.num_experts / groups.num_groups;
        self.group_keys.clear();
        self.group_keys
            .extend(self.keys.chunks_exact(group_size).zip(0..).map(|(keys, group)| key(group_score(keys), group)));
        let (_, dropped) = partial_sort(&mut self.group_keys, groups.topk_group);
        for group in dropped.iter().map(|&key| index(key)) {
            for key in &mut self.keys[group * group_size..][..group_size] {
                *key = (*key).min(with_order(order(f32::NEG_INFINITY), *key));
            }
        }
    }
}

/// The sum of a group's two best values, of its best where there is one alone; NaN counts as minus infinity.
fn group_score(keys: &[u64]) -> f32 {
    let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for value in keys.iter().map(|&key| value(key)).filter(|v| !v.is_nan()) {
        if value > best {
            (best, second) = (value, best);
        } else if value > second {
            second = value;
        }
    }
    if keys.len() == 1 { best } else { best + second }
}

/// Sorts the `num` largest keys to the front, descending, and splits there. Keys differ in their index, so the order does
/// not depend on the algorithm.
fn partial_sort(keys: &mut [u64], num: usize) -> (&[u64], &[u64]) {
    if num < keys.len() {
        keys.select_nth_unstable_by_key(num - 1, |&key| Reverse(key));
    }
    let (best, rest) = keys.split_at_mut(num);
    best.sort_unstable_by_key(|&key| Reverse(key));
    (best, rest)
}

/// A number that orders like (value, descending index): the value's order above, the index's complement below.
fn key(value: f32, index: u32) -> u64 {
    (u64::from(order(value)) << 32) | u64::from(!index)
}

fn with_order(order: u32, key: u64) -> u64 {
    (u64::from(order) << 32) | (key & u64::from(u32::MAX))
}

#[expect(clippy::cast_possible_truncation, reason = "the low half")]
fn index(key: u64) -> usize {
    !(key as u32) as usize
}

fn value(key: u64) -> f32 {
    match (key >> 32) as u32 {
        0 => f32::NAN,
        order if order & SIGN_BIT != 0 => f32::from_bits(order ^ SIGN_BIT),
        order => f32::from_bits(!order),
    }
}

const SIGN_BIT: u32 = 0x8000_0000;

/// An integer that orders like the value: NaN below all, then minus infinity; the zeros are equal.
fn order(value: f32) -> u32 {
    if value.is_nan() {
        return 0;
    }
    // Adding +0 turns -0 into +0.
    let bits = (value + 0.0).to_bits();
    if bits & SIGN_BIT == 0 { bits | SIGN_BIT } else { !bits }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keys_order_values_then_indices() {
        let ascending =
            [f32::NAN, f32::NEG_INFINITY, -1.0, -f32::from_bits(1), 0.0, f32::from_bits(1), 1.0, f32::INFINITY];
        for pair in ascending.windows(2) {
            assert!(key(pair[0], 0) < key(pair[1], 9), "{pair:?}");
        }
        assert_eq!(key(0.0, 3), key(-0.0, 3));
        assert!(key(1.0, 3) > key(1.0, 4));
        assert!(value(key(f32::NAN, 1)).is_nan());
        for v in &ascending[1..] {
            assert_eq!((value(key(*v, 77)), index(key(*v, 77))), (*v, 77));
        }
    }

    #[test]
    fn groups_compete_by_their_two_best_and_ties_go_to_the_lower() {
        let groups = Some(Groups { num_groups: 3, topk_group: 1 });
        let mut selector = Selector::new(6, groups);
        let mut select = |scores: [f32; 6]| selector.select(&scores, None, 2).collect::<Vec<_>>();
        assert_eq!(select([9.0, 0.0, 5.0, 5.0, 1.0, 1.0]), [2, 3]);
        assert_eq!(select([5.0, 5.0, 9.0, 1.0, 10.0, 0.0]), [0, 1]);
        assert_eq!(select([f32::NAN, f32::NAN, 1.0, f32::NAN, -3.0, -2.0]), [5, 4]);
        // Not enough that is not NaN in the best group: masked experts come before NaN.
        assert_eq!(select([f32::NAN, f32::NAN, 1.0, f32::NAN, f32::NAN, f32::NAN]), [2, 0]);
    }

    proptest! {
        #[test]
        fn selection_is_the_head_of_a_full_sort(
            scores in prop::collection::vec(prop_oneof![-3_i8..3, Just(i8::MIN)], 1..60), k in 1_usize..60,
        ) {
            let scores: Vec<f32> = scores.iter().map(|&s| if s == i8::MIN { f32::NAN } else { f32::from(s) }).collect();
            let k = k.min(scores.len());
            let mut order: Vec<usize> = (0..scores.len()).collect();
            let rank = |&e: &usize| if scores[e].is_nan() { f32::NEG_INFINITY } else { scores[e] };
            order.sort_by(|a, b| rank(b).total_cmp(&rank(a)));
            let mut selector = Selector::new(scores.len(), None);
            let chosen: Vec<usize> = selector.select(&scores, None, k).collect();
            prop_assert_eq!(&chosen[..], &order[..k]);
        }
    }
}
