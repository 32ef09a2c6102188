//! What kernels take of a multiprocessor, read from the compiler's log.

use serde::{Deserialize, Serialize};

/// One kernel's use of registers and local memory, a thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Usage {
    /// Its name.
    pub kernel: String,
    /// Registers.
    pub num_registers: u32,
    /// Local memory for arrays that are no registers, in bytes.
    pub stack_bytes: u32,
    /// Registers written to local memory, in bytes.
    pub spill_store_bytes: u32,
    /// Registers read back, in bytes.
    pub spill_load_bytes: u32,
}

impl Usage {
    /// Whether it touches local memory, which a hot kernel must not.
    #[must_use]
    pub const fn has_local_memory(&self) -> bool {
        self.stack_bytes > 0 || self.spill_store_bytes > 0 || self.spill_load_bytes > 0
    }
}

/// The kernels of a log that `--ptxas-options=-v` asked for, in its order. Nothing where it is not of the known form, which
/// the caller takes for an error: silence is no proof that nothing spilled.
///
/// ```text
/// ptxas info    : Compiling entry function 'quantise' for 'sm_90a'
/// ptxas info    : Function properties for quantise
/// ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
/// ptxas info    : Used 47 registers, used 0 barriers
/// ```
pub(super) fn from_log(log: &str) -> Option<Vec<Usage>> {
    let mut usages = Vec::new();
    let mut lines = log.lines();
    while let Some(line) = lines.next() {
        let Some((_, rest)) = line.split_once("Compiling entry function '") else { continue };
        let kernel = rest.split('\'').next()?.to_owned();
        // Functions that are not inlined come in between, with a line of their own each: their stacks count as well.
        let (mut stack_bytes, mut spill_store_bytes, mut spill_load_bytes) = (0, 0, 0);
        let mut has_properties = false;
        let num_registers = loop {
            let line = lines.next()?;
            if line.contains(" bytes stack frame") {
                has_properties = true;
                stack_bytes += number_before(line, " bytes stack frame")?;
                spill_store_bytes += number_before(line, " bytes spill stores")?;
                spill_load_bytes += number_before(line, " bytes spill loads")?;
            } else if line.contains(": Used ") {
                break number_before(line, " registers")?;
            }
        };
        has_properties.then_some(())?;
        usages.push(Usage { kernel, num_registers, stack_bytes, spill_store_bytes, spill_load_bytes });
    }
    (!usages.is_empty()).then_some(usages)
}

fn number_before(line: &str, word: &str) -> Option<u32> {
    let before = &line[..line.find(word)?];
    let start = before.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    before[start..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'ok' for 'sm_90a'
ptxas info    : Function properties for ok
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
ptxas info    : Compile time = 1.867 ms
ptxas info    : Compiling entry function 'spill' for 'sm_90a'
ptxas info    : Function properties for spill
ptxas         .     256 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 38 registers, used 0 barriers, 256 bytes cumulative stack size
";

    #[test]
    fn reads_every_kernel() {
        let usages = from_log(LOG).expect("two kernels");
        assert_eq!(usages.len(), 2);
        assert!(!usages[0].has_local_memory() && usages[0].num_registers == 10, "{usages:?}");
        let spill = Usage {
            kernel: "spill".to_owned(),
            num_registers: 38,
            stack_bytes: 256,
            spill_store_bytes: 12,
            spill_load_bytes: 16,
        };
        assert_eq!(usages[1], spill);
        assert!(spill.has_local_memory());
    }

    #[test]
    fn a_log_of_another_form_is_no_proof() {
        assert_eq!(from_log(""), None);
        assert_eq!(from_log("ptxas info    : Used 10 registers"), None);
        let without_properties: String = LOG.lines().filter(|line| !line.contains("stack frame,")).collect();
        assert_eq!(from_log(&without_properties), None);
        assert_eq!(from_log(&LOG.replace("Used", "Took")), None);
    }
}
