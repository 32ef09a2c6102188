//! What goes wrong between this process and its GPU.

use std::ffi::CStr;

use cudarc::driver::sys;

use super::library::Absence;
use crate::exit::{Classify, Exit};

/// Why a call of this door failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// No driver library can be loaded.
    #[error("no CUDA driver: libcuda.so.1 can't be loaded; install the NVIDIA driver, or choose `device: cpu`")]
    NoDriver,
    /// The driver lacks functions.
    #[error("the CUDA driver is too old: it lacks {}; update it", missing.join(", "))]
    OldDriver {
        /// Names of the functions.
        missing: Vec<String>,
    },
    /// There is no such device.
    #[error("no GPU {ordinal} is visible to this process: it sees {num_devices}; look at CUDA_VISIBLE_DEVICES")]
    NoDevice {
        /// The device asked for.
        ordinal: u32,
        /// Devices there are.
        num_devices: u32,
    },
    /// An allocation does not fit.
    #[error(
        "GPU {ordinal} has no room for {needed_bytes} bytes: {free_bytes} of {total_bytes} are free; lower \
         `num_max_tokens_per_rank`, use more ranks, or see who else uses it"
    )]
    OutOfMemory {
        /// The device.
        ordinal: u32,
        /// Bytes asked for.
        needed_bytes: u64,
        /// Bytes free when it failed.
        free_bytes: u64,
        /// Bytes of the device.
        total_bytes: u64,
    },
    /// Pinned host memory can't be had.
    #[error("the host can't pin {needed_bytes} bytes for GPU {ordinal} ({code}); raise `ulimit -l` or free memory")]
    OutOfPinnedMemory {
        /// The device.
        ordinal: u32,
        /// Bytes asked for.
        needed_bytes: u64,
        /// The driver's name for it.
        code: String,
    },
    /// A copy or a view outside of a buffer.
    #[error("{operation}: elements {start}..{end} of a buffer of {len}")]
    OutOfBounds {
        /// What was asked for.
        operation: &'static str,
        /// First element.
        start: usize,
        /// Behind the last.
        end: usize,
        /// Elements there are.
        len: usize,
    },
    /// A module without that function.
    #[error("the module {module} has no kernel {function}; its source has to declare it as extern \"C\" __global__")]
    NoFunction {
        /// Name of the module.
        module: String,
        /// Name of the kernel.
        function: String,
    },
    /// The driver refuses machine code.
    #[error("GPU {ordinal} refuses the machine code of {module} ({code}: {text}); it was compiled for {wanted}")]
    Module {
        /// The device.
        ordinal: u32,
        /// Name of the module.
        module: String,
        /// The driver's name for it.
        code: String,
        /// The driver's sentence.
        text: String,
        /// What was passed as its architecture.
        wanted: String,
    },
    /// More shared memory than a block can have.
    #[error(
        "the kernel {function} wants {wanted_bytes} bytes of dynamic shared memory; GPU {ordinal} gives a block {limit_bytes}"
    )]
    SharedMemory {
        /// The device.
        ordinal: u32,
        /// Name of the kernel.
        function: String,
        /// Bytes asked for.
        wanted_bytes: u32,
        /// Bytes a block can have, what the kernel holds statically taken off.
        limit_bytes: u32,
    },
    /// A call failed; also one that failed asynchronously before it.
    #[error("{operation} on GPU {ordinal}: {code}: {text}")]
    Driver {
        /// What was being done.
        operation: &'static str,
        /// The device.
        ordinal: u32,
        /// The driver's name for it.
        code: String,
        /// The driver's sentence.
        text: String,
    },
}

impl Classify for CudaError {
    fn exit(&self) -> Exit {
        match self {
            Self::OutOfBounds { .. } | Self::NoFunction { .. } | Self::SharedMemory { .. } => Exit::Bug,
            _ => Exit::Environment,
        }
    }
}

impl From<Absence> for CudaError {
    fn from(absence: Absence) -> Self {
        match absence {
            Absence::NoLibrary => Self::NoDriver,
            Absence::Lacks(missing) => Self::OldDriver { missing },
        }
    }
}

/// The driver's name of a result.
pub(super) fn code(result: sys::CUresult) -> String {
    format!("{result:?}")
}

/// The driver's sentence about a result.
pub(super) fn text(result: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: `text` is a place for one pointer.
    let found = unsafe { sys::cuGetErrorString(result, &raw mut text) };
    if found != sys::CUresult::CUDA_SUCCESS || text.is_null() {
        return "an error that the driver has no words for".to_owned();
    }
    // SAFETY: the driver gave a pointer to a static string that ends in 0.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Turns a result into an error that says what was being done, where.
pub(super) fn check(result: sys::CUresult, operation: &'static str, ordinal: u32) -> Result<(), CudaError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(CudaError::Driver { operation, ordinal, code: code(result), text: text(result) })
}
