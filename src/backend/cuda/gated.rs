//! An expert of bf16 weights whose rows are all of a rank's tokens: gate with up and down as two products of cublasLt, and
//! the activation between them. Kernels for experts that share a launch have no place for a library; a shared expert, which
//! is alone, does.

use std::sync::{Arc, Mutex, PoisonError};

use super::around::AroundBuffers;
use super::dense::{Dense, DenseRows, DenseTools, RowCount};
use super::evidence::Evidence;
use crate::backend::{BackendError, ExpertsSpec, ForwardStats, checks};
use crate::checkpoint::tensors::{ExpertTensors, ProjectionData};
use crate::cuda::{DeviceBuffer, Function, LaunchShape};
use crate::gpu::grow;
use crate::jit::kernels::{Gated, GatedArgs};
use crate::select::{Identity, Quant};

/// The expert on the device.
pub struct GatedDense {
    tools: Arc<DenseTools>,
    spec: ExpertsSpec,
    /// `[2 * intermediate, hidden]`: gate, then up.
    fc1: Dense,
    fc2: Dense,
    activate: Function,
    evidence: Mutex<Evidence>,
}

impl GatedDense {
    /// What rows are counted under.
    pub const IDENTITY: Identity =
        Identity { provider: "nvidia", technique: "cublaslt", kernel: "gated_mlp", quant: Quant::None };

    /// Uploads the weights; none, and nothing left on the device, where there is no library, it has no fitting algorithm for
    /// both products, or the expert is not one of bf16 weights and activations.
    ///
    /// # Errors
    /// If a projection is not of the spec's shape, or memory or the activation's kernel is missing.
    pub fn new(
        tools: &Arc<DenseTools>,
        spec: ExpertsSpec,
        expert: &ExpertTensors,
    ) -> Result<Option<Self>, BackendError> {
        checks::spec(&spec)?;
        checks::expert(&spec, expert)?;
        let ExpertTensors { gate, up, down } = expert;
        let (ProjectionData::Bf16(gate), ProjectionData::Bf16(up), ProjectionData::Bf16(_)) =
            (&gate.data, &up.data, &down.data)
        else {
            return Ok(None);
        };
        if spec.quantise_activations {
            return Ok(None);
        }
        // Both are asked for before anything is uploaded: one alone is of no use.
        let ExpertsSpec { hidden, intermediate, .. } = spec;
        let (Some(first), Some(second)) =
            (tools.matmul(2 * intermediate, hidden)?, tools.matmul(hidden, intermediate)?)
        else {
            return Ok(None);
        };
        let fc1 = Dense::of_rows(tools, (2 * intermediate, hidden), &[gate, up], Some(first))?;
        let fc2 = Dense::computed_with(tools, down, Some(second))?;
        let gpu = tools.gpu();
        let request = Gated { activation: spec.activation }.request(gpu.arch());
        let activate = gpu.function(request, Gated::FUNCTION, 0)?;
        let evidence = Mutex::new(Evidence::new(gpu.stream(), 1)?);
        Ok(Some(Self { tools: tools.clone(), spec, fc1, fc2, activate, evidence }))
    }

    /// Queues every token that was uploaded through the expert, into `out` f32 `[num_tokens, hidden]`, which grows.
    ///
    /// # Errors
    /// If there is no room, or a launch is refused.
    pub fn queue(&self, buffers: &mut AroundBuffers, out: &mut DeviceBuffer<f32>) -> Result<(), BackendError> {
        let ExpertsSpec { hidden, intermediate, .. } = self.spec;
        let stream = self.tools.gpu().stream();
        let rows = buffers.first_part();
        let RowCount { most: num_rows, live } = rows.count;
        let room = buffers.extent().room;
        let mut evidence = self.evidence.lock().unwrap_or_else(PoisonError::into_inner);
        if num_rows > 0 {
            grow(out, room * hidden)?;
            grow(&mut buffers.products, 2 * room * intermediate)?;
            grow(&mut buffers.inner, room * intermediate)?;
            let (products, inner) = (buffers.products.address(), buffers.inner.address());
            // SAFETY: the rows were uploaded, as wide as the weight, and there is room for both products of every row.
            unsafe { self.fc1.queue(rows, products)? };
            let args = GatedArgs {
                products,
                inner,
                counts: evidence.counters(0)?,
                live_rows: live,
                num_rows: num_rows as u64,
                width: u32::try_from(intermediate).unwrap_or(u32::MAX),
                unused: 0,
            };
            let num_threads = num_rows * intermediate / Gated::VALUES_A_THREAD;
            let num_blocks = num_threads.div_ceil(Gated::NUM_THREADS as usize);
            let most = self.tools.most_blocks();
            let num_blocks = u32::try_from(num_blocks).unwrap_or(most).min(most);
            // SAFETY: both buffers have just got their room, and there are three counters.
            unsafe { self.activate.launch(stream, &LaunchShape::rows(num_blocks, Gated::NUM_THREADS), &args)? };
            if live == 0 {
                evidence.expect(0, num_rows as u64);
            }
            let rows = DenseRows { address: inner, num_parts: 1, count: rows.count };
            // SAFETY: the rows have just been queued, and there is room for every token.
            unsafe { self.fc2.queue(rows, out.address())? };
        }
        Ok(())
    }

    /// Says how many rows there were, where the device alone knew when they were queued.
    pub fn expect(&self, num_rows: usize) {
        let mut evidence = self.evidence.lock().unwrap_or_else(PoisonError::into_inner);
        evidence.expect(0, num_rows as u64);
    }

    /// Queues the way of what was counted to the host.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn queue_evidence(&self) -> Result<(), BackendError> {
        let mut evidence = self.evidence.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(evidence.queue(self.tools.gpu().stream())?)
    }

    /// What was done since the last time, once the host has waited for the stream behind [`Self::queue_evidence`].
    ///
    /// # Errors
    /// If rows were queued that the kernel between the products has not stored.
    pub fn evidence(&self) -> Result<ForwardStats, BackendError> {
        let mut evidence = self.evidence.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stats = ForwardStats::default();
        for counted in evidence.take() {
            if counted.stored != counted.queued {
                let (found, wanted) = (counted.stored, counted.queued);
                return Err(BackendError::Rows { identity: Self::IDENTITY, found, wanted });
            }
            if counted.stored > 0 {
                stats.rows_by_identity.push((Self::IDENTITY, counted.stored));
            }
        }
        Ok(stats)
    }

    /// Bytes of the weights.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.fc1.weight_bytes() + self.fc2.weight_bytes()
    }

    /// What computes its products, for the report and for what ranks compare.
    #[must_use]
    pub fn computed_by(&self) -> [(&'static str, String); 2] {
        [("shared_fc1", self.fc1.computed_by()), ("shared_fc2", self.fc2.computed_by())]
    }
}
