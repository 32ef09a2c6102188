//! What tests of the JIT share.

use super::nvrtc::Compiler;
use super::request::KernelRequest;

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

/// What CI asks of every kernel: that it compiles without a warning, and that none of its threads touches local memory.
pub fn check_hot(compiler: &Compiler, request: &KernelRequest) -> Result<(), String> {
    let compiled = compiler.compile(request).map_err(|error| error.to_string())?;
    if let Some(usage) = compiled.usage.iter().find(|usage| usage.has_local_memory()) {
        return Err(format!("{} touches local memory: {usage:?}", request.describe()));
    }
    // The second is what the compiler says, as mere information, of products that wait for each other.
    if ["warning", "Potential Performance Loss"].iter().any(|word| compiled.log.contains(word)) {
        Err(format!("{}:\n{}", request.describe(), compiled.log))
    } else {
        Ok(())
    }
}
