//! Reading `config.json`: typed look-ups over the spellings that model families use for one quantity.
//!
//! Keys of a nested `text_config` come before those beside it; a null counts as absent.

use serde_json::{Map, Value};

use super::error::ModelError;

/// The name that messages call the file by.
pub(super) const CONFIG: &str = "config.json";

/// A parsed `config.json`.
pub(super) struct Fields {
    top: Map<String, Value>,
    text: Option<Map<String, Value>>,
}

/// A value and the spelling it was found under.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found<T> {
    pub(super) key: &'static str,
    pub(super) value: T,
}

impl Fields {
    pub(super) fn parse(text: &str) -> Result<Self, ModelError> {
        let mut top = parse_object(CONFIG, text)?;
        let text = match top.remove("text_config") {
            None | Some(Value::Null) => None,
            Some(Value::Object(map)) => Some(map),
            Some(other) => return Err(wrong_type(CONFIG, "text_config", "an object", &other)),
        };
        Ok(Self { top, text })
    }

    /// The value of one spelling.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let nested = self.text.as_ref().and_then(|text| text.get(key)).filter(|value| !value.is_null());
        nested.or_else(|| self.top.get(key).filter(|value| !value.is_null()))
    }

    /// `model_type` outside and inside `text_config`, the outer first.
    pub(super) fn model_types(&self) -> Vec<&str> {
        let outer = self.top.get("model_type").and_then(Value::as_str);
        let inner = self.text.as_ref().and_then(|text| text.get("model_type")).and_then(Value::as_str);
        outer.into_iter().chain(inner).collect()
    }

    pub(super) fn integer(&self, keys: &[&'static str]) -> Result<Option<Found<i64>>, ModelError> {
        self.find(keys, "an integer", Value::as_i64)
    }

    pub(super) fn float(&self, keys: &[&'static str]) -> Result<Option<Found<f64>>, ModelError> {
        self.find(keys, "a number", Value::as_f64)
    }

    pub(super) fn flag(&self, keys: &[&'static str]) -> Result<Option<Found<bool>>, ModelError> {
        self.find(keys, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, keys: &[&'static str]) -> Result<Option<Found<&str>>, ModelError> {
        self.find(keys, "a string", Value::as_str)
    }

    /// An integer in `1..=limit`; the limit keeps a lying config from sizing an allocation.
    pub(super) fn size(&self, keys: &[&'static str], limit: usize) -> Result<Option<Found<usize>>, ModelError> {
        self.integer(keys)?.map(|found| in_range(found, 1, limit)).transpose()
    }

    /// As [`Fields::size`], and 0 is fine.
    pub(super) fn count(&self, keys: &[&'static str], limit: usize) -> Result<Option<Found<usize>>, ModelError> {
        self.integer(keys)?.map(|found| in_range(found, 0, limit)).transpose()
    }

    /// All spellings that are present must agree.
    fn find<'a, T: PartialEq>(
        &'a self,
        keys: &[&'static str],
        wanted: &'static str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Found<T>>, ModelError> {
        let mut first: Option<(Found<T>, &Value)> = None;
        for &key in keys {
            let Some(raw) = self.get(key) else { continue };
            let value = convert(raw).ok_or_else(|| wrong_type(CONFIG, key, wanted, raw))?;
            match &first {
                None => first = Some((Found { key, value }, raw)),
                Some((found, _)) if found.value == value => {}
                Some((found, found_raw)) => {
                    return Err(ModelError::Conflict {
                        key: found.key.to_owned(),
                        value: found_raw.to_string(),
                        other_key: key.to_owned(),
                        other_value: raw.to_string(),
                    });
                }
            }
        }
        Ok(first.map(|(found, _)| found))
    }
}

/// The error of a quantity that no spelling gives.
pub(super) fn missing(keys: &[&str], what: &'static str) -> ModelError {
    let quoted: Vec<_> = keys.iter().map(|key| format!("`{key}`")).collect();
    ModelError::MissingKey { keys: quoted.join(", "), what }
}

pub(super) fn wrong_type(file: &'static str, key: &str, wanted: &'static str, found: &Value) -> ModelError {
    let text = found.to_string();
    let shown = if text.chars().count() > 60 { text.chars().take(57).chain("...".chars()).collect() } else { text };
    ModelError::WrongType { file, key: key.to_owned(), wanted, found: shown }
}

pub(super) fn parse_object(file: &'static str, text: &str) -> Result<Map<String, Value>, ModelError> {
    match serde_json::from_str(text).map_err(|source| ModelError::Json { file, source })? {
        Value::Object(map) => Ok(map),
        other => Err(wrong_type(file, "(the whole file)", "an object", &other)),
    }
}

fn in_range(found: Found<i64>, least: usize, most: usize) -> Result<Found<usize>, ModelError> {
    match usize::try_from(found.value) {
        Ok(value) if (least..=most).contains(&value) => Ok(Found { key: found.key, value }),
        _ => Err(ModelError::OutOfRange {
            key: found.key.to_owned(),
            wanted: format!("an integer in {least}..={most}"),
            found: found.value.to_string(),
        }),
    }
}

/// A constant that is finite and above zero as f32, the form it is used in.
#[expect(
    clippy::cast_possible_truncation,
    reason = "rounding to f32 is meant; overflow and underflow are refused below"
)]
pub(super) fn positive_f32(found: Found<f64>) -> Result<f32, ModelError> {
    let value = found.value as f32;
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    Err(ModelError::OutOfRange {
        key: found.key.to_owned(),
        wanted: "finite and greater than zero in f32".to_owned(),
        found: found.value.to_string(),
    })
}
