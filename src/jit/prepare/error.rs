//! Why a session has no kernels.

use std::collections::BTreeMap;

use super::super::cache::{BadEntry, Cache};
use super::super::key::KeyParts;
use super::super::nvrtc::NvrtcError;
use super::super::request::KernelRequest;
use crate::exit::{Classify, Exit, Known};
use crate::fault::Injected;
use crate::ids::Rank;
use crate::select::RankSet;
use crate::world::Refusal;

/// What can go wrong between the first look into a cache and the last kernel.
#[derive(Debug, thiserror::Error)]
pub enum JitError {
    /// The compiler.
    #[error(transparent)]
    Nvrtc(#[from] NvrtcError),
    /// Something has to be compiled and must not be.
    #[error(
        "jit.require_warm is set and these kernels are not cached below {dir}: {kernels}; fill the cache with \
         `lockstep warmup`, or let this run compile them"
    )]
    Cold {
        /// Where they were looked for.
        dir: String,
        /// What is missing.
        kernels: String,
    },
    /// Something has to be compiled, and no rank can.
    #[error("no rank has a compiler, and these kernels are not cached below {dir}: {kernels}")]
    NoCompiler {
        /// Where they were looked for.
        dir: String,
        /// What is wanted.
        kernels: String,
        /// Why this rank has none.
        #[source]
        source: Option<Box<NvrtcError>>,
    },
    /// Compilers of two builds.
    #[error(
        "the ranks have NVRTC of different builds, whose kernels may differ: {}; give every rank the same",
        listed(ranks)
    )]
    Compilers {
        /// Builds with their ranks.
        ranks: Vec<(String, RankSet)>,
    },
    /// Ranks would run kernels made of other things.
    #[error("the ranks differ in what their kernels are made of:\n    {}\n  Give every rank the same build and settings.", differences.join("\n    "))]
    Keys {
        /// Part by part.
        differences: Vec<String>,
    },
    /// A kernel that came from another rank is not what it should be.
    #[error("{kernel}, received from {sender}, is not what was compiled")]
    Received {
        /// Who sent it.
        sender: Rank,
        /// What it is.
        kernel: String,
        /// What is wrong.
        #[source]
        source: BadEntry,
    },
    /// A fault on purpose.
    #[error(transparent)]
    Injected(#[from] Injected),
    /// Some rank failed; all end.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

fn listed(ranks: &[(String, RankSet)]) -> String {
    ranks.iter().map(|(id, ranks)| format!("{id} on {ranks}")).collect::<Vec<_>>().join(", ")
}

fn described<'a>(requests: impl IntoIterator<Item = &'a KernelRequest>) -> String {
    requests.into_iter().map(KernelRequest::describe).collect::<Vec<_>>().join(", ")
}

/// Where kernels were looked for, without what differs between ranks.
fn looked_in(cache: &Cache) -> String {
    cache.root().map_or_else(|| "any directory (there is none)".to_owned(), |root| root.display().to_string())
}

impl JitError {
    pub(super) fn cold(missing: &[&KernelRequest], cache: &Cache) -> Self {
        Self::Cold { dir: looked_in(cache), kernels: described(missing.iter().copied()) }
    }

    pub(super) fn no_compiler(wanted: &[KernelRequest], cache: &Cache, source: Option<NvrtcError>) -> Self {
        Self::NoCompiler { dir: looked_in(cache), kernels: described(wanted), source: source.map(Box::new) }
    }

    /// `[rank]`: the build of each rank's compiler, empty where it has none.
    pub(super) fn compilers(all: &[String]) -> Self {
        Self::Compilers { ranks: sides(all.iter().filter(|id| !id.is_empty()).map(String::as_str), all) }
    }

    /// `[rank]`: the parts of every key, as JSON.
    pub(super) fn keys(all: &[Vec<u8>]) -> Self {
        let of_rank: Vec<Vec<KeyParts>> =
            all.iter().map(|bytes| serde_json::from_slice(bytes).unwrap_or_default()).collect();
        let first = of_rank.first().cloned().unwrap_or_default();
        let mut ranks_of: BTreeMap<String, Vec<Rank>> = BTreeMap::new();
        for (rank, parts) in of_rank.iter().enumerate().skip(1) {
            let mut differences: Vec<String> = Vec::new();
            if parts.len() != first.len() {
                differences.push(format!("{} kernels, where rank 0 has {}", parts.len(), first.len()));
            }
            for (theirs, ours) in parts.iter().zip(&first) {
                differences
                    .extend(theirs.changes_from(ours).into_iter().map(|change| format!("{}: {change}", ours.name)));
            }
            for difference in differences {
                ranks_of.entry(difference).or_default().push(Rank::from_index(rank));
            }
        }
        let line = |(difference, mut ranks): (String, Vec<Rank>)| {
            ranks.dedup();
            format!("{difference} (rank 0 -> {})", ranks.into_iter().collect::<RankSet>())
        };
        Self::Keys { differences: ranks_of.into_iter().map(line).collect() }
    }

    pub(super) fn received(sender: Rank, request: &KernelRequest, source: BadEntry) -> Self {
        Self::Received { sender, kernel: request.describe(), source }
    }
}

/// Every value with the ranks that have it, in the order of values.
fn sides<'a>(values: impl Iterator<Item = &'a str>, all: &[String]) -> Vec<(String, RankSet)> {
    let mut values: Vec<&str> = values.collect();
    values.sort_unstable();
    values.dedup();
    let ranks = |value: &str| {
        all.iter().enumerate().filter(|(_, id)| *id == value).map(|(rank, _)| Rank::from_index(rank)).collect()
    };
    values.into_iter().map(|value| (value.to_owned(), ranks(value))).collect()
}

impl Classify for JitError {
    fn exit(&self) -> Exit {
        match self {
            Self::Nvrtc(error) => error.exit(),
            Self::Cold { .. } | Self::NoCompiler { .. } | Self::Received { .. } => Exit::Environment,
            Self::Compilers { .. } | Self::Keys { .. } => Exit::Disagreement,
            Self::Injected(error) => error.exit(),
            Self::Refused(error) => error.exit(),
        }
    }

    fn known(&self) -> Known {
        match self {
            Self::Refused(error) => error.known(),
            _ => Known::Here,
        }
    }
}
