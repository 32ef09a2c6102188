//! What a session's buffers take, said and checked before anything is allocated.

use crate::backend;
use crate::config::{Deployment, Overlap, Transport};
use crate::dispatch::capacity::{BufferPlan, Capacity, CapacityError, ForwardSizes};
use crate::dispatch::overlap::tokens_in_buffers;
use crate::dispatch::placement::Placement;
use crate::dispatch::region::{Rooms, RowSizes, tagged_plan_bytes};
use crate::dispatch::travel::buffer_sizes;
use crate::gpu::Gpu;
use crate::host;
use crate::ids::{LayerIdx, Rank};
use crate::model::MoeGeometry;
use crate::select::LayerDecision;
use crate::world::World;

use super::LayerError;
use super::plan::LayerPlan;
use super::selected::Selected;
use super::session::SessionOptions;

pub(super) fn capacity_of(deployment: &Deployment) -> Capacity {
    Capacity::from(&deployment.dispatch)
}

/// Tokens of a rank that travel at once: no more than any rank will bring.
pub(super) fn tokens_at_once(capacity: Capacity, num_tokens: Option<usize>) -> usize {
    let declared = capacity.max_tokens_at_once();
    num_tokens.map_or(declared, |n| n.min(declared))
}

/// The largest buffers that any layer needs, said before anything is allocated.
pub(super) fn plan_buffers(
    world: &World,
    options: &SessionOptions<'_>,
    (geometry, plans, selected): (&MoeGeometry, &[LayerPlan], &Selected),
) -> BufferPlan {
    let capacity = capacity_of(&options.deployment);
    let tokens_at_once = tokens_at_once(capacity, options.num_tokens);
    let placement = Placement::new(geometry.num_experts, world.size());
    let num_experts = (world.size(), placement.local_experts(world.rank()).len());
    let of_layer = |decision: &LayerDecision| {
        let forwards = selected.goes_in_two_levels(decision.layer);
        let forwards = forwards.then(|| ForwardSizes::new(&selected.nodes, world.rank()));
        let tokens = if overlaps(&options.deployment, selected, decision.layer) {
            tokens_in_buffers(tokens_at_once, capacity.chunk_tokens.is_some())
        } else {
            tokens_at_once
        };
        let sizes = buffer_sizes(geometry, decision, num_experts, forwards);
        let mut plan = BufferPlan::new(&sizes, tokens);
        let transport = selected.selection.layer(decision.layer).map(|selected| selected.transport);
        if transport == Some(Transport::Nvlink) {
            plan.receive_bytes += tagged_plan_bytes(&sizes, tokens_at_once);
        }
        plan
    };
    let buffers =
        plans.iter().map(|plan| of_layer(&plan.decision)).max_by_key(BufferPlan::total_bytes).unwrap_or_default();
    if world.is_root() {
        tracing::info!(
            tokens_at_once,
            receive_bytes = buffers.receive_bytes,
            forward_bytes = buffers.forward_bytes,
            total_bytes = buffers.total_bytes(),
            "dispatch buffers planned for a rank, at most"
        );
    }
    buffers
}

/// Whether a layer's chunks may overlap, before it is known what carries them.
fn overlaps(deployment: &Deployment, selected: &Selected, layer: LayerIdx) -> bool {
    let technique = selected.selection.layer(layer).map(|selected| selected.winner.identity.technique);
    let is_on_gpu = technique.is_some_and(|technique| backend::cuda::family(technique).is_some());
    is_on_gpu && deployment.dispatch.overlap != Overlap::Off
}

/// Room for every layer's tokens and rows, where other ranks store them.
pub(super) fn rooms(
    world: &World,
    options: &SessionOptions<'_>,
    (geometry, plans, selected): (&MoeGeometry, &[LayerPlan], &Selected),
) -> Rooms {
    let (num_ranks, capacity) = (world.size(), capacity_of(&options.deployment));
    let tokens_at_once = tokens_at_once(capacity, options.num_tokens);
    let in_both = tokens_in_buffers(tokens_at_once, capacity.chunk_tokens.is_some());
    // The first rank has the most experts; rooms do not depend on it.
    let num_local_experts = Placement::new(geometry.num_experts, num_ranks).local_experts(Rank(0)).len();
    let sizes = |plan: &LayerPlan| buffer_sizes(geometry, &plan.decision, (num_ranks, num_local_experts), None);
    let of_layer = |plan: &LayerPlan| {
        let takes_turns = overlaps(&options.deployment, selected, plan.decision.layer);
        let second = if takes_turns { in_both - tokens_at_once } else { 0 };
        Rooms::new(&RowSizes::from(&sizes(plan)), [tokens_at_once, second])
    };
    plans.iter().map(of_layer).fold(Rooms::default(), Rooms::max)
}

/// Whether they fit where they will lie: in the GPU's memory, or in this host's.
pub(super) fn check_memory(
    world: &World,
    (options, gpu): (&SessionOptions<'_>, Option<&Gpu>),
    buffers: &BufferPlan,
    chunk_tokens: usize,
) -> Result<(), LayerError> {
    let needed_bytes = buffers.total_bytes();
    let is_over = |num_ranks: usize, free_bytes| needed_bytes.saturating_mul(num_ranks as u64) > free_bytes;
    if let Some(gpu) = gpu {
        let num_sharing = if options.deployment.cluster.share_gpus { world.local_size() } else { 1 };
        let free_bytes = gpu.device().memory()?.free_bytes;
        if is_over(num_sharing, free_bytes) {
            let gpu = gpu.device().facts().name.clone();
            let error = CapacityError::DeviceMemory { needed_bytes, num_sharing, gpu, free_bytes, chunk_tokens };
            return Err(error.into());
        }
        return Ok(());
    }
    match host::free_memory_bytes() {
        Some(free_bytes) if is_over(world.local_size(), free_bytes) => {
            let (local_size, host) = (world.local_size(), world.host().to_owned());
            Err(CapacityError::Memory { needed_bytes, local_size, host, free_bytes, chunk_tokens }.into())
        }
        _ => Ok(()),
    }
}
