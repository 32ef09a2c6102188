//! What only a machine with GPUs can show. Every test is ignored with that reason and run by name: `one_gpu_*` on one,
//! `two_gpus_*` on two of one host with NCCL; `tests/gpu/run.sh` runs what the machine has GPUs for.
//!
//! `LOCKSTEP_TEST_TRANSPORT` names what carries tokens in all of them that don't name it themselves.
//!
//! Beside it, `cargo nextest run --lib --run-ignored only -- gpu_` holds kernels to the host's code value by value: SiTU and
//! SwiGLU in fp32 within 1e-4 (`gpu_activations_value_by_value`), codes and block scales bit for bit (`gpu_quantises_*`,
//! `gpu_requantises_*`).

mod bits;
mod cache;
mod cases;
mod counts;
mod graphs;
mod hazards;
mod layers;
mod limits;
mod nvlink;
mod overlap;
mod two_levels;

use crate::support::compare::{Tolerance, assert_rows};
use crate::support::gpu::GPU_BACKENDS;
use crate::support::made::{S_ANSWER, S_ANSWER_W4A4};
use crate::support::run::{ACTIVATIONS, Run};
use crate::support::tensor::Tensor;

/// Both GPU backends, each in both activation modes.
fn backends_and_modes() -> impl Iterator<Item = (&'static str, &'static str)> {
    GPU_BACKENDS.into_iter().flat_map(|backend| ACTIVATIONS.map(|activations| (backend, activations)))
}

/// What expert 0 of S makes of a 1 on a GPU: with bf16 activations FC2's input is a bf16, so that its row is one too.
fn answer(activations: &str) -> f64 {
    match activations {
        "bf16" => S_ANSWER,
        "quantised" => S_ANSWER_W4A4,
        other => panic!("unknown activation mode {other}"),
    }
}

/// With rows that come home as they were computed, so that answers are exact.
fn with_exact_rows<'a>(run: &Run<'a>) -> Run<'a> {
    run.clone().key("dispatch", "combine_dtype", "f32")
}

/// Checks an f32 output of S whose rows came home exactly: `factors[row] * c` at `h0`, 0 elsewhere.
#[track_caller]
fn assert_answers(found: &Tensor, h0: usize, activations: &str, factors: &[f64], what: &str) {
    let wanted: Vec<f64> = factors.iter().map(|factor| factor * answer(activations)).collect();
    assert_rows(found, h0, &wanted, Tolerance::Relative(1e-6), &format!("{what}, {activations}"));
}
