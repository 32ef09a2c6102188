//! Packing and decoding, for every instruction set of the machine.

use super::kernels::{Kernels, LANES, Lane, Panel, RowBlocks};
use super::kernels_of;
use super::pack::PackedMatrix;
use super::plan::Chunks;
use crate::checkpoint::tensors::{Projection, ProjectionData, TensorBytes};
use crate::numerics::{e2m1, e4m3, nvfp4};
use crate::select::InstructionSet;

fn kernels() -> impl Iterator<Item = (InstructionSet, Box<dyn Kernels>)> {
    InstructionSet::ALL.into_iter().filter_map(|isa| Some((isa, kernels_of(isa).ok()?)))
}

fn owned(bytes: Vec<u8>) -> TensorBytes {
    TensorBytes::Owned(bytes.into())
}

/// `[k, lane]` of a panel, through `decode`; NVFP4's with their block scales.
fn decoded(kernels: &dyn Kernels, panel: Panel<'_>, num_blocks: usize) -> Vec<Lane> {
    let mut values = vec![Lane([f32::NAN; LANES]); num_blocks * LANES];
    let mut scales = vec![Lane([1.0; LANES]); num_blocks];
    kernels.decode(panel, &mut values, &mut scales);
    let scaled = |(k, value): (usize, &Lane)| Lane(std::array::from_fn(|i| value.0[i] * scales[k / LANES].0[i]));
    values.iter().enumerate().map(scaled).collect()
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

/// Sixteen outputs of NVFP4 codes and block scales.
struct Nvfp4Weights {
    num_blocks: usize,
    packed: Vec<u8>,
    block_scales: Vec<u8>,
}

impl Nvfp4Weights {
    /// Codes and scales whose products differ by many binary orders.
    #[expect(clippy::cast_possible_truncation, reason = "bytes")]
    fn new(num_blocks: usize) -> Self {
        Self {
            num_blocks,
            packed: (0..LANES * num_blocks * 8).map(|i| (i * 151 + i / 7 * 29) as u8).collect(),
            block_scales: (0..LANES * num_blocks).map(|i| (i * 43 % 127) as u8).collect(),
        }
    }

    fn projection(&self) -> Projection {
        let data = ProjectionData::Nvfp4 {
            packed: owned(self.packed.clone()),
            block_scales: owned(self.block_scales.clone()),
            global_scale: 1.0,
            input_scale: None,
        };
        Projection { out_features: LANES, in_features: self.num_blocks * LANES, data }
    }

    /// The promised order: a chain for each block, from zero, and one over the blocks.
    fn sum(&self, output: usize, x: impl Fn(usize) -> f32) -> f32 {
        let row = output * self.num_blocks;
        (0..self.num_blocks).fold(0.0, |acc, block| {
            let code = |k: usize| self.packed[(row + block) * 8 + k / 2] >> (k % 2 * 4) & 15;
            let chain = |sum: f32, k: usize| x(block * LANES + k).mul_add(e2m1::decode(code(k)), sum);
            let scale = e4m3::decode(self.block_scales[row + block]);
            (0..LANES).fold(0.0, chain).mul_add(scale, acc)
        })
    }
}

const ROW_COUNTS: [usize; 12] = [1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17, 37];

fn inputs(num_blocks: usize, num_rows: usize) -> Vec<Lane> {
    let lane = |i: usize| Lane(std::array::from_fn(|k| ((i * 31 + k * 17) % 97) as f32 * 1.37 - 60.0));
    (0..num_blocks * num_rows).map(lane).collect()
}

/// Every number of rows gives `expected(x, output)`, where `x` gives a row's value at k.
fn products_are(projection: &Projection, num_blocks: usize, expected: impl Fn(&dyn Fn(usize) -> f32, usize) -> f32) {
    for num_rows in ROW_COUNTS {
        let x = inputs(num_blocks, num_rows);
        for (isa, kernels) in kernels() {
            let matrix = PackedMatrix::new(projection, kernels.order()).unwrap();
            // Two panels, as a kernel may take several at a time.
            let panels = [matrix.panel(0), matrix.panel(0)];
            let mut scratch = super::gemm::Scratch::default();
            for chunks in [Chunks::ByRows, Chunks::Long] {
                let sums = scratch.products(&*kernels, chunks, &panels, RowBlocks::new(&x, num_rows));
                for (row, sums) in sums.iter().enumerate() {
                    for (output, got) in sums.0.iter().enumerate() {
                        let x = |k: usize| x[k / LANES * num_rows + row % num_rows].0[k % LANES];
                        let expected = expected(&x, output);
                        let what = format!("{isa}, {chunks:?}: row {row} of {num_rows}, output {output}");
                        assert_eq!(got.to_bits(), expected.to_bits(), "{what}");
                    }
                }
            }
        }
    }
}

/// Fused and chunked products of unquantised weights are one chain over k: large terms that cancel show another order.
#[test]
fn bf16_products_are_one_chain() {
    let num_blocks = 19;
    let weight = |output: usize, k: usize| [1.0, 1024.0, -1024.0, 0.5][(k * 7 + output) % 4];
    let all = (0..LANES).flat_map(|output| (0..num_blocks * LANES).map(move |k| weight(output, k)));
    let bytes = all.flat_map(|value| half::bf16::from_f32(value).to_le_bytes()).collect();
    let data = ProjectionData::Bf16(owned(bytes));
    let projection = Projection { out_features: LANES, in_features: num_blocks * LANES, data };
    products_are(&projection, num_blocks, |x, output| {
        (0..num_blocks * LANES).fold(0.0, |sum, k| x(k).mul_add(weight(output, k), sum))
    });
}

/// Fused and chunked products of NVFP4 weights are a chain a block and a chain of blocks.
#[test]
fn nvfp4_products_are_chains_of_block_chains() {
    let weights = Nvfp4Weights::new(19);
    products_are(&weights.projection(), 19, |x, output| weights.sum(output, x));
}
