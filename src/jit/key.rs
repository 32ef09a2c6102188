//! What an artefact is found by: a digest of everything that decides the machine code, and of nothing else.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::nvrtc::CompilerId;
use super::request::KernelRequest;

/// The encoding below; a change of it changes all keys.
const VERSION: u32 = 1;

/// What goes into a key, each part by itself, so that a miss can say which part changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyParts {
    /// Of the encoding.
    pub version: u32,
    /// The kernel's name.
    pub name: String,
    /// Digest of the `.cu` file.
    pub source: String,
    /// Digest of every header, by name.
    pub headers: BTreeMap<String, String>,
    /// Every define, by name, as the compiler gets it.
    pub defines: BTreeMap<String, String>,
    /// What it is compiled for.
    pub arch: String,
    /// The options beside defines and architecture.
    pub flags: Vec<String>,
    /// The compiler's build.
    pub compiler: String,
}

impl KeyParts {
    /// The parts of a request compiled by `compiler`.
    #[must_use]
    pub fn new(request: &KernelRequest, compiler: &CompilerId) -> Self {
        let digest = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
        let is_flag = |option: &String| !option.starts_with("--define-macro") && !option.starts_with("--gpu-arch");
        Self {
            version: VERSION,
            name: request.source.name.to_owned(),
            source: digest(request.source.main),
            headers: request.source.headers.iter().map(|h| (h.name.to_owned(), digest(h.text))).collect(),
            defines: request.defines.iter().map(|(name, value)| ((*name).to_owned(), value.to_string())).collect(),
            arch: request.arch.name().to_owned(),
            flags: request.options().into_iter().filter(is_flag).collect(),
            compiler: compiler.to_string(),
        }
    }

    /// Their digest. Every text goes in with its length, every list with its count.
    #[must_use]
    pub fn key(&self) -> Key {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"lockstep kernel");
        let mut text = |text: &str| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        text(&self.version.to_string());
        for part in [&self.name, &self.source, &self.arch, &self.compiler] {
            text(part);
        }
        for map in [&self.headers, &self.defines] {
            text(&map.len().to_string());
            for (name, value) in map {
                text(name);
                text(value);
            }
        }
        text(&self.flags.len().to_string());
        self.flags.iter().for_each(|flag| text(flag));
        Key(hasher.finalize().into())
    }

    /// In what `self` differs from `other`, for people: `define BETA 0x40800000u -> 0x40a00000u`.
    #[must_use]
    pub fn changes_from(&self, other: &Self) -> Vec<String> {
        let mut changes = Vec::new();
        let mut differs = |what: &str, before: &str, after: &str| {
            if before != after {
                changes.push(format!("{what} {before} -> {after}"));
            }
        };
        differs("format", &other.version.to_string(), &self.version.to_string());
        differs("source", short(&other.source), short(&self.source));
        let none = "none".to_owned();
        for (what, before, after) in
            [("header", &other.headers, &self.headers), ("define", &other.defines, &self.defines)]
        {
            let names = before.keys().chain(after.keys().filter(|name| !before.contains_key(*name)));
            for name in names {
                let [before, after] = [before, after].map(|map| short(map.get(name).unwrap_or(&none)));
                differs(&format!("{what} {name}"), before, after);
            }
        }
        differs("architecture", &other.arch, &self.arch);
        differs("flags", &other.flags.join(" "), &self.flags.join(" "));
        differs("compiler", &other.compiler, &self.compiler);
        changes
    }
}

/// The beginning of a digest; a shorter text whole.
fn short(text: &str) -> &str {
    if text.len() == 64 { &text[..12] } else { text }
}

/// The digest of [`KeyParts`], blake3-256.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key([u8; 32]);

impl Key {
    /// Its bytes.
    #[must_use]
    pub const fn bytes(self) -> [u8; 32] {
        self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::super::arch::Arch;
    use super::super::request::Define;
    use super::super::source::{Header, KernelSource};
    use super::*;

    const HEADER: Header = Header { name: "h.cuh", text: "// one\n" };
    const EDITED: Header = Header { name: "h.cuh", text: "// two\n" };
    const SOURCE: KernelSource = KernelSource { name: "k", main: "int x;\n", headers: &[HEADER] };

    fn request() -> KernelRequest {
        KernelRequest::new(SOURCE, Arch::Sm90a).with("BETA", Define::float(4.0)).with("TILE", 64_u32)
    }

    fn compiler() -> CompilerId {
        CompilerId::new("13.0.88", "CL-36424714")
    }

    fn parts(request: &KernelRequest) -> KeyParts {
        KeyParts::new(request, &compiler())
    }

    #[test]
    fn every_part_changes_the_key_and_is_named() {
        let before = parts(&request());
        let mut other = request();
        other.defines.insert("BETA", Define::float(5.0));
        let beta = parts(&other);
        let arch = parts(&KernelRequest { arch: Arch::Sm100a, ..request() });
        let source = KernelSource { main: "int y;\n", ..SOURCE };
        let source = parts(&KernelRequest { source, ..request() });
        let header = KernelSource { headers: &[EDITED], ..SOURCE };
        let header = parts(&KernelRequest { source: header, ..request() });
        let newer = KeyParts::new(&request(), &CompilerId::new("13.0.89", "CL-1"));
        let flags = KeyParts { flags: vec!["-O0".to_owned()], ..before.clone() };
        let mut keys = vec![before.key()];
        for (changed, word) in [
            (beta, "define BETA 0x40800000u -> 0x40a00000u"),
            (arch, "architecture sm_90a -> sm_100a"),
            (source, "source "),
            (header, "header h.cuh "),
            (newer, "compiler 13.0.88 (CL-36424714) -> 13.0.89 (CL-1)"),
            (flags, "flags "),
        ] {
            let changes = changed.changes_from(&before);
            assert!(changes.len() == 1 && changes[0].starts_with(word), "{changes:?}");
            keys.push(changed.key());
        }
        let distinct: std::collections::BTreeSet<Key> = keys.iter().copied().collect();
        assert_eq!(distinct.len(), keys.len(), "{keys:?}");
        assert_eq!(parts(&request()).key(), before.key(), "going back finds the old one");
        assert!(before.changes_from(&before).is_empty());
    }

    #[test]
    fn two_pairs_of_constants_are_two_keys() {
        let situ = |beta: f32, linear: f32| {
            let request = KernelRequest::new(SOURCE, Arch::Sm90a);
            parts(&request.with("BETA", Define::float(beta)).with("LINEAR_BETA", Define::float(linear))).key()
        };
        assert_ne!(situ(4.0, 25.0), situ(25.0, 4.0));
        assert_ne!(situ(4.0, 25.0), situ(4.0_f32.next_up(), 25.0), "by bits, not as text");
        assert_eq!(situ(4.0, 25.0), situ(4.0, 25.0));
    }

    #[test]
    fn names_and_values_do_not_run_into_each_other() {
        let mut moved = parts(&request());
        let before = moved.key();
        moved.defines = [("BETA0".to_owned(), "x40800000u".to_owned()), ("TILE".to_owned(), "64".to_owned())].into();
        assert_ne!(moved.key(), before);
    }
}
