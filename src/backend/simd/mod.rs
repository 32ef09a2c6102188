//! Vectorised CPU kernels: AVX-512, AVX2 with FMA, or plain Rust, chosen at run time, all with the same bits.
//!
//! Weights stay four-bit codes and are decoded in registers (few rows) or chunk by chunk (many). `unsafe` lives in
//! `avx2` and `avx512` alone, behind proofs that the machine has the instructions.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod ceilings;
mod experts;
mod gemm;
mod isa;
mod kernels;
mod linear;
mod math;
mod pack;
mod plan;
mod products;
mod rows;
mod scalar;
mod workspace;

use std::sync::Arc;

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::{Backend, BackendError, ExpertsBuilder, ExpertsSpec, Linear, checks};
use crate::checkpoint::tensors::Projection;
use crate::numerics::activation::Activation;
use crate::select::InstructionSet;
pub use ceilings::ReadBuffer;
pub use isa::best_instruction_set;
use kernels::{Kernels, LANES, Lane, ScaledActivation};

/// The technique of this backend's identities.
pub const TECHNIQUE: &str = "simd";

/// What all packed weights of a backend use.
struct Shared {
    kernels: Box<dyn Kernels>,
    pool: ThreadPool,
    num_threads: usize,
    workspace: workspace::Workspace,
}

/// The backend, with threads of its own.
pub struct Simd {
    shared: Arc<Shared>,
    isa: InstructionSet,
}

impl Simd {
    /// Starts `num_threads` threads (0: one a core) for the kernels of `isa`, which may be below the machine's best.
    ///
    /// # Errors
    /// If the machine lacks `isa`, or the threads cannot be started.
    pub fn new(num_threads: usize, isa: InstructionSet) -> Result<Self, BackendError> {
        let kernels = kernels_of(isa)?;
        let pool = ThreadPoolBuilder::new()
            .num_threads(num_threads)
            .thread_name(|index| format!("simd-{index}"))
            .build()
            .map_err(|source| BackendError::Threads { num_threads, source })?;
        let num_threads = pool.current_num_threads();
        let shared = Shared { kernels, pool, num_threads, workspace: workspace::Workspace::default() };
        Ok(Self { shared: Arc::new(shared), isa })
    }

    /// The instruction set in use.
    #[must_use]
    pub fn isa(&self) -> InstructionSet {
        self.isa
    }

    /// The threads in use.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        self.shared.num_threads
    }
}

impl Backend for Simd {
    fn technique(&self) -> &'static str {
        TECHNIQUE
    }

    fn experts(&self, spec: ExpertsSpec, num_local_experts: usize) -> Result<Box<dyn ExpertsBuilder>, BackendError> {
        checks::spec(&spec)?;
        Ok(Box::new(experts::Builder::new(self.shared.clone(), spec, num_local_experts)))
    }

    fn pool(&self) -> &ThreadPool {
        &self.shared.pool
    }

    fn linear(&self, weight: &Projection) -> Result<Box<dyn Linear>, BackendError> {
        checks::linear(weight)?;
        let order = self.shared.kernels.order();
        let matrix = self.shared.pool.install(|| pack::PackedMatrix::new(weight, order))?;
        let Projection { in_features, out_features, .. } = *weight;
        Ok(Box::new(linear::PackedLinear { shared: self.shared.clone(), matrix, in_features, out_features }))
    }
}

/// `out[i] = activation(g[i], u[i])` by the vector code of `isa`, for tests and tools; relative error within 1e-6.
///
/// # Errors
/// If the machine lacks `isa`.
///
/// # Panics
/// If the lengths differ.
pub fn apply_activation(
    isa: InstructionSet,
    activation: Activation,
    g: &[f32],
    u: &[f32],
    out: &mut [f32],
) -> Result<(), BackendError> {
    assert!(g.len() == u.len() && g.len() == out.len(), "g, u and out are of one length");
    let kernels = kernels_of(isa)?;
    let scaled = ScaledActivation { activation, gate_scale: 1.0, up_scale: 1.0 };
    for ((g, u), out) in g.chunks(LANES).zip(u.chunks(LANES)).zip(out.chunks_mut(LANES)) {
        let mut gate = [Lane::default()];
        let mut up = [Lane::default()];
        gate[0].0[..g.len()].copy_from_slice(g);
        up[0].0[..u.len()].copy_from_slice(u);
        kernels.activate(&scaled, &mut gate, &up);
        out.copy_from_slice(&gate[0].0[..out.len()]);
    }
    Ok(())
}

/// The kernels of an instruction set, where the machine has it.
fn kernels_of(isa: InstructionSet) -> Result<Box<dyn Kernels>, BackendError> {
    let kernels: Option<Box<dyn Kernels>> = match isa {
        InstructionSet::Scalar => Some(Box::new(scalar::Scalar)),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => avx2::Avx2::detect().map(|proof| Box::new(proof) as Box<dyn Kernels>),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => avx512::Avx512::detect().map(|proof| Box::new(proof) as Box<dyn Kernels>),
        #[cfg(not(target_arch = "x86_64"))]
        InstructionSet::Avx2 | InstructionSet::Avx512 => None,
    };
    kernels.ok_or(BackendError::Isa { wanted: isa, best: best_instruction_set() })
}

#[cfg(test)]
mod tests;
