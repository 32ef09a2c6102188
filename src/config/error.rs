//! Why a deployment is refused.

use std::fmt;

use super::layers::Origin;
use super::scalar::ScalarError;
use crate::exit::{Classify, Exit};

/// Where something stands in a deployment file; lines and columns count from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file as the person named it.
    pub file: String,
    /// The line.
    pub line: usize,
    /// The column, in characters.
    pub column: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// Why a deployment is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the deployment file {file}")]
    Read {
        /// The file.
        file: String,
        /// What the system says.
        #[source]
        source: std::io::Error,
    },
    /// The path is a directory.
    #[error("the deployment {file} is a directory; name the YAML file inside it")]
    Directory {
        /// The path.
        file: String,
    },
    /// The file is larger than any deployment.
    #[error("the deployment file {file} has {num_bytes} bytes; a deployment has at most {limit_bytes}")]
    TooLarge {
        /// The file.
        file: String,
        /// Its size.
        num_bytes: usize,
        /// The largest that is read.
        limit_bytes: usize,
    },
    /// The file is not text.
    #[error("{at}: not UTF-8 (byte 0x{byte:02x} at offset {offset}); save the file as UTF-8")]
    NotUtf8 {
        /// Where the first bad byte stands.
        at: Place,
        /// The byte.
        byte: u8,
        /// Bytes before it.
        offset: usize,
    },
    /// The file is not YAML.
    #[error("{at}: {problem}{cure}")]
    Syntax {
        /// Where reading stopped.
        at: Place,
        /// What the parser says.
        problem: String,
        /// What to do, with its own punctuation; empty where nothing is known.
        cure: &'static str,
    },
    /// The file holds no keys.
    #[error("the deployment file {file} holds no keys (it is empty or all comments); write at least `version: 1`")]
    Empty {
        /// The file.
        file: String,
    },
    /// A mapping stands where a value belongs, or the other way round.
    #[error("{at}: {key} takes {wanted}, found {found}")]
    Shape {
        /// Where the value stands.
        at: Place,
        /// The key's path, or what the top level is called.
        key: String,
        /// What belongs there.
        wanted: String,
        /// What stands there.
        found: String,
    },
    /// No key has this name here.
    #[error("{at}: unknown key {key}; {cure}")]
    UnknownKey {
        /// Where the key stands.
        at: Place,
        /// Its path as written.
        key: String,
        /// The nearest valid name, or the valid names.
        cure: String,
    },
    /// A key is given twice.
    #[error("{at}: {key} is given twice, first on line {first_line}; keep one")]
    Doubled {
        /// Where it stands again.
        at: Place,
        /// The key's path.
        key: String,
        /// Where it stood first.
        first_line: usize,
    },
    /// A value is not one that its key takes.
    #[error("{origin}: {key} {problem}")]
    Value {
        /// Where the value comes from.
        origin: Origin,
        /// The key's path.
        key: &'static str,
        /// What is wrong with it.
        problem: Box<ScalarError>,
    },
    /// Two values that cannot hold together.
    #[error("{first} and {second} cannot both hold: {reason}")]
    Conflict {
        /// One key with its value and origin.
        first: String,
        /// The other.
        second: String,
        /// Why not, and what to change.
        reason: &'static str,
    },
}

impl ConfigError {
    /// What became of reading `file`.
    #[must_use]
    pub fn of_read(file: &str, source: std::io::Error) -> Self {
        let file = file.to_owned();
        if source.kind() == std::io::ErrorKind::IsADirectory {
            return Self::Directory { file };
        }
        Self::Read { file, source }
    }
}

impl Classify for ConfigError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}
