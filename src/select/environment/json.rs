//! Environments as JSON.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::super::deployment::MAX_NUM_RANKS;
use super::{Environment, Fact, Gpu, InstructionSet, Libraries};
use crate::exit::{Classify, Exit};

/// Why a description of ranks is refused.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// Not the form that `doctor --json` prints.
    #[error(
        "not a description of ranks; give what `lockstep doctor --json` prints: a list of ranks, or one entry with a count"
    )]
    Json(#[source] serde_json::Error),
    /// Nothing in it.
    #[error("the description has no rank; give at least one entry, with a count of at least 1")]
    NoRanks,
    /// More than any world has.
    #[error("the description has {num_ranks} ranks; at most {limit} are supported")]
    TooManyRanks {
        /// Ranks described.
        num_ranks: u64,
        /// The most.
        limit: usize,
    },
}

impl Classify for EnvironmentError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

/// One entry: an environment, and how many ranks have it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(default = "one")]
    count: u32,
    host: Option<String>,
    #[serde(default)]
    instruction_set: Fact<InstructionSet>,
    #[serde(default)]
    gpu: Fact<Gpu>,
    #[serde(default)]
    libraries: Libraries,
    flags: Option<BTreeSet<String>>,
    #[serde(default)]
    variables: BTreeMap<String, String>,
    #[serde(default)]
    info: BTreeMap<String, String>,
}

const fn one() -> u32 {
    1
}

impl Entry {
    fn environment(self) -> Environment {
        let Self { count: _, host, instruction_set, gpu, libraries, flags, variables, info } = self;
        Environment { host, instruction_set, gpu, libraries, flags, variables, info }
    }
}

pub(super) fn read(text: &str) -> Result<Vec<Environment>, EnvironmentError> {
    let is_list = text.trim_start().starts_with('[');
    let entries: Result<Vec<Entry>, _> =
        if is_list { serde_json::from_str(text) } else { serde_json::from_str(text).map(|entry| vec![entry]) };
    let entries = entries.map_err(EnvironmentError::Json)?;
    let num_ranks: u64 = entries.iter().map(|entry| u64::from(entry.count)).sum();
    if num_ranks > MAX_NUM_RANKS as u64 {
        return Err(EnvironmentError::TooManyRanks { num_ranks, limit: MAX_NUM_RANKS });
    }
    if entries.is_empty() || entries.iter().any(|entry| entry.count == 0) {
        return Err(EnvironmentError::NoRanks);
    }
    let ranks = entries.into_iter().flat_map(|entry| {
        let count = entry.count as usize;
        std::iter::repeat_n(entry.environment(), count)
    });
    Ok(ranks.collect())
}

#[cfg(test)]
mod tests {
    use super::super::ComputeCapability;
    use super::*;

    #[test]
    fn an_entry_with_a_count_stands_for_many_ranks() {
        let text = r#"{"count": 3, "instruction_set": "avx2", "libraries": {"mpi": "4.1.4", "nccl": null}, "gpu":
            {"name": "NVIDIA H200", "uuid": "GPU-1", "compute_capability": "9.0"}, "flags": []}"#;
        let ranks = Environment::list_from_json(text).unwrap();
        assert_eq!(ranks.len(), 3);
        assert_eq!(ranks[0], ranks[2]);
        let gpu = ranks[1].gpu.present().unwrap();
        assert_eq!(gpu.compute_capability, ComputeCapability::new(9, 0));
        assert_eq!(ranks[1].libraries.nccl, Fact::Absent);
        assert_eq!(ranks[1].libraries.driver, Fact::Unknown);
        assert_eq!(ranks[1].flags, Some(BTreeSet::new()));
    }

    #[test]
    fn what_is_printed_reads_back() {
        let full = r#"[{"host": "a", "instruction_set": "avx512", "gpu": null, "libraries": {"driver": "580"}, "flags": ["x"],
            "variables": {"NCCL_ALGO": "Ring"}, "info": {"cores": "2"}}, {}, {"count": 2, "host": "b"}]"#;
        let ranks = Environment::list_from_json(full).unwrap();
        assert_eq!(ranks.len(), 4);
        assert_eq!(ranks[1], Environment::default());
        assert_eq!(ranks[0].has_gpu(), Some(false));
        let printed = serde_json::to_string(&ranks).unwrap();
        assert_eq!(Environment::list_from_json(&printed).unwrap(), ranks, "{printed}");
    }

    #[test]
    fn strange_descriptions_are_refused() {
        for (text, word) in [
            ("", "EOF"),
            ("[", "EOF"),
            ("7", "struct"),
            ("[]", "no rank"),
            (r#"[{"count": 0}]"#, "no rank"),
            (r#"{"count": -1}"#, "u32"),
            (r#"[{"count": 4000000000}, {"count": 4000000000}]"#, "8000000000 ranks"),
            (r#"{"instruction_sets": "avx2"}"#, "unknown field `instruction_sets`"),
            (r#"{"instruction_set": "avx3"}"#, "unknown variant `avx3`"),
            (r#"{"host": "a", "host": "b"}"#, "duplicate field"),
            (r#"{"gpu": {"name": "x", "compute_capability": "nine"}}"#, "no compute capability"),
            (r#"{"gpu": {"name": "x"}}"#, "missing field `compute_capability`"),
            (r#"{"libraries": {"cublas": "1"}}"#, "unknown field `cublas`"),
        ] {
            let error = Environment::list_from_json(text).unwrap_err();
            let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            assert!(format!("{error}: {source}").contains(word), "{text}: {error}: {source}");
        }
    }
}
