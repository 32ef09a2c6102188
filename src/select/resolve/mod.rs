//! From problems, deployment, environments and registry to one selection for every layer.

mod error;
mod show;

pub use error::{LayersRefused, Refused, ResolveError, Works};

use serde::Serialize;

use super::candidate::{Candidate, Inquiry};
use super::deployment::DeploymentFacts;
use super::descriptor::Descriptor;
use super::environment::{Environment, InstructionSet};
use super::identity::Identity;
use super::joint::Joint;
use super::problem::{Problem, ProblemError, layer_number};
use super::registry::Registry;
use super::request::Request;
use crate::config::{Device, Levels, Transport};
use crate::ids::LayerIdx;

/// What every layer runs, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Selection {
    /// Ranks it holds on.
    pub num_ranks: usize,
    /// One entry a layer, in the order asked for.
    pub layers: Vec<LayerSelection>,
}

/// What one layer runs, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerSelection {
    /// The layer.
    #[serde(serialize_with = "layer_number")]
    pub layer: LayerIdx,
    /// What it asks for.
    pub problem: Problem,
    /// What runs it.
    pub winner: Candidate,
    /// What carries its tokens.
    #[serde(serialize_with = "transport_name")]
    pub transport: Transport,
    /// Whether they go once to each rank or once to each node; decided, so never `auto`.
    #[serde(serialize_with = "levels_name")]
    pub levels: Levels,
    /// Why this one.
    pub why: Why,
    /// The others that could run it, the preferred first.
    pub others: Vec<Candidate>,
    /// Those that could not, each with every reason.
    pub refused: Vec<Candidate>,
}

/// Why an implementation was chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// `auto`: the preferred of those that serve on every rank.
    Preferred,
    /// The preferred of the family asked for.
    Family(&'static str),
    /// It was pinned.
    Pinned(String),
    /// The family asked for refuses, and a fallback was allowed.
    Fallback {
        /// What was asked for.
        from: &'static str,
    },
}

fn transport_name<S: serde::Serializer>(transport: &Transport, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(transport)
}

fn levels_name<S: serde::Serializer>(levels: &Levels, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(levels)
}

impl LayerSelection {
    /// The identities that may run in this layer; another one is a fault.
    #[must_use]
    pub fn identities(&self) -> Vec<Identity> {
        std::iter::once(self.winner.identity).chain(self.winner.companions.iter().copied()).collect()
    }

    /// Whether it is what was asked for only because a fallback was allowed.
    #[must_use]
    pub const fn is_fallback(&self) -> bool {
        matches!(self.why, Why::Fallback { .. })
    }
}

impl Selection {
    /// The selection of a layer.
    #[must_use]
    pub fn layer(&self, layer: LayerIdx) -> Option<&LayerSelection> {
        self.layers.iter().find(|selected| selected.layer == layer)
    }

    /// The techniques that run, each once, in the order in which layers need them.
    #[must_use]
    pub fn techniques(&self) -> Vec<&'static str> {
        let mut techniques = Vec::new();
        for selected in &self.layers {
            if !techniques.contains(&selected.winner.identity.technique) {
                techniques.push(selected.winner.identity.technique);
            }
        }
        techniques
    }

    /// The instruction set that CPU kernels use: one for all layers of a technique, and the best common to all ranks.
    #[must_use]
    pub fn instruction_set(&self, technique: &str) -> Option<InstructionSet> {
        self.layers
            .iter()
            .map(|selected| &selected.winner)
            .find(|winner| winner.identity.technique == technique)
            .and_then(|winner| winner.instruction_set)
    }
}

/// Selects an implementation for every problem, the same on all ranks.
///
/// `environments` has one entry a rank, in rank order. Pure: equal inputs give equal selections wherever they are computed.
///
/// # Errors
/// If the inputs contradict each other, what is asked for does not exist, or no implementation that was asked for serves
/// some layer on every rank.
pub fn resolve(
    problems: &[Problem],
    deployment: &DeploymentFacts,
    environments: &[Environment],
    registry: &Registry,
) -> Result<Selection, ResolveError> {
    check(problems, deployment, environments)?;
    let request = Request::read(deployment, registry)?;
    let joint = Joint::new(environments);
    refuse_mixed_world(&request, deployment, &joint)?;
    let inquiry = Inquiry { request: &request, deployment, joint: &joint, registry };
    // Most layers of a model are alike: each kind is asked about once.
    let mut asked: Vec<(Problem, Result<Verdict, Box<LayersRefused>>)> = Vec::new();
    let mut layers = Vec::new();
    let mut failures: Vec<LayersRefused> = Vec::new();
    for problem in problems {
        let kind = Problem { layer: LayerIdx(0), ..problem.clone() };
        let idx = asked.iter().position(|(known, _)| *known == kind).unwrap_or_else(|| {
            let verdict = choose(&kind, inquiry);
            asked.push((kind, verdict));
            asked.len() - 1
        });
        match &asked[idx].1 {
            Ok(verdict) => layers.push(verdict.of_layer(problem)),
            Err(refused) => match failures.iter_mut().find(|failure| failure.is_like(refused)) {
                Some(failure) => failure.layers.push(problem.layer),
                None => failures.push(LayersRefused { layers: vec![problem.layer], ..(**refused).clone() }),
            },
        }
    }
    if failures.is_empty() {
        return Ok(Selection { num_ranks: deployment.num_ranks(), layers });
    }
    let eligible: Vec<Vec<Identity>> = asked.iter().map(|(_, answer)| eligible(answer)).collect();
    let works = Works::new(&request, &eligible, registry);
    let is_last_resort = deployment.allow_fallback && matches!(request, Request::Family(_));
    Err(ResolveError::Refused(Box::new(Refused { request, failures, works, is_last_resort })))
}

/// Who serves a kind of layer, chosen or not.
fn eligible(answer: &Result<Verdict, Box<LayersRefused>>) -> Vec<Identity> {
    let all: Vec<&Candidate> = match answer {
        Ok(verdict) => std::iter::once(&verdict.winner).chain(&verdict.others).collect(),
        Err(refused) => refused.candidates.iter().filter(|candidate| candidate.is_eligible()).collect(),
    };
    all.into_iter().map(|candidate| candidate.identity).collect()
}

fn check(problems: &[Problem], deployment: &DeploymentFacts, environments: &[Environment]) -> Result<(), ResolveError> {
    let (num_ranks, found) = (deployment.num_ranks(), environments.len());
    if num_ranks != found || num_ranks == 0 {
        return Err(ResolveError::Ranks { num_ranks, found });
    }
    for (idx, problem) in problems.iter().enumerate() {
        problem.validate()?;
        if problems[..idx].iter().any(|earlier| earlier.layer == problem.layer && earlier != problem) {
            return Err(ProblemError::Twice { layer: problem.layer }.into());
        }
    }
    Ok(())
}

/// With GPUs on some ranks only, `auto` would either leave them idle or leave ranks out: a person has to say which.
fn refuse_mixed_world(request: &Request, deployment: &DeploymentFacts, joint: &Joint) -> Result<(), ResolveError> {
    let (with, without) = (joint.ranks_by_gpu(true), joint.ranks_by_gpu(false));
    let is_open = *request == Request::Auto && deployment.device == Device::Auto;
    if is_open && !with.is_empty() && !without.is_empty() {
        return Err(ResolveError::MixedWorld { with, without });
    }
    Ok(())
}

/// What all layers of a kind run.
struct Verdict {
    winner: Candidate,
    transport: Transport,
    levels: Levels,
    why: Why,
    others: Vec<Candidate>,
    refused: Vec<Candidate>,
}

impl Verdict {
    fn of_layer(&self, problem: &Problem) -> LayerSelection {
        let Self { winner, transport, levels, why, others, refused } = self;
        LayerSelection {
            layer: problem.layer,
            problem: problem.clone(),
            winner: winner.clone(),
            transport: *transport,
            levels: *levels,
            why: why.clone(),
            others: others.clone(),
            refused: refused.clone(),
        }
    }
}

/// Asks every implementation, then takes the first that was asked for and serves; another only where that is allowed.
fn choose(problem: &Problem, inquiry: Inquiry<'_>) -> Result<Verdict, Box<LayersRefused>> {
    let Inquiry { request, deployment, joint, registry } = inquiry;
    let mut candidates: Vec<Candidate> =
        registry.descriptors().iter().map(|descriptor| inquiry.ask(descriptor, problem)).collect();
    // Where ranks are known to have GPUs, they come first; where not, an implementation that only might serve comes last.
    let has_gpus = !joint.ranks_by_gpu(true).is_empty();
    let is_gpu = |candidate: &Candidate| registry.descriptor(candidate.identity).is_some_and(|d| d.target.is_gpu());
    candidates.sort_by_key(|candidate| is_gpu(candidate) != has_gpus);
    let first = |asked_only: bool| {
        let serves = |candidate: &Candidate| candidate.is_eligible() && (candidate.is_asked_for || !asked_only);
        let idx = candidates.iter().position(serves)?;
        Some((idx, candidates[idx].transport?))
    };
    let may_fall_back = deployment.allow_fallback && matches!(request, Request::Family(_));
    let Some((idx, transport)) = first(true).or_else(|| may_fall_back.then(|| first(false))?) else {
        let (layers, quantisation) = (vec![problem.layer], problem.quantisation.clone());
        return Err(Box::new(LayersRefused { layers, quantisation, candidates }));
    };
    let winner = candidates.remove(idx);
    let (others, refused) = candidates.into_iter().partition(Candidate::is_eligible);
    let why = match request {
        Request::Auto => Why::Preferred,
        Request::Family(from) if !winner.is_asked_for => Why::Fallback { from },
        Request::Family(family) => Why::Family(family),
        Request::Pin { query, .. } => Why::Pinned(query.clone()),
    };
    let forwards_unasked = |descriptor: &Descriptor| {
        descriptor.forwards_unasked
            && descriptor.forwards.is_some_and(|limits| limits.contains(deployment.num_ranks()))
            && registry.transport(transport).is_some_and(|known| known.forwards)
    };
    let levels = deployment.levels(registry.descriptor(winner.identity).is_some_and(forwards_unasked));
    Ok(Verdict { winner, transport, levels, why, others, refused })
}
