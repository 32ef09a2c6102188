//! Why an implementation does not serve a layer.

use std::fmt;

use serde::Serialize;

use super::ranks::RankSet;

/// The reasons there are; nothing is refused for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The contract of the layer is another.
    Quantisation,
    /// Tokens or rows would travel in a form that it does not take.
    Dtype,
    /// It runs on what ranks don't drive.
    Device,
    /// No machine code for the GPU.
    ComputeCapability,
    /// No kernels for the CPU.
    InstructionSet,
    /// Something it loads is not there, or too old.
    MissingLibrary,
    /// No kernels for a width.
    Shape,
    /// Experts don't go with ranks.
    ExpertsAndRanks,
    /// The arrangement of ranks: hosts, sharing of experts or GPUs, transport.
    Topology,
    /// It does not compute the activation, or not with these constants.
    Activation,
    /// It does not add the experts' biases.
    Bias,
    /// Experts are chosen in a way, or number, that it does not serve.
    Routing,
    /// It can't keep a promise about bits.
    Determinism,
    /// It has to be asked for by a flag.
    PathNotEnabled,
    /// It is no longer offered.
    Deprecated,
}

impl Reason {
    /// Its name in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Quantisation => "quantisation",
            Self::Dtype => "dtype",
            Self::Device => "device",
            Self::ComputeCapability => "compute capability",
            Self::InstructionSet => "instruction set",
            Self::MissingLibrary => "missing library",
            Self::Shape => "shape",
            Self::ExpertsAndRanks => "experts and ranks",
            Self::Topology => "topology",
            Self::Activation => "activation",
            Self::Bias => "bias",
            Self::Routing => "routing",
            Self::Determinism => "determinism",
            Self::PathNotEnabled => "path not enabled",
            Self::Deprecated => "deprecated",
        }
    }

    /// What a person can do about it, other than ask for another implementation; empty where nothing.
    #[must_use]
    pub const fn cure(self) -> &'static str {
        match self {
            Self::Quantisation | Self::Activation | Self::Bias | Self::Routing | Self::Shape | Self::Deprecated => "",
            Self::Dtype => "set dispatch.payload and dispatch.combine_dtype to auto",
            Self::Device => "set cluster.device to what it runs on (cpu or gpu), and start ranks only where that is",
            Self::ComputeCapability => "start ranks only on GPUs that it has code for",
            Self::InstructionSet => "start ranks only on machines that have it",
            Self::MissingLibrary => "install the library on the ranks named",
            Self::ExpertsAndRanks => "start another number of ranks",
            Self::Topology => "set dispatch.transport to auto, or start ranks as it needs them",
            Self::Determinism => "set moe.batch_invariant: false",
            Self::PathNotEnabled => "set the flag on every rank",
        }
    }

    /// Whether the machines are at fault rather than what was asked.
    #[must_use]
    pub const fn is_environment(self) -> bool {
        matches!(self, Self::Device | Self::ComputeCapability | Self::InstructionSet | Self::MissingLibrary)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One reason against one implementation.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Refusal {
    /// Which of the reasons.
    pub reason: Reason,
    /// What is needed and what was found.
    pub sentence: String,
    /// The ranks that refuse.
    pub ranks: RankSet,
}

impl fmt::Display for Refusal {
    /// `shape: hidden 100 is no multiple of 16 (ranks 0-3)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.reason, self.sentence, self.ranks)
    }
}

/// A fact that nobody collected and that would have counted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Assumption {
    /// The reason for which it could have been refused.
    pub reason: Reason,
    /// What is not known.
    pub sentence: String,
    /// The ranks of which it is not known.
    pub ranks: RankSet,
}

impl fmt::Display for Assumption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.reason, self.sentence, self.ranks)
    }
}
