//! Where the fingerprints of ranks differ: the field, its values, and the ranks on each side.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::super::problem::{counted, list};
use super::super::ranks::RankSet;
use super::{Fingerprint, Value};
use crate::ids::Rank;

/// A field that is not the same everywhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FieldDifference {
    /// Its path.
    pub field: String,
    /// Its values, the one that most ranks have first.
    pub sides: Vec<Side>,
}

/// The ranks that have one value of a field.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Side {
    /// The value; absent where the ranks don't have the field.
    pub value: Option<Value>,
    /// The ranks.
    pub ranks: RankSet,
}

/// More values of one field than this are counted and not shown: one a rank would be a page that nobody reads.
const MAX_SIDES: usize = 8;

impl fmt::Display for FieldDifference {
    /// `dispatch.chunk_tokens: 64 on ranks 0-2, 128 on rank 3`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shown, rest) = self.sides.split_at(self.sides.len().min(MAX_SIDES));
        // Where ranks are listed with commas, another sign has to part the sides.
        let separator = if self.sides.iter().any(|side| side.ranks.num_spans() > 1) { "; " } else { ", " };
        write!(f, "{}: {}", self.field, list(shown, separator))?;
        if rest.is_empty() {
            return Ok(());
        }
        let ranks: RankSet = rest.iter().flat_map(|side| side.ranks.iter()).collect();
        write!(f, "{separator}{} on {ranks}", counted(rest.len(), "other value"))
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            // Of a digest people can see no more than that it is another one.
            Some(Value::Digest(digest)) => write!(f, "digest {} on {}", digest.short(), self.ranks),
            Some(value) => write!(f, "{value} on {}", self.ranks),
            None => write!(f, "not there on {}", self.ranks),
        }
    }
}

/// The fields in which fingerprints of one kind differ, in the order in which people count. Equal ones give nothing.
#[must_use]
pub fn diff<'a>(fingerprints: impl IntoIterator<Item = (Rank, &'a Fingerprint)>) -> Vec<FieldDifference> {
    // Most ranks are alike: each distinct fingerprint is looked at once.
    let mut distinct: Vec<(&Fingerprint, Vec<Rank>)> = Vec::new();
    for (rank, fingerprint) in fingerprints {
        match distinct.iter_mut().find(|(known, _)| known.digest == fingerprint.digest) {
            Some((_, ranks)) => ranks.push(rank),
            None => distinct.push((fingerprint, vec![rank])),
        }
    }
    if distinct.len() < 2 {
        return Vec::new();
    }
    let paths: BTreeSet<&str> =
        distinct.iter().flat_map(|(fingerprint, _)| fingerprint.fields.keys()).map(String::as_str).collect();
    let mut differences: Vec<FieldDifference> =
        paths.into_iter().filter_map(|path| difference(path, &distinct)).collect();
    differences.sort_by_cached_key(|difference| as_people_count(&difference.field));
    differences
}

fn difference(path: &str, distinct: &[(&Fingerprint, Vec<Rank>)]) -> Option<FieldDifference> {
    let mut by_value: BTreeMap<Option<&Value>, Vec<Rank>> = BTreeMap::new();
    for (fingerprint, ranks) in distinct {
        by_value.entry(fingerprint.field(path)).or_default().extend(ranks);
    }
    if by_value.len() < 2 {
        return None;
    }
    let side = |(value, ranks): (Option<&Value>, Vec<Rank>)| Side {
        value: value.cloned(),
        ranks: ranks.into_iter().collect(),
    };
    let mut sides: Vec<Side> = by_value.into_iter().map(side).collect();
    sides.sort_by_key(|side| (std::cmp::Reverse(side.ranks.len()), side.ranks.first()));
    Some(FieldDifference { field: path.to_owned(), sides })
}

/// `layers.2` before `layers.10`, and what was asked before what was selected for it.
fn as_people_count(path: &str) -> (bool, Vec<(u64, String)>) {
    let is_consequence = path == "selection" || path.contains(".selection.");
    let segments =
        path.split('.').map(|segment| segment.parse().map_or((u64::MAX, segment.to_owned()), |n| (n, String::new())));
    (is_consequence, segments.collect())
}
