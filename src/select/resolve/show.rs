//! Selections as text: a line on what was chosen and why, and the whole trail.

use std::fmt;

use super::super::candidate::Candidate;
use super::super::problem::{counted, list};
use super::super::ranks::Layers;
use super::super::refusal::Reason;
use super::{LayerSelection, Selection, Why};
use crate::config::Levels;

/// What every implementation says, one after the other.
///
/// Those that compute the layer's contract with all they say; the others in a line, since theirs is the first reason.
pub(super) struct Trail<I>(pub I);

impl<'a, I: Iterator<Item = &'a Candidate> + Clone> fmt::Display for Trail<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for candidate in self.0.clone().filter(|candidate| candidate.computes_contract) {
            let verdict = if candidate.is_eligible() { "serves" } else { "refuses" };
            write!(f, "\n  {} {verdict}", candidate.identity)?;
            for refusal in &candidate.refusals {
                write!(f, "\n    {refusal}")?;
            }
            for passed_over in &candidate.passed_over {
                write!(f, "\n    passed over, {passed_over}")?;
            }
            for assumption in &candidate.assumptions {
                write!(f, "\n    not known, {assumption}")?;
            }
        }
        for candidate in self.0.clone().filter(|candidate| !candidate.computes_contract) {
            let mut reasons: Vec<Reason> = candidate.refusals.iter().map(|refusal| refusal.reason).collect();
            reasons.dedup();
            write!(f, "\n  {} refuses: {}", candidate.identity, list(reasons, ", "))?;
        }
        Ok(())
    }
}

impl Selection {
    /// What was chosen and why: a line for all layers that are alike.
    #[must_use]
    pub fn summary(&self) -> String {
        let kinds = self.kinds();
        let line = |(layers, selected): &(Layers, &LayerSelection)| {
            let num_eligible = 1 + selected.others.len();
            let num_asked = num_eligible + selected.refused.len();
            let ranks = counted(self.num_ranks, "rank");
            format!("{layers}: {selected} ({num_eligible} of {num_asked} implementations serve on {ranks})")
        };
        list(kinds.iter().map(line), "\n")
    }

    /// Layers that are alike in all but their number, with the first of them.
    fn kinds(&self) -> Vec<(Layers, &LayerSelection)> {
        let mut kinds: Vec<(Vec<_>, &LayerSelection)> = Vec::new();
        for selected in &self.layers {
            let is_alike = |known: &LayerSelection| {
                LayerSelection { layer: selected.layer, problem: selected.problem.clone(), ..known.clone() }
                    == *selected
            };
            match kinds.iter_mut().find(|(_, known)| is_alike(known)) {
                Some((layers, _)) => layers.push(selected.layer),
                None => kinds.push((vec![selected.layer], selected)),
            }
        }
        kinds.into_iter().map(|(layers, selected)| (layers.into_iter().collect(), selected)).collect()
    }
}

impl fmt::Display for LayerSelection {
    /// What runs and why, without the layer and the others.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { winner, transport, levels, why, .. } = self;
        write!(f, "{}", winner.identity)?;
        if !winner.companions.is_empty() {
            write!(f, " with {}", list(winner.companions.iter().map(|identity| identity.quant), ", "))?;
        }
        if let Some(instruction_set) = winner.instruction_set {
            write!(f, " on {instruction_set}")?;
        }
        let levels = if *levels == Levels::Two { " in two levels" } else { "" };
        write!(f, " over {transport}{levels}, {why}")
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Preferred => f.write_str("preferred by backend auto"),
            Self::Family(family) => write!(f, "preferred by backend {family}"),
            Self::Pinned(query) => write!(f, "pinned by implementation {query}"),
            Self::Fallback { from } => write!(f, "FALLBACK: backend {from} refuses, and moe.allow_fallback is true"),
        }
    }
}

impl fmt::Display for Selection {
    /// Every kind of layer with the winner, the other eligible ones, and every refusal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (idx, (layers, selected)) in self.kinds().into_iter().enumerate() {
            if idx > 0 {
                writeln!(f)?;
            }
            write!(f, "{layers}: {selected}")?;
            let trail = std::iter::once(&selected.winner).chain(&selected.others).chain(&selected.refused);
            write!(f, "{}", Trail(trail))?;
        }
        Ok(())
    }
}
