//! From a deployment file's bytes to the keys that it sets, each with its line.
//!
//! Knows the keys' names and nesting; their types are `keys.rs`'s.

use super::error::{ConfigError, Place};
use super::keys::{KEYS, Key};
use super::scalar::Scalar;
use super::tree::{self, Entry, Node, Value};
use crate::near::{nearest, normalised};

/// No deployment is near this; a checkpoint given by mistake is.
const MAX_BYTES: usize = 1 << 20;

/// A key that a file sets.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// Its position in [`KEYS`].
    pub key_idx: usize,
    pub scalar: Scalar,
    /// Where the value stands; a value that is absent, where its key does.
    pub at: Place,
}

/// The keys that `bytes` set, in the file's order.
///
/// # Errors
/// If the file is not a strict deployment: the first fault, with its place.
pub fn read(bytes: &[u8], file: &str) -> Result<Vec<Setting>, ConfigError> {
    let text = decode(bytes, file)?;
    let Some(root) = tree::read(text, file)? else {
        return Err(ConfigError::Empty { file: file.to_owned() });
    };
    let entries = mapping(&root, file, "a deployment", || format!("keys such as {}", sections().join(", ")))?;
    let mut settings = Vec::new();
    refuse_doubled(entries, "", file)?;
    for entry in entries {
        if sections().contains(&entry.key.as_str()) {
            section(entry, file, &mut settings)?;
        } else {
            settings.push(setting(entry, "", file)?);
        }
    }
    Ok(settings)
}

fn decode<'a>(bytes: &'a [u8], file: &str) -> Result<&'a str, ConfigError> {
    if bytes.len() > MAX_BYTES {
        let (num_bytes, limit_bytes) = (bytes.len(), MAX_BYTES);
        return Err(ConfigError::TooLarge { file: file.to_owned(), num_bytes, limit_bytes });
    }
    std::str::from_utf8(bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        let line_start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
        let at = Place {
            file: file.to_owned(),
            line: before.iter().filter(|byte| **byte == b'\n').count() + 1,
            column: String::from_utf8_lossy(&before[line_start..]).chars().count() + 1,
        };
        ConfigError::NotUtf8 { at, byte: bytes[error.valid_up_to()], offset: error.valid_up_to() }
    })
}

/// The names of the sections, in the file's order.
fn sections() -> Vec<&'static str> {
    let mut sections: Vec<&str> = KEYS.iter().map(Key::section).filter(|section| !section.is_empty()).collect();
    sections.dedup();
    sections
}

fn names_in(section: &str) -> Vec<&'static str> {
    let keys = KEYS.iter().filter(|key| key.section() == section).map(Key::name);
    if section.is_empty() { keys.chain(sections()).collect() } else { keys.collect() }
}

fn mapping<'a>(node: &'a Node, file: &str, key: &str, wanted: impl Fn() -> String) -> Result<&'a [Entry], ConfigError> {
    match &node.value {
        Value::Mapping(entries) => Ok(entries),
        other => Err(ConfigError::Shape {
            at: node.mark.at(file),
            key: key.to_owned(),
            wanted: format!("a mapping of {}", wanted()),
            found: other.shown(),
        }),
    }
}

fn section(entry: &Entry, file: &str, settings: &mut Vec<Setting>) -> Result<(), ConfigError> {
    // `moe:` with every key below it commented out sets nothing.
    if matches!(&entry.node.value, Value::Scalar(scalar) if scalar.is_null()) {
        return Ok(());
    }
    let keys = || format!("keys ({})", names_in(&entry.key).join(", "));
    let entries = mapping(&entry.node, file, &entry.key, keys)?;
    refuse_doubled(entries, &entry.key, file)?;
    for inner in entries {
        settings.push(setting(inner, &entry.key, file)?);
    }
    Ok(())
}

fn setting(entry: &Entry, section: &str, file: &str) -> Result<Setting, ConfigError> {
    let path = joined(section, &entry.key);
    let Some(key_idx) = KEYS.iter().position(|key| key.section() == section && key.name() == entry.key) else {
        let cure = cure_for_unknown(entry, section);
        return Err(ConfigError::UnknownKey { at: entry.mark.at(file), key: path, cure });
    };
    match &entry.node.value {
        Value::Scalar(scalar) => {
            let is_absent = scalar.text.is_empty() && !scalar.quoted;
            let mark = if is_absent { entry.mark } else { entry.node.mark };
            Ok(Setting { key_idx, scalar: scalar.clone(), at: mark.at(file) })
        }
        other => Err(ConfigError::Shape {
            at: entry.node.mark.at(file),
            key: path,
            wanted: "a single value".to_owned(),
            found: other.shown(),
        }),
    }
}

fn joined(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

fn refuse_doubled(entries: &[Entry], section: &str, file: &str) -> Result<(), ConfigError> {
    for (idx, entry) in entries.iter().enumerate() {
        if let Some(first) = entries[..idx].iter().find(|first| first.key == entry.key) {
            let key = joined(section, &entry.key);
            return Err(ConfigError::Doubled { at: entry.mark.at(file), key, first_line: first.mark.line });
        }
    }
    Ok(())
}

/// What to write in place of a key that does not exist: the same word spelt right, its right place, a near name here,
/// a near name elsewhere, or else the names there are.
fn cure_for_unknown(entry: &Entry, section: &str) -> String {
    let name = normalised(&entry.key);
    let here = names_in(section);
    if here.contains(&name.as_str()) {
        return format!("keys are written in lower case with underscores: {name}");
    }
    if let Some(key) = KEYS.iter().find(|key| name.contains('.') && key.path == name) {
        return format!("write {} in the section {}:", key.name(), key.section());
    }
    if let Some(key) = KEYS.iter().find(|key| key.name() == name) {
        return match key.section() {
            "" => format!("{name} belongs at the top level"),
            section => format!("{name} belongs under {section}"),
        };
    }
    if sections().contains(&name.as_str()) {
        return format!("{name} is a section of the top level");
    }
    let is_absent = matches!(&entry.node.value, Value::Scalar(scalar) if scalar.is_null());
    if entry.in_braces && is_absent {
        return "inside {...} a comma ends the value: quote a value that holds one, as in \"situ:4,25\"".to_owned();
    }
    if let Some(near) = nearest(&name, here.iter().copied()) {
        return format!("did you mean {near}?");
    }
    if let Some(near) = nearest(&name, KEYS.iter().map(Key::name)) {
        let key = KEYS.iter().find(|key| key.name() == near);
        return format!("did you mean {}?", key.map_or(near, |key| key.path));
    }
    match section {
        "" => format!("the top level takes {}", here.join(", ")),
        section => format!("{section} takes {}", here.join(", ")),
    }
}
