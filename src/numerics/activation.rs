//! The gated activations of the expert MLPs: their constants, their text form, and the oracle every kernel is judged by.
//!
//! Knows nothing of where constants come from (config files, command lines), nor of how backends compute fast.

#[cfg(test)]
mod tests;
mod text;

use crate::exit::{Classify, Exit};

/// A validated activation: its constants are finite and greater than zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `g * sigmoid(g) * u`
    Swiglu,
    /// SwiGLU of `min(g, limit)` and `clamp(u, -limit, limit)`.
    SwigluClamp {
        /// Finite, > 0.
        limit: f32,
    },
    /// `beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)`; without `linear_beta` the last factor is `u`.
    Situ {
        /// Finite, > 0.
        beta: f32,
        /// Finite, > 0.
        linear_beta: Option<f32>,
    },
}

/// The family of an activation, before its constants are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActivationKind {
    /// SwiGLU, clamped or not (`silu` in a model's config).
    Swiglu,
    /// SiTU.
    Situ,
}

/// Why an activation is refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ActivationError {
    /// A constant is NaN, infinite, zero or negative.
    #[error("the activation's constant {name} is {value}; it must be finite and greater than 0")]
    Constant {
        /// beta, linear_beta or limit
        name: &'static str,
        /// The value found.
        value: f32,
    },
    /// SiTU bounds both branches itself; no model clamps it too.
    #[error(
        "a SwiGLU clamp of {limit} together with SiTU is refused: remove the clamp, or choose swiglu_clamp:{limit}"
    )]
    ClampWithSitu {
        /// The clamp found.
        limit: f32,
    },
    /// SiTU without its constant.
    #[error("SiTU needs a constant beta (linear_beta is optional): give situ:BETA or situ:BETA,LINEAR_BETA")]
    MissingBeta,
    /// A constant that the activation would not use.
    #[error("SwiGLU has no constant {name}, found {value}: remove it, or choose situ")]
    ConstantWithSwiglu {
        /// beta or linear_beta
        name: &'static str,
        /// The value found.
        value: f32,
    },
    /// A text that is no activation.
    #[error(
        "`{text}` is no activation; valid are swiglu, swiglu_clamp:LIMIT, situ:BETA and situ:BETA,LINEAR_BETA, with \
         constants finite and greater than 0"
    )]
    Text {
        /// The text found.
        text: String,
        /// What is wrong with a constant in it, where the form is right.
        #[source]
        source: Option<ConstantError>,
    },
}

/// What is wrong with a constant in a text.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConstantError {
    /// No number.
    #[error("{name} is `{text}`, which is no number")]
    Number {
        /// beta, linear_beta or limit
        name: &'static str,
        /// The part of the text.
        text: String,
    },
    /// A number that is refused.
    #[error("{name} is {value}")]
    Range {
        /// beta, linear_beta or limit
        name: &'static str,
        /// The value found.
        value: f32,
    },
}

impl Classify for ActivationError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

/// Whether a constant may be used: finite and greater than zero. A plain `<= 0` would let NaN and infinity pass.
fn is_valid(value: f32) -> bool {
    value.is_finite() && value > 0.0
}

fn check(name: &'static str, value: f32) -> Result<f32, ActivationError> {
    if is_valid(value) { Ok(value) } else { Err(ActivationError::Constant { name, value }) }
}

impl Activation {
    /// SiTU with its constants; without `linear_beta` the up branch is linear.
    ///
    /// # Errors
    /// If a constant is not finite or not greater than zero.
    pub fn situ(beta: f32, linear_beta: Option<f32>) -> Result<Self, ActivationError> {
        let beta = check("beta", beta)?;
        let linear_beta = linear_beta.map(|value| check("linear_beta", value)).transpose()?;
        Ok(Self::Situ { beta, linear_beta })
    }

    /// SwiGLU with clamped branches.
    ///
    /// # Errors
    /// If `limit` is not finite or not greater than zero.
    pub fn swiglu_clamp(limit: f32) -> Result<Self, ActivationError> {
        Ok(Self::SwigluClamp { limit: check("limit", limit)? })
    }

    /// The activation that a config's separate keys describe.
    ///
    /// # Errors
    /// If a constant is not finite or not greater than zero, if SiTU lacks `beta` or comes with a clamp, or if SwiGLU comes
    /// with a constant of SiTU.
    pub fn from_parts(
        kind: ActivationKind,
        beta: Option<f32>,
        linear_beta: Option<f32>,
        clamp: Option<f32>,
    ) -> Result<Self, ActivationError> {
        match kind {
            ActivationKind::Situ => {
                if let Some(limit) = clamp {
                    return Err(ActivationError::ClampWithSitu { limit });
                }
                Self::situ(beta.ok_or(ActivationError::MissingBeta)?, linear_beta)
            }
            ActivationKind::Swiglu => {
                for (name, value) in [("beta", beta), ("linear_beta", linear_beta)] {
                    if let Some(value) = value {
                        return Err(ActivationError::ConstantWithSwiglu { name, value });
                    }
                }
                clamp.map_or(Ok(Self::Swiglu), Self::swiglu_clamp)
            }
        }
    }

    /// The family it belongs to.
    #[must_use]
    pub const fn kind(self) -> ActivationKind {
        match self {
            Self::Swiglu | Self::SwigluClamp { .. } => ActivationKind::Swiglu,
            Self::Situ { .. } => ActivationKind::Situ,
        }
    }

    /// The activation of one gate and up value, computed in f64 and rounded once: the oracle.
    ///
    /// NaN in either gives NaN. An infinity gives what the formula in f64 gives: a limit, or NaN where there is none.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the one rounding")]
    pub fn apply(self, g: f32, u: f32) -> f32 {
        (self.gate(f64::from(g)) * self.up(f64::from(u))) as f32
    }

    /// The factor that the gate value decides.
    pub(crate) fn gate(self, g: f64) -> f64 {
        match self {
            Self::Swiglu => g * sigmoid(g),
            Self::SwigluClamp { limit } => {
                let limit = f64::from(limit);
                // Not `min`, which would replace a NaN by the limit.
                let g = if g > limit { limit } else { g };
                g * sigmoid(g)
            }
            Self::Situ { beta, .. } => soft_limit(g, f64::from(beta)) * sigmoid(g),
        }
    }

    /// The factor that the up value decides.
    pub(crate) fn up(self, u: f64) -> f64 {
        match self {
            Self::Swiglu | Self::Situ { linear_beta: None, .. } => u,
            Self::SwigluClamp { limit } => u.clamp(-f64::from(limit), f64::from(limit)),
            Self::Situ { linear_beta: Some(linear_beta), .. } => soft_limit(u, f64::from(linear_beta)),
        }
    }
}

/// `1 / (1 + exp(-x))`, without overflow to NaN at either end.
pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

/// `limit * tanh(x / limit)`
fn soft_limit(x: f64, limit: f64) -> f64 {
    limit * libm::tanh(x / limit)
}
