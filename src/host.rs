//! Facts about this process and host that Linux tells: memory, the GPU driver. Reads `/proc`, and tries whether a directory can be written.

use std::fs;
use std::path::Path;

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

/// Whether a file can be made in `dir`, or in the nearest directory above it that there is. Leaves nothing behind.
#[must_use]
pub fn can_write(dir: &str) -> bool {
    let nearest = Path::new(dir).ancestors().find(|dir| dir.is_dir());
    nearest.is_some_and(|dir| tempfile::tempfile_in(dir).is_ok())
}

/// The version of the NVIDIA driver that this host runs; absent where it runs none.
#[must_use]
pub fn nvidia_driver() -> Option<String> {
    driver_version(&fs::read_to_string("/proc/driver/nvidia/version").ok()?)
}

/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue ...`: the first word that begins with a digit.
fn driver_version(text: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix("NVRM version:"))?;
    let is_version = |word: &&str| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.');
    line.split_whitespace().find(is_version).map(str::to_owned)
}

fn kib_field(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_drivers_version() {
        let text =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 13.3\n";
        assert_eq!(driver_version(text).as_deref(), Some("580.95.05"));
        assert_eq!(driver_version("GCC version: 13.3\n"), None);
    }

    #[test]
    fn reads_kib_fields() {
        assert_eq!(kib_field("VmPeak:\t 12 kB\nVmHWM:\t    3456 kB\n", "VmHWM:"), Some(3456));
        assert_eq!(kib_field("VmHWM:\t    3456 pages\n", "VmHWM:"), None);
        assert!(peak_rss_bytes().is_some_and(|bytes| bytes > 1 << 20), "this process has a resident set");
    }
}
