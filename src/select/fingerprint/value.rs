//! The values of fields. Floats are kept by their bits, sets in order.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Serialize, Serializer};

/// A blake3-256 digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of bytes: of a source, an artefact.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The digest of many floats, by their bits and in order.
    #[must_use]
    pub fn of_f32s(values: impl IntoIterator<Item = f32>) -> Self {
        // At once, since blake3 is made for long inputs: a layer of Kimi K3 has 4,480 of these values.
        let bytes: Vec<u8> = values.into_iter().flat_map(|value| value.to_bits().to_le_bytes()).collect();
        Self::of(&bytes)
    }

    /// The first eight digits, enough for people to compare.
    #[must_use]
    pub fn short(&self) -> String {
        self.to_string().chars().take(8).collect()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The value of a field.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    /// There is none.
    Absent,
    /// Yes or no.
    Flag(bool),
    /// A count or size.
    Number(u64),
    /// The bits of an f32.
    F32(u32),
    /// The bits of an f64.
    F64(u64),
    /// A name, a version.
    Text(String),
    /// A digest of something large.
    Digest(Digest),
    /// Texts of which the order does not matter.
    Set(BTreeSet<String>),
    /// Texts of which the order matters.
    List(Vec<String>),
}

impl Value {
    /// A set of what prints itself.
    #[must_use]
    pub fn set<T: fmt::Display>(items: impl IntoIterator<Item = T>) -> Self {
        Self::Set(items.into_iter().map(|item| item.to_string()).collect())
    }

    /// A list of what prints itself.
    #[must_use]
    pub fn list<T: fmt::Display>(items: impl IntoIterator<Item = T>) -> Self {
        Self::List(items.into_iter().map(|item| item.to_string()).collect())
    }

    /// The text of what prints itself.
    #[must_use]
    pub fn text(item: impl fmt::Display) -> Self {
        Self::Text(item.to_string())
    }
}

macro_rules! from {
    ($($type:ty: |$value:ident| $make:expr;)+) => {
        $(impl From<$type> for Value {
            fn from($value: $type) -> Self {
                $make
            }
        })+
    };
}

from! {
    bool: |flag| Self::Flag(flag);
    u64: |number| Self::Number(number);
    u32: |number| Self::Number(u64::from(number));
    usize: |number| Self::Number(number as u64);
    f32: |value| Self::F32(value.to_bits());
    f64: |value| Self::F64(value.to_bits());
    &str: |text| Self::Text(text.to_owned());
    String: |text| Self::Text(text);
    Digest: |digest| Self::Digest(digest);
}

impl<T: Into<Self>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Absent, Into::into)
    }
}

impl fmt::Display for Value {
    /// Floats with their bits, since two that differ may print alike; text with its control characters escaped.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut listed = |items: &mut dyn Iterator<Item = &String>, [open, close]: [&str; 2]| {
            let items: Vec<String> = items.map(|item| escaped(item)).collect();
            write!(f, "{open}{}{close}", items.join(", "))
        };
        match self {
            Self::Set(items) => listed(&mut items.iter(), ["{", "}"]),
            Self::List(items) => listed(&mut items.iter(), ["[", "]"]),
            Self::Absent => f.write_str("absent"),
            Self::Flag(flag) => flag.fmt(f),
            Self::Number(number) => number.fmt(f),
            Self::F32(bits) => write!(f, "{:?} (bits 0x{bits:08x})", f32::from_bits(*bits)),
            Self::F64(bits) => write!(f, "{:?} (bits 0x{bits:016x})", f64::from_bits(*bits)),
            Self::Text(text) => f.write_str(&escaped(text)),
            Self::Digest(digest) => digest.fmt(f),
        }
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

fn escaped(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}
