//! What runs a layer: from problem, deployment and environments to one selection, the same on every rank.
//!
//! Pure: decides from plain data, touches nothing. Start at [`resolve()`]. What an implementation can do is written once, in
//! the [`registry`]'s descriptors; gates, messages, fingerprints and tests ask there.

mod candidate;
mod decide;
mod deployment;
pub mod descriptor;
pub mod environment;
pub mod fingerprint;
mod format;
mod gates;
mod identity;
mod joint;
mod problem;
mod query;
mod ranks;
mod refusal;
pub mod registry;
mod request;
mod resolve;
pub mod tactics;
#[cfg(test)]
pub(crate) mod tests;

pub use candidate::Candidate;
pub use decide::{LayerDecision, LayerFacts, SelectError, SharedFacts, TokenForm, decide};
pub use deployment::{DeploymentError, DeploymentFacts, ExpertSplit, MAX_NUM_RANKS};
pub use environment::{Environment, InstructionSet};
pub use fingerprint::{Digest, Fingerprint};
pub use format::{FormatError, check_format};
pub use identity::{Identity, Part, Quant};
pub use problem::{
    ActivationForm, Members, Problem, ProblemError, Quantisation, RoutingKind, SharedProblem, WeightFormat,
};
pub use query::{Query, QueryError};
pub use ranks::RankSet;
pub use refusal::{Assumption, Reason, Refusal};
pub use registry::Registry;
pub use request::Request;
pub use resolve::{LayerSelection, LayersRefused, Refused, ResolveError, Selection, Why, Works, resolve};
