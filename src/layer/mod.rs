//! One MoE layer across ranks: the control flow from hidden states to output. All it does was decided before.

mod abreast;
pub mod agreement;
mod block;
mod carriers;
mod device;
mod experts;
mod graph;
mod kernels;
mod load;
mod memory;
mod overlap;
mod parts;
pub mod plan;
mod routed;
mod selected;
mod session;
mod spans;
mod stats;
#[cfg(test)]
mod testing;
mod timers;
pub mod tune;

use std::path::PathBuf;
use std::rc::Rc;

use crate::backend::cuda::GatedDense;
use crate::backend::{BackendError, Experts};
use crate::checkpoint::CheckpointError;
use crate::config::{Levels, Transport};
use crate::cuda::CudaError;
use crate::dispatch::capacity::{Capacity, CapacityError};
use crate::dispatch::carrier::CarryError;
use crate::dispatch::nodes::Nodes;
use crate::dispatch::passing::ForwardError;
use crate::dispatch::travel::Travel;
use crate::exit::{Classify, Exit, Known};
use crate::fault::Injected;
use crate::gpu::GpuError;
use crate::ids::LayerIdx;
use crate::jit::JitError;
use crate::model::MoeGeometry;
use crate::routing::{RoutingError, TopK};
use crate::select::tactics::{RowBucket, Tactic};
use crate::select::{FormatError, Identity, LayerDecision, LayerSelection, SelectError};
use crate::world::{Refusal, World, WorldError};

pub(crate) use carriers::{Carriers, Needs};
pub(crate) use experts::{ExpertsLoader, read_experts};
pub use parts::Part;
pub(crate) use selected::{Asks, Jointly, PLAN, SESSION, must_match, select_jointly};
pub use session::{JitOptions, Session, SessionOptions};
pub use spans::{Span, Work};
pub use stats::{LayerStats, PhaseTimes};

use block::DeviceBlock;
use device::DeviceRoute;
use graph::LayerGraphs;
pub use graph::{GraphRefusal, NO_GRAPH_ASKED};
use overlap::Overlapped;
pub use overlap::{NO_OVERLAP_ASKED, OverlapRefusal};
use parts::{Latent, Router, Shared, SharedBy};

/// Everything that can end a session.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// Top-k ids from outside.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// The checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A layer's tensors in a backend.
    #[error("{layer} of {}", checkpoint.display())]
    Prepare {
        /// The layer.
        layer: LayerIdx,
        /// The checkpoint.
        checkpoint: PathBuf,
        /// What the backend says.
        #[source]
        source: BackendError,
    },
    /// What was asked for can't be selected.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// A layer is not what was selected for.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A backend can't be built here.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The GPU can't be had.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// Kernels.
    #[error(transparent)]
    Jit(Box<JitError>),
    /// A fault on purpose.
    #[error(transparent)]
    Fault(#[from] Injected),
    /// The declared capacity.
    #[error(transparent)]
    Capacity(#[from] CapacityError),
    /// Tokens or rows that did not arrive.
    #[error(transparent)]
    Carry(#[from] CarryError),
    /// Tokens that were not passed on.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// The world's shape.
    #[error(transparent)]
    World(#[from] WorldError),
    /// A layer that can't be recorded.
    #[error(transparent)]
    Graph(#[from] GraphRefusal),
    /// A layer whose chunks can't overlap.
    #[error(transparent)]
    Overlap(#[from] OverlapRefusal),
    /// Some rank failed; all end.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A layer that is not an MoE layer of the checkpoint.
    #[error("{layer} is not an MoE layer of {}; it has {}", checkpoint.display(), known)]
    NoSuchLayer {
        /// What was asked for.
        layer: LayerIdx,
        /// The checkpoint.
        checkpoint: PathBuf,
        /// The layers it has.
        known: String,
    },
}

impl From<CudaError> for LayerError {
    fn from(error: CudaError) -> Self {
        Self::Gpu(error.into())
    }
}

impl From<JitError> for LayerError {
    fn from(error: JitError) -> Self {
        Self::Jit(Box::new(error))
    }
}

impl Classify for LayerError {
    fn exit(&self) -> Exit {
        match self {
            Self::Routing(error) => error.exit(),
            Self::Checkpoint(error) => error.exit(),
            Self::Select(error) => error.exit(),
            Self::Format(error) => error.exit(),
            Self::Backend(error) => error.exit(),
            Self::Gpu(error) => error.exit(),
            Self::Capacity(error) => error.exit(),
            Self::Carry(error) => error.exit(),
            Self::Forward(error) => error.exit(),
            Self::Graph(error) => error.exit(),
            Self::Overlap(error) => error.exit(),
            Self::World(error) => error.exit(),
            Self::Fault(error) => error.exit(),
            Self::Jit(error) => error.exit(),
            Self::Refused(error) => error.exit(),
            Self::Prepare { source, .. } => source.exit(),
            Self::NoSuchLayer { .. } => Exit::BadInput,
        }
    }

    fn known(&self) -> Known {
        match self {
            Self::Refused(error) => error.known(),
            Self::Jit(error) => error.known(),
            Self::Carry(error) => error.known(),
            Self::Forward(error) => error.known(),
            _ => Known::Here,
        }
    }
}

/// One layer's weights on this rank and how it runs.
pub struct MoeLayer {
    decision: LayerDecision,
    selected: LayerSelection,
    geometry: MoeGeometry,
    router: Router,
    latent: Option<Latent>,
    shared: Option<Shared>,
    experts: Box<dyn Experts>,
    /// FC1's global scale, the largest of the layer over all ranks; absent with unquantised activations.
    input_scale: Option<f32>,
    travel: Travel,
    /// The nodes, where its tokens go in two levels.
    nodes: Option<Rc<Nodes>>,
    /// What carries its tokens.
    carrier: Transport,
    /// How they travel where they lie on a GPU; absent: on hosts.
    device: Option<DeviceRoute>,
    /// What surrounds the routed experts, where that lies on a GPU too.
    block: Option<DeviceBlock>,
    /// Its recordings, or why there are none.
    graphs: Result<LayerGraphs, String>,
    /// What its chunks overlap in, or why they go one after the other.
    overlap: Result<Overlapped, String>,
    weight_bytes: u64,
    /// What all ranks run, by rows of an expert.
    tactics: [Tactic; RowBucket::NUM],
}

/// What a step computes on.
#[derive(Debug, Clone, Copy)]
pub struct LayerInput<'a> {
    /// `[num_tokens, hidden]` hidden states of this rank's tokens.
    pub hidden: &'a [f32],
    /// Experts and weights from outside; absent: the router's.
    pub topk: Option<&'a TopK>,
    /// What is wanted.
    pub part: Part,
    /// Counts the steps of a run; equal on all ranks.
    pub step: u64,
    /// Every phase is kept with its begin: [`PhaseTimes::take_spans`].
    pub record_spans: bool,
}

/// What a step yields.
#[derive(Debug)]
pub struct LayerOutput {
    /// `[num_tokens, width]`
    pub values: Vec<f32>,
    /// Values of a row: the latent's for the routed part of a latent model, else `hidden`.
    pub width: usize,
    /// The experts that were used; absent for the shared part.
    pub topk: Option<TopK>,
    /// What was done.
    pub stats: LayerStats,
}

impl MoeLayer {
    /// Which layer this is and how it runs.
    #[must_use]
    pub fn decision(&self) -> &LayerDecision {
        &self.decision
    }

    /// What runs it on every rank, and why.
    #[must_use]
    pub fn selected(&self) -> &LayerSelection {
        &self.selected
    }

    /// Bytes of this rank's packed weights.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// How tokens travel.
    #[must_use]
    pub fn travel(&self) -> &Travel {
        &self.travel
    }

    /// Whether they cross to a node once and are passed on in it.
    #[must_use]
    pub fn levels(&self) -> Levels {
        if self.nodes.is_some() { Levels::Two } else { Levels::One }
    }

    /// What carries them.
    #[must_use]
    pub fn carrier(&self) -> Transport {
        self.carrier
    }

    /// Whether its steps are replayed as a CUDA graph; if not, why.
    ///
    /// # Errors
    /// Why not.
    pub fn graphs(&self) -> Result<(), &str> {
        self.graphs.as_ref().map(|_| ()).map_err(String::as_str)
    }

    /// Whether its chunks may travel while others are computed; if not, why.
    ///
    /// # Errors
    /// Why not.
    pub fn overlap(&self) -> Result<(), &str> {
        self.overlap.as_ref().map(|_| ()).map_err(String::as_str)
    }

    /// What may compute its experts: the winner, its companions, and the library that the shared ones were given to, all of
    /// which ranks have compared.
    #[must_use]
    pub fn identities(&self) -> Vec<Identity> {
        let shared = self.shared.as_ref().and_then(|shared| match &shared.by {
            SharedBy::Library(_) => Some(GatedDense::IDENTITY),
            SharedBy::Backend(_) => None,
        });
        self.selected.identities().into_iter().chain(shared).collect()
    }

    /// Its dense projections by name, and what computes each; none where hosts do.
    #[must_use]
    pub fn dense(&self) -> Vec<(&'static str, String)> {
        let Some(block) = &self.block else { return Vec::new() };
        let shared = self.shared.iter().flat_map(|shared| match &shared.by {
            SharedBy::Library(expert) => expert.computed_by().to_vec(),
            SharedBy::Backend(_) => Vec::new(),
        });
        block.around.computed_by().into_iter().chain(shared).collect()
    }

    /// Runs the layer on this rank's tokens; collective.
    ///
    /// `input.topk` must be valid ([`TopK::validate`]) and every rank must pass the same part and step.
    ///
    /// # Errors
    /// If ranks are at different steps or bring more tokens than declared: on all ranks alike. If a device fails, on its
    /// rank, which then has to end the job.
    pub fn forward(
        &self,
        world: &World,
        capacity: Capacity,
        input: &LayerInput<'_>,
    ) -> Result<LayerOutput, LayerError> {
        let mut stats = LayerStats::new(self.travel.placement.local_experts(world.rank()).len());
        if input.record_spans {
            stats.times.record_spans();
        }
        if let Some(on_device) = self.device.as_ref().zip(self.block.as_ref()) {
            return self.forward_on_device(on_device, (world, capacity), input, stats);
        }
        if input.part == Part::Shared {
            let values = self.shared_rows(input.hidden, &mut stats)?;
            return Ok(LayerOutput { values, width: self.geometry.hidden, topk: None, stats });
        }
        let topk = match input.topk {
            Some(topk) => topk.clone(),
            None => stats.times.route(|| self.router.route(input.hidden))?,
        };
        let down = self.latent.as_ref().map(|latent| stats.times.latent(|| latent.down(input.hidden)));
        let values = down.as_deref().unwrap_or(input.hidden);
        let tokens = (values, &topk, input.step);
        let mut routed = match &self.device {
            Some(route) => self.routed_on_device(route, world, capacity, tokens, &mut stats)?,
            None => self.routed_on_host(world, capacity, tokens, &mut stats)?,
        };
        if input.part == Part::Routed {
            return Ok(LayerOutput { values: routed, width: self.geometry.expert_hidden, topk: Some(topk), stats });
        }
        if let Some(latent) = &self.latent {
            routed = stats.times.latent(|| latent.up(routed));
        }
        if self.shared.is_some() {
            let shared = self.shared_rows(input.hidden, &mut stats)?;
            routed.iter_mut().zip(&shared).for_each(|(sum, value)| *sum += value);
        }
        Ok(LayerOutput { values: routed, width: self.geometry.hidden, topk: Some(topk), stats })
    }

    fn shared_rows(&self, hidden: &[f32], stats: &mut LayerStats) -> Result<Vec<f32>, LayerError> {
        let Some(shared) = &self.shared else { return Ok(vec![0.0; hidden.len()]) };
        let (rows, forward, fc1_input) = stats.times.shared(|| shared.forward(hidden, self.geometry.hidden))?;
        stats.count_shared(&forward, fc1_input);
        Ok(rows)
    }
}
