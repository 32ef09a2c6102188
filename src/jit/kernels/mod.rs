//! Every kernel that there is: its arguments, its source, its requests.

mod quantise;

pub use quantise::{QuantiseArguments, QuantiseVariant};

use super::arch::Arch;
use super::request::KernelRequest;
use crate::select::Problem;

/// Every variant of every kernel for an architecture, for those who compile all of them.
#[must_use]
pub fn all(arch: Arch) -> Vec<KernelRequest> {
    QuantiseVariant::ALL.map(|variant| variant.request(arch)).to_vec()
}

/// The kernels that a layer needs: they follow from the layer alone, so that their number does not grow with tokens.
///
/// The products themselves are not among them yet: no backend of this build runs on GPUs.
#[must_use]
pub fn for_layer(problem: &Problem, arch: Arch) -> Vec<KernelRequest> {
    let of_shared = problem.shared.is_some_and(|shared| shared.quantised_activations);
    let quantises = problem.quantisation.quantised_activations || of_shared;
    // bf16 hidden states; the latent and FC2's input are f32.
    if quantises { QuantiseVariant::ALL.map(|variant| variant.request(arch)).to_vec() } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::super::testing::compiler;
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
                let compiled = compiler.compile(&request).unwrap_or_else(|error| panic!("{error}"));
                for usage in &compiled.usage {
                    assert!(!usage.has_local_memory(), "{}: {usage:?}", request.describe());
                }
                assert!(!compiled.log.contains("warning"), "{}:\n{}", request.describe(), compiled.log);
            }
        }
    }
}
