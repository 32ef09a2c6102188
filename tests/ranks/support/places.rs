//! Where the binary under test, the project's files and room for temporary ones are: where they were built, or together in
//! the directory that `LOCKSTEP_TEST_HOME` names on a machine that has only what was built elsewhere (`tests/gpu/pack.sh`).

use std::path::PathBuf;

fn home() -> Option<PathBuf> {
    std::env::var_os("LOCKSTEP_TEST_HOME").map(PathBuf::from)
}

/// The binary under test.
pub fn binary() -> PathBuf {
    home().map_or_else(|| env!("CARGO_BIN_EXE_lockstep").into(), |home| home.join("lockstep"))
}

/// A file of the project, by its path in the repository.
pub fn of_project(path: &str) -> PathBuf {
    home().unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).join(path)
}

/// A directory for temporary files of tests, which is there.
pub fn temporary() -> PathBuf {
    home().map_or_else(|| env!("CARGO_TARGET_TMPDIR").into(), |home| home.join("tmp"))
}

/// A temporary directory with a name of its own.
pub fn temporary_dir() -> tempfile::TempDir {
    let dir = temporary();
    tempfile::tempdir_in(&dir).unwrap_or_else(|error| panic!("no temporary directory in {}: {error}", dir.display()))
}
