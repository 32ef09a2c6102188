//! The kernels that a session's layers need on GPUs, on every rank before any weight is read.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::cuda::family;
use crate::gpu::Kernels;
use crate::jit::cache::{Cache, Place};
use crate::jit::kernels::{Chooser, TopkVariant, around, products, travel};
use crate::jit::{Arch, KernelRequest, PrepareSettings};
use crate::model::MoeGeometry;
use crate::world::World;

use super::LayerError;
use super::plan::LayerPlan;
use super::selected::Selected;
use super::session::SessionOptions;

/// Finds or compiles them, and puts their keys into what all ranks compare; collective. None where no layer runs on GPUs.
///
/// # Errors
/// The same on all ranks: see [`crate::jit::prepare()`].
pub(super) fn prepare(
    world: &World,
    options: &SessionOptions<'_>,
    (geometry, plans): (&MoeGeometry, &[LayerPlan]),
    selected: &mut Selected,
) -> Result<Kernels, LayerError> {
    let deployment = &options.deployment;
    if selected.selection.techniques().into_iter().all(|technique| family(technique).is_none()) {
        return Ok(Kernels::default());
    }
    let requests = world.agree(requests(options, (geometry, plans), selected))?;
    let host = world.host().to_owned();
    let place = Place::Rank { host, local_rank: world.local_rank(), layout: deployment.jit.layout };
    let mut cache = Cache::open(options.jit.cache_dir.as_deref(), &place);
    let settings = PrepareSettings {
        nvrtc: options.jit.nvrtc.as_deref(),
        require_warm: deployment.jit.require_warm,
        num_threads: options.num_threads,
        limit: Duration::from_secs(deployment.timeouts.compile_s),
    };
    let prepared = crate::jit::prepare(world, &mut cache, &requests, &settings)?;
    if world.is_root() {
        let (num_kernels, elapsed) = (prepared.kernels.len(), prepared.elapsed);
        tracing::info!(num_kernels, num_compiled = prepared.num_compiled, ?elapsed, "kernels are ready");
    }
    selected.add_artefacts(&prepared);
    let cubins = prepared.kernels.into_iter().map(|(request, artefact)| (request, artefact.cubin().to_vec()));
    Ok(Kernels::Prepared(Arc::from(cubins.collect::<Vec<_>>())))
}

fn requests(
    options: &SessionOptions<'_>,
    (geometry, plans): (&MoeGeometry, &[LayerPlan]),
    selected: &Selected,
) -> Result<Vec<KernelRequest>, LayerError> {
    let capability = options.environment.gpu.present().map(|gpu| gpu.compute_capability);
    let mut requests = Vec::new();
    for plan in plans {
        let layer = selected.layer(plan)?;
        let technique = layer.winner.identity.technique;
        // Selection has seen to it that a rank of a GPU technique has a GPU that kernels are made for.
        let (Some(family), Some(arch)) = (family(technique), capability.and_then(Arch::of)) else { continue };
        let chooser = Chooser { family, batch_invariant: options.deployment.moe.batch_invariant };
        requests.extend(around(geometry, arch));
        requests.extend(travel(&plan.problem, &plan.decision, layer.levels, arch));
        requests.extend(products(&plan.problem, plan.decision.activation, chooser, arch));
    }
    Ok(requests)
}

/// Whether the router's kernel takes as many experts and slots; else the host routes, and what surrounds the routed experts
/// stays there.
pub(super) fn routes_on_device(geometry: &MoeGeometry) -> bool {
    TopkVariant::of(geometry).is_some()
}
