//! What must be alike on all ranks, compared: a digest of fixed size, and the whole only where digests differ.
//!
//! Knows nothing of what the bytes mean.

use super::Refusal;
use super::agree::{Record, judge, settle, words};
use super::group::{Group, Piece};
use crate::exit::Classify;
use crate::ids::Rank;

/// What a rank brings to a comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sheet {
    /// Tells what is encoded from everything else.
    pub digest: [u8; 32],
    /// What is sent where digests differ.
    pub encoded: Vec<u8>,
}

/// What a comparison has shown; the same on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Compared {
    /// All digests are equal.
    Alike,
    /// They are not: everything that was brought, each once, by the lowest of the ranks that brought it.
    Differing(Vec<Brought>),
}

/// What some ranks brought to a comparison, alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Brought {
    /// The ranks, ascending.
    pub ranks: Vec<Rank>,
    /// What they brought.
    pub encoded: Vec<u8>,
}

/// See [`Group::compare`].
pub(super) fn compare<G: Group, E: Classify + Send + Sync + 'static>(
    group: &G,
    local: Result<Sheet, E>,
) -> Result<Compared, Refusal> {
    let [exit, message] = Record::of(&local).words();
    let digest = local.as_ref().map_or([0; 4], |sheet| words(&sheet.digest));
    let all = group.all_gather_u64([exit, message, digest[0], digest[1], digest[2], digest[3]]);
    let records: Vec<Record> = all.iter().map(|record| Record::from_words([record[0], record[1]])).collect();
    let sheet = settle(group, judge(&records), local)?;
    if all.iter().all(|record| record == &all[0]) {
        return Ok(Compared::Alike);
    }
    let lengths = group.lengths(&sheet.encoded);
    // Ranks with one digest have brought one thing: at a thousand ranks of which one differs, two encodings travel.
    let brought = by_digest(&all).into_iter().map(|ranks| {
        let root = ranks[0];
        let mut encoded = if group.rank() == root { sheet.encoded.clone() } else { vec![0; lengths[root.index()]] };
        for at in (0..encoded.len()).step_by(group.round_bytes()) {
            let piece = Piece { at, len: group.round_bytes() };
            let len = piece.len_of(encoded.len());
            group.broadcast(root, &mut encoded[at..at + len]);
        }
        Brought { ranks, encoded }
    });
    Ok(Compared::Differing(brought.collect()))
}

/// The ranks of each digest, in the order of their lowest ranks.
fn by_digest(records: &[[u64; 6]]) -> Vec<Vec<Rank>> {
    let mut met: Vec<(&[u64; 6], Vec<Rank>)> = Vec::new();
    for (rank, record) in records.iter().enumerate() {
        let rank = Rank::from_index(rank);
        match met.iter_mut().find(|(known, _)| *known == record) {
            Some((_, ranks)) => ranks.push(rank),
            None => met.push((record, vec![rank])),
        }
    }
    met.into_iter().map(|(_, ranks)| ranks).collect()
}
