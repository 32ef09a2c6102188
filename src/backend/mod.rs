//! Expert computation: FC1, activation, FC2 over expert-major rows, on this rank alone.
//!
//! A backend knows nothing of ranks, routing or files. It is given typed projections, packs them once, and runs batches.

mod checks;
pub mod cuda;
pub mod reference;
pub mod simd;

use std::sync::Arc;

use rayon::ThreadPool;

use crate::checkpoint::tensors::{ExpertTensors, Projection};
use crate::cuda::blas::BlasError;
use crate::cuda::{CudaError, DeviceBuffer};
use crate::exit::{Classify, Exit};
use crate::gpu::{Gpu, GpuError};
use crate::numerics::activation::Activation;
use crate::numerics::nvfp4::QuantCounts;
use crate::select::tactics::Tactic;
use crate::select::{Identity, InstructionSet, Quant};
pub use simd::best_instruction_set;

/// What a group of experts has in common.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsSpec {
    /// Width in and out.
    pub hidden: usize,
    /// Width between FC1 and FC2.
    pub intermediate: usize,
    /// The gated activation.
    pub activation: Activation,
    /// Whether FC1's and FC2's inputs go through NVFP4. The weights' own format is each projection's.
    pub quantise_activations: bool,
    /// One order over K for every number of rows, also where another is faster. Always so on CPUs.
    pub batch_invariant: bool,
}

/// Rows to compute, sorted by local expert. Rows name tokens, so that a token's values are held once.
#[derive(Debug, Clone, Copy)]
pub struct ExpertBatch<'a> {
    /// `[num_tokens, hidden]`. With quantised activations the values are `e2m1 * e4m3` of the NVFP4 form, without the global scale.
    pub tokens: &'a [f32],
    /// Multiplies every token value: FC1's `input_scale` with quantised activations, else 1.
    pub token_scale: f32,
    /// `[num_rows]` the token that each row reads.
    pub row_token: &'a [u32],
    /// `[num_local_experts + 1]` where each expert's rows start.
    pub expert_offsets: &'a [usize],
    /// How the work is laid out; one of [`Experts::tactics`].
    pub tactic: Tactic,
}

impl ExpertBatch<'_> {
    /// Rows over all experts.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.row_token.len()
    }
}

/// Rows to compute whose tokens lie on the device, sorted by local expert.
#[derive(Debug, Clone, Copy)]
pub struct DeviceBatch<'a> {
    /// `[num_tokens, hidden]` bf16; with quantised activations as in [`ExpertBatch::tokens`].
    pub tokens: &'a DeviceBuffer<u16>,
    /// Multiplies every token value, as in [`ExpertBatch::token_scale`].
    pub token_scale: f32,
    /// `[num_rows]` the token that each row reads, which has to be one of `tokens`.
    pub row_token: &'a DeviceBuffer<u32>,
    /// `[num_local_experts + 1]` where each expert's rows start: the host knows them, and chooses by them.
    pub expert_offsets: &'a [usize],
    /// What else there is.
    pub beside: Beside<'a>,
}

/// What there is beside a batch: nothing, unless it is a part of a step whose other parts travel meanwhile.
#[derive(Debug, Clone, Copy, Default)]
pub struct Beside<'a> {
    /// `[num_local_experts]` rows of each expert in all parts together: bits are those of one batch of all of them. Absent: the
    /// batch stands for itself.
    pub rows_of_all: Option<&'a [usize]>,
    /// Multiprocessors that are left to others.
    pub num_spare_multiprocessors: u32,
}

impl DeviceBatch<'_> {
    /// Rows over all experts.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.expert_offsets.last().copied().unwrap_or(0)
    }
}

/// Rows to compute that the device alone has counted, sorted by local expert: what is queued serves any number of them within
/// bounds.
#[derive(Debug, Clone, Copy)]
pub struct LiveBatch<'a> {
    /// As [`DeviceBatch::tokens`].
    pub tokens: &'a DeviceBuffer<u16>,
    /// As [`DeviceBatch::token_scale`].
    pub token_scale: f32,
    /// `[max_rows]` the token that each row reads, of rows that there are.
    pub row_token: &'a DeviceBuffer<u32>,
    /// `[num_local_experts + 1]` where each expert's rows start: at most `max_rows` in all.
    pub expert_offsets: &'a DeviceBuffer<u32>,
    /// The bounds.
    pub bounds: LiveBounds,
}

/// How many rows there may be: from declared sizes, and thus equal on all ranks that have as many experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveBounds {
    /// In all.
    pub max_rows: usize,
    /// Of one expert, but for ids that repeat one. Kernels for more are not queued; bits do not depend on it.
    pub max_expert_rows: usize,
}

/// Experts that compute on the session's GPU, in its stream.
pub trait DeviceExperts {
    /// Queues the unweighted FC2 rows `[num_rows, hidden]` of a batch into `out`, and waits for nothing.
    ///
    /// # Errors
    /// If a buffer is too small, there is no memory, or the driver fails.
    ///
    /// # Panics
    /// If the offsets are not those of these experts, which is a bug of the caller.
    fn queue(&self, batch: &DeviceBatch<'_>, out: &mut DeviceBuffer<f32>) -> Result<(), BackendError>;

    /// Queues the unweighted FC2 rows of a batch that the device counts into `out` `[max_rows, hidden]`, and waits for nothing.
    /// Rows have the bits that [`DeviceExperts::queue`] gives them. May be recorded, once it has run.
    ///
    /// # Errors
    /// If a buffer is too small, there is no memory, or the driver fails.
    fn queue_live(&self, batch: &LiveBatch<'_>, out: &mut DeviceBuffer<f32>) -> Result<(), BackendError>;

    /// Says which rows such a batch had, once the host knows: [`DeviceExperts::evidence`] is judged by it.
    ///
    /// # Errors
    /// If a width is none of a kernel's.
    ///
    /// # Panics
    /// If the offsets are not those of these experts, which is a bug of the caller.
    fn expect(&self, expert_offsets: &[usize], bounds: LiveBounds) -> Result<(), BackendError>;

    /// Queues the way of what the device has counted since it was last asked to the host.
    ///
    /// # Errors
    /// If the driver fails.
    fn queue_evidence(&self) -> Result<(), BackendError>;

    /// What was done since the last time, once the device has come past [`DeviceExperts::queue_evidence`].
    ///
    /// # Errors
    /// If rows were queued that no kernel has stored.
    fn evidence(&self) -> Result<ForwardStats, BackendError>;
}

/// What one call did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ForwardStats {
    /// Block scales of FC2's quantised inputs.
    pub fc2_input: QuantCounts,
    /// Rows computed by each identity that ran.
    pub rows_by_identity: Vec<(Identity, u64)>,
    /// The name of the tactic that ran, of a backend that has several.
    pub tactic: Option<&'static str>,
}

/// Experts packed for a backend.
pub trait Experts: Send + Sync {
    /// Computes the unweighted FC2 rows `[num_rows, hidden]` into `out`, which it overwrites.
    ///
    /// The bits of a row depend on its token and expert alone: not on the other rows, their number, or the threads. GPUs
    /// promise that where [`ExpertsSpec::batch_invariant`] is set; else the number of rows of the expert counts too.
    ///
    /// # Errors
    /// If a device fails, or the batch's tactic can't run on this rank; `out` is then of no use. Tuning drops such a tactic
    /// on all ranks.
    ///
    /// # Panics
    /// If the batch or `out` does not fit these experts, which is a bug of the caller.
    fn forward(&self, batch: &ExpertBatch<'_>, out: &mut [f32]) -> Result<ForwardStats, BackendError>;

    /// The names of the tactics that a batch may ask for, by number: the first runs untuned, and more than one are timed
    /// where tuning is on. The same on every rank, whatever experts it holds.
    fn tactics(&self) -> &'static [&'static str] {
        &["untuned"]
    }

    /// The same experts for tokens that lie on the device, where they compute on one.
    fn on_device(&self) -> Option<&dyn DeviceExperts> {
        None
    }

    /// Bytes the packed weights occupy.
    fn weight_bytes(&self) -> u64;

    /// Bytes at most that [`Experts::forward`] holds beside weights, batch and output, for batches of up to `num_rows`
    /// rows. Kept between calls, and shared by all experts of a backend.
    fn workspace_bytes(&self, num_rows: usize) -> u64;
}

/// Collects experts, packing each as it comes.
pub trait ExpertsBuilder: Send + Sync {
    /// Packs the expert of a local index. Several threads may do so at once, in any order, each expert once; what is packed
    /// does not depend on it.
    ///
    /// # Errors
    /// If a projection's shape or format is not one that the backend runs.
    ///
    /// # Panics
    /// If there is no such expert, or it was put before, which is a bug of the caller.
    fn put(&self, local: usize, expert: &ExpertTensors) -> Result<(), BackendError>;

    /// Waits until all that was put is packed, which a device may still be at.
    ///
    /// # Errors
    /// If it failed there.
    fn wait(&self) -> Result<(), BackendError> {
        Ok(())
    }

    /// The packed experts, ready to run.
    ///
    /// # Errors
    /// If their kernels cannot be compiled or loaded.
    ///
    /// # Panics
    /// If an expert is missing, which is a bug of the caller.
    fn finish(self: Box<Self>) -> Result<Box<dyn Experts>, BackendError>;
}

/// A dense projection packed for a backend: router, latent.
pub trait Linear: Send + Sync {
    /// `out[r, n] = sum over k of x[r, k] * w[n, k]` in fp32, one order over k whatever the number of rows.
    ///
    /// `x` is `[num_rows, in_features]`, `out` `[num_rows, out_features]`. An NVFP4 weight's global scale
    /// multiplies the sums.
    ///
    /// # Panics
    /// If the lengths do not fit, which is a bug of the caller.
    fn forward(&self, x: &[f32], out: &mut [f32]);

    /// Bytes the packed weight occupies.
    fn weight_bytes(&self) -> u64;
}

/// A way to compute experts on this machine.
pub trait Backend: Send + Sync {
    /// The technique of its identities.
    fn technique(&self) -> &'static str;

    /// Starts a group of experts.
    ///
    /// # Errors
    /// If the shape or activation is not one that the backend runs.
    fn experts(&self, spec: ExpertsSpec, num_local_experts: usize) -> Result<Box<dyn ExpertsBuilder>, BackendError>;

    /// The threads that it packs with, and that it computes with on a host.
    fn pool(&self) -> &ThreadPool;

    /// Packs a dense projection.
    ///
    /// # Errors
    /// If its shape or format is not one that the backend runs.
    fn linear(&self, weight: &Projection) -> Result<Box<dyn Linear>, BackendError>;
}

/// The identity that a projection's format runs under.
#[must_use]
pub fn identity(technique: &'static str, quant: Quant) -> Identity {
    Identity::grouped_gemm(technique, quant)
}

/// The techniques of this build.
pub const TECHNIQUES: &[&str] = &[reference::TECHNIQUE, simd::TECHNIQUE, cuda::MMA_SYNC, cuda::WGMMA];

/// What a backend is given of the machine. Bits do not depend on threads or instruction set.
#[derive(Debug, Clone, Default)]
pub struct Machine {
    /// Threads of the backend's own; 0: one a core.
    pub num_threads: usize,
    /// For `simd`; absent: the machine's best.
    pub isa: Option<InstructionSet>,
    /// For GPU techniques, which need one.
    pub gpu: Option<Gpu>,
}

/// The backend of a technique.
///
/// # Errors
/// If the technique is none of this build's, the machine lacks the instruction set or the GPU, or threads cannot be
/// started.
pub fn build(technique: &str, machine: &Machine) -> Result<Arc<dyn Backend>, BackendError> {
    let Machine { num_threads, isa, gpu } = machine;
    let num_threads = *num_threads;
    let on_gpu = |technique| -> Result<Arc<dyn Backend>, BackendError> {
        let gpu = gpu.as_ref().ok_or(BackendError::NoGpu { technique })?;
        Ok(Arc::new(cuda::Gpu::new(technique, gpu, num_threads)?))
    };
    match technique {
        reference::TECHNIQUE => Ok(Arc::new(reference::Reference::new(num_threads)?)),
        simd::TECHNIQUE => Ok(Arc::new(simd::Simd::new(num_threads, isa.unwrap_or_else(best_instruction_set))?)),
        cuda::MMA_SYNC => on_gpu(cuda::MMA_SYNC),
        cuda::WGMMA => on_gpu(cuda::WGMMA),
        _ => Err(BackendError::Technique { technique: technique.to_owned() }),
    }
}

/// Why a backend refuses.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// A projection's shape is not the layer's.
    #[error("{projection} is [{found_out}, {found_in}], the layer wants [{wanted_out}, {wanted_in}]")]
    Shape {
        /// gate, up or down
        projection: &'static str,
        /// Rows found.
        found_out: usize,
        /// Columns found.
        found_in: usize,
        /// Rows wanted.
        wanted_out: usize,
        /// Columns wanted.
        wanted_in: usize,
    },
    /// Quantised activations need an `input_scale` for FC2.
    #[error("quantised activations need an input_scale on {projection}; give --activations bf16 to run without")]
    InputScale {
        /// gate, up or down
        projection: &'static str,
    },
    /// A width is not a multiple of the block.
    #[error(
        "{width} is {found}, not a positive multiple of 16, and NVFP4 blocks and kernels want that; such a layer cannot run"
    )]
    Width {
        /// hidden, intermediate, in_features or out_features
        width: &'static str,
        /// The width found.
        found: usize,
    },
    /// A projection's data is not of its shape's length.
    #[error("{projection} holds {found} bytes, its shape wants {wanted}")]
    Bytes {
        /// gate, up, down or linear
        projection: &'static str,
        /// Bytes found.
        found: usize,
        /// Bytes wanted.
        wanted: usize,
    },
    /// A technique that this build does not have.
    #[error("`{technique}` is not a technique of this build; it has {}", TECHNIQUES.join(", "))]
    Technique {
        /// What was asked for.
        technique: String,
    },
    /// The machine lacks an instruction set.
    #[error("this machine does not have {wanted}; its best is {best}")]
    Isa {
        /// The one asked for.
        wanted: InstructionSet,
        /// The best there is.
        best: InstructionSet,
    },
    /// Threads could not be started.
    #[error("cannot start {num_threads} compute threads; lower --threads")]
    Threads {
        /// The number asked for.
        num_threads: usize,
        /// Why.
        #[source]
        source: rayon::ThreadPoolBuildError,
    },
    /// Memory for packed weights could not be had.
    #[error("cannot get {bytes} bytes for packed weights")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The GPU or its driver.
    #[error(transparent)]
    Cuda(Box<CudaError>),
    /// What multiplies dense matrices.
    #[error(transparent)]
    Blas(Box<BlasError>),
    /// The session's GPU or its kernels.
    #[error(transparent)]
    Gpu(Box<GpuError>),
    /// A GPU technique without a GPU to run on.
    #[error("{technique} was built without a GPU, a bug: a session opens its GPU before its backends")]
    NoGpu {
        /// The technique.
        technique: &'static str,
    },
    /// A GPU that a technique has no kernels for.
    #[error("{technique} has no kernels for compute capability {found} ({name}); choose another backend")]
    Capability {
        /// The technique.
        technique: &'static str,
        /// The GPU's name.
        name: String,
        /// What it has.
        found: String,
    },
    /// Experts of a technique that has none for the device.
    #[error("{technique} computes on the host, and its layer's tokens are on a GPU: a bug")]
    NotOnDevice {
        /// The technique.
        technique: &'static str,
    },
    /// A projection that the GPU's image can't hold.
    #[error("{projection} can't be packed for a GPU")]
    Pack {
        /// Which one.
        projection: &'static str,
        /// Why.
        #[source]
        source: cuda::pack::PackError,
    },
    /// An expert in two formats.
    #[error(
        "down is stored in another format than gate and up; the GPU kernels want one: run this layer on a CPU backend"
    )]
    MixedExpert,
    /// A kernel that did not do its work.
    #[error(
        "{identity} stored {found} rows of {wanted}: the output can't be trusted; report this with the GPU's name and driver"
    )]
    Rows {
        /// What ran.
        identity: Identity,
        /// Rows that the device counted.
        found: u64,
        /// Rows that it was given.
        wanted: u64,
    },
}

impl From<CudaError> for BackendError {
    fn from(error: CudaError) -> Self {
        Self::Cuda(Box::new(error))
    }
}

impl From<BlasError> for BackendError {
    fn from(error: BlasError) -> Self {
        Self::Blas(Box::new(error))
    }
}

impl From<GpuError> for BackendError {
    fn from(error: GpuError) -> Self {
        Self::Gpu(Box::new(error))
    }
}

impl Classify for BackendError {
    fn exit(&self) -> Exit {
        match self {
            Self::Isa { .. } | Self::Threads { .. } | Self::Memory { .. } | Self::Capability { .. } => {
                Exit::Environment
            }
            Self::Cuda(error) => error.exit(),
            Self::Blas(error) => error.exit(),
            Self::Gpu(error) => error.exit(),
            Self::Pack { source, .. } => source.exit(),
            Self::Rows { .. } => Exit::WrongResult,
            Self::NoGpu { .. } | Self::NotOnDevice { .. } => Exit::Bug,
            Self::Shape { .. }
            | Self::InputScale { .. }
            | Self::Width { .. }
            | Self::Bytes { .. }
            | Self::MixedExpert
            | Self::Technique { .. } => Exit::BadInput,
        }
    }
}

#[cfg(test)]
mod tests;
