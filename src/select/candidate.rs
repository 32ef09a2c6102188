//! One implementation asked about one layer by every gate; what it needs beside itself is asked too.

use std::collections::BTreeMap;

use serde::Serialize;

use super::deployment::DeploymentFacts;
use super::descriptor::{Descriptor, Target};
use super::environment::InstructionSet;
use super::gates::{Answer, Question, RANK_GATES, WORLD_GATES, libraries};
use super::identity::Identity;
use super::joint::Joint;
use super::problem::{Group, Members, Problem, list};
use super::ranks::RankSet;
use super::refusal::{Assumption, Reason, Refusal};
use super::registry::{Registry, TransportDescriptor};
use super::request::Request;
use crate::config::{Choice, Levels, Transport};

/// What asking an implementation about a layer has shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// The implementation.
    pub identity: Identity,
    /// It is, or is one of, what was asked for.
    pub is_asked_for: bool,
    /// It computes the layer's contract, whatever else speaks against it.
    pub computes_contract: bool,
    /// Its other contracts that the layer's remaining experts run under.
    pub companions: Vec<Identity>,
    /// The kernels it would use: the best that all ranks have. Absent on GPUs, and where no rank's are known.
    pub instruction_set: Option<InstructionSet>,
    /// What would carry its tokens; absent where nothing can.
    #[serde(serialize_with = "transport_name")]
    pub transport: Option<Transport>,
    /// Why transports that it prefers to that one don't serve; empty: there are none, or they were not asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub passed_over: Vec<Refusal>,
    /// Why it does not serve the layer; empty: it does.
    pub refusals: Vec<Refusal>,
    /// What was not known and would have counted.
    pub assumptions: Vec<Assumption>,
}

impl Candidate {
    /// Whether it serves the layer on every rank.
    #[must_use]
    pub fn is_eligible(&self) -> bool {
        self.refusals.is_empty()
    }
}

#[expect(clippy::ref_option, reason = "the signature that serde calls")]
fn transport_name<S: serde::Serializer>(transport: &Option<Transport>, serializer: S) -> Result<S::Ok, S::Error> {
    transport.map(Choice::name).serialize(serializer)
}

/// What candidates are asked about.
#[derive(Clone, Copy)]
pub(super) struct Inquiry<'a> {
    pub request: &'a Request,
    pub deployment: &'a DeploymentFacts,
    pub joint: &'a Joint,
    pub registry: &'a Registry,
}

/// What was found, and on which ranks: in the order of reasons, whatever the order of ranks.
type Found = BTreeMap<(Reason, String), RankSet>;

/// Findings of gates, ranks with the same finding together.
#[derive(Default)]
struct Findings {
    refusals: Found,
    assumptions: Found,
}

impl Findings {
    fn add(&mut self, reason: Reason, answer: Answer, ranks: &RankSet) {
        let (findings, sentence) = match answer {
            Answer::Serves => return,
            Answer::Refuses(sentence) => (&mut self.refusals, sentence),
            Answer::Unknown(sentence) => (&mut self.assumptions, sentence),
        };
        let known = findings.entry((reason, sentence)).or_default();
        *known = known.union(ranks);
    }

    /// Adds what a companion finds; what the main implementation finds as well is said once.
    fn add_of_companion(&mut self, companion: Self, prefix: &str) {
        let add = |findings: Found, ours: &mut Found| {
            for ((reason, sentence), ranks) in findings {
                if ours.get(&(reason, sentence.clone())) != Some(&ranks) {
                    ours.insert((reason, format!("{prefix}: {sentence}")), ranks);
                }
            }
        };
        add(companion.refusals, &mut self.refusals);
        add(companion.assumptions, &mut self.assumptions);
    }
}

impl Inquiry<'_> {
    /// Asks `descriptor` about `problem`. Every gate is asked, whatever the others say.
    pub fn ask(&self, descriptor: &Descriptor, problem: &Problem) -> Candidate {
        let mut findings = Findings::default();
        let mut companions = Vec::new();
        for group in problem.groups() {
            if group.members == Members::Routed {
                self.ask_gates(descriptor, problem, group, &mut findings);
                continue;
            }
            // A contract that the layer's main one covers runs in the same kernels; its widths are asked for all the same.
            let quant = group.quant.unwrap_or(descriptor.identity.quant);
            let identity = descriptor.identity.with_quant(quant);
            let prefix = format!("for the {}, as {identity}", group.members);
            let Some(companion) = self.registry.descriptor(identity) else {
                let answer = Answer::Refuses(format!("{prefix}: not in this build"));
                findings.add(Reason::Quantisation, answer, &self.joint.ranks);
                continue;
            };
            let mut theirs = Findings::default();
            self.ask_gates(companion, problem, group, &mut theirs);
            findings.add_of_companion(theirs, &prefix);
            if identity != descriptor.identity && !companions.contains(&identity) {
                companions.push(identity);
            }
        }
        self.ask_shared_gpus(descriptor, &mut findings);
        let (transport, passed_over) = self.transport(descriptor, &mut findings);
        let refused = |((reason, sentence), ranks)| Refusal { reason, sentence, ranks };
        let assumed = |((reason, sentence), ranks)| Assumption { reason, sentence, ranks };
        Candidate {
            identity: descriptor.identity,
            is_asked_for: self.request.asks_for(descriptor.identity, self.registry),
            computes_contract: problem
                .groups()
                .first()
                .is_some_and(|group| group.quant == Some(descriptor.identity.quant)),
            companions,
            instruction_set: self.instruction_set(descriptor),
            transport,
            passed_over: passed_over.into_iter().map(refused).collect(),
            refusals: findings.refusals.into_iter().map(refused).collect(),
            assumptions: findings.assumptions.into_iter().map(assumed).collect(),
        }
    }

    fn ask_gates(&self, descriptor: &Descriptor, problem: &Problem, group: Group, findings: &mut Findings) {
        let question = Question { descriptor, problem, group, deployment: self.deployment };
        for (reason, gate) in WORLD_GATES {
            findings.add(reason, gate(&question), &self.joint.ranks);
        }
        for (environment, ranks) in &self.joint.classes {
            for (reason, gate) in RANK_GATES {
                findings.add(reason, gate(&question, environment), ranks);
            }
        }
    }

    fn ask_shared_gpus(&self, descriptor: &Descriptor, findings: &mut Findings) {
        if self.deployment.share_gpus || !descriptor.target.is_gpu() {
            return;
        }
        for (uuid, ranks) in &self.joint.shared_gpus {
            let answer = Answer::Refuses(format!(
                "needs a GPU for every rank; these share {uuid}, which cluster.share_gpus: true allows for tests"
            ));
            findings.add(Reason::Topology, answer, ranks);
        }
    }

    /// The first of its transports that was asked for and that every rank can build, and why not the ones before it.
    fn transport(&self, descriptor: &Descriptor, findings: &mut Findings) -> (Option<Transport>, Found) {
        let (wanted, num_ranks) = (self.deployment.transport, self.deployment.num_ranks());
        let named: Vec<&TransportDescriptor> = descriptor
            .transports
            .iter()
            .filter_map(|name| self.registry.transport(*name))
            .filter(|known| match wanted {
                Transport::Auto => num_ranks >= known.auto_from_num_ranks,
                wanted => known.transport == wanted,
            })
            .collect();
        let mut unusable = Findings::default();
        for transport in &named {
            let mut theirs = Findings::default();
            for (uuid, ranks) in self.joint.shared_gpus.iter().filter(|_| !transport.shares_gpus) {
                let answer = Answer::Refuses(format!("needs a GPU for every rank; these share {uuid}"));
                theirs.add(Reason::Topology, answer, ranks);
            }
            let num_nodes = self.deployment.num_nodes();
            if let Some(max) = transport.max_num_nodes.filter(|max| num_nodes > *max as usize) {
                let answer = Answer::Refuses(format!("connects at most {max} hosts; the world has {num_nodes}"));
                theirs.add(Reason::Topology, answer, &self.joint.ranks);
            }
            if !transport.forwards && self.deployment.levels == Levels::Two {
                let answer = Answer::Refuses(
                    "stores tokens straight where they are read; dispatch.levels is two: set it to auto or one, or \
                     dispatch.transport to auto"
                        .to_owned(),
                );
                theirs.add(Reason::Topology, answer, &self.joint.ranks);
            }
            for (environment, ranks) in &self.joint.classes {
                theirs.add(Reason::MissingLibrary, libraries(transport.libraries.iter(), environment), ranks);
            }
            let prefix = format!("for transport {}", transport.transport);
            if theirs.refusals.is_empty() {
                findings.add_of_companion(theirs, &prefix);
                return (Some(transport.transport), unusable.refusals);
            }
            unusable.add_of_companion(theirs, &prefix);
        }
        if named.is_empty() {
            let ours = list(&descriptor.transports, " or ");
            let answer = Answer::Refuses(format!("travels by {ours}; dispatch.transport is {wanted}"));
            findings.add(Reason::Topology, answer, &self.joint.ranks);
        }
        findings.refusals.append(&mut unusable.refusals);
        (None, Found::new())
    }

    fn instruction_set(&self, descriptor: &Descriptor) -> Option<InstructionSet> {
        let Target::Cpu { instruction_sets } = &descriptor.target else { return None };
        let common = self.joint.instruction_set()?;
        instruction_sets.range(..=common).next_back().copied()
    }
}
