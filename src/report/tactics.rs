//! The tactics that all ranks chose, and whether they are what ran.

use serde::Serialize;

use super::{Check, Decided, RankReport};
use crate::layer::tune::{TimedBy, Tuned};

/// The tactic of layers of one shape with one number of rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DecidedTactic {
    /// What the layers have in common.
    pub shape: String,
    /// The layers.
    pub layers: Vec<u32>,
    /// Rows of an expert at most, in the mean over all ranks; beyond the last number its tactic stays.
    pub rows: usize,
    /// What runs.
    pub tactic: &'static str,
    /// Whose times decided.
    pub timed_by: TimedBy,
    /// What each tactic took on its slowest rank; null where it was dropped, or no rank holds an expert.
    pub slowest_us: Vec<(&'static str, Option<f64>)>,
    /// Tactics that failed somewhere, on which ranks, and why.
    pub dropped: Vec<String>,
}

impl From<&Tuned> for DecidedTactic {
    fn from(tuned: &Tuned) -> Self {
        let us = |ns: &Option<u64>| ns.map(|ns| ns as f64 / 1e3);
        Self {
            shape: tuned.shape.to_string(),
            layers: tuned.layers.iter().map(|layer| layer.0).collect(),
            rows: tuned.rows.rows(),
            tactic: tuned.tactic(),
            timed_by: tuned.timed_by,
            slowest_us: tuned.names.iter().copied().zip(tuned.choice.slowest_ns.iter().map(us)).collect(),
            dropped: tuned.choice.dropped.iter().map(ToString::to_string).collect(),
        }
    }
}

/// No tactic ran but those that all ranks chose for the layer, whatever its rows; layers without a choice run what they have.
pub(super) fn check_tactics(decided: &Decided, ranks: &[RankReport]) -> Check {
    let allowed = |layer: u32, name: &str| {
        let mut of_layer = decided.tactics.iter().filter(|tuned| tuned.layers.contains(&layer)).peekable();
        of_layer.peek().is_none() || of_layer.any(|tuned| tuned.tactic == name)
    };
    let strangers: Vec<String> = ranks
        .iter()
        .flat_map(|rank| rank.layers.iter().map(move |layer| (rank.rank, layer)))
        .flat_map(|(rank, layer)| layer.tactics.iter().map(move |(name, _)| (rank, layer.layer, name)))
        .filter(|(_, layer, name)| !allowed(*layer, name))
        .map(|(rank, layer, name)| format!("rank {rank} ran {name} in layer {layer}"))
        .collect();
    let mut names: Vec<&str> = decided.tactics.iter().map(|tuned| tuned.tactic).collect();
    names.sort_unstable();
    names.dedup();
    Check {
        name: "every rank ran the chosen tactics".to_owned(),
        pass: strangers.is_empty(),
        detail: if strangers.is_empty() { names.join(", ") } else { strangers.join("; ") },
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::report_with;
    use super::*;
    use crate::exit::Exit;

    #[test]
    fn a_run_of_another_tactic_than_chosen_fails() {
        let identity = "lockstep.simd.grouped_gemm.nvfp4";
        let tuned = |layer, tactic| DecidedTactic {
            shape: identity.to_owned(),
            layers: vec![layer],
            rows: 16,
            tactic,
            timed_by: TimedBy::ThisSession,
            slowest_us: vec![("even", Some(2.0)), ("coarse", Some(1.0))],
            dropped: Vec::new(),
        };
        let of = |ran: &[&str], layer| report_with(&[identity], ran, vec![tuned(layer, "coarse")]);
        assert_eq!(of(&["coarse"], 3).exit(), Exit::Fine);
        assert_eq!(of(&["even"], 4).exit(), Exit::Fine, "the layer has no choice");
        let other = of(&["coarse", "even"], 3);
        assert_eq!(other.exit(), Exit::Disagreement);
        assert!(other.to_string().contains("rank 0 ran even in layer 3"), "{other}");
        assert!(other.to_string().contains("tactic"), "{other}");
        assert_eq!(report_with(&[identity], &["even"], Vec::new()).exit(), Exit::Fine, "nothing was tuned");
    }
}
