//! The names that a person may have meant.

use strsim::osa_distance;

/// At most three of `candidates`, the likeliest first: those within a few edits of `name`, and those that it is a piece of.
pub(crate) fn near<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    const MAX: usize = 3;
    let name = normalised(name);
    let mut found: Vec<(usize, &str)> = candidates
        .into_iter()
        .filter_map(|candidate| {
            let is_piece = name.chars().count() >= 3 && candidate.contains(name.as_str());
            let edits = osa_distance(&name, candidate);
            (is_piece || is_close(edits, &name, candidate)).then_some((edits, candidate))
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    found.into_iter().take(MAX).map(|(_, candidate)| candidate.to_owned()).collect()
}

/// The candidate closest to `name`, if it is close enough to be meant; of equally close ones the first.
pub(crate) fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (osa_distance(name, candidate), candidate))
        .filter(|(edits, candidate)| is_close(*edits, name, candidate))
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, candidate)| candidate)
}

/// A third of the longer name may differ, and one letter always.
fn is_close(edits: usize, name: &str, candidate: &str) -> bool {
    edits <= 1.max(candidate.len().max(name.len()) / 3)
}

/// The form that differs from `name` in case, hyphens and outer spaces only.
pub(crate) fn normalised(name: &str) -> String {
    name.trim().to_lowercase().replace(['-', ' '], "_")
}

/// The hint of an error about an unknown name; empty where nothing is near.
pub(crate) fn did_you_mean(near: &[String]) -> String {
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

    #[test]
    fn a_stranger_is_nobodys_neighbour() {
        assert_eq!(nearest("backendd", ["backend", "combine"]), Some("backend"));
        assert_eq!(nearest("top_kk", ["top_k", "topology"]), Some("top_k"));
        assert_eq!(nearest("fruit", ["backend", "combine"]), None);
        assert_eq!(nearest("x", ["y"]), Some("y"));
    }
}
