//! What goes wrong between a kernel's source and its machine code.

use crate::exit::{Classify, Exit};

/// Why there is no machine code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NvrtcError {
    /// No compiler.
    #[error(
        "no NVRTC, which kernels are compiled with: {}; put its directory on LD_LIBRARY_PATH, or name it in LOCKSTEP_NVRTC \
         (`pip install nvidia-cuda-nvrtc` brings it as nvidia/cu13/lib){}",
        tried.join("; "),
        if setting.is_some() { "; LOCKSTEP_NVRTC is set, so no other place was looked at" } else { "" }
    )]
    NotFound {
        /// Every place with the loader's reason.
        tried: Vec<String>,
        /// The value of `LOCKSTEP_NVRTC`.
        setting: Option<String>,
    },
    /// A library that is not the compiler, or too old a one.
    #[error("{library} lacks {function}; a libnvrtc of CUDA 12 or newer is needed")]
    Lacks {
        /// Where it was found.
        library: String,
        /// What it lacks.
        function: &'static str,
    },
    /// The compiler doesn't know the architecture.
    #[error("{compiler} can't compile for {arch}; a newer NVRTC is needed (LOCKSTEP_NVRTC names one)")]
    Arch {
        /// The compiler.
        compiler: String,
        /// The architecture.
        arch: &'static str,
    },
    /// The source is wrong.
    #[error("{request} does not compile ({text}), by NVRTC {compiler}:\n{log}")]
    Compile {
        /// What was compiled.
        request: String,
        /// NVRTC's words.
        text: String,
        /// The compiler.
        compiler: String,
        /// The compiler's log.
        log: String,
    },
    /// The log doesn't say what the kernels use.
    #[error("NVRTC {compiler} does not say what {request} uses of registers and local memory; its log is:\n{log}")]
    NoUsage {
        /// What was compiled.
        request: String,
        /// The compiler.
        compiler: String,
        /// The compiler's log.
        log: String,
    },
    /// Something else went wrong in the library.
    #[error("NVRTC from {library}: {operation}: {text}")]
    Call {
        /// Where it was found.
        library: String,
        /// What was being done.
        operation: &'static str,
        /// NVRTC's words.
        text: String,
    },
}

impl Classify for NvrtcError {
    fn exit(&self) -> Exit {
        match self {
            Self::Compile { .. } => Exit::Bug,
            _ => Exit::Environment,
        }
    }
}
