//! `lockstep cache`: what lies in a cache of compiled kernels.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::json;

use super::doctor::cache_dir;
use super::failure::Failure;
use super::options::DeploymentArgs;
use super::output;
use crate::env::EnvVars;
use crate::exit::{Classify, Exit};
use crate::jit::cache::{Listed, list, prune};
use crate::report::{self, new_table};

/// Lists, verifies or prunes the compiled kernels of a cache.
#[derive(Debug, Clone, Args)]
pub struct CacheArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: CacheCommand,
}

/// What can be done with a cache.
#[derive(Debug, Clone, Subcommand)]
pub enum CacheCommand {
    /// Shows every entry: kernel, architecture, constants, compiler, size
    List(CacheOptions),
    /// Reads every entry and says which are not what was written; exit code 1 if there are any
    Verify(CacheOptions),
    /// Removes what is damaged, was set aside or never finished; with --all or --kernel, entries as well
    Prune(PruneArgs),
}

/// Which cache, and how it is shown.
#[derive(Debug, Clone, Args)]
pub struct CacheOptions {
    /// What overrides the deployment, whose cache it is.
    #[command(flatten)]
    pub deployment: DeploymentArgs,
    /// Prints JSON instead of a table.
    #[arg(long, help_heading = "Printing")]
    pub json: bool,
}

/// What is removed.
#[derive(Debug, Clone, Args)]
pub struct PruneArgs {
    /// Removes every entry.
    #[arg(long)]
    pub all: bool,
    /// Removes every entry of this kernel.
    #[arg(long, value_name = "NAME", conflicts_with = "all")]
    pub kernel: Option<String>,
    /// Which cache, and how it is shown.
    #[command(flatten)]
    pub options: CacheOptions,
}

/// Why a cache can't be looked after.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// Nobody says where it is.
    #[error("there is no cache: neither HOME nor XDG_CACHE_HOME is set; give --cache-dir")]
    Nowhere,
    /// The system refuses.
    #[error("cannot {operation} the cache {}", dir.display())]
    Io {
        /// What was being done.
        operation: &'static str,
        /// The cache.
        dir: PathBuf,
        /// What the system says.
        #[source]
        source: std::io::Error,
    },
}

impl Classify for CacheError {
    fn exit(&self) -> Exit {
        Exit::Environment
    }
}

/// Runs the command.
///
/// # Errors
/// If the cache can't be read, or something in it not removed.
pub fn command(args: &CacheArgs, env: &EnvVars) -> Result<Exit, Failure> {
    match &args.command {
        CacheCommand::List(options) => {
            let (dir, listed) = listed(options, env)?;
            show(options.json, &dir, &listed)?;
            Ok(Exit::Fine)
        }
        CacheCommand::Verify(options) => {
            let (dir, listed) = listed(options, env)?;
            let entries: Vec<Listed> = listed.into_iter().filter(|listed| !listed.is_leftover).collect();
            let num_bad = entries.iter().filter(|listed| listed.artefact.is_err()).count();
            show(options.json, &dir, &entries)?;
            if num_bad == 0 {
                return Ok(Exit::Fine);
            }
            output::note(format!(
                "{num_bad} of {} entries are damaged; a run sets them aside and builds them again, `lockstep cache prune` \
                 removes them",
                entries.len()
            ));
            Ok(Exit::WrongResult)
        }
        CacheCommand::Prune(args) => {
            let dir = directory(&args.options, env)?;
            let wanted = |listed: &Listed| match &listed.artefact {
                _ if listed.is_leftover => false,
                Err(_) => false,
                Ok(artefact) => !args.all && args.kernel.as_deref() != Some(artefact.name()),
            };
            let pruned = prune(&dir, |listed| !wanted(listed)).map_err(of_io("prune", &dir))?;
            if args.options.json {
                output::json(&json!({"dir": dir, "num_removed": pruned.num_removed, "num_bytes": pruned.num_bytes}))?;
            } else {
                let size = report::bytes(pruned.num_bytes);
                output::line(format!("{}: removed {} entries, {size}", dir.display(), pruned.num_removed))?;
            }
            Ok(Exit::Fine)
        }
    }
}

fn of_io(operation: &'static str, dir: &Path) -> impl FnOnce(std::io::Error) -> CacheError {
    let dir = dir.to_path_buf();
    move |source| CacheError::Io { operation, dir, source }
}

fn directory(options: &CacheOptions, env: &EnvVars) -> Result<PathBuf, Failure> {
    let effective = options.deployment.effective(env)?;
    Ok(cache_dir(&effective, env).map(PathBuf::from).ok_or(CacheError::Nowhere)?)
}

fn listed(options: &CacheOptions, env: &EnvVars) -> Result<(PathBuf, Vec<Listed>), Failure> {
    let dir = directory(options, env)?;
    let listed = list(&dir).map_err(of_io("read", &dir))?;
    Ok((dir, listed))
}

fn show(json: bool, dir: &Path, listed: &[Listed]) -> Result<(), Failure> {
    let state = |listed: &Listed| match &listed.artefact {
        _ if listed.is_leftover => "leftover".to_owned(),
        Ok(_) => "ok".to_owned(),
        Err(bad) => bad.to_string(),
    };
    if json {
        let entries: Vec<_> = listed
            .iter()
            .map(|listed| {
                let artefact = listed.artefact.as_ref().ok();
                json!({
                    "path": listed.path, "num_bytes": listed.num_bytes, "state": state(listed),
                    "key": artefact.map(|artefact| artefact.key().to_string()),
                    "parts": artefact.map(|artefact| artefact.parts()), "usage": artefact.map(|artefact| artefact.usage()),
                })
            })
            .collect();
        output::json(&json!({"dir": dir, "entries": entries}))?;
        return Ok(());
    }
    let mut table = new_table(&["entry", "for", "by NVRTC", "size", "state"]);
    for entry in listed {
        let (made_for, compiler) = entry.artefact.as_ref().map_or_else(
            |_| (String::new(), String::new()),
            |artefact| {
                let parts = artefact.parts();
                let defines: Vec<String> =
                    parts.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
                (format!("{} {}", parts.arch, defines.join(" ")), parts.compiler.clone())
            },
        );
        let path = entry.path.strip_prefix(dir).unwrap_or(&entry.path).display().to_string();
        // Twelve digits of a key tell entries apart.
        let short = path.rfind('.').map_or(path.as_str(), |dot| &path[..path.len().min(dot + 13)]);
        table.add_row([short.to_owned(), made_for, compiler, report::bytes(entry.num_bytes), state(entry)]);
    }
    output::line(format!("{table}\n{} entries below {}", listed.len(), dir.display()))?;
    Ok(())
}
