//! Which files a checkpoint consists of: by `model.safetensors.index.json`, or all that lie in the directory.
//!
//! The index outranks what else lies there: a file it does not name is not read, and a tensor that it places in a file must be
//! in that file. Without one, every `*.safetensors` counts, whatever its name.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use super::error::CheckpointError;
use super::faults::Faults;
use super::files;
use super::header::{self, TensorEntry};
use super::table::TensorTable;
use super::warning::Warning;

/// The index's file name.
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// Kimi K3's index, a million names, takes 130 MB.
const MAX_INDEX_BYTES: u64 = 1 << 30;

/// The files to read, and where the index wants each tensor.
struct Sources {
    files: Vec<PathBuf>,
    /// (tensor, position in `files`), sorted by tensor; absent without an index.
    placed: Option<Vec<(Box<str>, u32)>>,
}

/// Reads the headers of all files of `dir` and checks them against the index.
pub(super) fn read_table(
    dir: &Path,
    faults: &mut Faults,
    warnings: &mut Vec<Warning>,
) -> Result<TensorTable, CheckpointError> {
    let present = files::list_safetensors(dir)?;
    let index_path = dir.join(INDEX);
    let sources = match files::read_text_if_present(&index_path, MAX_INDEX_BYTES)? {
        Some(text) => from_index(dir, &text, &present, faults, warnings)?,
        None if present.is_empty() => return Err(CheckpointError::NoShards { dir: dir.to_owned() }),
        None => Sources { files: present, placed: None },
    };
    let mut shards = Vec::new();
    let mut entries = Vec::new();
    // Positions in `files` of the shards that could be read: a shard that could not was reported, its tensors need not be.
    let mut readable = HashMap::new();
    for (position, path) in sources.files.iter().enumerate() {
        let shard = to_u32(shards.len());
        if let Some((opened, tensors)) = faults.take(header::open(path, shard))? {
            readable.insert(to_u32(position), shard);
            shards.push(opened);
            entries.extend(tensors);
        }
    }
    let paths: Vec<_> = shards.iter().map(|shard| shard.path.clone()).collect();
    let entries = match sources.placed {
        None => refuse_doubles(entries, &paths, faults)?,
        Some(placed) => {
            let placed = placed.into_iter().filter_map(|(name, file)| Some((name, *readable.get(&file)?))).collect();
            place(entries, placed, &paths, faults, warnings)?
        }
    };
    Ok(TensorTable::new(entries, shards))
}

/// Inputs that lie beside a sample's shards: no part of the checkpoint, and nothing odd.
pub const INPUTS: &str = "inputs.safetensors";

fn from_index(
    dir: &Path,
    text: &str,
    present: &[PathBuf],
    faults: &mut Faults,
    warnings: &mut Vec<Warning>,
) -> Result<Sources, CheckpointError> {
    let path = dir.join(INDEX);
    let Index { weight_map: WeightMap { mut tensors, files: names } } =
        serde_json::from_str(text).map_err(|source| CheckpointError::IndexJson { path: path.clone(), source })?;
    let extra: Vec<_> = present
        .iter()
        .filter_map(|path| path.file_name()?.to_str())
        .filter(|&name| name != INPUTS && !names.iter().any(|n| n == name))
        .collect();
    if !extra.is_empty() {
        warnings.push(Warning::ExtraShards { files: extra.into_iter().map(str::to_owned).collect() });
    }
    tensors.sort_unstable();
    if let Some(pair) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        faults.raise(CheckpointError::IndexDoubled { path: path.clone(), tensor: pair[0].0.to_string() })?;
    }
    // Files that cannot be read are reported here; reading goes on with the others, under new positions.
    let mut files = Vec::new();
    let mut positions = Vec::new();
    for (at, name) in names.iter().enumerate() {
        let usable =
            faults.take(indexed_file(dir, name, || tensors.iter().filter(|(_, of)| *of as usize == at).count()))?;
        positions.push(usable.as_ref().map(|_| to_u32(files.len())));
        files.extend(usable);
    }
    let placed = tensors.into_iter().filter_map(|(name, at)| Some((name, positions[at as usize]?))).collect();
    Ok(Sources { files, placed: Some(placed) })
}

/// The path of a file that the index names, if it may be and is there.
fn indexed_file(dir: &Path, name: &str, num_tensors: impl Fn() -> usize) -> Result<PathBuf, CheckpointError> {
    if !is_plain_file_name(name) {
        return Err(CheckpointError::IndexEscapes { path: dir.join(INDEX), file: name.to_owned() });
    }
    let file = dir.join(name);
    if !file.exists() {
        return Err(CheckpointError::MissingShard { path: dir.join(INDEX), file, num_tensors: num_tensors() });
    }
    Ok(file)
}

/// A name that stays in the directory, on any system.
fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', ':', '\0'])
}

/// Keeps the entries that are where the index wants them.
fn place(
    mut entries: Vec<TensorEntry>,
    mut placed: Vec<(Box<str>, u32)>,
    paths: &[PathBuf],
    faults: &mut Faults,
    warnings: &mut Vec<Warning>,
) -> Result<Vec<TensorEntry>, CheckpointError> {
    placed.dedup_by(|a, b| a.0 == b.0);
    entries.sort_unstable_by(|a, b| (&a.name, a.shard).cmp(&(&b.name, b.shard)));
    let is_placed = |entry: &TensorEntry| {
        let found = placed.binary_search_by(|(name, _)| name.cmp(&entry.name));
        found.is_ok_and(|at| placed[at].1 == entry.shard)
    };
    let (kept, extra): (Vec<_>, Vec<_>) = entries.into_iter().partition(is_placed);
    if let Some(first) = extra.first() {
        warnings.push(Warning::ExtraTensors {
            count: extra.len(),
            first: first.name.to_string(),
            path: paths[first.shard as usize].clone(),
        });
    }
    // One fault a shard: an interrupted conversion can drop thousands.
    let mut missing: Vec<Vec<&str>> = vec![Vec::new(); paths.len()];
    for (name, shard) in &placed {
        if kept.binary_search_by(|entry| entry.name.cmp(name)).is_err() {
            missing[*shard as usize].push(name);
        }
    }
    for (path, names) in paths.iter().zip(&missing) {
        if let Some(first) = names.first() {
            let fault = CheckpointError::MissingIndexed {
                path: path.clone(),
                tensor: (*first).to_owned(),
                num_missing: names.len(),
            };
            faults.raise(fault)?;
        }
    }
    Ok(kept)
}

/// Without an index nothing says which of two copies counts.
fn refuse_doubles(
    mut entries: Vec<TensorEntry>,
    paths: &[PathBuf],
    faults: &mut Faults,
) -> Result<Vec<TensorEntry>, CheckpointError> {
    entries.sort_unstable_by(|a, b| (&a.name, a.shard).cmp(&(&b.name, b.shard)));
    for pair in entries.windows(2).filter(|pair| pair[0].name == pair[1].name) {
        faults.raise(CheckpointError::TensorInTwoFiles {
            tensor: pair[0].name.to_string(),
            path: paths[pair[0].shard as usize].clone(),
            other_path: paths[pair[1].shard as usize].clone(),
        })?;
    }
    entries.dedup_by(|a, b| a.name == b.name);
    Ok(entries)
}

fn to_u32(position: usize) -> u32 {
    u32::try_from(position).expect("a directory holds fewer than 2^32 files")
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: WeightMap,
}

/// `weight_map` with each file name held once: a release names a million tensors in a hundred files.
struct WeightMap {
    tensors: Vec<(Box<str>, u32)>,
    files: Vec<String>,
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

struct WeightMapVisitor;

impl<'de> Visitor<'de> for WeightMapVisitor {
    type Value = WeightMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
        let mut positions: HashMap<String, u32> = HashMap::new();
        let mut tensors = Vec::new();
        while let Some((tensor, file)) = map.next_entry::<Box<str>, Cow<'de, str>>()? {
            let at = match positions.get(&*file) {
                Some(&at) => at,
                None => {
                    let at = to_u32(positions.len());
                    positions.insert(file.into_owned(), at);
                    at
                }
            };
            tensors.push((tensor, at));
        }
        let mut files: Vec<_> = positions.into_iter().collect();
        files.sort_unstable_by_key(|(_, at)| *at);
        Ok(WeightMap { tensors, files: files.into_iter().map(|(name, _)| name).collect() })
    }
}
