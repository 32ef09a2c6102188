//! Bits of a row depend on its token and expert alone.

use super::super::{ExpertBatch, ExpertsSpec};
use super::{Case, Format, Random, SITU, assert_same_bits, isas, projection, reference, simd};
use crate::backend::best_instruction_set;
use crate::select::InstructionSet;
use crate::select::tactics::Tactic;

const FORMATS: [Format; 4] = [Format::Nvfp4, Format::Nvfp4, Format::Nvfp4, Format::Nvfp4];

fn spec(quantise_activations: bool) -> ExpertsSpec {
    ExpertsSpec { hidden: 96, intermediate: 176, activation: SITU, quantise_activations, batch_invariant: true }
}

#[test]
fn instruction_sets_and_threads_give_equal_bits() {
    for (formats, quantise) in
        [(FORMATS, true), (FORMATS, false), ([Format::Bf16, Format::F32, Format::Nvfp4, Format::Bf16], false)]
    {
        for rows in [[1, 0, 2, 5], [17, 64, 0, 3], [257, 6, 7, 4]] {
            let case = Case::new(11, spec(quantise), &formats, &rows);
            let (expected, expected_stats) = case.run(&simd(1, InstructionSet::Scalar));
            for isa in isas() {
                for num_threads in 1..=3 {
                    let (got, stats) = case.run(&simd(num_threads, isa));
                    let what = format!("{formats:?}, rows {rows:?}, {isa}, {num_threads} threads");
                    assert_same_bits(&got, &expected, case.spec.hidden, &what);
                    assert_eq!(stats, expected_stats, "{what}");
                }
            }
        }
    }
}

#[test]
fn tactics_give_equal_bits() {
    for rows in [[1, 0, 2, 5], [17, 64, 0, 3], [257, 400, 7, 4]] {
        for quantise in [true, false] {
            let case = Case::new(18, spec(quantise), &FORMATS, &rows);
            for backend in [reference(), simd(2, best_instruction_set())] {
                let experts = case.pack(&backend);
                let run = |tactic| {
                    let mut out = vec![f32::NAN; case.row_token.len() * case.spec.hidden];
                    let stats = experts.forward(&ExpertBatch { tactic, ..case.batch() }, &mut out).expect("runs");
                    (out, stats)
                };
                let (untuned, counts) = run(Tactic::UNTUNED);
                for (idx, name) in experts.tactics().iter().enumerate() {
                    let (out, stats) = run(Tactic::new(idx));
                    let what = format!("{}, rows {rows:?}, quantised: {quantise}, {name}", backend.technique());
                    assert_same_bits(&out, &untuned, case.spec.hidden, &what);
                    assert_eq!(stats.fc2_input, counts.fc2_input, "{what}");
                    assert!(stats.tactic.is_none_or(|ran| ran == *name), "{what}: {:?} ran", stats.tactic);
                }
            }
        }
    }
}

/// Case H3: a probe keeps its bits whatever rows share its expert, and wherever it stands among them.
#[test]
fn h3_a_row_does_not_depend_on_its_neighbours() {
    for quantise in [false, true] {
        let case = Case::new(12, spec(quantise), &FORMATS[..1], &[1100]);
        for (name, backend) in [("reference", reference()), ("simd", simd(2, best_instruction_set()))] {
            let experts = case.pack(&backend);
            let probe = 5_u32;
            let run = |row_token: &[u32]| {
                let mut out = vec![f32::NAN; row_token.len() * case.spec.hidden];
                let offsets = [0, row_token.len()];
                experts
                    .forward(&ExpertBatch { row_token, expert_offsets: &offsets, ..case.batch() }, &mut out)
                    .unwrap();
                out
            };
            let alone = run(&[probe]);
            for others in [1, 2, 3, 4, 5, 6, 11, 15, 16, 31, 63, 64, 127, 128, 383, 384, 1023] {
                for position in [0, others / 2, others] {
                    let mut row_token: Vec<u32> = case.row_token[..others].to_vec();
                    row_token.insert(position, probe);
                    let out = run(&row_token);
                    let row = &out[position * case.spec.hidden..][..case.spec.hidden];
                    let what = format!("{name}, quantised: {quantise}, row {position} among {others} others");
                    assert_same_bits(row, &alone, case.spec.hidden, &what);
                }
            }
        }
    }
}

#[test]
fn shuffled_rows_keep_their_bits() {
    let case = Case::new(13, spec(true), &FORMATS, &[40, 13, 0, 9]);
    let mut shuffled = case.clone();
    let mut origin: Vec<usize> = (0..case.row_token.len()).collect();
    let mut rng = Random::new(14);
    for offsets in case.expert_offsets.windows(2) {
        for row in offsets[0]..offsets[1] {
            origin.swap(row, offsets[0] + rng.below(offsets[1] - offsets[0]));
        }
    }
    shuffled.row_token = origin.iter().map(|row| case.row_token[*row]).collect();
    for isa in isas() {
        let (straight, _) = case.run(&simd(2, isa));
        let (got, _) = shuffled.run(&simd(2, isa));
        for (row, from) in origin.iter().enumerate() {
            let width = case.spec.hidden;
            let what = format!("{isa}, row {row}, in order row {from}");
            assert_same_bits(&got[row * width..][..width], &straight[from * width..][..width], width, &what);
        }
    }
}

/// Case H1: nothing is added in the order in which threads finish.
#[test]
fn h1_repeats_give_equal_bits() {
    let case = Case::new(15, spec(true), &FORMATS, &[33, 17, 1, 8]);
    let backend = simd(3, best_instruction_set());
    let experts = case.pack(&backend);
    let mut first = vec![f32::NAN; case.row_token.len() * case.spec.hidden];
    experts.forward(&case.batch(), &mut first).unwrap();
    for repeat in 0..200 {
        let mut out = vec![f32::NAN; first.len()];
        experts.forward(&case.batch(), &mut out).unwrap();
        assert_same_bits(&out, &first, case.spec.hidden, &format!("repeat {repeat}"));
    }
}

/// Calls that overlap do not share buffers.
#[test]
fn overlapping_calls_keep_their_bits() {
    let case = Case::new(16, spec(true), &FORMATS, &[9, 30, 0, 4]);
    for backend in [reference(), simd(2, best_instruction_set())] {
        let experts = case.pack(&backend);
        let run = || {
            let mut out = vec![f32::NAN; case.row_token.len() * case.spec.hidden];
            experts.forward(&case.batch(), &mut out).unwrap();
            out
        };
        let alone = run();
        std::thread::scope(|scope| {
            let callers: Vec<_> = (0..3).map(|_| scope.spawn(|| (0..20).map(|_| run()).collect::<Vec<_>>())).collect();
            for caller in callers {
                for out in caller.join().unwrap() {
                    assert_same_bits(&out, &alone, case.spec.hidden, backend.technique());
                }
            }
        });
    }
}

/// A dense projection's rows do not depend on their number either.
#[test]
fn dense_rows_do_not_depend_on_their_neighbours() {
    let mut rng = Random::new(17);
    let (out_features, in_features, num_rows) = (60, 176, 401);
    for format in [Format::F32, Format::Bf16] {
        let weight = projection(&mut rng, out_features, in_features, format);
        let x = rng.normals(num_rows * in_features);
        for backend in [reference(), simd(2, best_instruction_set())] {
            let linear = backend.linear(&weight).unwrap();
            let mut all = vec![f32::NAN; num_rows * out_features];
            linear.forward(&x, &mut all);
            for (first, count) in [(0, 1), (400, 1), (17, 2), (3, 7), (100, 13), (5, 64)] {
                let mut some = vec![f32::NAN; count * out_features];
                linear.forward(&x[first * in_features..][..count * in_features], &mut some);
                let expected = &all[first * out_features..][..count * out_features];
                let what = format!("{}, {format:?}, {count} rows from {first}", backend.technique());
                assert_same_bits(&some, expected, out_features, &what);
            }
        }
    }
}
