//! The driver's door on machines without a GPU: no driver, one that lacks a function, one without devices, and one that shows
//! two. The drivers are stand-ins, compiled here, and `lockstep warmup` without `--arch` asks them what to compile for.

use std::path::Path;
use std::process::{Command, Output};

use driver::Driver;

#[path = "ranks/support/driver.rs"]
mod driver;
#[path = "ranks/support/places.rs"]
mod places;

/// `lockstep warmup` for the GPUs that it sees, with a driver on the path or none.
fn warmup(driver: Option<&Driver>) -> Output {
    let mut command = Command::new(places::binary());
    let cache = places::temporary().join("unused-cache");
    command.args(["warmup", "--model", "kimi-k3", "--json", "--cache-dir"]).arg(cache);
    // Nothing to compile with: what is compiled for shows in the message.
    command.env("LOCKSTEP_NVRTC", "/nowhere").env("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
    if let Some(driver) = driver {
        command.env("LD_LIBRARY_PATH", driver.dir());
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

/// What tests on GPUs put before the machine's driver, here before a stand-in.
#[test]
fn a_driver_that_answers_otherwise_in_one_function() {
    let own = Driver::new(&["DEVICES=2", "INIT=0", "MAJOR=9"], None);
    let functions = "int cuDeviceGetAttribute(int *value, int attribute, int device) {
        int (*own)(int *, int, int) = real(\"cuDeviceGetAttribute\");
        return attribute == 75 ? (*value = 7, 0) : own(value, attribute, device);
    }";
    says(
        &warmup(Some(&Driver::in_front_of(&own.dir().join("libcuda.so.1"), functions))),
        &["Stand-in GPU has compute capability 7.0"],
    );
}

#[test]
fn visible_gpus_say_what_is_compiled_for() {
    says(&warmup(Some(&Driver::new(&["DEVICES=2", "INIT=0", "MAJOR=9"], None))), &["for sm_90a", "/nowhere"]);
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
