//! Rows that the device alone has counted: the lists that it makes, and what kernels make of them. They need a GPU and NVRTC.

use super::super::{
    BackendError, Beside, DeviceBatch, DeviceExperts, ExpertsSpec, LiveBatch, LiveBounds, Machine, build,
};
use super::super::{ForwardStats, cuda};
use super::{Case, Format, Random, SITU, assert_same_bits};
use crate::cuda::{DeviceBuffer, Graph};
use crate::gpu::{Gpu, Kernels, grow, num_grown};
use crate::jit::Arch;

const NUM_EXPERTS: usize = 40;
const MAX_ROWS: usize = 3000;
const NUM_TOKENS: usize = 200;

/// Counts of one step: as routers leave them, all on one expert, few, none.
fn counts(rng: &mut Random, step: usize) -> Vec<usize> {
    let mut counts = vec![0; NUM_EXPERTS];
    match step % 6 {
        0 => (0..MAX_ROWS).for_each(|_| counts[rng.below(NUM_EXPERTS)] += 1),
        1 => counts[rng.below(NUM_EXPERTS)] = MAX_ROWS,
        2 => (0..rng.below(60)).for_each(|_| counts[rng.below(NUM_EXPERTS)] += 1),
        3 => counts.iter_mut().for_each(|count| *count = rng.below(34)),
        4 => (0..3).for_each(|_| counts[rng.below(NUM_EXPERTS)] = rng.below(900)),
        _ => {}
    }
    counts
}

/// What one step reads on the device.
struct Rows {
    tokens: DeviceBuffer<u16>,
    row_token: DeviceBuffer<u32>,
    expert_offsets: DeviceBuffer<u32>,
}

fn check(gpu: &Gpu, technique: &'static str, spec: ExpertsSpec, formats: &[Format]) {
    let what = format!("{technique}, {spec:?}");
    let machine = Machine { gpu: Some(gpu.clone()), ..Machine::default() };
    let backend = build(technique, &machine).unwrap();
    let case = Case::new(31, spec, formats, &[0; NUM_EXPERTS]);
    let experts = case.pack(&backend);
    let experts = experts.on_device().unwrap();
    let (stream, device) = (gpu.stream(), gpu.device());
    let mut rng = Random::new(32);
    let tokens: Vec<u16> =
        rng.normals(NUM_TOKENS * spec.hidden).iter().map(|value| half::bf16::from_f32(*value).to_bits()).collect();
    let mut rows = Rows {
        tokens: DeviceBuffer::from_slice(stream, &tokens).unwrap(),
        row_token: DeviceBuffer::zeroed(stream, MAX_ROWS).unwrap(),
        expert_offsets: DeviceBuffer::zeroed(stream, NUM_EXPERTS + 1).unwrap(),
    };
    let bounds = LiveBounds { max_rows: MAX_ROWS, max_expert_rows: MAX_ROWS };
    let mut out = DeviceBuffer::uninitialised(device, MAX_ROWS * spec.hidden).unwrap();
    let mut wanted = DeviceBuffer::uninitialised(device, MAX_ROWS * spec.hidden).unwrap();
    let queue = |rows: &Rows, out: &mut DeviceBuffer<f32>| -> Result<(), BackendError> {
        let Rows { tokens, row_token, expert_offsets } = rows;
        experts.queue_live(&LiveBatch { tokens, token_scale: 1.0, row_token, expert_offsets, bounds }, out)
    };
    let mut graph: Option<Graph> = None;
    for step in 0..18 {
        let counts = counts(&mut rng, step);
        let mut offsets = vec![0];
        counts.iter().for_each(|count| offsets.push(offsets[offsets.len() - 1] + count));
        let num_rows = offsets[NUM_EXPERTS];
        let row_token: Vec<u32> = (0..num_rows).map(|_| rng.below(NUM_TOKENS) as u32).collect();
        rows.row_token.fill_bytes(stream, 0xff).unwrap();
        rows.row_token.upload(stream, 0, &row_token).unwrap();
        let narrow: Vec<u32> = offsets.iter().map(|offset| *offset as u32).collect();
        rows.expert_offsets.upload(stream, 0, &narrow).unwrap();
        [&mut out, &mut wanted].into_iter().for_each(|buffer| buffer.fill_bytes(stream, 0xff).unwrap());

        let grown = num_grown();
        match &graph {
            None => queue(&rows, &mut out).unwrap(),
            // SAFETY: everything that was queued when it was recorded lives, and nothing has grown since.
            Some(graph) => unsafe { graph.launch(stream).unwrap() },
        }
        experts.expect(&offsets, bounds).unwrap();
        let live = evidence(gpu, experts);
        if graph.is_none() {
            graph = Some(Graph::capture(stream, || queue(&rows, &mut out)).unwrap());
        } else {
            assert_eq!(num_grown(), grown, "a replay needs no memory");
        }
        let batch = DeviceBatch {
            tokens: &rows.tokens,
            token_scale: 1.0,
            row_token: &rows.row_token,
            expert_offsets: &offsets,
            beside: Beside::default(),
        };
        experts.queue(&batch, &mut wanted).unwrap();
        let known = evidence(gpu, experts);
        let (out, wanted) = (out.download(stream).unwrap(), wanted.download(stream).unwrap());
        let len = num_rows * spec.hidden;
        assert!(wanted[..len].iter().all(|value| value.is_finite()), "{what}: step {step}");
        assert_same_bits(&out[..len], &wanted[..len], spec.hidden, &format!("{what}, step {step}"));
        assert!(out[len..].iter().all(|value| value.to_bits() == u32::MAX), "{what}: beyond the rows, step {step}");
        assert_eq!(live.fc2_input, known.fc2_input, "{what}: block scales, step {step}");
        assert_eq!(sorted(live), sorted(known), "{what}: rows, step {step}");
    }
}

fn evidence(gpu: &Gpu, experts: &dyn DeviceExperts) -> ForwardStats {
    experts.queue_evidence().unwrap();
    gpu.stream().synchronise().unwrap();
    experts.evidence().unwrap()
}

fn sorted(stats: ForwardStats) -> Vec<String> {
    let mut rows: Vec<String> = stats.rows_by_identity.iter().map(|(id, rows)| format!("{id}: {rows}")).collect();
    rows.sort();
    rows
}

#[test]
#[ignore = "needs a GPU and NVRTC"]
fn gpu_rows_that_no_host_knows_have_the_bits_of_those_it_knows() {
    let nvrtc = std::env::var("LOCKSTEP_NVRTC").ok();
    let gpu = Gpu::open(0, &Kernels::OnDemand(nvrtc)).unwrap_or_else(|error| panic!("{error}"));
    let techniques = if gpu.arch() == Arch::Sm90a { &[cuda::MMA_SYNC, cuda::WGMMA][..] } else { &[cuda::MMA_SYNC] };
    let mixed: Vec<Format> = (0..NUM_EXPERTS).map(|i| if i % 3 == 0 { Format::Bf16 } else { Format::Nvfp4 }).collect();
    let nvfp4 = [Format::Nvfp4; NUM_EXPERTS];
    for &technique in techniques {
        for (quantise_activations, batch_invariant, formats) in
            [(true, false, &nvfp4[..]), (false, true, &nvfp4), (false, false, &mixed)]
        {
            let spec =
                ExpertsSpec { hidden: 256, intermediate: 128, activation: SITU, quantise_activations, batch_invariant };
            check(&gpu, technique, spec, formats);
        }
    }
    let mut buffer = DeviceBuffer::<u8>::uninitialised(gpu.device(), 0).unwrap();
    let before = num_grown();
    grow(&mut buffer, 1).unwrap();
    assert_eq!(num_grown(), before + 1, "memory that moves is counted");
}
