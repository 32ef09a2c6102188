//! A group of experts on the device: packed once, then FC1 with the activation and FC2 for every batch.

mod live;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use rayon::prelude::*;

use super::evidence::{Counted, Evidence};
use super::programs::{Launch, Program};
use super::workspace::{Device, Host, Workspace};
use super::{Shared, family};
use crate::backend::checks::{self, add_counts};
use crate::backend::{
    BackendError, Beside, DeviceBatch, DeviceExperts, ExpertBatch, Experts, ExpertsSpec, ForwardStats, LiveBatch,
    LiveBounds,
};
use crate::checkpoint::tensors::{ExpertTensors, Projection, ProjectionData};
use crate::cuda::DeviceBuffer;
use crate::gpu::grow;
use crate::jit::kernels::grouped_gemm::{
    ExpertEntry, GroupedGemm, GroupedGemmArgs, IMAGE_GROUP_ROWS, STEP_K, Schedule, Weights,
};
use crate::jit::kernels::{BatchSchedules, Chooser, ExpertRows, MAX_ROWS_AT_ONCE};
use crate::numerics::nvfp4::{BLOCK, QuantCounts};
use crate::select::Identity;

/// Rows that are computed at a time, which bounds the device's buffers.
const MAX_WAVE_ROWS: usize = 1 << 15;

/// An expert on the device.
pub(super) struct PackedExpert {
    /// With the addresses of its images.
    pub entry: ExpertEntry,
    pub weights: Weights,
    pub identity: Identity,
    /// Of its images.
    pub num_bytes: usize,
}

/// Experts that are packed, whose images lie in `blocks`, with the kernels for them.
pub(super) fn group(
    shared: Arc<Shared>,
    spec: ExpertsSpec,
    experts: Vec<PackedExpert>,
    blocks: Vec<DeviceBuffer<u8>>,
) -> Result<Box<dyn Experts>, BackendError> {
    let family = family(shared.technique).unwrap_or_else(|| unreachable!("{} has no schedules", shared.technique));
    let chooser = Chooser { family, batch_invariant: spec.batch_invariant };
    let mut programs: Vec<Compiled> = Vec::new();
    for weights in [Weights::Nvfp4, Weights::Bf16] {
        // Experts of one format have one identity.
        let Some(expert) = experts.iter().find(|expert| expert.weights == weights) else { continue };
        let gemm = gemm(&spec, weights)?;
        for schedule in chooser.all(&gemm) {
            let program = shared.programs.schedule(schedule, &gemm)?;
            programs.push(Compiled { weights, schedule, identity: expert.identity, program });
        }
    }
    let evidence = Mutex::new(Evidence::new(shared.stream(), programs.len())?);
    Ok(Box::new(Group {
        shared,
        spec,
        experts,
        _blocks: blocks,
        chooser,
        programs,
        evidence,
        dealer: Mutex::new(None),
    }))
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
    /// What their entries point into.
    _blocks: Vec<DeviceBuffer<u8>>,
    chooser: Chooser,
    programs: Vec<Compiled>,
    evidence: Mutex<Evidence>,
    /// Absent until the device alone knows a batch's rows.
    dealer: Mutex<Option<live::Dealer>>,
}

/// The kernels of one schedule over weights of one format.
struct Compiled {
    weights: Weights,
    schedule: Schedule,
    identity: Identity,
    program: Program,
}

/// The experts that one program computes in a batch.
pub(super) struct Share {
    program_idx: usize,
    /// `[num_experts]`, zero for the others.
    pub(super) entries: Vec<ExpertEntry>,
    num_rows: u64,
}

/// Where FC2's input lies of few rows and of many. With up to [`MAX_ROWS_AT_ONCE`] neither reaches the other.
struct Inner {
    small: u64,
    large: u64,
}

impl Inner {
    fn of(&self, program: &Program) -> u64 {
        if program.wants_images() { self.large } else { self.small }
    }
}

/// A batch, dealt out.
struct Dealt {
    shares: Vec<Share>,
    /// Multiprocessors of the launch of many rows, where it runs beside that of few.
    of_large: Option<u32>,
}

impl Experts for Group {
    fn forward(&self, batch: &ExpertBatch<'_>, out: &mut [f32]) -> Result<ForwardStats, BackendError> {
        checks::batch(&self.spec, self.experts.len(), batch, out);
        let Dealt { shares, of_large } = self.shares(batch.expert_offsets, None)?;
        let (gpu, stream) = (&self.shared.gpu, self.shared.stream());
        let mut workspace = self.shared.lock();
        let Host { tokens, row_token, out: device_out } = &mut workspace.host;
        let bf16: Vec<u16> = batch.tokens.par_iter().map(|value| half::bf16::from_f32(*value).to_bits()).collect();
        grow(tokens, bf16.len())?;
        tokens.upload(stream, 0, &bf16)?;
        grow(row_token, batch.num_rows())?;
        row_token.upload(stream, 0, batch.row_token)?;
        grow(device_out, batch.num_rows().min(MAX_WAVE_ROWS) * self.spec.hidden)?;
        let Workspace { host: Host { tokens, row_token, out: device_out }, device } = &mut *workspace;
        let expert_offsets = batch.expert_offsets;
        let (token_scale, beside) = (batch.token_scale, Beside::default());
        let on_device = DeviceBatch { tokens, token_scale, row_token, expert_offsets, beside };
        device.upload_entries(gpu, &shares)?;
        for rows in waves(batch.num_rows()) {
            let out = &mut out[rows.start * self.spec.hidden..rows.end * self.spec.hidden];
            self.wave(device, &on_device, (rows, device_out.address()), &shares, of_large)?;
            device_out.download_into(stream, 0, out)?;
        }
        self.queue_evidence()?;
        stream.synchronise()?;
        self.evidence()
    }

    fn on_device(&self) -> Option<&dyn DeviceExperts> {
        Some(self)
    }

    fn weight_bytes(&self) -> u64 {
        self.experts.iter().map(|expert| expert.num_bytes as u64).sum()
    }

    fn workspace_bytes(&self, num_rows: usize) -> u64 {
        let wave = num_rows.min(MAX_WAVE_ROWS);
        let tokens = 2 * num_rows * self.spec.hidden;
        let images =
            2 * padded_rows(wave, self.experts.len()) * (padded(self.spec.hidden) + padded(self.spec.intermediate));
        let small = 2 * wave.min(MAX_ROWS_AT_ONCE) * padded(self.spec.intermediate);
        let rows = size_of::<u32>() * num_rows + size_of::<f32>() * wave * self.spec.hidden;
        (tokens + images + small + rows) as u64
    }
}

impl DeviceExperts for Group {
    fn queue(&self, batch: &DeviceBatch<'_>, out: &mut DeviceBuffer<f32>) -> Result<(), BackendError> {
        checks::offsets(self.experts.len(), batch.expert_offsets);
        let Dealt { shares, of_large } = self.shares(batch.expert_offsets, batch.beside.rows_of_all)?;
        let mut workspace = self.shared.lock();
        workspace.device.upload_entries(&self.shared.gpu, &shares)?;
        for rows in waves(batch.num_rows()) {
            let to = out.address_of(rows.start * self.spec.hidden..rows.end * self.spec.hidden)?;
            self.wave(&mut workspace.device, batch, (rows, to), &shares, of_large)?;
        }
        Ok(())
    }

    fn queue_live(&self, batch: &LiveBatch<'_>, out: &mut DeviceBuffer<f32>) -> Result<(), BackendError> {
        self.queue_live_batch(batch, out.address_of(0..batch.bounds.max_rows * self.spec.hidden)?)
    }

    fn expect(&self, expert_offsets: &[usize], bounds: LiveBounds) -> Result<(), BackendError> {
        checks::offsets(self.experts.len(), expert_offsets);
        self.expect_rows(expert_offsets, bounds)
    }

    fn queue_evidence(&self) -> Result<(), BackendError> {
        let mut evidence = self.evidence.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(evidence.queue(self.shared.stream())?)
    }

    /// Rows that the device did not store are a fault, whatever the buffer holds.
    fn evidence(&self) -> Result<ForwardStats, BackendError> {
        let mut evidence = self.evidence.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stats = ForwardStats::default();
        for (program, counted) in self.programs.iter().zip(evidence.take()) {
            let Counted { num_saturated, num_zeroed, stored, queued } = counted;
            if stored != queued {
                return Err(BackendError::Rows { identity: program.identity, found: stored, wanted: queued });
            }
            if queued == 0 {
                continue;
            }
            let blocks_per_row = if self.spec.quantise_activations { self.spec.intermediate / BLOCK } else { 0 };
            let num_blocks = queued * blocks_per_row as u64;
            add_counts(&mut stats.fc2_input, QuantCounts { num_blocks, num_saturated, num_zeroed });
            match stats.rows_by_identity.iter_mut().find(|(known, _)| *known == program.identity) {
                Some((_, rows)) => *rows += stored,
                None => stats.rows_by_identity.push((program.identity, stored)),
            }
        }
        Ok(stats)
    }
}

/// Ranges of rows that are computed one behind the other.
fn waves(num_rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..num_rows).step_by(MAX_WAVE_ROWS).map(move |start| start..num_rows.min(start + MAX_WAVE_ROWS))
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
    /// The schedules of the experts of a format, of which each has `rows`.
    fn schedules(&self, weights: Weights, rows: &[ExpertRows]) -> Result<BatchSchedules, BackendError> {
        let of_format = self.experts.iter().zip(rows).filter(|(expert, _)| expert.weights == weights);
        let rows: Vec<ExpertRows> = of_format.map(|(_, rows)| *rows).collect();
        Ok(self.chooser.batch_of_many(&gemm(&self.spec, weights)?, &rows))
    }

    /// Deals the experts that have rows out to programs: as their rows `of_all` batches of the step say, where there are more.
    fn shares(&self, expert_offsets: &[usize], of_all: Option<&[usize]>) -> Result<Dealt, BackendError> {
        let mut shares: BTreeMap<usize, Share> = BTreeMap::new();
        let here = expert_offsets.windows(2).map(|offsets| offsets[1] - offsets[0]);
        let rows: Vec<ExpertRows> = match of_all {
            Some(of_all) => here.zip(of_all).map(|(here, &in_all)| ExpertRows { here, in_all }).collect(),
            None => here.map(ExpertRows::alone).collect(),
        };
        let of_nvfp4 = self.schedules(Weights::Nvfp4, &rows)?;
        let of_bf16 = self.schedules(Weights::Bf16, &rows)?;
        for (index, (expert, rows)) in self.experts.iter().zip(&rows).enumerate() {
            let num_rows = rows.here;
            if num_rows == 0 {
                continue;
            }
            let schedules = if expert.weights == Weights::Nvfp4 { of_nvfp4 } else { of_bf16 };
            let wanted = (expert.weights, schedules.of(rows.in_all));
            let at = self.programs.iter().position(|known| (known.weights, known.schedule) == wanted);
            let at = at.unwrap_or_else(|| unreachable!("{wanted:?} was compiled when the experts were packed"));
            let entries = || vec![ExpertEntry::default(); self.experts.len()];
            let share = shares.entry(at).or_insert_with(|| Share { program_idx: at, entries: entries(), num_rows: 0 });
            share.entries[index] = expert.entry;
            share.num_rows += num_rows as u64;
        }
        let shares: Vec<Share> = shares.into_values().collect();
        let of_large = if shares.len() == 2 { self.of_large(of_nvfp4, &rows)? } else { None };
        Ok(Dealt { shares, of_large })
    }

    /// Multiprocessors of the launch of many rows, where all experts that have rows are NVFP4's and go into two.
    fn of_large(&self, schedules: BatchSchedules, rows: &[ExpertRows]) -> Result<Option<u32>, BackendError> {
        let of_other =
            self.experts.iter().zip(rows).any(|(expert, rows)| expert.weights != Weights::Nvfp4 && rows.here > 0);
        if of_other {
            return Ok(None);
        }
        let num_multiprocessors = self.shared.gpu.device().facts().num_multiprocessors;
        Ok(schedules.multiprocessors_of_large(&gemm(&self.spec, Weights::Nvfp4)?, rows, num_multiprocessors))
    }

    /// Makes room for FC2's input of so many rows.
    fn grow_inner(&self, workspace: &mut Device, num_rows: usize) -> Result<Inner, BackendError> {
        let width = padded(self.spec.intermediate);
        let has = |images: bool| self.programs.iter().any(|known| known.program.wants_images() == images);
        let small = if has(true) && has(false) { num_rows.min(MAX_ROWS_AT_ONCE) * width } else { 0 };
        let len = small + padded_rows(num_rows, self.experts.len()) * width;
        grow(&mut workspace.inner, len)?;
        Ok(Inner { small: workspace.inner.address(), large: workspace.inner.address_of(small..len)? })
    }

    /// Queues the kernels of a range of rows, whose results go to the address that comes with it.
    fn wave(
        &self,
        workspace: &mut Device,
        batch: &DeviceBatch<'_>,
        (rows, out): (Range<usize>, u64),
        shares: &[Share],
        of_large: Option<u32>,
    ) -> Result<(), BackendError> {
        let (gpu, num_experts) = (&self.shared.gpu, self.experts.len());
        let num_padded = padded_rows(rows.len(), num_experts);
        let offsets = clipped_offsets(batch.expert_offsets, &rows);
        grow(&mut workspace.expert_offsets, offsets.len())?;
        gpu.upload(&mut workspace.expert_offsets, 0, &offsets)?;
        // By the number of rows alone, whatever computes them: memory does not grow when some first find another kernel.
        let programs = || self.programs.iter().map(|known| &known.program);
        if programs().any(Program::wants_images) {
            grow(&mut workspace.image, num_padded * padded(self.spec.hidden))?;
        }
        grow(&mut workspace.parts, programs().map(Program::parts_bytes).max().unwrap_or(0))?;
        workspace.grow_gathered(gpu.stream(), num_padded)?;
        let inner = self.grow_inner(workspace, rows.len())?;
        let num_spare = batch.beside.num_spare_multiprocessors;
        let of_large = of_large.filter(|_| num_spare == 0);
        let mut evidence = self.evidence.lock().unwrap_or_else(PoisonError::into_inner);
        let mut launches = Vec::with_capacity(shares.len());
        for (index, share) in shares.iter().enumerate() {
            let program = &self.programs[share.program_idx].program;
            let args = GroupedGemmArgs {
                experts: workspace.entries.address_of(index * num_experts..(index + 1) * num_experts)?,
                expert_offsets: workspace.expert_offsets.address(),
                row_token: batch.row_token.address_of(rows.clone())?,
                tokens: batch.tokens.address(),
                image: workspace.image.address(),
                gathered: workspace.gathered.address(),
                inner: inner.of(program),
                out,
                counts: evidence.counters(share.program_idx)?,
                parts: workspace.parts.address(),
                given_out: workspace.given_out.address(),
                dealt: 0,
                token_scale: batch.token_scale,
                num_experts: u32::try_from(num_experts).unwrap_or(u32::MAX),
            };
            if rows.start == 0 {
                evidence.expect(share.program_idx, share.num_rows);
            }
            launches.push(Launch { program, args });
        }
        // SAFETY: every buffer has room for this batch's rows, as computed above from the same offsets that are uploaded,
        // and every row names a token of the batch, which `checks::batch` sees to, or whoever made the batch on the
        // device. They live in workspaces or with the caller, whose freeing waits for the device. Beside each other, both write
        // rows of their own experts and FC2's input of their own, and count in `gathered` what groups of their own rows have.
        unsafe { self.shared.side.queue(gpu.stream(), &launches, of_large, num_spare) }
    }
}
