//! The house rules that no lint knows: imports downwards, one door each, `unsafe` in listed files, heads, lengths.
//!
//! Each rule is first tried on planted violations, so that it cannot pass by finding nothing.

mod imports;
mod rules;
mod source;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use source::Source;

/// A rule that is broken.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Violation {
    path: String,
    line: usize,
    rule: &'static str,
    text: String,
}

impl Violation {
    fn at(source: &Source, position: usize, rule: &'static str, text: String) -> Self {
        Self { path: source.path.clone(), line: source.line(position), rule, text }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.path, self.line, self.rule, self.text)
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file below a directory, by path, without build results, data and what git keeps.
fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("cannot list {}: {error}", dir.display()));
    for entry in entries {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if !["target", ".git", "fixtures", "shared", "node_modules"].contains(&name.as_str()) {
                walk(&path, files);
            }
        } else if name != ".git" {
            files.push(path);
        }
    }
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).expect("below the root").to_string_lossy().replace('\\', "/")
}

/// Every text file of the project.
fn project() -> Vec<(String, String)> {
    let mut files = Vec::new();
    walk(root(), &mut files);
    files.sort();
    files.into_iter().filter_map(|path| Some((relative(&path), fs::read_to_string(&path).ok()?))).collect()
}

fn rust_files() -> Vec<Source> {
    let files = project();
    let mut sources: Vec<Source> =
        files.iter().filter(|(path, _)| path.ends_with(".rs")).map(|(path, text)| Source::new(path, text)).collect();
    let test_files: Vec<String> = sources.iter().flat_map(test_module_paths).collect();
    for source in &mut sources {
        let stem = source.path.trim_end_matches(".rs");
        if test_files.iter().any(|test| stem == test || stem.starts_with(&format!("{test}/"))) {
            source.code = source.code.chars().map(|c| if c == '\n' { '\n' } else { ' ' }).collect();
        }
    }
    sources
}

/// Where the modules that a file declares as test code lie, without extension.
fn test_module_paths(source: &Source) -> Vec<String> {
    let stem = source.path.trim_end_matches(".rs");
    let dir = match stem.rsplit_once('/') {
        Some((dir, "mod" | "lib" | "main")) => dir,
        _ => stem,
    };
    let beside = source.path.rsplit_once('/').map_or("", |(dir, _)| dir);
    let lies_at = |name: &String| match name.strip_suffix(".rs") {
        Some(file) => format!("{beside}/{file}"),
        None => format!("{dir}/{name}"),
    };
    source.test_modules.iter().map(lies_at).collect()
}

#[track_caller]
fn assert_none(violations: &[Violation]) {
    let list: Vec<String> = violations.iter().map(ToString::to_string).collect();
    assert!(list.is_empty(), "{} violations:\n{}", list.len(), list.join("\n"));
}

fn in_product(source: &&Source) -> bool {
    source.path.starts_with("src/")
}

#[test]
fn imports_point_downwards() {
    let violations: Vec<Violation> = rust_files().iter().filter(in_product).flat_map(imports::check).collect();
    assert_none(&violations);
}

#[test]
fn doors_heads_and_purity() {
    let violations: Vec<Violation> = rust_files().iter().filter(in_product).flat_map(rules::check_product).collect();
    assert_none(&violations);
}

#[test]
fn lengths_leftovers_and_attributes() {
    let violations: Vec<Violation> = rust_files().iter().flat_map(rules::check_rust).collect();
    assert_none(&violations);
}

#[test]
fn no_private_paths() {
    let violations: Vec<Violation> = project().iter().flat_map(|(path, text)| rules::check_text(path, text)).collect();
    assert_none(&violations);
}

#[test]
fn the_walk_sees_the_project() {
    let paths: Vec<String> = project().into_iter().map(|(path, _)| path).collect();
    for path in ["src/lib.rs", "src/main.rs", "src/numerics/mod.rs", "Cargo.toml", "tests/tidy/rules.rs"] {
        assert!(paths.iter().any(|known| known == path), "{path} was not walked");
    }
    assert!(!paths.iter().any(|path| path.starts_with("target/")));
}

#[test]
fn test_modules_are_found_where_they_lie() {
    for (path, wanted) in [
        ("src/model/mod.rs", "src/model/tests"),
        ("src/numerics/nvfp4.rs", "src/numerics/nvfp4/tests"),
        ("src/lib.rs", "src/tests"),
    ] {
        assert_eq!(test_module_paths(&Source::new(path, "#[cfg(test)]\nmod tests;\n")), [wanted]);
    }
    let by_path = "#[cfg(test)]\n#[path = \"inspect_tests.rs\"]\nmod tests;\n";
    assert_eq!(test_module_paths(&Source::new("src/cli/inspect.rs", by_path)), ["src/cli/inspect_tests"]);
}
