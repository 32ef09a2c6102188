//! How a scalar is read: one table, the same through a file, the environment and the command line.
//!
//! | a key that takes | reads | refuses, each with the cure |
//! |---|---|---|
//! | a whole number | decimal digits: `0`, `8192` | `010`, `0x10`, `0o10`, `1_000`, `4.0`, `"4"`, `-1`, `+1`, what does not fit |
//! | a number | `4`, `1e-5`, `1.0e-5`, `1E-5`, `.5`, `5.` | `"1e-5"`, `.inf`, `.nan`, `1_000.0`, `+1.0`, what overflows |
//! | true or false | `true`, `false` | `True`, `yes`, `no`, `on`, `off`, `"false"`, `0`, `1` |
//! | one of some words | the word, quoted or not | every other spelling |
//! | text | as written, quoted or not: `no`, `on` and `1.10` stay text | nothing at all, `null`, `~` (quote them to mean the words) |
//! | any of these, or null | also `null`, `Null`, `NULL`, `~` and nothing at all: the value is absent | |
//!
//! In the environment and on the command line nothing is quoted, so a quotation mark there is part of the value.
//! Knows nothing of keys, files or origins.

use std::str::FromStr;

use super::choices::Choice;
use crate::near::{nearest, normalised};
use crate::numerics::activation::Activation;

/// A value as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scalar {
    /// The text, quotes and escapes resolved.
    pub text: String,
    /// Whether it was quoted, or a YAML block scalar.
    pub quoted: bool,
}

/// What is wrong with a scalar; the key is the caller's to name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("takes {wanted}, found {found}{cure}")]
pub struct ScalarError {
    wanted: String,
    found: String,
    cure: String,
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn has_leading_zero(text: &str) -> bool {
    text.len() > 1 && text.starts_with('0')
}

/// Whether `text` is `[-]digits[.digits][e[+-]digits]` with at least one digit before the exponent.
fn is_decimal(text: &str) -> bool {
    let unsigned = text.strip_prefix('-').unwrap_or(text);
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent)),
        None => (unsigned, None),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let exponent_is_right =
        exponent.is_none_or(|exponent| is_digits(exponent.strip_prefix(['-', '+']).unwrap_or(exponent)));
    is_digits(&format!("{whole}{fraction}")) && exponent_is_right
}

impl Scalar {
    /// A value of the environment or the command line, where nothing is quoted.
    #[must_use]
    pub fn bare(text: &str) -> Self {
        Self { text: text.to_owned(), quoted: false }
    }

    /// Whether it stands for no value.
    #[must_use]
    pub fn is_null(&self) -> bool {
        !self.quoted && matches!(self.text.as_str(), "" | "~" | "null" | "Null" | "NULL")
    }

    /// The value as it is shown to people.
    #[must_use]
    pub fn shown(&self) -> String {
        match (self.quoted, self.text.as_str()) {
            (true, text) => format!("{text:?}"),
            (false, "") => "nothing".to_owned(),
            (false, text) => text.to_owned(),
        }
    }

    fn refuse(&self, wanted: impl Into<String>, cure: impl Into<String>) -> ScalarError {
        ScalarError { wanted: wanted.into(), found: self.shown(), cure: cure.into() }
    }

    /// No value, or what `read` makes of it.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn or_null<T>(&self, read: impl FnOnce(&Self) -> Result<T, ScalarError>) -> Result<Option<T>, ScalarError> {
        if self.is_null() {
            return Ok(None);
        }
        read(self).map(Some).map_err(|error| ScalarError { wanted: format!("{}, or null", error.wanted), ..error })
    }

    /// Text as written.
    ///
    /// # Errors
    /// If there is no value.
    pub fn text(&self) -> Result<String, ScalarError> {
        if self.is_null() {
            return Err(self.refuse("text", "; leave the key out for its default, or quote the word to mean it"));
        }
        Ok(self.text.clone())
    }

    /// `true` or `false`.
    ///
    /// # Errors
    /// If it is anything else.
    pub fn boolean(&self) -> Result<bool, ScalarError> {
        if !self.quoted
            && let Ok(value) = bool::from_str(&self.text)
        {
            return Ok(value);
        }
        let cure = match self.text.to_lowercase().as_str() {
            "true" | "false" if self.quoted => "; write it without quotes",
            "true" | "yes" | "on" | "y" | "1" => "; write true",
            "false" | "no" | "off" | "n" | "0" => "; write false",
            _ => "",
        };
        Err(self.refuse("true or false", cure))
    }

    /// A whole number in decimal digits, at least `least` and no larger than `T` holds.
    ///
    /// # Errors
    /// If it is anything else.
    pub fn count<T: TryFrom<u64>>(&self, least: u64) -> Result<T, ScalarError> {
        let wanted = format!("a whole number of at least {least}");
        if self.quoted || !is_digits(&self.text) || has_leading_zero(&self.text) {
            return Err(self.refuse(wanted, self.count_cure()));
        }
        let value = u64::from_str(&self.text).ok();
        if value.is_some_and(|value| value < least) {
            return Err(self.refuse(wanted, ""));
        }
        value
            .and_then(|value| T::try_from(value).ok())
            .ok_or_else(|| self.refuse(wanted, format!("; the largest is {}", largest_of::<T>())))
    }

    /// The version of the file's form.
    ///
    /// # Errors
    /// If it is not `version`.
    pub(super) fn version(&self, version: u32) -> Result<(), ScalarError> {
        let wanted = format!("{version}, the form of file that this build reads");
        match self.count::<u32>(1) {
            Ok(found) if found == version => Ok(()),
            Ok(_) => Err(self.refuse(wanted, "")),
            Err(error) => Err(ScalarError { wanted, ..error }),
        }
    }

    /// What to write in place of something that is not plain decimal digits.
    fn count_cure(&self) -> String {
        let text = self.text.as_str();
        let without_underscores = text.replace('_', "");
        let is_radix = ["0x", "0o", "0b"].iter().any(|prefix| text.to_lowercase().starts_with(prefix));
        if is_digits(text) && has_leading_zero(text) {
            let value = match text.trim_start_matches('0') {
                "" => "0",
                value => value,
            };
            format!("; a leading zero means octal to some readers, write {value}")
        } else if is_digits(text) {
            "; write it without quotes".to_owned()
        } else if is_radix {
            "; write it in decimal digits".to_owned()
        } else if is_digits(&without_underscores) {
            format!("; write {without_underscores}")
        } else if text.starts_with('-') && is_decimal(text) {
            "; it cannot be negative".to_owned()
        } else if is_decimal(text) {
            "; write decimal digits only, without a fraction or an exponent".to_owned()
        } else {
            String::new()
        }
    }

    /// A finite number.
    ///
    /// # Errors
    /// If it is anything else.
    pub fn number(&self) -> Result<f64, ScalarError> {
        const WANTED: &str = "a number";
        if !self.quoted && is_decimal(&self.text) {
            return match f64::from_str(&self.text) {
                Ok(value) if value.is_finite() => Ok(value),
                _ => Err(self.refuse(WANTED, "; it is too large for a 64-bit float")),
            };
        }
        let plain = self.text.trim_start_matches(['+', '-']).trim_start_matches('.').to_lowercase();
        let cure = if self.quoted && is_decimal(&self.text) {
            "; write it without quotes"
        } else if matches!(plain.as_str(), "inf" | "infinity" | "nan") {
            "; it must be finite"
        } else if self.text.contains('_') {
            "; write it without underscores"
        } else if self.text.starts_with('+') {
            "; write it without the plus sign"
        } else {
            ""
        };
        Err(self.refuse(WANTED, cure))
    }

    /// A finite number greater than zero.
    ///
    /// # Errors
    /// If it is anything else.
    pub fn rate(&self) -> Result<f64, ScalarError> {
        const WANTED: &str = "a number greater than 0";
        let value = self.number().map_err(|error| ScalarError { wanted: WANTED.to_owned(), ..error })?;
        if value > 0.0 { Ok(value) } else { Err(self.refuse(WANTED, "")) }
    }

    /// One of the words of `C`.
    ///
    /// # Errors
    /// If it is none of them.
    pub fn choice<C: Choice>(&self) -> Result<C, ScalarError> {
        C::from_name(&self.text).ok_or_else(|| {
            let words: Vec<&str> = C::CHOICES.iter().map(|(word, _)| *word).collect();
            let meant = nearest(&normalised(&self.text), words.iter().copied());
            let cure = meant.map(|word| format!("; did you mean {word}?")).unwrap_or_default();
            self.refuse(format!("one of {}", words.join(", ")), cure)
        })
    }

    /// `checkpoint` (absent), `swiglu`, or `situ:BETA[,LINEAR_BETA]`.
    ///
    /// # Errors
    /// If it is anything else, or a constant is not finite and greater than zero as an f32.
    pub fn activation(&self) -> Result<Option<Activation>, ScalarError> {
        const WANTED: &str = "checkpoint, swiglu or situ:BETA[,LINEAR_BETA]";
        let text = self.text.as_str();
        match text {
            "checkpoint" => return Ok(None),
            "swiglu" => return Ok(Some(Activation::Swiglu)),
            _ => {}
        }
        let Some(constants) = text.strip_prefix("situ:") else {
            let cure = match nearest(&normalised(text), ["checkpoint", "swiglu", "situ"]) {
                Some("situ") => "; SiTU needs its constants, as in situ:4,25",
                Some("swiglu") => "; did you mean swiglu?",
                Some(_) => "; did you mean checkpoint?",
                None => "",
            };
            return Err(self.refuse(WANTED, cure));
        };
        let constant = |part: &str| {
            let value = Self::bare(part).rate().map_err(|error| {
                self.refuse(WANTED, format!("; a constant takes {}, found {}{}", error.wanted, error.found, error.cure))
            })?;
            #[expect(
                clippy::cast_possible_truncation,
                reason = "the activation computes in f32; its constructor checks"
            )]
            Ok(value as f32)
        };
        let (beta, linear_beta) = match constants.split_once(',') {
            Some((beta, linear_beta)) => (constant(beta)?, Some(constant(linear_beta)?)),
            None => (constant(constants)?, None),
        };
        Activation::situ(beta, linear_beta).map(Some).map_err(|error| self.refuse(WANTED, format!("; {error}")))
    }
}

/// The largest value of an unsigned integer type, as u64.
fn largest_of<T: TryFrom<u64>>() -> u64 {
    if T::try_from(u64::MAX).is_ok() { u64::MAX } else { u64::from(u32::MAX) }
}
