//! One MoE layer across ranks: the control flow from hidden states to output. All it does was decided before.

pub mod agreement;
mod carriers;
mod kernels;
mod load;
mod parts;
pub mod plan;
mod selected;
mod session;
mod spans;
mod stats;
pub mod tune;

use std::path::PathBuf;

use crate::backend::{BackendError, ExpertBatch, Experts, ForwardStats};
use crate::checkpoint::CheckpointError;
use crate::dispatch::capacity::{Capacity, CapacityError};
use crate::dispatch::carrier::CarryError;
use crate::dispatch::layout::PayloadForm;
use crate::dispatch::plan::{ComputePlan, Slots};
use crate::dispatch::transport::{StepTag, TokenTransport, exchange_sizes};
use crate::exit::{Classify, Exit, Known};
use crate::fault::{Action, Injected, Stage};
use crate::gpu::GpuError;
use crate::ids::LayerIdx;
use crate::jit::JitError;
use crate::model::MoeGeometry;
use crate::numerics::nvfp4;
use crate::routing::{RoutingError, TopK};
use crate::select::tactics::{RowBucket, Tactic};
use crate::select::{FormatError, LayerDecision, LayerSelection, SelectError};
use crate::world::{Refusal, World, WorldError};

pub use parts::Part;
pub(crate) use selected::{Asks, Jointly, PLAN, SESSION, must_match, select_jointly};
pub use session::{JitOptions, Session, SessionOptions};
pub use spans::{Span, Work};
pub use stats::{LayerStats, PhaseTimes};

use parts::{Latent, Router, Shared};

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
    /// The world's shape.
    #[error(transparent)]
    World(#[from] WorldError),
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
            Self::World(error) => error.exit(),
            Self::Fault(error) => error.exit(),
            Self::Jit(error) => error.exit(),
            Self::Refused(error) => error.exit(),
            Self::Prepare { .. } | Self::NoSuchLayer { .. } => Exit::BadInput,
        }
    }

    fn known(&self) -> Known {
        match self {
            Self::Refused(error) => error.known(),
            Self::Jit(error) => error.known(),
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
    transport: TokenTransport,
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
    pub fn transport(&self) -> &TokenTransport {
        &self.transport
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
        let mut stats = LayerStats::new(self.transport.placement.local_experts(world.rank()).len());
        if input.record_spans {
            stats.times.record_spans();
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
        let mut routed = self.routed_rows(world, capacity, (values, &topk, input.step), &mut stats)?;
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

    /// Dispatch, expert computation and combine, chunk by chunk.
    fn routed_rows(
        &self,
        world: &World,
        capacity: Capacity,
        (values, topk, step): (&[f32], &TopK, u64),
        stats: &mut LayerStats,
    ) -> Result<Vec<f32>, LayerError> {
        let hidden = self.geometry.expert_hidden;
        let all = Slots { num_topk: topk.num_topk, idx: &topk.idx, weights: &topk.weights };
        let num_tokens = all.num_tokens();
        let drift = u64::from(world.has_fault(Stage::Dispatch, &Action::Drift));
        let tag = StepTag { layer: self.decision.layer, step: step + drift, num_topk: topk.num_topk };
        let sizes = stats.times.dispatch(|| exchange_sizes(world, tag, num_tokens, capacity));
        let chunks = sizes.map_err(|error| world.refuse(error))?;
        stats.num_chunks = chunks.num_chunks as u64;
        // From every rank's tokens, so that all ranks run the same: a rank's own rows are no ground.
        let rows = RowBucket::of(chunks.first_chunk_tokens * topk.num_topk, self.geometry.num_experts);
        let tactic = self.tactics[rows.index()];
        let mut out = vec![0f32; num_tokens * hidden];
        let sent_bytes = || world.exchanged().sent_bytes;
        for chunk in 0..chunks.num_chunks {
            let tokens = chunks.tokens(chunk, num_tokens);
            let slots = all.tokens(tokens.clone());
            let span = tokens.start * hidden..tokens.end * hidden;
            world.fault(Stage::Dispatch)?;
            let sent_before = sent_bytes();
            let mut handle = stats
                .times
                .dispatch(|| self.transport.dispatch(world, &values[span.clone()], slots, chunks.chunk_tokens))?;
            stats.count_dispatch(&handle);
            let (chunk, num_tokens, num_rows) = (chunk as u64, tokens.len() as u64, handle.compute.num_rows() as u64);
            let work = |sent_bytes| Work { chunk, num_tokens, num_rows, sent_bytes };
            stats.times.describe(work(sent_bytes() - sent_before));
            world.fault(Stage::Experts)?;
            let poison = world.has_fault(Stage::Experts, &Action::Poison);
            let rows = stats.times.experts(|| self.compute(&mut handle.tokens, &handle.compute, (tactic, poison)));
            let (rows, forward, fc1_input) = rows?;
            stats.count_forward(forward, fc1_input);
            stats.times.describe(Work { num_tokens: handle.num_received_tokens() as u64, ..work(0) });
            world.fault(Stage::Combine)?;
            let sent_before = sent_bytes();
            stats.times.combine(|| {
                self.transport.combine(world, &handle, &rows, (slots, chunks.chunk_tokens), &mut out[span])
            })?;
            stats.times.describe(work(sent_bytes() - sent_before));
        }
        Ok(out)
    }

    /// The received tokens through this rank's experts: `[num_rows, hidden]`.
    fn compute(
        &self,
        tokens: &mut [f32],
        plan: &ComputePlan,
        (tactic, poison): (Tactic, bool),
    ) -> Result<(Vec<f32>, ForwardStats, nvfp4::QuantCounts), BackendError> {
        let hidden = self.geometry.expert_hidden;
        let mut fc1_input = nvfp4::QuantCounts::default();
        let travelled_quantised = matches!(self.transport.payload, PayloadForm::Nvfp4 { .. });
        if let Some(input_scale) = self.input_scale
            && !travelled_quantised
        {
            fc1_input = parts::quantise_in_place(tokens, hidden, input_scale);
        }
        let batch = ExpertBatch {
            tokens,
            token_scale: self.input_scale.unwrap_or(1.0),
            row_token: &plan.row_token,
            expert_offsets: &plan.expert_offsets,
            tactic,
        };
        // A poisoned buffer shows whether every value is written: all bits set is a NaN.
        let stale = if poison { f32::from_bits(u32::MAX) } else { 0.0 };
        let mut rows = vec![stale; plan.num_rows() * hidden];
        let stats = self.experts.forward(&batch, &mut rows)?;
        Ok((rows, stats, fc1_input))
    }

    fn shared_rows(&self, hidden: &[f32], stats: &mut LayerStats) -> Result<Vec<f32>, LayerError> {
        let Some(shared) = &self.shared else { return Ok(vec![0.0; hidden.len()]) };
        let (rows, forward, fc1_input) = stats.times.shared(|| shared.forward(hidden, self.geometry.hidden))?;
        stats.count_shared(&forward, fc1_input);
        Ok(rows)
    }
}
