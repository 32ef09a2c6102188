//! What the launchers would run under each MPI and each Slurm, with stand-ins for `mpirun`, `srun` and `ldd` in front of
//! the search path, and how they end.
#![expect(clippy::unwrap_used, reason = "a test that cannot start its command has failed")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

const OPEN_MPI_4: &str = "mpirun (Open MPI) 4.1.4";
const OPEN_MPI_5: &str = "mpirun (Open MPI) 5.0.3";
const HYDRA: &str = "HYDRA build details:\n    Version:                                 4.0.2";

const LINKED_WITH_OPEN_MPI: &str = "libmpi.so.40 => /usr/lib/libmpi.so.40 (0x1)";
const LINKED_WITH_MPICH: &str = "libmpich.so.12 => /usr/lib/libmpich.so.12 (0x1)";

/// As Slurm 22.05 of Debian prints it.
const PLUGINS: &str =
    "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\nspecific pmix plugin versions available: pmix_v4";
const NO_PMIX: &str = "MPI plugin types are...\n\tnone\n\tpmi2";

/// Programs that answer what a test says, found before the machine's.
struct Machine(TempDir);

impl Machine {
    fn new(mpirun: &str, plugins: &str, linked_with: &str) -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        machine.put("mpirun", &format!("echo '{mpirun}'"));
        machine.put("srun", &format!("echo '{plugins}'"));
        machine.put("ldd", &format!("echo '\t{linked_with}'"));
        machine.put("ompi_info", "exit 0");
        machine.put("id", "echo 0");
        machine.put("nproc", "echo 2");
        machine
    }

    fn put(&self, name: &str, body: &str) {
        let path = self.0.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn launcher(&self, name: &str) -> Command {
        let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("launch").join(name));
        for (variable, _) in std::env::vars_os() {
            let name = variable.to_string_lossy();
            if ["LOCKSTEP_", "SLURM_", "OMPI_"].iter().any(|prefix| name.starts_with(prefix)) {
                command.env_remove(variable);
            }
        }
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", self.0.path().display())).stdin(Stdio::null());
        command
    }

    fn output(&self, name: &str, args: &[&str]) -> (i32, String, String) {
        let Output { status, stdout, stderr } = self.launcher(name).args(args).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (status.code().unwrap(), text(stdout), text(stderr))
    }

    /// The words of the command that would run, from the launcher's name on, and the variables set for it.
    #[track_caller]
    fn dry_run(&self, name: &str, args: &[&str]) -> (Vec<String>, String) {
        let (code, stdout, stderr) = self.output(name, &[&["--dry-run", "--binary", "lockstep"][..], args].concat());
        assert_eq!(code, 0, "{stderr}");
        assert_eq!(stdout.lines().count(), 1, "{stdout}");
        let words: Vec<&str> = stdout.split_whitespace().collect();
        let start = words.iter().position(|word| ["mpirun", "srun"].contains(word)).unwrap();
        // A name by which the launcher finds its ranks again.
        let rest = words[start..].iter().filter(|word| !word.starts_with("--job-name="));
        (words[..start].iter().map(ToString::to_string).collect(), rest.copied().collect::<Vec<_>>().join(" "))
    }

    #[track_caller]
    fn refuses(&self, name: &str, args: &[&str], needles: &[&str]) {
        // There is a program, so that nothing else is missing.
        let (code, stdout, stderr) = self.output(name, &[&["--binary", "/bin/true"][..], args].concat());
        assert_eq!((code, stdout.as_str(), stderr.lines().count()), (3, "", 1), "{stderr}");
        needles.iter().for_each(|needle| assert!(stderr.contains(needle), "lacks {needle:?}: {stderr}"));
    }
}

#[test]
fn open_mpi_5_takes_oversubscription_as_a_mapping_and_root_for_prrte() {
    let four = Machine::new(OPEN_MPI_4, PLUGINS, LINKED_WITH_OPEN_MPI);
    let five = Machine::new(OPEN_MPI_5, PLUGINS, LINKED_WITH_OPEN_MPI);
    let (settings, line) = four.dry_run("mpirun.sh", &["--ranks", "3", "run"]);
    assert_eq!(line, "mpirun -n 3 --oversubscribe --bind-to none lockstep run");
    assert!(
        settings.contains(&"OMPI_ALLOW_RUN_AS_ROOT=1".into()) && !settings.concat().contains("PRTE"),
        "{settings:?}"
    );
    assert!(settings.contains(&"OMPI_MCA_mpi_yield_when_idle=1".into()), "three ranks on two cores: {settings:?}");
    let (settings, line) = five.dry_run("mpirun.sh", &["--ranks", "3", "run"]);
    assert_eq!(line, "mpirun -n 3 --map-by=:OVERSUBSCRIBE --bind-to none lockstep run");
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"] {
        assert!(settings.contains(&format!("{name}=1")), "{settings:?}");
    }
    four.put("id", "echo 1000");
    assert!(!four.dry_run("mpirun.sh", &["run"]).0.concat().contains("ROOT"), "no root, no word of it");
}

#[test]
fn ranks_per_node_in_every_form() {
    let args = ["--ranks=4", "--ranks-per-node", "2", "--hosts", "a:2,b:2", "run"];
    for (version, linked_with, wanted) in [
        (
            OPEN_MPI_4,
            LINKED_WITH_OPEN_MPI,
            "mpirun -n 4 --host a:2\\,b:2 --map-by ppr:2:node --bind-to none -x LOCKSTEP_CACHE_DIR lockstep run",
        ),
        (
            OPEN_MPI_5,
            LINKED_WITH_OPEN_MPI,
            "mpirun -n 4 --host a:2\\,b:2 --map-by=ppr:2:node --bind-to none -x LOCKSTEP_CACHE_DIR lockstep run",
        ),
        (
            HYDRA,
            LINKED_WITH_MPICH,
            "mpirun -n 4 -hosts a:2\\,b:2 -ppn 2 -bind-to none -genvlist LOCKSTEP_CACHE_DIR lockstep run",
        ),
    ] {
        assert_eq!(Machine::new(version, PLUGINS, linked_with).dry_run("mpirun.sh", &args).1, wanted);
    }
    let slurm = Machine::new(OPEN_MPI_4, PLUGINS, LINKED_WITH_OPEN_MPI);
    let wanted = "srun --ntasks=4 --mpi=pmix --nodes=2 --nodelist=a\\,b --ntasks-per-node=2 --cpu-bind=none \
                  --kill-on-bad-exit=1 --export=ALL lockstep run";
    assert_eq!(slurm.dry_run("srun.sh", &args).1, wanted);
    assert_eq!(slurm.dry_run("srun.sh", &["--ranks", "4", "--hosts=a:2,b:2", "run"]).1, wanted, "the hosts say so too");
}

#[test]
fn every_variable_reaches_all_hosts() {
    for (version, linked_with, wanted) in [
        (OPEN_MPI_4, LINKED_WITH_OPEN_MPI, "-x LOCKSTEP_BACKEND -x LOCKSTEP_CACHE_DIR -x LOCKSTEP_STEP_S "),
        (OPEN_MPI_5, LINKED_WITH_OPEN_MPI, "-x LOCKSTEP_BACKEND -x LOCKSTEP_CACHE_DIR -x LOCKSTEP_STEP_S "),
        (HYDRA, LINKED_WITH_MPICH, "-genvlist LOCKSTEP_BACKEND\\,LOCKSTEP_CACHE_DIR\\,LOCKSTEP_STEP_S "),
    ] {
        let machine = Machine::new(version, PLUGINS, linked_with);
        let mut command = machine.launcher("mpirun.sh");
        command.args(["--dry-run", "--binary", "lockstep", "--hosts", "a:2,b:2", "run"]);
        command.env("LOCKSTEP_STEP_S", "5").env("LOCKSTEP_BACKEND", "simd");
        let stdout = String::from_utf8(command.output().unwrap().stdout).unwrap();
        assert!(stdout.contains(wanted), "{stdout}");
    }
}

/// Compiled kernels lie on each host's own disk where there are several, unless somebody has said where.
#[test]
fn caches_are_node_local_on_several_hosts() {
    let machine = Machine::new(OPEN_MPI_4, PLUGINS, LINKED_WITH_OPEN_MPI);
    let deployment = machine.0.path().join("d.yaml");
    fs::write(&deployment, "version: 1\njit:\n  cache_dir: /scratch/kernels\n").unwrap();
    let deployment = deployment.display().to_string();
    for launcher in ["mpirun.sh", "srun.sh"] {
        let cache = |args: &[&str]| {
            let settings = machine.dry_run(launcher, args).0;
            settings.into_iter().find_map(|setting| setting.strip_prefix("LOCKSTEP_CACHE_DIR=").map(str::to_owned))
        };
        assert_eq!(cache(&["--hosts", "a:2,b:2", "run"]).as_deref(), Some("/var/tmp/lockstep-0"));
        assert_eq!(cache(&["--ranks-per-node", "2", "run"]).as_deref(), Some("/var/tmp/lockstep-0"));
        assert_eq!(cache(&["--hosts", "a:2,b:2", "--cache-dir", "/x", "run"]).as_deref(), Some("/x"));
        assert_eq!(cache(&["--cache-dir=/x", "run"]).as_deref(), Some("/x"));
        assert_eq!(cache(&["run"]), None, "one host");
        assert_eq!(cache(&["--hosts", "a:2,b:2", "--deployment", &deployment, "run"]), None);
    }
}

#[test]
fn g1_an_mpirun_of_another_mpi_is_refused() {
    let refuses = |version: &str, linked_with: &str, needles: &[&str]| {
        Machine::new(version, PLUGINS, linked_with).refuses("mpirun.sh", &["run"], needles);
    };
    refuses(HYDRA, LINKED_WITH_OPEN_MPI, &["built with Open MPI", "every rank would be alone", "first in PATH"]);
    refuses(OPEN_MPI_4, LINKED_WITH_MPICH, &["built with MPICH", "every rank would be alone"]);
    refuses(OPEN_MPI_5, LINKED_WITH_MPICH, &["built with MPICH", "every rank would be alone"]);
    refuses("something else 1.0", LINKED_WITH_OPEN_MPI, &["neither Open MPI's nor MPICH's"]);
}

#[test]
fn g1_srun_s_plug_in_follows_from_the_mpi() {
    let plugin = |plugins: &str, linked_with: &str| {
        let line = Machine::new(OPEN_MPI_4, plugins, linked_with).dry_run("srun.sh", &["run"]).1;
        line.split(' ').find_map(|word| word.strip_prefix("--mpi=").map(str::to_owned)).unwrap()
    };
    assert_eq!(plugin(PLUGINS, LINKED_WITH_OPEN_MPI), "pmix");
    assert_eq!(plugin(PLUGINS, LINKED_WITH_MPICH), "pmi2");
    assert_eq!(plugin("MPI plugin types are...\n\tnone\n\tpmix", LINKED_WITH_MPICH), "pmix");
    assert_eq!(plugin(NO_PMIX, LINKED_WITH_MPICH), "pmi2");
    let machine = Machine::new(OPEN_MPI_4, NO_PMIX, LINKED_WITH_OPEN_MPI);
    let needles = ["no plug-in", "none pmi2", "wanted: pmix", "salloc -n 4 launch/mpirun.sh"];
    machine.refuses("srun.sh", &["run"], &needles);
    machine.put("ompi_info", "echo '                MCA pmix: s2 (MCA v2.1.0, API v2.0.0, Component v4.1.4)'");
    assert!(machine.dry_run("srun.sh", &["run"]).1.contains("--mpi=pmi2 "), "this Open MPI was built with PMI-2");
    let line = machine.dry_run("srun.sh", &["--mpi-arg=--mpi=pmix_v5", "run"]).1;
    assert!(line.contains(" --mpi=pmix_v5 ") && !line.contains("pmi2"), "the user has the last word: {line}");
}

#[test]
fn srun_puts_as_many_ranks_on_every_host() {
    let machine = Machine::new(OPEN_MPI_4, PLUGINS, LINKED_WITH_OPEN_MPI);
    let (code, _, stderr) = machine.output("srun.sh", &["--dry-run", "--ranks=3", "--hosts", "a:2,b:1", "run"]);
    assert!(code == 2 && stderr.contains("different numbers") && stderr.contains("launch/mpirun.sh"), "{stderr}");
}

/// Ranks that an allocation has are the default, and mpirun leaves hosts and room to it.
#[test]
fn allocations_are_taken_as_they_are() {
    let machine = Machine::new(OPEN_MPI_4, PLUGINS, LINKED_WITH_OPEN_MPI);
    for (launcher, wanted) in [
        ("mpirun.sh", "mpirun -n 16 --bind-to none -x LOCKSTEP_CACHE_DIR lockstep run"),
        ("srun.sh", "srun --ntasks=16 --mpi=pmix --cpu-bind=none --kill-on-bad-exit=1 --export=ALL"),
    ] {
        let mut command = machine.launcher(launcher);
        command.env("SLURM_JOB_ID", "7").env("SLURM_NTASKS", "16").env("SLURM_JOB_NUM_NODES", "2");
        let output = command.args(["--dry-run", "--binary", "lockstep", "run"]).output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert!(stdout.contains(wanted), "{stdout}");
    }
}

/// A stand-in that runs the program once: what the ranks end with comes back.
#[test]
fn srun_s_exit_code_comes_back() {
    let machine = Machine::new(OPEN_MPI_4, PLUGINS, LINKED_WITH_OPEN_MPI);
    let body = format!("[ \"$1\" = --mpi=list ] && {{ echo '{PLUGINS}'; exit; }}; exit \"$LOCKSTEP_CODE\"");
    machine.put("srun", &body);
    for code in [0, 1, 2, 3, 4, 5, 101, 130, 137, 143] {
        let mut command = machine.launcher("srun.sh");
        command.args(["--binary", "/bin/true", "run"]).env("LOCKSTEP_CODE", code.to_string());
        assert_eq!(command.output().unwrap().status.code(), Some(code));
    }
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().unwrap().success());
}

/// Told to end, it has Slurm end the step that has its name, which srun itself would kill outright.
#[test]
fn g7_srun_s_step_is_cancelled_by_its_name() {
    for (name, code, said) in [("TERM", 143, "ended on SIGTERM"), ("INT", 130, "ended on Ctrl-C (SIGINT)")] {
        let machine = Machine::new(OPEN_MPI_4, PLUGINS, LINKED_WITH_OPEN_MPI);
        let dir = machine.0.path().display().to_string();
        // Waits for the cancellation, as srun waits for its tasks.
        let body = format!(
            "[ \"$1\" = --mpi=list ] && {{ echo '{PLUGINS}'; exit; }}
             for word; do case $word in --job-name=*) echo \"9.0 ${{word#*=}}\" >{dir}/steps;; esac; done
             echo ready; read -r code <{dir}/cancelled; exit \"$code\""
        );
        machine.put("srun", &body);
        machine.put("squeue", &format!("echo '8.0 another'; cat {dir}/steps"));
        machine.put("scancel", &format!("[ \"$*\" = '--signal=TERM 9.0' ] && echo 143 >{dir}/cancelled"));
        assert!(Command::new("mkfifo").arg(format!("{dir}/cancelled")).status().unwrap().success());
        let mut command = machine.launcher("srun.sh");
        command.args(["--binary", "/bin/true", "run"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut ready = [0; 6];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut ready).unwrap();
        signal(&child, name);
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains(&format!("srun.sh: {said}; no rank is left")), "{stderr}");
    }
}

#[test]
fn the_batch_script_is_srun_sh_in_a_job() {
    let machine = Machine::new(OPEN_MPI_4, PLUGINS, LINKED_WITH_OPEN_MPI);
    let (code, stdout, _) = machine.output("lockstep.sbatch", &["--help"]);
    assert!(code == 0 && stdout.starts_with("Usage: sbatch "), "{stdout}");
    let (code, _, stderr) = machine.output("lockstep.sbatch", &["run"]);
    assert!(code == 2 && stderr.contains("submit it: sbatch "), "{stderr}");
    assert_eq!(
        machine.dry_run("lockstep.sbatch", &["--moe-backend", "simd", "run"]),
        machine.dry_run("srun.sh", &["--moe-backend=simd", "run"])
    );
    // As Slurm starts it: a copy elsewhere, which knows where it was submitted.
    let copy = machine.0.path().join("slurm_script");
    fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/launch/lockstep.sbatch"), &copy).unwrap();
    let mut command = machine.launcher("srun.sh");
    let mut command = {
        let path = command.get_envs().find(|(name, _)| *name == "PATH").unwrap().1.unwrap().to_owned();
        command = Command::new("bash");
        command.arg(&copy).args(["--dry-run", "--binary", "lockstep", "run"]).env("PATH", path);
        command
    };
    command.env("SLURM_JOB_ID", "7").env("SLURM_NTASKS", "6");
    let there = command.env("SLURM_SUBMIT_DIR", env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(String::from_utf8_lossy(&there.stdout).contains("srun --ntasks=6 --mpi=pmix"), "{there:?}");
    let lost = command.env("SLURM_SUBMIT_DIR", "/").output().unwrap();
    assert_eq!(lost.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&lost.stderr).contains("LOCKSTEP_ROOT"), "{lost:?}");
}
