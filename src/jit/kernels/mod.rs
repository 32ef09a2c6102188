//! Every kernel that there is: its arguments, its source, its requests.

pub mod grouped_gemm;
mod probes;
mod quantise;
mod schedule;

pub use probes::{ProbeArgs, ProbeVariant};
pub use quantise::{QuantiseArguments, QuantiseVariant};
pub use schedule::{Chooser, Family};

use super::arch::Arch;
use super::request::KernelRequest;
use crate::numerics::activation::Activation;
use crate::select::{Problem, Quant};
use grouped_gemm::{GatherTokens, GroupedGemm, Schedule, Weights};

/// Every variant of every kernel for an architecture, for those who compile all of them.
#[must_use]
pub fn all(arch: Arch) -> Vec<KernelRequest> {
    let quantise = QuantiseVariant::ALL.map(|variant| variant.request(arch));
    quantise.into_iter().chain(probes::all(arch)).chain(grouped_gemm::all(arch)).collect()
}

/// The kernels that a layer may need on an architecture: they follow from the layer alone, so that their number does not
/// grow with tokens.
#[must_use]
pub fn for_layer(problem: &Problem, activation: Activation, batch_invariant: bool, arch: Arch) -> Vec<KernelRequest> {
    let of_shared = problem.shared.is_some_and(|shared| shared.quantised_activations);
    let quantises = problem.quantisation.quantised_activations || of_shared;
    // bf16 hidden states; the latent and FC2's input are f32.
    let variants = if quantises { &QuantiseVariant::ALL[..] } else { &[] };
    let families = if arch == Arch::Sm90a { &[Family::Wgmma, Family::MmaSync][..] } else { &[Family::MmaSync] };
    let choosers = families.iter().map(|&family| Chooser { family, batch_invariant });
    let products = choosers.flat_map(|chooser| products(problem, activation, chooser, arch));
    variants.iter().map(|variant| variant.request(arch)).chain(products).collect()
}

/// Every kernel that `chooser` may give to a layer's experts, routed and shared.
#[must_use]
pub fn products(problem: &Problem, activation: Activation, chooser: Chooser, arch: Arch) -> Vec<KernelRequest> {
    let mut requests = Vec::new();
    for group in problem.groups() {
        let (Ok(hidden), Ok(intermediate)) = (u32::try_from(group.hidden), u32::try_from(group.intermediate)) else {
            continue; // wider than any kernel; whoever packs such weights says so
        };
        let Some(quant) = group.quant else { continue };
        let weights = if quant == Quant::None { Weights::Bf16 } else { Weights::Nvfp4 };
        let gemm = GroupedGemm { hidden, intermediate, activation, weights, quantise: quant == Quant::Nvfp4 };
        let schedules = chooser.all(&gemm);
        if schedules.iter().any(|schedule| matches!(schedule, Schedule::Wgmma { .. })) {
            requests.push(GatherTokens { hidden }.request(arch));
        }
        requests.extend(schedules.into_iter().map(|schedule| schedule.request(&gemm, arch)));
    }
    requests
}

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
        for arch in Arch::ALL {
            for request in all(arch) {
                check_hot(&compiler, &request).unwrap_or_else(|problem| panic!("{problem}"));
            }
        }
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
