//! Packing and decoding, for every instruction set of the machine.

use super::kernels::{Kernels, LANES, Lane, Panel, RowBlocks};
use super::pack::PackedMatrix;
use super::{Isa, kernels_of};
use crate::checkpoint::tensors::{Projection, ProjectionData, TensorBytes};
use crate::numerics::nvfp4;

fn kernels() -> impl Iterator<Item = (Isa, Box<dyn Kernels>)> {
    Isa::ALL.into_iter().filter_map(|isa| Some((isa, kernels_of(isa).ok()?)))
}

fn owned(bytes: Vec<u8>) -> TensorBytes {
    TensorBytes::Owned(bytes.into())
}

/// `[k, lane]` of a panel, through `decode`.
fn decoded(kernels: &dyn Kernels, panel: Panel<'_>, num_blocks: usize) -> Vec<Lane> {
    let mut out = vec![Lane([f32::NAN; LANES]); num_blocks * LANES];
    kernels.decode(panel, &mut out);
    out
}

/// Every block scale that is no NaN, and -0, with every code at every place of a block: the product is exact.
#[test]
#[expect(clippy::cast_possible_truncation, reason = "codes")]
fn every_code_and_scale_is_exact() {
    // Row r, block b: codes start at r, scales at 16 r + b.
    let (out_features, num_blocks) = (16, 8);
    let packed: Vec<u8> = (0..out_features * num_blocks)
        .flat_map(|block| {
            (0..8)
                .map(move |i| ((block / num_blocks + 2 * i) & 15 | ((block / num_blocks + 2 * i + 1) & 15) << 4) as u8)
        })
        .collect();
    let block_scales: Vec<u8> = (0..128).map(|bits| if bits == 0x7F { 0x80 } else { bits }).collect();
    let width = num_blocks * LANES;
    let projection = Projection {
        out_features,
        in_features: width,
        data: ProjectionData::Nvfp4 {
            packed: owned(packed.clone()),
            block_scales: owned(block_scales.clone()),
            global_scale: 1.0,
            input_scale: None,
        },
    };
    for (isa, kernels) in kernels() {
        let matrix = PackedMatrix::new(&projection, kernels.order()).unwrap();
        let got = decoded(&*kernels, matrix.panel(0), num_blocks);
        for row in 0..out_features {
            let mut expected = vec![0.0; width];
            let (packed, scales) =
                (&packed[row * width / 2..][..width / 2], &block_scales[row * num_blocks..][..num_blocks]);
            nvfp4::dequantise_unscaled(packed, scales, &mut expected);
            for (k, expected) in expected.iter().enumerate() {
                let got = got[k].0[row];
                assert_eq!(got, *expected, "{isa}: row {row}, k {k}");
            }
        }
    }
}

/// Outputs and k that sixteen does not divide are filled up with zeros.
#[test]
fn unquantised_weights_keep_their_bits_and_are_padded() {
    let (out_features, in_features) = (21, 35);
    let value = |row: usize, k: usize| if row < out_features && k < in_features { (row * 37 + k) as f32 } else { 0.0 };
    let all = || (0..out_features * in_features).map(|i| value(i / in_features, i % in_features));
    let bf16 = all().flat_map(|v| half::bf16::from_f32(v).to_le_bytes()).collect();
    let f32 = all().flat_map(f32::to_le_bytes).collect();
    for data in [ProjectionData::Bf16(owned(bf16)), ProjectionData::F32(owned(f32))] {
        let rounds = matches!(data, ProjectionData::Bf16(_));
        let projection = Projection { out_features, in_features, data };
        for (isa, kernels) in kernels() {
            let matrix = PackedMatrix::new(&projection, kernels.order()).unwrap();
            assert_eq!((matrix.num_panels(), matrix.num_blocks()), (2, 3));
            for panel in 0..2 {
                let got = match matrix.panel(panel) {
                    Panel::F32(lanes) => lanes.to_vec(),
                    codes => decoded(&*kernels, codes, 3),
                };
                for (k, lane) in got.iter().enumerate() {
                    for (i, got) in lane.0.iter().enumerate() {
                        let row = panel * LANES + i;
                        let exact = value(row, k);
                        let expected = if rounds { half::bf16::from_f32(exact).to_f32() } else { exact };
                        assert_eq!(*got, expected, "{isa}, bf16: {rounds}: row {row}, k {k}");
                    }
                }
            }
        }
    }
}

/// Fused and chunked products are one chain over k: large terms that cancel show any other order.
#[test]
fn fused_and_chunked_products_are_one_chain() {
    let num_blocks = 5;
    let weights: Vec<Lane> = (0..num_blocks * LANES)
        .map(|k| Lane(std::array::from_fn(|i| [1.0, 1024.0, -1024.0, 0.5][(k * 7 + i) % 4])))
        .collect();
    let bytes = (0..LANES)
        .flat_map(|row| weights.iter().flat_map(move |lane| half::bf16::from_f32(lane.0[row]).to_le_bytes()))
        .collect();
    let projection =
        Projection { out_features: LANES, in_features: num_blocks * LANES, data: ProjectionData::Bf16(owned(bytes)) };
    for num_rows in [1, 2, 3, 4, 5, 6, 7, 12, 13, 25] {
        let x: Vec<Lane> = (0..num_blocks * num_rows)
            .map(|i| Lane(std::array::from_fn(|k| ((i * 31 + k * 17) % 97) as f32 * 1.37 - 60.0)))
            .collect();
        let rows = RowBlocks::new(&x, num_rows);
        for (isa, kernels) in kernels() {
            let matrix = PackedMatrix::new(&projection, kernels.order()).unwrap();
            let mut acc = vec![Lane::default(); num_rows];
            let mut scratch = super::gemm::Scratch::default();
            acc.copy_from_slice(scratch.products(&*kernels, &[matrix.panel(0)], rows));
            for (row, acc) in acc.iter().enumerate() {
                for (i, got) in acc.0.iter().enumerate() {
                    let chain =
                        |sum: f32, k: usize| x[k / LANES * num_rows + row].0[k % LANES].mul_add(weights[k].0[i], sum);
                    let expected = (0..num_blocks * LANES).fold(0.0, chain);
                    assert_eq!(got.to_bits(), expected.to_bits(), "{isa}: row {row} of {num_rows}, output {i}");
                }
            }
        }
    }
}
