//! Images taken apart as the kernels do it, against the weights they were made of.

use proptest::prelude::*;

use super::*;
use crate::checkpoint::tensors::TensorBytes;
use crate::numerics::nvfp4;

fn bytes(bytes: &[u8]) -> TensorBytes {
    TensorBytes::Owned(bytes.into())
}

fn nvfp4_of(out_features: usize, in_features: usize, codes: &[u8], scales: &[u8]) -> Projection {
    let data = ProjectionData::Nvfp4 {
        packed: bytes(&codes[..out_features * in_features / 2]),
        block_scales: bytes(&scales[..out_features * in_features / BLOCK]),
        global_scale: 1.0,
        input_scale: None,
    };
    Projection { out_features, in_features, data }
}

/// Bytes without pattern.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..len).map(|_| next()).collect()
}

/// The weights of a matrix, without the global scale.
fn weights(projection: &Projection) -> Vec<f64> {
    match &projection.data {
        ProjectionData::Nvfp4 { packed, block_scales, .. } => {
            let mut values = vec![0.0; projection.out_features * projection.in_features];
            nvfp4::dequantise_unscaled(packed, block_scales, &mut values);
            values.into_iter().map(f64::from).collect()
        }
        ProjectionData::Bf16(bytes) => {
            bytes.as_chunks().0.iter().map(|bits| half::bf16::from_le_bytes(*bits).to_f64()).collect()
        }
        ProjectionData::F32(_) => unreachable!("not packed"),
    }
}

/// What a warp's lanes hold of a step after decoding: `[tile][MMA][lane][register][e]`, by the instructions of
/// `kernels/weights.cuh`.
fn decode_step(format: Format, step: &[u8]) -> Vec<f64> {
    let mut values = Vec::new();
    let word = |at: usize| u32::from_le_bytes(step[at..][..4].try_into().unwrap());
    for (tile, mma, lane) in (0..2).flat_map(|j| (0..4).flat_map(move |q| (0..32).map(move |lane| (j, q, lane)))) {
        for register in 0..4 {
            let pair = match format {
                Format::Bf16 => word((4 * tile + mma) * TILE_BYTES + 16 * lane + 4 * register),
                Format::Nvfp4 => {
                    let at = tile * TILE_BYTES + 16 * lane + mma / 2 * 8;
                    decoded_pair(word(at), word(at + 4), mma % 2, register)
                }
            };
            let scale = match format {
                Format::Bf16 => 1.0,
                Format::Nvfp4 => {
                    let bits = step[2 * TILE_BYTES + 4 * lane + 2 * tile + register % 2];
                    // The bits are those of a bf16 of 2^118 times the scale; the kernels' products are 2^-8 of the weights'.
                    bf16(u16::from(bits) * 16 + 0x7600) * 256.0
                }
            };
            for half in [pair & 0xffff, pair >> 16] {
                let product = bf16(u16::try_from(half).unwrap()) * scale;
                if format == Format::Nvfp4 {
                    assert_eq!(half::bf16::from_f64(product / 256.0).to_f64() * 256.0, product, "exact in bf16");
                }
                values.push(product);
            }
        }
    }
    values
}

fn bf16(bits: u16) -> f64 {
    half::bf16::from_bits(bits).to_f64()
}

fn decoded_pair(w0: u32, w1: u32, mma: usize, register: usize) -> u32 {
    const CODE: u32 = 0x81C0_81C0;
    const HIGH: u32 = 0x8100_8100;
    const LOW: u32 = 0x00C0_00C0;
    match (mma, register) {
        (0, 0) => w0 & CODE,
        (0, 1) => w0.rotate_right(5) & CODE,
        (0, 2) => (w0 << 6) & CODE,
        (0, _) => ((w1 >> 7) & LOW) | ((w0 << 5) & HIGH),
        (_, 0) => w1 & CODE,
        (_, 1) => (w1 << 3) & CODE,
        (_, 2) => (w1 << 6) & CODE,
        (_, _) => ((w1 >> 4) & LOW) | (w0.rotate_right(6) & HIGH),
    }
}

/// Compares every decoded value of an image with the matrix that `row_of` names, and with zero beyond it.
fn check(image: &Image, row_of: impl Fn(usize, usize, usize, usize) -> (usize, usize), matrices: &[&Projection]) {
    let expected: Vec<Vec<f64>> = matrices.iter().map(|matrix| weights(matrix)).collect();
    let (rows, width) = (matrices[0].out_features, matrices[0].in_features);
    assert_eq!(image.num_steps, width.div_ceil(STEP_K));
    assert_eq!(image.bytes.len(), image.num_units * image.num_steps * image.format.step_bytes());
    for (index, step) in image.bytes.chunks(image.format.step_bytes()).enumerate() {
        let (unit, step_idx) = (index / image.num_steps, index % image.num_steps);
        for (at, value) in decode_step(image.format, step).into_iter().enumerate() {
            let (e, register, lane, mma, tile) = (at % 2, at / 2 % 4, at / 8 % 32, at / 256 % 4, at / 1024);
            let k = step_idx * STEP_K + 16 * (lane % 4) + 4 * mma + 2 * (register / 2) + e;
            let (matrix, row) = row_of(unit, tile, register % 2, lane / 4);
            let wanted = if row < rows && k < width { expected[matrix][row * width + k] } else { 0.0 };
            assert!(value == wanted, "row {row}, k {k} of matrix {matrix}: {value} instead of {wanted}");
        }
    }
}

fn check_fc1(gate: &Projection, up: &Projection) {
    let image = pack_fc1(gate, up).unwrap();
    assert_eq!(image.num_units, gate.out_features / 16);
    check(&image, |unit, tile, half, g| (half, 16 * unit + 2 * g + tile), &[gate, up]);
}

fn check_fc2(down: &Projection) {
    let image = pack_fc2(down).unwrap();
    assert_eq!(image.num_units, down.out_features.div_ceil(32));
    check(&image, |unit, tile, half, g| (0, 32 * unit + 4 * g + 2 * tile + half), &[down]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn images_decode_to_the_weights(rows in 1_usize..5, blocks in 1_usize..10, seed in any::<u64>()) {
        let (rows, width) = (16 * rows, 16 * blocks);
        let codes = noise(rows * width, seed);
        // No NaN; signs and zeros as they come.
        let scales: Vec<u8> =
            noise(rows * width / 8, !seed).into_iter().map(|b| if e4m3::is_nan(b) { b ^ 0x40 } else { b }).collect();
        let half = rows * width / 2;
        check_fc1(&nvfp4_of(rows, width, &codes, &scales), &nvfp4_of(rows, width, &codes[half..], &scales[half / 8..]));
        check_fc2(&nvfp4_of(rows, width, &codes, &scales));
    }

    #[test]
    fn bf16_images_hold_the_weights(rows in 1_usize..5, blocks in 1_usize..10, seed in any::<u64>()) {
        let (rows, width) = (16 * rows, 16 * blocks);
        // Exponents below that of infinity.
        let values: Vec<u8> = noise(4 * rows * width, seed).into_iter().map(|b| b & 0xbf).collect();
        let (first, second) = values.split_at(2 * rows * width);
        let matrix = |values| Projection { out_features: rows, in_features: width, data: ProjectionData::Bf16(bytes(values)) };
        check_fc1(&matrix(first), &matrix(second));
        check_fc2(&matrix(first));
    }
}

#[test]
fn every_code_under_every_scale() {
    // Row r holds code r in all places, block b scale b: zero, subnormal, normal, negative.
    let codes: Vec<u8> = (0_u8..16).flat_map(|code| vec![code * 0x11; 256 * 8]).collect();
    let scales: Vec<u8> = (0..16).flat_map(|_| (0_u8..=255).map(|b| if e4m3::is_nan(b) { 0 } else { b })).collect();
    let matrix = nvfp4_of(16, 256 * 16, &codes, &scales);
    check_fc2(&matrix);
    check_fc1(&matrix, &matrix);
}

#[test]
fn what_does_not_pack_is_refused() {
    let nvfp4 = nvfp4_of(16, 32, &noise(256, 1), &[0x38; 32]);
    let bf16 = Projection { out_features: 16, in_features: 32, data: ProjectionData::Bf16(bytes(&[0; 1024])) };
    let f32 = Projection { out_features: 16, in_features: 32, data: ProjectionData::F32(bytes(&[0; 2048])) };
    assert!(matches!(pack_fc1(&nvfp4, &bf16), Err(PackError::Mixed { gate: "NVFP4", up: "bf16" })));
    assert!(matches!(pack_fc2(&f32), Err(PackError::F32)));
    let mut scales = [0x38; 32];
    scales[2 * 5 + 1] = 0xff;
    let nan = nvfp4_of(16, 32, &noise(256, 1), &scales);
    assert!(matches!(pack_fc2(&nan), Err(PackError::NanScale { row: 5, block: 1 })));
    assert!(matches!(pack_fc1(&nvfp4, &nan), Err(PackError::NanScale { row: 5, block: 1 })));
}
