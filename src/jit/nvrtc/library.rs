//! The compiler's library: where it is looked for, and its functions.

use std::ffi::{CStr, c_char, c_int};
use std::path::Path;

use super::error::NvrtcError;
use crate::dylib::{Library, Places};

/// NVRTC's handle of a program.
pub(super) type Program = *mut std::ffi::c_void;

const PLACES: Places = Places {
    // The names of one version first: what `libnvrtc.so` is, depends on the machine.
    names: &["libnvrtc.so.13", "libnvrtc.so", "libnvrtc.so.12"],
    directories: &["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/opt/cuda/lib64"],
};

/// The functions that are used. Each is called with the library loaded: it is never unloaded.
pub(super) struct Functions {
    pub(super) version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    pub(super) error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    pub(super) create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    pub(super) compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    pub(super) destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    pub(super) log_size: Sized,
    pub(super) log: Filling,
    pub(super) cubin_size: Sized,
    pub(super) cubin: Filling,
    pub(super) ptx_size: Sized,
    pub(super) ptx: Filling,
    /// The file, or the name by which the loader found it.
    pub(super) found_as: String,
}

/// A function that tells the size of a result.
pub(super) type Sized = unsafe extern "C" fn(Program, *mut usize) -> c_int;
/// A function that writes a result of that size.
pub(super) type Filling = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// Loads the library: the one that `setting` names, and no other; else the first of the usual places.
pub(super) fn load(setting: Option<&str>) -> Result<Functions, NvrtcError> {
    let not_found = |tried| NvrtcError::NotFound { tried, setting: setting.map(str::to_owned) };
    let (library, path) = PLACES.load(setting).map_err(not_found)?;
    let functions = functions(library, path.display().to_string())?;
    open_builtins(&functions, &path);
    Ok(functions)
}

/// NVRTC loads `libnvrtc-builtins` by its bare name, which the loader finds only where it looks anyway. One that lies beside
/// a library named by its path is loaded here first: the loader then takes it for the one of that name.
fn open_builtins(functions: &Functions, library: &Path) {
    let Some(dir) = library.parent().filter(|dir| !dir.as_os_str().is_empty()) else { return };
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are places for one integer.
    if unsafe { (functions.version)(&raw mut major, &raw mut minor) } != 0 {
        return;
    }
    let path = dir.join(format!("libnvrtc-builtins.so.{major}.{minor}"));
    // SAFETY: a library without initialisers of note, from the directory of one that is loaded.
    if let Ok(builtins) = unsafe { Library::new(path) } {
        std::mem::forget(builtins);
    }
}

fn functions(library: &'static Library, found_as: String) -> Result<Functions, NvrtcError> {
    macro_rules! symbol {
        ($name:literal) => {
            // SAFETY: the types are those of nvrtc.h, unchanged since CUDA 11.2; the library is never unloaded.
            *unsafe { library.get($name) }
                .map_err(|_| NvrtcError::Lacks { library: found_as.clone(), function: $name })?
        };
    }
    Ok(Functions {
        version: symbol!("nvrtcVersion"),
        error_string: symbol!("nvrtcGetErrorString"),
        create: symbol!("nvrtcCreateProgram"),
        compile: symbol!("nvrtcCompileProgram"),
        destroy: symbol!("nvrtcDestroyProgram"),
        log_size: symbol!("nvrtcGetProgramLogSize"),
        log: symbol!("nvrtcGetProgramLog"),
        cubin_size: symbol!("nvrtcGetCUBINSize"),
        cubin: symbol!("nvrtcGetCUBIN"),
        ptx_size: symbol!("nvrtcGetPTXSize"),
        ptx: symbol!("nvrtcGetPTX"),
        found_as,
    })
}

impl Functions {
    /// NVRTC's words for a result.
    pub(super) fn text(&self, result: c_int) -> String {
        // SAFETY: takes any integer.
        let text = unsafe { (self.error_string)(result) };
        if text.is_null() {
            return format!("error {result}");
        }
        // SAFETY: a static string that ends in 0.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}
