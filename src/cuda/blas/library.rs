//! cublasLt's library: where it is looked for, its functions, its version, and its words for results.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use super::error::BlasError;
use crate::dylib::{self, Places};

const PLACES: Places = Places {
    // Names that the system's loader is asked for, the newest first: CUDA 13's and 12's, and the one that comes with headers.
    names: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    directories: &["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu"],
};

/// A result, as `cublas_api.h` numbers them.
pub(super) type Code = c_int;
/// `CUBLAS_STATUS_SUCCESS`.
pub(super) const SUCCESS: Code = 0;

/// Whatever the library has made: a handle, a description, a layout, a preference.
pub(super) type Object = *mut c_void;

/// `cublasLtMatmulAlgo_t`: which kernel, and how.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Algorithm(pub(super) [u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) algorithm: Algorithm,
    pub(super) workspace_bytes: usize,
    pub(super) state: Code,
    pub(super) num_waves: f32,
    pub(super) reserved: [c_int; 4],
}

const _: () = assert!(size_of::<Candidate>() == 96, "as cublasLt.h of 12 and 13 has it");

dylib::functions! {
    "cublasLt.h of 12 and 13";
    version = "cublasLtGetVersion": fn() -> usize;
    status_string = "cublasLtGetStatusString": fn(Code) -> *const c_char;
    create = "cublasLtCreate": fn(*mut Object) -> Code;
    destroy = "cublasLtDestroy": fn(Object) -> Code;
    desc_create = "cublasLtMatmulDescCreate": fn(*mut Object, c_int, c_int) -> Code;
    desc_destroy = "cublasLtMatmulDescDestroy": fn(Object) -> Code;
    desc_set = "cublasLtMatmulDescSetAttribute": fn(Object, c_int, *const c_void, usize) -> Code;
    layout_create = "cublasLtMatrixLayoutCreate": fn(*mut Object, c_int, u64, u64, i64) -> Code;
    layout_destroy = "cublasLtMatrixLayoutDestroy": fn(Object) -> Code;
    preference_create = "cublasLtMatmulPreferenceCreate": fn(*mut Object) -> Code;
    preference_destroy = "cublasLtMatmulPreferenceDestroy": fn(Object) -> Code;
    preference_set = "cublasLtMatmulPreferenceSetAttribute": fn(Object, c_int, *const c_void, usize) -> Code;
    heuristic = "cublasLtMatmulAlgoGetHeuristic":
        fn(Object, Object, Object, Object, Object, Object, Object, c_int, *mut Candidate, *mut c_int) -> Code;
    check = "cublasLtMatmulAlgoCheck":
        fn(Object, Object, Object, Object, Object, Object, *const Algorithm, *mut Candidate) -> Code;
    config_get = "cublasLtMatmulAlgoConfigGetAttribute":
        fn(*const Algorithm, c_int, *mut c_void, usize, *mut usize) -> Code;
    matmul = "cublasLtMatmul":
        fn(
            Object, Object, *const c_void, *const c_void, Object, *const c_void, Object, *const c_void, *const c_void,
            Object, *mut c_void, Object, *const Algorithm, *mut c_void, usize, *mut c_void
        ) -> Code;
}

/// A loaded cublasLt; copies of it are the same.
#[derive(Clone)]
pub struct Library(Arc<Inner>);

struct Inner {
    functions: Functions,
    found_as: String,
    version: usize,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("found_as", &self.0.found_as).field("version", &self.version()).finish()
    }
}

impl Library {
    /// Loads the library: the one that `setting` names (`LOCKSTEP_CUBLASLT`: a library, or the directory that it lies in)
    /// and no other; else the first of the usual places.
    ///
    /// # Errors
    /// If there is none, or it lacks a function; the message says where it was looked for.
    pub fn load(setting: Option<&str>) -> Result<Self, BlasError> {
        let not_found = |tried| BlasError::NotFound { tried, setting: setting.map(str::to_owned) };
        let (library, path) = PLACES.load(setting).map_err(not_found)?;
        let found_as = path.display().to_string();
        let functions =
            Functions::of(library).map_err(|missing| BlasError::Lacks { library: found_as.clone(), missing })?;
        // SAFETY: takes nothing.
        let version = unsafe { (functions.version)() };
        Ok(Self(Arc::new(Inner { functions, found_as, version })))
    }

    /// Its version: `13.1.0`.
    #[must_use]
    pub fn version(&self) -> String {
        version_text(self.0.version)
    }

    /// The file, or the name by which the loader found it.
    #[must_use]
    pub fn found_as(&self) -> &str {
        &self.0.found_as
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.0.functions
    }

    /// Turns a result into an error with the library's words.
    pub(super) fn check(&self, result: Code, operation: &'static str) -> Result<(), BlasError> {
        if result == SUCCESS {
            return Ok(());
        }
        // SAFETY: takes any integer.
        let words = unsafe { (self.functions().status_string)(result) };
        Err(BlasError::Call { operation, version: self.version(), code: result, text: text(words) })
    }
}

/// The library's name of a result.
fn text(words: *const c_char) -> String {
    if words.is_null() {
        return "an error that it has no words for".to_owned();
    }
    // SAFETY: the library gave a pointer to a static string that ends in 0.
    unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
}

/// `cublasLtGetVersion`'s number: 130100 is 13.1.0; before 13, 120803 is 12.8.3.
fn version_text(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests;
