//! A session: a deployment and a checkpoint, decided on by all ranks, loaded, ready to run.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use crate::backend::{self, Backend, Isa};
use crate::checkpoint::{BytesRead, Checkpoint, ExpertFormat, LayerManifest};
use crate::config::Deployment;
use crate::dispatch::capacity::{BufferPlan, BufferSizes, Capacity, CapacityError};
use crate::dispatch::combine::{CombineMode, RowForm};
use crate::dispatch::host::HostTransport;
use crate::dispatch::layout::{CombineForm, PayloadForm, TokenLayout};
use crate::dispatch::placement::Placement;
use crate::fault::Stage;
use crate::host;
use crate::ids::LayerIdx;
use crate::model::MoeGeometry;
use crate::select::{self, LayerDecision, LayerFacts, SelectError, SharedFacts, TokenForm};
use crate::world::{Phase, World};

use super::load::{Loaded, Loader};
use super::{LayerError, MoeLayer, Part};

/// What a session is built from.
pub struct SessionOptions<'a> {
    /// The checkpoint's directory.
    pub checkpoint: PathBuf,
    /// The layers to load; absent: every MoE layer.
    pub layers: Option<Vec<LayerIdx>>,
    /// How to run.
    pub deployment: Deployment,
    /// Threads of this rank.
    pub num_threads: usize,
    /// The best instruction set to use; the ranks settle on the best that all have.
    pub isa: Isa,
    /// The hidden states are bf16 values.
    pub input_is_bf16: bool,
    /// What will be computed.
    pub part: Part,
    /// The most tokens that any rank will bring, where it is known: buffers are planned for no more.
    pub num_tokens: Option<usize>,
    /// Told how many of this rank's experts, of how many, have been packed.
    pub progress: &'a dyn Fn(u64, u64),
}

/// Layers ready to run on this rank. Every rank holds one, made by the same collective calls.
pub struct Session {
    layers: Vec<MoeLayer>,
    geometry: MoeGeometry,
    capacity: Capacity,
    buffers: BufferPlan,
    technique: &'static str,
    isa: Isa,
    bytes_read: BytesRead,
    step_limit: Duration,
}

/// What was decided before any weight is read: equal on all ranks.
struct Plan {
    manifests: Vec<LayerManifest>,
    decisions: Vec<LayerDecision>,
    technique: &'static str,
}

impl Session {
    /// Reads headers, decides, and loads this rank's experts; collective.
    ///
    /// # Errors
    /// The same on all ranks: if any rank finds fault with the checkpoint, the deployment or its memory.
    pub fn open(world: &World, options: &SessionOptions<'_>) -> Result<Self, LayerError> {
        let deployment = &options.deployment;
        world.enter(Phase { name: "load", limit: Duration::from_secs(deployment.timeouts.load_s) });
        let checkpoint = world.agree(Checkpoint::open(&options.checkpoint))?;
        let plan = world.agree(decide(&checkpoint, options))?;
        report_warnings(world, &checkpoint, &plan);
        let geometry = checkpoint.model().geometry.clone();
        let placement = Placement::new(geometry.num_experts, world.size());
        let capacity = capacity_of(deployment);
        let buffers = world.agree(plan_buffers(world, &geometry, &plan, (capacity, options.num_tokens)))?;
        let isa = agree_on_isa(world, options.isa);
        let backend = world.agree(backend::build(plan.technique, options.num_threads, Some(isa)))?;
        if world.is_root() {
            tracing::info!(technique = plan.technique, %isa, threads = options.num_threads, "backend");
        }
        let layers = load_layers(world, &checkpoint, (&*backend, placement), &plan, options.progress)?;
        Ok(Self {
            layers,
            geometry,
            capacity,
            buffers,
            technique: plan.technique,
            isa,
            bytes_read: checkpoint.bytes_read(),
            step_limit: Duration::from_secs(deployment.timeouts.step_s),
        })
    }

    /// The layers, in the order asked for.
    #[must_use]
    pub fn layers(&self) -> &[MoeLayer] {
        &self.layers
    }

    /// The geometry that all layers share.
    #[must_use]
    pub fn geometry(&self) -> &MoeGeometry {
        &self.geometry
    }

    /// The declared capacity, which [`MoeLayer::forward`] takes.
    #[must_use]
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// The most that the dispatch buffers of this rank take.
    #[must_use]
    pub fn buffers(&self) -> &BufferPlan {
        &self.buffers
    }

    /// The technique that serves every layer, and the instruction set all ranks use.
    #[must_use]
    pub fn backend(&self) -> (&'static str, Isa) {
        (self.technique, self.isa)
    }

    /// Bytes of the checkpoint that this rank has read.
    #[must_use]
    pub fn bytes_read(&self) -> BytesRead {
        self.bytes_read
    }

    /// Enters the step phase: every wait from here on has the step's limit.
    pub fn enter_steps(&self, world: &World) {
        world.enter(Phase { name: "step", limit: self.step_limit });
    }
}

/// Which layers, and what each runs.
fn decide(checkpoint: &Checkpoint, options: &SessionOptions<'_>) -> Result<Plan, LayerError> {
    let known = checkpoint.moe_layers();
    let chosen = options.layers.clone().unwrap_or_else(|| known.clone());
    if let Some(&layer) = chosen.iter().find(|layer| !known.contains(layer)) {
        let known: Vec<String> = known.iter().map(|layer| layer.0.to_string()).collect();
        return Err(LayerError::NoSuchLayer {
            layer,
            checkpoint: options.checkpoint.clone(),
            known: if known.is_empty() { "no MoE layers".to_owned() } else { format!("layers {}", known.join(", ")) },
        });
    }
    capacity_of(&options.deployment).validate()?;
    let geometry = &checkpoint.model().geometry;
    let mut plan = Plan { manifests: Vec::new(), decisions: Vec::new(), technique: "" };
    for layer in chosen {
        let manifest = checkpoint.layer(layer)?;
        if options.part == Part::Shared && manifest.shared.is_none() {
            return Err(SelectError::NoShared { layer }.into());
        }
        let decision = select::decide(&facts(&manifest), geometry, &options.deployment, options.input_is_bf16)?;
        plan.manifests.push(manifest);
        plan.decisions.push(decision);
    }
    plan.technique = select::choose_technique(&options.deployment, backend::TECHNIQUES, &plan.decisions)?;
    Ok(plan)
}

fn facts(manifest: &LayerManifest) -> LayerFacts {
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

fn capacity_of(deployment: &Deployment) -> Capacity {
    Capacity {
        num_max_tokens_per_rank: deployment.dispatch.num_max_tokens_per_rank,
        chunk_tokens: deployment.dispatch.chunk_tokens,
    }
}

/// The largest buffers that any layer needs, checked against this host's memory and said before anything is allocated.
fn plan_buffers(
    world: &World,
    geometry: &MoeGeometry,
    plan: &Plan,
    (capacity, num_tokens): (Capacity, Option<usize>),
) -> Result<BufferPlan, CapacityError> {
    let declared = capacity.max_tokens_at_once();
    let tokens_at_once = num_tokens.map_or(declared, |n| n.min(declared));
    let placement = Placement::new(geometry.num_experts, world.size());
    let of_layer = |decision: &LayerDecision| {
        let layout = TokenLayout {
            payload: payload_form(decision, 1.0),
            hidden: geometry.expert_hidden,
            num_topk: geometry.num_topk,
        };
        let row_form = row_form(geometry, decision);
        let sizes = BufferSizes {
            num_ranks: world.size(),
            num_local_experts: placement.local_experts(world.rank()).len(),
            num_topk: geometry.num_topk,
            hidden: geometry.expert_hidden,
            intermediate: geometry.intermediate,
            token_bytes: layout.row_bytes(),
            return_bytes: row_form.form.row_bytes(row_form.hidden),
            per_slot: decision.combine_at_home,
        };
        BufferPlan::new(&sizes, tokens_at_once)
    };
    let buffers = plan.decisions.iter().map(of_layer).max_by_key(BufferPlan::total_bytes).unwrap_or_default();
    if world.is_root() {
        tracing::info!(
            tokens_at_once,
            receive_bytes = buffers.receive_bytes,
            total_bytes = buffers.total_bytes(),
            "dispatch buffers planned for a rank, at most"
        );
    }
    match host::free_memory_bytes() {
        Some(free_bytes) if buffers.total_bytes().saturating_mul(world.local_size() as u64) > free_bytes => {
            Err(CapacityError::Memory {
                needed_bytes: buffers.total_bytes(),
                local_size: world.local_size(),
                host: world.host().to_owned(),
                free_bytes,
                chunk_tokens: tokens_at_once,
            })
        }
        _ => Ok(buffers),
    }
}

fn payload_form(decision: &LayerDecision, input_scale: f32) -> PayloadForm {
    match decision.token_form {
        TokenForm::F32 => PayloadForm::F32,
        TokenForm::Bf16 => PayloadForm::Bf16,
        TokenForm::Nvfp4 => PayloadForm::Nvfp4 { input_scale },
    }
}

fn row_form(geometry: &MoeGeometry, decision: &LayerDecision) -> RowForm {
    let form = if decision.combine_bf16 { CombineForm::Bf16 } else { CombineForm::F32 };
    RowForm { hidden: geometry.expert_hidden, form }
}

/// The best instruction set that every rank has: all run the same kernels.
fn agree_on_isa(world: &World, mine: Isa) -> Isa {
    let all = world.all_gather_u64([mine as u64]);
    let lowest = all.iter().map(|[isa]| *isa).min().unwrap_or_default();
    [Isa::Scalar, Isa::Avx2, Isa::Avx512].into_iter().find(|isa| *isa as u64 == lowest).unwrap_or(Isa::Scalar)
}

/// Loads layer by layer; a fault on one rank ends all before the next layer.
fn load_layers(
    world: &World,
    checkpoint: &Checkpoint,
    (backend, placement): (&dyn Backend, Placement),
    plan: &Plan,
    progress: &dyn Fn(u64, u64),
) -> Result<Vec<MoeLayer>, LayerError> {
    let geometry = &checkpoint.model().geometry;
    let total = (placement.local_experts(world.rank()).len() * plan.decisions.len()) as u64;
    let done = Cell::new(0);
    let loader = Loader {
        checkpoint,
        backend,
        placement,
        rank: world.rank(),
        progress: &|| {
            done.set(done.get() + 1);
            progress(done.get(), total);
        },
    };
    let mut layers = Vec::new();
    for (manifest, decision) in plan.manifests.iter().zip(&plan.decisions) {
        let Loaded { router, latent, shared, experts, largest_input_scale, weight_bytes } =
            world.agree(faulty(world).and_then(|()| loader.load(manifest, decision)))?;
        // Over all ranks: reduced over local experts only, a token's quantisation would depend on the split.
        let input_scale = decision.quantise_activations.then(|| world.max_f32(largest_input_scale));
        let transport = HostTransport {
            placement,
            payload: payload_form(decision, input_scale.unwrap_or(1.0)),
            mode: if decision.combine_at_home { CombineMode::Slot } else { CombineMode::Rank },
            row_form: row_form(geometry, decision),
        };
        layers.push(MoeLayer {
            decision: *decision,
            geometry: geometry.clone(),
            router,
            latent,
            shared,
            experts,
            input_scale,
            transport,
            weight_bytes,
        });
    }
    Ok(layers)
}

fn faulty(world: &World) -> Result<(), LayerError> {
    Ok(world.fault(Stage::Load)?)
}

/// What is odd about the files, which every rank has found alike, is said once.
fn report_warnings(world: &World, checkpoint: &Checkpoint, plan: &Plan) {
    if !world.is_root() {
        return;
    }
    for warning in checkpoint.warnings().iter().chain(plan.manifests.iter().flat_map(|manifest| &manifest.warnings)) {
        if warning.is_note() {
            tracing::info!("{warning}");
        } else {
            tracing::warn!("{warning}");
        }
    }
}
