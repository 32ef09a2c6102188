//! Batches whose rows the device alone knows: everything is queued that may run, and lists made on the device say what does.

use super::{Compiled, Group, GroupedGemmArgs, gemm, padded, padded_rows};
use crate::backend::cuda::narrow;
use crate::backend::cuda::programs::{Launch, Program};
use crate::backend::{BackendError, LiveBatch, LiveBounds};
use crate::cuda::{DeviceBuffer, Function};
use crate::gpu::grow;
use crate::jit::kernels::deal::{DealArgs, DealKernel, DealTable, MAX_PROGRAMS, MayRun, Sizes, format_of};
use crate::jit::kernels::grouped_gemm::{ExpertEntry, Weights};

/// What dealing needs of a group beside its counts.
pub(super) struct Dealer {
    function: Function,
    /// `[num_experts]`
    entries: DeviceBuffer<ExpertEntry>,
    /// `[num_experts]`
    formats: DeviceBuffer<u32>,
}

impl Dealer {
    fn new(group: &Group) -> Result<Self, BackendError> {
        let (gpu, stream) = (&group.shared.gpu, group.shared.stream());
        let entries: Vec<ExpertEntry> = group.experts.iter().map(|expert| expert.entry).collect();
        let formats: Vec<u32> = group.experts.iter().map(|expert| format_of(expert.weights)).collect();
        Ok(Self {
            function: gpu.function(DealKernel.request(gpu.arch()), DealKernel::FUNCTION, 0)?,
            entries: DeviceBuffer::from_slice(stream, &entries)?,
            formats: DeviceBuffer::from_slice(stream, &formats)?,
        })
    }
}

impl Group {
    /// What may run within such bounds, and which of the group's programs each is.
    fn table(&self, bounds: LiveBounds) -> Result<(DealTable, Vec<usize>), BackendError> {
        let mut formats = Vec::new();
        for weights in [Weights::Nvfp4, Weights::Bf16] {
            if self.experts.iter().any(|expert| expert.weights == weights) {
                let candidates = self.chooser.candidates(&gemm(&self.spec, weights)?);
                formats.push(candidates.up_to(bounds.max_expert_rows));
            }
        }
        let table = DealTable::new(&formats);
        let of_group = |wanted: &MayRun| {
            let is_wanted =
                |known: &Compiled| (known.weights, known.schedule) == (wanted.weights, wanted.cost.schedule);
            let at = self.programs.iter().position(is_wanted);
            at.unwrap_or_else(|| unreachable!("{wanted:?} was compiled when the experts were packed"))
        };
        let programs = table.programs.iter().map(of_group).collect();
        Ok((table, programs))
    }

    /// Queues all that may run.
    pub(super) fn queue_live_batch(&self, batch: &LiveBatch<'_>, out: u64) -> Result<(), BackendError> {
        let (gpu, num_experts) = (&self.shared.gpu, self.experts.len());
        if num_experts == 0 {
            return Ok(());
        }
        let (table, programs) = self.table(batch.bounds)?;
        let mut workspace = self.shared.lock();
        let workspace = &mut workspace.device;
        let num_padded = padded_rows(batch.bounds.max_rows, num_experts);
        if programs.iter().any(|&at| self.programs[at].program.wants_images()) {
            grow(&mut workspace.image, num_padded * padded(self.spec.hidden))?;
        }
        let parts_bytes = programs.iter().map(|&at| self.programs[at].program.parts_bytes()).max();
        grow(&mut workspace.parts, parts_bytes.unwrap_or(0))?;
        workspace.grow_gathered(gpu.stream(), num_padded)?;
        let inner = self.grow_inner(workspace, batch.bounds.max_rows)?;
        grow(&mut workspace.entries, programs.len() * num_experts)?;
        grow(&mut workspace.dealt, MAX_PROGRAMS)?;
        let mut dealer = self.dealer.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if dealer.is_none() {
            *dealer = Some(Dealer::new(self)?);
        }
        let dealer = dealer.as_ref().unwrap_or_else(|| unreachable!("just made"));
        let may_overlap = Program::may_overlap(gpu.device(), programs.iter().map(|&at| &self.programs[at].program));
        let sizes = Sizes::new(&gemm(&self.spec, Weights::Nvfp4)?, gpu.device().facts().num_multiprocessors);
        let deal = DealArgs {
            expert_offsets: batch.expert_offsets.address_of(0..num_experts + 1)?,
            experts: dealer.entries.address(),
            formats: dealer.formats.address(),
            dealt: workspace.entries.address(),
            launches: workspace.dealt.address(),
            ..table.args(sizes, narrow(num_experts), may_overlap)
        };
        // SAFETY: there are as many offsets, entries and formats as experts, and room for every program's list and count. They
        // live in workspaces or with the caller, whose freeing waits for the device.
        unsafe { dealer.function.launch(gpu.stream(), &DealKernel::SHAPE, &deal)? };
        let evidence = self.evidence.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut launches = Vec::with_capacity(programs.len());
        for (index, &at) in programs.iter().enumerate() {
            let program = &self.programs[at].program;
            let args = GroupedGemmArgs {
                experts: workspace.entries.address_of(index * num_experts..(index + 1) * num_experts)?,
                expert_offsets: batch.expert_offsets.address(),
                row_token: batch.row_token.address_of(0..batch.bounds.max_rows)?,
                tokens: batch.tokens.address(),
                image: workspace.image.address(),
                gathered: workspace.gathered.address(),
                inner: inner.of(program),
                out,
                counts: evidence.counters(at)?,
                parts: workspace.parts.address(),
                given_out: workspace.given_out.address(),
                dealt: workspace.dealt.address_of(index..index + 1)?,
                token_scale: batch.token_scale,
                num_experts: narrow(num_experts),
            };
            launches.push(Launch { program, args });
        }
        // SAFETY: every buffer has room for the most rows that there may be, which whoever counts on the device keeps to;
        // every row names a token, likewise. They live in workspaces or with the caller, whose freeing waits. What the lists are
        // was queued above. Launches that overlap with anything to do are of no more rows than both have an input of FC2 for.
        unsafe { self.shared.side.queue_dealt(gpu.stream(), &launches, may_overlap) }
    }

    /// Counts the rows that programs were dealt, by the host's own choice from the same counts.
    pub(super) fn expect_rows(&self, expert_offsets: &[usize], bounds: LiveBounds) -> Result<(), BackendError> {
        let (table, programs) = self.table(bounds)?;
        let rows = || expert_offsets.windows(2).map(|offsets| offsets[1] - offsets[0]);
        let dealt = table.deal(self.experts.iter().map(|expert| expert.weights).zip(rows()));
        let mut evidence = self.evidence.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for (program, num_rows) in dealt.into_iter().zip(rows()) {
            if let Some(at) = program {
                evidence.expect(programs[at], num_rows as u64);
            }
        }
        Ok(())
    }
}
