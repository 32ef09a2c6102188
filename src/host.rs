//! Facts about this process and host that Linux tells: memory, addresses, the GPU driver, how MPI can be started. Reads `/proc`,
//! and tries whether a directory can be written.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
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

/// Whether the Open MPI that this process has loaded can be started over PMI-1 or PMI-2, by its plug-ins; absent where it is
/// another library or its plug-ins are not seen.
#[must_use]
pub fn open_mpi_speaks_pmi() -> Option<bool> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let library =
        maps.lines().find_map(|line| Some(&line[line.find('/')?..]).filter(|path| path.contains("/libmpi.so")))?;
    let lib = fs::canonicalize(library).ok()?.parent()?.to_path_buf();
    // Where it installs them itself, and where Debian and Ubuntu do.
    ["openmpi", "openmpi/lib/openmpi3", "openmpi3"].into_iter().find_map(|dir| {
        let plugins = fs::read_dir(lib.join(dir)).ok()?.flatten();
        speaks_pmi(&plugins.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>())
    })
}

/// Number and name of the process that started this one; absent where `/proc` doesn't say.
#[must_use]
pub fn parent() -> Option<(i32, String)> {
    let pid = i32::try_from(std::os::unix::process::parent_id()).ok()?;
    Some((pid, fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim_end().to_owned()))
}

/// Addresses by which other hosts may reach this one; none where `/proc` doesn't say.
#[must_use]
pub fn addresses() -> Vec<IpAddr> {
    let read = |name: &str| fs::read_to_string(format!("/proc/self/net/{name}")).unwrap_or_default();
    ipv4_addresses(&read("fib_trie")).into_iter().chain(ipv6_addresses(&read("if_inet6"))).collect()
}

/// Of the routes the leaves that are this host's own: a line `|-- 10.77.0.1`, and `/32 host LOCAL` below it.
fn ipv4_addresses(routes: &str) -> Vec<IpAddr> {
    let lines = routes.lines().zip(routes.lines().skip(1)).filter(|(_, below)| below.trim() == "/32 host LOCAL");
    let leaves = lines.filter_map(|(line, _)| line.trim().strip_prefix("|-- ")?.parse::<Ipv4Addr>().ok());
    let mut addresses: Vec<IpAddr> = leaves.filter(|address| !address.is_loopback()).map(IpAddr::from).collect();
    // They stand in the main table and in that of local routes.
    addresses.sort_unstable();
    addresses.dedup();
    addresses
}

/// Lines of an address in 32 hexadecimal digits, its interface, the length of its network, its scope (00: everywhere), flags,
/// and the interface's name.
fn ipv6_addresses(interfaces: &str) -> Vec<IpAddr> {
    let address = |line: &str| {
        let mut words = line.split_whitespace();
        let bits = u128::from_str_radix(words.next()?, 16).ok()?;
        (words.nth(2)? == "00").then(|| Ipv6Addr::from_bits(bits).into())
    };
    interfaces.lines().filter_map(address).collect()
}

/// Plug-ins `mca_pmix_s1.so` and `mca_pmix_s2.so` stand for PMI-1 and PMI-2. Where there is none for PMIx at all, they are
/// inside the library.
fn speaks_pmi(plugins: &[String]) -> Option<bool> {
    let mut pmix = plugins.iter().filter(|name| name.starts_with("mca_pmix_") && name.ends_with(".so")).peekable();
    pmix.peek()?;
    Some(pmix.any(|name| ["mca_pmix_s1.so", "mca_pmix_s2.so"].contains(&name.as_str())))
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
    fn plug_ins_say_whether_open_mpi_speaks_pmi() {
        let of = |names: &[&str]| speaks_pmi(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&["mca_ess_pmi.so", "mca_pmix_ext3x.so", "mca_pmix_isolated.so"]), Some(false));
        assert_eq!(of(&["mca_pmix_ext3x.so", "mca_pmix_s2.so"]), Some(true));
        assert_eq!(of(&["mca_ess_pmi.so"]), None, "a build without plug-ins");
    }

    #[test]
    fn finds_the_addresses_of_this_host() {
        let routes = "Main:\n  +-- 10.77.0.0/24 2 0 2\n     |-- 10.77.0.0\n        /24 link UNICAST\n     |-- 10.77.0.1\n        \
                      /32 host LOCAL\n     |-- 127.0.0.1\n        /32 host LOCAL\nLocal:\n     |-- 10.77.0.1\n        \
                      /32 host LOCAL\n";
        assert_eq!(ipv4_addresses(routes), ["10.77.0.1".parse::<IpAddr>().unwrap()]);
        let interfaces = "00000000000000000000000000000001 01 80 10 80       lo\n\
                          fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n\
                          fd000000000000000000000000000002 04 40 00 82     eth0\n";
        assert_eq!(ipv6_addresses(interfaces), ["fd00::2".parse::<IpAddr>().unwrap()]);
        assert!(parent().is_some_and(|(pid, name)| pid > 0 && !name.is_empty()), "a test runner has started this");
    }

    #[test]
    fn reads_kib_fields() {
        assert_eq!(kib_field("VmPeak:\t 12 kB\nVmHWM:\t    3456 kB\n", "VmHWM:"), Some(3456));
        assert_eq!(kib_field("VmHWM:\t    3456 pages\n", "VmHWM:"), None);
        assert!(peak_rss_bytes().is_some_and(|bytes| bytes > 1 << 20), "this process has a resident set");
    }
}
