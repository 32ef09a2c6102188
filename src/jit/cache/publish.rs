//! Entries appear whole or not at all: written beside their place, synced, renamed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tempfile::TempDir;

use super::artefact::Artefact;

/// What a directory that is being written begins with.
const UNFINISHED: &str = "tmp.";
/// What an entry that was found damaged begins with.
const DAMAGED: &str = "damaged.";

/// What goes wrong, with what it went wrong with.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {}", path.display())]
pub(super) struct PublishError {
    operation: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

impl PublishError {
    /// Without the path, in which ranks differ: what ranks say alike is said once.
    pub(super) fn reason(&self) -> String {
        format!("{}: {}", self.operation, self.source)
    }
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PublishError {
    let path = path.to_path_buf();
    move |source| PublishError { operation, path, source }
}

/// Directories that go with this process: a signal ends it without running destructors.
static UNFINISHED_HERE: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A directory that is removed when it goes, or when [`remove_unfinished`] is called.
#[derive(Debug)]
pub(super) struct Passing(TempDir);

impl Passing {
    pub(super) fn new(dir: TempDir) -> Self {
        if let Ok(mut paths) = UNFINISHED_HERE.lock() {
            paths.push(dir.path().to_owned());
        }
        Self(dir)
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        if let Ok(mut paths) = UNFINISHED_HERE.lock() {
            paths.retain(|path| path != self.0.path());
        }
    }
}

/// Removes what is being written and what is private to this process, which ends at once.
pub(crate) fn remove_unfinished() {
    let Ok(paths) = UNFINISHED_HERE.lock() else { return };
    for path in &*paths {
        // It may have got its place in the meantime: then nothing is left under this name.
        let _ = fs::remove_dir_all(path);
    }
}

/// Publishes an artefact as `dir/entry`. If there is one already, that one stays.
pub(super) fn publish(dir: &Path, entry: &str, artefact: &Artefact, host: &str) -> Result<(), PublishError> {
    fs::create_dir_all(dir).map_err(failed("creating", dir))?;
    // The name says who writes, so that others know when nobody does any more.
    let prefix = format!("{UNFINISHED}{host}.{}.", std::process::id());
    let unfinished = tempfile::Builder::new().prefix(&prefix).tempdir_in(dir).map_err(failed("creating", dir))?;
    let unfinished = Passing::new(unfinished);
    for (name, bytes) in artefact.files() {
        let path = unfinished.path().join(name);
        write(&path, &bytes).map_err(failed("writing", &path))?;
    }
    sync(unfinished.path()).map_err(failed("syncing", unfinished.path()))?;
    make_readable(unfinished.path()).map_err(failed("opening up", unfinished.path()))?;
    let path = dir.join(entry);
    match fs::rename(unfinished.path(), &path) {
        // It has moved: there is nothing left to remove under its old name.
        Ok(()) => sync(dir).map_err(failed("syncing", dir)),
        // Somebody else was faster. What is unfinished here goes when it is dropped.
        Err(error) if is_taken(&error) => Ok(()),
        Err(error) => Err(failed("renaming to", &path)(error)),
    }
}

/// A directory that is not empty stands where one was to be renamed to.
fn is_taken(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists)
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn sync(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Temporary directories are their owner's alone; entries are for whoever may look into the cache.
fn make_readable(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755))
}

/// Moves a damaged entry out of the way, so that somebody can look at it. Gives its new name.
pub(super) fn set_aside(path: &Path, host: &str) -> io::Result<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let aside = path.with_file_name(format!("{DAMAGED}{host}.{}.{name}", std::process::id()));
    match fs::rename(path, &aside) {
        Ok(()) => Ok(aside),
        // Another process has set it aside.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(aside),
        Err(error) => Err(error),
    }
}

/// Whether a name is that of an entry set aside.
pub(super) fn is_damaged(name: &str) -> bool {
    name.starts_with(DAMAGED)
}

/// Whether a name is that of a directory being written, or once written.
pub(super) fn is_unfinished(name: &str) -> bool {
    name.starts_with(UNFINISHED)
}

/// Removes what processes of this host left half-written when they were killed. Nobody waits for it, and if it can't be
/// removed it does no harm.
pub(super) fn remove_abandoned(dir: &Path, host: &str) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(rest) = name.strip_prefix(&format!("{UNFINISHED}{host}.")) else { continue };
        let writer = rest.split('.').next().and_then(|pid| pid.parse::<u32>().ok());
        if writer.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
