//! A session: a deployment and a checkpoint, decided on by all ranks, loaded, ready to run.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::backend::cuda::{DenseBy, DenseTools};
use crate::backend::{self, Backend, BackendError, Machine};
use crate::checkpoint::{BytesRead, Checkpoint};
use crate::config::{Deployment, Levels, Overlap, Transport};
use crate::dispatch::capacity::{BufferPlan, Capacity};
use crate::dispatch::device::{Forms, Way};
use crate::dispatch::layout::PayloadForm;
use crate::dispatch::nodes::Nodes;
use crate::dispatch::placement::Placement;
use crate::dispatch::travel::{Travel, combine_mode, payload_form, row_form};
use crate::fault::Stage;
use crate::gpu::{Gpu, Kernels};
use crate::ids::{ExpertIdx, LayerIdx, Rank};
use crate::model::MoeGeometry;
use crate::select::tactics::{RowBucket, Tactic};
use crate::select::{self, Digest, Environment, InstructionSet, Selection};
use crate::world::{Phase, World};

use super::block::{BlockMemory, DeviceBlock};
use super::carriers::{Carriers, Needs};
use super::device::OnGpu;
use super::graph;
use super::kernels;
use super::load::{Loaded, Loader};
use super::memory::{capacity_of, check_memory, plan_buffers, rooms, tokens_at_once};
use super::overlap;
use super::plan::{self, Asked, LayerPlan};
use super::selected::{self, Selected};
use super::tune::{self, TacticTable, Tuned};
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
    /// The number in this process of the GPU that this rank drives, where it drives one.
    pub gpu_ordinal: u32,
    /// Where kernels are kept and what compiles them.
    pub jit: JitOptions,
    /// NCCL, or the directory that it lies in; absent: where the loader finds it.
    pub nccl: Option<String>,
    /// cublasLt, likewise.
    pub cublaslt: Option<String>,
    /// What this rank is, from which all ranks select.
    pub environment: Environment,
    /// The hidden states are bf16 values.
    pub input_is_bf16: bool,
    /// What will be computed.
    pub part: Part,
    /// The most tokens that any rank will bring, where it is known: buffers are planned for no more.
    pub num_tokens: Option<usize>,
    /// Told how many bytes of this rank's experts, of how many, have been read and packed; by any thread.
    pub progress: &'a (dyn Fn(u64, u64) + Sync),
}

impl SessionOptions<'_> {
    fn asked(&self) -> Asked<'_> {
        let Self { layers, deployment, input_is_bf16, part, .. } = self;
        Asked { layers: layers.as_deref(), deployment, input_is_bf16: *input_is_bf16, part: *part }
    }
}

/// Where kernels are kept and what compiles them.
#[derive(Debug, Clone, Default)]
pub struct JitOptions {
    /// The cache of all ranks; absent: none can be found, and kernels are kept for this run alone.
    pub cache_dir: Option<PathBuf>,
    /// NVRTC, or the directory that it lies in; absent: where the loader finds it.
    pub nvrtc: Option<String>,
}

/// Layers ready to run on this rank. Every rank holds one, made by the same collective calls.
pub struct Session {
    layers: Vec<MoeLayer>,
    geometry: MoeGeometry,
    capacity: Capacity,
    buffers: BufferPlan,
    carriers: Carriers,
    selected: Selected,
    session: Digest,
    tactics: TacticTable,
    bytes_read: BytesRead,
    experts_elapsed: Duration,
    step_limit: Duration,
}

impl Session {
    /// Reads headers, decides, and loads this rank's experts; collective.
    ///
    /// # Errors
    /// The same on all ranks: if any rank finds fault with the checkpoint, the deployment or its memory.
    pub fn open(world: &World, options: &SessionOptions<'_>) -> Result<Self, LayerError> {
        let deployment = &options.deployment;
        let timeouts = &deployment.timeouts;
        let load = Phase { name: "load", limit: Duration::from_secs(timeouts.load_s), key: "timeouts.load_s" };
        world.enter(load);
        world.begin(format!("reading the headers of {}", options.checkpoint.display()));
        let checkpoint = world.agree(Checkpoint::open(&options.checkpoint))?;
        world.agree(capacity_of(deployment).validate())?;
        let plans = world.agree(plan::plan(&checkpoint, &options.asked()))?;
        report_warnings(world, &checkpoint, &plans);
        let geometry = checkpoint.model().geometry.clone();
        let mut selected = Selected::agree(world, options, &geometry, &plans)?;
        let placement = Placement::new(geometry.num_experts, world.size());
        let capacity = capacity_of(deployment);
        let tokens_at_once = tokens_at_once(capacity, options.num_tokens);
        let buffers = plan_buffers(world, options, (&geometry, &plans, &selected));
        let kernels = kernels::prepare(world, options, (&geometry, &plans), &mut selected)?;
        let compile_limit = Duration::from_secs(timeouts.compile_s);
        world.enter(Phase { name: "compile", limit: compile_limit, key: "timeouts.compile_s" });
        world.begin("building its kernels");
        let (gpu, backends) = world.agree(build_backends(world, &selected, options, &kernels))?;
        world.agree(check_memory(world, (options, gpu.as_ref()), &buffers, tokens_at_once))?;
        let needs = Needs {
            asked: deployment.dispatch.transport,
            start_limit: Duration::from_secs(timeouts.start_s),
            step_limit: Duration::from_secs(timeouts.step_s),
            nccl: options.nccl.as_deref(),
            gpu: gpu.as_ref(),
            rooms: rooms(world, options, (&geometry, &plans, &selected)),
            num_local_experts: placement.local_experts(Rank(0)).len(),
            overlap: deployment.dispatch.overlap,
        };
        let wanted: Vec<Transport> = selected.selection.layers.iter().map(|layer| layer.transport).collect();
        let carriers = Carriers::build(world, &needs, &wanted)?;
        world.enter(load);
        let on_gpu = gpu.as_ref().map(|gpu| OnGpu::new(gpu, deployment.dispatch.overlap));
        let on_gpu = world.agree(on_gpu.transpose())?;
        let dense = gpu.as_ref().filter(|_| kernels::routes_on_device(&geometry));
        let dense = world.agree(dense.map(|gpu| Dense::new(gpu, options)).transpose())?;
        let held = Held {
            backends: &backends,
            carriers: &carriers,
            on_gpu: on_gpu.as_ref(),
            dense: dense.as_ref(),
            placement,
        };
        let (mut layers, experts_elapsed) = load_layers(world, (&checkpoint, options), &held, (&plans, &selected))?;
        gpu.iter().for_each(Gpu::end_loading);
        let loaded = selected.agree_on_loaded(world, &layers)?;
        let tactics = tune::tune(world, options, &layers)?;
        layers.iter_mut().for_each(|layer| layer.tactics = tactics.of_layer(layer.decision.layer));
        let session = selected.agree_on_tactics(world, loaded, &tactics)?.digest();
        Ok(Self {
            layers,
            geometry,
            capacity,
            buffers,
            carriers,
            selected,
            session,
            tactics,
            bytes_read: checkpoint.bytes_read(),
            experts_elapsed,
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

    /// What runs every layer, and why.
    #[must_use]
    pub fn selection(&self) -> &Selection {
        &self.selected.selection
    }

    /// Which ranks share a node.
    #[must_use]
    pub fn nodes(&self) -> &Nodes {
        &self.selected.nodes
    }

    /// The digests that all ranks have compared: of the selection, and of the session.
    #[must_use]
    pub fn digests(&self) -> (Digest, Digest) {
        (self.selected.fingerprint.digest(), self.session)
    }

    /// The tactics that all ranks have chosen; empty where nothing was tuned.
    #[must_use]
    pub fn tactics(&self) -> &[Tuned] {
        &self.tactics.0
    }

    /// The technique of the first layer, and the instruction set that all ranks use for it.
    #[must_use]
    pub fn backend(&self) -> (&'static str, InstructionSet) {
        let technique = self.selection().techniques().first().copied().unwrap_or("none");
        (technique, selected::isa(self.selection(), technique))
    }

    /// Bytes of the checkpoint that this rank has read.
    #[must_use]
    pub fn bytes_read(&self) -> BytesRead {
        self.bytes_read
    }

    /// What this rank took to read and pack its experts, which are [`BytesRead::experts`]; the waits for others left out.
    #[must_use]
    pub fn experts_elapsed(&self) -> Duration {
        self.experts_elapsed
    }

    /// Lets go of what ranks hold together, once all of them are here; collective. A session that is dropped without it
    /// leaves that to the end of the process, because a rank that let go earlier than the others could cut them off.
    pub fn close(self, world: &World) {
        world.barrier();
        self.carriers.close();
        // What others had open is freed once they have closed it.
        world.barrier();
    }

    /// From here on hosts follow every step.
    #[cfg(test)]
    pub(super) fn follow_every_step(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.graphs = Err(String::new()));
    }

    /// Enters the step phase: every wait from here on has the step's limit.
    pub fn enter_steps(&self, world: &World) {
        world.enter(Phase { name: "step", limit: self.step_limit, key: "timeouts.step_s" });
    }
}

/// The backends that the selection names, by technique.
type Backends = Vec<(&'static str, Arc<dyn Backend>)>;

/// The GPU, where some layer runs on one, and on it the backends.
fn build_backends(
    world: &World,
    selected: &Selected,
    options: &SessionOptions<'_>,
    kernels: &Kernels,
) -> Result<(Option<Gpu>, Backends), LayerError> {
    world.fault(Stage::Compile)?;
    let techniques = selected.selection.techniques();
    let wants_gpu = techniques.iter().any(|technique| backend::cuda::family(technique).is_some());
    let gpu = if wants_gpu { Some(Gpu::open(options.gpu_ordinal, kernels)?) } else { None };
    let num_threads = options.num_threads;
    let build = |technique| {
        let isa = selected::isa(&selected.selection, technique);
        let machine = Machine { num_threads, isa: Some(isa), gpu: gpu.clone() };
        let backend = backend::build(technique, &machine)?;
        if world.is_root() {
            tracing::info!(technique, %isa, threads = num_threads, "backend");
        }
        Ok((technique, backend))
    };
    let backends = techniques.into_iter().map(build).collect::<Result<_, LayerError>>()?;
    Ok((gpu, backends))
}

/// What layers are loaded with.
struct Held<'a> {
    backends: &'a Backends,
    carriers: &'a Carriers,
    on_gpu: Option<&'a OnGpu>,
    dense: Option<&'a Dense>,
    placement: Placement,
}

/// What computes dense projections on a session's GPU, and the memory for it.
struct Dense {
    tools: Arc<DenseTools>,
    memory: BlockMemory,
}

impl Dense {
    fn new(gpu: &Gpu, options: &SessionOptions<'_>) -> Result<Self, BackendError> {
        let deployment = &options.deployment;
        // All ranks have found the same version, or none would be here.
        let has_library = options.environment.libraries.cublaslt.present().is_some();
        let by = if has_library && !deployment.moe.batch_invariant {
            let num_rows = capacity_of(deployment).max_tokens_at_once();
            DenseBy::Cublaslt { setting: options.cublaslt.clone(), num_rows }
        } else {
            DenseBy::Kernels
        };
        let tools = Arc::new(DenseTools::new(gpu, &by)?);
        let memory = BlockMemory::new(&tools)?;
        Ok(Self { tools, memory })
    }
}

/// Loads layer by layer, and says what the experts took; a fault on one rank ends all before the next layer.
fn load_layers(
    world: &World,
    (checkpoint, options): (&Checkpoint, &SessionOptions<'_>),
    &Held { backends, carriers, on_gpu, dense, placement }: &Held<'_>,
    (plans, selected): (&[LayerPlan], &Selected),
) -> Result<(Vec<MoeLayer>, Duration), LayerError> {
    let geometry = &checkpoint.model().geometry;
    let total = plans.iter().map(|plan| expert_bytes(checkpoint, plan, placement, world.rank())).sum();
    let done = AtomicU64::new(0);
    let progress = |bytes| {
        let before = done.fetch_add(bytes, Ordering::Relaxed);
        (options.progress)(before + bytes, total);
    };
    let load = |plan: &LayerPlan| {
        world.fault(Stage::Load)?;
        let layer_selection = selected.layer(plan)?;
        // Read again: what is packed has to be what was selected.
        let found = plan::plan_layer(checkpoint, &options.asked(), plan.problem.layer)?;
        select::check_format(&selected.selection, plan.problem.layer, &found.problem.quantisation)?;
        let technique = layer_selection.winner.identity.technique;
        let backend = backends.iter().find(|(known, _)| *known == technique).map(|(_, backend)| &**backend);
        let backend = backend.ok_or_else(|| BackendError::Technique { technique: technique.to_owned() })?;
        let batch_invariant = options.deployment.moe.batch_invariant;
        let rank = world.rank();
        let is_on_gpu = backend::cuda::family(technique).is_some();
        let dense = dense.filter(|_| is_on_gpu).map(|dense| &dense.tools);
        let loader = Loader { checkpoint, backend, dense, placement, rank, batch_invariant, progress: &progress };
        Ok((loader.load(&found.manifest, &plan.decision)?, layer_selection.clone()))
    };
    let nodes = Rc::new(selected.nodes.clone());
    let mut layers = Vec::new();
    let mut elapsed = Duration::ZERO;
    for plan in plans {
        let decision = &plan.decision;
        world.begin(format!("loading {} of {}", plan.problem.layer, checkpoint.dir().display()));
        let (loaded, selected) = world.agree::<_, LayerError>(load(plan))?;
        let Loaded { router, latent, around, shared, experts, experts_elapsed, largest_input_scale, weight_bytes } =
            loaded;
        elapsed += experts_elapsed;
        // Over all ranks: reduced over local experts only, a token's quantisation would depend on the split.
        let input_scale = decision.quantise_activations.then(|| world.max_f32(largest_input_scale));
        let travel = Travel {
            placement,
            payload: payload_form(decision, input_scale.unwrap_or(1.0)),
            mode: combine_mode(decision),
            row_form: row_form(geometry, decision),
        };
        let nodes = (selected.levels == Levels::Two).then(|| nodes.clone());
        let way = carriers.of(selected.transport).filter(|_| experts.on_device().is_some());
        let carried_by = way.as_ref().map_or(Transport::Host, Way::transport);
        let asked = options.deployment.dispatch.overlap;
        let route = |(on_gpu, way): (&OnGpu, Way)| -> Result<_, LayerError> {
            let is_quantised = matches!(travel.payload, PayloadForm::Nvfp4 { .. });
            let forms = Forms { travel, quantise: input_scale.filter(|_| !is_quantised) };
            let (place, way) = ((world.rank(), nodes.clone()), (way, decision.layer));
            let overlapped = on_gpu.overlapped(forms, place.clone(), way.clone(), asked)?;
            Ok((on_gpu.route(forms, place, way)?, overlapped))
        };
        let (device, overlapped) = world.agree(on_gpu.zip(way).map(route).transpose())?.unzip();
        let block = dense.zip(around).map(|(dense, around)| DeviceBlock::new(&dense.tools, around, &dense.memory));
        let wanted = options.deployment.moe.cuda_graph;
        let verdict = graph::verdict((device.as_ref(), block.as_ref()), carried_by);
        let at_once = tokens_at_once(capacity_of(&options.deployment), options.num_tokens);
        let graphs = world.agree(graph::choose(wanted, (world, decision.layer), verdict, at_once))?;
        let facts = overlap::Facts { asked, num_ranks: world.size(), is_recorded: graphs.is_ok() };
        let overlap = world.agree(facts.choose(decision.layer, overlapped.flatten()))?;
        if let (Err(why), Overlap::Auto, true) = (&overlap, asked, world.is_root()) {
            tracing::info!("chunks of {} do not overlap: {why}", decision.layer);
        }
        layers.push(MoeLayer {
            decision: *decision,
            selected,
            geometry: geometry.clone(),
            router,
            latent,
            shared,
            experts,
            input_scale,
            travel,
            nodes,
            carrier: carried_by,
            device,
            block,
            graphs,
            overlap,
            weight_bytes,
            tactics: [Tactic::UNTUNED; RowBucket::NUM],
        });
    }
    Ok((layers, elapsed))
}

/// Bytes of a rank's own experts of a layer, as the checkpoint stores them.
fn expert_bytes(checkpoint: &Checkpoint, plan: &LayerPlan, placement: Placement, rank: Rank) -> u64 {
    let experts = placement.local_experts(rank).map(ExpertIdx::from_index);
    // For a bar alone: what fails here fails again as it is read, and is told then.
    experts.map(|expert| checkpoint.expert_bytes(&plan.manifest, expert).unwrap_or(0)).sum()
}

/// What is odd about the files, which every rank has found alike, is said once.
fn report_warnings(world: &World, checkpoint: &Checkpoint, plans: &[LayerPlan]) {
    if !world.is_root() {
        return;
    }
    for warning in checkpoint.warnings().iter().chain(plans.iter().flat_map(|plan| &plan.manifest.warnings)) {
        if warning.is_note() {
            tracing::info!("{warning}");
        } else {
            tracing::warn!("{warning}");
        }
    }
}
