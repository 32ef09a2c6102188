//! What may stand where: doors, `unsafe`, heads, lengths, and words that must not be left behind.

use super::Violation;
use super::imports::is_pure;
use super::source::Source;

/// Words that only some files may use.
struct Door {
    rule: &'static str,
    words: &'static [&'static str],
    /// Files, or directories ending in `/`.
    keepers: &'static [&'static str],
}

const DOORS: &[Door] = &[
    Door { rule: "mpi", words: &["mpi::", "use mpi", "mod mpi", "extern crate mpi"], keepers: &["src/world/"] },
    // Packed weights lie in anonymous maps: whole pages that go back to the system one matrix at a time.
    Door { rule: "memory maps", words: &["memmap2"], keepers: &["src/checkpoint/", "src/backend/simd/pack.rs"] },
    Door {
        rule: "files",
        words: &["std::fs", "fs::File", "OpenOptions", "tempfile", "NamedTempFile"],
        keepers: &[
            "src/checkpoint/",
            "src/sample/",
            "src/host.rs",
            "src/cli/options.rs",
            "src/jit/cache/",
            "src/layer/tune/store.rs",
        ],
    },
    Door {
        rule: "sockets",
        words: &["TcpStream", "TcpListener", "UdpSocket", "rustix::net"],
        keepers: &["src/world/links.rs"],
    },
    Door { rule: "environment", words: &["std::env", "env::var", "env::vars"], keepers: &["src/env.rs"] },
    Door { rule: "cuda", words: &["cudarc"], keepers: &["src/cuda/"] },
    Door { rule: "loading libraries", words: &["libloading"], keepers: &["src/dylib.rs", "src/cuda/library.rs"] },
    Door {
        rule: "printing",
        words: &["println!", "eprintln!", "print!", "eprint!", "io::stdout", "io::stderr", "stdout()", "stderr()"],
        keepers: &["src/cli/output.rs"],
    },
    Door { rule: "unsafe", words: &["unsafe"], keepers: UNSAFE_FILES },
];

/// The files that may hold `unsafe`.
const UNSAFE_FILES: &[&str] = &[
    "src/backend/simd/",
    "src/checkpoint/map.rs",
    "src/dylib.rs",
    "src/cuda/",
    "src/jit/nvrtc/",
    "src/nccl/",
    "src/gpu/",
    "src/dispatch/staged.rs",
    "src/dispatch/device/",
    "src/dispatch/nvlink/",
    "src/backend/cuda/programs.rs",
    "src/backend/cuda/around.rs",
    "src/backend/cuda/around/buffers.rs",
    "src/backend/cuda/dense.rs",
    "src/backend/cuda/topk.rs",
    "src/backend/cuda/gated.rs",
    "src/backend/cuda/load.rs",
    "src/layer/graph.rs",
    "src/backend/cuda/experts.rs",
    "src/backend/cuda/experts/live.rs",
    "src/backend/cuda/evidence.rs",
    "src/backend/cuda/local.rs",
    "src/backend/cuda/local/ceilings.rs",
    "src/backend/cuda/local/dealt.rs",
];

/// What a pure module may not use, whoever keeps its door.
const IMPURE: &[&str] = &["Instant", "SystemTime", "std::process", "std::net", "std::thread", "rayon", "tracing"];

/// Longest file; STYLE asks for 100 to 400 lines.
const MAX_LINES: usize = 500;

/// Files that are longer for a reason, and how long they may be.
const LONG_FILES: &[(&str, usize, &str)] = &[];

/// Words that no file keeps, split so that this file does not hold them.
fn leftovers() -> [String; 4] {
    [["todo", "!"], ["unimplemented", "!"], ["dbg", "!"], ["FIX", "ME"]].map(|parts| parts.concat())
}

/// Directories of the machines that this is written on, split likewise.
fn private_paths() -> [String; 3] {
    [["/wo", "rk/"], ["/ro", "ot/"], ["/ho", "me/"]].map(|parts| parts.concat())
}

fn kept_by(path: &str, keepers: &[&str]) -> bool {
    keepers.iter().any(|keeper| path == *keeper || (keeper.ends_with('/') && path.starts_with(keeper)))
}

/// The rules of product code, `src/**/*.rs`.
pub fn check_product(source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    for door in DOORS {
        if kept_by(&source.path, door.keepers) {
            continue;
        }
        for word in door.words {
            for position in source.find_word(word) {
                // The binary's own arguments are no environment.
                if source.path == "src/main.rs" && source.code[position..].starts_with("std::env::args") {
                    continue;
                }
                let text = format!("{word} belongs to {}", door.keepers.join(", "));
                violations.push(Violation::at(source, position, door.rule, text));
            }
        }
    }
    if is_pure(source) {
        for word in IMPURE {
            let found = source.find_word(word);
            violations.extend(found.map(|at| Violation::at(source, at, "pure", format!("{word} in a pure module"))));
        }
    }
    if !source.text.starts_with("//!") {
        violations.push(Violation::at(source, 0, "heads", "no //! head: what it is for, what it must not know".into()));
    }
    violations
}

/// The rules of all Rust code: product, tests, benches.
pub fn check_rust(source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    let num_lines = source.text.lines().count();
    let limit = LONG_FILES.iter().find(|(path, ..)| *path == source.path).map_or(MAX_LINES, |(_, lines, _)| *lines);
    if num_lines > limit {
        let text = format!("{num_lines} lines, more than {limit}: split it, or list it with its reason");
        violations.push(Violation::at(source, 0, "length", text));
    }
    for word in leftovers() {
        for (position, _) in source.text.match_indices(&word) {
            violations.push(Violation::at(source, position, "leftovers", word.clone()));
        }
    }
    // Attributes are looked for in the text: those of test code count as well.
    for (opening, wanted, text) in [
        ("#[ignore", "= ", "#[ignore] without a reason"),
        ("#[allow(", "\0", "#[allow]: write #[expect(lint, reason = ...)]"),
        ("#![allow(", "\0", "#![allow]: write #![expect(lint, reason = ...)]"),
        ("#[expect(", "reason", "#[expect] without a reason"),
        ("#![expect(", "reason", "#![expect] without a reason"),
    ] {
        for (position, _) in source.text.match_indices(opening) {
            let line_start = source.text[..position].rfind('\n').map_or(0, |at| at + 1);
            let attribute = &source.text[position..position + source.text[position..].find("]\n").unwrap_or(0)];
            let stands_alone = source.text[line_start..position].trim().is_empty();
            if stands_alone && !attribute.contains(wanted) {
                violations.push(Violation::at(source, position, "attributes", text.into()));
            }
        }
    }
    violations
}

/// The rule of all text files of the project.
pub fn check_text(path: &str, text: &str) -> Vec<Violation> {
    let mut violations = Vec::new();
    for private in private_paths() {
        for (position, _) in text.match_indices(&private) {
            let line = text[..position].matches('\n').count() + 1;
            let text = format!("{private} is a path of one machine");
            violations.push(Violation { path: path.into(), line, rule: "private paths", text });
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "//! A module.\n";

    fn rules(path: &str, body: &str) -> Vec<&'static str> {
        let source = Source::new(path, &format!("{HEAD}{body}"));
        let mut rules: Vec<&str> =
            check_product(&source).into_iter().chain(check_rust(&source)).map(|violation| violation.rule).collect();
        rules.dedup();
        rules
    }

    #[test]
    fn each_door_is_kept() {
        for (path, body, rule) in [
            ("src/layer/mod.rs", "use mpi::traits::*;\n", "mpi"),
            ("src/layer/mod.rs", "mod mpi;\n", "mpi"),
            ("src/backend/mod.rs", "fn f(map: &memmap2::Mmap) {}\n", "memory maps"),
            ("src/layer/mod.rs", "use std::fs;\n", "files"),
            ("src/layer/mod.rs", "fn f() { std::fs::read(x); }\n", "files"),
            ("src/layer/mod.rs", "fn f() { std::env::var(x); }\n", "environment"),
            ("src/layer/mod.rs", "use std::net::TcpStream;\n", "sockets"),
            ("src/layer/mod.rs", "fn f() { println!(); }\n", "printing"),
            ("src/cli/run.rs", "fn f() { std::io::stdout(); }\n", "printing"),
            ("src/backend/gpu.rs", "use cudarc::driver::sys;\n", "cuda"),
            ("src/cuda/probe.rs", "use libloading::Library;\n", "loading libraries"),
            ("src/layer/mod.rs", "unsafe fn f() {}\n", "unsafe"),
            ("src/numerics/e2m1.rs", "use std::time::Instant;\n", "pure"),
            ("src/dispatch/plan.rs", "fn f() { tracing::info!(); }\n", "pure"),
        ] {
            assert_eq!(rules(path, body), [rule], "{path}: {body}");
        }
    }

    #[test]
    fn keepers_and_look_alikes_pass() {
        for (path, body) in [
            ("src/world/mod.rs", "use mpi::traits::*;\n"),
            ("src/checkpoint/open.rs", "use std::fs; use memmap2::Mmap;\n"),
            ("src/env.rs", "fn f() { std::env::vars_os(); }\n"),
            ("src/main.rs", "fn f() { std::env::args_os(); }\n"),
            ("src/cli/output.rs", "fn f() { println!(); }\n"),
            ("src/backend/simd/avx2.rs", "unsafe fn f() {}\n"),
            ("src/layer/mod.rs", "// unsafe std::fs println!\nfn f() { g(\"mpi::x\"); }\n"),
            ("src/layer/mod.rs", "#[cfg(test)]\nmod tests { use std::fs; fn f() { println!(); } }\n"),
            ("src/layer/mod.rs", "use std::time::Instant; use rsmpi::x; use std::fmt::{self};\n"),
            ("src/layer/mod.rs", "#[expect(dead_code, reason = \"x\")]\nfn f() {}\n"),
        ] {
            assert_eq!(rules(path, body), Vec::<&str>::new(), "{path}: {body}");
        }
    }

    #[test]
    fn heads_lengths_and_leftovers_are_found() {
        let headless = Source::new("src/layer/x.rs", "fn f() {}\n");
        assert_eq!(check_product(&headless)[0].rule, "heads");
        assert_eq!(rules("src/layer/x.rs", &"\n".repeat(MAX_LINES)), ["length"]);
        assert_eq!(rules("src/layer/x.rs", &"\n".repeat(MAX_LINES - 1)), Vec::<&str>::new());
        for word in leftovers() {
            assert_eq!(rules("src/layer/x.rs", &format!("fn f() {{ {word}(); }}\n")), ["leftovers"], "{word}");
        }
        for attribute in ["#[ignore]", "#[allow(dead_code)]", "#![allow(dead_code)]", "#[expect(dead_code)]"] {
            assert_eq!(rules("src/layer/x.rs", &format!("{attribute}\nfn f() {{}}\n")), ["attributes"], "{attribute}");
        }
        let ignored = format!("{HEAD}#[test]\n#[ignore = \"slow\"]\nfn f() {{}}\n");
        assert!(check_rust(&Source::new("tests/x.rs", &ignored)).is_empty());
    }

    #[test]
    fn private_paths_are_found_with_their_line() {
        for private in private_paths() {
            let violations = check_text("README.md", &format!("a\nb {private}x\n"));
            assert_eq!((violations.len(), violations[0].line), (1, 2));
        }
        assert!(check_text("README.md", "/usr/bin and ./work and work/x\n").is_empty());
    }
}
