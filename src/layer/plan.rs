//! From a checkpoint's headers and a deployment to what each layer is to compute: before any rank is asked what it can do.

use crate::checkpoint::{Checkpoint, ExpertFormat, LayerManifest};
use crate::config::Deployment;
use crate::ids::LayerIdx;
use crate::select::{self, LayerDecision, LayerFacts, Problem, SelectError, SharedFacts};

use super::{LayerError, Part};

/// What a layer holds, what is decided about it, and what that asks of an implementation.
#[derive(Debug, Clone)]
pub struct LayerPlan {
    /// What the headers say.
    pub manifest: LayerManifest,
    /// How it is computed, whatever computes it.
    pub decision: LayerDecision,
    /// What an implementation has to serve.
    pub problem: Problem,
}

/// What layers are planned for.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// The layers; absent: every MoE layer.
    pub layers: Option<&'a [LayerIdx]>,
    /// How to run.
    pub deployment: &'a Deployment,
    /// The hidden states are bf16 values.
    pub input_is_bf16: bool,
    /// What will be computed.
    pub part: Part,
}

/// Plans the layers of `checkpoint`, in the order asked for.
///
/// # Errors
/// If a layer is not there, is not whole, or can't do what the deployment asks for.
pub fn plan(checkpoint: &Checkpoint, asked: &Asked<'_>) -> Result<Vec<LayerPlan>, LayerError> {
    let known = checkpoint.moe_layers();
    let chosen = asked.layers.unwrap_or(&known);
    if let Some(&layer) = chosen.iter().find(|layer| !known.contains(layer)) {
        let known: Vec<String> = known.iter().map(|layer| layer.0.to_string()).collect();
        return Err(LayerError::NoSuchLayer {
            layer,
            checkpoint: checkpoint.dir().to_owned(),
            known: if known.is_empty() { "no MoE layers".to_owned() } else { format!("layers {}", known.join(", ")) },
        });
    }
    chosen.iter().map(|layer| plan_layer(checkpoint, asked, *layer)).collect()
}

/// Plans one layer from its headers.
///
/// # Errors
/// As [`plan`].
pub fn plan_layer(checkpoint: &Checkpoint, asked: &Asked<'_>, layer: LayerIdx) -> Result<LayerPlan, LayerError> {
    let geometry = &checkpoint.model().geometry;
    let manifest = checkpoint.layer(layer)?;
    if asked.part == Part::Shared && manifest.shared.is_none() {
        return Err(SelectError::NoShared { layer }.into());
    }
    let facts = facts(&manifest);
    let decision = select::decide(&facts, geometry, asked.deployment, asked.input_is_bf16)?;
    let problem = Problem::new(&facts, &decision, geometry);
    Ok(LayerPlan { manifest, decision, problem })
}

/// What a layer's headers say, as far as decisions need it.
#[must_use]
pub fn facts(manifest: &LayerManifest) -> LayerFacts {
    let num_nvfp4 = manifest.experts.iter().filter(|format| **format == ExpertFormat::Nvfp4).count();
    LayerFacts {
        layer: manifest.layer,
        num_nvfp4,
        num_bf16: manifest.experts.len() - num_nvfp4,
        has_input_scales: manifest.has_input_scales,
        wants_quantised: manifest.quantise_activations,
        shared: manifest.shared.map(|format| SharedFacts {
            is_nvfp4: format == ExpertFormat::Nvfp4,
            has_input_scales: manifest.shared_has_input_scales,
            wants_quantised: manifest.quantise_shared,
        }),
    }
}
