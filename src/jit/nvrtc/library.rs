//! The compiler's library: where it is looked for, and its functions.

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};

use libloading::Library;

use super::error::NvrtcError;

/// NVRTC's handle of a program.
pub(super) type Program = *mut std::ffi::c_void;

/// Names that the system's loader is asked for, on `LD_LIBRARY_PATH` and in its own directories. Those of one version first:
/// what `libnvrtc.so` is, depends on the machine.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so", "libnvrtc.so.12"];

/// Where CUDA's installers put it.
const DIRECTORIES: [&str; 3] = ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/opt/cuda/lib64"];

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

/// What `LOCKSTEP_NVRTC` may name: the library, or the directory that it lies in.
fn of_setting(setting: &str) -> Vec<PathBuf> {
    let path = Path::new(setting);
    if path.is_dir() { NAMES.map(|name| path.join(name)).to_vec() } else { vec![path.to_path_buf()] }
}

/// Loads the library: the one that `setting` names, and no other; else the first of the usual places.
pub(super) fn load(setting: Option<&str>) -> Result<Functions, NvrtcError> {
    let candidates: Vec<PathBuf> = match setting {
        Some(setting) => of_setting(setting),
        None => {
            let in_directories = DIRECTORIES.iter().flat_map(|dir| NAMES.map(|name| Path::new(dir).join(name)));
            NAMES.iter().map(PathBuf::from).chain(in_directories).collect()
        }
    };
    let mut tried = Vec::new();
    for path in candidates {
        // SAFETY: loading runs the library's initialisers; it is NVIDIA's compiler, or what the user named as such.
        match unsafe { Library::new(&path) } {
            Ok(library) => {
                let functions = functions(library, path.display().to_string())?;
                open_builtins(&functions, &path);
                return Ok(functions);
            }
            Err(error) => tried.push(format!("{}: {}", path.display(), reason(&error, &path))),
        }
    }
    Err(NvrtcError::NotFound { tried, setting: setting.map(str::to_owned) })
}

/// The loader's own sentence, without the path that it repeats.
fn reason(error: &libloading::Error, path: &Path) -> String {
    let text = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    text.trim_start_matches(&format!("{}: ", path.display())).to_owned()
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

fn functions(library: Library, found_as: String) -> Result<Functions, NvrtcError> {
    macro_rules! symbol {
        ($name:literal) => {
            // SAFETY: the types are those of nvrtc.h, unchanged since CUDA 11.2; the library is leaked below.
            *unsafe { library.get($name) }
                .map_err(|_| NvrtcError::Lacks { library: found_as.clone(), function: $name })?
        };
    }
    let functions = Functions {
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
    };
    // Never unloaded: it registers handlers of its own, and functions outlive this call.
    std::mem::forget(library);
    Ok(functions)
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
