//! The driver library: whether it is there, and whether it has every function that this door calls.
//!
//! `cudarc` looks functions up one by one, at their first use, and panics where one is missing. So all of them are looked
//! up here, once, before the first is used; a driver too old for one of them is then a value that can be printed.

use std::ffi::{c_char, c_int};
use std::sync::OnceLock;

use cudarc::driver::sys;
use libloading::Library;

/// Every function of the driver that this door calls through `cudarc`. A test holds the list to the sources.
const FUNCTIONS: &[&str] = &[
    "cuCtxGetStreamPriorityRange",
    "cuCtxSetCurrent",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventRecordWithFlags",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuIpcCloseMemHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// `cuEventElapsedTime`, which CUDA 12.8 renamed.
type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// A driver that has all that is needed.
pub(super) struct Api {
    pub(super) elapsed_time: ElapsedTime,
}

/// Why there is no driver to call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Absence {
    /// No library of any of its names can be loaded.
    NoLibrary,
    /// The library lacks functions.
    Lacks(Vec<String>),
}

/// The driver of this process, looked for once.
pub(super) fn api() -> Result<&'static Api, Absence> {
    static API: OnceLock<Result<Api, Absence>> = OnceLock::new();
    API.get_or_init(find).as_ref().map_err(Clone::clone)
}

/// Looks for the library in the order of `cudarc`, so that both find the same one.
fn find() -> Result<Api, Absence> {
    let names = ["cuda", "nvcuda"].into_iter().flat_map(cudarc::get_lib_name_candidates);
    // SAFETY: loading runs the library's initialisers; the names are those of the CUDA driver alone.
    let library = names.into_iter().find_map(|name| unsafe { Library::new(name) }.ok()).ok_or(Absence::NoLibrary)?;
    let mut missing: Vec<String> =
        FUNCTIONS.iter().filter(|name| !has(&library, name)).map(|name| (*name).to_owned()).collect();
    let elapsed_time = ["cuEventElapsedTime_v2", "cuEventElapsedTime"].into_iter().find_map(|name| {
        // SAFETY: both versions have this type; the symbol is used only while the library, leaked below, is loaded.
        unsafe { library.get::<ElapsedTime>(name) }.ok().map(|symbol| *symbol)
    });
    // Never unloaded: drivers start threads of their own.
    std::mem::forget(library);
    match elapsed_time {
        Some(elapsed_time) if missing.is_empty() => Ok(Api { elapsed_time }),
        Some(_) => Err(Absence::Lacks(missing)),
        None => {
            missing.push("cuEventElapsedTime".to_owned());
            Err(Absence::Lacks(missing))
        }
    }
}

fn has(library: &Library, name: &str) -> bool {
    // SAFETY: the symbol is looked up and not called.
    unsafe { library.get::<unsafe extern "C" fn(*mut c_char) -> c_int>(name) }.is_ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// The functions called as `sys::cu...(` in this directory and below.
    fn called() -> BTreeSet<String> {
        let mut dirs = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda")];
        let mut files = Vec::new();
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir).expect("the sources") {
                let path = entry.expect("an entry").path();
                if path.is_dir() { dirs.push(path) } else { files.push(path) }
            }
        }
        let mut called = BTreeSet::new();
        for path in files {
            let text = std::fs::read_to_string(path).expect("text");
            for (at, _) in text.match_indices("sys::cu") {
                let rest = &text[at + 5..];
                let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
                if rest[end..].starts_with('(') {
                    called.insert(rest[..end].to_owned());
                }
            }
        }
        called
    }

    #[test]
    fn every_function_called_is_looked_up_first() {
        let listed: BTreeSet<String> = FUNCTIONS.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(called(), listed, "left: called, right: FUNCTIONS");
        assert_eq!(FUNCTIONS.len(), listed.len(), "one line each");
    }

    #[test]
    fn asking_never_panics() {
        if let Err(Absence::Lacks(missing)) = api() {
            assert!(!missing.is_empty());
        }
        assert_eq!(api().is_ok(), api().is_ok());
    }
}
