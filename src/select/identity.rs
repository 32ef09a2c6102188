//! The address of an implementation.

use std::fmt;

use serde::{Serialize, Serializer};

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
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Nvfp4, Self::W4a16Nvfp4, Self::None];

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

impl fmt::Display for Quant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The address of an implementation: `provider.technique.kernel.quant`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// Who wrote it.
    pub provider: &'static str,
    /// How it computes: `reference`, `simd`, ...
    pub technique: &'static str,
    /// What it computes.
    pub kernel: &'static str,
    /// The numeric contract.
    pub quant: Quant,
}

impl Identity {
    /// Lockstep's own grouped GEMM of a technique.
    #[must_use]
    pub const fn grouped_gemm(technique: &'static str, quant: Quant) -> Self {
        Self { provider: "lockstep", technique, kernel: "grouped_gemm", quant }
    }

    /// The same implementation under another contract.
    #[must_use]
    pub const fn with_quant(self, quant: Quant) -> Self {
        Self { quant, ..self }
    }

    /// Its parts with their kinds, in the order in which they are written.
    #[must_use]
    pub const fn parts(self) -> [(Part, &'static str); 4] {
        [
            (Part::Provider, self.provider),
            (Part::Technique, self.technique),
            (Part::Kernel, self.kernel),
            (Part::Quant, self.quant.name()),
        ]
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.parts().map(|(_, name)| name).join("."))
    }
}

impl Serialize for Identity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What a part of an identity says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Who wrote it.
    Provider,
    /// How it computes.
    Technique,
    /// What it computes.
    Kernel,
    /// The numeric contract.
    Quant,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Provider => "provider",
            Self::Technique => "technique",
            Self::Kernel => "kernel",
            Self::Quant => "quant",
        })
    }
}
