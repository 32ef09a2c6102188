//! Every method against expected ids and weights, the rule for logits that are not finite, and what is refused.

use proptest::prelude::*;

use super::*;
use crate::exit::{Classify, Exit};
use crate::numerics::fixtures::{self, Tensors};

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

fn all_methods() -> [RoutingMethod; 8] {
    use RoutingMethod::{DeepseekV3, DeepseekV4, Default, KimiK3, Llama4, MinimaxM2, Renormalize, SigmoidRenorm};
    let grouped = DeepseekV3 { num_groups: 4, topk_group: 2, scaling: 2.5 };
    let (k3, v4) = (KimiK3 { scaling: 1.0 }, DeepseekV4 { scaling: 1.5 });
    [Default, Renormalize, grouped, k3, v4, MinimaxM2, SigmoidRenorm, Llama4]
}

/// The method of a set of the expected file, with the scaling and groups of its metadata.
pub(crate) fn method_of(set: &str) -> RoutingMethod {
    let scaling = || {
        #[expect(clippy::cast_possible_truncation, reason = "written from an f32")]
        let scaling = fixtures::metadata(fixtures::ROUTING, "scaling")[set].as_f64().unwrap() as f32;
        scaling
    };
    let groups = |i: usize| {
        let groups = fixtures::metadata(fixtures::ROUTING, "groups");
        usize::try_from(groups[set][i].as_u64().unwrap()).unwrap()
    };
    match set {
        "default" => RoutingMethod::Default,
        "renormalize" | "renormalize_small" => RoutingMethod::Renormalize,
        "deepseek_v3_grouped" | "deepseek_v3_small" => {
            RoutingMethod::DeepseekV3 { num_groups: groups(0), topk_group: groups(1), scaling: scaling() }
        }
        "kimi_k3" => RoutingMethod::KimiK3 { scaling: scaling() },
        "deepseek_v4" => RoutingMethod::DeepseekV4 { scaling: scaling() },
        "minimax_m2" => RoutingMethod::MinimaxM2,
        "sigmoid_renorm" => RoutingMethod::SigmoidRenorm,
        "llama4" => RoutingMethod::Llama4,
        _ => panic!("no method for the expected set {set}"),
    }
}

#[test]
fn every_method_matches_the_expected_ids_and_weights() {
    let file = Tensors::new(fixtures::ROUTING);
    let mut sets: Vec<String> =
        file.0.names().into_iter().filter_map(|n| n.strip_suffix(".logits").map(String::from)).collect();
    sets.sort();
    assert!(sets.len() >= 10, "found {sets:?}");
    let mut names: Vec<&str> = sets.iter().map(|set| method_of(set).name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all_methods().len(), "methods covered: {names:?}");
    for set in sets {
        let num_experts = file.shape(&format!("{set}.logits"))[1];
        let num_topk = file.shape(&format!("{set}.topk_idx"))[1];
        let bias = file.has(&format!("{set}.bias")).then(|| file.f32(&format!("{set}.bias")));
        let logits = file.f32(&format!("{set}.logits"));
        let topk = route(method_of(&set), num_experts, num_topk, &logits, bias.as_deref()).unwrap();
        let (idx, weights) = (file.i32(&format!("{set}.topk_idx")), file.f32(&format!("{set}.topk_weights")));
        assert_eq!((topk.idx.len(), topk.weights.len()), (idx.len(), weights.len()), "{set}");
        for i in 0..idx.len() {
            let at = format!("{set}: token {} slot {}", i / num_topk, i % num_topk);
            assert_eq!(topk.idx[i], idx[i], "{at}: expert");
            let (got, expected) = (topk.weights[i], weights[i]);
            assert!((got - expected).abs() <= 2e-6 * expected.abs(), "{at}: weight {got}, expected {expected}");
        }
        topk.validate(num_experts).unwrap();
    }
}

/// Case C1: all rows of the case through one call, each method.
#[test]
fn case_c1_nan_router_logits() {
    let ordinary = [0.5, -1.0, 2.0, 0.0, 1.0, -0.5, 3.0, -2.0];
    let rows = [
        [NAN; 8],
        [NAN, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        [INF, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        [-INF; 8],
        ordinary,
        [NAN, -INF, NAN, -INF, NAN, -INF, NAN, -INF],
        [NAN, NAN, NAN, NAN, NAN, 1.0, NAN, NAN],
    ];
    let dead = [0, 3, 5];
    let bias = [0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.3];
    for method in all_methods() {
        let bias = method.takes_bias().then_some(&bias[..]);
        let topk = route(method, 8, 2, rows.as_flattened(), bias).unwrap();
        assert_eq!(topk, route(method, 8, 2, rows.as_flattened(), bias).unwrap(), "{}: twice", method.name());
        topk.validate(8).unwrap();
        for (row, (idx, weights)) in topk.idx.chunks(2).zip(topk.weights.chunks(2)).enumerate() {
            let at = format!("{}: row {row}", method.name());
            assert_ne!(idx[0], idx[1], "{at}: distinct");
            if dead.contains(&row) {
                assert_eq!((idx, weights), (&[0, 1][..], &[0.0; 2][..]), "{at}: a dead row");
            } else {
                assert!(weights[0] > 0.0, "{at}: {weights:?}");
            }
        }
        let alone = route(method, 8, 2, &ordinary, bias).unwrap();
        assert_eq!((&topk.idx[8..10], &topk.weights[8..10]), (&alone.idx[..], &alone.weights[..]), "an ordinary row");
        assert_eq!(topk.idx[12], 5, "{}: the one expert that is not NaN", method.name());
        assert_eq!(topk.weights[13], 0.0, "{}: NaN weighs nothing", method.name());
    }
    // (ii) by the numbers: softmax over the finite logits 3 and 2, and +inf takes all of (iii).
    let topk = route(RoutingMethod::Renormalize, 8, 2, rows.as_flattened(), None).unwrap();
    let e = std::f64::consts::E;
    assert_eq!(topk.idx[2..6], [1, 2, 0, 1]);
    for (got, expected) in topk.weights[2..6].iter().zip([e / (e + 1.0), 1.0 / (e + 1.0), 1.0, 0.0]) {
        assert!((f64::from(*got) - expected).abs() < 1e-7, "{got}, not {expected}");
    }
}

#[test]
fn two_infinities_share_and_go_to_the_lower_expert_first() {
    let topk = route(RoutingMethod::Renormalize, 4, 2, &[0.0, INF, 5.0, INF], None).unwrap();
    assert_eq!((topk.idx, topk.weights), (vec![1, 3], vec![0.5, 0.5]));
    let topk = route(RoutingMethod::DeepseekV4 { scaling: 1.0 }, 4, 2, &[INF, 0.0, -INF, 2.0], None).unwrap();
    assert_eq!(topk.idx, [0, 3]);
    assert!(topk.weights.iter().all(|w| w.is_finite()), "{:?}", topk.weights);
}

#[test]
fn scores_that_all_underflow_make_a_dead_row_or_zero_weights() {
    let logits = [-300.0, -200.0, -250.0, -200.0];
    let bias = [0.0, 0.0, 0.0, 1.0];
    for method in [RoutingMethod::MinimaxM2, RoutingMethod::SigmoidRenorm, RoutingMethod::DeepseekV4 { scaling: 1.5 }] {
        let bias = method.takes_bias().then_some(&bias[..]);
        let topk = route(method, 4, 2, &logits, bias).unwrap();
        if matches!(method, RoutingMethod::DeepseekV4 { .. }) {
            // A square root keeps e^-200 in f32: an ordinary row.
            assert_eq!(topk.idx, [1, 3], "{}", method.name());
            assert!(topk.weights.iter().all(|&w| (w - 0.75).abs() < 1e-6), "{:?}", topk.weights);
        } else {
            assert_eq!((topk.idx, topk.weights), (vec![0, 1], vec![0.0; 2]), "{}", method.name());
        }
    }
    // Here the normaliser is 1e-20, so the row is ordinary: chosen by the bias, with weights of 0 / 1e-20.
    let topk = route(RoutingMethod::KimiK3 { scaling: 1.0 }, 4, 2, &logits, Some(&bias)).unwrap();
    assert_eq!((topk.idx, topk.weights), (vec![0, 3], vec![0.0; 2]));
}

#[test]
fn the_bias_selects_and_does_not_weigh() {
    let logits = [1.0, 0.9, 0.0, -3.0];
    for method in all_methods().into_iter().filter(|m| m.takes_bias() && m.groups().is_none()) {
        let topk = route(method, 4, 2, &logits, Some(&[0.0, -10.0, 0.0, 10.0])).unwrap();
        assert_eq!(topk.idx, [0, 3], "{}", method.name());
        assert!(topk.weights[0] > 5.0 * topk.weights[1], "{}: {:?}", method.name(), topk.weights);
        let without = route(method, 4, 2, &logits, None).unwrap();
        assert_eq!(without, route(method, 4, 2, &logits, Some(&[0.0; 4])).unwrap(), "{}: no bias is 0", method.name());
    }
}

#[test]
fn ties_go_to_the_lower_expert_and_group() {
    for method in all_methods() {
        let topk = route(method, 8, 3, &[0.25; 8], None).unwrap();
        assert_eq!(topk.idx, [0, 1, 2], "{}", method.name());
    }
    // A limit that drops nothing is the method without groups.
    let logits: Vec<f32> = (0..16_u8).map(|i| f32::from(i * 7 % 16) / 4.0).collect();
    let all_kept = RoutingMethod::DeepseekV3 { num_groups: 4, topk_group: 4, scaling: 1.0 };
    let k3 = RoutingMethod::KimiK3 { scaling: 1.0 };
    assert_eq!(route(all_kept, 16, 5, &logits, None), route(k3, 16, 5, &logits, None));
}

#[test]
fn configurations_that_are_refused_name_their_numbers() {
    let grouped = |num_groups, topk_group, scaling| RoutingMethod::DeepseekV3 { num_groups, topk_group, scaling };
    let cases: [(RoutingMethod, usize, usize, &[&str]); 12] = [
        (RoutingMethod::Default, 4, 0, &["0", "4"]),
        (RoutingMethod::Default, 4, 5, &["5", "4"]),
        (RoutingMethod::Default, 0, 1, &["1", "0"]),
        (RoutingMethod::Default, usize::MAX, 1, &["32-bit"]),
        (grouped(3, 1, 1.0), 16, 2, &["3", "16"]),
        (grouped(0, 1, 1.0), 16, 2, &["0", "16"]),
        (grouped(4, 5, 1.0), 16, 2, &["5", "4"]),
        (grouped(4, 0, 1.0), 16, 2, &["0", "4"]),
        (grouped(4, 1, 1.0), 16, 6, &["6", "4", "1"]),
        (grouped(4, 2, NAN), 16, 2, &["deepseek_v3", "NaN"]),
        (RoutingMethod::KimiK3 { scaling: 0.0 }, 16, 2, &["kimi_k3", "0"]),
        (RoutingMethod::DeepseekV4 { scaling: -1.5 }, 16, 2, &["deepseek_v4", "-1.5"]),
    ];
    for (method, num_experts, num_topk, parts) in cases {
        let error = validate(method, num_experts, num_topk).unwrap_err();
        let message = error.to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{message} lacks one of {parts:?}");
        assert_eq!(error.exit(), Exit::BadInput);
        let routed = route(method, num_experts, num_topk, &[], None).unwrap_err();
        assert_eq!(routed.to_string(), message, "route checks as validate does");
    }
    // Case B4 (iii) and (v): any k up to E.
    for (num_experts, num_topk) in [(64, 17), (64, 33), (64, 64), (1, 1)] {
        validate(RoutingMethod::Default, num_experts, num_topk).unwrap();
    }
}

#[test]
fn inputs_that_are_refused_name_their_numbers() {
    let k3 = RoutingMethod::KimiK3 { scaling: 1.0 };
    let refused =
        |method, logits: &[f32], bias: Option<&[f32]>| route(method, 4, 2, logits, bias).unwrap_err().to_string();
    assert!(refused(k3, &[0.0; 6], None).contains("6 router logits"));
    assert!(refused(k3, &[0.0; 4], Some(&[0.0; 3])).contains("3 values for 4 experts"));
    assert!(refused(k3, &[0.0; 4], Some(&[0.0, 0.0, NAN, 0.0])).contains("expert 2 is NaN"));
    assert!(refused(RoutingMethod::Renormalize, &[0.0; 4], Some(&[0.0; 4])).contains("renormalize router takes no"));
    let empty = route(k3, 4, 2, &[], None).unwrap();
    assert_eq!((empty.num_tokens(), empty), (0, TopK { num_topk: 2, idx: vec![], weights: vec![] }));
}

/// Case B7, the part of it that needs no run: -1 masks, any other id out of range is named.
#[test]
fn case_b7_masked_ids_pass_and_ids_out_of_range_do_not() {
    let topk = |idx: [i32; 4], weights: [f32; 4]| TopK { num_topk: 2, idx: idx.to_vec(), weights: weights.to_vec() };
    topk([-1, 2, -1, -1], [0.5; 4]).validate(4).unwrap();
    for (id, text) in [(4, "is 4"), (-2, "is -2"), (i32::MAX, "is 2147483647"), (i32::MIN, "is -2147483648")] {
        let message = topk([0, 3, id, 0], [0.5; 4]).validate(4).unwrap_err().to_string();
        let parts = ["token 1, slot 0", text, "4 experts", "0 to 3"];
        assert!(parts.iter().all(|part| message.contains(part)), "{message} lacks one of {parts:?}");
    }
    for weight in [NAN, INF, -INF] {
        let error = topk([0, 3, 1, -1], [0.5, 0.5, 0.5, weight]).validate(4).unwrap_err();
        assert!(matches!(error, RoutingError::Weight { token: 1, slot: 1, .. }), "{error}");
    }
}

/// Case B6, the part of it that needs no run: an expert may take two slots of one token.
#[test]
fn case_b6_repeated_ids_pass() {
    TopK { num_topk: 2, idx: vec![3, 3], weights: vec![0.25, 0.75] }.validate(4).unwrap();
    TopK { num_topk: 3, idx: vec![0, 3, 0], weights: vec![0.25, 0.5, 0.25] }.validate(4).unwrap();
}

#[test]
fn lengths_from_outside_must_fit_together() {
    for (num_topk, num_ids, num_weights) in [(0, 0, 0), (2, 3, 3), (2, 4, 2)] {
        let topk = TopK { num_topk, idx: vec![0; num_ids], weights: vec![0.0; num_weights] };
        assert_eq!(topk.validate(4), Err(RoutingError::TopkLengths { num_topk, num_ids, num_weights }));
    }
}

/// A router of 16 experts: method, bias where it takes one, k, and logits with ties and the odd value that is not finite.
fn routers() -> impl Strategy<Value = (RoutingMethod, Option<Vec<f32>>, usize, Vec<f32>)> {
    let logit = prop_oneof![
        20 => -6.0_f32..6.0,
        4 => (-3_i8..3).prop_map(f32::from),
        1 => prop::sample::select(vec![NAN, INF, -INF, -100.0, 100.0]),
    ];
    let bias = prop::collection::vec(-1.0_f32..1.0, 16);
    let logits = (1_usize..5).prop_flat_map(move |tokens| prop::collection::vec(logit.clone(), tokens * 16));
    (prop::sample::select(all_methods().to_vec()), bias, 1_usize..=8, logits)
        .prop_map(|(method, bias, k, logits)| (method, method.takes_bias().then_some(bias), k, logits))
}

proptest! {
    #[test]
    fn slots_are_distinct_sorted_and_in_range((method, bias, k, logits) in routers()) {
        let topk = route(method, 16, k, &logits, bias.as_deref()).unwrap();
        prop_assert!(topk.validate(16).is_ok());
        prop_assert_eq!(topk.num_tokens(), logits.len() / 16);
        for (token, (idx, weights)) in topk.idx.chunks(k).zip(topk.weights.chunks(k)).enumerate() {
            for slot in 0..k {
                prop_assert!((0..16).contains(&idx[slot]), "token {} slot {}", token, slot);
                prop_assert!(!idx[..slot].contains(&idx[slot]), "token {}: {:?}", token, idx);
                prop_assert!(weights[slot] >= 0.0);
                if slot > 0 {
                    let in_order = weights[slot - 1] > weights[slot]
                        || (weights[slot - 1] == weights[slot] && idx[slot - 1] < idx[slot]);
                    prop_assert!(in_order, "token {} slot {}: {:?} {:?}", token, slot, idx, weights);
                }
            }
        }
    }

    #[test]
    fn weights_sum_to_the_scaling((method, bias, k, logits) in routers()) {
        let topk = route(method, 16, k, &logits, bias.as_deref()).unwrap();
        for (token, (logits, weights)) in logits.chunks(16).zip(topk.weights.chunks(k)).enumerate() {
            let sum: f64 = weights.iter().map(|&w| f64::from(w)).sum();
            let scaling = f64::from(method.scaling());
            match method {
                RoutingMethod::Default => prop_assert!(sum <= 1.0 + 1e-6, "token {}: {}", token, sum),
                RoutingMethod::Llama4 => prop_assert!(weights.iter().all(|&w| w <= 1.0), "token {}", token),
                // Chosen for their bias with scores of 0, or dead: no weight at all. 1e-20 matters under tiny scores alone.
                _ if sum == 0.0 || logits.iter().any(|&l| l.is_nan() || l <= -100.0) => {}
                _ => prop_assert!((sum / scaling - 1.0).abs() < 1e-6, "token {}: {}", token, sum),
            }
        }
    }

    #[test]
    fn a_token_does_not_depend_on_its_neighbours((method, bias, k, logits) in routers()) {
        let together = route(method, 16, k, &logits, bias.as_deref()).unwrap();
        for (token, row) in logits.chunks(16).enumerate() {
            let alone = route(method, 16, k, row, bias.as_deref()).unwrap();
            prop_assert_eq!(&together.idx[token * k..][..k], &alone.idx[..], "token {}", token);
            prop_assert_eq!(&together.weights[token * k..][..k], &alone.weights[..], "token {}", token);
        }
    }

    /// Renumbering the experts renumbers the choice, where nothing ties and no groups tie experts to their numbers.
    #[test]
    fn the_order_of_experts_does_not_matter(
        method in prop::sample::select(all_methods().into_iter().filter(|m| m.groups().is_none()).collect::<Vec<_>>()),
        order in Just((0..16_usize).collect::<Vec<_>>()).prop_shuffle(),
        logits in prop::collection::vec(-6.0_f32..6.0, 16),
        k in 1_usize..=8,
    ) {
        let mut sorted = logits.clone();
        sorted.sort_by(f32::total_cmp);
        prop_assume!(sorted.windows(2).all(|pair| pair[1] - pair[0] > 1e-4));
        let shuffled: Vec<f32> = order.iter().map(|&e| logits[e]).collect();
        let (plain, moved) = (route(method, 16, k, &logits, None).unwrap(), route(method, 16, k, &shuffled, None).unwrap());
        for slot in 0..k {
            let expert = order[usize::try_from(moved.idx[slot]).unwrap()];
            prop_assert_eq!(usize::try_from(plain.idx[slot]).unwrap(), expert, "slot {}", slot);
            let (a, b) = (plain.weights[slot], moved.weights[slot]);
            prop_assert!((a - b).abs() <= 1.2e-7 * a, "slot {}: {} and {}", slot, a, b);
        }
    }

    /// Softmax, top-k, divide by the sum: the other way to write `renormalize`.
    #[test]
    fn renormalize_is_default_divided_by_its_sum(logits in prop::collection::vec(-6.0_f32..6.0, 16), k in 1_usize..=16) {
        let renormalised = route(RoutingMethod::Renormalize, 16, k, &logits, None).unwrap();
        let softmax = route(RoutingMethod::Default, 16, k, &logits, None).unwrap();
        let sum: f32 = softmax.weights.iter().sum();
        for slot in 0..k {
            let (a, b) = (renormalised.weights[slot], softmax.weights[slot] / sum);
            prop_assert!((a - b).abs() <= 1e-6 * a, "slot {}: {} and {}", slot, a, b);
        }
    }
}
