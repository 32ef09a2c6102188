//! Why there is no selection, with the whole trail and what to do.

use std::fmt;

use super::super::candidate::Candidate;
use super::super::identity::Identity;
use super::super::problem::{ProblemError, Quantisation, counted, list};
use super::super::query::QueryError;
use super::super::ranks::{Layers, RankSet};
use super::super::registry::{AUTO, CPU, Registry};
use super::super::request::Request;
use super::show::Trail;
use crate::exit::{Classify, Exit};
use crate::ids::LayerIdx;
use crate::near::did_you_mean;

/// Why there is no selection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// Not one environment a rank.
    #[error(
        "the deployment has {}, but {} described; describe each rank, or give one entry with \"count\": {num_ranks}",
        counted(*num_ranks, "rank"),
        match found {
            1 => "1 environment is".to_owned(),
            found => format!("{found} environments are"),
        }
    )]
    Ranks {
        /// Ranks of the deployment.
        num_ranks: usize,
        /// Environments.
        found: usize,
    },
    /// A layer that can't be.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// No such family.
    #[error(
        "backend `{backend}` is not in this build of lockstep{}; valid are {}",
        did_you_mean(near),
        offered.join(", ")
    )]
    UnknownBackend {
        /// What was asked for.
        backend: String,
        /// What may have been meant.
        near: Vec<String>,
        /// What there is.
        offered: Vec<&'static str>,
    },
    /// A pin that addresses no implementation.
    #[error(transparent)]
    Query(#[from] QueryError),
    /// A pin and a family that exclude each other.
    #[error("moe.implementation pins {identity}, which is not of moe.backend {family}; leave one of the two out")]
    PinOutsideFamily {
        /// The pin.
        identity: Identity,
        /// The family.
        family: &'static str,
    },
    /// `auto` could mean two things.
    #[error(
        "some ranks have a GPU ({with}) and some have none ({without}), so backend auto is ambiguous; name one with \
         moe.backend, such as cpu, or set cluster.device"
    )]
    MixedWorld {
        /// Ranks that have one.
        with: RankSet,
        /// Ranks that have none.
        without: RankSet,
    },
    /// Nothing that was asked for serves.
    #[error("{0}")]
    Refused(Box<Refused>),
}

/// Nothing that was asked for serves some layers: with what every implementation says, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// What was asked for.
    pub request: Request,
    /// The layers, with what every implementation says about them.
    pub failures: Vec<LayersRefused>,
    /// What could be asked for instead and would serve every layer.
    pub works: Works,
    /// A fallback was allowed and found nothing either.
    pub is_last_resort: bool,
}

/// Layers that nothing asked for serves, for the same reasons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayersRefused {
    /// The layers.
    pub layers: Vec<LayerIdx>,
    /// Their formats.
    pub quantisation: Quantisation,
    /// What every implementation says about them.
    pub candidates: Vec<Candidate>,
}

impl LayersRefused {
    /// Whether only the layers differ.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.quantisation == other.quantisation && self.candidates == other.candidates
    }
}

impl Classify for ResolveError {
    fn exit(&self) -> Exit {
        match self {
            Self::Ranks { .. }
            | Self::UnknownBackend { .. }
            | Self::PinOutsideFamily { .. }
            | Self::Problem(_)
            | Self::Query(_) => Exit::BadInput,
            Self::MixedWorld { .. } => Exit::Environment,
            Self::Refused(refused) => {
                // At fault are the machines where other machines would have served what was asked.
                let would_serve = |candidate: &Candidate| candidate.refusals.iter().all(|r| r.reason.is_environment());
                let asked = |failure: &LayersRefused| {
                    failure.candidates.iter().any(|candidate| candidate.is_asked_for && would_serve(candidate))
                };
                if refused.failures.iter().all(asked) { Exit::Environment } else { Exit::BadInput }
            }
        }
    }
}

/// What would serve every layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Works {
    /// Values of `moe.backend`.
    pub backends: Vec<&'static str>,
    /// Values of `moe.implementation`: listed where a pin was asked for.
    pub implementations: Vec<Identity>,
}

impl Works {
    /// What serves every kind of layer, given who is eligible for each.
    pub(super) fn new(request: &Request, eligible: &[Vec<Identity>], registry: &Registry) -> Self {
        let serves_all = |asks_for: &dyn Fn(Identity) -> bool| {
            eligible.iter().all(|identities| identities.iter().any(|identity| asks_for(*identity)))
        };
        let families = registry.families().into_iter();
        let pins = registry.identities().filter(|_| matches!(request, Request::Pin { .. }));
        Self {
            backends: families
                .filter(|family| serves_all(&|identity| registry.is_in_family(family, identity)))
                .collect(),
            implementations: pins.filter(|pin| serves_all(&|identity| identity == *pin)).collect(),
        }
    }

    /// The backend to name first: a technique rather than a family of several.
    fn best_backend(&self) -> Option<&'static str> {
        let technique = self.backends.iter().find(|family| ![AUTO, CPU].contains(family));
        technique.or(self.backends.first()).copied()
    }
}

impl fmt::Display for Works {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { backends, implementations } = self;
        match (&backends[..], &implementations[..]) {
            ([], _) => f.write_str("nothing in this build"),
            (backends, []) => write!(f, "moe.backend {}", list(backends, ", ")),
            (backends, pins) => {
                write!(f, "moe.implementation {}; moe.backend {}", list(pins, ", "), list(backends, ", "))
            }
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request, failures, works, is_last_resort } = self;
        let layers: Layers = failures.iter().flat_map(|failure| &failure.layers).copied().collect();
        write!(f, "{request} does not serve {layers} on every rank")?;
        if *is_last_resort {
            f.write_str(", and nothing that it may fall back to does")?;
        }
        for failure in failures {
            let layers: Layers = failure.layers.iter().copied().collect();
            let mut candidates: Vec<&Candidate> = failure.candidates.iter().collect();
            candidates.sort_by_key(|candidate| !candidate.is_asked_for);
            write!(f, "\n{layers}, {}:{}", failure.quantisation, Trail(candidates.into_iter()))?;
        }
        write!(f, "\nwould serve: {works}")?;
        write!(f, "\ncure: {}", list(self.cures(), "; or "))
    }
}

impl Refused {
    /// What to change, the likeliest first: asking for another, then what the one asked for complains of.
    fn cures(&self) -> Vec<String> {
        let mut cures = Vec::new();
        let backend = self.works.best_backend();
        match &self.request {
            Request::Auto => {}
            Request::Pin { .. } => {
                cures.extend(self.works.implementations.first().map(|pin| format!("set moe.implementation: {pin}")));
                let unpinned = |backend| format!("leave moe.implementation out and set moe.backend: {backend}");
                cures.extend(backend.map(unpinned));
            }
            Request::Family(_) => {
                cures.extend(backend.map(|backend| format!("set moe.backend: {backend}")));
                let serves_any = |failure: &LayersRefused| failure.candidates.iter().any(Candidate::is_eligible);
                if !self.is_last_resort && self.failures.iter().all(serves_any) {
                    cures.push("set moe.allow_fallback: true".to_owned());
                }
            }
        }
        // Leaving layers out is a last resort.
        if cures.is_empty() || self.failures.iter().all(|failure| cure_of_asked(failure).is_some()) {
            let mut of_layers: Vec<String> = self.failures.iter().map(cure_of_layers).collect();
            of_layers.dedup();
            cures.push(of_layers.join(", and "));
        }
        cures
    }
}

/// What makes something asked for serve some layers; where nothing does, that they have to be left out.
fn cure_of_layers(failure: &LayersRefused) -> String {
    cure_of_asked(failure).unwrap_or_else(|| {
        let layers: Layers = failure.layers.iter().copied().collect();
        format!("leave out {layers}, which no setting makes it serve")
    })
}

/// What to change so that something asked for serves: of those whose every reason has a cure, the one with the fewest.
fn cure_of_asked(failure: &LayersRefused) -> Option<String> {
    let cures_of = |candidate: &Candidate| {
        let mut cures: Vec<&str> = candidate.refusals.iter().map(|refusal| refusal.reason.cure()).collect();
        cures.dedup();
        cures
    };
    failure
        .candidates
        .iter()
        .filter(|candidate| candidate.is_asked_for)
        .map(cures_of)
        .filter(|cures| !cures.is_empty() && !cures.contains(&""))
        .min_by_key(Vec::len)
        .map(|cures| cures.join(", and "))
}
