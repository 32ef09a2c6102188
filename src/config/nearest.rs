//! The name a person probably meant.

/// Insertions, deletions, replacements and swaps of neighbours that turn `a` into `b`.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replaced = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replaced.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before_last[j - 2] + 1);
            }
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

/// The candidate closest to `name`, if it is close enough to be meant: a third of its length may differ.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (distance(name, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= 1.max(candidate.len().max(name.len()) / 3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// The form that differs from `name` in case, hyphens and outer spaces only.
pub fn normalised(name: &str) -> String {
    name.trim().to_lowercase().replace(['-', ' '], "_")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn counts_edits_and_swaps() {
        for (a, b, wanted) in
            [("", "", 0), ("abc", "", 3), ("top_kk", "top_k", 1), ("smid", "simd", 1), ("kitten", "sitting", 3)]
        {
            assert_eq!(distance(a, b), wanted, "{a} -> {b}");
        }
    }

    #[test]
    fn a_stranger_is_nobodys_neighbour() {
        assert_eq!(nearest("backendd", ["backend", "combine"]), Some("backend"));
        assert_eq!(nearest("fruit", ["backend", "combine"]), None);
        assert_eq!(nearest("x", ["y"]), Some("y"));
    }

    proptest! {
        #[test]
        fn is_a_metric_on_what_matters(a in "[a-c]{0,6}", b in "[a-c]{0,6}") {
            prop_assert_eq!(distance(&a, &b), distance(&b, &a));
            prop_assert_eq!(distance(&a, &b) == 0, a == b);
            prop_assert!(distance(&a, &b) <= a.len().max(b.len()));
        }
    }
}
