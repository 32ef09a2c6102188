//! The GPU backends against the reference. They need a GPU and NVRTC: run with `--run-ignored only`, or `-- --ignored gpu`.

use std::sync::Arc;

use super::super::{Backend, ExpertBatch, ExpertsSpec, Machine, build, cuda};
use super::{Case, Format, Random, SITU, assert_same_bits, reference};
use crate::cuda::{Device, DeviceBuffer, Function, LaunchShape, Module, Stream};
use crate::gpu::{Gpu, Kernels};
use crate::jit::kernels::{ProbeArgs, ProbeVariant};
use crate::jit::{Arch, Compiler};
use crate::numerics::activation::Activation;
use crate::numerics::metrics::compare;
use crate::numerics::nvfp4;

fn nvrtc() -> Option<String> {
    std::env::var("LOCKSTEP_NVRTC").ok()
}

/// Every technique that this machine's GPU has.
fn gpus() -> Vec<Arc<dyn Backend>> {
    let opened = Gpu::open(0, &Kernels::OnDemand(nvrtc())).unwrap_or_else(|error| panic!("{error}"));
    let is_hopper = opened.arch() == Arch::Sm90a;
    let machine = Machine { gpu: Some(opened), ..Machine::default() };
    let gpu = |technique| build(technique, &machine).unwrap_or_else(|error| panic!("{technique}: {error}"));
    let techniques = if is_hopper { &[cuda::MMA_SYNC, cuda::WGMMA][..] } else { &[cuda::MMA_SYNC] };
    techniques.iter().map(|technique| gpu(technique)).collect()
}

fn spec(hidden: usize, intermediate: usize, quantise_activations: bool) -> ExpertsSpec {
    ExpertsSpec { hidden, intermediate, activation: SITU, quantise_activations, batch_invariant: false }
}

/// Tokens as they travel to a GPU.
fn rounded(mut case: Case) -> Case {
    case.tokens.iter_mut().for_each(|value| *value = half::bf16::from_f32(*value).to_f32());
    case
}

fn check(case: &Case, backend: &Arc<dyn Backend>, what: &str) {
    let what = format!("{}, {what}", backend.technique());
    let (expected, expected_stats) = case.run(&reference());
    let (got, stats) = case.run(backend);
    assert!(got.iter().all(|value| value.is_finite()), "{what}: a value is missing");
    let bound = if case.spec.quantise_activations { 1e-2 } else { 4e-3 };
    for offsets in case.expert_offsets.windows(2) {
        let values = offsets[0] * case.spec.hidden..offsets[1] * case.spec.hidden;
        if !values.is_empty() {
            let found = compare(&got[values.clone()], &expected[values]);
            assert!(found.rel_l2 <= bound, "{what}, rows {offsets:?}: {:.2e} off", found.rel_l2);
        }
    }
    assert_eq!(stats.fc2_input.num_blocks, expected_stats.fc2_input.num_blocks, "{what}: blocks");
    let rows = |stats: &super::ForwardStats| -> Vec<_> {
        let mut rows: Vec<_> = stats.rows_by_identity.iter().map(|(id, rows)| (id.quant, *rows)).collect();
        rows.sort_by_key(|(quant, _)| quant.name());
        rows
    };
    assert_eq!(rows(&stats), rows(&expected_stats), "{what}: rows");
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_modelopt_layers() {
    for backend in gpus() {
        super::fixtures::check_on_gpu(&backend);
    }
}

fn check_row_counts(hidden: usize, intermediate: usize) {
    let rows = [0, 1, 2, 5, 0, 17, 64, 0, 9, 300, 33, 130];
    for backend in gpus() {
        for quantise in [false, true] {
            let case = Case::new(1, spec(hidden, intermediate, quantise), &[Format::Nvfp4; 12], &rows);
            check(&rounded(case), &backend, &format!("{hidden} x {intermediate}, quantised: {quantise}"));
            // Each for a tile of its own, since a batch has one for all experts of many rows.
            for rows in [[20, 0, 31], [60, 7, 50], [100, 0, 128], [600, 1, 511]] {
                let case = Case::new(5, spec(hidden, intermediate, quantise), &[Format::Nvfp4; 3], &rows);
                check(
                    &rounded(case),
                    &backend,
                    &format!("{hidden} x {intermediate}, {rows:?} rows, quantised: {quantise}"),
                );
            }
        }
        let mixed: Vec<Format> = (0..12).map(|i| if i % 3 == 0 { Format::Bf16 } else { Format::Nvfp4 }).collect();
        let case = Case::new(2, spec(hidden, intermediate, false), &mixed, &rows);
        check(&rounded(case), &backend, &format!("mixed formats, {hidden} x {intermediate}"));
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_row_counts_and_formats_of_the_least_widths() {
    check_row_counts(16, 16);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_row_counts_and_formats_of_odd_widths() {
    check_row_counts(144, 48);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_row_counts_and_formats_of_whole_tiles() {
    check_row_counts(512, 128);
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_activations() {
    let activations = [
        Activation::Swiglu,
        Activation::SwigluClamp { limit: 1.25 },
        Activation::Situ { beta: 0.5, linear_beta: None },
        Activation::Situ { beta: 2.0, linear_beta: Some(10.0) },
    ];
    for backend in gpus() {
        for activation in activations {
            let spec = ExpertsSpec { activation, ..spec(128, 64, false) };
            let case = Case::new(3, spec, &[Format::Nvfp4; 3], &[4, 40, 0]);
            check(&rounded(case), &backend, &format!("{activation:?}"));
        }
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_more_rows_than_a_wave() {
    for backend in gpus() {
        let case = Case::new(4, spec(64, 32, false), &[Format::Nvfp4; 3], &[20_000, 0, 30_001]);
        check(&rounded(case), &backend, "two waves");
    }
}

/// Cases H1 and H3.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_bits_do_not_depend_on_neighbours_or_repeats() {
    for backend in gpus() {
        for quantise in [false, true] {
            let spec = ExpertsSpec { batch_invariant: true, ..spec(320, 176, quantise) };
            let case = rounded(Case::new(12, spec, &[Format::Nvfp4], &[700]));
            let experts = case.pack(&backend);
            let run = |row_token: &[u32]| {
                let mut out = vec![f32::NAN; row_token.len() * case.spec.hidden];
                let offsets = [0, row_token.len()];
                let batch = ExpertBatch { row_token, expert_offsets: &offsets, ..case.batch() };
                experts.forward(&batch, &mut out).unwrap();
                out
            };
            let probe = 5;
            let alone = run(&[probe]);
            for others in [1, 7, 8, 15, 16, 31, 63, 64, 127, 128, 255, 256, 600] {
                for position in [0, others / 2, others] {
                    let mut row_token: Vec<u32> = case.row_token[..others].to_vec();
                    row_token.insert(position, probe);
                    let row = &run(&row_token)[position * case.spec.hidden..][..case.spec.hidden];
                    let what = format!("{}, row {position} among {others}", backend.technique());
                    assert_same_bits(row, &alone, case.spec.hidden, &what);
                }
            }
            let first = run(&case.row_token);
            for repeat in 0..20 {
                let what = format!("{}, repeat {repeat}", backend.technique());
                assert_same_bits(&run(&case.row_token), &first, case.spec.hidden, &what);
            }
        }
    }
}

fn probe(activation: Activation, name: &str) -> (Stream, Function) {
    let device = Device::open(0).unwrap();
    let arch = Arch::of(device.facts().compute_capability).unwrap();
    let compiled =
        Compiler::load(nvrtc().as_deref()).unwrap().compile(&ProbeVariant(activation).request(arch)).unwrap();
    let module = Module::load(&device, "probes", arch.name(), &compiled.cubin).unwrap();
    (Stream::new(&device).unwrap(), module.function(name).unwrap())
}

/// 10 million values through NVFP4 and back, ties and subnormals among them, bit for bit.
#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_requantises_like_the_host() {
    let (stream, function) = probe(Activation::Swiglu, ProbeVariant::REQUANTISE);
    let mut rng = Random::new(21);
    let num_blocks = 10_000_000 / 16;
    for input_scale in [1.0, 0.0037, 2.0_f32.powi(-118), 1e3] {
        let mut x = Vec::with_capacity(num_blocks * 16);
        for _ in 0..num_blocks {
            let size = input_scale * 2.0_f32.powi(rng.below(34) as i32 - 16);
            // A quarter are on or beside ties; some are zero or subnormal.
            let tie = |rng: &mut Random| (rng.below(65) as f32 - 32.0) / 4.0;
            x.extend((0..16).map(|i| if i % 4 == 0 { tie(&mut rng) } else { rng.normal() * 3.0 } * size));
        }
        let mut expected = vec![0.0; x.len()];
        let counts = nvfp4::quantise_unscaled(&x, input_scale, &mut expected);
        let x = DeviceBuffer::from_slice(&stream, &x).unwrap();
        let out = DeviceBuffer::from_slice(&stream, &vec![f32::NAN; expected.len()]).unwrap();
        let found = DeviceBuffer::from_slice(&stream, &[0_u64; 2]).unwrap();
        let args = ProbeArgs {
            x: x.address(),
            up: 0,
            out: out.address(),
            counts: found.address(),
            num_threads: num_blocks as u32,
            input_scale,
        };
        // SAFETY: the buffers hold as many values as there are threads, and live until the download below has waited.
        unsafe { function.launch(&stream, &LaunchShape::rows(args.num_threads.div_ceil(256), 256), &args).unwrap() };
        assert_same_bits(&out.download(&stream).unwrap(), &expected, 16, &format!("input_scale {input_scale:e}"));
        assert_eq!(found.download(&stream).unwrap(), [counts.num_saturated, counts.num_zeroed]);
    }
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_activations_value_by_value() {
    let mut rng = Random::new(22);
    let mut g: Vec<f32> = (0..1_000_000).map(|i| rng.normal() * [0.1, 1.5, 10.0, 100.0][i % 4]).collect();
    g.extend([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 177.0, -177.0, 1e4, -1e4]);
    let u: Vec<f32> = g.iter().rev().copied().collect();
    for activation in [
        Activation::Swiglu,
        Activation::SwigluClamp { limit: 10.0 },
        Activation::Situ { beta: 0.5, linear_beta: None },
        SITU,
        Activation::Situ { beta: 1e6, linear_beta: Some(3e4) },
    ] {
        let (stream, function) = probe(activation, ProbeVariant::ACTIVATE);
        let buffer = |values: &[f32]| DeviceBuffer::from_slice(&stream, values).unwrap();
        let (x, up, out) = (buffer(&g), buffer(&u), buffer(&vec![f32::NAN; g.len()]));
        let args = ProbeArgs {
            x: x.address(),
            up: up.address(),
            out: out.address(),
            counts: 0,
            num_threads: g.len() as u32,
            input_scale: 1.0,
        };
        // SAFETY: the buffers hold as many values as there are threads, and live until the download below has waited.
        unsafe { function.launch(&stream, &LaunchShape::rows(args.num_threads.div_ceil(256), 256), &args).unwrap() };
        for (i, found) in out.download(&stream).unwrap().into_iter().enumerate() {
            let expected = activation.apply(g[i], u[i]);
            let bound = 1e-4 * expected.abs().max(1.0);
            assert!(
                (found - expected).abs() <= bound,
                "{activation:?} of {:e}, {:e} is {found:e}, expected {expected:e}",
                g[i],
                u[i]
            );
        }
    }
}
