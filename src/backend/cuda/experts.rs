//! A group of experts on the device: packed once, then FC1 with the activation and FC2 for every batch.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use rayon::prelude::*;

use super::pack::{self, Format, PackError};
use super::programs::Program;
use super::workspace::{NUM_COUNTERS, Workspace, grow, upload};
use super::{Shared, family};
use crate::backend::checks::{self, add_counts};
use crate::backend::{BackendError, ExpertBatch, Experts, ExpertsBuilder, ExpertsSpec, ForwardStats};
use crate::checkpoint::tensors::{ExpertTensors, Projection, ProjectionData};
use crate::cuda::DeviceBuffer;
use crate::jit::kernels::grouped_gemm::{
    ExpertEntry, GroupedGemm, GroupedGemmArgs, IMAGE_GROUP_ROWS, STEP_K, Schedule, Weights,
};
use crate::jit::kernels::{BatchSchedules, Chooser};
use crate::numerics::nvfp4::{BLOCK, QuantCounts};
use crate::select::Identity;

/// Rows that are computed at a time, which bounds the device's buffers.
const MAX_WAVE_ROWS: usize = 1 << 15;

struct PackedExpert {
    fc1: DeviceBuffer<u8>,
    fc2: DeviceBuffer<u8>,
    entry: ExpertEntry,
    weights: Weights,
    identity: Identity,
}

/// Packs experts as they come.
pub(super) struct Builder {
    shared: Arc<Shared>,
    spec: ExpertsSpec,
    experts: Vec<PackedExpert>,
}

impl Builder {
    pub(super) fn new(shared: Arc<Shared>, spec: ExpertsSpec, num_local_experts: usize) -> Self {
        Self { shared, spec, experts: Vec::with_capacity(num_local_experts) }
    }
}

impl ExpertsBuilder for Builder {
    fn push(&mut self, expert: &ExpertTensors) -> Result<(), BackendError> {
        checks::expert(&self.spec, expert)?;
        let packed = |projection| move |source: PackError| BackendError::Pack { projection, source };
        let fc1 = pack::pack_fc1(&expert.gate, &expert.up).map_err(packed("gate with up"))?;
        let fc2 = pack::pack_fc2(&expert.down).map_err(packed("down"))?;
        if fc1.format != fc2.format {
            return Err(BackendError::MixedExpert);
        }
        let weights = match fc1.format {
            Format::Nvfp4 => Weights::Nvfp4,
            Format::Bf16 => Weights::Bf16,
        };
        let stream = &self.shared.stream;
        let (fc1, fc2) = (DeviceBuffer::from_slice(stream, &fc1.bytes)?, DeviceBuffer::from_slice(stream, &fc2.bytes)?);
        let entry = ExpertEntry { fc1: fc1.address(), fc2: fc2.address(), ..entry(expert) };
        let identity = checks::identity(self.shared.technique, &self.spec, expert);
        self.experts.push(PackedExpert { fc1, fc2, entry, weights, identity });
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Box<dyn Experts>, BackendError> {
        let Self { shared, spec, experts } = *self;
        let family = family(shared.technique).unwrap_or_else(|| unreachable!("{} has no schedules", shared.technique));
        let chooser = Chooser { family, batch_invariant: spec.batch_invariant };
        let mut programs = Vec::new();
        for weights in [Weights::Nvfp4, Weights::Bf16] {
            if experts.iter().all(|expert| expert.weights != weights) {
                continue;
            }
            let gemm = gemm(&spec, weights)?;
            for schedule in chooser.all(&gemm) {
                programs.push(((weights, schedule), shared.programs.schedule(schedule, &gemm)?));
            }
        }
        Ok(Box::new(Group { shared, spec, experts, chooser, programs }))
    }
}

/// The global scale of a weight and of its input.
fn scales(weight: &Projection) -> (f32, Option<f32>) {
    match weight.data {
        ProjectionData::Nvfp4 { global_scale, input_scale, .. } => (global_scale, input_scale),
        ProjectionData::Bf16(_) | ProjectionData::F32(_) => (1.0, None),
    }
}

/// An expert's scales; its addresses are still missing.
pub(super) fn entry(expert: &ExpertTensors) -> ExpertEntry {
    let (gate_scale, _) = scales(&expert.gate);
    let (up_scale, _) = scales(&expert.up);
    let (down_scale, input_scale) = scales(&expert.down);
    ExpertEntry { gate_scale, up_scale, down_scale, input_scale: input_scale.unwrap_or(1.0), ..ExpertEntry::default() }
}

pub(super) fn gemm(spec: &ExpertsSpec, weights: Weights) -> Result<GroupedGemm, BackendError> {
    let narrow = |width, found| u32::try_from(found).map_err(|_| BackendError::Width { width, found });
    Ok(GroupedGemm {
        hidden: narrow("hidden", spec.hidden)?,
        intermediate: narrow("intermediate", spec.intermediate)?,
        activation: spec.activation,
        weights,
        quantise: spec.quantise_activations,
    })
}

/// Packed experts.
struct Group {
    shared: Arc<Shared>,
    spec: ExpertsSpec,
    experts: Vec<PackedExpert>,
    chooser: Chooser,
    programs: Vec<((Weights, Schedule), Program)>,
}

/// The experts that one program computes in a batch.
struct Share<'a> {
    program: &'a Program,
    identity: Identity,
    /// `[num_experts]`, zero for the others.
    entries: Vec<ExpertEntry>,
    num_rows: u64,
}

impl Experts for Group {
    fn forward(&self, batch: &ExpertBatch<'_>, out: &mut [f32]) -> Result<ForwardStats, BackendError> {
        checks::batch(&self.spec, self.experts.len(), batch, out);
        let shares = self.shares(batch)?;
        let mut workspace = self.shared.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        self.upload(&mut workspace, batch, &shares)?;
        let num_rows = batch.num_rows();
        for start in (0..num_rows).step_by(MAX_WAVE_ROWS) {
            let rows = start..num_rows.min(start + MAX_WAVE_ROWS);
            let out = &mut out[rows.start * self.spec.hidden..rows.end * self.spec.hidden];
            self.wave(&mut workspace, batch, rows, &shares)?;
            workspace.out.download_into(&self.shared.stream, 0, out)?;
        }
        self.stats(&workspace, &shares)
    }

    fn weight_bytes(&self) -> u64 {
        self.experts.iter().map(|expert| (expert.fc1.num_bytes() + expert.fc2.num_bytes()) as u64).sum()
    }

    fn workspace_bytes(&self, num_rows: usize) -> u64 {
        let wave = num_rows.min(MAX_WAVE_ROWS);
        let tokens = 2 * num_rows * self.spec.hidden;
        let images =
            2 * padded_rows(wave, self.experts.len()) * (padded(self.spec.hidden) + padded(self.spec.intermediate));
        let rows = wave * (size_of::<u32>() + size_of::<f32>() * self.spec.hidden);
        (tokens + images + rows) as u64
    }
}

/// A width in whole steps.
pub(super) fn padded(width: usize) -> usize {
    width.next_multiple_of(STEP_K as usize)
}

/// At most so many rows, each expert's rounded up.
pub(super) fn padded_rows(num_rows: usize, num_experts: usize) -> usize {
    let group = IMAGE_GROUP_ROWS as usize;
    num_rows.next_multiple_of(group) + num_rows.min(num_experts) * (group - 1)
}

/// The rows of each expert in a range of all rows, as offsets from its start.
fn clipped_offsets(expert_offsets: &[usize], rows: &Range<usize>) -> Vec<u32> {
    let clipped = |offset: &usize| offset.clamp(&rows.start, &rows.end) - rows.start;
    expert_offsets.iter().map(|offset| u32::try_from(clipped(offset)).unwrap_or(u32::MAX)).collect()
}

impl Group {
    /// The schedules of the experts of a format.
    fn schedules(&self, weights: Weights, batch: &ExpertBatch<'_>) -> Result<BatchSchedules, BackendError> {
        let rows = self.experts.iter().zip(batch.expert_offsets.windows(2));
        let counts = rows.filter(|(expert, _)| expert.weights == weights).map(|(_, offsets)| offsets[1] - offsets[0]);
        Ok(self.chooser.batch(&gemm(&self.spec, weights)?, &counts.collect::<Vec<_>>()))
    }

    /// Deals the experts that have rows out to programs.
    fn shares(&self, batch: &ExpertBatch<'_>) -> Result<Vec<Share<'_>>, BackendError> {
        let mut shares: BTreeMap<usize, Share<'_>> = BTreeMap::new();
        let of_nvfp4 = self.schedules(Weights::Nvfp4, batch)?;
        let of_bf16 = self.schedules(Weights::Bf16, batch)?;
        for (index, (expert, offsets)) in self.experts.iter().zip(batch.expert_offsets.windows(2)).enumerate() {
            let num_rows = offsets[1] - offsets[0];
            if num_rows == 0 {
                continue;
            }
            let schedules = if expert.weights == Weights::Nvfp4 { of_nvfp4 } else { of_bf16 };
            let wanted = (expert.weights, schedules.of(num_rows));
            let at = self.programs.iter().position(|(known, _)| *known == wanted);
            let at = at.unwrap_or_else(|| unreachable!("{wanted:?} was compiled when the experts were packed"));
            let share = shares.entry(at).or_insert_with(|| Share {
                program: &self.programs[at].1,
                identity: expert.identity,
                entries: vec![ExpertEntry::default(); self.experts.len()],
                num_rows: 0,
            });
            share.entries[index] = expert.entry;
            share.num_rows += num_rows as u64;
        }
        Ok(shares.into_values().collect())
    }

    /// What all waves of a batch read.
    fn upload(
        &self,
        workspace: &mut Workspace,
        batch: &ExpertBatch<'_>,
        shares: &[Share<'_>],
    ) -> Result<(), BackendError> {
        let stream = &self.shared.stream;
        let tokens: Vec<u16> = batch.tokens.par_iter().map(|value| half::bf16::from_f32(*value).to_bits()).collect();
        upload(&mut workspace.tokens, stream, &tokens)?;
        let entries: Vec<ExpertEntry> = shares.iter().flat_map(|share| share.entries.iter().copied()).collect();
        upload(&mut workspace.entries, stream, &entries)?;
        upload(&mut workspace.counts, stream, &vec![0; shares.len() * NUM_COUNTERS])
    }

    /// Queues the kernels of a range of rows; their results come to the beginning of `workspace.out`.
    fn wave(
        &self,
        workspace: &mut Workspace,
        batch: &ExpertBatch<'_>,
        rows: Range<usize>,
        shares: &[Share<'_>],
    ) -> Result<(), BackendError> {
        let stream = &self.shared.stream;
        let num_experts = self.experts.len();
        let num_padded = padded_rows(rows.len(), num_experts);
        upload(&mut workspace.expert_offsets, stream, &clipped_offsets(batch.expert_offsets, &rows))?;
        upload(&mut workspace.row_token, stream, &batch.row_token[rows.clone()])?;
        if shares.iter().any(|share| share.program.wants_images()) {
            grow(&mut workspace.image, num_padded * padded(self.spec.hidden))?;
        }
        grow(&mut workspace.inner, num_padded * padded(self.spec.intermediate))?;
        grow(&mut workspace.out, rows.len() * self.spec.hidden)?;
        for (index, share) in shares.iter().enumerate() {
            let args = GroupedGemmArgs {
                experts: workspace.entries.address_of(index * num_experts..(index + 1) * num_experts)?,
                expert_offsets: workspace.expert_offsets.address(),
                row_token: workspace.row_token.address(),
                tokens: workspace.tokens.address(),
                inner: workspace.inner.address(),
                out: workspace.out.address(),
                counts: workspace.counts.address_of(index * NUM_COUNTERS..(index + 1) * NUM_COUNTERS)?,
                barrier: workspace.barrier.address(),
                token_scale: batch.token_scale,
                num_experts: u32::try_from(num_experts).unwrap_or(u32::MAX),
            };
            // SAFETY: every buffer has room for this batch's rows, as computed above from the same offsets that are uploaded,
            // every row names a token of the batch (`checks::batch`), and all of them live until `download_into` has waited.
            unsafe { share.program.queue(stream, &args, workspace.image.address())? };
        }
        Ok(())
    }

    /// What the device counted. Rows that it did not store are a fault, whatever the buffer holds.
    fn stats(&self, workspace: &Workspace, shares: &[Share<'_>]) -> Result<ForwardStats, BackendError> {
        let mut counts = vec![0; shares.len() * NUM_COUNTERS];
        workspace.counts.download_into(&self.shared.stream, 0, &mut counts)?;
        let mut stats = ForwardStats::default();
        for (share, counts) in shares.iter().zip(counts.chunks(NUM_COUNTERS)) {
            let found = counts[2];
            if found != share.num_rows {
                return Err(BackendError::Rows { identity: share.identity, found, wanted: share.num_rows });
            }
            let num_blocks = if self.spec.quantise_activations {
                share.num_rows * (self.spec.intermediate / BLOCK) as u64
            } else {
                0
            };
            let of_share = QuantCounts { num_blocks, num_saturated: counts[0], num_zeroed: counts[1] };
            add_counts(&mut stats.fc2_input, of_share);
            match stats.rows_by_identity.iter_mut().find(|(known, _)| *known == share.identity) {
                Some((_, rows)) => *rows += found,
                None => stats.rows_by_identity.push((share.identity, found)),
            }
        }
        Ok(stats)
    }
}
