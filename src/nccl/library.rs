//! NCCL's library: where it is looked for, its functions, its version, and its words for results.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use super::error::NcclError;
use crate::dylib::{self, Places};
use crate::select::registry::OLDEST_NCCL;

const PLACES: Places = Places {
    // Names that the system's loader is asked for. Packages hold the first; the second comes with headers.
    names: &["libnccl.so.2", "libnccl.so"],
    directories: &["/usr/lib/x86_64-linux-gnu", "/usr/local/cuda/lib64", "/usr/local/lib"],
};

/// A result, as `nccl.h` numbers them.
pub(super) type Code = c_int;
/// `ncclSuccess`.
pub(super) const SUCCESS: Code = 0;
/// `ncclRemoteError`: a peer's process or network.
const REMOTE_ERROR: Code = 6;
/// `ncclInProgress`: not done yet, and no failure.
pub(super) const IN_PROGRESS: Code = 7;

/// `ncclUint8`.
pub(super) const UINT8: c_int = 1;

/// NCCL's handle of a communicator.
pub(super) type Handle = *mut c_void;

/// What makes ranks find each other: `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawId(pub(super) [u8; 128]);

/// `ncclConfig_t` as of NCCL 2.18. Later ones have more behind it and read as much as `size` says.
#[repr(C)]
pub(super) struct Config {
    pub(super) size: usize,
    pub(super) magic: c_uint,
    pub(super) version: c_uint,
    pub(super) blocking: c_int,
    pub(super) cga_cluster_size: c_int,
    pub(super) min_ctas: c_int,
    pub(super) max_ctas: c_int,
    pub(super) net_name: *const c_char,
    pub(super) split_share: c_int,
}

const _: () = assert!(size_of::<RawId>() == 128 && size_of::<Config>() == 48, "as nccl.h of 2.18 has them");

dylib::functions! {
    "nccl.h since 2.18";
    version = "ncclGetVersion": fn(*mut c_int) -> Code;
    error_string = "ncclGetErrorString": fn(Code) -> *const c_char;
    last_error = "ncclGetLastError": fn(Handle) -> *const c_char;
    unique_id = "ncclGetUniqueId": fn(*mut RawId) -> Code;
    init = "ncclCommInitRankConfig": fn(*mut Handle, c_int, RawId, c_int, *mut Config) -> Code;
    async_error = "ncclCommGetAsyncError": fn(Handle, *mut Code) -> Code;
    abort = "ncclCommAbort": fn(Handle) -> Code;
    group_start = "ncclGroupStart": fn() -> Code;
    group_end = "ncclGroupEnd": fn() -> Code;
    send = "ncclSend": fn(*const c_void, usize, c_int, c_int, Handle, *mut c_void) -> Code;
    receive = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> Code;
}

/// A loaded NCCL; copies of it are the same.
#[derive(Clone)]
pub struct Library(Arc<Inner>);

struct Inner {
    functions: Functions,
    found_as: String,
    version: u32,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("found_as", &self.0.found_as).field("version", &self.version()).finish()
    }
}

impl Library {
    /// Loads the library: the one that `setting` names (`LOCKSTEP_NCCL`: a library, or the directory that it lies in) and no
    /// other; else the first of the usual places.
    ///
    /// # Errors
    /// If there is none, or it lacks a function; the message says where it was looked for.
    pub fn load(setting: Option<&str>) -> Result<Self, NcclError> {
        let not_found = |tried| NcclError::NotFound { tried, setting: setting.map(str::to_owned) };
        let (library, path) = PLACES.load(setting).map_err(not_found)?;
        let found_as = path.display().to_string();
        let lacks = |missing| NcclError::Lacks { library: found_as.clone(), missing, oldest: OLDEST_NCCL };
        let functions = Functions::of(library).map_err(lacks)?;
        let mut version = 0;
        // SAFETY: `version` is a place for one integer.
        let result = unsafe { (functions.version)(&raw mut version) };
        let library = Self(Arc::new(Inner { functions, found_as, version: version.unsigned_abs() }));
        library.check(result, "asking for NCCL's version")?;
        Ok(library)
    }

    /// Its version: `2.28.9`.
    #[must_use]
    pub fn version(&self) -> String {
        version_text(self.0.version)
    }

    /// The file, or the name by which the loader found it.
    #[must_use]
    pub fn found_as(&self) -> &str {
        &self.0.found_as
    }

    /// Its version as it writes it itself: `22809`.
    pub(super) fn raw_version(&self) -> u32 {
        self.0.version
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.0.functions
    }

    /// Turns a result into an error with NCCL's words. What is in progress has not failed.
    pub(super) fn check(&self, result: Code, operation: &'static str) -> Result<(), NcclError> {
        if result == SUCCESS || result == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: takes any integer.
        let words = unsafe { (self.functions().error_string)(result) };
        // SAFETY: NCCL does not read the communicator: what it gives is the last error of this process.
        let detail = unsafe { (self.functions().last_error)(std::ptr::null_mut()) };
        Err(NcclError::Call {
            operation,
            code: result,
            text: text(words).unwrap_or_else(|| "an error that it has no words for".to_owned()),
            detail: text(detail).unwrap_or_default(),
            is_remote: result == REMOTE_ERROR,
        })
    }
}

/// A string of NCCL's, on one line; absent where there is none.
fn text(words: *const c_char) -> Option<String> {
    if words.is_null() {
        return None;
    }
    // SAFETY: NCCL gave a pointer to a string that ends in 0, which stays until this thread's next call.
    let words = unsafe { CStr::from_ptr(words) }.to_string_lossy();
    let line = words.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(", ");
    Some(line).filter(|line| !line.is_empty())
}

/// `ncclGetVersion`'s number, of 2.9 or later: 22809 is 2.28.9.
fn version_text(version: u32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests;
