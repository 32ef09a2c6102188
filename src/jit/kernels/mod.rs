//! Every kernel that there is: its arguments, its source, its requests.

mod abreast;
mod ceilings;
pub mod cost;
pub mod deal;
mod dense;
pub mod dispatch;
mod echo;
pub mod few;
mod gated;
pub mod grouped_gemm;
pub mod live;
pub mod nvlink;
mod pack;
mod probes;
mod schedule;
mod topk;

pub use abreast::MAX_ROWS_AT_ONCE;
pub use ceilings::{ReadAll, ReadArgs};
pub use dense::{DenseArgs, DenseKernels, DenseProduct, DenseProductArgs};
pub use echo::{EchoArgs, EchoKernel};
pub use gated::{Gated, GatedArgs};
pub use pack::{PackArgs, PackKernels};
pub use probes::{ProbeArgs, ProbeVariant};
pub use schedule::{BatchSchedules, Chooser, ExpertRows, Family};
pub use topk::{TopkArgs, TopkVariant};

use super::arch::Arch;
use super::request::KernelRequest;
use crate::config::{BackendFamily, Levels, Moe};
use crate::dispatch::travel::{combine_form, combine_mode, payload_form};
use crate::model::MoeGeometry;
use crate::numerics::activation::Activation;
use crate::select::{LayerDecision, Members, Problem, Quant};
use dispatch::TravelKernels;
use grouped_gemm::{GroupedGemm, Weights};

/// Every variant of every kernel for an architecture, for those who compile all of them.
#[must_use]
pub fn all(arch: Arch) -> Vec<KernelRequest> {
    let products = DenseProduct::ALL.map(|product| product.request(arch));
    let around = products.into_iter().chain([DenseKernels.request(arch)]).chain(topk::all(arch));
    let around = around.chain([nvlink::NvlinkKernels.request(arch), PackKernels.request(arch)]);
    let around = around.chain([EchoKernel { hidden: 3584 }.request(arch)]);
    let around = around.chain(replayed(arch));
    let others =
        [probes::all(arch), ceilings::all(arch), grouped_gemm::all(arch), dispatch::all(arch), gated::all(arch)];
    others.into_iter().flatten().chain(around).collect()
}

/// The families that a deployment may run on an architecture: what it names alone, unless that may be replaced.
#[must_use]
pub fn families(moe: &Moe, arch: Arch) -> Vec<Family> {
    let named = match moe.backend {
        _ if moe.allow_fallback => None,
        BackendFamily::Auto => None,
        BackendFamily::Wgmma => Some(Family::Wgmma),
        BackendFamily::MmaSync => Some(Family::MmaSync),
        BackendFamily::Cpu | BackendFamily::Reference | BackendFamily::Simd => return Vec::new(),
    };
    let of_arch = if arch == Arch::Sm90a { &[Family::Wgmma, Family::MmaSync][..] } else { &[Family::MmaSync] };
    of_arch.iter().copied().filter(|family| named.is_none_or(|named| named == *family)).collect()
}

/// The kernels that a layer may need on an architecture: they follow from layer and deployment alone, so that their number
/// does not grow with tokens.
#[must_use]
pub fn for_layer(problem: &Problem, decision: &LayerDecision, moe: &Moe, arch: Arch) -> Vec<KernelRequest> {
    let choosers = families(moe, arch).into_iter();
    let choosers = choosers.map(|family| Chooser { family, batch_invariant: moe.batch_invariant });
    let products = choosers.flat_map(|chooser| products(problem, decision.activation, chooser, arch));
    travel(problem, decision, Levels::Two, arch).into_iter().chain(products).collect()
}

/// The kernels of what surrounds a layer's routed experts; none where the host computes that.
#[must_use]
pub fn around(geometry: &MoeGeometry, arch: Arch) -> Vec<KernelRequest> {
    let Some(topk) = TopkVariant::of(geometry) else { return Vec::new() };
    let products = DenseProduct::ALL.map(|product| product.request(arch));
    products.into_iter().chain([DenseKernels.request(arch), topk.request(arch)]).collect()
}

/// The kernels of steps in which no host learns what comes.
#[must_use]
pub fn replayed(arch: Arch) -> [KernelRequest; 1] {
    [deal::DealKernel.request(arch)]
}

/// The kernels that bring a layer's tokens to its experts and rows back.
#[must_use]
pub fn travel(problem: &Problem, decision: &LayerDecision, levels: Levels, arch: Arch) -> Vec<KernelRequest> {
    // Wider than any kernel: whoever packs the layer's weights says so.
    let Ok(hidden) = u32::try_from(problem.hidden) else { return Vec::new() };
    let kernels = TravelKernels {
        hidden,
        payload: payload_form(decision, 1.0),
        quantise: decision.quantise_activations,
        form: combine_form(decision),
        mode: combine_mode(decision),
    };
    let passing_on = (levels == Levels::Two).then(|| kernels.forward(arch));
    kernels
        .requests(arch)
        .into_iter()
        .chain(passing_on)
        .chain([nvlink::NvlinkKernels.request(arch)])
        .chain(replayed(arch))
        .collect()
}

/// Every kernel that `chooser` may give to a layer's experts, routed and shared, and what packs their weights.
#[must_use]
pub fn products(problem: &Problem, activation: Activation, chooser: Chooser, arch: Arch) -> Vec<KernelRequest> {
    let mut requests = vec![PackKernels.request(arch)];
    for group in problem.groups() {
        let (Ok(hidden), Ok(intermediate)) = (u32::try_from(group.hidden), u32::try_from(group.intermediate)) else {
            continue; // wider than any kernel; whoever packs such weights says so
        };
        let Some(quant) = group.quant else { continue };
        let weights = if quant == Quant::None { Weights::Bf16 } else { Weights::Nvfp4 };
        let gemm = GroupedGemm { hidden, intermediate, activation, weights, quantise: quant == Quant::Nvfp4 };
        // A rank's own tokens are the shared experts' rows: their number is no ground for another order of sums.
        let batch_invariant = chooser.batch_invariant || group.members == Members::Shared;
        let schedules = Chooser { batch_invariant, ..chooser }.all(&gemm);
        requests.extend(schedules.into_iter().map(|schedule| schedule.request(&gemm, arch)));
        if group.members == Members::Shared && quant == Quant::None {
            // Where cublasLt multiplies for it.
            requests.push(Gated { activation }.request(arch));
        }
    }
    requests
}

#[cfg(test)]
mod counts;

#[cfg(test)]
mod tests {
    use super::super::source::KernelSource;
    use super::super::testing::{check_hot, compiler};
    use super::*;

    #[test]
    fn sources_bring_the_headers_that_they_include_and_no_others() {
        for request in all(Arch::Sm80) {
            assert_eq!(request.source.missing_headers(), Vec::<&str>::new(), "{}", request.source.name);
            assert_eq!(request.source.unused_headers(), Vec::<&str>::new(), "{}", request.source.name);
        }
    }

    #[test]
    fn every_variant_compiles_for_every_architecture_without_local_memory() {
        let Some(compiler) = compiler() else { return };
        let requests = Arch::ALL.into_iter().flat_map(all);
        let problems: Vec<String> = requests.filter_map(|request| check_hot(&compiler, &request).err()).collect();
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }

    /// The check that every kernel passes fails for one whose array is indexed at run time, and for one without registers
    /// enough.
    #[test]
    fn a_planted_spill_fails_the_check_that_every_kernel_passes() {
        let Some(compiler) = compiler() else { return };
        let indexed = "extern \"C\" __global__ void k(float* x, int* at) { float a[64]; for (int i = 0; i < 64; ++i) a[i] = \
                       x[i]; float s = 0; for (int i = 0; i < 64; ++i) s += a[at[i] & 63]; x[0] = s; }\n";
        let spilled = "extern \"C\" __global__ void __launch_bounds__(1024) k(float* x) { float a[200];\n#pragma unroll\nfor \
                       (int i = 0; i < 200; ++i) a[i] = x[i];\n__syncthreads();\n#pragma unroll\nfor (int i = 0; i < 200; \
                       ++i) x[i] = a[199 - i] * a[i]; }\n";
        for arch in Arch::ALL {
            for main in [indexed, spilled] {
                let planted = KernelRequest::new(KernelSource { name: "planted", main, headers: &[] }, arch);
                let problem = check_hot(&compiler, &planted).expect_err("local memory");
                assert!(problem.contains("planted") && problem.contains("local memory"), "{problem}");
            }
        }
    }
}
