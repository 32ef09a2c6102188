//! The door with no library, with one that is none, and with made-up ones. A made-up library needs a C compiler.

use std::path::{Path, PathBuf};

use super::super::UniqueId;
use super::*;
use crate::exit::{Classify, Exit};

/// Every function, in the order of `nccl.h`'s needs: a version of 2.28.9, and an id that can't be made.
const FUNCTIONS: [(&str, &str); 11] = [
    ("ncclGetVersion", "int ncclGetVersion(int *v) { *v = 22809; return 0; }"),
    ("ncclGetErrorString", "const char *ncclGetErrorString(int r) { return r == 2 ? \"unhandled system error\" : 0; }"),
    (
        "ncclGetLastError",
        "const char *ncclGetLastError(void *c) { return \"\\nBootstrap : no socket interface found\\n\"; }",
    ),
    ("ncclGetUniqueId", "int ncclGetUniqueId(void *id) { return 2; }"),
    ("ncclCommInitRankConfig", "int ncclCommInitRankConfig() { return 5; }"),
    ("ncclCommGetAsyncError", "int ncclCommGetAsyncError(void *c, int *r) { *r = 7; return 0; }"),
    ("ncclCommAbort", "int ncclCommAbort(void *c) { return 0; }"),
    ("ncclGroupStart", "int ncclGroupStart() { return 0; }"),
    ("ncclGroupEnd", "int ncclGroupEnd() { return 0; }"),
    ("ncclSend", "int ncclSend() { return 0; }"),
    ("ncclRecv", "int ncclRecv() { return 0; }"),
];

/// A library of the functions that `keep` wants; absent where there is no compiler.
fn made(dir: &Path, name: &str, keep: impl Fn(&str) -> bool) -> Option<PathBuf> {
    dylib::made(dir, name, FUNCTIONS.iter().filter(|(function, _)| keep(function)).map(|(_, text)| *text))
}

#[test]
fn what_is_not_there_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let setting = dir.path().display().to_string();
    let error = Library::load(Some(&setting)).expect_err("an empty directory");
    assert_eq!(error.exit(), Exit::Environment);
    let said = error.to_string();
    for part in [format!("no NCCL where LOCKSTEP_NCCL={setting} says"), "libnccl.so.2".to_owned(), "host".to_owned()] {
        assert!(said.contains(&part), "{said}");
    }
    let no_library = dir.path().join("libnccl.so.2");
    std::fs::write(&no_library, "not a library").expect("a file");
    let said = Library::load(Some(&setting)).expect_err("a text").to_string();
    assert!(said.contains("libnccl.so.2: ") && said.contains("libnccl.so: "), "{said}");
}

#[test]
fn a_library_that_lacks_functions_is_an_error_that_names_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let old = |function: &str| !["ncclCommInitRankConfig", "ncclGetLastError"].contains(&function);
    let Some(library) = made(dir.path(), "libnccl.so.2", old) else { return };
    let error = Library::load(Some(&dir.path().display().to_string())).expect_err("too old");
    let missing = vec!["ncclGetLastError", "ncclCommInitRankConfig"];
    let library = library.display().to_string();
    assert_eq!(error, NcclError::Lacks { library, missing, oldest: OLDEST_NCCL });
    let said = error.to_string();
    assert!(said.contains("lacks ncclGetLastError, ncclCommInitRankConfig; install NCCL 2.18 or later"), "{said}");
}

#[test]
fn failures_have_nccls_words() {
    let dir = tempfile::tempdir().expect("a directory");
    let Some(path) = made(dir.path(), "libmade.so", |_| true) else { return };
    let library = Library::load(Some(&path.display().to_string())).expect("all functions");
    assert_eq!((library.version(), library.found_as()), ("2.28.9".to_owned(), &*path.display().to_string()));
    let error = UniqueId::new(&library).expect_err("no interface");
    assert_eq!(
        error.to_string(),
        "making an id for the ranks' communicator: NCCL says unhandled system error (2): \
         Bootstrap : no socket interface found"
    );
    assert_eq!(error.exit(), Exit::Environment);
    assert!(library.check(IN_PROGRESS, "waiting").is_ok(), "what goes on has not failed");
    let remote = library.check(REMOTE_ERROR, "exchanging").expect_err("a peer");
    assert_eq!(remote.exit(), Exit::PeerFailed);
    assert!(remote.to_string().contains("an error that it has no words for (6)"), "{remote}");
}

#[test]
fn ids_survive_the_way_as_bytes() {
    let bytes: Vec<u8> = (0..128).collect();
    assert_eq!(UniqueId::from_bytes(&bytes).expect("an id").bytes()[..], bytes);
    for wrong in [&bytes[1..], &[]] {
        assert_eq!(UniqueId::from_bytes(wrong), None);
    }
}

#[test]
fn versions_read_as_nccl_numbers_them() {
    assert_eq!([22809, 21805, 23000].map(version_text), ["2.28.9", "2.18.5", "2.30.0"]);
}
