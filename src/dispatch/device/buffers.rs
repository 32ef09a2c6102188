//! Memory of a rank's device for tokens on their way, shared by all layers and grown as steps need it.

use crate::cuda::{DeviceBuffer, PinnedBuffer};
use crate::gpu::{Gpu, GpuError, Mark};

macro_rules! buffers {
    ($($(#[$doc:meta])* $name:ident: $value:ty,)+) => {
        /// What a chunk has on the device; see the argument of each kernel. What it holds between chunks is of no use.
        #[derive(Debug)]
        pub struct Buffers {
            $($(#[$doc])* pub $name: DeviceBuffer<$value>,)+
            /// `[4]` block scales that saturated and that became 0, of what left and of what arrived. Added to.
            pub counts: DeviceBuffer<u64>,
            /// What blocks count together, zeros between kernels.
            pub scratch: DeviceBuffer<u32>,
            /// The counts of what leaves, once `counted` has come.
            pub host_totals: PinnedBuffer<u32>,
            /// The counts of what leaves in a whole step, likewise.
            pub host_step: PinnedBuffer<u32>,
            /// In two levels, the counts of what leaves in the first hop, likewise.
            pub host_entering: PinnedBuffer<u32>,
            /// Behind the copy of those counts, and where devices tell each other, of what comes.
            pub counted: Mark,
        }

        impl Buffers {
            /// Empty ones.
            ///
            /// # Errors
            /// If the driver fails.
            pub fn new(gpu: &Gpu) -> Result<Self, GpuError> {
                let device = gpu.device();
                Ok(Self {
                    $($name: DeviceBuffer::uninitialised(device, 0)?,)+
                    counts: DeviceBuffer::zeroed(gpu.stream(), 4)?,
                    scratch: DeviceBuffer::uninitialised(device, 0)?,
                    host_totals: PinnedBuffer::zeroed(device, 0)?,
                    host_step: PinnedBuffer::zeroed(device, 0)?,
                    host_entering: PinnedBuffer::zeroed(device, 0)?,
                    counted: gpu.mark()?,
                })
            }

            /// Overwrites all that a chunk writes, so that what is read before it is written shows.
            ///
            /// # Errors
            /// If the driver fails.
            pub fn poison(&mut self, gpu: &Gpu) -> Result<(), GpuError> {
                $(self.$name.fill_bytes(gpu.stream(), 0xff)?;)+
                Ok(())
            }
        }
    };
}

impl Buffers {
    /// Queues the way of the counts of block scales to the host, where they are once the stream has come so far; they
    /// count from zero again behind it.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn queue_counts(&mut self, gpu: &Gpu, host: &mut PinnedBuffer<u64>) -> Result<(), GpuError> {
        // SAFETY: whoever reads them has waited for the stream.
        unsafe { self.counts.download_pinned(gpu.stream(), 0, host) }?;
        Ok(self.counts.fill_bytes(gpu.stream(), 0)?)
    }
}

buffers! {
    /// `[2 * num_ranks + num_experts]` what leaves, counted.
    totals: u32,
    /// The same of a whole step, where devices tell each other that.
    step_totals: u32,
    /// `[2 * num_ranks]` what leaves for the ranks below.
    starts: u32,
    /// Counts of what leaves, by tile.
    send_tiles: u32,
    /// `[num_tokens, num_topk]` places in tiles.
    slot_token: u32,
    /// `[num_tokens, num_topk]` places in tiles.
    slot_home: u32,
    /// What leaves.
    packed: u8,
    /// `[num_tokens, num_topk]` where rows come home.
    home_rows: u32,
    /// In two levels, what has come to be passed on.
    entered: u8,
    /// What is passed on.
    passed_on: u8,
    /// What has arrived; with one rank that is what leaves.
    arrived: u8,
    /// `[num_local_experts + 1]`
    expert_offsets: u32,
    /// Counts of what has arrived, by tile.
    receive_tiles: u32,
    /// `[num_received, num_topk]` places in tiles.
    slot_place: u32,
    /// `[num_received, num_topk]` places in tiles.
    slot_order: u32,
    /// `[num_received, hidden]` bf16, as experts read them.
    tokens: u16,
    /// `[num_received, num_topk]`
    weights: f32,
    /// `[num_rows]` the token that each row reads.
    row_token: u32,
    /// `[num_rows]` the row at each place of the way back.
    return_rows: u32,
    /// `[num_received, num_topk]` the row of each slot.
    slot_row: u32,
    /// `[num_rows, hidden]` what experts computed.
    rows: f32,
    /// What goes back.
    back: u8,
    /// What has come home; with one rank that is what goes back.
    home: u8,
}
