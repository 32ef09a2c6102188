//! NVFP4 against expected bits, against its definition, and against ModelOpt's own checkpoint.

use proptest::prelude::*;

use super::*;
use crate::numerics::fixtures::{self, Tensors, assert_same_bits};

fn quantise(x: &[f32], input_scale: f32) -> (Vec<u8>, Vec<u8>, QuantCounts) {
    let mut packed = vec![0xaa; x.len() / 2];
    let mut scales = vec![0xaa; x.len() / BLOCK];
    let counts = quantise_row(x, input_scale, &mut packed, &mut scales);
    (packed, scales, counts)
}

fn dequantise(packed: &[u8], scales: &[u8], global_scale: f32) -> Vec<f32> {
    let mut out = vec![f32::NAN; packed.len() * 2];
    dequantise_row(packed, scales, global_scale, &mut out);
    out
}

/// The definition, an operation at a time, with none of the module's own shortcuts.
fn quantise_plainly(x: &[f32], input_scale: f32) -> (Vec<u8>, Vec<u8>) {
    let gs = 1.0_f32 / input_scale;
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for block in x.chunks(BLOCK) {
        let amax = block.iter().fold(0.0_f32, |a, v| a.max(v.abs()));
        let bits = float8::F8E4M3::from_f32((amax / 6.0) * gs).to_bits();
        let scale = float8::F8E4M3::from_bits(bits).to_f32();
        scales.push(bits);
        for &v in block {
            let sign = if v.is_sign_negative() { 8 } else { 0 };
            codes.push(if scale == 0.0 { sign } else { e2m1::encode(v * (gs / scale)) });
        }
    }
    (codes.chunks(2).map(|c| c[0] | (c[1] << 4)).collect(), scales)
}

fn assert_fused_equals_two_steps(x: &[f32], input_scale: f32) {
    let (packed, scales, counts) = quantise(x, input_scale);
    let mut two_steps = vec![f32::NAN; x.len()];
    dequantise_unscaled(&packed, &scales, &mut two_steps);
    let mut fused = vec![f32::NAN; x.len()];
    assert_eq!(quantise_unscaled(x, input_scale, &mut fused), counts);
    assert_same_bits(&fused, &two_steps, "fused");
}

#[test]
fn quantisation_matches_the_expected_bits() {
    let file = Tensors::new(fixtures::NVFP4_QUANTIZE);
    let mut num_sets = 0;
    while file.has(&format!("{num_sets}.x")) {
        let name = |part: &str| format!("{num_sets}.{part}");
        let x = file.bf16(&name("x"));
        let input_scale = file.f32(&name("input_scale"))[0];
        let (expected_packed, expected_scales) = (file.bytes(&name("packed")), file.bytes(&name("block_scale")));
        let expected_values = file.f32(&name("value"));
        let in_features = file.shape(&name("x"))[1];
        for (row, x) in x.chunks(in_features).enumerate() {
            let at = row * in_features;
            let (packed, scales, _) = quantise(x, input_scale);
            assert_eq!(packed, expected_packed[at / 2..][..packed.len()], "set {num_sets}, row {row}: codes");
            assert_eq!(scales, expected_scales[at / BLOCK..][..scales.len()], "set {num_sets}, row {row}: scales");
            let values = dequantise(&packed, &scales, input_scale);
            assert_same_bits(&values, &expected_values[at..][..in_features], &format!("set {num_sets}, row {row}"));
            assert_fused_equals_two_steps(x, input_scale);
        }
        num_sets += 1;
    }
    assert!(num_sets >= 7, "found {num_sets} sets");
}

/// Quantising what a checkpoint's tensor stands for gives the tensor back, scales and codes. (Its global scale is given:
/// ModelOpt takes the larger of gate's and up's for both.)
#[test]
fn weights_of_modelopt_come_back_bit_for_bit() {
    let file = Tensors::new(fixtures::QWEN3_TINY);
    let names: Vec<String> =
        file.0.names().into_iter().filter_map(|n| n.strip_suffix(".weight_scale_2").map(String::from)).collect();
    assert!(names.len() > 20, "found {} NVFP4 projections", names.len());
    let (num_projections, mut num_shared_scales) = (names.len(), 0);
    for name in names {
        let packed = file.bytes(&format!("{name}.weight"));
        let scales = file.bytes(&format!("{name}.weight_scale"));
        let global_scale = file.f32(&format!("{name}.weight_scale_2"))[0];
        let in_features = 2 * file.shape(&format!("{name}.weight"))[1];
        let values = dequantise(&packed, &scales, global_scale);
        let own_scale = quantise_weights(&values, in_features).global_scale;
        if own_scale < global_scale * (1.0 - 1e-6) {
            num_shared_scales += 1;
        } else {
            assert!(own_scale < global_scale * (1.0 + 1e-6), "{name}: global scale {global_scale} became {own_scale}");
        }
        let again = quantise_weights_with(&values, in_features, global_scale);
        for (block, (got, expected)) in again.block_scales.iter().zip(&scales).enumerate() {
            assert_eq!(got, expected, "{name}: scale of block {block}");
        }
        for (i, (got, expected)) in again.packed.iter().zip(&packed).enumerate() {
            // A stored -0 (a small negative weight) loses its sign the second time.
            let without_negative_zero = |byte: u8| {
                let nibble = |n: u8| if n == 8 { 0 } else { n };
                (nibble(byte & 15), nibble(byte >> 4))
            };
            assert_eq!(without_negative_zero(*got), without_negative_zero(*expected), "{name}: byte {i}");
        }
    }
    // Of gate and up at most one can have the smaller scale; down has its own.
    assert!(num_shared_scales * 3 <= num_projections, "{num_shared_scales} of {num_projections} global scales shrank");
}

#[test]
fn weights_of_zeros_and_zero_blocks() {
    let zeros = quantise_weights(&[0.0; 32], 32);
    assert_eq!(zeros, QuantisedWeights { packed: vec![0; 16], block_scales: vec![0x38; 2], global_scale: 1.0 });
    let mut w = [0.0; 48];
    w[0] = -2688.0;
    w[1] = 6.0 * 448.0;
    // Tiny beside the rest: its block's scale would be 0, and becomes the smallest.
    w[32] = 1e-3;
    w[33] = -0.0;
    w[34] = -1e-6;
    let quantised = quantise_weights(&w, 48);
    assert_eq!(quantised.global_scale, 1.0);
    assert_eq!(quantised.block_scales, [0x7e, 0x38, 0x01]);
    assert_eq!((quantised.packed[0], quantised.packed[16], quantised.packed[17]), (0x7f, 0x01, 0x08));
}

#[test]
fn weights_that_are_not_finite_give_a_scale_that_is_not() {
    let mut w = [1.0; 32];
    w[3] = f32::NAN;
    assert!(quantise_weights(&w, 16).global_scale.is_nan());
    w[3] = f32::NEG_INFINITY;
    assert!(quantise_weights(&w, 16).global_scale.is_infinite());
}

#[test]
fn products_are_exact_in_f32_bf16_and_f16() {
    for code in 0..16_u8 {
        for scale in (0..=255_u8).filter(|&s| !e4m3::is_nan(s)) {
            let exact = f64::from(e2m1::decode(code)) * f64::from(e4m3::decode(scale));
            let product = e2m1::decode(code) * e4m3::decode(scale);
            let what = format!("code {code} scale {scale:#04x}");
            assert_eq!(f64::from(product), exact, "{what} in f32");
            assert_eq!(half::bf16::from_f32(product).to_f64(), exact, "{what} in bf16");
            assert_eq!(half::f16::from_f32(product).to_f64(), exact, "{what} in f16");
        }
    }
}

#[test]
fn zero_blocks_keep_signs_and_count_as_nothing() {
    let mut x = [0.0; BLOCK];
    x[1] = -0.0;
    let (packed, scales, counts) = quantise(&x, 0.5);
    assert_eq!((packed[0], packed[1], scales[0]), (0x80, 0, 0));
    assert_eq!(counts, QuantCounts { num_blocks: 1, num_saturated: 0, num_zeroed: 0 });
    assert_fused_equals_two_steps(&x, 0.5);
}

#[test]
fn vanishing_blocks_are_counted_and_keep_signs() {
    // 6 * 2^-9 is the value of the smallest scale; well under half of it rounds to no scale at all.
    let x: Vec<f32> = (0..32).map(|i| if i % 2 == 0 { 1e-3 } else { -1e-3 }).collect();
    let (packed, scales, counts) = quantise(&x, 1.0);
    assert_eq!((&packed[..], &scales[..]), (&[0x80; 16][..], &[0; 2][..]));
    assert_eq!(counts, QuantCounts { num_blocks: 2, num_saturated: 0, num_zeroed: 2 });
    assert_fused_equals_two_steps(&x, 1.0);
}

/// Case C8, the part of it that needs no layer: an activation beyond `2688 * input_scale` clips, and is counted.
#[test]
fn case_c8_activation_beyond_its_scale_saturates_and_is_counted() {
    let mut x = [0.0; 2 * BLOCK];
    x[0] = 4000.0;
    x[BLOCK] = -2688.0;
    let (packed, scales, counts) = quantise(&x, 1.0);
    let values = dequantise(&packed, &scales, 1.0);
    assert_eq!((values[0], values[BLOCK]), (2688.0, -2688.0));
    assert_eq!(counts, QuantCounts { num_blocks: 2, num_saturated: 1, num_zeroed: 0 });
    // What FC1 then sees with weights of 1/4000: 0.672 instead of 1.
    assert_eq!(values[0] / 4000.0, 0.672);
}

/// Case C8 (ii), (iii): the largest product times 1/2688, and the smallest scale times 2^9, are exactly 1.
#[test]
fn case_c8_ends_of_the_range_are_exact() {
    assert_eq!(dequantise(&[0x07; 8], &[0x7e], 1.0 / 2688.0)[0], 1.0);
    assert_eq!(dequantise(&[0x02; 8], &[0x01], 512.0)[0], 1.0);
    // (iv): 128 products of 2688 sum to 344,064, exactly, in fp32.
    let mut row = [0.0; 128];
    dequantise_unscaled(&[0x77; 64], &[0x7e; 8], &mut row);
    assert_eq!(row.iter().sum::<f32>(), 344_064.0);
}

#[test]
fn a_scale_that_rounds_to_448_is_not_saturated() {
    for (amax, saturated) in [(2688.0, 0), (2784.0, 0), (2784.1, 1), (f32::INFINITY, 1)] {
        let mut x = [1.0; BLOCK];
        x[7] = amax;
        let (_, scales, counts) = quantise(&x, 1.0);
        assert_eq!((scales[0], counts.num_saturated), (0x7e, saturated), "amax {amax}");
    }
}

/// Values a rounding away from a tie, computed outside this project: every other order of the same operations (dividing by
/// the input scale, or by its product with the block scale) falls on the other side.
#[test]
fn ties_follow_the_order_of_the_reciprocals() {
    let mut x = [0.0; BLOCK];
    x[0] = f32::from_bits(0x388d_b6db);
    let (_, scales, _) = quantise(&x, 1.0 / 2688.0);
    assert_eq!(scales, [16], "(max / 6) * (1 / input_scale)");

    x[0] = f32::from_bits(0x3b09_2493);
    x[1] = f32::from_bits(0x3a64_924b);
    let (packed, scales, _) = quantise(&x, 3.0 / 2688.0);
    assert_eq!((scales[0], packed[0]), (42, 0x47), "x * ((1 / input_scale) / scale)");
}

#[test]
fn nan_poisons_its_block_and_no_other() {
    let mut x = [1.0; 3 * BLOCK];
    x[BLOCK + 3] = f32::NAN;
    assert_fused_equals_two_steps(&x, 1.0);
    let mut out = [0.0; 3 * BLOCK];
    let counts = quantise_unscaled(&x, 1.0, &mut out);
    for (i, v) in out.iter().enumerate() {
        assert_eq!(v.is_nan(), (BLOCK..2 * BLOCK).contains(&i), "element {i} is {v}");
    }
    assert_eq!(counts, QuantCounts { num_blocks: 3, num_saturated: 0, num_zeroed: 0 });
}

#[test]
fn the_smallest_input_scale_does_not_overflow() {
    let mut x = [0.0; BLOCK];
    // Just enough for the smallest block scale, where the factor is largest.
    x[3] = MIN_INPUT_SCALE / 64.0;
    let (packed, scales, _) = quantise(&x, MIN_INPUT_SCALE);
    assert_eq!((packed[0], packed[1], scales[0]), (0, 0x70, 1));
    assert_fused_equals_two_steps(&x, MIN_INPUT_SCALE);
}

#[test]
fn empty_rows_are_no_blocks() {
    assert_eq!(quantise(&[], 1.0), (vec![], vec![], QuantCounts::default()));
    assert_eq!(quantise_unscaled(&[], 1.0, &mut []), QuantCounts::default());
}

#[test]
fn counts_add_up() {
    let mut sum = QuantCounts { num_blocks: 1, num_saturated: 2, num_zeroed: 3 };
    sum += QuantCounts { num_blocks: 10, num_saturated: 20, num_zeroed: 30 };
    assert_eq!(sum, QuantCounts { num_blocks: 11, num_saturated: 22, num_zeroed: 33 });
}

/// Rows of whole blocks whose magnitudes span many binades, with zeros of both signs among them.
fn rows() -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![
        8 => (-1.0_f32..1.0, -20_i32..20).prop_map(|(m, e)| m * 2.0_f32.powi(e)),
        1 => Just(0.0),
        1 => Just(-0.0),
        1 => prop::num::f32::NORMAL,
    ];
    (1_usize..6).prop_flat_map(move |num_blocks| prop::collection::vec(value.clone(), num_blocks * BLOCK))
}

fn scales() -> impl Strategy<Value = f32> {
    (1.0_f32..2.0, -30_i32..30).prop_map(|(m, e)| m * 2.0_f32.powi(e))
}

proptest! {
    #[test]
    fn quantisation_follows_its_definition(x in rows(), input_scale in scales()) {
        let (packed, scales, counts) = quantise(&x, input_scale);
        prop_assert_eq!((&packed, &scales), (&quantise_plainly(&x, input_scale).0, &quantise_plainly(&x, input_scale).1));
        prop_assert_eq!(counts.num_blocks, (x.len() / BLOCK) as u64);
    }

    #[test]
    fn fused_equals_two_steps(x in rows(), input_scale in scales()) {
        assert_fused_equals_two_steps(&x, input_scale);
    }

    #[test]
    fn signs_survive(x in rows(), input_scale in scales()) {
        let mut out = vec![f32::NAN; x.len()];
        quantise_unscaled(&x, input_scale, &mut out);
        for (i, (x, q)) in x.iter().zip(&out).enumerate() {
            prop_assert_eq!(x.is_sign_negative(), q.is_sign_negative(), "element {}: {} became {}", i, x, q);
        }
    }

    /// A scale of a power of two moves the input's exponent and nothing else.
    #[test]
    fn powers_of_two_commute(x in rows(), exponent in -20_i32..20) {
        let power = 2.0_f32.powi(exponent);
        let tame: Vec<f32> = x.iter().map(|v| v.clamp(-1e6, 1e6)).map(|v| if v.abs() < 1e-6 { 0.0 } else { v }).collect();
        let moved: Vec<f32> = tame.iter().map(|v| v * power).collect();
        prop_assert_eq!(quantise(&tame, 1.0), quantise(&moved, power));
    }

    /// Where nothing saturates or vanishes, an error is at most half a step at the top, a sixth of the block's largest
    /// value, and what the scale's own rounding adds.
    #[test]
    fn round_trip_stays_close(x in prop::collection::vec(-1.0_f32..1.0, 4 * BLOCK)) {
        let amax = x.iter().fold(0.0_f32, |a, v| a.max(v.abs()));
        prop_assume!(amax > 0.0);
        let (packed, scales, counts) = quantise(&x, amax / MAX);
        prop_assert_eq!(counts.num_saturated, 0);
        let back = dequantise(&packed, &scales, amax / MAX);
        for (block, (x, back)) in x.chunks(BLOCK).zip(back.chunks(BLOCK)).enumerate() {
            let block_amax = x.iter().fold(0.0_f32, |a, v| a.max(v.abs()));
            for (i, (x, back)) in x.iter().zip(back).enumerate() {
                let bound = block_amax * (1.0 / 6.0) * 1.0725 + amax / MAX / 512.0 * 3.0;
                prop_assert!((x - back).abs() <= bound, "block {} element {}: {} became {}", block, i, x, back);
            }
        }
    }

    /// What NVFP4 can hold it holds: quantising a dequantised weight changes no value.
    #[test]
    fn weights_are_a_fixed_point(w in prop::collection::vec(-1.0_f32..1.0, 8 * BLOCK)) {
        let once = quantise_weights(&w, 4 * BLOCK);
        let values = dequantise(&once.packed, &once.block_scales, once.global_scale);
        let twice = quantise_weights(&values, 4 * BLOCK);
        prop_assert_eq!(&once.block_scales, &twice.block_scales);
        let again = dequantise(&twice.packed, &twice.block_scales, twice.global_scale);
        for (i, (a, b)) in values.iter().zip(&again).enumerate() {
            prop_assert!((a - b).abs() <= a.abs() * 1e-6, "element {}: {} became {}", i, a, b);
        }
    }
}
