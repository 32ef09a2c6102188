//! `simd` against `reference`: every format, both modes, odd widths, empty experts.

use proptest::prelude::*;

use super::super::ExpertsSpec;
use super::{Case, Format, SITU, assert_rows_close, assert_same_bits, isas, projection, reference, simd};
use crate::backend::best_instruction_set;
use crate::numerics::activation::Activation;
use crate::select::InstructionSet;

fn spec(hidden: usize, intermediate: usize, quantise_activations: bool) -> ExpertsSpec {
    ExpertsSpec { hidden, intermediate, activation: SITU, quantise_activations, batch_invariant: true }
}

fn check(case: &Case, what: &str) {
    let (expected, expected_stats) = case.run(&reference());
    let may_differ = if case.spec.quantise_activations { 4 } else { 0 };
    for isa in isas() {
        let (got, stats) = case.run(&simd(2, isa));
        assert_rows_close(&got, &expected, case.spec.hidden, may_differ, &format!("{what}, {isa}"));
        assert_eq!(stats.fc2_input.num_blocks, expected_stats.fc2_input.num_blocks, "{what}, {isa}: blocks");
        for ((id, rows), (expected_id, expected_rows)) in
            stats.rows_by_identity.iter().zip(&expected_stats.rows_by_identity)
        {
            assert_eq!((id.technique, id.quant, rows), ("simd", expected_id.quant, expected_rows), "{what}, {isa}");
        }
        assert_eq!(stats.rows_by_identity.len(), expected_stats.rows_by_identity.len(), "{what}, {isa}");
    }
}

#[test]
fn formats_and_row_counts_agree() {
    let rows = [0, 1, 2, 5, 0, 17, 64, 0];
    for format in [Format::Nvfp4, Format::Bf16, Format::F32] {
        for (hidden, intermediate) in [(16, 16), (48, 144), (144, 48)] {
            let case = Case::new(1, spec(hidden, intermediate, false), &[format; 8], &rows);
            check(&case, &format!("{format:?}, {hidden} x {intermediate}"));
        }
    }
}

#[test]
fn quantised_activations_agree() {
    for (hidden, intermediate) in [(16, 16), (48, 144), (144, 48)] {
        let case = Case::new(2, spec(hidden, intermediate, true), &[Format::Nvfp4; 8], &[0, 1, 2, 5, 0, 17, 64, 0]);
        check(&case, &format!("quantised, {hidden} x {intermediate}"));
    }
}

/// gpt-oss's width, which 128 does not divide; 257 rows and two waves. Plain Rust would take minutes.
#[test]
fn wide_layers_and_many_rows_agree() {
    let best = best_instruction_set();
    for quantise in [false, true] {
        for (widths, rows) in [((2880, 144), [257, 0, 3]), ((144, 2880), [1, 257, 0]), ((96, 64), [400, 800, 300])] {
            let case = Case::new(3, spec(widths.0, widths.1, quantise), &[Format::Nvfp4; 3], &rows);
            let (expected, _) = case.run(&reference());
            let (got, _) = case.run(&simd(2, best));
            let may_differ = if quantise { 6 } else { 0 };
            assert_rows_close(&got, &expected, widths.0, may_differ, &format!("{widths:?}, quantised: {quantise}"));
        }
    }
}

#[test]
fn formats_mix_within_a_group_and_within_an_expert() {
    let mut case =
        Case::new(4, spec(80, 48, false), &[Format::Nvfp4, Format::Bf16, Format::Nvfp4, Format::F32], &[3, 7, 12, 1]);
    let other = case.experts[1].gate.clone();
    case.experts[2].gate = other;
    check(&case, "mixed");
    let (_, stats) = case.run(&simd(1, InstructionSet::Scalar));
    let names: Vec<(String, u64)> = stats.rows_by_identity.iter().map(|(id, rows)| (id.to_string(), *rows)).collect();
    let expected = [("lockstep.simd.grouped_gemm.w4a16_nvfp4", 15), ("lockstep.simd.grouped_gemm.none", 8)];
    assert_eq!(names, expected.map(|(name, rows)| (name.to_owned(), rows)));
}

#[test]
fn dense_projections_agree() {
    let mut rng = super::Random::new(5);
    for format in [Format::F32, Format::Bf16, Format::Nvfp4] {
        for (out_features, in_features) in [(1, 16), (60, 80), (896, 112)] {
            // Blocks divide NVFP4 widths only.
            let in_features = if format == Format::Nvfp4 { in_features } else { in_features + 3 };
            let weight = projection(&mut rng, out_features, in_features, format);
            for num_rows in [0, 1, 3, 33, 400] {
                let x = rng.normals(num_rows * in_features);
                let mut expected = vec![f32::NAN; num_rows * out_features];
                reference().linear(&weight).unwrap().forward(&x, &mut expected);
                let mut first: Option<Vec<f32>> = None;
                for isa in isas() {
                    let what = format!("{format:?}, {num_rows} x {in_features} -> {out_features}, {isa}");
                    let mut got = vec![f32::NAN; expected.len()];
                    simd(2, isa).linear(&weight).unwrap().forward(&x, &mut got);
                    let found = crate::numerics::metrics::compare(&got, &expected);
                    assert!(found.rel_l2 <= 1e-5, "{what}: {found:?}");
                    assert_same_bits(&got, first.get_or_insert(got.clone()), out_features, &what);
                }
            }
        }
    }
}

/// A token with a value within rounding of a threshold of FC2's input, which several of the rows are.
#[test]
fn rows_of_a_token_on_a_threshold_agree() {
    let activation = Activation::Situ { beta: 0.5, linear_beta: None };
    let spec = ExpertsSpec { activation, ..spec(16, 112, true) };
    check(&Case::new(1_263_283_696_708_470_014, spec, &[Format::Nvfp4], &[10]), "on thresholds");
}

fn activations() -> impl Strategy<Value = Activation> {
    prop_oneof![
        Just(Activation::Swiglu),
        Just(Activation::SwigluClamp { limit: 1.5 }),
        Just(SITU),
        Just(Activation::Situ { beta: 0.5, linear_beta: None }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_layer_agrees(
        seed in any::<u64>(),
        blocks in (1_usize..=9, 1_usize..=9),
        activation in activations(),
        mode in prop_oneof![Just((Format::Nvfp4, true)), Just((Format::Nvfp4, false)), Just((Format::Bf16, false))],
        rows in prop::collection::vec(0_usize..20, 1..5),
    ) {
        let (format, quantise_activations) = mode;
        let (hidden, intermediate) = (16 * blocks.0, 16 * blocks.1);
        let spec = ExpertsSpec { hidden, intermediate, activation, quantise_activations, batch_invariant: true };
        let formats = vec![format; rows.len()];
        check(&Case::new(seed, spec, &formats, &rows), "any layer");
    }
}
