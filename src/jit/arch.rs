//! The architectures that kernels are compiled for.

use std::fmt;
use std::str::FromStr;

use crate::select::environment::ComputeCapability;

/// What machine code is made for. The `a` architectures are for one compute capability each: their code runs nowhere else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    /// Ampere and Ada: every compute capability 8.x.
    Sm80,
    /// Hopper: 9.0.
    Sm90a,
    /// Blackwell, B200: 10.0.
    Sm100a,
    /// Blackwell, B300: 10.3.
    Sm103a,
    /// Blackwell, workstations: 12.0.
    Sm120a,
}

impl Arch {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Sm80, Self::Sm90a, Self::Sm100a, Self::Sm103a, Self::Sm120a];

    /// As the compiler spells it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm90a => "sm_90a",
            Self::Sm100a => "sm_100a",
            Self::Sm103a => "sm_103a",
            Self::Sm120a => "sm_120a",
        }
    }

    /// The one whose code a GPU runs; absent where there is none.
    #[must_use]
    pub fn of(capability: ComputeCapability) -> Option<Self> {
        match (capability.major, capability.minor) {
            (8, _) => Some(Self::Sm80),
            (9, 0) => Some(Self::Sm90a),
            (10, 0) => Some(Self::Sm100a),
            (10, 3) => Some(Self::Sm103a),
            (12, 0) => Some(Self::Sm120a),
            _ => None,
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that is no architecture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no architecture that kernels are compiled for; give one of {}", Arch::ALL.map(Arch::name).join(", "))]
pub struct ParseArchError {
    text: String,
}

impl FromStr for Arch {
    type Err = ParseArchError;

    fn from_str(text: &str) -> Result<Self, ParseArchError> {
        let found = Self::ALL.into_iter().find(|arch| arch.name() == text);
        found.ok_or_else(|| ParseArchError { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_and_others_are_refused() {
        for arch in Arch::ALL {
            assert_eq!(arch.name().parse(), Ok(arch));
        }
        let message = "sm_90".parse::<Arch>().expect_err("no sm_90").to_string();
        assert_eq!(
            message,
            "\"sm_90\" is no architecture that kernels are compiled for; give one of sm_80, sm_90a, sm_100a, sm_103a, sm_120a"
        );
    }

    #[test]
    fn a_gpu_gets_code_that_it_runs() {
        let of = |major, minor| Arch::of(ComputeCapability::new(major, minor));
        assert_eq!((of(8, 0), of(8, 9)), (Some(Arch::Sm80), Some(Arch::Sm80)));
        assert_eq!((of(9, 0), of(10, 3)), (Some(Arch::Sm90a), Some(Arch::Sm103a)));
        assert_eq!((of(7, 5), of(12, 1)), (None, None), "code of sm_120a does not run on 12.1");
    }
}
