//! The kernel that quantises activations against the host's code, bit for bit: codes, block scales and counts.

use super::Rng;
use crate::cuda::{Device, DeviceBuffer, Function, LaunchShape, Module, Stream};
use crate::jit::kernels::{QuantiseArguments, QuantiseVariant};
use crate::jit::{Arch, Compiler};
use crate::numerics::nvfp4::{self, BLOCK};

/// Whole rows of 16 blocks.
const NUM_VALUES: usize = 39_063 * 256;

/// Blocks that are special throughout: zeros of both signs, the smallest and largest subnormals, infinities, one value alone.
const SPECIAL: [[f32; 4]; 6] = [
    [0.0, -0.0, 0.0, -0.0],
    [f32::from_bits(1), -f32::from_bits(1), f32::from_bits(0x007F_FFFF), 0.0],
    [f32::INFINITY, 1.0, f32::NEG_INFINITY, -1.0],
    [f32::MAX, f32::MIN, f32::MIN_POSITIVE, 0.0],
    [6.0, 5.0, 0.25, -0.25],
    [448.0 * 6.0, 464.0 * 6.0, 465.0 * 6.0, 2.5],
];

/// Values about an input scale, from far below to far above what it holds: a quarter on or beside ties, some subnormal.
fn values(rng: &mut Rng, input_scale: f32) -> Vec<f32> {
    let mut x = Vec::with_capacity(NUM_VALUES);
    for special in SPECIAL {
        x.extend((0..BLOCK).map(|i| special[i % 4] * input_scale));
        x.extend((0..BLOCK).map(|i| special[i % 4]));
    }
    while x.len() < NUM_VALUES {
        let size = input_scale * 2.0_f32.powi(rng.below(34) as i32 - 16);
        let tie = |rng: &mut Rng| (rng.below(65) as f32 - 32.0) / 4.0;
        for i in 0..BLOCK {
            let value = if i % 4 == 0 { tie(rng) } else { rng.normal() * 3.0 } * size;
            let beside = value.to_bits().wrapping_add(rng.below(3) as u32).wrapping_sub(1);
            x.push(if i % 8 == 0 && value != 0.0 { f32::from_bits(beside) } else { value });
        }
    }
    x
}

fn kernel(variant: QuantiseVariant) -> (Stream, Function) {
    let nvrtc = std::env::var("LOCKSTEP_NVRTC").ok();
    let device = Device::open(0).unwrap();
    let arch = Arch::of(device.facts().compute_capability).unwrap();
    let compiled = Compiler::load(nvrtc.as_deref()).unwrap().compile(&variant.request(arch)).unwrap();
    let module = Module::load(&device, "quantise", arch.name(), &compiled.cubin).unwrap();
    (Stream::new(&device).unwrap(), module.function(QuantiseVariant::FUNCTION).unwrap())
}

#[track_caller]
fn assert_same(found: &[u8], wanted: &[u8], x: &[f32], (what, per_block): (&str, usize)) {
    if let Some(at) = found.iter().zip(wanted).position(|(found, wanted)| found != wanted) {
        let block = at / per_block;
        let x = &x[block * BLOCK..][..BLOCK];
        panic!(
            "{what}: byte {at}, of block {block}, is {:02x}, want {:02x}; the block is {x:?}",
            found[at], wanted[at]
        );
    }
}

/// 10 million values of either type under each of four input scales.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_quantises_codes_and_scales_like_the_host() {
    for variant in QuantiseVariant::ALL {
        let (stream, function) = kernel(variant);
        let is_bf16 = variant == QuantiseVariant::Bf16;
        for input_scale in [1.0, 0.0037, nvfp4::MIN_INPUT_SCALE, 1e3] {
            let mut x = values(&mut Rng::new(31), input_scale);
            if is_bf16 {
                x.iter_mut().for_each(|value| *value = half::bf16::from_f32(*value).to_f32());
            }
            let num_blocks = x.len() / BLOCK;
            let (mut packed, mut scales) = (vec![0; x.len() / 2], vec![0; num_blocks]);
            let counts = nvfp4::quantise_row(&x, input_scale, &mut packed, &mut scales);
            let bytes: Vec<u8> = if is_bf16 {
                x.iter().flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect()
            } else {
                bytemuck::cast_slice(&x).to_vec()
            };
            // Rows of 16 blocks, of which the last is cut: as many rows as there are whole ones.
            let blocks_a_row = 16;
            let num_rows = num_blocks / blocks_a_row;
            assert_eq!(num_rows * blocks_a_row, num_blocks, "whole rows");
            let input = DeviceBuffer::from_slice(&stream, &bytes).unwrap();
            let codes_found = DeviceBuffer::from_slice(&stream, &vec![0xFF_u8; packed.len()]).unwrap();
            let scales_found = DeviceBuffer::from_slice(&stream, &vec![0xFF_u8; scales.len()]).unwrap();
            let counts_found = DeviceBuffer::from_slice(&stream, &[0_u64; 2]).unwrap();
            let arguments = QuantiseArguments {
                input: input.address(),
                packed: codes_found.address(),
                scales: scales_found.address(),
                counts: counts_found.address(),
                input_stride: (bytes.len() / num_rows) as u64,
                packed_stride: (packed.len() / num_rows) as u64,
                scales_stride: blocks_a_row as u64,
                num_rows: num_rows as u64,
                num_blocks: blocks_a_row as u32,
                input_scale,
            };
            let shape = LaunchShape::rows(1024, QuantiseVariant::NUM_THREADS);
            // SAFETY: the buffers hold as many rows as the arguments say, and live until the downloads below have waited.
            unsafe { function.launch(&stream, &shape, &arguments).unwrap() };
            let what = format!("{variant:?}, input_scale {input_scale:e}");
            assert_same(&scales_found.download(&stream).unwrap(), &scales, &x, (&format!("{what}, scales"), 1));
            assert_same(&codes_found.download(&stream).unwrap(), &packed, &x, (&format!("{what}, codes"), BLOCK / 2));
            assert_eq!(counts_found.download(&stream).unwrap(), [counts.num_saturated, counts.num_zeroed], "{what}");
        }
    }
}
