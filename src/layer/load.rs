//! A layer's weights from the checkpoint into a backend: this rank's experts, and the parts that every rank holds.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::cuda::{Around, AroundSpec, AroundTensors, DenseTools, GatedDense};
use crate::backend::{Backend, BackendError, Experts, ExpertsSpec, Linear};
use crate::checkpoint::tensors::{ExpertTensors, LatentTensors, Projection, ProjectionData, RouterTensors};
use crate::checkpoint::{Checkpoint, LayerManifest};
use crate::ids::Rank;
use crate::model::{LatentGeometry, MoeGeometry};
use crate::select::LayerDecision;

use super::LayerError;
use super::experts::{ExpertsLoader, LoadedExperts, fc1_input_scale, prepare_error};
use super::parts::{Latent, Norm, Router, Shared, SharedBy};
use crate::dispatch::placement::Placement;

/// A layer whose FC1 scale is still this rank's own.
pub(super) struct Loaded {
    pub router: Router,
    pub latent: Option<Latent>,
    /// Router and latent projections on the device, which `router` and `latent` then lack.
    pub around: Option<Around>,
    pub shared: Option<Shared>,
    pub experts: Box<dyn Experts>,
    /// What reading and packing the experts took.
    pub experts_elapsed: Duration,
    /// The largest FC1 `input_scale` of this rank's experts; 0 where it has none.
    pub largest_input_scale: f32,
    pub weight_bytes: u64,
}

/// Where a layer is loaded from and into.
pub(super) struct Loader<'a> {
    pub checkpoint: &'a Checkpoint,
    pub backend: &'a dyn Backend,
    /// Computes dense projections on a device, where experts are on one and it can.
    pub dense: Option<&'a Arc<DenseTools>>,
    pub placement: Placement,
    pub rank: Rank,
    /// A row's bits may not depend on the number of rows.
    pub batch_invariant: bool,
    /// Told the checkpoint's bytes of every expert that is packed, by whichever thread has done it.
    pub progress: &'a (dyn Fn(u64) + Sync),
}

impl Loader<'_> {
    /// Reads and packs one layer, a few experts at a time, so that only these are held twice.
    pub fn load(&self, manifest: &LayerManifest, decision: &LayerDecision) -> Result<Loaded, LayerError> {
        let geometry = &self.checkpoint.model().geometry;
        let LoadedExperts { builder, largest_input_scale, elapsed: experts_elapsed, .. } =
            self.experts(manifest, decision)?;
        let experts = self.prepare(manifest, builder.finish())?;
        let (router, latent) = (self.checkpoint.read_router(manifest)?, self.checkpoint.read_latent(manifest)?);
        let latent = geometry.latent.zip(latent);
        let around = match self.dense {
            Some(tools) => {
                let tensors = AroundTensors { router: &router, latent: latent.as_ref().map(|(_, latent)| latent) };
                let around = || Around::new(tools, around_spec(geometry), tensors);
                Some(self.prepare(manifest, self.backend.pool().install(around))?)
            }
            None => None,
        };
        let router = self.router(manifest, router)?;
        let latent = latent.map(|(geometry, tensors)| self.latent(manifest, geometry, tensors)).transpose()?;
        let shared = self.shared(manifest, decision)?;
        let linears = [&router.gate].into_iter().chain(latent.iter().flat_map(|latent| [&latent.down, &latent.up]));
        let weight_bytes = experts.weight_bytes()
            + linears.flatten().map(|linear| linear.weight_bytes()).sum::<u64>()
            + around.as_ref().map_or(0, Around::weight_bytes)
            + shared.as_ref().map_or(0, |shared| shared.by.weight_bytes());
        Ok(Loaded { router, latent, around, shared, experts, experts_elapsed, largest_input_scale, weight_bytes })
    }

    fn experts(&self, manifest: &LayerManifest, decision: &LayerDecision) -> Result<LoadedExperts, LayerError> {
        let geometry = &self.checkpoint.model().geometry;
        let local = self.placement.local_experts(self.rank);
        let spec = ExpertsSpec {
            hidden: geometry.expert_hidden,
            intermediate: geometry.intermediate,
            activation: decision.activation,
            quantise_activations: decision.quantise_activations,
            batch_invariant: self.batch_invariant,
        };
        let loader = ExpertsLoader { checkpoint: self.checkpoint, backend: self.backend, progress: self.progress };
        let loaded = loader.load(manifest, spec, local)?;
        if let Some(warning) = loaded.scales.warning() {
            tracing::warn!("{}: {warning}", manifest.layer);
        }
        Ok(loaded)
    }

    fn router(&self, manifest: &LayerManifest, tensors: RouterTensors) -> Result<Router, LayerError> {
        let geometry = &self.checkpoint.model().geometry;
        Ok(Router {
            gate: self.linear(manifest, &tensors.weight)?,
            bias: tensors.bias,
            method: geometry.routing,
            num_experts: geometry.num_experts,
            num_topk: geometry.num_topk,
            hidden: geometry.hidden,
        })
    }

    fn latent(
        &self,
        manifest: &LayerManifest,
        latent: LatentGeometry,
        tensors: LatentTensors,
    ) -> Result<Latent, LayerError> {
        let MoeGeometry { hidden, expert_hidden, .. } = self.checkpoint.model().geometry;
        Ok(Latent {
            down: self.linear(manifest, &tensors.down)?,
            up: self.linear(manifest, &tensors.up)?,
            norm: tensors.norm.zip(latent.norm_eps).map(|(weight, eps)| Norm { weight, eps }),
            hidden,
            latent: expert_hidden,
        })
    }

    /// A projection for the host; none where the device computes it.
    fn linear(&self, manifest: &LayerManifest, weight: &Projection) -> Result<Option<Box<dyn Linear>>, LayerError> {
        match self.dense {
            Some(_) => Ok(None),
            None => self.prepare(manifest, self.backend.linear(weight)).map(Some),
        }
    }

    fn shared(&self, manifest: &LayerManifest, decision: &LayerDecision) -> Result<Option<Shared>, LayerError> {
        let geometry = &self.checkpoint.model().geometry;
        let Some(tensors) = self.checkpoint.read_shared(manifest)? else { return Ok(None) };
        let quantise_activations = decision.quantise_shared;
        let input_scale = fc1_input_scale(&tensors).filter(|_| quantise_activations);
        let spec = ExpertsSpec {
            hidden: geometry.hidden,
            intermediate: tensors.gate.out_features,
            activation: decision.activation,
            quantise_activations,
            // Its rows are this rank's own tokens: their number is no ground for another order of sums.
            batch_invariant: true,
        };
        let pool = self.backend.pool();
        let by_library = self.dense.map(|tools| pool.install(|| GatedDense::new(tools, spec, &tensors)));
        let by = match self.prepare(manifest, by_library.transpose())?.flatten() {
            Some(expert) => SharedBy::Library(Box::new(expert)),
            None => {
                let builder = self.prepare(manifest, self.backend.experts(spec, 1))?;
                self.prepare(manifest, pool.install(|| builder.put(0, &tensors)))?;
                SharedBy::Backend(self.prepare(manifest, builder.finish())?)
            }
        };
        Ok(Some(Shared { by, input_scale, scales: global_scales(&tensors) }))
    }

    fn prepare<T>(&self, manifest: &LayerManifest, result: Result<T, BackendError>) -> Result<T, LayerError> {
        result.map_err(|source| prepare_error(self.checkpoint.dir(), manifest.layer, source))
    }
}

fn around_spec(geometry: &MoeGeometry) -> AroundSpec {
    AroundSpec {
        method: geometry.routing,
        num_experts: geometry.num_experts,
        num_topk: geometry.num_topk,
        hidden: geometry.hidden,
        norm_eps: geometry.latent.and_then(|latent| latent.norm_eps),
    }
}

/// The per-tensor scales of an NVFP4 expert, each weight's before its input's.
fn global_scales(expert: &ExpertTensors) -> Vec<f32> {
    let of_projection = |projection: &Projection| match projection.data {
        ProjectionData::Nvfp4 { global_scale, input_scale, .. } => [Some(global_scale), input_scale],
        ProjectionData::Bf16(_) | ProjectionData::F32(_) => [None, None],
    };
    [&expert.gate, &expert.up, &expert.down].into_iter().flat_map(of_projection).flatten().collect()
}
