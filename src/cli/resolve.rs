//! `lockstep resolve`: what ranks that are only described would run, and why; starts no MPI and reads no weights.

use std::fmt;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::failure::Failure;
use super::logging::LogSettings;
use super::model::{Model, ModelArgError};
use super::options::{DeploymentArgs, LogArgs, read_text};
use super::output;
use super::values::LayerChoice;
use crate::config::{ConfigError, Deployment};
use crate::env::EnvVars;
use crate::exit::{Classify, Exit};
use crate::ids::LayerIdx;
use crate::layer::plan::{self, Asked};
use crate::layer::{LayerError, Part};
use crate::model::{ModelError, MoeGeometry};
use crate::sample::SampleSpec;
use crate::select::environment::EnvironmentError;
use crate::select::fingerprint::FingerprintError;
use crate::select::registry::Registry;
use crate::select::{
    DeploymentFacts, Digest, Environment, Fingerprint, LayerDecision, Problem, SelectError, Selection, decide, resolve,
};

/// Says which implementation every layer would run, which others could, and why the rest refuse; needs no launcher.
#[derive(Debug, Clone, Args)]
pub struct ResolveArgs {
    /// A checkpoint's directory, of which headers are read alone; or a geometry: kimi-k3, deepseek-v3, qwen3-235b.
    #[arg(long, value_name = "DIR|GEOMETRY")]
    pub model: String,
    /// A description of ranks, as `lockstep doctor --json` prints it; several are joined in this order. Without one,
    /// nothing is known of the deployment's ranks.
    #[arg(long, value_name = "FILE")]
    pub environment: Vec<PathBuf>,
    /// Layers to ask about: `all`, or a list as in 1,2.
    #[arg(long, value_name = "all|N,N,...", default_value = "all")]
    pub layers: LayerChoice,
    /// What overrides the deployment.
    #[command(flatten)]
    pub deployment: DeploymentArgs,
    /// Prints one JSON object instead of text.
    #[arg(long, help_heading = "Printing")]
    pub json: bool,
    /// Logs and progress.
    #[command(flatten)]
    pub log: LogArgs,
}

/// Why nothing could be resolved.
#[derive(Debug, thiserror::Error)]
pub enum ResolveCommandError {
    /// The deployment.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No such model.
    #[error(transparent)]
    Model(#[from] ModelArgError),
    /// A geometry's own config.
    #[error(transparent)]
    Geometry(#[from] ModelError),
    /// A layer that can't do what is asked.
    #[error(transparent)]
    Layer(Box<LayerError>),
    /// A layer that is not there.
    #[error("a geometry stands for all of a model's MoE layers in {layer}; leave --layers out")]
    GeometryLayers {
        /// The one layer.
        layer: LayerIdx,
    },
    /// No selection.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// An environment file that can't be read.
    #[error("cannot read the environment file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: std::io::Error,
    },
    /// An environment file that describes no ranks.
    #[error("{}", path.display())]
    Environment {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: EnvironmentError,
    },
    /// A bug.
    #[error(transparent)]
    Fingerprint(#[from] FingerprintError),
}

impl From<LayerError> for ResolveCommandError {
    fn from(error: LayerError) -> Self {
        Self::Layer(Box::new(error))
    }
}

impl Classify for ResolveCommandError {
    fn exit(&self) -> Exit {
        match self {
            Self::Config(error) => error.exit(),
            Self::Model(error) => error.exit(),
            Self::Geometry(error) => error.exit(),
            Self::Layer(error) => error.exit(),
            Self::Select(error) => error.exit(),
            Self::Environment { source, .. } => source.exit(),
            Self::Fingerprint(error) => error.exit(),
            Self::GeometryLayers { .. } | Self::Read { .. } => Exit::BadInput,
        }
    }
}

/// What would run, and the digest that a run on such ranks reports.
#[derive(Debug, Serialize)]
pub struct Resolved {
    /// The digest of the selection and everything it follows from.
    pub digest: Digest,
    /// Layers that the checkpoint keeps unquantised although the deployment asks for quantised activations.
    pub kept_unquantised: Vec<u32>,
    /// Every layer with winner, other eligible ones and refusals.
    #[serde(flatten)]
    pub selection: Selection,
    /// Everything that the digest is of.
    #[serde(skip)]
    pub fingerprint: Fingerprint,
}

/// Runs the command.
///
/// # Errors
/// If model, deployment or environments are refused, or nothing that was asked for serves some layer.
pub fn command(args: &ResolveArgs, env: &EnvVars) -> Result<Exit, Failure> {
    let effective = args.deployment.effective(env).map_err(ResolveCommandError::from)?;
    LogSettings::new(args.log, env, &effective).start()?;
    for warning in &effective.warnings {
        tracing::warn!("{warning}");
    }
    let resolved = resolved(args, &effective.deployment, &Registry::builtin())?;
    if args.json {
        output::json(&resolved)?;
        return Ok(Exit::Fine);
    }
    output::line(&resolved)?;
    for line in resolved.fingerprint.listing().lines() {
        tracing::debug!("{line}");
    }
    Ok(Exit::Fine)
}

impl fmt::Display for Resolved {
    /// Every kind of layer with winner, others and refusals, and the digest of it all.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.selection)?;
        for layer in &self.kept_unquantised {
            writeln!(f, "layer {layer} is kept unquantised by the checkpoint, whatever moe.activations asks for")?;
        }
        write!(f, "selection {}", self.digest)
    }
}

/// What `args` ask about, with the implementations of `registry`.
///
/// # Errors
/// As [`command`].
pub fn resolved(
    args: &ResolveArgs,
    deployment: &Deployment,
    registry: &Registry,
) -> Result<Resolved, ResolveCommandError> {
    let (layers, kept_unquantised) = layers(&args.model, &args.layers, deployment)?;
    let problems: Vec<Problem> = layers.into_iter().map(|(problem, _)| problem).collect();
    let (facts, environments) = ranks(args, deployment)?;
    let selection = resolve(&problems, &facts, &environments, registry).map_err(SelectError::from)?;
    let fingerprint = selection.fingerprint(&facts, &environments, registry)?;
    Ok(Resolved { digest: fingerprint.digest(), kept_unquantised, selection, fingerprint })
}

/// A layer of a model: what it asks of an implementation, and what it is to compute.
pub(super) type ModelLayer = (Problem, LayerDecision);

/// The layers of a checkpoint or a geometry, and which are kept unquantised against the deployment.
pub(super) fn layers(
    model: &str,
    chosen: &LayerChoice,
    deployment: &Deployment,
) -> Result<(Vec<ModelLayer>, Vec<u32>), ResolveCommandError> {
    let checkpoint = match Model::open(model)? {
        Model::Checkpoint(checkpoint) => checkpoint,
        Model::Geometry(geometry) => {
            return Ok((vec![of_geometry(&SampleSpec::of(geometry), chosen, deployment)?], Vec::new()));
        }
    };
    let layers = match chosen {
        LayerChoice::All => None,
        LayerChoice::List(layers) => Some(layers.as_slice()),
    };
    let plans = plan::plan(&checkpoint, &Asked { layers, deployment, input_is_bf16: true, part: Part::Block })?;
    let kept = plans.iter().filter(|plan| plan.decision.kept_unquantised).map(|plan| plan.problem.layer.0).collect();
    Ok((plans.into_iter().map(|plan| (plan.problem, plan.decision)).collect(), kept))
}

/// The geometry that the layers share.
pub(super) fn geometry(model: &str) -> Result<MoeGeometry, ResolveCommandError> {
    match Model::open(model)? {
        Model::Checkpoint(checkpoint) => Ok(checkpoint.model().geometry.clone()),
        Model::Geometry(geometry) => Ok(SampleSpec::of(geometry).model()?.geometry),
    }
}

fn of_geometry(
    spec: &SampleSpec,
    chosen: &LayerChoice,
    deployment: &Deployment,
) -> Result<ModelLayer, ResolveCommandError> {
    let facts = spec.layer_facts();
    if *chosen != LayerChoice::All && *chosen != LayerChoice::List(vec![facts.layer]) {
        return Err(ResolveCommandError::GeometryLayers { layer: facts.layer });
    }
    let geometry = spec.model()?.geometry;
    let decision = decide(&facts, &geometry, deployment, true)?;
    Ok((Problem::new(&facts, &decision, &geometry), decision))
}

/// The world that the environment files describe; without any, the deployment's, of which nothing else is known.
fn ranks(
    args: &ResolveArgs,
    deployment: &Deployment,
) -> Result<(DeploymentFacts, Vec<Environment>), ResolveCommandError> {
    if args.environment.is_empty() {
        let facts = DeploymentFacts::declared(deployment).map_err(SelectError::from)?;
        let environments = vec![Environment::default(); facts.num_ranks()];
        return Ok((facts, environments));
    }
    let mut environments = Vec::new();
    for path in &args.environment {
        let text = read_text(path).map_err(|source| ResolveCommandError::Read { path: path.clone(), source })?;
        let ranks = Environment::list_from_json(&text)
            .map_err(|source| ResolveCommandError::Environment { path: path.clone(), source })?;
        environments.extend(ranks);
    }
    let facts = DeploymentFacts::described(deployment, &environments).map_err(SelectError::from)?;
    Ok((facts, environments))
}

#[cfg(test)]
mod tests;
