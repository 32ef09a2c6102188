//! The README's cluster section, word for word: what a new user types is what runs here.

use std::fs;
use std::os::unix::fs::symlink;

use super::hosts::{Hosts, NODES, RANKS};
use crate::support::fixtures;
use crate::support::launch::mpirun;
use crate::support::run::Work;
use crate::support::safetensors;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The commands of a section: indented lines, continued by `\`, without comments.
fn commands(readme: &str, heading: &str) -> Vec<String> {
    let start = readme.find(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no section {heading}"));
    let section = &readme[start + 4..];
    let section = &section[..section.find("\n## ").unwrap_or(section.len())];
    let lines = section.lines().filter_map(|line| line.strip_prefix("    "));
    let text = lines.filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n").replace("\\\n", "");
    text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect()
}

#[test]
fn the_readme_s_cluster_section_runs() {
    let readme = fs::read_to_string(format!("{ROOT}/README.md")).expect("a README");
    let commands = commands(&readme, "On a cluster");
    let count = |launcher: &str| commands.iter().filter(|command| command.starts_with(launcher)).count();
    for launcher in ["launch/mpirun.sh ", "launch/srun.sh ", "sbatch "] {
        assert!(count(launcher) > 0, "no {launcher}in {commands:#?}");
    }
    let Some(hosts) = Hosts::up() else { return };
    // A clone's directory with nothing in it but links, so that what the commands leave is seen.
    let work = Work::new();
    let clone = work.path("clone");
    fs::create_dir(&clone).expect("a directory");
    for name in ["launch", "topology", "tests"] {
        symlink(format!("{ROOT}/{name}"), clone.join(name)).expect("a link");
    }
    fs::create_dir_all(clone.join("target/release")).expect("a directory");
    symlink(env!("CARGO_BIN_EXE_lockstep"), clone.join("target/release/lockstep")).expect("a link");
    let output = clone.join("out.safetensors");

    let here = work.path("here.safetensors");
    let k3 = fixtures::named("k3-tiny");
    let input = format!("{}:{}", k3.layers[0].file.display(), k3.layers[0].tensor("x"));
    let checkpoint = fixtures::checkpoint("k3-tiny").display().to_string();
    let job =
        mpirun(RANKS).args(["run", "--checkpoint", &checkpoint, "--layers", "all", "--input", &input, "--output"]);
    job.args([&here]).run().expect_code(0);

    for command in &commands {
        // Those of Slurm are typed where its users are; ssh is used from a node.
        let is_slurm = command.starts_with("launch/srun.sh") || command.starts_with("sbatch");
        let host = if is_slurm { "login" } else { NODES[0] };
        let line = ["bash", "-c", &format!("cd '{}' && {command}", clone.display())].map(str::to_owned);
        // sbatch comes back at once unless it is told otherwise.
        let job = hosts.command(host, line).env("SBATCH_WAIT", "1").without_env("CARGO_TARGET_DIR");
        let outcome = job.run().expect_code(0);
        if command.contains("--output") {
            assert_eq!(safetensors::sha256(&output), safetensors::sha256(&here), "{command}: {}", outcome.printed());
            fs::remove_file(&output).expect("removed");
        }
        hosts.assert_quiet(command);
    }
}

#[test]
fn commands_are_read_from_a_section() {
    let text =
        "\n## A\n\n    no\n\n## B\n\ntext\n\n    # why\n    one \\\n        --two\n    three\n\n## C\n\n    no\n";
    assert_eq!(commands(text, "B"), ["one     --two", "three"]);
}
