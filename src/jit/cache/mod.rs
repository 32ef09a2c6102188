//! Compiled kernels on disk: `<cache>/<host>/rank<local>/kernel.<name>.<key>/{kernel.cu,kernel.cubin,manifest.json}`.
//!
//! An entry appears whole, by one rename, and is never changed. What is read is verified; what is wrong is set aside and
//! built again. Behind a rank's own directory lies a shared one, which runs only read. A cache that can't be written costs
//! time and never a run: its rank keeps what it builds in a private directory, and says so once.
//!
//! Knows nothing of other ranks, and compiles nothing.

mod artefact;
mod maintenance;
mod paths;
mod publish;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::key::{Key, KeyParts};
pub use artefact::{Artefact, BadEntry};
pub use maintenance::{Listed, Pruned, list, prune};
pub use paths::Place;
pub(crate) use publish::remove_unfinished;

use publish::Passing;

/// Whether a directory is there and is neither this user's nor the system's: anybody may have made one below `/tmp`.
fn is_anothers(dir: &Path) -> bool {
    let owner = |path: &Path| fs::metadata(path).map(|metadata| metadata.uid());
    match (owner(dir), owner(Path::new("/proc/self"))) {
        (Ok(owner), Ok(user)) => owner != user && owner != 0,
        _ => false,
    }
}

/// The kernels that one rank keeps and finds.
#[derive(Debug)]
pub struct Cache {
    /// `<cache>`; absent where nobody said where it is and there is no home.
    root: Option<PathBuf>,
    /// Where this rank reads and writes.
    own: Option<PathBuf>,
    /// Where it only reads.
    shared: Option<PathBuf>,
    /// Where it writes once `own` can't be written.
    private: Option<Passing>,
    host: String,
    notes: Vec<String>,
}

impl Cache {
    /// The cache below `root`, as the rank at `place` uses it. Nothing is created before something is published; what killed
    /// processes of this host left half-written is removed.
    #[must_use]
    pub fn open(root: Option<&Path>, place: &Place) -> Self {
        if let Some(root) = root.filter(|root| is_anothers(root)) {
            let mut cache = Self::open(None, place);
            cache.fall_back(&format!(
                "{} belongs to another user, whose kernels are not run as one's own",
                root.display()
            ));
            return cache;
        }
        let own = root.map(|root| place.own(root));
        let shared = root.map(paths::shared).filter(|shared| own.as_ref() != Some(shared));
        let host = paths::word(place.host());
        if let Some(own) = &own {
            publish::remove_abandoned(own, &host);
        }
        Self { root: root.map(Path::to_path_buf), own, shared, private: None, host, notes: Vec::new() }
    }

    /// The directory that everything lies below, if there is one.
    #[must_use]
    pub fn root(&self) -> Option<&Path> {
        self.root.as_deref()
    }

    /// Where this rank keeps its kernels, if anywhere.
    #[must_use]
    pub fn own(&self) -> Option<&Path> {
        self.own.as_deref()
    }

    /// What went wrong so far and did no harm, for people; each thing once.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// The artefact of a key: verified, or none. A bad entry is set aside.
    pub fn find(&mut self, name: &str, key: Key) -> Option<Artefact> {
        let entry = paths::entry(name, key);
        for (dir, is_own) in [(self.own.clone(), true), (self.shared.clone(), false)] {
            let Some(path) = dir.map(|dir| dir.join(&entry)) else { continue };
            match Artefact::read(&path, key) {
                Ok(artefact) => return Some(artefact),
                Err(BadEntry::Absent) => {}
                Err(bad) => self.set_aside(&path, &bad, is_own),
            }
        }
        None
    }

    fn set_aside(&mut self, path: &Path, bad: &BadEntry, is_own: bool) {
        let shown = path.display();
        // The shared layer is somebody else's: it is read around, not changed.
        let set_aside = is_own.then(|| publish::set_aside(path, &self.host));
        self.note(match set_aside {
            Some(Ok(aside)) => format!("{shown} is damaged ({bad}); it is now {} and is built again", aside.display()),
            Some(Err(error)) => format!("{shown} is damaged ({bad}) and can't be set aside ({error}); remove it"),
            None => format!(
                "{shown} is damaged ({bad}) and is not used; fill the shared layer again with `lockstep warmup`"
            ),
        });
    }

    /// Keeps an artefact. Somebody else may have published it meanwhile: theirs stays, this one is used.
    pub fn publish(&mut self, artefact: &Artefact) {
        let entry = paths::entry(artefact.name(), artefact.key());
        if self.private.is_none() {
            let written = match &self.own {
                Some(own) => publish::publish(own, &entry, artefact, &self.host).map_err(|error| {
                    let root = self.root.as_deref().unwrap_or(own);
                    format!("kernels can't be kept below {} ({})", root.display(), error.reason())
                }),
                None => Err("there is no directory for kernels: neither HOME nor XDG_CACHE_HOME is set".to_owned()),
            };
            let Err(reason) = written else { return };
            self.fall_back(&reason);
        }
        if let Some(private) = &self.private
            && let Err(error) = publish::publish(private.path(), &entry, artefact, &self.host)
        {
            let note = format!("kernels can't be kept in a private directory either ({})", error.reason());
            self.note(note);
        }
    }

    fn fall_back(&mut self, reason: &str) {
        self.private = tempfile::Builder::new().prefix("lockstep-kernels-").tempdir().ok().map(Passing::new);
        let instead = if self.private.is_some() { "in a private temporary directory" } else { "in memory alone" };
        self.note(format!(
            "{reason}; this run keeps them {instead} and the next one compiles again. Set jit.cache_dir \
             (LOCKSTEP_CACHE_DIR) to a directory that can be written"
        ));
    }

    /// Every readable manifest of kernels of that name, of both layers.
    fn parts_of(&self, name: &str) -> Vec<KeyParts> {
        let prefix = paths::prefix(name);
        let dirs = [&self.own, &self.shared].into_iter().flatten();
        let entries = dirs.flat_map(|dir| fs::read_dir(dir).into_iter().flatten().flatten());
        let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
        named.filter_map(|entry| artefact::read_parts(&entry.path())).collect()
    }

    /// In what the artefacts that are there differ from the one wanted, by the nearest of them; nothing where there is none.
    #[must_use]
    pub fn changes(&self, wanted: &KeyParts) -> Vec<String> {
        let changes = self.parts_of(&wanted.name).into_iter().map(|parts| wanted.changes_from(&parts));
        changes.min_by_key(Vec::len).unwrap_or_default()
    }

    /// The compilers that made what is here of a kernel, whatever compiler `wanted` names.
    #[must_use]
    pub fn compilers(&self, wanted: &KeyParts) -> Vec<String> {
        let same_but_compiler =
            |parts: &KeyParts| KeyParts { compiler: wanted.compiler.clone(), ..parts.clone() } == *wanted;
        let mut compilers: Vec<String> =
            self.parts_of(&wanted.name).into_iter().filter(same_but_compiler).map(|parts| parts.compiler).collect();
        compilers.sort();
        compilers.dedup();
        compilers
    }
}

#[cfg(test)]
mod tests;
