//! The instruction sets that the kernels are written for.
//!
//! All of them give the same bits; the choice is about time alone.

use std::fmt;
use std::str::FromStr;

/// An instruction set, the lesser first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// No vector instructions asked for by name.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW and VL.
    Avx512,
}

impl Isa {
    /// All, the lesser first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// The best that this machine has.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if super::avx512::Avx512::detect().is_some() {
                return Self::Avx512;
            }
            if super::avx2::Avx2::detect().is_some() {
                return Self::Avx2;
            }
        }
        Self::Scalar
    }

    /// The name that the command line and reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no instruction set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{found}` is not an instruction set; write scalar, avx2 or avx512")]
pub struct UnknownIsa {
    /// What was written.
    pub found: String,
}

impl FromStr for Isa {
    type Err = UnknownIsa;

    fn from_str(text: &str) -> Result<Self, UnknownIsa> {
        Self::ALL.into_iter().find(|isa| isa.name() == text).ok_or_else(|| UnknownIsa { found: text.to_owned() })
    }
}
