//! Experts that give back what they get, for those who look at dispatch and combine alone.

use super::{Buffers, DeviceHandle, LiveStep};
use crate::cuda::{Function, LaunchShape};
use crate::gpu::{Gpu, GpuError, grow};
use crate::jit::kernels::dispatch::NUM_THREADS;
use crate::jit::kernels::{EchoArgs, EchoKernel};

/// Blocks at most: each takes rows one after the other.
const MAX_BLOCKS: usize = 1024;

/// Copies tokens into the rows that experts would make of them.
#[derive(Debug)]
pub struct Echo {
    gpu: Gpu,
    function: Function,
    hidden: usize,
}

impl Echo {
    /// For tokens of `hidden` values.
    ///
    /// # Errors
    /// If the kernel was not prepared or does not load.
    pub fn new(gpu: &Gpu, hidden: usize) -> Result<Self, GpuError> {
        let kernel = EchoKernel { hidden: u32::try_from(hidden).unwrap_or(u32::MAX) };
        let function = gpu.function(kernel.request(gpu.arch()), EchoKernel::ECHO, 0)?;
        Ok(Self { gpu: gpu.clone(), function, hidden })
    }

    /// Queues `buffers.rows` of what has been dispatched.
    ///
    /// # Errors
    /// If there is no memory or the driver fails.
    pub fn queue(&self, buffers: &mut Buffers, handle: &DeviceHandle) -> Result<(), GpuError> {
        self.launch(buffers, handle.received.total_rows(), 0)
    }

    /// The same where the device alone knows how many rows there are, of `max_rows`.
    ///
    /// # Errors
    /// As [`Echo::queue`].
    pub fn queue_live(&self, buffers: &mut Buffers, max_rows: usize, live: &LiveStep) -> Result<(), GpuError> {
        self.launch(buffers, max_rows, live.rows_address())
    }

    fn launch(&self, buffers: &mut Buffers, num_rows: usize, live_rows: u64) -> Result<(), GpuError> {
        grow(&mut buffers.rows, num_rows * self.hidden)?;
        let args = EchoArgs {
            tokens: buffers.tokens.address(),
            row_token: buffers.row_token.address(),
            rows: buffers.rows.address(),
            live_rows,
            num_rows: num_rows as u64,
        };
        let num_blocks = u32::try_from(num_rows.min(MAX_BLOCKS)).unwrap_or(0);
        let shape = LaunchShape::rows(num_blocks, NUM_THREADS);
        // SAFETY: the argument is the kernel's (its size is asserted in the source), and its addresses those of buffers that
        // hold what was dispatched and room for its rows; freeing them waits for the device.
        Ok(unsafe { self.function.launch(self.gpu.stream(), &shape, &args) }?)
    }
}
