//! What tests of the JIT share.

use super::nvrtc::Compiler;

/// The compiler of the machine that tests run on: named by `LOCKSTEP_NVRTC`, or where the loader finds it. Where there is
/// none, the test says so and passes, unless `LOCKSTEP_TEST_NVRTC=required` (CI) makes that a failure.
pub fn compiler() -> Option<Compiler> {
    let setting = std::env::var("LOCKSTEP_NVRTC").ok();
    match Compiler::load(setting.as_deref()) {
        Ok(compiler) => Some(compiler),
        Err(error) => {
            let required = std::env::var("LOCKSTEP_TEST_NVRTC").is_ok_and(|value| value == "required");
            assert!(!required, "{error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}
