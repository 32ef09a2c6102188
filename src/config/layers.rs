//! Command line over environment over file over defaults, with the origin of every value kept.

use std::fmt;

use super::error::ConfigError;
use super::keys::{KEYS, Key};
use super::scalar::Scalar;
use super::{Activations, Deployment, Payload, walk};
use crate::near::nearest;

/// Variables that Lockstep reads and that are no key of a deployment.
const OTHER_VARIABLES: [&str; 7] = [
    "LOCKSTEP_CUBLASLT",
    "LOCKSTEP_LOG",
    "LOCKSTEP_THREADS",
    "LOCKSTEP_FAULT",
    "LOCKSTEP_LAUNCHER",
    "LOCKSTEP_NCCL",
    "LOCKSTEP_NVRTC",
];

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Nobody gave it.
    Default,
    /// A deployment file.
    File {
        /// The file as the person named it.
        path: String,
        /// The line, from 1.
        line: usize,
    },
    /// An environment variable of this name.
    Env(String),
    /// An option of this name.
    CommandLine(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{path}:{line}"),
            Self::Env(variable) => f.write_str(variable),
            Self::CommandLine(option) => f.write_str(option),
        }
    }
}

/// A key that the command line sets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Override {
    /// The key's path.
    pub key: &'static str,
    /// The option as a person writes it, as in `--backend`.
    pub option: &'static str,
    /// Its value, as given.
    pub text: String,
}

/// Everything a deployment is made of, as plain data.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sources<'a> {
    /// The deployment file's name and bytes; absent: defaults.
    pub file: Option<(&'a str, &'a [u8])>,
    /// Every environment variable whose name starts with `LOCKSTEP_`.
    pub variables: &'a [(String, String)],
    /// What the command line sets.
    pub command_line: &'a [Override],
}

/// A deployment with the origin of each value.
#[derive(Debug, Clone, PartialEq)]
pub struct Effective {
    /// The values.
    pub deployment: Deployment,
    /// What should be said once: variables that nothing reads.
    pub warnings: Vec<String>,
    /// By position in [`KEYS`].
    origins: Vec<Origin>,
}

impl Default for Effective {
    fn default() -> Self {
        let origins = vec![Origin::Default; KEYS.len()];
        Self { deployment: Deployment::default(), warnings: Vec::new(), origins }
    }
}

impl Effective {
    /// Applies file, environment and command line to the defaults, each over the one before.
    ///
    /// # Errors
    /// If the file is not strict YAML of the known keys, a value is not one its key takes, or two values contradict
    /// each other. A value that another layer replaces is checked as well.
    pub fn resolve(sources: &Sources<'_>) -> Result<Self, ConfigError> {
        let mut effective = Self::default();
        if let Some((file, bytes)) = sources.file {
            for setting in walk::read(bytes, file)? {
                let origin = Origin::File { path: setting.at.file, line: setting.at.line };
                effective.set(setting.key_idx, &setting.scalar, origin)?;
            }
        }
        for (variable, value) in sources.variables {
            match KEYS.iter().position(|key| key.variable().as_ref() == Some(variable)) {
                Some(key_idx) => effective.set(key_idx, &Scalar::bare(value), Origin::Env(variable.clone()))?,
                None if OTHER_VARIABLES.contains(&variable.as_str()) => {}
                None => effective.warnings.push(unknown_variable(variable)),
            }
        }
        for given in sources.command_line {
            let key_idx = KEYS.iter().position(|key| key.path == given.key);
            debug_assert!(key_idx.is_some(), "{} sets {}, which is no key", given.option, given.key);
            if let Some(key_idx) = key_idx {
                effective.set(key_idx, &Scalar::bare(&given.text), Origin::CommandLine(given.option))?;
            }
        }
        effective.refuse_conflicts()?;
        Ok(effective)
    }

    fn set(&mut self, key_idx: usize, scalar: &Scalar, origin: Origin) -> Result<(), ConfigError> {
        let key = &KEYS[key_idx];
        (key.set)(&mut self.deployment, scalar).map_err(|problem| ConfigError::Value {
            origin: origin.clone(),
            key: key.path,
            problem: Box::new(problem),
        })?;
        self.origins[key_idx] = origin;
        Ok(())
    }

    /// Where a key's value comes from; no such key reads as [`Origin::Default`].
    #[must_use]
    pub fn origin(&self, path: &str) -> &Origin {
        KEYS.iter().position(|key| key.path == path).map_or(&Origin::Default, |idx| &self.origins[idx])
    }

    /// Every key with its value as YAML text and where it comes from, in the order of the file.
    pub fn entries(&self) -> impl Iterator<Item = (&'static Key, String, &Origin)> {
        KEYS.iter().zip(&self.origins).map(|(key, origin)| (key, (key.show)(&self.deployment), origin))
    }

    fn refuse_conflicts(&self) -> Result<(), ConfigError> {
        let dispatch = &self.deployment.dispatch;
        if dispatch.chunk_tokens.is_some_and(|chunk| chunk > dispatch.num_max_tokens_per_rank) {
            return Err(self.conflict(
                "dispatch.chunk_tokens",
                "dispatch.num_max_tokens_per_rank",
                "buffers are planned for num_max_tokens_per_rank tokens; lower the one or raise the other",
            ));
        }
        if dispatch.payload == Payload::Nvfp4 && self.deployment.moe.activations == Activations::Bf16 {
            return Err(self.conflict(
                "dispatch.payload",
                "moe.activations",
                "only quantised activations travel as NVFP4; use another payload, or activations: quantised",
            ));
        }
        Ok(())
    }

    fn conflict(&self, first: &str, second: &str, reason: &'static str) -> ConfigError {
        let shown = |path: &str| {
            let value = Key::of_path(path).map(|key| (key.show)(&self.deployment)).unwrap_or_default();
            format!("{path}: {value} ({})", self.origin(path))
        };
        ConfigError::Conflict { first: shown(first), second: shown(second), reason }
    }
}

fn unknown_variable(variable: &str) -> String {
    let known: Vec<String> = KEYS.iter().filter_map(Key::variable).chain(OTHER_VARIABLES.map(str::to_owned)).collect();
    // The prefix is the same in all: near means near in what follows it.
    let suffix = |name: &str| name.trim_start_matches("LOCKSTEP_").to_owned();
    let suffixes: Vec<String> = known.iter().map(|name| suffix(name)).collect();
    let near = nearest(&suffix(&variable.to_uppercase()), suffixes.iter().map(String::as_str));
    match near {
        Some(near) => format!("{variable} is set but nothing reads it; did you mean LOCKSTEP_{near}?"),
        None => format!("{variable} is set but nothing reads it; unset it or correct its name"),
    }
}

/// YAML that reads back as the same deployment, with each value's origin beside it.
impl fmt::Display for Effective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut section = "";
        for (key, value, origin) in self.entries() {
            if key.section() != section {
                section = key.section();
                writeln!(f, "{section}:")?;
            }
            let indent = if section.is_empty() { "" } else { "  " };
            let line = format!("{indent}{}: {value}", key.name());
            writeln!(f, "{line:<40}  # {origin}")?;
        }
        Ok(())
    }
}
