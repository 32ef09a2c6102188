//! `lockstep plan`: what a deployment takes, on paper; starts no MPI, needs no device and reads no weights.

mod show;

use clap::Args;

use super::failure::Failure;
use super::logging::LogSettings;
use super::model::{Model, ModelArgError};
use super::options::{DeploymentArgs, LogArgs};
use super::output;
use super::values::{positive, rate};
use crate::checkpoint::{Checkpoint, CheckpointError, ExpertFormat};
use crate::config::{ConfigError, Deployment};
use crate::env::EnvVars;
use crate::exit::{Classify, Exit};
use crate::ids::LayerIdx;
use crate::layer;
use crate::model::{ModelError, MoeGeometry};
use crate::plan::{Asked, Plan, PlanError, StoredLayer, weights};
use crate::sample::{Geometry, SampleSpec};
use crate::select::LayerFacts;

/// Says on paper what a deployment takes: experts, weights and buffers of every rank, bytes on each kind of link, and the
/// least time of a step; needs no launcher.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// A checkpoint's directory, of which headers are read alone; or a geometry: kimi-k3, deepseek-v3, qwen3-235b, with all
    /// of the model's layers.
    #[arg(long, value_name = "DIR|GEOMETRY")]
    pub model: String,
    /// Tokens of each rank in a step; default: dispatch.num_max_tokens_per_rank.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub tokens: Option<usize>,
    /// Memory of each rank's device in GB (10^9 bytes). What does not fit ends with exit code 3 and what would.
    #[arg(long, value_name = "GB", value_parser = rate)]
    pub device_memory_gbyte: Option<f64>,
    /// What overrides the deployment.
    #[command(flatten)]
    pub deployment: DeploymentArgs,
    /// Prints one JSON object instead of tables.
    #[arg(long, help_heading = "Printing")]
    pub json: bool,
    /// Logs and progress.
    #[command(flatten)]
    pub log: LogArgs,
}

/// Why nothing could be planned.
#[derive(Debug, thiserror::Error)]
pub enum PlanCommandError {
    /// The deployment.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No such model.
    #[error(transparent)]
    Model(#[from] ModelArgError),
    /// A layer of the checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A geometry's own config.
    #[error(transparent)]
    Geometry(#[from] ModelError),
    /// No plan, or none that fits.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl Classify for PlanCommandError {
    fn exit(&self) -> Exit {
        match self {
            Self::Config(error) => error.exit(),
            Self::Model(error) => error.exit(),
            Self::Checkpoint(error) => error.exit(),
            Self::Geometry(error) => error.exit(),
            Self::Plan(error) => error.exit(),
        }
    }
}

/// Runs the command. A plan that does not fit is printed all the same.
///
/// # Errors
/// If model or deployment are refused, if there are more tokens than declared, or if a rank needs more memory than given.
pub fn command(args: &PlanArgs, env: &EnvVars) -> Result<Exit, Failure> {
    let effective = args.deployment.effective(env).map_err(PlanCommandError::from)?;
    LogSettings::new(args.log, env, &effective).start()?;
    for warning in &effective.warnings {
        tracing::warn!("{warning}");
    }
    let plan = planned(args, &effective.deployment)?;
    if args.json {
        output::json(&plan)?;
    } else {
        output::line(show::Shown(&plan).to_string().trim_end())?;
    }
    if effective.deployment.cluster.ranks_per_node.is_none() {
        tracing::warn!(
            "cluster.ranks_per_node is null, so one rank a node was planned; plan for others with --set \
             cluster.ranks_per_node=N"
        );
    }
    plan.fit().map_err(PlanCommandError::from)?;
    Ok(Exit::Fine)
}

/// What `args` ask for.
///
/// # Errors
/// As [`command`], but for memory.
pub fn planned(args: &PlanArgs, deployment: &Deployment) -> Result<Plan, PlanCommandError> {
    let (geometry, layers) = match Model::open(&args.model)? {
        Model::Checkpoint(checkpoint) => (checkpoint.model().geometry.clone(), of_checkpoint(&checkpoint)?),
        Model::Geometry(geometry) => of_geometry(geometry)?,
    };
    Ok(Plan::new(&Asked {
        model: &args.model,
        geometry: &geometry,
        layers: &layers,
        deployment,
        num_tokens: args.tokens,
        device_memory_bytes: args.device_memory_gbyte.map(to_bytes),
    })?)
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a conversion from f64 saturates, at more memory than any device has"
)]
fn to_bytes(gbyte: f64) -> u64 {
    (gbyte * 1e9) as u64
}

/// Every MoE layer as the headers describe it.
fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Vec<StoredLayer>, CheckpointError> {
    let of_layer = |layer: LayerIdx| {
        let manifest = checkpoint.layer(layer)?;
        Ok(StoredLayer {
            facts: layer::plan::facts(&manifest),
            is_nvfp4: manifest.experts.iter().map(|format| *format == ExpertFormat::Nvfp4).collect(),
            dense_bytes: checkpoint.dense_bytes(&manifest),
        })
    };
    checkpoint.moe_layers().into_iter().map(of_layer).collect()
}

/// Every MoE layer of the published model, in the formats of its release.
fn of_geometry(geometry: Geometry) -> Result<(MoeGeometry, Vec<StoredLayer>), ModelError> {
    let preset = geometry.preset();
    let spec = SampleSpec { num_layers: preset.num_layers - preset.num_dense, ..SampleSpec::of(geometry) };
    let geometry = spec.model()?.geometry;
    let facts = spec.layer_facts();
    let of_layer = |layer| StoredLayer {
        facts: LayerFacts { layer: LayerIdx::from_index(layer), ..facts },
        is_nvfp4: vec![facts.num_nvfp4 > 0; geometry.num_experts],
        dense_bytes: weights::dense_bytes(&geometry),
    };
    let layers = spec.layers().map(of_layer).collect();
    Ok((geometry, layers))
}

#[cfg(test)]
mod tests;
