//! The command line: one file a command, each with its arguments, its call and its printing.
//!
//! Decides nothing that the library does not decide; prints through [`output`] alone.

pub mod bench;
pub mod cache;
pub mod doctor;
pub mod failure;
pub mod inspect;
pub mod job;
pub mod logging;
pub mod model;
pub mod options;
pub mod output;
pub mod plan;
pub mod progress;
pub mod resolve;
pub mod run;
pub mod sample;
pub mod values;
pub mod verify;
pub mod warmup;
pub mod world;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::Effective;
use crate::env::EnvVars;
use crate::exit::Exit;
use failure::Failure;
use logging::LogSettings;
use options::CommonArgs;
use world::StartError;

/// Runs the mixture-of-experts layers of large models across MPI ranks, every rank on the same kernels.
#[derive(Debug, Parser)]
#[command(name = "lockstep", version, max_term_width = 100, propagate_version = true, after_help = AFTER_HELP)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const AFTER_HELP: &str = "Exit codes: 0 fine, 1 wrong result, 2 bad input, 3 environment, 4 ranks disagree, 5 a peer \
                          failed or a limit passed, 130 and 143 on Ctrl-C and SIGTERM, 101 a bug.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Applies the MoE layers of a checkpoint to the rows of a tensor, over all ranks
    Run(options::RunArgs),
    /// Runs one layer and compares it with the reference or with expected values
    Verify(options::VerifyArgs),
    /// Times the expert computation of one rank beside the machine's bandwidth and peak
    Bench(bench::BenchArgs),
    /// Says what is in a checkpoint, and everything that is wrong with it
    Inspect(inspect::InspectArgs),
    /// Says which implementation every layer would run, and why; needs no launcher
    Resolve(resolve::ResolveArgs),
    /// Says on paper what ranks, weights, buffers and links a deployment takes; needs no launcher
    Plan(plan::PlanArgs),
    /// Shows what every rank is, and where ranks differ
    Doctor(doctor::DoctorArgs),
    /// Compiles every kernel that a deployment needs, before anything runs; needs no GPU
    Warmup(warmup::WarmupArgs),
    /// Lists, verifies or prunes the compiled kernels of a cache
    Cache(cache::CacheArgs),
    /// Writes a checkpoint and inputs of a chosen geometry, for trying things out
    Sample(sample::SampleArgs),
}

/// Parses `args` (the program's name first), runs the command, prints what went wrong, and gives the exit code.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let env = match EnvVars::read() {
        Ok(env) => env,
        Err(error) => return end(&error.into()),
    };
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => return usage(&env, &error),
    };
    match dispatch(cli.command, &env) {
        Ok(exit) => ExitCode::from(exit.code()),
        Err(failure) => end(&failure),
    }
}

/// Help, or what is wrong with the command line: once, however many ranks were given it.
fn usage(env: &EnvVars, error: &clap::Error) -> ExitCode {
    // clap ends `--help` and `--version` with 0 and usage errors with 2, which are our codes as well.
    let exit = Exit::from_code(u8::try_from(error.exit_code()).unwrap_or(Exit::BadInput.code()));
    if exit != Exit::Fine && env.launched().is_some_and(|launched| launched.size > 1) {
        // A rank that left with an error now could take the launcher's other ranks along before one has spoken.
        let ended = world::refuse_usage(env, world::UsageError(error.render().to_string()));
        return ended.map_or_else(|failure| end(&failure), |exit| ExitCode::from(exit.code()));
    }
    if speaks(env) {
        // A closed pipe is all that can go wrong, and then nobody reads this.
        let _ = error.print();
    }
    ExitCode::from(exit.code())
}

fn dispatch(command: Command, env: &EnvVars) -> Result<Exit, Failure> {
    match command {
        Command::Run(args) => run::command(&args, env),
        Command::Verify(args) => verify::command(&args, env),
        Command::Bench(args) => bench::command(&args, env),
        Command::Inspect(args) => inspect::command(&args, env),
        Command::Resolve(args) => resolve::command(&args, env),
        Command::Plan(args) => plan::command(&args, env),
        Command::Doctor(args) => doctor::command(&args, env),
        Command::Warmup(args) => warmup::command(&args, env),
        Command::Cache(args) => cache::command(&args, env),
        Command::Sample(args) => sample::run(&args, env),
    }
}

fn end(failure: &Failure) -> ExitCode {
    if let Some(message) = failure.message() {
        output::note(message);
    }
    ExitCode::from(failure.exit().code())
}

/// Whether this process is the one to speak before MPI has started: the launcher's rank 0, or no launcher's at all.
#[must_use]
pub fn speaks(env: &EnvVars) -> bool {
    env.launched_rank().is_none_or(|rank| rank == 0)
}

impl CommonArgs {
    /// Starts logging. Nothing to do any more (`false`) where `--print-config` asked for the deployment alone.
    ///
    /// # Errors
    /// If the log filter is refused, or standard output cannot be written.
    pub fn start(&self, env: &EnvVars, effective: &Effective, is_root: bool) -> Result<bool, StartError> {
        if self.print_config {
            if is_root {
                output::line(effective.to_string().trim_end())?;
            }
            return Ok(false);
        }
        LogSettings::new(self.log, env, effective).start()?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
