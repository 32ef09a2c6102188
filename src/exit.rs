//! Exit codes, and the trait by which every error says which one it ends the process with.

/// Why a process ends; the discriminant is its exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Exit {
    /// All is well.
    Fine = 0,
    /// The result is wrong (`verify`).
    WrongResult = 1,
    /// Bad input or configuration.
    BadInput = 2,
    /// The environment lacks something: device, library, launcher.
    Environment = 3,
    /// Ranks disagree.
    Disagreement = 4,
    /// A peer failed or a limit passed.
    PeerFailed = 5,
    /// A bug in Lockstep.
    Bug = 101,
}

impl Exit {
    /// The code the process ends with.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The inverse of [`Exit::code`]; an unknown code reads as [`Exit::Bug`].
    #[must_use]
    pub const fn from_code(code: u8) -> Self {
        match code {
            0 => Self::Fine,
            1 => Self::WrongResult,
            2 => Self::BadInput,
            3 => Self::Environment,
            4 => Self::Disagreement,
            5 => Self::PeerFailed,
            _ => Self::Bug,
        }
    }
}

/// Which ranks know of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// This one alone: the others may be waiting for it.
    Here,
    /// All of them, by agreement; one rank prints it.
    Everywhere {
        /// Whether this rank is the one.
        speaks: bool,
    },
}

/// An error that knows the exit code it deserves.
pub trait Classify: std::error::Error {
    /// The exit code of a process that ends with this error.
    fn exit(&self) -> Exit;

    /// Which ranks know of it. Errors that wrap an agreed one pass on its answer.
    fn known(&self) -> Known {
        Known::Here
    }
}
