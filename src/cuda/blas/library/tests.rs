//! The door with no library, with one that is none, and with made-up ones. A made-up library needs a C compiler.

use super::*;
use crate::dylib::made;
use crate::exit::{Classify, Exit};

#[test]
fn what_is_not_there_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let setting = dir.path().display().to_string();
    let error = Library::load(Some(&setting)).expect_err("an empty directory");
    assert_eq!(error.exit(), Exit::Environment);
    let said = error.to_string();
    for part in [format!("no cublasLt where LOCKSTEP_CUBLASLT={setting} says"), "libcublasLt.so.13".to_owned()] {
        assert!(said.contains(&part), "{said}");
    }
    std::fs::write(dir.path().join("libcublasLt.so.13"), "not a library").expect("a file");
    let said = Library::load(Some(&setting)).expect_err("a text").to_string();
    assert!(said.contains("libcublasLt.so.13: ") && said.contains("libcublasLt.so.12: "), "{said}");
}

#[test]
fn a_library_that_lacks_functions_is_an_error_that_names_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let has = ["unsigned long cublasLtGetVersion() { return 110100; }", "int cublasLtCreate() { return 1; }"];
    let Some(library) = made(dir.path(), "libcublasLt.so.12", has) else { return };
    let error = Library::load(Some(&dir.path().display().to_string())).expect_err("too old");
    let BlasError::Lacks { library: found, missing } = &error else { panic!("{error}") };
    assert_eq!(*found, library.display().to_string());
    assert!(missing.contains(&"cublasLtMatmul") && !missing.contains(&"cublasLtCreate"), "{missing:?}");
    assert!(error.to_string().contains("install cublasLt 12 or later"), "{error}");
}

#[test]
fn versions_read_as_the_library_numbers_them() {
    assert_eq!([130_100, 120_803, 130_002].map(version_text), ["13.1.0", "12.8.3", "13.0.2"]);
}

/// Wherever there is one: all functions are found, and failures have its words.
#[test]
fn a_real_library_has_every_function() {
    let Ok(library) = Library::load(None) else { return };
    assert!(library.version().starts_with("1"), "{library:?}");
    let said = library.check(15, "multiplying").expect_err("not supported").to_string();
    assert!(said.starts_with(&format!("multiplying: cublasLt {} says ", library.version())), "{said}");
    assert!(library.check(SUCCESS, "multiplying").is_ok());
}
