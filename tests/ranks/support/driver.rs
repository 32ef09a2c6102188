//! Stand-ins for the CUDA driver, compiled here: with devices or none, and without a function where asked.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use super::places;

/// Every function that the door looks for, from its own list.
fn functions() -> Vec<String> {
    let source = fs::read_to_string(places::of_project("src/cuda/library.rs")).expect("the door");
    let list = &source[source.find("const FUNCTIONS").expect("the list")..];
    let list = &list[..list.find("];").expect("its end")];
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// What a stand-in answers where the probe asks; everything else is an error. `DEVICES` devices of each host, as
/// `CUDA_VISIBLE_DEVICES` shows them.
const ANSWERS: &str = r#"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* The number of the device that is seen as `ordinal`, or with -1 how many are seen. */
static int seen(int ordinal) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    int count = 0;
    if (!list) return ordinal < 0 ? DEVICES : ordinal;
    for (; *list >= '0' && *list - '0' < DEVICES; list += list[1] == ',' ? 2 : 1)
        if (count++ == ordinal) return *list - '0';
    return count;
}
int cuInit(unsigned flags) { return seen(-1) == 0 ? 100 : INIT; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGetCount(int *count) { *count = seen(-1); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 1ull << 37; return 0; }
int cuDeviceGetName(char *name, int len, int device) { strncpy(name, "Stand-in GPU", len); return 0; }
int cuDeviceGetPCIBusId(char *id, int len, int device) { strncpy(id, "0000:19:00.0", len); return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) {
    memset(uuid, 0, 16);
    gethostname(uuid, 15);
    uuid[15] = seen(device);
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? MAJOR : attribute == 76 ? 0 : 132;
    return 0;
}
int cuGetErrorString(int code, const char **text) { *text = "a stand-in's error"; return 0; }
"#;

/// A library to put on `LD_LIBRARY_PATH`.
pub struct Driver {
    dir: tempfile::TempDir,
}

impl Driver {
    /// A stand-in, without one function.
    pub fn new(defines: &[&str], without: Option<&str>) -> Self {
        let dir = places::temporary_dir();
        let mut source = ANSWERS.to_owned();
        let names = functions().into_iter().chain(["cuEventElapsedTime".to_owned()]);
        for name in names.filter(|name| !ANSWERS.contains(&format!("int {name}("))) {
            source.push_str(&format!("int {name}(void) {{ return 999; }}\n"));
        }
        if let Some(without) = without {
            source = source.replace(&format!("int {without}("), &format!("int no_{without}("));
        }
        compile(dir.path(), &source, |command| {
            command.arg("-Wl,-soname,libcuda.so.1").args(defines.iter().map(|define| format!("-D{define}")));
        });
        Self { dir }
    }

    /// A driver behind functions that answer in its place. They have `real(name)` for its own.
    pub fn in_front_of(real: &Path, functions: &str) -> Self {
        let dir = places::temporary_dir();
        let head = "#define _GNU_SOURCE\n#include <dlfcn.h>\n#define real(name) dlsym(RTLD_NEXT, name)\n";
        compile(dir.path(), &format!("{head}{functions}"), |command| {
            // NOTE: an RPATH, which comes before LD_LIBRARY_PATH, and no name of its own: that is the driver's, which the
            // loader would take for this.
            let path = format!("-Wl,--disable-new-dtags,-rpath,{}", real.parent().expect("a directory").display());
            command.args(["-Wl,--no-as-needed", &path]).arg(real);
        });
        Self { dir }
    }

    /// The directory that it lies in.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// Compiles the library into a directory, under both names that it is looked for by.
fn compile(dir: &Path, source: &str, options: impl FnOnce(&mut Command)) {
    let file = dir.join("driver.c");
    fs::write(&file, source).expect("written");
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-w", "-o"]).arg(dir.join("libcuda.so.1")).arg(&file);
    options(&mut command);
    assert!(command.status().expect("cc, which MPI needs as well").success());
    symlink("libcuda.so.1", dir.join("libcuda.so")).expect("linked");
}
