//! Ranks that differ: in which field, with which values, on which ranks. Equal ones pass.

use crate::exit::{Classify, Exit};
use crate::ids::Rank;
use crate::select::environment::EnvironmentError;
use crate::select::fingerprint::{DecodeError, FieldDifference, FingerprintError, Information, diff};
use crate::select::{Environment, Fingerprint, RankSet, Selection};
use crate::world::{Brought, Compared, Group, Refusal, Sheet};

/// More differences than this are counted and not shown: the first ones are what the others follow from.
const MAX_SHOWN: usize = 16;

/// Why ranks don't go on together.
#[derive(Debug, thiserror::Error)]
pub enum AgreementError {
    /// They differ.
    #[error("the ranks differ in {about}:{}\n  {cure}", shown(differences))]
    Differ {
        /// What was compared.
        about: &'static str,
        /// What to do.
        cure: &'static str,
        /// Every field that is not the same everywhere.
        differences: Vec<FieldDifference>,
    },
    /// A rank's bytes are none of this build's.
    #[error("what {ranks} brought can't be compared with what the others did")]
    Fields {
        /// The ranks.
        ranks: RankSet,
        /// What is wrong.
        #[source]
        source: DecodeError,
    },
    /// A rank's environment is none of this build's.
    #[error("the environment of {rank} can't be read; start every rank from the same build of lockstep")]
    Environment {
        /// The rank.
        rank: Rank,
        /// What is wrong.
        #[source]
        source: EnvironmentError,
    },
    /// Fields that contradict each other.
    #[error(transparent)]
    Fingerprint(#[from] FingerprintError),
}

impl Classify for AgreementError {
    fn exit(&self) -> Exit {
        match self {
            Self::Differ { .. } | Self::Fields { .. } | Self::Environment { .. } => Exit::Disagreement,
            Self::Fingerprint(error) => error.exit(),
        }
    }
}

fn shown(differences: &[FieldDifference]) -> String {
    let mut lines: String =
        differences.iter().take(MAX_SHOWN).map(|difference| format!("\n    {difference}")).collect();
    if let Some(more) = differences.len().checked_sub(MAX_SHOWN).filter(|more| *more > 0) {
        lines.push_str(&format!("\n    and {more} more"));
    }
    lines
}

/// What a comparison is about, and what helps where ranks differ in it.
#[derive(Debug, Clone, Copy)]
pub struct Topic {
    /// After `differ in`.
    pub about: &'static str,
    /// A sentence.
    pub cure: &'static str,
}

/// Gives the fingerprint back if all ranks have the same; collective.
///
/// # Errors
/// The same on all ranks: if fingerprints differ, or some rank has none.
pub fn agree_on(
    group: &impl Group,
    Topic { about, cure }: Topic,
    local: Result<Fingerprint, FingerprintError>,
) -> Result<Fingerprint, Refusal> {
    match (compare(group, local.clone())?, local) {
        (None, Ok(fingerprint)) => Ok(fingerprint),
        (Some(differences), _) => Err(group.refuse(AgreementError::Differ { about, cure, differences })),
        // A rank without a fingerprint has made `compare` fail.
        (None, Err(error)) => Err(group.refuse(AgreementError::from(error))),
    }
}

/// Where fingerprints differ.
///
/// # Errors
/// If the bytes of some ranks are no fingerprint of this build.
fn differences(all: &[Brought]) -> Result<Vec<FieldDifference>, AgreementError> {
    let decode = |brought: &Brought| {
        let of_ranks = |source| AgreementError::Fields { ranks: brought.ranks.iter().copied().collect(), source };
        Fingerprint::decode(&brought.encoded).map_err(of_ranks)
    };
    let fingerprints: Vec<Fingerprint> = all.iter().map(decode).collect::<Result<_, AgreementError>>()?;
    let of_ranks = |(brought, fingerprint)| {
        let Brought { ranks, .. }: &Brought = brought;
        ranks.iter().map(move |rank| (*rank, fingerprint))
    };
    Ok(diff(all.iter().zip(&fingerprints).flat_map(of_ranks)))
}

/// Where the ranks differ, without ending any; absent where they are alike; collective.
///
/// # Errors
/// The same on all ranks: if some rank has no fingerprint, or brings what is none.
pub fn compare(
    group: &impl Group,
    local: Result<Fingerprint, FingerprintError>,
) -> Result<Option<Vec<FieldDifference>>, Refusal> {
    let sheet = local
        .map(|fingerprint| Sheet { digest: fingerprint.digest().0, encoded: fingerprint.encode() })
        .map_err(AgreementError::from);
    match group.compare(sheet)? {
        Compared::Alike => Ok(None),
        Compared::Differing(brought) => differences(&brought).map(Some).map_err(|error| group.refuse(error)),
    }
}

/// The environments of all ranks, in rank order; collective.
///
/// # Errors
/// If a rank sends what is none: the same on all ranks.
pub fn gather_environments(group: &impl Group, mine: &Environment) -> Result<Vec<Environment>, AgreementError> {
    let text = serde_json::to_vec(mine).unwrap_or_default();
    let read = |(idx, bytes): (usize, Vec<u8>)| {
        let mut read = Environment::list_from_json(&String::from_utf8_lossy(&bytes))
            .map_err(|source| AgreementError::Environment { rank: Rank::from_index(idx), source })?;
        Ok(read.swap_remove(0))
    };
    group.all_gather_bytes(&text).into_iter().enumerate().map(read).collect()
}

/// Where ranks need not be alike and are not: of their environments, and worth saying once.
///
/// # Errors
/// If one name was fed two values, a bug.
pub fn harmless_differences(environments: &[Environment]) -> Result<Vec<FieldDifference>, AgreementError> {
    let of_rank = |(idx, environment)| {
        let mut information = Information::default();
        information.environment(environment);
        Ok((Rank::from_index(idx), information.finish()?))
    };
    let fingerprints: Vec<(Rank, Fingerprint)> =
        environments.iter().enumerate().map(of_rank).collect::<Result<_, AgreementError>>()?;
    let mut differences = diff(fingerprints.iter().map(|(rank, fingerprint)| (*rank, fingerprint)));
    differences.retain(FieldDifference::is_worth_a_warning);
    Ok(differences)
}

/// Warns on rank 0 if ranks chose alike for other reasons; collective.
///
/// # Errors
/// The same on all ranks: if some rank has no trail to compare, a bug.
pub fn compare_trails(group: &impl Group, selection: &Selection) -> Result<(), Refusal> {
    let mut information = Information::default();
    information.trail(selection);
    let differences = compare(group, information.finish())?;
    if group.rank() == Rank(0)
        && let Some(differences) = differences
    {
        tracing::warn!("the ranks chose alike for other reasons:{}", shown(&differences));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
