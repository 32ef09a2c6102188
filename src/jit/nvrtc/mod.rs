//! The door to NVRTC, the compiler of kernels. Loaded when somebody compiles, never linked; needs no GPU.
//!
//! `cudarc` has a wrapper too: it panics where the library is missing, can't be told where it lies, and hands out PTX. Knows
//! nothing of caches and ranks.

mod error;
mod library;

use std::ffi::{CString, c_char, c_int};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::request::KernelRequest;
use super::usage::{Usage, from_log};
pub use error::NvrtcError;
use library::{Filling, Functions, Program, Sized};

/// Which build of a compiler: two of one version may make different code.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CompilerId(String);

impl CompilerId {
    /// A version with its build, such as `13.0.88` and `CL-36424714`.
    #[must_use]
    pub fn new(version: &str, build: &str) -> Self {
        Self(format!("{version} ({build})"))
    }

    /// What [`fmt::Display`] wrote.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// The version and build that PTX begins with:
    /// `// Compiler Build ID: CL-36424714` and `// Cuda compilation tools, release 13.0, V13.0.88`.
    fn from_ptx(ptx: &str) -> Option<Self> {
        let comment = |word: &str| {
            let line = ptx.lines().filter(|line| line.starts_with("//")).find(|line| line.contains(word))?;
            line.split_whitespace().last().map(str::to_owned)
        };
        let version = comment("Cuda compilation tools")?;
        Some(Self::new(version.trim_start_matches('V'), &comment("Compiler Build ID")?))
    }
}

impl fmt::Display for CompilerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Machine code with what is known of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Compiled {
    /// An ELF file for one architecture.
    pub cubin: Vec<u8>,
    /// Every kernel in it.
    pub usage: Vec<Usage>,
    /// What the compiler said: warnings, and what `usage` was read from.
    pub log: String,
    /// How long it took.
    pub elapsed: Duration,
}

/// A loaded NVRTC.
pub struct Compiler {
    functions: Functions,
    id: CompilerId,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").field("id", &self.id).field("library", &self.functions.found_as).finish()
    }
}

impl Compiler {
    /// Loads the compiler. `setting` is the value of `LOCKSTEP_NVRTC`: a library, or the directory that it lies in.
    ///
    /// # Errors
    /// If there is none, or it can't be used; the message says where it was looked for.
    pub fn load(setting: Option<&str>) -> Result<Self, NvrtcError> {
        let functions = library::load(setting)?;
        let program = Build::new(&functions, "", "empty.cu", &[])?;
        program.compile(&["--gpu-architecture=compute_80".to_owned()]).map_err(|result| NvrtcError::Call {
            library: functions.found_as.clone(),
            operation: "compiling an empty file",
            text: format!("{}: {}", functions.text(result), program.log().trim()),
        })?;
        let ptx = program.text(functions.ptx_size, functions.ptx, "reading PTX")?;
        let id = CompilerId::from_ptx(&ptx).ok_or_else(|| NvrtcError::Call {
            library: functions.found_as.clone(),
            operation: "reading the compiler's build from PTX",
            text: format!("it begins {:?}", ptx.lines().take(8).collect::<Vec<_>>()),
        })?;
        drop(program);
        Ok(Self { functions, id })
    }

    /// Which build it is.
    #[must_use]
    pub fn id(&self) -> &CompilerId {
        &self.id
    }

    /// Where it was found.
    #[must_use]
    pub fn library(&self) -> &str {
        &self.functions.found_as
    }

    /// Compiles a kernel.
    ///
    /// # Errors
    /// If the source is wrong, the architecture unknown to this compiler, or its log doesn't say what the kernels use.
    pub fn compile(&self, request: &KernelRequest) -> Result<Compiled, NvrtcError> {
        NUM_COMPILED.fetch_add(1, Ordering::Relaxed);
        let started = Instant::now();
        let headers: Vec<(&str, &str)> = request.source.headers.iter().map(|h| (h.name, h.text)).collect();
        // A fixed name: a file's own would go into the code's line information.
        let program = Build::new(&self.functions, request.source.main, "kernel.cu", &headers)?;
        let compiled = program.compile(&request.options());
        let log = program.log();
        if let Err(result) = compiled {
            if result == INVALID_OPTION && log.contains("gpu-architecture") {
                let compiler = format!("NVRTC {}", self.id);
                return Err(NvrtcError::Arch { compiler, arch: request.arch.name() });
            }
            let (text, compiler) = (self.functions.text(result), self.id.to_string());
            return Err(NvrtcError::Compile { request: request.describe(), text, compiler, log });
        }
        let cubin = program.bytes(self.functions.cubin_size, self.functions.cubin, "reading the machine code")?;
        let Some(usage) = from_log(&log) else {
            let compiler = self.id.to_string();
            return Err(NvrtcError::NoUsage { request: request.describe(), compiler, log });
        };
        Ok(Compiled { cubin, usage, log, elapsed: started.elapsed() })
    }
}

/// Compilations that this process has begun.
static NUM_COMPILED: AtomicU64 = AtomicU64::new(0);

/// How many kernels' sources this process has compiled, or tried to.
#[must_use]
pub fn num_compiled() -> u64 {
    NUM_COMPILED.load(Ordering::Relaxed)
}

/// `NVRTC_ERROR_INVALID_OPTION`.
const INVALID_OPTION: c_int = 5;

/// One program of NVRTC, with the texts that it may refer to.
struct Build<'a> {
    functions: &'a Functions,
    program: Program,
    _texts: Vec<CString>,
}

/// A text for C. What is embedded has no zero byte; were there one, the compiler would see the text up to it.
fn c_text(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}

impl<'a> Build<'a> {
    fn new(functions: &'a Functions, main: &str, name: &str, headers: &[(&str, &str)]) -> Result<Self, NvrtcError> {
        let (main, name) = (c_text(main), c_text(name));
        let names: Vec<CString> = headers.iter().map(|(name, _)| c_text(name)).collect();
        let texts: Vec<CString> = headers.iter().map(|(_, text)| c_text(text)).collect();
        let pointers = |list: &[CString]| list.iter().map(|text| text.as_ptr()).collect::<Vec<*const c_char>>();
        let (name_pointers, text_pointers) = (pointers(&names), pointers(&texts));
        let num_headers = c_int::try_from(headers.len()).unwrap_or(c_int::MAX);
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: `program` is a place for one handle; every text ends in 0, there are as many names and texts as said, and
        // all of them live as long as the program.
        let result = unsafe {
            (functions.create)(
                &raw mut program,
                main.as_ptr(),
                name.as_ptr(),
                num_headers,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        let texts = names.into_iter().chain(texts).chain([main, name]).collect();
        let build = Self { functions, program, _texts: texts };
        build.check(result, "making a program")?;
        Ok(build)
    }

    fn check(&self, result: c_int, operation: &'static str) -> Result<(), NvrtcError> {
        if result == 0 {
            return Ok(());
        }
        let library = self.functions.found_as.clone();
        Err(NvrtcError::Call { library, operation, text: self.functions.text(result) })
    }

    fn compile(&self, options: &[String]) -> Result<(), c_int> {
        let options: Vec<CString> = options.iter().map(|option| c_text(option)).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let num_options = c_int::try_from(pointers.len()).unwrap_or(c_int::MAX);
        // SAFETY: the program lives, and there are as many options as said, each ending in 0.
        match unsafe { (self.functions.compile)(self.program, num_options, pointers.as_ptr()) } {
            0 => Ok(()),
            result => Err(result),
        }
    }

    /// The log; empty where it can't be read, which is no reason to hide what went wrong.
    fn log(&self) -> String {
        self.text(self.functions.log_size, self.functions.log, "reading the log").unwrap_or_default()
    }

    fn text(&self, size: Sized, fill: Filling, operation: &'static str) -> Result<String, NvrtcError> {
        let mut bytes = self.bytes(size, fill, operation)?;
        bytes.truncate(bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len()));
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn bytes(&self, size: Sized, fill: Filling, operation: &'static str) -> Result<Vec<u8>, NvrtcError> {
        let mut num_bytes = 0_usize;
        // SAFETY: the program lives, and `num_bytes` is a place for one size.
        self.check(unsafe { size(self.program, &raw mut num_bytes) }, operation)?;
        let mut bytes = vec![0_u8; num_bytes];
        // SAFETY: the program lives, and there is room for as many bytes as it said.
        self.check(unsafe { fill(self.program, bytes.as_mut_ptr().cast()) }, operation)?;
        Ok(bytes)
    }
}

impl Drop for Build<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: made by `new` and destroyed here alone.
            let _ = unsafe { (self.functions.destroy)(&raw mut self.program) };
        }
    }
}

#[cfg(test)]
mod tests;
