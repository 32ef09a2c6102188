//! Faults of other systems, reduced to small inputs with the right answer: one test a case, named after it.
//!
//! Fixture S makes nearly every answer `c * sum of p_j * 2^(e_j)`, see [`crate::support::made`].

mod a_traffic;
mod b_shapes;
mod c_numerics;
pub(crate) mod d_files;
mod d_layout;
mod f_cache;
mod g_death;
mod h_determinism;
mod i_yaml;
mod j_memory;

use crate::support::compare::{Tolerance, assert_rows};
use crate::support::made::{S_ANSWER, S_ANSWER_W4A4, S_ANSWER_W4A16};
use crate::support::run::{ACTIVATIONS, BACKENDS};
use crate::support::tensor::Tensor;

/// Both backends, each in both activation modes.
fn backends_and_modes() -> impl Iterator<Item = (&'static str, &'static str)> {
    BACKENDS.into_iter().flat_map(|backend| ACTIVATIONS.map(|activations| (backend, activations)))
}

/// What expert 0 of S makes of a 1, before rounding, in an activation mode.
fn answer(activations: &str) -> f64 {
    match activations {
        "bf16" => S_ANSWER_W4A16,
        "quantised" => S_ANSWER_W4A4,
        other => panic!("unknown activation mode {other}"),
    }
}

/// Checks an f32 output of S: `factors[row] * c` at `h0`, 0 elsewhere.
#[track_caller]
fn assert_answers(found: &Tensor, h0: usize, activations: &str, factors: &[f64], what: &str) {
    let wanted: Vec<f64> = factors.iter().map(|factor| factor * answer(activations)).collect();
    assert_rows(found, h0, &wanted, Tolerance::Relative(1e-6), &format!("{what}, {activations}"));
}

/// Checks a bf16 output of S, which is the same in both activation modes.
#[track_caller]
fn assert_bf16_answers(found: &Tensor, h0: usize, factors: &[f64], ulps: i32, what: &str) {
    let wanted: Vec<f64> = factors.iter().map(|factor| factor * S_ANSWER).collect();
    assert_rows(found, h0, &wanted, Tolerance::Ulps(ulps), what);
}
