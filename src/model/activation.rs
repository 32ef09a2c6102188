//! The gated activation that a config asks for.

use super::error::ModelError;
use super::fields::{Fields, missing, positive_f32};
use crate::numerics::activation::Activation;

/// Reads `hidden_act` and its constants.
pub(super) fn activation(fields: &Fields) -> Result<Activation, ModelError> {
    const KEYS: [&str; 2] = ["hidden_act", "hidden_activation"];
    let name = fields.text(&KEYS)?.ok_or_else(|| missing(&KEYS, "the experts' activation"))?;
    let limit = fields.float(&["swiglu_limit"])?;
    match name.value {
        "silu" | "swish" => match limit {
            None => Ok(Activation::Swiglu),
            Some(limit) => Ok(Activation::SwigluClamp { limit: positive_f32(limit)? }),
        },
        "situ" => {
            if let Some(limit) = limit {
                return Err(ModelError::ClampWithSitu { limit: limit.value });
            }
            const BETA: [&str; 1] = ["activation_situ_beta"];
            let beta = fields.float(&BETA)?.ok_or_else(|| missing(&BETA, "SiTU's beta"))?;
            let linear_beta = fields.float(&["activation_situ_linear_beta"])?;
            Ok(Activation::Situ { beta: positive_f32(beta)?, linear_beta: linear_beta.map(positive_f32).transpose()? })
        }
        other => Err(ModelError::Activation { name: other.to_owned(), reason: reason(other) }),
    }
}

fn reason(name: &str) -> &'static str {
    if name.starts_with("gelu") {
        "it is gated by a Gaussian error function"
    } else if name.starts_with("relu") {
        "it is gated by a rectifier"
    } else if name.starts_with("swigluoai") {
        "it needs the gpt-oss constants alpha and offset"
    } else {
        "no formula is known for it"
    }
}
