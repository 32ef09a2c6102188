//! What the backends refuse, and with which words.

use super::super::{BackendError, ExpertsSpec};
use super::{Format, ProjectionData, Random, SITU, expert, owned, projection, reference, simd};
use crate::backend::{Machine, best_instruction_set, build};
use crate::exit::{Classify, Exit};
use crate::select::InstructionSet;

fn spec(hidden: usize, intermediate: usize, quantise_activations: bool) -> ExpertsSpec {
    ExpertsSpec { hidden, intermediate, activation: SITU, quantise_activations, batch_invariant: true }
}

fn assert_refused(result: Result<(), BackendError>, message: &str) {
    let error = result.expect_err(message);
    assert_eq!(error.to_string(), message);
    assert_eq!(error.exit(), Exit::BadInput);
}

#[test]
fn widths_that_16_does_not_divide_are_refused() {
    for backend in [reference(), simd(1, InstructionSet::Scalar)] {
        let message = "hidden is 136, not a positive multiple of 16, and NVFP4 blocks and kernels want that; \
                       such a layer cannot run";
        assert_refused(backend.experts(spec(136, 64, false), 1).map(drop), message);
        assert!(backend.experts(spec(64, 0, false), 1).is_err());
    }
}

#[test]
fn shapes_of_another_layer_are_refused() {
    let mut rng = Random::new(31);
    for backend in [reference(), simd(1, InstructionSet::Scalar)] {
        let builder = backend.experts(spec(64, 32, false), 1).unwrap();
        let wrong = expert(&mut rng, &spec(32, 64, false), Format::Nvfp4);
        assert_refused(builder.put(0, &wrong), "gate is [64, 32], the layer wants [32, 64]");
    }
}

#[test]
fn data_of_another_length_than_its_shape_is_refused() {
    let mut rng = Random::new(32);
    let mut wrong = projection(&mut rng, 32, 64, Format::Bf16);
    wrong.data = ProjectionData::Bf16(owned(vec![0; 32 * 64 * 2 - 1]));
    for backend in [reference(), simd(1, InstructionSet::Scalar)] {
        assert_refused(backend.linear(&wrong).map(drop), "linear holds 4095 bytes, its shape wants 4096");
    }
}

#[test]
fn quantised_activations_without_an_input_scale_are_refused() {
    let mut rng = Random::new(33);
    let spec = spec(64, 32, true);
    for backend in [reference(), simd(1, InstructionSet::Scalar)] {
        let mut without = expert(&mut rng, &spec, Format::Nvfp4);
        let ProjectionData::Nvfp4 { input_scale, .. } = &mut without.down.data else { unreachable!() };
        *input_scale = None;
        let message = "quantised activations need an input_scale on down; give --activations bf16 to run without";
        assert_refused(backend.experts(spec, 1).unwrap().put(0, &without), message);
        let unquantised = expert(&mut rng, &spec, Format::Bf16);
        assert_refused(backend.experts(spec, 1).unwrap().put(0, &unquantised), message);
    }
}

#[test]
fn unknown_techniques_are_refused() {
    let message = "`cutlas` is not a technique of this build; it has reference, simd, mma_sync, wgmma";
    assert_refused(build("cutlas", &Machine::default()).map(drop), message);
}

#[test]
fn packed_weights_take_the_bytes_of_the_raw_ones() {
    let mut rng = Random::new(34);
    let spec = spec(512, 272, false);
    let expert = expert(&mut rng, &spec, Format::Nvfp4);
    let raw = 3 * (512 * 272 / 2 + 512 * 272 / 16) as u64;
    for backend in [reference(), simd(1, best_instruction_set())] {
        let builder = backend.experts(spec, 1).unwrap();
        builder.put(0, &expert).unwrap();
        let experts = builder.finish().unwrap();
        assert_eq!(experts.weight_bytes(), raw, "{}", backend.technique());
        let bound = experts.workspace_bytes(1024);
        assert!(experts.workspace_bytes(1) < bound);
        assert_eq!(experts.workspace_bytes(1_000_000), bound, "{}: buffers grow with rows", backend.technique());
    }
}
