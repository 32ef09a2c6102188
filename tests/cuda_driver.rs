//! The driver's door on machines without a GPU: no driver, one that lacks a function, one without devices, and one that shows
//! two. The drivers are stand-ins, compiled here, and `lockstep warmup` without `--arch` asks them what to compile for.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Every function that the door looks for, from its own list.
fn functions() -> Vec<String> {
    let source =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/library.rs")).expect("the door");
    let list = &source[source.find("const FUNCTIONS").expect("the list")..];
    let list = &list[..list.find("];").expect("its end")];
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// What a stand-in answers where the probe asks; everything else is an error. `DEVICES` devices of compute capability 9.0.
const ANSWERS: &str = r#"
#include <string.h>
int cuInit(unsigned flags) { return DEVICES == 0 ? 100 : INIT; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGetCount(int *count) { *count = DEVICES; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 1ull << 37; return 0; }
int cuDeviceGetName(char *name, int len, int device) { strncpy(name, "Stand-in GPU", len); return 0; }
int cuDeviceGetPCIBusId(char *id, int len, int device) { strncpy(id, "0000:19:00.0", len); return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? MAJOR : attribute == 76 ? 0 : 132;
    return 0;
}
int cuGetErrorString(int code, const char **text) { *text = "a stand-in's error"; return 0; }
"#;

struct Driver {
    dir: tempfile::TempDir,
}

impl Driver {
    /// A stand-in, without one function.
    fn new(defines: &[&str], without: Option<&str>) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let mut source = ANSWERS.to_owned();
        let names = functions().into_iter().chain(["cuEventElapsedTime".to_owned()]);
        for name in names.filter(|name| !ANSWERS.contains(&format!("int {name}("))) {
            source.push_str(&format!("int {name}(void) {{ return 999; }}\n"));
        }
        if let Some(without) = without {
            source = source.replace(&format!("int {without}("), &format!("int no_{without}("));
        }
        let file = dir.path().join("driver.c");
        fs::write(&file, source).expect("written");
        let mut command = Command::new("cc");
        command.args(["-shared", "-fPIC", "-w", "-o"]).arg(dir.path().join("libcuda.so.1")).arg(&file);
        command.args(defines.iter().map(|define| format!("-D{define}")));
        assert!(command.status().expect("cc, which MPI needs as well").success());
        Self { dir }
    }
}

/// `lockstep warmup` for the GPUs that it sees, with a driver on the path or none.
fn warmup(driver: Option<&Driver>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
    let cache: PathBuf = [env!("CARGO_TARGET_TMPDIR"), "unused-cache"].iter().collect();
    command.args(["warmup", "--model", "kimi-k3", "--json", "--cache-dir"]).arg(cache);
    // Nothing to compile with: what is compiled for shows in the message.
    command.env("LOCKSTEP_NVRTC", "/nowhere").env("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
    if let Some(driver) = driver {
        command.env("LD_LIBRARY_PATH", driver.dir.path());
    }
    command.output().expect("it runs")
}

#[track_caller]
fn says(output: &Output, needles: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    needles.iter().for_each(|needle| assert!(stderr.contains(needle), "lacks {needle:?}: {stderr}"));
    assert!(!stderr.contains("panicked"), "{stderr}");
}

#[test]
fn g5_g_a_driver_that_lacks_a_function_is_a_fact() {
    for without in ["cuGraphInstantiateWithFlags", "cuDeviceGetUuid_v2", "cuEventElapsedTime"] {
        let driver = Driver::new(&["DEVICES=2", "INIT=0", "MAJOR=9"], Some(without));
        says(&warmup(Some(&driver)), &["too old", without, "--arch sm_90a"]);
    }
}

#[test]
fn g2_no_visible_gpu_and_a_driver_that_does_not_start() {
    says(&warmup(Some(&Driver::new(&["DEVICES=0", "INIT=0", "MAJOR=9"], None))), &["no GPU is visible", "CUDA 12.4"]);
    // CUDA_ERROR_SYSTEM_DRIVER_MISMATCH.
    let broken = Driver::new(&["DEVICES=1", "INIT=803", "MAJOR=9"], None);
    says(&warmup(Some(&broken)), &["does not start", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "a stand-in's error"]);
}

#[test]
fn visible_gpus_say_what_is_compiled_for() {
    says(&warmup(Some(&Driver::new(&["DEVICES=2", "INIT=0", "MAJOR=9"], None))), &["quantise for sm_90a", "/nowhere"]);
    says(
        &warmup(Some(&Driver::new(&["DEVICES=2", "INIT=0", "MAJOR=7"], None))),
        &["Stand-in GPU has compute capability 7.0", "--arch"],
    );
}

#[test]
fn without_a_driver_nothing_panics() {
    if !Path::new("/proc/driver/nvidia").exists() {
        says(&warmup(None), &["no GPU is visible", "--arch sm_90a"]);
    }
}
