//! The shell launchers: what they would run, what they refuse, what they pass through.
#![expect(clippy::unwrap_used, reason = "a test that cannot start its command has failed")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn script(name: &str) -> Command {
    let mut command = Command::new(root().join("launch").join(name));
    for (variable, _) in std::env::vars_os() {
        let name = variable.to_string_lossy();
        if name.starts_with("LOCKSTEP_") || name.starts_with("SLURM_") {
            command.env_remove(variable);
        }
    }
    command
}

/// What takes ranks to hosts; both have one set of options.
const LAUNCHERS: [&str; 2] = ["mpirun.sh", "srun.sh"];

fn output(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

/// The command that would run, without the assignments, which depend on user and machine.
fn dry_run(args: &[&str]) -> String {
    let (code, stdout, stderr) = output(script("mpirun.sh").args(["--dry-run", "--binary", "lockstep"]).args(args));
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(stdout.lines().count(), 1, "{stdout}");
    let start = stdout.find("mpirun ").unwrap();
    stdout[start..].trim_end().to_owned()
}

#[test]
fn both_spellings_of_an_option_are_one() {
    let wanted = "mpirun -n 3 --oversubscribe --bind-to none lockstep run --moe-backend=simd --deployment=a\\ b.yaml --checkpoint c";
    let separate = ["--ranks", "3", "--moe-backend", "simd", "--deployment", "a b.yaml", "run", "--checkpoint", "c"];
    let joined = ["--ranks=3", "--moe-backend=simd", "--deployment=a b.yaml", "run", "--checkpoint", "c"];
    assert_eq!(dry_run(&separate), wanted);
    assert_eq!(dry_run(&joined), wanted);
}

#[test]
fn what_follows_the_command_is_lockstep_s() {
    assert_eq!(
        dry_run(&["verify", "--ranks", "--dry-run", "--help"]),
        "mpirun -n 4 --oversubscribe --bind-to none lockstep verify --ranks --dry-run --help"
    );
}

#[test]
fn hosts_are_handed_to_mpirun() {
    let line = dry_run(&["--ranks", "8", "--hosts", "a:4,b:4", "--mpi-arg", "--map-by", "--mpi-arg=node", "run"]);
    let wanted = "mpirun -n 8 --host a:4\\,b:4 --bind-to none -x LOCKSTEP_CACHE_DIR --map-by node lockstep run";
    assert_eq!(line, wanted);
}

#[test]
fn variables_reach_all_ranks() {
    let mut command = script("mpirun.sh");
    command.args(["--dry-run", "--binary", "lockstep", "run"]);
    command.env("LOCKSTEP_STEP_S", "5").env("LOCKSTEP_BACKEND", "simd").env("OTHER", "1");
    let (_, stdout, _) = output(&mut command);
    assert!(stdout.contains("-x LOCKSTEP_BACKEND -x LOCKSTEP_STEP_S "), "{stdout}");
    assert!(!stdout.contains("OTHER"), "{stdout}");
}

#[test]
fn usage_errors_end_with_2_and_name_the_option() {
    for (args, named) in [
        (&[][..], "no command"),
        (&["--ranks"], "--ranks needs a value"),
        (&["--ranks="], "--ranks needs a value"),
        (&["--ranks", "--dry-run", "run"], "--ranks needs a value, found the option --dry-run"),
        (&["--moe-backend", "", "run"], "--moe-backend needs a value"),
        (&["--cache-dir"], "--cache-dir needs a value"),
        (&["--ranks", "0", "run"], "--ranks takes a whole number of at least 1, found 0"),
        (&["--ranks", "two", "run"], "found two"),
        (&["--ranks", "6", "--ranks-per-node", "4", "run"], "a multiple of --ranks-per-node"),
        (&["--rank", "2", "run"], "unknown option --rank"),
        (&["--dry-run=yes", "run"], "--dry-run takes no value"),
        (&["--hosts", "a", "--hostfile", "b", "run"], "not both"),
        (&["--hostfile", "/nowhere", "run"], "/nowhere"),
        (&["--dry-run", "--ranks=5", "--hosts", "a:2,b:2", "run"], "has room for 4"),
    ] {
        for launcher in LAUNCHERS {
            let (code, stdout, stderr) = output(script(launcher).args(args));
            assert_eq!(code, 2, "{launcher} {args:?}: {stderr}");
            assert!(stderr.contains(named), "{launcher} {args:?}: {stderr}");
            assert!(stderr.starts_with(&format!("{launcher}: error: ")), "{stderr}");
            assert!(stdout.is_empty() && stderr.lines().count() == 1, "{launcher} {args:?}: one line: {stderr}");
        }
    }
}

#[test]
fn a_missing_program_is_the_environment_s_fault() {
    for launcher in LAUNCHERS {
        let (code, _, stderr) = output(script(launcher).args(["--binary", "/nowhere/lockstep", "run"]));
        assert_eq!(code, 3, "{launcher}: {stderr}");
        assert!(stderr.contains("cargo build --release"), "{launcher}: {stderr}");
    }
}

#[test]
fn help_lists_every_option() {
    let source = fs::read_to_string(root().join("launch/launcher.sh")).unwrap();
    // The line of the option loop that lists what takes a value.
    let listed = source.lines().find(|line| line.trim_start().starts_with("--ranks | ")).unwrap();
    let mut options: Vec<&str> = listed.trim().trim_end_matches(')').split(" | ").collect();
    options.extend(["--dry-run", "--help"]);
    assert!(options.len() >= 11, "{options:?}");
    for launcher in LAUNCHERS {
        let (code, stdout, _) = output(script(launcher).arg("--help"));
        assert_eq!(code, 0);
        assert!(stdout.starts_with(&format!("Usage: launch/{launcher} ")), "{stdout}");
        assert!(stdout.lines().all(|line| line.len() <= 128), "{stdout}");
        for option in &options {
            assert!(stdout.contains(&format!("\n  {option} ")), "{option} is not in the help of {launcher}");
        }
    }
    for script_name in ["quickstart.sh", "test.sh"] {
        let (code, stdout, _) = output(script(script_name).arg("--help"));
        assert_eq!(code, 0, "{script_name}");
        assert!(stdout.starts_with("Usage: launch/"), "{script_name}: {stdout}");
    }
}

fn has_mpirun() -> bool {
    Command::new("mpirun").arg("--version").output().is_ok_and(|output| output.status.success())
}

#[test]
fn ranks_get_variables_and_arguments_and_their_exit_code_comes_back() {
    assert!(has_mpirun(), "these tests need Open MPI, as in: apt-get install openmpi-bin");
    let dir = tempfile::tempdir().unwrap();
    // Prints what reached it, and ends with the code it was told.
    let probe = put(dir.path(), "probe", "echo \"got $LOCKSTEP_NAME $*\"; exit \"${LOCKSTEP_CODE:-0}\"");
    let run = |code: &str| {
        let mut command = script("mpirun.sh");
        command.args(["--ranks", "3", "--binary"]).arg(&probe).args(["run", "a b", "--json"]);
        output(command.env("LOCKSTEP_NAME", "x y").env("LOCKSTEP_CODE", code))
    };
    let (code, stdout, stderr) = run("0");
    assert_eq!((code, stdout.as_str()), (0, "got x y run a b --json\n".repeat(3).as_str()), "{stderr}");
    for code in [1, 2, 5] {
        assert_eq!(run(&code.to_string()).0, code);
    }
}

/// Puts a shell script on a search path.
fn put(dir: &Path, name: &str, body: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join(name);
    fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Runs a line of shell with the launchers' library, on a search path that holds the few tools it uses and what `dir`
/// holds: no apt-get, no sudo and no rustup but those.
fn library(dir: &Path, line: &str) -> (i32, String, String) {
    for tool in ["sed", "head", "sort", "dirname", "basename", "grep", "env"] {
        let found = ["/usr/bin", "/bin"].iter().map(|bin| Path::new(bin).join(tool)).find(|path| path.exists());
        std::os::unix::fs::symlink(found.unwrap(), dir.join(tool)).unwrap();
    }
    let mut command = Command::new("/bin/bash");
    command.args(["-euc", &format!(". launch/lib.sh; {line}")]).current_dir(root());
    output(command.env("PATH", dir).env("HOME", dir).env_remove("CARGO_HOME"))
}

#[test]
fn an_old_cargo_without_rustup_is_said_in_one_line() {
    let wanted = env!("CARGO_PKG_RUST_VERSION");
    for (version, is_new_enough) in [("1.88.0", false), ("1.9.0", false), ("1.89.0", true), ("1.100.0-nightly", true)] {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "cargo", &format!("echo 'cargo {version} (abc 2020-01-01)'"));
        let (code, stdout, stderr) = library(dir.path(), "find_cargo; echo \"${cargo[@]}\"");
        if is_new_enough {
            assert_eq!((code, stdout.as_str()), (0, "cargo\n"), "{version}: {stderr}");
        } else {
            assert_eq!(code, 3, "{version}: {stdout}");
            assert_eq!(stderr.lines().count(), 1, "{version}: {stderr}");
            assert!(stderr.contains(&format!("Rust {wanted}")) && stderr.contains("rustup"), "{version}: {stderr}");
        }
    }
}

#[test]
fn rustup_is_used_where_cargo_is_old() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "cargo", "echo 'cargo 1.60.0'");
    put(dir.path(), "rustup", "case $1 in run) echo 'cargo 1.99.0';; *) echo \"rustup $*\";; esac");
    let (code, stdout, stderr) = library(dir.path(), "find_cargo; echo \"${cargo[@]}\"");
    assert_eq!((code, stdout.as_str()), (0, "rustup run stable cargo\n"), "{stderr}");
    assert!(stderr.contains("rustup toolchain install stable"), "{stderr}");
}

#[test]
fn only_missing_packages_are_installed() {
    let install = |missing: &str, id: &str, sudo: bool| {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "dpkg-query", &format!("[ \"$3\" = '{missing}' ] && exit 1; printf installed"));
        put(dir.path(), "apt-get", "echo \"apt-get $*\" >&2");
        put(dir.path(), "id", &format!("echo {id}"));
        if sudo {
            put(dir.path(), "sudo", "echo \"sudo $*\" >&2; exec \"$@\"");
        }
        let (code, _, stderr) = library(dir.path(), "install_build_packages");
        (code, stderr)
    };
    assert_eq!(install("", "0", false), (0, String::new()), "nothing is missing, nothing is asked for");
    let (code, stderr) = install("libclang-dev", "0", false);
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("install -y -qq --no-install-recommends libclang-dev\n"), "{stderr}");
    assert!(!stderr.contains("openmpi"), "{stderr}");
    let (code, stderr) = install("libclang-dev", "1000", true);
    assert!(code == 0 && stderr.contains("sudo apt-get update"), "{stderr}");
    let (code, stderr) = install("libclang-dev", "1000", false);
    assert!(code == 3 && stderr.contains("root") && stderr.contains("sudo"), "{code}: {stderr}");
}

#[test]
fn quickstart_takes_no_options() {
    let (code, _, stderr) = output(script("quickstart.sh").arg("--fast"));
    assert_eq!(code, 2);
    assert!(stderr.contains("--fast"), "{stderr}");
}
