//! The oracle against expected values and hand-made ends of the range; constants and texts that are refused.

use std::error::Error;

use proptest::prelude::*;

use super::*;
use crate::numerics::fixtures;

fn situ(beta: f32, linear_beta: f32) -> Activation {
    Activation::situ(beta, Some(linear_beta)).unwrap()
}

/// 1e-6 relative, and half a step of the smallest f32 where the value is subnormal.
fn assert_close(got: f32, expected: f64, what: &str) {
    let slack = 1e-6 * expected.abs() + f64::from(f32::from_bits(1)) * 0.5001;
    assert!((f64::from(got) - expected).abs() <= slack, "{what} is {got:e}, expected {expected:e}");
    assert_eq!(got.is_sign_negative(), expected.is_sign_negative(), "{what}: sign of {got:e}");
}

#[test]
#[expect(clippy::cast_possible_truncation, reason = "the table's inputs are f32 written as f64")]
fn matches_the_expected_table() {
    let table = fixtures::activation();
    assert_eq!(table["columns"], serde_json::json!(["beta", "linear_beta", "gate", "up", "situ", "swiglu"]));
    let rows = table["rows"].as_array().unwrap();
    assert!(rows.len() >= 100);
    for (i, row) in rows.iter().enumerate() {
        let at = |column: usize| row[column].as_f64().unwrap();
        let (g, u) = (at(2) as f32, at(3) as f32);
        assert_close(situ(at(0) as f32, at(1) as f32).apply(g, u), at(4), &format!("row {i}: situ({g}, {u})"));
        assert_close(Activation::Swiglu.apply(g, u), at(5), &format!("row {i}: swiglu({g}, {u})"));
    }
}

#[test]
fn without_linear_beta_the_up_branch_is_linear() {
    let linear = Activation::situ(4.0, None).unwrap();
    // 4 tanh(2) sigmoid(8) = 3.85481...; times 30.
    assert_close(linear.apply(8.0, 30.0), 115.644_544_2, "situ:4 of (8, 30)");
    assert_eq!(linear.apply(8.0, 30.0), 30.0 * linear.apply(8.0, 1.0));
    // Case E5: g = 8, u = 30 tells the three apart.
    assert!((situ(4.0, 25.0).apply(8.0, 30.0) - 80.34).abs() < 0.005);
    assert!((situ(5.0, 25.0).apply(8.0, 30.0) - 96.01).abs() < 0.005);
    assert!((Activation::Swiglu.apply(8.0, 30.0) - 239.92).abs() < 0.005);
}

#[test]
fn the_clamp_bounds_gate_above_and_up_on_both_sides() {
    let clamp = Activation::swiglu_clamp(10.0).unwrap();
    for (g, u, same_g, same_u) in [
        (3.0, -4.0, 3.0, -4.0),
        (50.0, 1.0, 10.0, 1.0),
        (-50.0, 1.0, -50.0, 1.0),
        (2.0, 99.0, 2.0, 10.0),
        (2.0, -99.0, 2.0, -10.0),
        (f32::INFINITY, f32::NEG_INFINITY, 10.0, -10.0),
    ] {
        assert_eq!(clamp.apply(g, u).to_bits(), Activation::Swiglu.apply(same_g, same_u).to_bits(), "({g}, {u})");
    }
}

#[test]
fn ends_of_the_range() {
    let production = situ(4.0, 25.0);
    assert_eq!(production.apply(1e38, 1e38), 100.0);
    assert_eq!(production.apply(1e38, -1e38), -100.0);
    assert_eq!(production.apply(f32::INFINITY, f32::INFINITY), 100.0);
    assert_eq!(production.apply(-1e38, 1e38).to_bits(), (-0.0_f32).to_bits());
    assert_eq!(Activation::Swiglu.apply(-1e38, 1e38).to_bits(), (-0.0_f32).to_bits());
    assert_eq!(Activation::Swiglu.apply(1e38, 1e38), f32::INFINITY);
    assert_eq!(Activation::Swiglu.apply(1e-20, 1e-10), 5e-31);
    // Constants at their own ends: a tanh that is linear, and one that is a step.
    assert_close(situ(f32::MAX, f32::MAX).apply(2.0, 3.0), 5.284_782_467_867_294, "huge constants");
    assert_eq!(situ(f32::from_bits(1), 25.0).apply(0.0, 1.0), 0.0);
    assert_close(situ(1e-30, 1e-5).apply(100.0, 100.0), 1e-35, "tiny constants");
}

#[test]
fn nan_comes_out_as_nan() {
    for activation in ["swiglu", "swiglu_clamp:10", "situ:4", "situ:4,25"].map(|t| Activation::parse(t).unwrap()) {
        assert!(activation.apply(f32::NAN, 1.0).is_nan(), "{activation}: gate");
        assert!(activation.apply(1.0, f32::NAN).is_nan(), "{activation}: up");
    }
}

#[test]
fn constants_are_finite_and_positive() {
    for value in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (name, result) in [
            ("beta", Activation::situ(value, Some(25.0))),
            ("linear_beta", Activation::situ(4.0, Some(value))),
            ("limit", Activation::swiglu_clamp(value)),
        ] {
            let error = result.expect_err(name);
            let message = error.to_string();
            assert!(message.contains(&format!("{name} is {value}")), "{message}");
            assert_eq!(error.exit(), Exit::BadInput);
        }
    }
    assert_eq!(Activation::situ(4.0, None), Ok(Activation::Situ { beta: 4.0, linear_beta: None }));
}

#[test]
fn parts_that_do_not_go_together_are_refused() {
    use ActivationKind::{Situ, Swiglu};
    assert_eq!(Activation::from_parts(Situ, Some(4.0), Some(25.0), None), Activation::situ(4.0, Some(25.0)));
    assert_eq!(Activation::from_parts(Situ, Some(4.0), None, None), Activation::situ(4.0, None));
    assert_eq!(Activation::from_parts(Swiglu, None, None, None), Ok(Activation::Swiglu));
    assert_eq!(Activation::from_parts(Swiglu, None, None, Some(10.0)), Activation::swiglu_clamp(10.0));
    let refused = |kind, beta, linear_beta, clamp| Activation::from_parts(kind, beta, linear_beta, clamp).unwrap_err();
    assert_eq!(refused(Situ, Some(4.0), Some(25.0), Some(10.0)), ActivationError::ClampWithSitu { limit: 10.0 });
    assert_eq!(refused(Situ, None, Some(25.0), None), ActivationError::MissingBeta);
    assert_eq!(
        refused(Swiglu, None, Some(25.0), None),
        ActivationError::ConstantWithSwiglu { name: "linear_beta", value: 25.0 }
    );
    assert!(matches!(refused(Situ, Some(f32::NAN), None, None), ActivationError::Constant { name: "beta", .. }));
    assert!(matches!(refused(Swiglu, None, None, Some(0.0)), ActivationError::Constant { name: "limit", .. }));
}

#[test]
fn texts() {
    assert_eq!(Activation::parse("situ:4,25"), Ok(situ(4.0, 25.0)));
    assert_eq!(Activation::parse("situ:.5"), Activation::situ(0.5, None));
    assert_eq!("swiglu_clamp:1e1".parse(), Activation::swiglu_clamp(10.0));
    assert_eq!(Activation::parse("swiglu"), Ok(Activation::Swiglu));
    for text in [
        "",
        "silu",
        "SwiGLU",
        "swiglu:1",
        "swiglu ",
        "situ",
        "situ:",
        "situ:4,",
        "situ:,25",
        "situ:4,25,1",
        "situ:4, 25",
        "situ:four",
        "situ:0",
        "situ:-4",
        "situ:nan",
        "situ:4,inf",
        "situ:1e39",
        "situ:1e-60",
        "swiglu_clamp",
        "swiglu_clamp:0",
        "swiglu_clamp:1,2",
        "situ:1_0",
    ] {
        let message = Activation::parse(text).expect_err(text).to_string();
        assert!(message.contains(&format!("`{text}`")) && message.contains("situ:BETA,LINEAR_BETA"), "{message}");
    }
    let cause = |text| Activation::parse(text).unwrap_err().source().map(ToString::to_string);
    assert_eq!(cause("situ:4,inf").as_deref(), Some("linear_beta is inf"));
    assert_eq!(cause("situ:four").as_deref(), Some("beta is `four`, which is no number"));
    assert_eq!(cause("gelu"), None);
}

fn activations() -> impl Strategy<Value = Activation> {
    let constant = || prop::num::f32::POSITIVE | prop::num::f32::SUBNORMAL;
    let constant = move || constant().prop_map(f32::abs).prop_filter("valid", |&v| is_valid(v));
    prop_oneof![
        Just(Activation::Swiglu),
        constant().prop_map(|limit| Activation::SwigluClamp { limit }),
        (constant(), prop::option::of(constant()))
            .prop_map(|(beta, linear_beta)| Activation::Situ { beta, linear_beta }),
    ]
}

proptest! {
    #[test]
    fn text_comes_back_bit_for_bit(activation in activations()) {
        prop_assert_eq!(Activation::parse(&activation.to_string()), Ok(activation));
    }

    #[test]
    fn finite_in_is_never_nan_out(activation in activations(), g in prop::num::f32::NORMAL, u in prop::num::f32::NORMAL) {
        prop_assert!(!activation.apply(g, u).is_nan(), "{}({}, {})", activation, g, u);
    }

    #[test]
    fn situ_is_bounded_and_odd_in_up(
        beta in 0.1_f32..50.0, linear_beta in 0.1_f32..50.0, g in -1e3_f32..1e3, u in -1e3_f32..1e3,
    ) {
        let value = situ(beta, linear_beta).apply(g, u);
        prop_assert!(value.abs() <= beta * linear_beta * 1.000_001);
        prop_assert_eq!(value.to_bits(), (-situ(beta, linear_beta).apply(g, -u)).to_bits());
    }

    /// Large constants make SiTU SwiGLU: the series of tanh starts with its argument.
    #[test]
    fn large_constants_make_swiglu(g in -5.0_f32..5.0, u in -5.0_f32..5.0) {
        let (a, b) = (situ(1e5, 1e5).apply(g, u), Activation::Swiglu.apply(g, u));
        prop_assert!((a - b).abs() <= 1e-6 * b.abs(), "{} and {}", a, b);
    }
}
