//! The timings that a rank remembers from session to session: one file, where the deployment names a cache directory.
//!
//! What can't be read or does not hold here any more counts as not there; what can't be written is said and let be.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::checkpoint;
use crate::facts::BUILD;
use crate::layer::session::SessionOptions;
use crate::select::tactics::Timing;
use crate::world::World;

/// The form of the file.
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: u32,
    entries: Vec<Entry>,
}

/// One shape with one number of rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    shape: String,
    /// What else the times depend on.
    here: String,
    tactics: Vec<String>,
    /// By tactic; null where the rank held no expert.
    ns: Vec<Option<u64>>,
}

/// What this rank remembers.
#[derive(Debug)]
pub(super) struct Store {
    /// Absent: nothing is kept.
    path: Option<PathBuf>,
    here: String,
    entries: Vec<Entry>,
    is_changed: bool,
    /// What is odd about the file, for one rank to say for all.
    pub(super) warnings: Vec<String>,
}

impl Store {
    /// Reads the file of this rank: `<jit.cache_dir>/<host>/rank<local>/tactics.json`.
    pub(super) fn open(world: &World, options: &SessionOptions<'_>) -> Self {
        let dir = options.deployment.jit.cache_dir.as_ref().map(Path::new);
        let host = world.host().replace('/', "_");
        let path = dir.map(|dir| dir.join(host).join(format!("rank{}", world.local_rank())).join("tactics.json"));
        let isa = &options.environment.instruction_set;
        let threads = options.num_threads;
        let here = format!(
            "build {} {}, {isa}, {threads} threads, {} ranks here",
            BUILD.revision,
            BUILD.profile,
            world.local_size()
        );
        Self::read(path, here)
    }

    fn read(path: Option<PathBuf>, here: String) -> Self {
        let mut warnings = Vec::new();
        let entries = path.as_deref().and_then(|path| read(path, &mut warnings)).unwrap_or_default();
        Self { path, here, entries, is_changed: false, warnings }
    }

    /// The timings of a shape, if they were taken as they would be now.
    pub(super) fn recall(&self, shape: &str, tactics: &[&str]) -> Option<Vec<Timing>> {
        let found = self.entries.iter().find(|entry| entry.shape == shape)?;
        let is_valid = found.here == self.here && found.tactics == tactics && found.ns.len() == tactics.len();
        is_valid.then(|| found.ns.iter().map(|ns| ns.map_or(Timing::None, Timing::Took)).collect())
    }

    /// Remembers timings; those of a shape of which a tactic failed are not worth it, since what failed may be mended.
    pub(super) fn remember(&mut self, shape: &str, tactics: &[&str], timings: &[Timing]) {
        self.entries.retain(|entry| entry.shape != shape);
        self.is_changed = true;
        if timings.contains(&Timing::Failed) {
            return;
        }
        let ns = |timing: &Timing| match timing {
            Timing::Took(ns) => Some(*ns),
            Timing::None | Timing::Failed => None,
        };
        self.entries.push(Entry {
            shape: shape.to_owned(),
            here: self.here.clone(),
            tactics: tactics.iter().map(|name| (*name).to_owned()).collect(),
            ns: timings.iter().map(ns).collect(),
        });
    }

    /// Writes the file, whole or not at all.
    pub(super) fn save(&mut self) {
        let Some(path) = self.path.as_deref().filter(|_| self.is_changed) else { return };
        let file = File { version: VERSION, entries: self.entries.clone() };
        let made = path.parent().map_or(Ok(()), fs::create_dir_all).map_err(|error| error.to_string());
        let written = made.and_then(|()| {
            let fill = |out: &mut dyn std::io::Write| Ok(serde_json::to_writer_pretty(out, &file)?);
            checkpoint::write_atomically(path, &fill).map_err(|error| error.to_string())
        });
        if let Err(error) = written {
            let path = path.display();
            self.warnings.push(format!(
                "timings of tactics can't be kept in {path}: {error}; set jit.cache_dir to a directory of yours"
            ));
        }
    }
}

/// The entries of a file; none where it is not there or not ours.
fn read(path: &Path, warnings: &mut Vec<String>) -> Option<Vec<Entry>> {
    let bytes = fs::read(path).ok()?;
    match serde_json::from_slice::<File>(&bytes) {
        Ok(file) if file.version == VERSION => Some(file.entries),
        Ok(_) => None,
        Err(error) => {
            warnings.push(format!("{} holds no timings of tactics ({error}); it is written anew", path.display()));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(path: &Path, here: &str) -> Store {
        Store::read(Some(path.to_owned()), here.to_owned())
    }

    const NAMES: [&str; 3] = ["a", "b", "c"];

    #[test]
    fn what_was_kept_reads_back_where_it_still_holds() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("host/rank0/tactics.json");
        let timings = [Timing::Took(5), Timing::None, Timing::Took(7)];
        let mut first = store(&path, "build 1");
        assert_eq!(first.recall("s", &NAMES), None);
        first.remember("s", &NAMES, &timings);
        first.save();
        let again = store(&path, "build 1");
        assert_eq!(again.recall("s", &NAMES).as_deref(), Some(&timings[..]));
        assert_eq!(again.recall("t", &NAMES), None, "another shape");
        assert_eq!(again.recall("s", &["a", "b", "d"]), None, "another list");
        assert_eq!(store(&path, "build 2").recall("s", &NAMES), None, "another build");
    }

    #[test]
    fn failures_are_not_kept_and_damage_is_no_error() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("tactics.json");
        let mut first = store(&path, "build 1");
        first.remember("s", &NAMES, &[Timing::Took(5); 3]);
        first.remember("s", &NAMES, &[Timing::Took(5), Timing::Failed, Timing::Took(7)]);
        first.save();
        assert_eq!(store(&path, "build 1").recall("s", &NAMES), None);
        let text = fs::read_to_string(&path).expect("written");
        for damaged in [&text[..text.len() / 2], "", "[]", "{\"version\": 2, \"entries\": []}"] {
            fs::write(&path, damaged).expect("written");
            let store = store(&path, "build 1");
            assert_eq!(store.entries, [], "{damaged}");
            assert_eq!(
                store.warnings.is_empty(),
                damaged.contains("\"version\": 2, \"entries\": []"),
                "{damaged}: {:?}",
                store.warnings
            );
        }
    }

    #[test]
    fn nowhere_to_keep_is_no_error() {
        let mut store = store(Path::new("/proc/none/tactics.json"), "build 1");
        store.remember("s", &NAMES, &[Timing::Took(1); 3]);
        store.save();
        assert!(store.warnings[0].contains("set jit.cache_dir"), "{:?}", store.warnings);
    }
}
