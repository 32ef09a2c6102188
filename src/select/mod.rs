//! What runs a layer: the quantisation it runs in, and the identity of the implementation.
//!
//! Pure: decides from plain data, touches nothing.

mod decide;

use std::fmt;

pub use decide::{LayerDecision, LayerFacts, SelectError, SharedFacts, TokenForm, choose_technique, decide};

/// The numeric contract of an expert computation, the last part of an identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Quant {
    /// NVFP4 weights and activations: FC1 and FC2 inputs go through NVFP4.
    Nvfp4,
    /// NVFP4 weights, unquantised activations.
    W4a16Nvfp4,
    /// Unquantised weights and activations.
    None,
}

impl Quant {
    /// The name in an identity.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nvfp4 => "nvfp4",
            Self::W4a16Nvfp4 => "w4a16_nvfp4",
            Self::None => "none",
        }
    }
}

/// The address of an implementation: `provider.technique.kernel.quant`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// How it computes: `reference`, `simd`, ...
    pub technique: &'static str,
    /// The numeric contract.
    pub quant: Quant,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lockstep.{}.grouped_gemm.{}", self.technique, self.quant.name())
    }
}
