//! The names that a person may have meant.

/// At most three of `candidates`, the likeliest first: those within a few edits of `name`, and those that it is a piece of.
pub(super) fn near<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    const MAX: usize = 3;
    let name = name.to_lowercase().replace('-', "_");
    let mut found: Vec<(usize, &str)> = candidates
        .into_iter()
        .filter_map(|candidate| {
            let edits = edits(&name, candidate);
            let is_piece = name.chars().count() >= 3 && candidate.contains(name.as_str());
            let is_close = edits <= 1.max(candidate.len().max(name.len()) / 3);
            (is_piece || is_close).then_some((edits, candidate))
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    found.into_iter().take(MAX).map(|(_, candidate)| candidate.to_owned()).collect()
}

/// Insertions, deletions, replacements and swaps of neighbours that turn `a` into `b`.
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let is_swap = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            let swapped = if is_swap { rows[i - 2][j - 2] + 1 } else { usize::MAX };
            row.push(replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1).min(swapped));
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

/// The hint of an error about an unknown name; empty where nothing is near.
pub(super) fn did_you_mean(near: &[String]) -> String {
    match near {
        [] => String::new(),
        near => format!("; did you mean {}?", near.join(" or ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_neighbours_and_pieces() {
        let names = ["simd", "reference", "mma_sync", "wgmma", "w4a16_nvfp4", "nvfp4"];
        for (name, wanted) in [
            ("smid", &["simd"][..]),
            ("simt", &["simd"][..]),
            ("SIMD", &["simd"][..]),
            ("mma-sync", &["mma_sync"][..]),
            ("mma", &["wgmma", "mma_sync"][..]),
            ("w4a16", &["w4a16_nvfp4"][..]),
            ("fp4", &["nvfp4", "w4a16_nvfp4"][..]),
            ("fruit", &[][..]),
            ("", &[][..]),
        ] {
            assert_eq!(near(name, names), wanted, "{name}");
        }
    }
}
