//! What a layer's time is compared with: its weights read and not used, and a dense product.

use std::time::Duration;

use super::{LocalLayer, Replay};
use crate::backend::BackendError;
use crate::cuda::blas::{Blas, BlasError, Library, Matmul, MatmulShape};
use crate::cuda::{CudaError, DeviceBuffer, Graph, LaunchShape};
use crate::jit::kernels::{ReadAll, ReadArgs};

/// Rows, columns and sums of the dense product.
const DENSE_WIDTH: usize = 8192;

impl LocalLayer {
    /// Records the reading of every set once, and nothing else.
    ///
    /// # Errors
    /// If the device fails.
    pub fn reading(&self) -> Result<Reading<'_>, BackendError> {
        let (stream, arch) = (self.stream(), self.shared.gpu.arch());
        let shared_bytes = ReadAll::shared_bytes(arch);
        let read = self.shared.gpu.function(ReadAll::request(arch), ReadAll::FUNCTION, shared_bytes)?;
        let num_blocks = stream.device().facts().num_multiprocessors * ReadAll::blocks_per_multiprocessor(arch);
        let shape = LaunchShape { shared_bytes, ..LaunchShape::rows(num_blocks, ReadAll::NUM_THREADS) };
        let sink = DeviceBuffer::<u32>::zeroed(stream, 1)?;
        let graph = Graph::capture(stream, || {
            for set in &self.sets {
                let args = ReadArgs { data: set.address(), num_bytes: set.num_bytes() as u64, sink: sink.address() };
                // SAFETY: the set lives in `self`, which the reading borrows; the sink goes with the reading.
                unsafe { read.launch(stream, &shape, &args)? };
            }
            Ok::<_, CudaError>(())
        })?;
        Ok(Reading { replay: Replay::new(self, graph, self.sets.len())?, _sink: sink })
    }

    /// Prepares the product of two bf16 matrices of 8192 x 8192 by the cublasLt that `setting` names, or the loader finds.
    /// Their values repeat `values`: what a product takes depends on them, through the power that it draws.
    ///
    /// # Errors
    /// If there is no library, it has no such product, or there is no memory.
    ///
    /// # Panics
    /// If there are no values.
    pub fn dense(&self, setting: Option<&str>, values: &[u16]) -> Result<Dense<'_>, BlasError> {
        let stream = self.stream();
        let library = Library::load(setting)?;
        let blas = Blas::new(&library, stream.device())?;
        let shape = MatmulShape { out_features: DENSE_WIDTH, in_features: DENSE_WIDTH, num_rows: DENSE_WIDTH };
        let matmul = blas.baseline(shape)?.ok_or_else(|| BlasError::NoProduct { version: library.version(), shape })?;
        let factor = || -> Result<DeviceBuffer<u16>, CudaError> {
            let mut factor = DeviceBuffer::uninitialised(stream.device(), DENSE_WIDTH * DENSE_WIDTH)?;
            for start in (0..factor.len()).step_by(values.len()) {
                factor.upload(stream, start, &values[..values.len().min(factor.len() - start)])?;
            }
            Ok(factor)
        };
        let (weight, x) = (factor()?, factor()?);
        let out = DeviceBuffer::<u16>::zeroed(stream, DENSE_WIDTH * DENSE_WIDTH)?;
        // SAFETY: all matrices are of that width, in bf16, and go with the product, as its workspace does; everything here is
        // queued in the layer's one stream.
        let multiply = || unsafe { matmul.queue(stream, &weight, x.address(), (DENSE_WIDTH, out.address())) };
        // The library loads its kernel now rather than while a graph is recorded.
        multiply()?;
        stream.synchronise()?;
        let graph = Graph::capture(stream, multiply)?;
        Ok(Dense { replay: Replay::new(self, graph, 1)?, library, _matmul: matmul, _matrices: [weight, x, out] })
    }
}

/// The recorded reading of all sets.
pub struct Reading<'a> {
    replay: Replay<'a>,
    _sink: DeviceBuffer<u32>,
}

impl Reading<'_> {
    /// Reads, and returns what one set took.
    ///
    /// # Errors
    /// If the device fails.
    pub fn run(&self) -> Result<Duration, BackendError> {
        // SAFETY: `self` holds the sink, and the layer, which it borrows, the sets.
        Ok(unsafe { self.replay.run()? })
    }
}

/// The recorded dense product.
pub struct Dense<'a> {
    replay: Replay<'a>,
    library: Library,
    _matmul: Matmul,
    _matrices: [DeviceBuffer<u16>; 3],
}

impl Dense<'_> {
    /// Its multiplications and additions.
    pub const FLOPS: f64 = 2.0 * (DENSE_WIDTH * DENSE_WIDTH * DENSE_WIDTH) as f64;

    /// What computes it.
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// Multiplies, and returns what it took.
    ///
    /// # Errors
    /// If the device fails.
    pub fn run(&self) -> Result<Duration, BackendError> {
        // SAFETY: `self` holds the matrices, the workspace and the description of the product.
        Ok(unsafe { self.replay.run()? })
    }
}
