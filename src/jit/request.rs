//! What is to be compiled.

use std::collections::BTreeMap;
use std::fmt;

use super::arch::Arch;
use super::source::KernelSource;

/// The value of a define. Numbers that are not whole go in as their bits: text would round them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Define {
    /// A whole number.
    Int(i64),
    /// An f32, by its bits: `0x40800000u`. The source says `__uint_as_float(NAME)`.
    Bits(u32),
}

impl Define {
    /// An f32 by its bits.
    #[must_use]
    pub fn float(value: f32) -> Self {
        Self::Bits(value.to_bits())
    }
}

impl From<bool> for Define {
    fn from(value: bool) -> Self {
        Self::Int(i64::from(value))
    }
}

impl From<u32> for Define {
    fn from(value: u32) -> Self {
        Self::Int(i64::from(value))
    }
}

impl fmt::Display for Define {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => write!(f, "{value}"),
            Self::Bits(bits) => write!(f, "{bits:#010x}u"),
        }
    }
}

/// One kernel specialised for one use: all that decides its machine code, but for the compiler.
///
/// Nothing else may go in: no path, no rank, no token count. Two requests that are equal have one artefact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelRequest {
    /// The source.
    pub source: KernelSource,
    /// Its defines by name: shapes, tile, formats, activation constants.
    pub defines: BTreeMap<&'static str, Define>,
    /// What it is compiled for.
    pub arch: Arch,
}

impl KernelRequest {
    /// A request without defines.
    #[must_use]
    pub const fn new(source: KernelSource, arch: Arch) -> Self {
        Self { source, defines: BTreeMap::new(), arch }
    }

    /// With one more define.
    ///
    /// # Panics
    /// If it is there already.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<Define>) -> Self {
        let before = self.defines.insert(name, value.into());
        assert!(before.is_none(), "{name} is defined twice for {}", self.source.name);
        self
    }

    /// With the size of the host's arguments, `ARGUMENTS_BYTES`, which the source asserts for its own struct.
    ///
    /// # Panics
    /// If it is there already.
    #[must_use]
    pub fn with_arguments<A>(self) -> Self {
        self.with("ARGUMENTS_BYTES", Define::Int(i64::try_from(size_of::<A>()).unwrap_or(i64::MAX)))
    }

    /// What the compiler is told, in a fixed order.
    ///
    /// IEEE arithmetic is spelt out although it is the default: the bits of every format depend on it. `-v` changes the log
    /// alone, from which registers and spills are read.
    #[must_use]
    pub fn options(&self) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={}", self.arch)];
        options.extend(
            [
                "--std=c++17",
                "--device-as-default-execution-space",
                "--ftz=false",
                "--prec-div=true",
                "--prec-sqrt=true",
                "--fmad=true",
                "--ptxas-options=-v",
            ]
            .map(str::to_owned),
        );
        options.extend(self.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")));
        options
    }

    /// For people: name, architecture and defines.
    #[must_use]
    pub fn describe(&self) -> String {
        let defines: Vec<String> = self.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
        format!("{} for {} ({})", self.source.name, self.arch, defines.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: KernelSource = KernelSource { name: "k", main: "", headers: &[] };

    #[test]
    fn defines_are_sorted_and_floats_go_in_by_their_bits() {
        let request = KernelRequest::new(SOURCE, Arch::Sm90a).with("TILE", 64_u32).with("BETA", Define::float(4.0));
        let options = request.options();
        assert_eq!(options[0], "--gpu-architecture=sm_90a");
        assert_eq!(options[options.len() - 2..], ["--define-macro=BETA=0x40800000u", "--define-macro=TILE=64"]);
        assert_eq!(request.describe(), "k for sm_90a (BETA=0x40800000u TILE=64)");
    }

    #[test]
    fn the_arguments_size_is_a_define() {
        assert_eq!(
            KernelRequest::new(SOURCE, Arch::Sm80).with_arguments::<[u64; 3]>().defines["ARGUMENTS_BYTES"],
            Define::Int(24)
        );
    }
}
