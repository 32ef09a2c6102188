//! Why a model's config files are refused, and what is merely worth saying about them.

use std::fmt;

use crate::exit::{Classify, Exit};

/// Why a model description cannot be made, or is one that Lockstep does not run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The routing method's numbers contradict each other.
    #[error("config.json: the router's numbers contradict each other; restore the model's own config.json")]
    Router {
        /// Which.
        #[from]
        source: crate::routing::RoutingError,
    },
    /// A config file is not JSON.
    #[error("{file} is not valid JSON (NaN and Infinity are not JSON either)")]
    Json {
        /// The file's name.
        file: &'static str,
        /// Where it went wrong.
        #[source]
        source: serde_json::Error,
    },
    /// A key is absent.
    #[error("config.json has none of the keys {keys}: {what} is unknown; restore the model's own config.json")]
    MissingKey {
        /// The spellings that were looked for.
        keys: String,
        /// What the key would have said.
        what: &'static str,
    },
    /// A key holds a value of another type.
    #[error("{file}: `{key}` is {found}; {wanted} is needed")]
    WrongType {
        /// The file's name.
        file: &'static str,
        /// The key.
        key: String,
        /// What would do.
        wanted: &'static str,
        /// The value found.
        found: String,
    },
    /// A key's value is outside what a model can have.
    #[error("config.json: `{key}` is {found}; it must be {wanted}")]
    OutOfRange {
        /// The key.
        key: String,
        /// What would do.
        wanted: String,
        /// The value found.
        found: String,
    },
    /// Two spellings of one quantity disagree.
    #[error(
        "config.json: `{key}` is {value} but `{other_key}` is {other_value}; they name one quantity: delete the wrong one"
    )]
    Conflict {
        /// One spelling.
        key: String,
        /// Its value.
        value: String,
        /// The other spelling.
        other_key: String,
        /// Its value.
        other_value: String,
    },
    /// More slots than experts, or none.
    #[error(
        "config.json: `{key}` (top-k) is {num_topk}, the model has {num_experts} experts; k must lie in 1..={num_experts}"
    )]
    TopK {
        /// The key that gave k.
        key: String,
        /// k as written.
        num_topk: i64,
        /// E.
        num_experts: usize,
    },
    /// The activation is not one that Lockstep runs.
    #[error(
        "config.json: hidden_act `{name}` is not run by Lockstep ({reason}); it runs `silu`, with or without swiglu_limit, and `situ`"
    )]
    Activation {
        /// As written.
        name: String,
        /// What it would take.
        reason: &'static str,
    },
    /// A clamp and SiTU are both asked for.
    #[error(
        "config.json: swiglu_limit {limit} together with hidden_act `situ`: SiTU bounds both branches itself; delete one of them"
    )]
    ClampWithSitu {
        /// The clamp's limit.
        limit: f64,
    },
    /// The model needs something that is out of scope.
    #[error("{what}: {reason}")]
    Unsupported {
        /// What was found, with its key or file.
        what: String,
        /// Why it is refused, and the cure where there is one.
        reason: &'static str,
    },
    /// Scores and keys add up to no routing method.
    #[error("config.json: no routing method for {facts}: {reason}")]
    Routing {
        /// The facts found.
        facts: String,
        /// Why they are refused.
        reason: String,
    },
    /// The weights' algorithm is not one that Lockstep runs.
    #[error(
        "{file}: quantisation `{algorithm}` is not run by Lockstep: {reason}; export the experts as NVFP4 with ModelOpt, or keep them in bf16"
    )]
    Algorithm {
        /// The file's name.
        file: &'static str,
        /// As written.
        algorithm: String,
        /// Why it is refused.
        reason: &'static str,
    },
    /// Blocks of another size.
    #[error("{file}: group_size is {found}; NVFP4 has one scale a block of 16: export again with group size 16")]
    GroupSize {
        /// The file's name.
        file: &'static str,
        /// As written.
        found: u64,
    },
    /// `hf_quant_config.json` and `config.json` contradict each other.
    #[error(
        "hf_quant_config.json says {key} {hf}, config.json's quantization_config says {config}; delete or correct the wrong one"
    )]
    QuantFilesDisagree {
        /// What they disagree about.
        key: String,
        /// The first file's value.
        hf: String,
        /// The second file's value.
        config: String,
    },
}

impl Classify for ModelError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}

/// Something about the config files that a person should know, though it stops nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelWarning {
    /// The two files list different exclusions.
    ExclusionsDiffer {
        /// Patterns of `hf_quant_config.json` alone.
        hf_only: Vec<String>,
        /// Patterns of `config.json` alone.
        config_only: Vec<String>,
    },
    /// A pattern is a regular expression.
    RegexPattern {
        /// As written.
        pattern: String,
    },
}

impl fmt::Display for ModelWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ExclusionsDiffer { hf_only, config_only } => {
                f.write_str("hf_quant_config.json and config.json exclude different modules (")?;
                write_side(f, "only the first", hf_only)?;
                f.write_str("; ")?;
                write_side(f, "only the second", config_only)?;
                f.write_str("); the first is followed, and each module's own tensors say how it is stored")
            }
            Self::RegexPattern { pattern } => write!(
                f,
                "exclusion pattern `{pattern}` is a regular expression and is not evaluated; each module's own tensors say how it is stored"
            ),
        }
    }
}

/// Patterns listed on one side; long lists are cut.
const NUM_LISTED: usize = 5;

fn write_side(f: &mut fmt::Formatter<'_>, side: &str, patterns: &[String]) -> fmt::Result {
    write!(f, "{side}: ")?;
    if patterns.is_empty() {
        return f.write_str("none");
    }
    for (position, pattern) in patterns.iter().take(NUM_LISTED).enumerate() {
        write!(f, "{}`{pattern}`", if position == 0 { "" } else { ", " })?;
    }
    if patterns.len() > NUM_LISTED {
        write!(f, " and {} more", patterns.len() - NUM_LISTED)?;
    }
    Ok(())
}
