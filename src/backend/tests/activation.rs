//! The vector activations against the values computed outside this project, and against the oracle's formula.

use proptest::prelude::*;
use serde_json::Value;

use super::{SITU, isas};
use crate::backend::simd::apply_activation;
use crate::numerics::activation::Activation;

/// Values below this have fewer bits than the bound asks for.
const SUBNORMAL_SLACK: f64 = 1.5e-45;

fn assert_close(activation: Activation, g: &[f32], u: &[f32], expected: &[f64]) {
    for isa in isas() {
        let mut out = vec![f32::NAN; g.len()];
        apply_activation(isa, activation, g, u, &mut out).unwrap();
        for (i, (got, expected)) in out.iter().zip(expected).enumerate() {
            let off = (f64::from(*got) - expected).abs();
            assert!(
                off <= 1e-6 * expected.abs() + SUBNORMAL_SLACK,
                "{isa}, {activation:?}: ({:e}, {:e}) gives {got:e}, expected {expected:e}",
                g[i],
                u[i]
            );
            assert_eq!(got.is_sign_negative(), expected.is_sign_negative(), "{isa}, {activation:?}: sign at {i}");
        }
    }
}

#[test]
fn fixture_values_are_met_on_every_instruction_set() {
    let text = include_bytes!("../../../tests/fixtures/expected/activation.json");
    let root: Value = serde_json::from_slice(text).unwrap();
    let rows = root["rows"].as_array().unwrap();
    assert!(rows.len() > 50, "the fixture holds {} rows", rows.len());
    for row in rows {
        let number = |column: usize| row[column].as_f64().unwrap();
        let (g, u) = (number(2) as f32, number(3) as f32);
        let linear_beta = row[1].as_f64().map(|value| value as f32);
        let situ = Activation::Situ { beta: number(0) as f32, linear_beta };
        assert_close(situ, &[g], &[u], &[number(4)]);
        assert_close(Activation::Swiglu, &[g], &[u], &[number(5)]);
    }
}

fn tanh_limit(x: f64, limit: f64) -> f64 {
    limit * (x / limit).tanh()
}

/// The formulae in f64, with the system's functions rather than the library's.
fn formula(activation: Activation, g: f32, u: f32) -> f64 {
    let (g, u) = (f64::from(g), f64::from(u));
    let sigmoid = |g: f64| 1.0 / (1.0 + (-g).exp());
    match activation {
        Activation::Swiglu => g * sigmoid(g) * u,
        Activation::SwigluClamp { limit } => {
            let limit = f64::from(limit);
            let g = g.min(limit);
            g * sigmoid(g) * u.clamp(-limit, limit)
        }
        Activation::Situ { beta, linear_beta } => {
            let up = linear_beta.map_or(u, |limit| tanh_limit(u, f64::from(limit)));
            tanh_limit(g, f64::from(beta)) * sigmoid(g) * up
        }
    }
}

#[test]
fn a_dense_sweep_of_both_branches_is_met() {
    for activation in [
        Activation::Swiglu,
        Activation::SwigluClamp { limit: 7.0 },
        SITU,
        Activation::Situ { beta: 0.5, linear_beta: None },
        Activation::Situ { beta: 2.0, linear_beta: Some(10.0) },
    ] {
        let mut g = Vec::new();
        let mut u = Vec::new();
        for step in -40_000..=40_000 {
            let x = step as f32 / 331.0;
            g.extend([x, 0.7, x]);
            u.extend([1.3, x, -x]);
        }
        for exponent in -126..=13 {
            let x = 1.37 * 2.0_f32.powi(exponent);
            g.extend([x, -x]);
            u.extend([1.0, 1.0]);
        }
        let expected: Vec<f64> = g.iter().zip(&u).map(|(g, u)| formula(activation, *g, *u)).collect();
        assert_close(activation, &g, &u, &expected);
    }
}

#[test]
fn huge_values_do_not_become_nan() {
    for activation in [Activation::Swiglu, Activation::SwigluClamp { limit: 10.0 }, SITU] {
        let g = [f32::MAX, -f32::MAX, 1e30, -1e30, -1e4];
        let u = [1.0, 1.0, 0.5, 3.0, 1e4];
        let expected: Vec<f64> = g.iter().zip(&u).map(|(g, u)| formula(activation, *g, *u)).collect();
        assert_close(activation, &g, &u, &expected);
    }
}

#[test]
fn nan_stays_nan() {
    for activation in [Activation::Swiglu, Activation::SwigluClamp { limit: 10.0 }, SITU] {
        for isa in isas() {
            let mut out = [0.0; 2];
            apply_activation(isa, activation, &[f32::NAN, 1.0], &[1.0, f32::NAN], &mut out).unwrap();
            assert!(out[0].is_nan() && out[1].is_nan(), "{isa}, {activation:?}: {out:?}");
        }
    }
}

proptest! {
    #[test]
    fn instruction_sets_give_equal_bits(
        values in prop::collection::vec((any::<f32>(), any::<f32>()), 1..40),
        beta in 0.01_f32..100.0,
    ) {
        let (g, u): (Vec<f32>, Vec<f32>) = values.into_iter().unzip();
        for activation in [Activation::Swiglu, Activation::Situ { beta, linear_beta: Some(beta) }] {
            let mut first: Option<Vec<u32>> = None;
            for isa in isas() {
                let mut out = vec![0.0; g.len()];
                apply_activation(isa, activation, &g, &u, &mut out).unwrap();
                // Which NaN it is depends on the order of operands, which compilers may swap.
                let bits: Vec<u32> = out.iter().map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() }).collect();
                prop_assert_eq!(first.get_or_insert(bits.clone()), &bits, "{}", isa);
            }
        }
    }
}
