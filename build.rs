//! What tells builds of one version apart: a digest of the sources, with target and profile.

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let mut files = vec![root.join("Cargo.toml"), root.join("Cargo.lock")];
    collect(&root.join("src"), &mut files);
    collect(&root.join("kernels"), &mut files);
    files.sort();
    let mut digest = Fnv::default();
    for file in &files {
        let name = file.strip_prefix(&root).expect("below the root");
        digest.add(name.to_string_lossy().as_bytes());
        digest.add(&fs::read(file).unwrap_or_default());
    }
    for watched in ["src", "kernels", "Cargo.toml", "Cargo.lock", "build.rs"] {
        println!("cargo::rerun-if-changed={watched}");
    }
    println!("cargo::rustc-env=LOCKSTEP_BUILD_REVISION={:016x}", digest.0);
    for (name, variable) in [("TARGET", "LOCKSTEP_BUILD_TARGET"), ("PROFILE", "LOCKSTEP_BUILD_PROFILE")] {
        println!("cargo::rustc-env={variable}={}", env::var(name).unwrap_or_default());
    }
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() { collect(&path, files) } else { files.push(path) }
    }
}

/// FNV-1a: it tells honest builds apart and needs no dependency here.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    /// Adds bytes with their length, so that two files can't trade an end for a beginning.
    fn add(&mut self, bytes: &[u8]) {
        for byte in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}
