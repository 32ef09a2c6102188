//! Safetensors headers, read with plain reads and checked before any byte is mapped.
//!
//! A file holds an 8-byte little-endian header length, a JSON header, and the tensors' bytes, which must tile the rest of the
//! file without overlap, hole or remainder. Every length comes from an untrusted file: none sizes an allocation before it was
//! compared with the file's own length. Knows nothing of models.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::header_error::{HeaderError, MAX_HEADER_BYTES, PREFIX_BYTES};
use super::map::Windows;

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorEntry {
    pub(crate) name: Box<str>,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Box<[usize]>,
    /// Where its bytes start in the file, the header counted.
    pub(crate) begin: u64,
    /// Where they end.
    pub(crate) end: u64,
    /// The file, as a position in the checkpoint's list.
    pub(crate) shard: u32,
}

impl TensorEntry {
    /// Bytes the tensor occupies.
    pub(crate) const fn num_bytes(&self) -> u64 {
        self.end - self.begin
    }

    /// Dtype and shape as messages show them.
    pub(crate) fn form(&self) -> String {
        format!("{} {:?}", self.dtype, self.shape)
    }
}

/// A file whose header was read and checked.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) path: PathBuf,
    /// Kept open, so that a file renamed over it later is not read with this header.
    pub(crate) file: File,
    pub(crate) num_bytes: u64,
    /// What is mapped of it.
    pub(crate) windows: Windows,
}

/// Opens a file, reads its header and checks it against the file's length.
pub(crate) fn open(path: &Path, shard: u32) -> Result<(Shard, Vec<TensorEntry>), HeaderError> {
    let owned = || path.to_owned();
    // Asked of the path first: opening a pipe would wait for a writer.
    let metadata = std::fs::metadata(path).map_err(|source| HeaderError::Open { path: owned(), source })?;
    if !metadata.is_file() {
        return Err(HeaderError::NotAFile { path: owned() });
    }
    let mut file = File::open(path).map_err(|source| HeaderError::Open { path: owned(), source })?;
    let num_bytes = file.metadata().map_err(|source| HeaderError::Open { path: owned(), source })?.len();
    let json = read_json(path, &mut file, num_bytes)?;
    let entries = parse(path, &json, num_bytes, shard)?;
    let windows = Windows::new(&entries);
    Ok((Shard { path: owned(), file, num_bytes, windows }, entries))
}

fn read_json(path: &Path, file: &mut File, file_bytes: u64) -> Result<Vec<u8>, HeaderError> {
    let path = || path.to_owned();
    let Some(behind_prefix) = file_bytes.checked_sub(PREFIX_BYTES) else {
        return Err(HeaderError::NoPrefix { path: path(), found_bytes: file_bytes });
    };
    let mut prefix = [0; size_of::<u64>()];
    file.read_exact(&mut prefix).map_err(|source| HeaderError::Read { path: path(), source })?;
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > behind_prefix {
        return Err(HeaderError::HeaderBeyondFile {
            path: path(),
            expected_bytes: header_bytes,
            found_bytes: behind_prefix,
        });
    }
    let length = usize::try_from(header_bytes).ok().filter(|_| header_bytes <= MAX_HEADER_BYTES);
    let Some(length) = length else {
        return Err(HeaderError::HeaderTooLarge { path: path(), found_bytes: header_bytes });
    };
    let mut json = vec![0; length];
    file.read_exact(&mut json).map_err(|source| HeaderError::Read { path: path(), source })?;
    Ok(json)
}

/// Parses a header and checks that its tensors tile the rest of a file of `file_bytes` bytes. Tensors come in file order.
pub(crate) fn parse(path: &Path, json: &[u8], file_bytes: u64, shard: u32) -> Result<Vec<TensorEntry>, HeaderError> {
    let RawHeader(raw) =
        serde_json::from_slice(json).map_err(|source| HeaderError::Json { path: path.to_owned(), source })?;
    let data_begin = PREFIX_BYTES + json.len() as u64;
    let mut entries = Vec::with_capacity(raw.len());
    for (name, tensor) in raw {
        entries.push(check_one(path, name, tensor, shard)?);
    }
    refuse_duplicates(path, &entries)?;
    entries.sort_by_key(|entry| (entry.begin, entry.end));
    check_tiling(path, &entries, data_begin, file_bytes)?;
    for entry in &mut entries {
        entry.begin += data_begin;
        entry.end += data_begin;
    }
    Ok(entries)
}

/// Checks range, dtype and shape of one tensor against each other. The ranges stay relative to the data's start.
fn check_one(path: &Path, name: Cow<'_, str>, raw: RawTensor<'_>, shard: u32) -> Result<TensorEntry, HeaderError> {
    let RawTensor { dtype, shape, data_offsets: [begin, end] } = raw;
    let path = || path.to_owned();
    let Ok(dtype) = Dtype::deserialize(serde::de::value::StrDeserializer::<serde::de::value::Error>::new(&dtype))
    else {
        return Err(HeaderError::UnknownDtype { path: path(), tensor: name.into_owned(), found: dtype.into_owned() });
    };
    let Some(num_bytes) = end.checked_sub(begin) else {
        return Err(HeaderError::Range { path: path(), tensor: name.into_owned(), begin, end });
    };
    let num_bits = shape
        .iter()
        .try_fold(1_u64, |product, &dimension| product.checked_mul(dimension as u64))
        .and_then(|elements| elements.checked_mul(dtype.bitsize() as u64));
    if num_bits.is_none_or(|bits| !bits.is_multiple_of(8) || bits / 8 != num_bytes) {
        let expected = match num_bits {
            None => "more than 2^64 bits".to_owned(),
            Some(bits) if bits.is_multiple_of(8) => format!("{} bytes", bits / 8),
            Some(bits) => format!("{bits} bits"),
        };
        return Err(HeaderError::Size {
            path: path(),
            tensor: name.into_owned(),
            form: format!("{dtype} {shape:?}"),
            expected,
            found_bytes: num_bytes,
        });
    }
    Ok(TensorEntry { name: name.into(), dtype, shape: shape.into(), begin, end, shard })
}

fn refuse_duplicates(path: &Path, entries: &[TensorEntry]) -> Result<(), HeaderError> {
    let mut names: Vec<&str> = entries.iter().map(|entry| &*entry.name).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(HeaderError::Duplicate { path: path.to_owned(), tensor: pair[0].to_owned() }),
        None => Ok(()),
    }
}

fn check_tiling(path: &Path, entries: &[TensorEntry], data_begin: u64, file_bytes: u64) -> Result<(), HeaderError> {
    let path = || path.to_owned();
    let mut end = 0;
    let mut before = "";
    for entry in entries {
        let (tensor, begin) = (entry.name.to_string(), entry.begin);
        if begin < end {
            return Err(HeaderError::Overlap { path: path(), tensor, begin, other: before.to_owned(), other_end: end });
        }
        if begin > end {
            return Err(HeaderError::Hole { path: path(), tensor, expected: end, begin });
        }
        (end, before) = (entry.end, &entry.name);
    }
    let found_bytes = file_bytes;
    let Some(expected_bytes) = end.checked_add(data_begin) else {
        return Err(HeaderError::Range { path: path(), tensor: before.to_owned(), begin: 0, end });
    };
    if expected_bytes > found_bytes {
        let cut = entries.iter().find(|entry| entry.end > found_bytes.saturating_sub(data_begin));
        let tensor = cut.map_or_else(String::new, |entry| entry.name.to_string());
        return Err(HeaderError::Truncated { path: path(), tensor, expected_bytes, found_bytes });
    }
    if expected_bytes < found_bytes {
        return Err(HeaderError::Trailing { path: path(), expected_bytes, found_bytes });
    }
    Ok(())
}

/// A tensor's entry as written.
#[derive(serde::Deserialize)]
struct RawTensor<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// All entries in the order written, doubled names kept so that they can be refused.
struct RawHeader<'a>(Vec<(Cow<'a, str>, RawTensor<'a>)>);

/// A key, borrowed from the JSON where it holds no escapes.
#[derive(serde::Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de> Deserialize<'de> for RawHeader<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RawHeaderVisitor)
    }
}

struct RawHeaderVisitor;

impl<'de> Visitor<'de> for RawHeaderVisitor {
    type Value = RawHeader<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut tensors = Vec::new();
        while let Some(Name(name)) = map.next_key()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else {
                tensors.push((name, map.next_value()?));
            }
        }
        Ok(RawHeader(tensors))
    }
}
