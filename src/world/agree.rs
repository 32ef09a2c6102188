//! All ranks or none: the outcome of a step that may fail on one rank becomes known to all before the next collective.

use std::error::Error;
use std::fmt;

use super::group::Group;
use crate::exit::{Classify, Exit, Known};
use crate::ids::Rank;
use crate::select::RankSet;

/// A step that failed on some rank, as this rank knows it.
#[derive(Debug)]
pub struct Refusal {
    /// The exit code of every rank: the lowest failing rank's.
    exit: Exit,
    /// The lowest failing rank, which speaks for all.
    speaker: Rank,
    /// Ranks that failed with another message than the speaker's.
    differing: Vec<Rank>,
    num_ranks: usize,
    num_failed: usize,
    /// The cause, on the rank that speaks alone.
    cause: Option<Box<dyn Error + Send + Sync>>,
}

impl fmt::Display for Refusal {
    /// The cause, and which ranks it holds on: `no such layer (on all 4 ranks)`. A cause of several lines names the ranks
    /// that it is about itself: what has to be added stands on a line of its own, and where all have come to it, nothing.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cause = match &self.cause {
            Some(cause) => cause.to_string(),
            None => format!("{} refused", self.speaker),
        };
        let cause = cause.trim_end();
        let is_long = cause.contains('\n');
        f.write_str(cause)?;
        match self.num_ranks {
            1 => {}
            n if self.num_failed == n && is_long => {}
            n if self.num_failed == n => write!(f, " (on all {n} ranks)")?,
            n if is_long => write!(f, "\n  (on {} of {n})", self.speaker)?,
            n => write!(f, " ({} of {n})", self.speaker)?,
        }
        if self.differing.is_empty() {
            return Ok(());
        }
        let separator = if is_long { "\n  " } else { "; " };
        write!(f, "{separator}other causes on {}, see them with -v", Ranks(&self.differing))
    }
}

/// A list of ranks as a person reads it.
pub(super) struct Ranks<'a>(pub &'a [Rank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().copied().collect::<RankSet>().fmt(f)
    }
}

impl Error for Refusal {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.as_ref().and_then(|cause| cause.source())
    }
}

impl Classify for Refusal {
    fn exit(&self) -> Exit {
        self.exit
    }

    fn known(&self) -> Known {
        Known::Everywhere { speaks: self.cause.is_some() }
    }
}

/// What a rank tells the others about its outcome. Fixed in size, so that a rank that failed sends one too.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    exit: Exit,
    message_digest: u64,
}

impl Record {
    pub fn of<T, E: Classify + 'static>(local: &Result<T, E>) -> Self {
        match local {
            Ok(_) => Self { exit: Exit::Fine, message_digest: 0 },
            Err(error) => Self { exit: error.exit(), message_digest: digest(error) },
        }
    }

    pub fn words(self) -> [u64; 2] {
        [u64::from(self.exit.code()), self.message_digest]
    }

    pub fn from_words([code, message_digest]: [u64; 2]) -> Self {
        Self { exit: Exit::from_code(u8::try_from(code).unwrap_or(u8::MAX)), message_digest }
    }
}

/// See [`Group::agree`].
pub(super) fn agree<G: Group, T, E: Classify + Send + Sync + 'static>(
    group: &G,
    local: Result<T, E>,
) -> Result<T, Refusal> {
    let records = group.all_gather_u64(Record::of(&local).words());
    let records: Vec<Record> = records.into_iter().map(Record::from_words).collect();
    settle(group, judge(&records), local)
}

/// This rank's value, or the verdict with its cause on the rank that speaks.
pub(super) fn settle<G: Group, T, E: Classify + Send + Sync + 'static>(
    group: &G,
    verdict: Option<Refusal>,
    local: Result<T, E>,
) -> Result<T, Refusal> {
    match (verdict, local) {
        (None, Ok(value)) => Ok(value),
        (Some(verdict), local) => {
            let cause = local.err().and_then(|error| keep_if_speaker(error, group.rank() == verdict.speaker));
            Err(Refusal { cause, num_ranks: group.size(), ..verdict })
        }
        (None, Err(error)) => unreachable!("a failed rank's record says so: {error}"),
    }
}

/// See [`Group::refuse`].
pub(super) fn refuse<G: Group, E: Classify + Send + Sync + 'static>(group: &G, error: E) -> Refusal {
    match agree::<G, (), E>(group, Err(error)) {
        Err(refusal) => refusal,
        Ok(()) => unreachable!("this rank's own record is a failure"),
    }
}

/// The error, if this rank is the one to print it; others only log it.
fn keep_if_speaker<E: Classify + Send + Sync + 'static>(
    error: E,
    is_speaker: bool,
) -> Option<Box<dyn Error + Send + Sync>> {
    if is_speaker {
        return Some(Box::new(error));
    }
    tracing::debug!("refuses too: {}", chain(&error));
    None
}

/// The refusal that the records of all ranks amount to, without its cause.
pub(super) fn judge(records: &[Record]) -> Option<Refusal> {
    let failed = || records.iter().enumerate().filter(|(_, record)| record.exit != Exit::Fine);
    let (speaker, first) = failed().next()?;
    let differing = failed()
        .filter(|(_, record)| record.message_digest != first.message_digest)
        .map(|(rank, _)| Rank::from_index(rank))
        .collect();
    Some(Refusal {
        exit: first.exit,
        speaker: Rank::from_index(speaker),
        differing,
        num_ranks: records.len(),
        num_failed: failed().count(),
        cause: None,
    })
}

fn digest(error: &dyn Error) -> u64 {
    words(blake3::hash(chain(error).as_bytes()).as_bytes())[0]
}

/// A digest as numbers.
pub(super) fn words(digest: &[u8; 32]) -> [u64; 4] {
    let (words, _) = digest.as_chunks::<8>();
    [0, 1, 2, 3].map(|idx| u64::from_le_bytes(words[idx]))
}

fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("no such layer")]
    struct NoLayer;

    impl Classify for NoLayer {
        fn exit(&self) -> Exit {
            Exit::BadInput
        }
    }

    fn records(codes: &[(Exit, u64)]) -> Vec<Record> {
        codes.iter().map(|&(exit, message_digest)| Record { exit, message_digest }).collect()
    }

    #[test]
    fn nothing_is_refused_where_all_succeed() {
        assert!(judge(&records(&[(Exit::Fine, 0); 3])).is_none());
    }

    #[test]
    fn the_lowest_failing_rank_speaks_and_lends_its_code() {
        let refusal = judge(&records(&[(Exit::Fine, 0), (Exit::BadInput, 7), (Exit::Environment, 7)])).unwrap();
        assert_eq!((refusal.exit(), refusal.speaker), (Exit::BadInput, Rank(1)));
        let spoken = Refusal { cause: Some(Box::new(NoLayer)), ..refusal };
        assert_eq!(spoken.to_string(), "no such layer (rank 1 of 3)");
        assert_eq!(spoken.known(), Known::Everywhere { speaks: true });
    }

    #[test]
    fn one_message_stands_for_all_and_others_are_named() {
        let said = |codes: &[(Exit, u64)]| {
            Refusal { cause: Some(Box::new(NoLayer)), ..judge(&records(codes)).unwrap() }.to_string()
        };
        assert_eq!(said(&[(Exit::BadInput, 7)]), "no such layer");
        assert_eq!(said(&[(Exit::BadInput, 7); 2]), "no such layer (on all 2 ranks)");
        let differing = said(&[(Exit::BadInput, 7), (Exit::BadInput, 8), (Exit::BadInput, 9)]);
        assert_eq!(differing, "no such layer (on all 3 ranks); other causes on ranks 1-2, see them with -v");
    }

    #[test]
    fn a_rank_that_does_not_speak_says_nothing() {
        let silent = judge(&records(&[(Exit::BadInput, 7), (Exit::BadInput, 7)])).unwrap();
        assert_eq!(silent.known(), Known::Everywhere { speaks: false });
    }
}
