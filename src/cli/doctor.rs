//! `lockstep doctor`: one table of the ranks, and where they differ. Under a launcher or alone.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use clap::Args;
use comfy_table::Table;

use super::failure::Failure;
use super::logging::LogSettings;
use super::options::{DeploymentArgs, LogArgs};
use super::output;
use super::values::IsaChoice;
use super::world::{StartError, fingerprint, with_world};
use crate::config::Effective;
use crate::env::EnvVars;
use crate::exit::Exit;
use crate::facts;
use crate::host;
use crate::ids::Rank;
use crate::jit::prepare::default_dir;
use crate::layer::agreement;
use crate::report::new_table;
use crate::select::fingerprint::FieldDifference;
use crate::select::{Environment, RankSet};
use crate::world::World;

/// Shows what every rank is, and where ranks differ; exit code 3 where they must be alike and are not.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// What overrides the deployment.
    #[command(flatten)]
    pub deployment: DeploymentArgs,
    /// The instruction set of the CPU kernels.
    #[arg(long, value_enum, default_value = "auto", help_heading = "Machine")]
    pub isa: IsaChoice,
    /// Prints the ranks as JSON, in the form that `lockstep resolve --environment` takes.
    #[arg(long, help_heading = "Printing")]
    pub json: bool,
    /// Logs and progress.
    #[command(flatten)]
    pub log: LogArgs,
}

/// Runs the command.
///
/// # Errors
/// What it fails with, after the other ranks have been told.
pub fn command(args: &DoctorArgs, env: &EnvVars) -> Result<Exit, Failure> {
    with_world(env, |world| {
        let effective = world.agree(args.deployment.effective(env).map_err(StartError::from))?;
        world.agree(LogSettings::new(args.log, env, &effective).start().map_err(StartError::from))?;
        let cluster = &effective.deployment.cluster;
        let (nodes, ranks_per_node) = (cluster.nodes, cluster.ranks_per_node);
        world.agree(world.expect_size(nodes, ranks_per_node))?;
        let mine = world.agree(examine(world, env, (&effective, args.isa)))?;
        let environments = world.agree(agreement::gather_environments(world, &mine))?;
        let must_match = agreement::compare(world, fingerprint(&effective, &mine, &Vec::new()))?.unwrap_or_default();
        let may_differ = world.agree(agreement::harmless_differences(&environments))?;
        let shown = match (world.is_root(), args.json) {
            (false, _) => Ok(()),
            (true, true) => output::json(&environments),
            (true, false) => output::line(text(&environments, &must_match, &may_differ).trim_end()),
        };
        world.agree(shown)?;
        if must_match.is_empty() {
            return Ok(Exit::Fine);
        }
        if world.is_root() && args.json {
            must_match.iter().for_each(|difference| output::note(format!("differs and must not: {difference}")));
        }
        Ok(Exit::Environment)
    })
}

/// This rank's environment, with what only `doctor` looks at.
fn examine(world: &World, env: &EnvVars, (effective, isa): (&Effective, IsaChoice)) -> Result<Environment, StartError> {
    let mut mine = facts::environment(world, env, isa.named())?;
    let (cache, writable) = match cache_dir(effective, env) {
        Some(dir) => (dir.clone(), if host::can_write(&dir) { "yes" } else { "no" }),
        None => ("none".to_owned(), "no"),
    };
    mine.info.insert("cache_dir".to_owned(), cache);
    mine.info.insert("cache_writable".to_owned(), writable.to_owned());
    Ok(mine)
}

/// Where kernels would be kept: the deployment's directory, else the user's.
pub(super) fn cache_dir(effective: &Effective, env: &EnvVars) -> Option<String> {
    let of_user = || default_dir(env.xdg_cache_home.as_deref(), env.home.as_deref());
    effective.deployment.jit.cache_dir.clone().or_else(of_user)
}

/// A column of the table: its head, and what it says of a rank.
type Column = (&'static str, fn(&Environment) -> String);

const COLUMNS: [Column; 10] = [
    ("host", |rank| rank.host.clone().unwrap_or_default()),
    ("cores", |rank| info(rank, "cores")),
    ("CPU", |rank| rank.instruction_set.to_string()),
    ("MPI", |rank| rank.libraries.mpi.to_string()),
    ("GPU", |rank| rank.gpu.present().map_or_else(|| known(rank.has_gpu()), |gpu| gpu.name.clone())),
    ("driver", |rank| rank.libraries.driver.to_string()),
    ("NCCL", |rank| rank.libraries.nccl.to_string()),
    ("NVRTC", |rank| rank.libraries.nvrtc.to_string()),
    ("cublasLt", |rank| rank.libraries.cublaslt.to_string()),
    ("cache", |rank| {
        let note = if info(rank, "cache_writable") == "yes" { "" } else { " (cannot be written)" };
        format!("{}{note}", info(rank, "cache_dir"))
    }),
];

fn info(rank: &Environment, name: &str) -> String {
    rank.info.get(name).cloned().unwrap_or_default()
}

fn known(has_gpu: Option<bool>) -> String {
    if has_gpu == Some(false) { "absent" } else { "unknown" }.to_owned()
}

fn text(environments: &[Environment], must_match: &[FieldDifference], may_differ: &[FieldDifference]) -> String {
    let mut text = format!("{}\n", table(environments));
    for line in variables(environments) {
        let _ = write!(text, "\n{line}");
    }
    let mut list = |head: &str, differences: &[FieldDifference]| {
        if !differences.is_empty() {
            let _ = write!(text, "\n\n{head}");
            differences.iter().for_each(|difference| {
                let _ = write!(text, "\n  {difference}");
            });
        }
    };
    list("the ranks may differ here, and do:", may_differ);
    list("the ranks MUST be alike here, and are not; a run would end with exit code 4:", must_match);
    if must_match.is_empty() {
        text.push_str("\n\nok: the ranks are alike wherever they must be");
    }
    text
}

/// A row a rank; what is not the first rank's is marked.
fn table(environments: &[Environment]) -> Table {
    let head: Vec<&str> = std::iter::once("rank").chain(COLUMNS.iter().map(|(head, _)| *head)).collect();
    let mut table = new_table(&head);
    for (idx, rank) in environments.iter().enumerate() {
        let cell = |(_, show): &Column| {
            let (mine, first) = (show(rank), environments.first().map(show));
            if first.as_ref() == Some(&mine) { mine } else { format!("{mine} *") }
        };
        table.add_row(std::iter::once(idx.to_string()).chain(COLUMNS.iter().map(cell)));
    }
    table
}

/// Every variable that bears on a run, with the ranks where it is not set everywhere alike.
fn variables(environments: &[Environment]) -> Vec<String> {
    let mut ranks_of: BTreeMap<(&String, &String), Vec<Rank>> = BTreeMap::new();
    for (idx, rank) in environments.iter().enumerate() {
        for variable in &rank.variables {
            ranks_of.entry(variable).or_default().push(Rank::from_index(idx));
        }
    }
    let line = |((name, value), ranks): ((&String, &String), Vec<Rank>)| {
        let everywhere = ranks.len() == environments.len();
        let where_set =
            if everywhere { String::new() } else { format!("  * {} only", ranks.into_iter().collect::<RankSet>()) };
        format!("{name}={value}{where_set}")
    };
    ranks_of.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_of_one_rank_and_another_host_are_marked() {
        let rank = |host: &str, variables: &[(&str, &str)]| Environment {
            host: Some(host.to_owned()),
            variables: variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            ..Environment::default()
        };
        let ranks = [rank("a", &[("NCCL_ALGO", "Ring")]), rank("a", &[]), rank("b", &[])];
        let text = text(&ranks, &[], &[]);
        assert!(text.contains("NCCL_ALGO=Ring  * rank 0 only"), "{text}");
        assert!(text.lines().any(|line| line.trim_start().starts_with('2') && line.contains("b *")), "{text}");
        assert!(text.ends_with("ok: the ranks are alike wherever they must be"), "{text}");
    }
}
