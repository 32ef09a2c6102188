//! Patterns of module names, as quantisation configs exclude modules with them.
//!
//! Tools write them as literal names, as globs, or (`re:`) as regular expressions, and under prefixes that move between
//! releases of one model: `model.`, `language_model.model.`, `model.language_model.`. Knows names only, not tensors.

/// A pattern over dotted module names.
///
/// It matches a module if it matches the whole name or that of a module around it, so `model.layers.1` covers
/// `model.layers.1.mlp.experts.0.up_proj` and never `model.layers.10`. `*` stands for any characters, dots too, `?` for one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModulePattern {
    text: String,
    variants: Vec<String>,
}

/// Where the text model sits inside its checkpoint, by release.
const PREFIXES: [&str; 5] = ["", "model.", "language_model.model.", "model.language_model.", "language_model."];

impl ModulePattern {
    /// Takes the pattern as written.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let mut variants = Vec::new();
        if !text.starts_with("re:") {
            variants.push(text.to_owned());
            let bare = canonical(text);
            if !bare.starts_with(['*', '?']) {
                variants.extend(PREFIXES.iter().map(|prefix| format!("{prefix}{bare}")));
            } else if let Some(rest) = text.strip_prefix("*.") {
                // `*.layers.1.*` is meant for a model without a prefix too.
                variants.push(rest.to_owned());
            }
            variants.sort_unstable();
            variants.dedup();
        }
        Self { text: text.to_owned(), variants }
    }

    /// The pattern as written.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether it is a regular expression, which matches nothing here.
    #[must_use]
    pub fn is_regex(&self) -> bool {
        self.text.starts_with("re:")
    }

    /// Whether it covers `module`, or a module around it.
    #[must_use]
    pub fn matches(&self, module: &str) -> bool {
        self.variants.iter().any(|variant| covers(variant, module))
    }

    /// The literal beginnings of the names it can match: a sorted list of names need be searched there alone.
    pub fn heads(&self) -> impl Iterator<Item = &str> {
        self.variants.iter().map(|variant| &variant[..variant.find(['*', '?']).unwrap_or(variant.len())])
    }

    /// Whether it can match `module` or something inside it; false spares the closer look.
    #[must_use]
    pub fn may_touch(&self, module: &str) -> bool {
        self.heads().any(|head| module.starts_with(head) || head.starts_with(module))
    }
}

/// The name without the prefixes under which a text model moves.
#[must_use]
pub fn canonical(module: &str) -> &str {
    let mut rest = module;
    while let Some(shorter) = rest.strip_prefix("model.").or_else(|| rest.strip_prefix("language_model.")) {
        rest = shorter;
    }
    rest
}

/// The name and those of the modules around it, the longest first.
pub fn ancestors(module: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(module), |name| name.rfind('.').map(|dot| &name[..dot]))
}

fn covers(variant: &str, module: &str) -> bool {
    if variant.contains(['*', '?']) {
        return ancestors(module).any(|name| glob(variant.as_bytes(), name.as_bytes()));
    }
    module.strip_prefix(variant).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Glob matching without recursion: on a mismatch the last star swallows one more byte.
fn glob(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                retry = Some((p, n));
                p += 1;
            }
            Some(&byte) if byte == b'?' || byte == name[n] => {
                p += 1;
                n += 1;
            }
            _ => {
                let Some((star, swallowed)) = retry else { return false };
                retry = Some((star, swallowed + 1));
                p = star + 1;
                n = swallowed + 1;
            }
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(pattern: &str, module: &str, wanted: bool) {
        assert_eq!(ModulePattern::new(pattern).matches(module), wanted, "`{pattern}` on `{module}`");
    }

    #[test]
    fn case_d5_literal_stops_at_the_component() {
        for layer in 10..20 {
            check("model.layers.1", &format!("model.layers.{layer}.mlp.experts.0.up_proj"), false);
        }
        check("model.layers.1", "model.layers.1.mlp.experts.0.up_proj", true);
        check("model.layers.1", "model.layers.1", true);
        check("model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj", false);
        check("model.layers.1.mlp.experts.2", "model.layers.1.mlp.experts.21.up_proj", false);
    }

    #[test]
    fn case_d5_globs_cross_dots() {
        check("model.layers.1.mlp.experts*", "model.layers.1.mlp.experts.7.down_proj", true);
        check("model.layers.1.mlp.experts*", "model.layers.10.mlp.experts.7.down_proj", false);
        check("*.layers.1.*", "model.layers.1.mlp.experts.7.down_proj", true);
        check("*.layers.1.*", "layers.1.mlp.experts.7.down_proj", true);
        check("*.layers.1.*", "model.layers.11.mlp.experts.7.down_proj", false);
        check("*.gate", "language_model.model.layers.1.block_sparse_moe.gate", true);
        check("*.gate", "model.layers.1.mlp.experts.0.gate_proj", false);
        check("*shared_experts*", "model.layers.1.mlp.shared_experts.up_proj", true);
        check("model.layers.?.mlp", "model.layers.3.mlp.gate", true);
        check("model.layers.?.mlp", "model.layers.13.mlp.gate", false);
    }

    #[test]
    fn case_d5_prefixes_move() {
        let module = "model.language_model.layers.1.mlp.experts.0.up_proj";
        check("language_model.model.layers.1.mlp.experts", module, true);
        check("model.layers.1.mlp.experts", module, true);
        check("layers.1.mlp.experts*", module, true);
        check(
            "language_model.model.layers.1.mlp.experts",
            "model.language_model.layers.11.mlp.experts.0.up_proj",
            false,
        );
        check("model.*", "lm_head", false);
    }

    #[test]
    fn a_regex_matches_nothing_and_says_so() {
        let pattern = ModulePattern::new("re:.*gate$");
        assert!(pattern.is_regex());
        assert!(!pattern.matches("model.layers.1.mlp.gate"));
    }

    proptest! {
        #[test]
        fn what_matches_may_be_touched(pattern in "[ab.*?]{0,8}", module in "[ab]{1,3}(\\.[ab]{1,3}){0,3}") {
            let pattern = ModulePattern::new(&pattern);
            prop_assert!(!pattern.matches(&module) || pattern.may_touch(&module));
        }

        #[test]
        fn glob_agrees_with_a_recursive_one(pattern in "[ab*?]{0,8}", name in "[ab]{0,8}") {
            fn slow(p: &[u8], n: &[u8]) -> bool {
                match (p.first(), n.first()) {
                    (None, _) => n.is_empty(),
                    (Some(b'*'), _) => slow(&p[1..], n) || (!n.is_empty() && slow(p, &n[1..])),
                    (Some(&c), Some(&d)) => (c == b'?' || c == d) && slow(&p[1..], &n[1..]),
                    (Some(_), None) => false,
                }
            }
            prop_assert_eq!(glob(pattern.as_bytes(), name.as_bytes()), slow(pattern.as_bytes(), name.as_bytes()));
        }
    }
}
