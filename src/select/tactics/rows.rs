//! How many rows an expert computes, as coarsely as tactics are chosen for.

use std::fmt;

/// Rows of an expert, over all ranks: the mean, rounded up, and then up to the next bound.
///
/// From global numbers alone, so that every rank comes to the same bucket in the same step. There are few, so that the
/// number of tactics to time does not grow with token counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowBucket(u8);

/// The bounds. Whatever is beyond the last falls into it.
const BOUNDS: [usize; RowBucket::NUM] = [1, 4, 16, 64, 256];

impl RowBucket {
    /// How many there are.
    pub const NUM: usize = 5;

    /// The bucket of `num_rows` rows, of all ranks, that `num_experts` experts share.
    #[must_use]
    pub fn of(num_rows: usize, num_experts: usize) -> Self {
        let mean = num_rows.div_ceil(num_experts.max(1));
        let idx = BOUNDS.iter().position(|bound| mean <= *bound).unwrap_or(Self::NUM - 1);
        Self(u8::try_from(idx).unwrap_or_default())
    }

    /// This one and all below it, ascending.
    pub fn up_to(self) -> impl Iterator<Item = Self> {
        (0..=self.0).map(Self)
    }

    /// The place among all.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The rows of an expert that stand for the bucket.
    #[must_use]
    pub fn rows(self) -> usize {
        BOUNDS[self.index()]
    }
}

impl fmt::Display for RowBucket {
    /// `4 rows`: of an expert, at most.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows();
        write!(f, "{rows} row{}", if rows == 1 { "" } else { "s" })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn means_are_rounded_up_to_a_bound() {
        for (num_rows, num_experts, rows) in [
            (0, 4, 1),
            (1, 4, 1),
            (4, 4, 1),
            (5, 4, 4),
            (17, 4, 16),
            (64, 4, 16),
            (65, 4, 64),
            (9999, 4, 256),
            (3, 0, 4),
        ] {
            assert_eq!(RowBucket::of(num_rows, num_experts).rows(), rows, "{num_rows} rows, {num_experts} experts");
        }
        let all: Vec<String> = RowBucket::of(usize::MAX, 1).up_to().map(|bucket| bucket.to_string()).collect();
        assert_eq!(all, ["1 row", "4 rows", "16 rows", "64 rows", "256 rows"]);
    }

    proptest! {
        #[test]
        fn more_rows_never_fall_into_a_lower_bucket(fewer in 0usize..10_000, more in 0usize..10_000, experts in 1usize..300) {
            let of = |rows| RowBucket::of(rows, experts);
            prop_assert!(of(fewer) <= of(fewer + more));
            prop_assert!(of(fewer).up_to().count() <= RowBucket::NUM);
        }
    }
}
