//! The ways in which a safetensors file can be unreadable, or lie about itself.

use std::path::PathBuf;

use crate::exit::{Classify, Exit};

/// Bytes of the length prefix.
pub(super) const PREFIX_BYTES: u64 = 8;
/// The format's own limit on a header.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// How a safetensors file can be unreadable, or lie.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The file cannot be opened.
    #[error("cannot open {path}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// Reading failed.
    #[error("cannot read the header of {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// It is a directory, a pipe or the like.
    #[error("{path} is not a regular file")]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// Too short for its length prefix.
    #[error(
        "{path} holds {found_bytes} bytes; a safetensors file starts with {PREFIX_BYTES} bytes of header length: download it again"
    )]
    NoPrefix {
        /// The file.
        path: PathBuf,
        /// Its length.
        found_bytes: u64,
    },
    /// The header would end behind the file.
    #[error(
        "{path}: the length prefix asks for a header of {expected_bytes} bytes, and the file holds {found_bytes} behind it; it is \
         cut short or not a safetensors file: download it again"
    )]
    HeaderBeyondFile {
        /// The file.
        path: PathBuf,
        /// Bytes the prefix claims.
        expected_bytes: u64,
        /// Bytes behind the prefix.
        found_bytes: u64,
    },
    /// The header is longer than the format allows.
    #[error("{path}: a header of {found_bytes} bytes is over the format's limit of {MAX_HEADER_BYTES}")]
    HeaderTooLarge {
        /// The file.
        path: PathBuf,
        /// Bytes the prefix claims.
        found_bytes: u64,
    },
    /// The header is not the JSON of a safetensors file.
    #[error("{path}: the header is not valid JSON of the safetensors format")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where it went wrong.
        #[source]
        source: serde_json::Error,
    },
    /// A name occurs twice.
    #[error("{path}: tensor {tensor} occurs twice in the header")]
    Duplicate {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A dtype that the format does not have.
    #[error("{path}: tensor {tensor} has the unknown dtype `{found}`")]
    UnknownDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// As written.
        found: String,
    },
    /// A range that ends before it starts, or numbers past 64 bits.
    #[error("{path}: tensor {tensor} has the impossible range {begin}..{end}")]
    Range {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// As written.
        begin: u64,
        /// As written.
        end: u64,
    },
    /// Shape and dtype do not make the range.
    #[error("{path}: tensor {tensor} is {form}, which takes {expected}, but its range holds {found_bytes} bytes")]
    Size {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Dtype and shape.
        form: String,
        /// Bytes (or bits) the form takes.
        expected: String,
        /// Bytes of the range.
        found_bytes: u64,
    },
    /// Two tensors share bytes.
    #[error("{path}: tensor {tensor} starts at data byte {begin}, inside {other}, which ends at {other_end}")]
    Overlap {
        /// The file.
        path: PathBuf,
        /// The later tensor.
        tensor: String,
        /// Where it starts.
        begin: u64,
        /// The earlier tensor.
        other: String,
        /// Where that one ends.
        other_end: u64,
    },
    /// Bytes that belong to no tensor lie between tensors.
    #[error("{path}: tensor {tensor} starts at data byte {begin}, expected {expected}: {} bytes before it belong to no tensor", begin - expected)]
    Hole {
        /// The file.
        path: PathBuf,
        /// The tensor behind the hole.
        tensor: String,
        /// Where the tensor before it ended.
        expected: u64,
        /// Where it starts.
        begin: u64,
    },
    /// The file ends before its tensors do.
    #[error(
        "{path} is cut short: its header describes {expected_bytes} bytes, the file holds {found_bytes}; tensor {tensor} is the \
         first that is not whole: download it again"
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The first tensor that is not whole.
        tensor: String,
        /// Bytes the file should hold.
        expected_bytes: u64,
        /// Bytes it holds.
        found_bytes: u64,
    },
    /// Bytes follow the last tensor.
    #[error(
        "{path}: its header describes {expected_bytes} bytes, the file holds {found_bytes}: what follows the last tensor belongs to none"
    )]
    Trailing {
        /// The file.
        path: PathBuf,
        /// Bytes the file should hold.
        expected_bytes: u64,
        /// Bytes it holds.
        found_bytes: u64,
    },
}

impl Classify for HeaderError {
    fn exit(&self) -> Exit {
        Exit::BadInput
    }
}
