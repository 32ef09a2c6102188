//! The bytes of a fingerprint: a header, then fields by ascending path. Every length stands before what it counts.
//!
//! ```text
//! "lockstep", version u16, kind u8, number of fields u32, then for each: path, tag u8, value
//! text and path: length u32, UTF-8      set and list: number u32, then texts      numbers little-endian
//! ```

use std::collections::BTreeMap;

use super::{Kind, VERSION, Value};

pub(super) const MAGIC: &[u8; 8] = b"lockstep";

pub(super) const ABSENT: u8 = 0;
pub(super) const FLAG: u8 = 1;
pub(super) const NUMBER: u8 = 2;
pub(super) const F32: u8 = 3;
pub(super) const F64: u8 = 4;
pub(super) const TEXT: u8 = 5;
pub(super) const DIGEST: u8 = 6;
pub(super) const SET: u8 = 7;
pub(super) const LIST: u8 = 8;

impl Kind {
    pub(super) const ALL: [Self; 4] = [Self::Selection, Self::Session, Self::Information, Self::Start];

    pub(super) const fn code(self) -> u8 {
        match self {
            Self::Selection => 1,
            Self::Session => 2,
            Self::Information => 3,
            Self::Start => 4,
        }
    }
}

pub(super) fn encode(kind: Kind, fields: &BTreeMap<String, Value>) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.push(kind.code());
    push_len(&mut bytes, fields.len());
    for (path, value) in fields {
        push_text(&mut bytes, path);
        push_value(&mut bytes, value);
    }
    bytes
}

fn push_value(bytes: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Absent => bytes.push(ABSENT),
        Value::Flag(flag) => bytes.extend([FLAG, u8::from(*flag)]),
        Value::Number(number) => {
            bytes.push(NUMBER);
            bytes.extend(number.to_le_bytes());
        }
        Value::F32(bits) => {
            bytes.push(F32);
            bytes.extend(bits.to_le_bytes());
        }
        Value::F64(bits) => {
            bytes.push(F64);
            bytes.extend(bits.to_le_bytes());
        }
        Value::Text(text) => {
            bytes.push(TEXT);
            push_text(bytes, text);
        }
        Value::Digest(digest) => {
            bytes.push(DIGEST);
            bytes.extend(digest.0);
        }
        Value::Set(items) => {
            bytes.push(SET);
            push_len(bytes, items.len());
            items.iter().for_each(|item| push_text(bytes, item));
        }
        Value::List(items) => {
            bytes.push(LIST);
            push_len(bytes, items.len());
            items.iter().for_each(|item| push_text(bytes, item));
        }
    }
}

fn push_text(bytes: &mut Vec<u8>, text: &str) {
    push_len(bytes, text.len());
    bytes.extend(text.as_bytes());
}

/// # Panics
/// If a length does not fit in 32 bits: fields are names, numbers and digests, never data.
fn push_len(bytes: &mut Vec<u8>, len: usize) {
    let len = u32::try_from(len).expect("a fingerprint holds no text of 4 GiB");
    bytes.extend(len.to_le_bytes());
}
