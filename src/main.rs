//! The `lockstep` program: everything is in the library's `cli`.

use std::process::ExitCode;

fn main() -> ExitCode {
    lockstep::cli::main(std::env::args_os())
}
