//! Ranks that differ: in which field, with which values, on which ranks. Equal ones pass.

use crate::exit::{Classify, Exit};
use crate::ids::Rank;
use crate::select::environment::EnvironmentError;
use crate::select::fingerprint::{DecodeError, FieldDifference, FingerprintError, Information, diff};
use crate::select::{Environment, Fingerprint, Selection};
use crate::world::{Compared, Refusal, Sheet, World};

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
    #[error("what {rank} is and was asked for can't be compared with the other ranks'")]
    Fields {
        /// The rank.
        rank: Rank,
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
    world: &World,
    Topic { about, cure }: Topic,
    local: Result<Fingerprint, FingerprintError>,
) -> Result<Fingerprint, Refusal> {
    let sheet = match &local {
        Ok(fingerprint) => Ok(Sheet { digest: fingerprint.digest().0, encoded: fingerprint.encode() }),
        Err(error) => Err(AgreementError::from(error.clone())),
    };
    let compared = world.compare(sheet)?;
    match (compared, local) {
        (Compared::Alike, Ok(fingerprint)) => Ok(fingerprint),
        (Compared::Alike, Err(error)) => Err(world.refuse(error)),
        (Compared::Differing(all), _) => match differences(&all) {
            Ok(differences) => Err(world.refuse(AgreementError::Differ { about, cure, differences })),
            Err(error) => Err(world.refuse(error)),
        },
    }
}

/// Where the encoded fingerprints of ranks 0, 1, ... differ.
///
/// # Errors
/// If a rank's bytes are no fingerprint of this build.
pub fn differences(all: &[Vec<u8>]) -> Result<Vec<FieldDifference>, AgreementError> {
    let decode = |(idx, bytes): (usize, &Vec<u8>)| {
        let rank = Rank::from_index(idx);
        let fingerprint = Fingerprint::decode(bytes).map_err(|source| AgreementError::Fields { rank, source })?;
        Ok((rank, fingerprint))
    };
    let fingerprints: Vec<(Rank, Fingerprint)> =
        all.iter().enumerate().map(decode).collect::<Result<_, AgreementError>>()?;
    Ok(diff(fingerprints.iter().map(|(rank, fingerprint)| (*rank, fingerprint))))
}

/// The environments of all ranks, in rank order; collective.
///
/// # Errors
/// If a rank sends what is none: the same on all ranks.
pub fn gather_environments(world: &World, mine: &Environment) -> Result<Vec<Environment>, AgreementError> {
    let text = serde_json::to_vec(mine).unwrap_or_default();
    let read = |(idx, bytes): (usize, Vec<u8>)| {
        let mut read = Environment::list_from_json(&String::from_utf8_lossy(&bytes))
            .map_err(|source| AgreementError::Environment { rank: Rank::from_index(idx), source })?;
        Ok(read.swap_remove(0))
    };
    world.all_gather_bytes(&text).into_iter().enumerate().map(read).collect()
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
pub fn compare_trails(world: &World, selection: &Selection) -> Result<(), Refusal> {
    let mut information = Information::default();
    information.trail(selection);
    let sheet = information
        .finish()
        .map(|trail| Sheet { digest: trail.digest().0, encoded: trail.encode() })
        .map_err(AgreementError::from);
    if let Compared::Differing(all) = world.compare(sheet)? {
        match differences(&all) {
            Ok(differences) if world.is_root() => {
                tracing::warn!("the ranks chose alike for other reasons:{}", shown(&differences));
            }
            Ok(_) => {}
            Err(error) => return Err(world.refuse(error)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::fingerprint::{BuildFacts, StartBuilder};

    fn start(chunk_tokens: &str) -> Vec<u8> {
        let build = BuildFacts { version: "1", revision: "a", target: "t", profile: "release" };
        let mut builder = StartBuilder::new(build);
        builder.key("dispatch.chunk_tokens", chunk_tokens).asked("steps", "1");
        builder.finish().expect("one value a path").encode()
    }

    #[test]
    fn a_difference_names_field_values_and_ranks() {
        let differences = differences(&[start("64"), start("64"), start("128")]).expect("decodes");
        let error = AgreementError::Differ { about: "what they were asked for", cure: "Be alike.", differences };
        assert_eq!(
            error.to_string(),
            "the ranks differ in what they were asked for:\n    \
             dispatch.chunk_tokens: 64 on ranks 0-1, 128 on rank 2\n  Be alike."
        );
        assert_eq!(error.exit(), Exit::Disagreement);
    }

    #[test]
    fn a_damaged_record_names_its_rank() {
        let mut cut = start("64");
        cut.pop();
        let error = differences(&[start("64"), cut]).expect_err("cut");
        assert!(error.to_string().contains("rank 1"), "{error}");
    }
}
