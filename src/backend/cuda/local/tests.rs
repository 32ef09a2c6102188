//! What every schedule takes by itself, which the costs in `src/jit/kernels/cost.rs` are fitted to: a table, not a check.

use super::*;
use crate::backend::cuda;
use crate::backend::tests::{Format, Rng, SITU, expert};
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
    let mut rng = Rng::new(7);
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

#[test]
#[ignore = "needs a Hopper GPU and NVRTC; prints what schedules take"]
fn gpu_times_of_every_schedule() {
    let opened = crate::gpu::Gpu::open(0, &Kernels::OnDemand(std::env::var("LOCKSTEP_NVRTC").ok())).unwrap();
    let wanted = std::env::var("LOCKSTEP_TEST_GEOMETRY").ok();
    for geometry in GEOMETRIES.iter().filter(|geometry| wanted.as_ref().is_none_or(|name| name == geometry.name)) {
        let Geometry { name, num_experts, hidden, intermediate, activation } = *geometry;
        let spec = ExpertsSpec { hidden, intermediate, activation, quantise_activations: false, batch_invariant: false };
        let gpu = Gpu::new(cuda::WGMMA, &opened, 8).unwrap();
        let mut rng = Rng::new(5);
        let pattern = expert(&mut rng, &spec, Format::Nvfp4);
        let layer = LocalLayer::new(&gpu, spec, &[pattern], LocalSize { num_experts, num_sets: NUM_SETS }).unwrap();
        let values: Vec<u16> =
            rng.normals(64 * hidden).iter().map(|value| half::bf16::from_f32(*value).to_bits()).collect();
        let tokens = LocalTokens { values: &values, scale: 1.0 };
        let free = Chooser { family: crate::jit::kernels::Family::Wgmma, batch_invariant: false };
        let invariant = Chooser { batch_invariant: true, ..free };
        let all: BTreeSet<Schedule> =
            free.all(&layer.gemm).into_iter().chain(invariant.all(&layer.gemm)).collect();
        layer.shared.programs.load(&all, &layer.gemm).unwrap();
        for (line, counts) in lines(num_experts) {
            let most = counts.iter().copied().max().unwrap_or(0);
            // Small tiles of many rows take very long, and those of few in large ones say nothing.
            let is_worth = |schedule: &&Schedule| {
                let rows = schedule.block_rows() as usize;
                let small = matches!(schedule, Schedule::Small { .. });
                if small { most <= 16 && most <= rows } else { most <= 8 * rows && rows <= 16 * most }
            };
            let mut works: Vec<_> = all
                .iter()
                .filter(is_worth)
                .map(|&schedule| (schedule, layer.work_by(&counts, tokens, |_| schedule).unwrap(), Vec::new()))
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
