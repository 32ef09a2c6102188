//! Tiles of every schedule against each other; and what each takes by itself, which the costs in `src/jit/kernels/cost.rs`
//! are fitted to: a table, not a check.
#![expect(clippy::cast_possible_truncation, reason = "small numbers")]

use super::*;
use crate::backend::cuda;
use crate::backend::tests::{Format, Random, SITU, assert_same_bits, expert};
use crate::gpu::Kernels;
use crate::numerics::activation::Activation;

const NUM_SETS: usize = 4;
const REPEATS: usize = 12;

/// A rank's experts as models have them.
struct Geometry {
    name: &'static str,
    num_experts: usize,
    hidden: usize,
    intermediate: usize,
    activation: Activation,
}

const GEOMETRIES: [Geometry; 3] = [
    Geometry { name: "k3-ep16", num_experts: 56, hidden: 3584, intermediate: 3072, activation: SITU },
    Geometry { name: "dsv3-ep8", num_experts: 32, hidden: 7168, intermediate: 2048, activation: Activation::Swiglu },
    Geometry { name: "qwen3-ep8", num_experts: 16, hidden: 4096, intermediate: 1536, activation: Activation::Swiglu },
];

/// Rows of experts: even, and as routers leave them, where no expert has few.
fn lines(num_experts: usize) -> Vec<(String, Vec<usize>)> {
    let even = [1, 8, 16, 17, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 320, 384, 512];
    let mut lines: Vec<_> = even.into_iter().map(|rows| (format!("even {rows}"), vec![rows; num_experts])).collect();
    let mut rng = Random::new(7);
    for mean in [32, 64, 128, 256] {
        let mut ragged = |name: &str, weight: &mut dyn FnMut(usize) -> f64| {
            let counts = (0..num_experts).map(|expert| 17.max((weight(expert) * f64::from(mean)) as usize));
            lines.push((format!("{name} {mean}"), counts.collect()));
        };
        ragged("ragged", &mut |_| 2.0 * rng.below(1000) as f64 / 1000.0);
        ragged("log-normal", &mut |_| 0.6 * f64::from(rng.normal()).exp());
        ragged("one hot", &mut |expert| if expert == num_experts / 2 { num_experts as f64 / 2.0 } else { 0.5 });
        ragged("two experts", &mut |expert| if expert < 2 { num_experts as f64 / 2.0 } else { 0.0 });
    }
    for counts in lines.iter_mut().filter(|(name, _)| name.starts_with("two")) {
        counts.1[2..].fill(0);
    }
    lines
}

pub(super) fn gpu() -> crate::gpu::Gpu {
    crate::gpu::Gpu::open(0, &Kernels::OnDemand(std::env::var("LOCKSTEP_NVRTC").ok())).unwrap()
}

/// A layer of equal experts, and tokens for it.
pub(super) fn layer(opened: &crate::gpu::Gpu, spec: ExpertsSpec, size: LocalSize) -> (LocalLayer, Vec<u16>) {
    let mut rng = Random::new(5);
    let pattern = expert(&mut rng, &spec, Format::Nvfp4);
    let layer = LocalLayer::new(&Gpu::new(cuda::WGMMA, opened, 8).unwrap(), spec, &[pattern], size).unwrap();
    let values = rng.normals(512 * spec.hidden).iter().map(|value| half::bf16::from_f32(*value).to_bits()).collect();
    (layer, values)
}

/// Computes so often into rubbish: all rows are there, and have the bits that were `wanted`, or first found.
pub(super) fn assert_repeats(work: &mut LocalWork<'_>, repeats: usize, wanted: &mut Option<Vec<f32>>, what: &str) {
    let LocalLayer { spec, shared, .. } = work.replay.layer;
    for repeat in 0..repeats {
        work.buffers.out.fill_bytes(shared.stream(), 0xff).unwrap();
        work.check().unwrap();
        let out = work.buffers.out.download(shared.stream()).unwrap();
        assert!(out.iter().all(|value| value.is_finite()), "{what}");
        let what = format!("{} x {}, {what}, repeat {repeat}", spec.hidden, spec.intermediate);
        assert_same_bits(&out, wanted.get_or_insert_with(|| out.clone()), spec.hidden, &what);
    }
}

/// Widths that blocks of weights and stages divide and do not, and rows on both sides of every width.
#[test]
#[ignore = "needs a Hopper GPU and NVRTC"]
fn gpu_tiles_of_one_order_give_equal_bits() {
    let opened = gpu();
    for (hidden, intermediate) in [(320, 176), (1024, 768), (144, 48)] {
        for quantise_activations in [false, true] {
            let spec =
                ExpertsSpec { hidden, intermediate, activation: SITU, quantise_activations, batch_invariant: true };
            let (layer, values) = layer(&opened, spec, LocalSize { num_experts: 40, num_sets: 1 });
            let invariant = Chooser { family: crate::jit::kernels::Family::Wgmma, batch_invariant: true };
            let all: BTreeSet<Schedule> = invariant.all(&layer.gemm).into_iter().collect();
            layer.shared.programs.load(&all, &layer.gemm).unwrap();
            let mut rng = Random::new(9);
            for round in 0..6 {
                let mut counts: Vec<usize> = (0..40).map(|_| rng.below([3, 40, 140, 300, 600, 1][round])).collect();
                counts[round] = [1, 16, 64, 257, 2000, 33][round];
                let mut wanted: Option<Vec<f32>> = None;
                for &schedule in &all {
                    let tokens = LocalTokens { values: &values, scale: 5.0 / 2688.0 };
                    let mut work = layer.work_by(&counts, tokens, |_| schedule, None).unwrap();
                    assert_repeats(&mut work, 3, &mut wanted, &format!("{schedule}, round {round}"));
                    let given_out = work.buffers.given_out.download(layer.stream()).unwrap();
                    assert_eq!(given_out, [0], "{schedule} leaves the count of tiles as it found it");
                }
            }
        }
    }
}

/// However the machine is divided between two launches at once, and whichever of them is sooner over.
#[test]
#[ignore = "needs a Hopper GPU and NVRTC"]
fn gpu_launches_at_once_give_the_bits_of_one_behind_the_other() {
    let opened = gpu();
    for (hidden, intermediate, quantise_activations) in [(320, 176, true), (1024, 768, false), (2624, 2688, false)] {
        let spec = ExpertsSpec { hidden, intermediate, activation: SITU, quantise_activations, batch_invariant: false };
        let (layer, values) = layer(&opened, spec, LocalSize { num_experts: 40, num_sets: 2 });
        let mut rng = Random::new(13);
        for (few, most) in [(3, 20), (17, 300), (9, 2000)] {
            let count = |expert| if expert % 7 == 3 { 17 + rng.below(most) } else { rng.below(few) };
            let counts: Vec<usize> = (0..40).map(count).collect();
            layer.load([&counts[..]]).unwrap();
            let schedules = layer.schedules(&counts);
            let tokens = LocalTokens { values: &values, scale: 5.0 / 2688.0 };
            let mut wanted: Option<Vec<f32>> = None;
            for of_large in [None, Some(1), Some(16), Some(66), Some(131)] {
                let mut work = layer.work_by(&counts, tokens, |rows| schedules.of(rows), of_large).unwrap();
                assert_repeats(&mut work, 5, &mut wanted, &format!("most {most}, {of_large:?}"));
            }
        }
    }
}

/// Both tiles of the small schedule, with runs of a unit, of fewer units than warps and of more, of one block of rows and of
/// several; slices of K that are even and that are not, of no step at all and of several slots.
#[test]
#[ignore = "needs a Hopper GPU and NVRTC"]
fn gpu_small_tiles_give_equal_bits() {
    let opened = gpu();
    for (hidden, intermediate, num_experts) in [(320, 320, 40), (144, 48, 200), (2624, 2688, 12), (4096, 1536, 12)] {
        for quantise_activations in [false, true] {
            let spec =
                ExpertsSpec { hidden, intermediate, activation: SITU, quantise_activations, batch_invariant: false };
            let (layer, values) = layer(&opened, spec, LocalSize { num_experts, num_sets: 1 });
            let small = [8, 16].map(|block_rows| Schedule::Small { block_rows });
            let mut small = BTreeSet::from(small);
            small.extend([Schedule::Ranges { block_rows: 16 }].iter().filter(|ranges| ranges.serves(&layer.gemm)));
            layer.shared.programs.load(&small, &layer.gemm).unwrap();
            let mut rng = Random::new(11);
            for round in 0..6 {
                let most = [17, 2, 1, 9, 40, 17][round];
                let mut counts: Vec<usize> = (0..num_experts).map(|_| rng.below(most)).collect();
                if round == 2 {
                    counts[num_experts / 2..].fill(0);
                }
                counts[round] = [16, 1, 8, 3, 300, 0][round];
                let mut wanted: Option<Vec<f32>> = None;
                for &schedule in &small {
                    let tokens = LocalTokens { values: &values, scale: 5.0 / 2688.0 };
                    let mut work = layer.work_by(&counts, tokens, |_| schedule, None).unwrap();
                    assert_repeats(&mut work, 3, &mut wanted, &format!("{schedule}, round {round}"));
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU and NVRTC; prints what schedules take"]
fn gpu_times_of_every_schedule() {
    let opened = gpu();
    let wanted = std::env::var("LOCKSTEP_TEST_GEOMETRY").ok();
    for geometry in GEOMETRIES.iter().filter(|geometry| wanted.as_ref().is_none_or(|name| name == geometry.name)) {
        let Geometry { name, num_experts, hidden, intermediate, activation } = *geometry;
        let spec =
            ExpertsSpec { hidden, intermediate, activation, quantise_activations: false, batch_invariant: false };
        let (layer, values) = layer(&opened, spec, LocalSize { num_experts, num_sets: NUM_SETS });
        let tokens = LocalTokens { values: &values, scale: 1.0 };
        let free = Chooser { family: crate::jit::kernels::Family::Wgmma, batch_invariant: false };
        let invariant = Chooser { batch_invariant: true, ..free };
        let all: BTreeSet<Schedule> = free.all(&layer.gemm).into_iter().chain(invariant.all(&layer.gemm)).collect();
        layer.shared.programs.load(&all, &layer.gemm).unwrap();
        for (line, counts) in lines(num_experts) {
            let most = counts.iter().copied().max().unwrap_or(0);
            // Small tiles of many rows take very long, and those of few in large ones say nothing.
            let is_worth = |schedule: &&Schedule| {
                let rows = schedule.block_rows() as usize;
                let small = schedule.is_small();
                if small { most <= 16 && most <= rows } else { most <= 8 * rows && rows <= 16 * most }
            };
            let mut works: Vec<_> = all
                .iter()
                .filter(is_worth)
                .map(|&schedule| (schedule, layer.work_by(&counts, tokens, |_| schedule, None).unwrap(), Vec::new()))
                .collect();
            for repeat in 0..REPEATS + 1 {
                for (_, work, times) in &mut works {
                    if repeat == 0 {
                        work.check().unwrap();
                    } else {
                        times.push(work.run().unwrap().as_secs_f64() * 1e6);
                    }
                }
            }
            for (schedule, _, mut times) in works {
                times.sort_by(f64::total_cmp);
                println!("{name}\t{line}\t{schedule}\t{:.1}\t{:.1}\t{counts:?}", times[REPEATS / 2], times[0]);
            }
        }
    }
}
