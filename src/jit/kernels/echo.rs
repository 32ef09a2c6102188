//! Experts that give back what they get: `kernels/echo.cu`.

use bytemuck::{Pod, Zeroable};

use super::super::arch::Arch;
use super::super::request::KernelRequest;
use super::super::source::{BASE, KernelSource};

const SOURCE: KernelSource =
    KernelSource { name: "echo", main: include_str!("../../../kernels/echo.cu"), headers: &[BASE] };

/// The argument; see the struct of that name in `kernels/echo.cu`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's source says what each is")]
pub struct EchoArgs {
    pub tokens: u64,
    pub row_token: u64,
    pub rows: u64,
    pub live_rows: u64,
    pub num_rows: u64,
}

/// For tokens of so many values.
#[derive(Debug, Clone, Copy)]
pub struct EchoKernel {
    /// A multiple of 16.
    pub hidden: u32,
}

impl EchoKernel {
    /// Its name.
    pub const ECHO: &'static str = "echo_tokens";

    /// What to compile.
    #[must_use]
    pub fn request(self, arch: Arch) -> KernelRequest {
        KernelRequest::new(SOURCE, arch).with_arguments::<EchoArgs>().with("HIDDEN", self.hidden)
    }
}
