//! The values of environment facts.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Something that may be there: nobody looked, somebody looked in vain, or this.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fact<T> {
    /// Nobody looked.
    #[default]
    Unknown,
    /// It is not there.
    Absent,
    /// It is there.
    Present(T),
}

impl<T> Fact<T> {
    /// Whether nobody looked.
    #[must_use]
    pub const fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown)
    }

    /// The value, where it is there.
    #[must_use]
    pub const fn present(&self) -> Option<&T> {
        match self {
            Self::Present(value) => Some(value),
            Self::Unknown | Self::Absent => None,
        }
    }
}

impl<T: fmt::Display> fmt::Display for Fact<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("unknown"),
            Self::Absent => f.write_str("absent"),
            Self::Present(value) => value.fmt(f),
        }
    }
}

impl<T: Serialize> Serialize for Fact<T> {
    /// Absent as null. Unknown has no form of its own: a key that holds it is left out.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.present().serialize(serializer)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Fact<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(deserializer)?.map_or(Self::Absent, Self::Present))
    }
}

/// A CPU instruction set that kernels are written for, the lesser first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InstructionSet {
    /// No vector instructions asked for by name.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW and VL.
    Avx512,
}

impl InstructionSet {
    /// All, the lesser first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// The name in files, on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no instruction set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{found}` is not an instruction set; write scalar, avx2 or avx512")]
pub struct UnknownInstructionSet {
    /// What was written.
    pub found: String,
}

impl FromStr for InstructionSet {
    type Err = UnknownInstructionSet;

    fn from_str(text: &str) -> Result<Self, UnknownInstructionSet> {
        let found = || UnknownInstructionSet { found: text.to_owned() };
        Self::ALL.into_iter().find(|set| set.name() == text).ok_or_else(found)
    }
}

/// A GPU's compute capability: `9.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComputeCapability {
    /// The generation.
    pub major: u32,
    /// The member of the generation.
    pub minor: u32,
}

impl ComputeCapability {
    /// A compute capability.
    #[must_use]
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A text that is no compute capability.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no compute capability; write major and minor as text, as in \"9.0\"")]
pub struct ParseCapabilityError {
    text: String,
}

impl FromStr for ComputeCapability {
    type Err = ParseCapabilityError;

    fn from_str(text: &str) -> Result<Self, ParseCapabilityError> {
        let number = |part: &str| {
            let is_plain = !part.is_empty() && part.len() <= 3 && part.bytes().all(|byte| byte.is_ascii_digit());
            is_plain.then(|| part.parse().ok()).flatten()
        };
        let parts = text.split_once('.').and_then(|(major, minor)| number(major).zip(number(minor)));
        let (major, minor) = parts.ok_or_else(|| ParseCapabilityError { text: text.to_owned() })?;
        Ok(Self { major, minor })
    }
}

impl Serialize for ComputeCapability {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ComputeCapability {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// What is loaded at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Library {
    /// The MPI library.
    Mpi,
    /// The GPU driver.
    Driver,
    /// NCCL.
    Nccl,
    /// The run-time compiler.
    Nvrtc,
    /// Dense products on GPUs.
    Cublaslt,
}

impl Library {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Mpi, Self::Driver, Self::Nccl, Self::Nvrtc, Self::Cublaslt];

    /// The name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mpi => "mpi",
            Self::Driver => "driver",
            Self::Nccl => "nccl",
            Self::Nvrtc => "nvrtc",
            Self::Cublaslt => "cublaslt",
        }
    }

    /// Whether another version may give other bits, or can't work together: then ranks must have the same.
    ///
    /// The compiler makes the code that runs, and cublasLt brings its own. NCCL moves bytes only, but its communicators want one version. MPI moves
    /// bytes between versions that its launcher has matched; the driver loads finished machine code.
    #[must_use]
    pub const fn must_match(self) -> bool {
        matches!(self, Self::Nccl | Self::Nvrtc | Self::Cublaslt)
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mpi => "MPI",
            Self::Driver => "the GPU driver",
            Self::Nccl => "NCCL",
            Self::Nvrtc => "NVRTC",
            Self::Cublaslt => "cublasLt",
        })
    }
}

/// Whether version `found` is `wanted` or later; absent where `found` has no number to tell by.
///
/// The first run of numbers between dots counts: `Open MPI v4.1.6` is 4.1.6.
#[must_use]
pub fn version_at_least(found: &str, wanted: &str) -> Option<bool> {
    Some(numbers(found)? >= numbers(wanted)?)
}

fn numbers(version: &str) -> Option<Vec<u64>> {
    let start = version.find(|c: char| c.is_ascii_digit())?;
    let run = version[start..].split(|c: char| !(c.is_ascii_digit() || c == '.')).next()?;
    let mut numbers: Vec<u64> =
        run.split('.').filter(|part| !part.is_empty()).map_while(|part| part.parse().ok()).collect();
    // 13.0 is no earlier than 13.
    while numbers.last() == Some(&0) {
        numbers.pop();
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compute_capabilities_are_read_strictly() {
        assert_eq!("10.3".parse(), Ok(ComputeCapability::new(10, 3)));
        for text in ["9", "9.", ".0", "sm_90", "9.0a", "+9.0", "9.0.0", "99999.0", ""] {
            assert!(text.parse::<ComputeCapability>().is_err(), "{text}");
        }
        assert!(ComputeCapability::new(9, 0) < ComputeCapability::new(10, 0), "by number, not by text");
    }

    #[test]
    fn versions_compare_by_number() {
        for (found, wanted, at_least) in [
            ("2.28.3", "2.20", Some(true)),
            ("2.9", "2.20", Some(false)),
            ("Open MPI v4.1.6, package: Debian", "4.1.6", Some(true)),
            ("13", "13.0", Some(true)),
            ("13.0", "13", Some(true)),
            ("13.0.88", "13.1", Some(false)),
            ("unreleased", "1", None),
        ] {
            assert_eq!(version_at_least(found, wanted), at_least, "{found} >= {wanted}");
        }
    }
}
