//! What is in a cache, for those who look after it.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::artefact::{Artefact, BadEntry, claimed_key};
use super::publish::{is_damaged, is_unfinished};

/// Directories deep that entries may lie: `<host>/rank<local>/kernel.*`.
const MAX_DEPTH: usize = 2;

/// One thing in a cache.
#[derive(Debug)]
pub struct Listed {
    /// Where it lies.
    pub path: PathBuf,
    /// What its files take.
    pub num_bytes: u64,
    /// The artefact, or what is wrong with it.
    pub artefact: Result<Artefact, BadEntry>,
    /// It is no entry: set aside as damaged, or never finished.
    pub is_leftover: bool,
}

/// What was removed.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Pruned {
    /// Entries and leftovers.
    pub num_removed: usize,
    /// What they took.
    pub num_bytes: u64,
}

/// Everything in the cache below `root`, verified, in the order of paths. A root that is not there is empty.
///
/// # Errors
/// If a directory can't be read.
pub fn list(root: &Path) -> io::Result<Vec<Listed>> {
    let mut listed = Vec::new();
    if root.try_exists()? {
        walk(root, MAX_DEPTH, &mut listed)?;
    }
    listed.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(listed)
}

fn walk(dir: &Path, depth: usize, listed: &mut Vec<Listed>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !path.is_dir() {
            continue;
        }
        let is_leftover = is_damaged(&name) || is_unfinished(&name);
        if is_leftover || name.starts_with("kernel.") {
            let artefact = claimed_key(&path).and_then(|key| Artefact::read(&path, key));
            let artefact = artefact.and_then(|artefact| match name.strip_prefix("kernel.") {
                Some(rest) if rest != format!("{}.{}", artefact.name(), artefact.key()) => {
                    Err(BadEntry::OtherKey { found: artefact.key().to_string() })
                }
                _ => Ok(artefact),
            });
            listed.push(Listed { num_bytes: size_of(&path), artefact, is_leftover, path });
        } else if depth > 0 {
            walk(&path, depth - 1, listed)?;
        }
    }
    Ok(())
}

fn size_of(dir: &Path) -> u64 {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    files.filter_map(|file| Some(file.metadata().ok()?.len())).sum()
}

/// Removes what `unwanted` says, of everything that [`list`] finds.
///
/// # Errors
/// If something can't be read or removed. What was removed before stays so.
pub fn prune(root: &Path, unwanted: impl Fn(&Listed) -> bool) -> io::Result<Pruned> {
    let mut pruned = Pruned::default();
    for listed in list(root)?.into_iter().filter(unwanted) {
        // Renamed first, so that nobody opens an entry of which half is gone.
        let name = listed.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let going = listed.path.with_file_name(format!("damaged.pruned.{}.{name}", std::process::id()));
        fs::rename(&listed.path, &going)?;
        fs::remove_dir_all(&going)?;
        pruned.num_removed += 1;
        pruned.num_bytes += listed.num_bytes;
    }
    Ok(pruned)
}
