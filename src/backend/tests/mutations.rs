//! Each way of being wrong moves a result far more than the bound that right results are held to.

use super::super::ExpertsSpec;
use super::oracle::{self, Fault};
use super::{Case, Format, SITU, assert_rows_close, isas, reference, simd};
use crate::numerics::metrics::compare;

/// What right backends are held to.
const BOUND: f64 = 1e-5;

fn case(quantise_activations: bool) -> Case {
    let spec =
        ExpertsSpec { hidden: 64, intermediate: 96, activation: SITU, quantise_activations, batch_invariant: true };
    Case::new(21, spec, &[Format::Nvfp4; 3], &[4, 7, 5])
}

fn assert_caught(quantise_activations: bool, fault: Fault) {
    let case = case(quantise_activations);
    let right = oracle::run(&case, None);
    let wrong = compare(&oracle::run(&case, Some(fault)), &right);
    assert!(wrong.rel_l2 > 50.0 * BOUND, "{fault:?} moves the result by {:.1e} only", wrong.rel_l2);
}

#[test]
fn backends_agree_with_an_independent_oracle() {
    for quantise in [false, true] {
        let case = case(quantise);
        let right = oracle::run(&case, None);
        let (got, _) = case.run(&reference());
        assert_rows_close(&got, &right, case.spec.hidden, 0, &format!("reference, quantised: {quantise}"));
        for isa in isas() {
            let (got, _) = case.run(&simd(2, isa));
            assert_rows_close(&got, &right, case.spec.hidden, 0, &format!("{isa}, quantised: {quantise}"));
            assert!(compare(&got, &right).rel_l2 <= BOUND);
        }
    }
}

#[test]
fn swapped_gate_and_up_are_caught() {
    assert_caught(false, Fault::SwapsGateAndUp);
    assert_caught(true, Fault::SwapsGateAndUp);
}

#[test]
fn one_global_scale_for_gate_and_up_is_caught() {
    assert_caught(false, Fault::SharesGateScale);
    assert_caught(true, Fault::SharesGateScale);
}

#[test]
fn another_experts_fc2_input_scale_is_caught() {
    assert_caught(true, Fault::TakesAnothersInputScale);
}

#[test]
fn a_bf16_copy_before_fc2_quantisation_is_caught() {
    assert_caught(true, Fault::RoundsToBf16BeforeQuantising);
}

#[test]
fn an_unquantised_fc2_input_is_caught() {
    assert_caught(true, Fault::LeavesFc2Unquantised);
}

#[test]
fn a_dropped_linear_beta_and_swiglu_for_situ_are_caught() {
    for quantise in [false, true] {
        assert_caught(quantise, Fault::DropsLinearBeta);
        assert_caught(quantise, Fault::RunsSwiglu);
    }
}

#[test]
fn a_dropped_token_scale_is_caught() {
    assert_caught(true, Fault::DropsTokenScale);
}

#[test]
fn an_off_by_one_expert_is_caught() {
    assert_caught(false, Fault::ShiftsExperts);
    assert_caught(true, Fault::ShiftsExperts);
}
