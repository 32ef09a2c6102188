//! Sets of ranks, kept and printed as spans: a message about 1,023 of 1,024 ranks stays a line.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::ids::{LayerIdx, Rank};

/// Ranks of a world, ascending, each once.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RankSet {
    /// First and last rank of each span; spans ascend and don't touch.
    spans: Vec<(u32, u32)>,
}

impl RankSet {
    /// The ranks `0..num_ranks`.
    ///
    /// # Panics
    /// If there are more ranks than 32 bits count, which no world has.
    #[must_use]
    pub fn all(num_ranks: usize) -> Self {
        match num_ranks {
            0 => Self::default(),
            n => Self { spans: vec![(0, Rank::from_index(n - 1).0)] },
        }
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.spans.iter().map(|(first, last)| (last - first) as usize + 1).sum()
    }

    /// In how many spans they are printed.
    #[must_use]
    pub fn num_spans(&self) -> usize {
        self.spans.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Whether `rank` is one of them.
    #[must_use]
    pub fn contains(&self, rank: Rank) -> bool {
        self.spans.iter().any(|(first, last)| (*first..=*last).contains(&rank.0))
    }

    /// The lowest.
    #[must_use]
    pub fn first(&self) -> Option<Rank> {
        self.spans.first().map(|(first, _)| Rank(*first))
    }

    /// All, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Rank> {
        self.spans.iter().flat_map(|(first, last)| (*first..=*last).map(Rank))
    }

    /// The ranks of either.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        self.iter().chain(other.iter()).collect()
    }
}

impl FromIterator<Rank> for RankSet {
    fn from_iter<I: IntoIterator<Item = Rank>>(ranks: I) -> Self {
        let ranks: Vec<u32> = ranks.into_iter().map(|rank| rank.0).collect();
        Self { spans: spans(ranks) }
    }
}

impl fmt::Display for RankSet {
    /// `rank 3`, or `ranks 0-2, 5`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_spans(f, &self.spans, "rank")
    }
}

impl Serialize for RankSet {
    /// First and last rank of each span.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.spans.serialize(serializer)
    }
}

/// Layers as text: `layer 3`, or `layers 1-92`.
pub(super) struct Layers(Vec<(u32, u32)>);

impl FromIterator<LayerIdx> for Layers {
    fn from_iter<I: IntoIterator<Item = LayerIdx>>(layers: I) -> Self {
        Self(spans(layers.into_iter().map(|layer| layer.0).collect()))
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_spans(f, &self.0, "layer")
    }
}

fn spans(mut numbers: Vec<u32>) -> Vec<(u32, u32)> {
    numbers.sort_unstable();
    let mut spans: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match spans.last_mut() {
            Some((_, last)) if number <= last.saturating_add(1) => *last = number,
            _ => spans.push((number, number)),
        }
    }
    spans
}

fn write_spans(f: &mut fmt::Formatter<'_>, spans: &[(u32, u32)], noun: &str) -> fmt::Result {
    let texts: Vec<String> = spans
        .iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
        .collect();
    match spans {
        [] => write!(f, "no {noun}"),
        [(first, last)] if first == last => write!(f, "{noun} {first}"),
        _ => write!(f, "{noun}s {}", texts.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn set(ranks: &[u32]) -> RankSet {
        ranks.iter().copied().map(Rank).collect()
    }

    #[test]
    fn prints_spans() {
        for (ranks, wanted) in [
            (&[][..], "no rank"),
            (&[3][..], "rank 3"),
            (&[1, 0][..], "ranks 0-1"),
            (&[5, 0, 1, 2, 1][..], "ranks 0-2, 5"),
            (&[u32::MAX, u32::MAX][..], "rank 4294967295"),
        ] {
            assert_eq!(set(ranks).to_string(), wanted);
        }
        assert_eq!([LayerIdx(2), LayerIdx(1)].into_iter().collect::<Layers>().to_string(), "layers 1-2");
    }

    proptest! {
        #[test]
        fn is_a_set(a in prop::collection::vec(0u32..40, 0..30), b in prop::collection::vec(0u32..40, 0..30)) {
            let as_set = |ranks: &[u32]| ranks.iter().copied().collect::<BTreeSet<u32>>();
            let (found, wanted) = (set(&a), as_set(&a));
            prop_assert_eq!(found.iter().map(|rank| rank.0).collect::<Vec<_>>(), wanted.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(found.len(), wanted.len());
            prop_assert!((0..40).all(|rank| found.contains(Rank(rank)) == wanted.contains(&rank)));
            let either: Vec<u32> = wanted.union(&as_set(&b)).copied().collect();
            prop_assert_eq!(found.union(&set(&b)), set(&either));
        }
    }
}
