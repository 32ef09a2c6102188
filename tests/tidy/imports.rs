//! Imports point downwards: which module may name which.

use super::Violation;
use super::source::Source;

/// The project's modules from the bottom up. A module may name those of earlier lines, and itself; those of one line do
/// not name each other.
const ORDER: &[&[&str]] = &[
    &["exit"],
    &["ids"],
    &["near", "launched", "random"],
    &["numerics"],
    &["routing"],
    &["model"],
    &["config", "dispatch::placement"],
    &["select"],
    &["dispatch"],
    &["plan"],
    &["fault", "dylib", "host"],
    &["world", "checkpoint", "env", "cuda"],
    &["nccl", "jit"],
    &["gpu"],
    &["dispatch::nvlink", "dispatch::passing"],
    &["dispatch::carrier"],
    &["dispatch::transport", "dispatch::device", "dispatch::nccl", "dispatch::staged"],
    &["backend"],
    &["facts"],
    &["sample", "layer"],
    &["report"],
    &["cli"],
    &["main"],
];

/// Up to here modules are pure: no I/O, no clock, no environment, no `unsafe`.
const LAST_PURE: &str = "plan";

fn level(unit: &str) -> Option<usize> {
    ORDER.iter().position(|line| line.contains(&unit))
}

/// The longest entry of the table that `path` lies in.
fn unit_of(path: &[&str]) -> Option<&'static str> {
    let whole = path.join("::");
    ORDER
        .iter()
        .flat_map(|line| line.iter().copied())
        .filter(|unit| whole == *unit || whole.starts_with(&format!("{unit}::")))
        .max_by_key(|unit| unit.len())
}

/// The module path of a file below `src/`; empty for `lib.rs`.
pub fn module_path(file: &str) -> Option<Vec<&str>> {
    let inside = file.strip_prefix("src/")?.strip_suffix(".rs")?;
    let inside = inside.strip_suffix("/mod").unwrap_or(inside);
    Some(if inside == "lib" { Vec::new() } else { inside.split('/').collect() })
}

/// Whether a file belongs to a pure module.
pub fn is_pure(source: &Source) -> bool {
    let unit = module_path(&source.path).and_then(|path| unit_of(&path));
    unit.and_then(level).is_some_and(|found| Some(found) <= level(LAST_PURE))
}

/// Every path that a file names from the crate's root, with where it stands.
fn named_paths(source: &Source) -> Vec<(usize, Vec<String>)> {
    let mut paths = Vec::new();
    let roots: &[&str] = if source.path == "src/main.rs" { &["crate::", "lockstep::"] } else { &["crate::"] };
    for root in roots {
        for position in source.find_word(root) {
            let mut tree = PathTree { text: &source.code[position + root.len()..] };
            tree.parse(&mut Vec::new(), &mut |path| paths.push((position, path.to_vec())));
        }
    }
    paths
}

/// A parser of what follows `crate::`: `a::{b, c::*}`.
struct PathTree<'a> {
    text: &'a str,
}

impl PathTree<'_> {
    fn parse(&mut self, prefix: &mut Vec<String>, found: &mut dyn FnMut(&[String])) {
        self.text = self.text.trim_start();
        if let Some(rest) = self.text.strip_prefix('{') {
            self.text = rest;
            loop {
                self.text = self.text.trim_start().trim_start_matches(',').trim_start();
                if self.text.is_empty() || self.text.starts_with('}') {
                    self.text = self.text.strip_prefix('}').unwrap_or("");
                    return;
                }
                let before = self.text.len();
                self.parse(&mut prefix.clone(), found);
                if self.text.len() == before {
                    self.text = &self.text[self.text.chars().next().map_or(0, char::len_utf8)..];
                }
            }
        }
        let len = self.text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(self.text.len());
        let (name, rest) = self.text.split_at(len);
        self.text = rest;
        if !name.is_empty() {
            prefix.push(name.to_string());
        }
        match self.text.strip_prefix("::") {
            Some(rest) => {
                self.text = rest;
                self.parse(prefix, found);
            }
            None => found(prefix),
        }
    }
}

/// Paths that climb out of a top-level module by `super`.
fn climbs_to_root(source: &Source, depth: usize) -> Vec<usize> {
    let mut climbs = Vec::new();
    for position in source.find_word("super::") {
        if source.code[..position].ends_with("super::") {
            continue;
        }
        let mut count = 0;
        let mut rest = &source.code[position..];
        while let Some(after) = rest.strip_prefix("super::") {
            (count, rest) = (count + 1, after);
        }
        if count >= depth + inline_depth(source, position) {
            climbs.push(position);
        }
    }
    climbs
}

/// How many inline modules enclose a position.
fn inline_depth(source: &Source, position: usize) -> usize {
    let mut stack = Vec::new();
    let code = &source.code[..position];
    for (at, byte) in code.bytes().enumerate() {
        match byte {
            b'{' => {
                let head = code[..at].trim_end();
                let name_start = head.rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |i| i + 1);
                stack.push(head[..name_start].trim_end().ends_with("mod"));
            }
            b'}' => drop(stack.pop()),
            _ => {}
        }
    }
    stack.into_iter().filter(|&is_mod| is_mod).count()
}

/// Every import of a file that does not point downwards.
pub fn check(source: &Source) -> Vec<Violation> {
    let Some(path) = module_path(&source.path) else { return Vec::new() };
    if path.is_empty() {
        return Vec::new();
    }
    let violation = |position: usize, text: String| Violation::at(source, position, "imports", text);
    let Some(unit) = unit_of(&path) else {
        return vec![violation(0, format!("module {} is not in the table of tests/tidy/imports.rs", path[0]))];
    };
    let mut violations: Vec<Violation> = named_paths(source)
        .into_iter()
        .filter_map(|(position, named)| {
            let names: Vec<&str> = named.iter().map(String::as_str).collect();
            match unit_of(&names) {
                None => {
                    // Names at the crate's root, such as a macro or the version.
                    let is_module =
                        names.first().is_some_and(|name| name.starts_with(char::is_lowercase)) && names.len() > 1;
                    is_module.then(|| violation(position, format!("crate::{} is not in the table", named.join("::"))))
                }
                Some(target) if target == unit || level(target) < level(unit) => None,
                Some(target) => Some(violation(position, format!("{unit} may not name {target}"))),
            }
        })
        .collect();
    violations.dedup();
    let climbs = climbs_to_root(source, path.len());
    violations
        .extend(climbs.into_iter().map(|at| violation(at, "super:: leaves the top module; write crate::".into())));
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        check(&Source::new(path, text)).into_iter().map(|violation| violation.text).collect()
    }

    #[test]
    fn upward_imports_are_found_in_every_spelling() {
        for text in [
            "use crate::world::World;",
            "use crate::{ids::Rank, world::{self, World}};",
            "use crate::{\n    ids,\n    world,\n};",
            "fn f() { crate::world::now() }",
            "pub(crate) use crate::world as w;",
        ] {
            assert_eq!(found("src/routing/topk.rs", text), ["routing may not name world"], "{text}");
        }
        assert_eq!(found("src/main.rs", "use lockstep::cli;"), Vec::<String>::new());
        assert_eq!(found("src/layer/mod.rs", "use crate::cli::x;"), ["layer may not name cli"]);
    }

    #[test]
    fn downward_imports_and_look_alikes_pass() {
        for text in [
            "use crate::ids::Rank; use crate::numerics::{nvfp4, activation::Activation};",
            "// use crate::world\nlet x = \"crate::world::x\";",
            "#[cfg(test)] mod tests { use crate::layer::Session; }",
            "use super::topk::best; use self::inner::x;",
        ] {
            assert_eq!(found("src/routing/topk.rs", text), Vec::<String>::new(), "{text}");
        }
    }

    #[test]
    fn doors_do_not_name_each_other_and_transports_are_above_them() {
        assert_eq!(found("src/world/mod.rs", "use crate::checkpoint::X;"), ["world may not name checkpoint"]);
        assert_eq!(found("src/dispatch/transport.rs", "use crate::world::World;"), Vec::<String>::new());
        assert_eq!(found("src/dispatch/plan.rs", "use crate::world::World;"), ["dispatch may not name world"]);
        assert_eq!(
            found("src/dispatch/plan.rs", "use crate::dispatch::transport::X;"),
            ["dispatch may not name dispatch::transport"]
        );
    }

    #[test]
    fn climbing_by_super_is_found() {
        assert_eq!(found("src/routing/topk.rs", "use super::super::world::World;").len(), 1);
        assert_eq!(found("src/exit.rs", "use super::ids;").len(), 1);
        assert_eq!(found("src/routing/topk.rs", "mod inner { use super::super::best; }"), Vec::<String>::new());
    }

    #[test]
    fn unknown_modules_are_found() {
        assert!(found("src/novel/mod.rs", "")[0].contains("not in the table"));
        assert!(found("src/layer/mod.rs", "use crate::novel::X;")[0].contains("not in the table"));
    }

    #[test]
    fn pure_modules_are_those_below_the_doors() {
        for (path, pure) in [
            ("src/numerics/e2m1.rs", true),
            ("src/dispatch/plan.rs", true),
            ("src/dispatch/transport.rs", false),
            ("src/world/mod.rs", false),
            ("src/lib.rs", false),
        ] {
            assert_eq!(is_pure(&Source::new(path, "")), pure, "{path}");
        }
    }
}
