//! An artefact: machine code with its source and its manifest, in memory and as three files.

use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

use serde::{Deserialize, Serialize};

use super::super::key::{Key, KeyParts};
use super::super::nvrtc::Compiled;
use super::super::request::KernelRequest;
use super::super::usage::Usage;

/// The files of an entry.
const SOURCE: &str = "kernel.cu";
const CUBIN: &str = "kernel.cubin";
const MANIFEST: &str = "manifest.json";

/// The manifest's form.
const VERSION: u32 = 1;
/// No manifest is longer: it is read before anything is known of it.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

/// What an entry says of itself. Nothing in it depends on when, where or by whom it was built.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    version: u32,
    key: String,
    parts: KeyParts,
    source: FileFacts,
    cubin: FileFacts,
    usage: Vec<Usage>,
}

/// What tells a file from a damaged one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileFacts {
    num_bytes: u64,
    blake3: String,
}

impl FileFacts {
    fn of(bytes: &[u8]) -> Self {
        Self { num_bytes: bytes.len() as u64, blake3: blake3::hash(bytes).to_hex().to_string() }
    }

    fn check(&self, file: &'static str, bytes: &[u8]) -> Result<(), BadEntry> {
        let found = bytes.len() as u64;
        if found != self.num_bytes {
            return Err(BadEntry::Length { file, wanted: self.num_bytes, found });
        }
        if blake3::hash(bytes).to_hex().as_str() != self.blake3 {
            return Err(BadEntry::Hash { file });
        }
        Ok(())
    }
}

/// What is wrong with an entry.
#[derive(Debug, thiserror::Error)]
pub enum BadEntry {
    /// There is none.
    #[error("it is not there")]
    Absent,
    /// A file can't be read.
    #[error("{file}: {source}")]
    Read {
        /// The file.
        file: &'static str,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The manifest is not of the known form.
    #[error("{MANIFEST} is not of this version's form: {reason}")]
    Manifest {
        /// Why.
        reason: String,
    },
    /// It is another kernel's.
    #[error("{MANIFEST} is of the key {found}")]
    OtherKey {
        /// That one's key.
        found: String,
    },
    /// A file is longer or shorter than it was.
    #[error("{file} has {found} bytes, {wanted} were written")]
    Length {
        /// The file.
        file: &'static str,
        /// Bytes written.
        wanted: u64,
        /// Bytes there are.
        found: u64,
    },
    /// A file has other content than it had.
    #[error("{file} is not what was written")]
    Hash {
        /// The file.
        file: &'static str,
    },
}

/// Machine code with everything that belongs to it.
#[derive(Debug, Clone, PartialEq)]
pub struct Artefact {
    key: Key,
    manifest: Manifest,
    source: String,
    cubin: Vec<u8>,
}

impl Artefact {
    /// What a compiler made of a request whose key has these parts.
    #[must_use]
    pub fn new(request: &KernelRequest, parts: KeyParts, compiled: Compiled) -> Self {
        let key = parts.key();
        let source = source_text(request, &parts);
        let manifest = Manifest {
            version: VERSION,
            key: key.to_string(),
            parts,
            source: FileFacts::of(source.as_bytes()),
            cubin: FileFacts::of(&compiled.cubin),
            usage: compiled.usage,
        };
        Self { key, manifest, source, cubin: compiled.cubin }
    }

    /// The kernel's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.manifest.parts.name
    }

    /// What it is found by.
    #[must_use]
    pub fn key(&self) -> Key {
        self.key
    }

    /// What the key is made of.
    #[must_use]
    pub fn parts(&self) -> &KeyParts {
        &self.manifest.parts
    }

    /// The machine code.
    #[must_use]
    pub fn cubin(&self) -> &[u8] {
        &self.cubin
    }

    /// What its kernels use.
    #[must_use]
    pub fn usage(&self) -> &[Usage] {
        &self.manifest.usage
    }

    /// Its three files. Equal artefacts have equal files.
    pub(super) fn files(&self) -> [(&'static str, Vec<u8>); 3] {
        let manifest = serde_json::to_vec_pretty(&self.manifest).unwrap_or_default();
        [(SOURCE, self.source.clone().into_bytes()), (CUBIN, self.cubin.clone()), (MANIFEST, manifest)]
    }

    /// Reads and verifies an entry.
    ///
    /// # Errors
    /// If there is none, or it is not, to the last byte, what was written under `key`.
    pub fn read(dir: &Path, key: Key) -> Result<Self, BadEntry> {
        let is_absent =
            |error: io::Error| matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
        if fs::metadata(dir).is_err_and(is_absent) {
            return Err(BadEntry::Absent);
        }
        let read = |file| fs::read(dir.join(file)).map_err(|source| BadEntry::Read { file, source });
        let manifest = read_manifest(dir)?;
        Self::verified(key, manifest, read(SOURCE)?, read(CUBIN)?)
    }

    fn verified(key: Key, manifest: Manifest, source: Vec<u8>, cubin: Vec<u8>) -> Result<Self, BadEntry> {
        // The key by its parts as well: a manifest may not claim another kernel's.
        if manifest.key != key.to_string() || manifest.parts.key() != key {
            return Err(BadEntry::OtherKey { found: manifest.key });
        }
        manifest.source.check(SOURCE, &source)?;
        manifest.cubin.check(CUBIN, &cubin)?;
        let source = String::from_utf8(source).map_err(|_| BadEntry::Hash { file: SOURCE })?;
        Ok(Self { key, manifest, source, cubin })
    }

    /// Its bytes on the way to another rank: each file with its length before it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (_, file) in self.files() {
            bytes.extend((file.len() as u64).to_le_bytes());
            bytes.extend(file);
        }
        bytes
    }

    /// Takes what [`Artefact::encode`] gave off the front of `bytes`, and verifies it.
    ///
    /// # Errors
    /// If it is not, to the last byte, the artefact of `key`.
    pub fn decode(bytes: &mut &[u8], key: Key) -> Result<Self, BadEntry> {
        let cut = || BadEntry::Manifest { reason: "the message is cut off".to_owned() };
        let mut file = || -> Result<Vec<u8>, BadEntry> {
            let (length, rest) = bytes.split_first_chunk::<8>().ok_or_else(cut)?;
            let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| cut())?;
            let (file, rest) = rest.split_at_checked(length).ok_or_else(cut)?;
            *bytes = rest;
            Ok(file.to_vec())
        };
        let (source, cubin, manifest) = (file()?, file()?, file()?);
        Self::verified(key, parse(&manifest)?, source, cubin)
    }
}

fn read_manifest(dir: &Path) -> Result<Manifest, BadEntry> {
    let path = dir.join(MANIFEST);
    let of_read = |source| BadEntry::Read { file: MANIFEST, source };
    let num_bytes = fs::metadata(&path).map_err(of_read)?.len();
    if num_bytes > MAX_MANIFEST_BYTES {
        return Err(BadEntry::Manifest { reason: format!("it has {num_bytes} bytes") });
    }
    parse(&fs::read(&path).map_err(of_read)?)
}

fn parse(bytes: &[u8]) -> Result<Manifest, BadEntry> {
    let manifest: Manifest =
        serde_json::from_slice(bytes).map_err(|error| BadEntry::Manifest { reason: error.to_string() })?;
    if manifest.version != VERSION {
        return Err(BadEntry::Manifest { reason: format!("it has version {}", manifest.version) });
    }
    Ok(manifest)
}

/// What an entry says that it was made of, unverified: for saying why another one was not found.
pub(super) fn read_parts(dir: &Path) -> Option<KeyParts> {
    read_manifest(dir).ok().map(|manifest| manifest.parts)
}

/// The key that an entry claims; it is verified by [`Artefact::read`] alone.
pub(super) fn claimed_key(dir: &Path) -> Result<Key, BadEntry> {
    Ok(read_manifest(dir)?.parts.key())
}

/// The source for people: one file that compiles by itself, with what it was specialised for on top.
fn source_text(request: &KernelRequest, parts: &KeyParts) -> String {
    let mut text = format!("// {} for {}, by NVRTC {}\n", parts.name, parts.arch, parts.compiler);
    let _ = writeln!(text, "// {}", parts.flags.join(" "));
    for (name, value) in &parts.defines {
        let _ = writeln!(text, "#define {name} {value}");
    }
    for header in request.source.headers {
        let _ = write!(text, "\n// ---- {}\n{}", header.name, header.text);
    }
    let _ = writeln!(text, "\n// ---- {}.cu", parts.name);
    // The headers stand above.
    let is_own = |line: &&str| !request.source.headers.iter().any(|h| line.contains(&format!("\"{}\"", h.name)));
    request.source.main.lines().filter(is_own).for_each(|line| {
        let _ = writeln!(text, "{line}");
    });
    text
}
