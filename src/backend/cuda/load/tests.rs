//! Pieces against what they are cut from, and the device's images against the host's.

use std::sync::Mutex;

use super::*;
use crate::backend::{Machine, build};
use crate::checkpoint::tensors::TensorBytes;
use crate::cuda::Stream;
use crate::gpu::{Gpu, Kernels};
use crate::numerics::activation::Activation;

/// Bytes without pattern, none of them a NaN of e4m3.
fn noise(len: usize, seed: u64) -> TensorBytes {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let byte = state.to_le_bytes()[3];
        if e4m3::is_nan(byte) { 0x80 } else { byte }
    };
    TensorBytes::Owned((0..len).map(|_| next()).collect())
}

fn projection(format: Format, out_features: usize, in_features: usize, seed: u64) -> Projection {
    let num_values = out_features * in_features;
    let data = match format {
        Format::Nvfp4 => ProjectionData::Nvfp4 {
            packed: noise(num_values / 2, seed),
            block_scales: noise(num_values / BLOCK, seed + 1),
            global_scale: 1.0,
            input_scale: None,
        },
        Format::Bf16 => ProjectionData::Bf16(noise(2 * num_values, seed)),
    };
    Projection { out_features, in_features, data }
}

fn expert(format: Format, (hidden, intermediate): (usize, usize), seed: u64) -> ExpertTensors {
    ExpertTensors {
        gate: projection(format, intermediate, hidden, seed),
        up: projection(format, intermediate, hidden, seed + 2),
        down: projection(format, hidden, intermediate, seed + 4),
    }
}

/// Every row of every part is in one piece, where the piece says it is, and no piece overflows its slot.
#[test]
fn pieces_hold_every_row_once() {
    for format in [Format::Nvfp4, Format::Bf16] {
        for (rows, width) in [(16, 16), (48, 80), (3072, 3584), (1040, 4112)] {
            let parts = [projection(format, rows, width, 3), projection(format, rows, width, 5)];
            for num_parts in [1, 2] {
                let parts: Vec<&Projection> = parts[..num_parts].iter().collect();
                let matrix = Matrix { name: "test", format, parts: &parts, image: 0 };
                let [row_bytes, scale_bytes] = matrix.row_bytes();
                let mut next_row = 0;
                for piece in matrix.pieces() {
                    assert_eq!(piece.first_row(), next_row);
                    let mut slot = vec![0; piece.num_bytes()];
                    assert!(slot.len() <= SLOT_BYTES + 4 * ALIGN || piece.num_units == 1, "{} bytes", slot.len());
                    let places = piece.fill(&mut slot).unwrap();
                    assert!(places.end <= slot.len());
                    for half in 0..2 {
                        let part = parts[half % num_parts];
                        let found = |at: usize, bytes: usize| &slot[at..at + piece.num_rows() * bytes];
                        let wanted =
                            |all: &[u8], bytes: usize| all[next_row * bytes..][..piece.num_rows() * bytes].to_vec();
                        match &part.data {
                            ProjectionData::Nvfp4 { packed, block_scales, .. } => {
                                assert_eq!(found(places.rows[half], row_bytes), wanted(packed, row_bytes));
                                assert_eq!(found(places.scales[half], scale_bytes), wanted(block_scales, scale_bytes));
                            }
                            ProjectionData::Bf16(values) => {
                                assert_eq!(found(places.rows[half], row_bytes), wanted(values, row_bytes));
                            }
                            ProjectionData::F32(_) => unreachable!(),
                        }
                        assert!(places.rows[half].is_multiple_of(16) && places.scales[half].is_multiple_of(16));
                    }
                    next_row += piece.num_rows();
                }
                assert_eq!(next_row, rows);
            }
        }
    }
}

#[test]
fn a_nan_is_found_in_its_row_and_block() {
    let mut bits = [0x38; 100];
    assert_eq!(first_nan(&bits), None);
    (bits[70], bits[90]) = (0xff, 0x7f);
    assert_eq!(first_nan(&bits), Some(70));
    let mut bad = projection(Format::Nvfp4, 64, 160, 1);
    let ProjectionData::Nvfp4 { block_scales, .. } = &mut bad.data else { unreachable!() };
    let mut scales = block_scales.to_vec();
    scales[37 * 10 + 4] = 0x7f;
    *block_scales = TensorBytes::Owned(scales.into());
    let matrix = Matrix { name: "down", format: Format::Nvfp4, parts: &[&bad], image: 0 };
    let pieces: Vec<_> = matrix.pieces().collect();
    let error = pieces[0].fill(&mut vec![0; pieces[0].num_bytes()]).map(drop).unwrap_err();
    let BackendError::Pack { projection: "down", source } = error else { panic!("{error}") };
    assert!(source.to_string().contains("row 37, block 4"), "{source}");
}

/// The bytes on the device that an expert's entry points to.
fn images(stream: &Stream, blocks: &[DeviceBuffer<u8>], addresses: [(u64, usize); 2]) -> [Vec<u8>; 2] {
    addresses.map(|(address, len)| {
        let offset = |block: &DeviceBuffer<u8>| usize::try_from(address.wrapping_sub(block.address())).unwrap();
        let holds =
            |block: &&DeviceBuffer<u8>| (block.address()..block.address() + block.len() as u64).contains(&address);
        let block = blocks.iter().find(holds).expect("a block");
        block.download(stream).unwrap()[offset(block)..][..len].to_vec()
    })
}

/// Eight threads put experts of both formats, of widths that no step divides, in any order.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_images_are_those_of_the_host() {
    let gpu = Gpu::open(0, &Kernels::OnDemand(std::env::var("LOCKSTEP_NVRTC").ok()))
        .unwrap_or_else(|error| panic!("{error}"));
    let machine = Machine { gpu: Some(gpu.clone()), ..Machine::default() };
    build(super::super::MMA_SYNC, &machine).unwrap_or_else(|error| panic!("{error}"));
    crate::cuda::poison_fresh_memory();
    for (hidden, intermediate) in [(16, 16), (80, 48), (7168, 2048), (3584, 3072), (272, 1040)] {
        let format = |local: usize| if local.is_multiple_of(3) { Format::Bf16 } else { Format::Nvfp4 };
        let size = (hidden, intermediate);
        let experts: Vec<_> = (0..9).map(|local| expert(format(local), size, 100 * local as u64 + 1)).collect();
        let spec = ExpertsSpec {
            hidden,
            intermediate,
            activation: Activation::Swiglu,
            quantise_activations: false,
            batch_invariant: false,
        };
        let host = super::super::Gpu::new(super::super::MMA_SYNC, &gpu, 4).unwrap();
        let builder = Builder::new(host.shared.clone(), spec, experts.len()).unwrap();
        let next = Mutex::new(0..experts.len());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    while let Some(local) = { next.lock().unwrap().next_back() } {
                        builder.put(local, &experts[local]).unwrap_or_else(|error| panic!("{error}"));
                    }
                });
            }
        });
        builder.feed.finish().unwrap();
        assert!(builder.feed.num_bytes() > 0);
        let blocks = &builder.images.lock().unwrap().blocks;
        for (local, tensors) in experts.iter().enumerate() {
            let wanted = [pack::pack_fc1(&tensors.gate, &tensors.up).unwrap(), pack::pack_fc2(&tensors.down).unwrap()];
            let PackedExpert { entry, num_bytes, .. } = builder.experts[local].get().unwrap();
            assert_eq!(*num_bytes, wanted[0].bytes.len() + wanted[1].bytes.len());
            let addresses = [(entry.fc1, wanted[0].bytes.len()), (entry.fc2, wanted[1].bytes.len())];
            let found = images(gpu.stream(), blocks, addresses);
            for (fc, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                let first = found.iter().zip(&wanted.bytes).position(|(found, wanted)| found != wanted);
                assert_eq!(first, None, "expert {local} of {hidden} x {intermediate}, FC{}", fc + 1);
            }
        }
    }
}
