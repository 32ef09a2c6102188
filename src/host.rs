//! Facts about this process and host that Linux tells: peak memory, free memory. Reads `/proc` and nothing else.

use std::fs;

/// The largest resident set of this process so far, in bytes; absent where `/proc` doesn't say.
#[must_use]
pub fn peak_rss_bytes() -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:").map(|kib| kib * 1024)
}

/// Memory of this host that can be had without swapping, in bytes; absent where `/proc` doesn't say.
#[must_use]
pub fn free_memory_bytes() -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:").map(|kib| kib * 1024)
}

fn kib_field(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_kib_fields() {
        assert_eq!(kib_field("VmPeak:\t 12 kB\nVmHWM:\t    3456 kB\n", "VmHWM:"), Some(3456));
        assert_eq!(kib_field("VmHWM:\t    3456 pages\n", "VmHWM:"), None);
        assert!(peak_rss_bytes().is_some_and(|bytes| bytes > 1 << 20), "this process has a resident set");
    }
}
