//! What must be equal on all ranks, as named fields with one encoding and one digest.
//!
//! Fields have a path and a typed value, and are kept by path: the order in which they were added, or a map was walked,
//! can't matter. Knows no transport: bytes go out, bytes come in.

mod decode;
mod diff;
mod encode;
mod information;
mod registry;
mod selection;
mod session;
mod start;
#[cfg(test)]
mod tests;
mod value;

pub use decode::DecodeError;
pub use diff::{FieldDifference, Side, diff};
pub use information::Information;
pub use session::{BuildFacts, LayerFields, SessionBuilder};
pub use start::StartBuilder;
pub use value::{Digest, Value};

use std::collections::BTreeMap;

use super::problem::ActivationForm;
use crate::exit::{Classify, Exit};
use crate::numerics::activation::Activation;

/// The version of the encoding and of what fields mean. Ranks of different versions can't compare, and say so.
pub const VERSION: u16 = 1;

/// What a set of fields is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// What was selected, and everything that it follows from.
    Selection,
    /// That, and everything else that decides what a run computes.
    Session,
    /// What may differ.
    Information,
    /// What ranks were asked for.
    Start,
}

/// Named fields and their digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint {
    kind: Kind,
    digest: Digest,
    fields: BTreeMap<String, Value>,
}

impl Fingerprint {
    fn new(kind: Kind, fields: BTreeMap<String, Value>) -> Self {
        let digest = Digest(*blake3::hash(&encode::encode(kind, &fields)).as_bytes());
        Self { kind, digest, fields }
    }

    /// What it is about.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// The blake3 digest of [`Fingerprint::encode`].
    #[must_use]
    pub const fn digest(&self) -> Digest {
        self.digest
    }

    /// Every field, by path.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.fields.iter().map(|(path, value)| (path.as_str(), value))
    }

    /// The value of a field.
    #[must_use]
    pub fn field(&self, path: &str) -> Option<&Value> {
        self.fields.get(path)
    }

    /// The bytes that the digest is of, from which [`Fingerprint::decode`] makes the same value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode::encode(self.kind, &self.fields)
    }

    /// Reads the bytes of another rank.
    ///
    /// # Errors
    /// If they are not, to the last byte, what [`Fingerprint::encode`] of this version gives.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let (kind, fields) = decode::decode(bytes)?;
        Ok(Self::new(kind, fields))
    }

    /// Fields as lines of `path: value`.
    #[must_use]
    pub fn listing(&self) -> String {
        self.fields.iter().map(|(path, value)| format!("{path}: {value}\n")).collect()
    }
}

/// Why fields make no fingerprint: a bug in the code that fed them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FingerprintError {
    /// One path, two values.
    #[error("the fingerprint was fed {path} twice, with {first} and with {second}; give each value a path of its own")]
    Twice {
        /// The path.
        path: String,
        /// The value that came first.
        first: Value,
        /// The other.
        second: Value,
    },
}

impl Classify for FingerprintError {
    fn exit(&self) -> Exit {
        Exit::Bug
    }
}

/// Collects fields in any order.
#[derive(Debug, Clone)]
struct Fields {
    kind: Kind,
    fields: BTreeMap<String, Value>,
    error: Option<FingerprintError>,
}

impl Fields {
    fn new(kind: Kind) -> Self {
        Self { kind, fields: BTreeMap::new(), error: None }
    }

    /// Adds a field. The same value again changes nothing; another one makes [`Fields::finish`] fail.
    fn add(&mut self, path: impl Into<String>, value: impl Into<Value>) {
        let (path, second) = (path.into(), value.into());
        match self.fields.get(&path) {
            Some(first) if *first != second => {
                let first = first.clone();
                self.error.get_or_insert(FingerprintError::Twice { path, first, second });
            }
            Some(_) => {}
            None => {
                self.fields.insert(path, second);
            }
        }
    }

    fn add_build(&mut self, build: BuildFacts<'_>) {
        let BuildFacts { version, revision, target, profile } = build;
        for (field, value) in [("version", version), ("revision", revision), ("target", target), ("profile", profile)] {
            self.add(format!("build.{field}"), value);
        }
    }

    /// Adds an activation, its constants by their bits.
    fn add_activation(&mut self, path: &str, activation: Activation) {
        self.add(path, Value::text(ActivationForm::from(activation)));
        match activation {
            Activation::Swiglu => {}
            Activation::SwigluClamp { limit } => self.add(format!("{path}.limit"), limit),
            Activation::Situ { beta, linear_beta } => {
                self.add(format!("{path}.beta"), beta);
                self.add(format!("{path}.linear_beta"), linear_beta);
            }
        }
    }

    fn finish(self) -> Result<Fingerprint, FingerprintError> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(Fingerprint::new(self.kind, self.fields)),
        }
    }
}
