//! What an implementation serves, as plain data. This is the one place that says so; gates, messages and tests ask it.

mod narrow;

pub use narrow::WidenedError;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::environment::{ComputeCapability, InstructionSet, Library};
use super::identity::Identity;
use super::problem::{ActivationForm, RoutingKind};
use crate::config::{CombineDtype, Payload, Transport};

/// What one implementation serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    /// Its address; the last part is the one contract it computes.
    pub identity: Identity,
    /// What it runs on.
    pub target: Target,
    /// What it loads, with the earliest version that will do where that matters.
    pub libraries: BTreeMap<Library, Option<&'static str>>,
    /// The flag that has to be set before it may run.
    pub opt_in: Option<&'static str>,
    /// Why it is no longer offered.
    pub deprecated: Option<&'static str>,
    /// Activations, each with exactly the constants it supplies.
    pub activations: BTreeSet<ActivationForm>,
    /// Experts may add biases.
    pub bias: bool,
    /// How experts may be chosen.
    pub routing: BTreeSet<RoutingKind>,
    /// Slots a token.
    pub num_topk: Limits,
    /// Width in and out.
    pub hidden: Width,
    /// Width between FC1 and FC2.
    pub intermediate: Width,
    /// Experts that a rank may hold.
    pub num_local_experts: Limits,
    /// Experts may divide unevenly among ranks.
    pub uneven_experts: bool,
    /// Ranks that may share an expert; 1: none do.
    pub max_tensor_parallel: u32,
    /// Hosts that a world may span.
    pub max_num_nodes: Option<u32>,
    /// What may carry its tokens, the best first.
    pub transports: Vec<Transport>,
    /// Ranks of a world in which they can pass tokens on to others of their node; absent: they can't.
    pub forwards: Option<Limits>,
    /// `auto` has them do so where less crosses; otherwise it is done where it is asked for by name.
    pub forwards_unasked: bool,
    /// Forms in which it takes tokens.
    pub payloads: Vec<Payload>,
    /// Forms in which it gives rows back.
    pub combine_dtypes: Vec<CombineDtype>,
    /// It can hold to one order over K for every row count and chunking.
    pub batch_invariant: bool,
}

/// What an implementation runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A host's cores, through kernels for these instruction sets: the best that all ranks have is used.
    Cpu {
        /// The kernels there are.
        instruction_sets: BTreeSet<InstructionSet>,
    },
    /// A GPU of any of these.
    Gpu {
        /// The machine code there is.
        compute_capabilities: Vec<CapabilityRange>,
    },
}

impl Target {
    /// Whether it needs a GPU.
    #[must_use]
    pub const fn is_gpu(&self) -> bool {
        matches!(self, Self::Gpu { .. })
    }
}

/// Compute capabilities from `first` to `last`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapabilityRange {
    /// The lowest.
    pub first: ComputeCapability,
    /// The highest; absent: all later ones.
    pub last: Option<ComputeCapability>,
}

impl CapabilityRange {
    /// Exactly one.
    #[must_use]
    pub const fn only(major: u32, minor: u32) -> Self {
        let only = ComputeCapability::new(major, minor);
        Self { first: only, last: Some(only) }
    }

    /// Whether it holds `found`.
    #[must_use]
    pub fn contains(&self, found: ComputeCapability) -> bool {
        self.first <= found && self.last.is_none_or(|last| found <= last)
    }
}

impl fmt::Display for CapabilityRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.last {
            Some(last) if last == self.first => self.first.fmt(f),
            Some(last) => write!(f, "{} to {last}", self.first),
            None => write!(f, "{} and up", self.first),
        }
    }
}

/// Counts from `min` to `max`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// The least.
    pub min: usize,
    /// The most; absent: any.
    pub max: Option<usize>,
}

impl Limits {
    /// Any count from `min`.
    #[must_use]
    pub const fn from(min: usize) -> Self {
        Self { min, max: None }
    }

    /// Counts from `min` to `max`.
    #[must_use]
    pub const fn between(min: usize, max: usize) -> Self {
        Self { min, max: Some(max) }
    }

    /// Whether it holds `found`.
    #[must_use]
    pub fn contains(self, found: usize) -> bool {
        self.min <= found && self.max.is_none_or(|max| found <= max)
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self { min, max: None } => write!(f, "{min} and up"),
            Self { min, max: Some(max) } if min == max => write!(f, "{min}"),
            Self { min, max: Some(max) } => write!(f, "{min} to {max}"),
        }
    }
}

/// Widths that kernels are written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Width {
    /// It must be a multiple of this; at least 1.
    pub multiple_of: usize,
    /// Its limits.
    pub limits: Limits,
}

impl Width {
    /// Any multiple of `multiple_of` except 0.
    #[must_use]
    pub const fn multiple_of(multiple_of: usize) -> Self {
        Self { multiple_of, limits: Limits::from(multiple_of) }
    }

    /// Whether it holds `found`.
    #[must_use]
    pub fn contains(self, found: usize) -> bool {
        found.is_multiple_of(self.multiple_of) && self.limits.contains(found)
    }
}

impl fmt::Display for Width {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "multiples of {}", self.multiple_of)?;
        match self.limits {
            Limits { min, max: None } if min <= self.multiple_of => Ok(()),
            limits => write!(f, " from {limits}"),
        }
    }
}
