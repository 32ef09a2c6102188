//! Bytes of another rank back into fields. Trusts no length, and accepts only what this version would have written.

use std::collections::{BTreeMap, BTreeSet};

use super::encode::{ABSENT, DIGEST, F32, F64, FLAG, LIST, MAGIC, NUMBER, SET, TEXT};
use super::{Digest, Kind, VERSION, Value};
use crate::exit::{Classify, Exit};

/// Why bytes are no fingerprint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Something else.
    #[error("these bytes are no fingerprint; start every rank from the same build of lockstep")]
    Magic,
    /// Another version.
    #[error(
        "the fingerprint is of version {found}, this build compares version {VERSION}; start every rank from the same build of lockstep"
    )]
    Version {
        /// Its version.
        found: u16,
    },
    /// Bytes are missing.
    #[error("the fingerprint ends at byte {len}, where {wanted} more are needed from byte {at}; it was cut on the way")]
    Truncated {
        /// Where reading stands.
        at: usize,
        /// Bytes needed from there.
        wanted: usize,
        /// Bytes there are in all.
        len: usize,
    },
    /// Bytes are left over.
    #[error("the fingerprint ends at byte {at}, but {len} were received")]
    Trailing {
        /// Where it ends.
        at: usize,
        /// Bytes there are in all.
        len: usize,
    },
    /// A byte or text that this version does not write.
    #[error("byte {at} of the fingerprint is not {wanted}; it was damaged on the way")]
    Malformed {
        /// Where it stands.
        at: usize,
        /// What should stand there.
        wanted: &'static str,
    },
}

impl Classify for DecodeError {
    fn exit(&self) -> Exit {
        Exit::Disagreement
    }
}

pub(super) fn decode(bytes: &[u8]) -> Result<(Kind, BTreeMap<String, Value>), DecodeError> {
    let mut reader = Reader { bytes, at: 0 };
    if reader.array().ok() != Some(*MAGIC) {
        return Err(DecodeError::Magic);
    }
    let found = u16::from_le_bytes(reader.array()?);
    if found != VERSION {
        return Err(DecodeError::Version { found });
    }
    let at = reader.at;
    let [code] = reader.array()?;
    let kind = Kind::ALL.into_iter().find(|kind| kind.code() == code);
    let kind = kind.ok_or(DecodeError::Malformed { at, wanted: "a kind of fingerprint" })?;
    let num_fields = reader.len()?;
    let mut fields = BTreeMap::new();
    for _ in 0..num_fields {
        let at = reader.at;
        let path = reader.text()?;
        if fields.last_key_value().is_some_and(|(last, _)| *last >= path) {
            return Err(DecodeError::Malformed { at, wanted: "a later path than the one before" });
        }
        let value = reader.value()?;
        fields.insert(path, value);
    }
    match reader.at {
        at if at == bytes.len() => Ok((kind, fields)),
        at => Err(DecodeError::Trailing { at, len: bytes.len() }),
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, num_bytes: usize) -> Result<&'a [u8], DecodeError> {
        let end = self.at.checked_add(num_bytes);
        let taken = end.and_then(|end| self.bytes.get(self.at..end));
        let cut = DecodeError::Truncated { at: self.at, wanted: num_bytes, len: self.bytes.len() };
        let taken = taken.ok_or(cut)?;
        self.at += num_bytes;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// A count of things that take at least a byte each: more than there are bytes left is a lie.
    fn len(&mut self) -> Result<usize, DecodeError> {
        let len = u32::from_le_bytes(self.array()?) as usize;
        let left = self.bytes.len() - self.at;
        if len > left {
            return Err(DecodeError::Truncated { at: self.at, wanted: len, len: self.bytes.len() });
        }
        Ok(len)
    }

    fn text(&mut self) -> Result<String, DecodeError> {
        let len = self.len()?;
        let at = self.at;
        let text = std::str::from_utf8(self.take(len)?);
        text.map(str::to_owned).map_err(|_| DecodeError::Malformed { at, wanted: "UTF-8 text" })
    }

    fn value(&mut self) -> Result<Value, DecodeError> {
        let at = self.at;
        let [tag] = self.array()?;
        Ok(match tag {
            ABSENT => Value::Absent,
            FLAG => match self.array()? {
                [0] => Value::Flag(false),
                [1] => Value::Flag(true),
                _ => return Err(DecodeError::Malformed { at: at + 1, wanted: "0 or 1" }),
            },
            NUMBER => Value::Number(u64::from_le_bytes(self.array()?)),
            F32 => Value::F32(u32::from_le_bytes(self.array()?)),
            F64 => Value::F64(u64::from_le_bytes(self.array()?)),
            TEXT => Value::Text(self.text()?),
            DIGEST => Value::Digest(Digest(self.array()?)),
            SET => Value::Set(self.set()?),
            LIST => Value::List((0..self.len()?).map(|_| self.text()).collect::<Result<_, _>>()?),
            _ => return Err(DecodeError::Malformed { at, wanted: "the tag of a value" }),
        })
    }

    fn set(&mut self) -> Result<BTreeSet<String>, DecodeError> {
        let mut set = BTreeSet::new();
        for _ in 0..self.len()? {
            let at = self.at;
            let item = self.text()?;
            if set.last().is_some_and(|last| *last >= item) {
                return Err(DecodeError::Malformed { at, wanted: "a later item than the one before" });
            }
            set.insert(item);
        }
        Ok(set)
    }
}
