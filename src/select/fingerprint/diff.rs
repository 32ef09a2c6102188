//! Where the fingerprints of ranks differ: the field, its values, and the ranks on each side.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::super::problem::list;
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

impl fmt::Display for FieldDifference {
    /// `dispatch.chunk_tokens: 64 on ranks 0-2, 128 on rank 3`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |side: &Side| match &side.value {
            Some(value) => format!("{value} on {}", side.ranks),
            None => format!("not there on {}", side.ranks),
        };
        write!(f, "{}: {}", self.field, list(self.sides.iter().map(side), ", "))
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
