//! An activation as text: `swiglu`, `swiglu_clamp:LIMIT`, `situ:BETA`, `situ:BETA,LINEAR_BETA`.

use std::fmt;
use std::str::FromStr;

use super::{Activation, ActivationError, ConstantError, is_valid};

impl Activation {
    /// Reads the text form, in which [`Display`](fmt::Display) writes it; no spaces, lower case.
    ///
    /// # Errors
    /// If the text has another form, or a constant that is no number, not finite or not greater than zero.
    pub fn parse(text: &str) -> Result<Self, ActivationError> {
        let refused = |source| ActivationError::Text { text: text.to_owned(), source };
        let constant = |name, part| constant(name, part).map_err(|e| refused(Some(e)));
        let (name, constants) = match text.split_once(':') {
            Some((name, constants)) => (name, Some(constants)),
            None => (text, None),
        };
        match (name, constants) {
            ("swiglu", None) => Ok(Self::Swiglu),
            ("swiglu_clamp", Some(limit)) => Ok(Self::SwigluClamp { limit: constant("limit", limit)? }),
            ("situ", Some(constants)) => {
                let (beta, linear_beta) = match constants.split_once(',') {
                    Some((beta, linear_beta)) => (beta, Some(linear_beta)),
                    None => (constants, None),
                };
                Ok(Self::Situ {
                    beta: constant("beta", beta)?,
                    linear_beta: linear_beta.map(|part| constant("linear_beta", part)).transpose()?,
                })
            }
            _ => Err(refused(None)),
        }
    }
}

fn constant(name: &'static str, text: &str) -> Result<f32, ConstantError> {
    let value: f32 = text.parse().map_err(|_| ConstantError::Number { name, text: text.to_owned() })?;
    if is_valid(value) { Ok(value) } else { Err(ConstantError::Range { name, value }) }
}

impl FromStr for Activation {
    type Err = ActivationError;

    fn from_str(text: &str) -> Result<Self, ActivationError> {
        Self::parse(text)
    }
}

impl fmt::Display for Activation {
    /// The form that [`Activation::parse`] reads; constants are written so that they come back bit for bit.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Swiglu => f.write_str("swiglu"),
            Self::SwigluClamp { limit } => write!(f, "swiglu_clamp:{limit}"),
            Self::Situ { beta, linear_beta: None } => write!(f, "situ:{beta}"),
            Self::Situ { beta, linear_beta: Some(linear_beta) } => write!(f, "situ:{beta},{linear_beta}"),
        }
    }
}
