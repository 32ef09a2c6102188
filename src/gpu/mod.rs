//! The GPU that a rank drives in a session: one device, a stream for all work of its layers, and its kernels.
//!
//! Everything that a layer does on the device goes into this stream: what is queued later sees what was queued before, and
//! nothing has to be waited for in between. Work that runs beside it goes into a lane ([`Gpu::urgent_lane`]), and either follows
//! marks of the other. Knows nothing of layers, experts or tokens.

mod error;
pub mod feed;
mod modules;
mod staging;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;

pub use error::GpuError;
pub use modules::Kernels;

use crate::cuda::{Device, DeviceBuffer, Event, Function, Module, Stream};
use crate::jit::{Arch, KernelRequest};
use crate::world::World;
use feed::Feed;
use modules::Modules;
use staging::Ring;

/// Slots at most, 96 MiB: the link is never without one, and what goes round through more leaves the caches before it is sent
/// (docs/measurements/2026-12-01-load.md).
const MAX_SLOTS: usize = 16;

/// A rank's GPU. Copies of it are the same one.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    stream: Stream,
    /// What this stream reads: a mark of another one says nothing of it.
    ring: Mutex<Ring>,
    common: Arc<Common>,
}

/// What lanes share.
struct Common {
    arch: Arch,
    modules: Modules,
    /// From the first weight on until loading is over.
    feed: Mutex<Option<Arc<Feed>>>,
    num_waits: AtomicU64,
}

/// A place in the stream that a rank can wait for.
#[derive(Debug)]
pub struct Mark {
    event: Event,
    /// What was staged before it.
    staged: u64,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("device", self.device()).finish_non_exhaustive()
    }
}

impl Gpu {
    /// Opens the device that this process sees as `ordinal`.
    ///
    /// # Errors
    /// If there is no such device, no kernel is made for it, or there is no compiler where `kernels` wants one.
    pub fn open(ordinal: u32, kernels: &Kernels) -> Result<Self, GpuError> {
        let device = Device::open(ordinal)?;
        let facts = device.facts();
        let none = || GpuError::Capability { name: facts.name.clone(), found: facts.compute_capability.to_string() };
        let arch = Arch::of(facts.compute_capability).ok_or_else(none)?;
        let stream = Stream::new(&device)?;
        let ring = Mutex::new(Ring::new(&device)?);
        let modules = Modules::new(kernels)?;
        let common = Arc::new(Common { arch, modules, feed: Mutex::default(), num_waits: AtomicU64::new(0) });
        Ok(Self(Arc::new(Inner { stream, ring, common })))
    }

    /// The same GPU with a stream of its own, whose kernels go first where both have some.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn urgent_lane(&self) -> Result<Self, GpuError> {
        let (stream, ring) = (Stream::urgent(self.device())?, Mutex::new(Ring::new(self.device())?));
        Ok(Self(Arc::new(Inner { stream, ring, common: self.0.common.clone() })))
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.0.stream.device()
    }

    /// The stream of all work.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// What kernels are compiled for.
    #[must_use]
    pub fn arch(&self) -> Arch {
        self.0.common.arch
    }

    /// A kernel's module, loaded if it is not there yet: layers of one shape share it.
    ///
    /// # Errors
    /// If it was not prepared, does not compile, or does not load.
    pub fn module(&self, request: KernelRequest) -> Result<Module, GpuError> {
        self.0.common.modules.get(self.device(), request)
    }

    /// Loads modules that will be asked for; where kernels are compiled on demand, all of them at once.
    ///
    /// # Errors
    /// If one does not compile or load.
    pub fn load(&self, requests: Vec<KernelRequest>) -> Result<(), GpuError> {
        self.0.common.modules.load(self.device(), requests)
    }

    /// A kernel by its name, of a module as [`Gpu::module`] gives it, that may take `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// As [`Gpu::module`], or if a block can't have so much.
    pub fn function(&self, request: KernelRequest, name: &str, shared_bytes: u32) -> Result<Function, GpuError> {
        let function = self.module(request)?.function(name)?;
        function.allow_dynamic_shared(shared_bytes)?;
        Ok(function)
    }

    /// Copies a small table to the elements from `start` on, behind what is queued, and does not wait: it is read from a
    /// copy of the table.
    ///
    /// # Errors
    /// If it reaches beyond the end, or the driver fails.
    pub fn upload<T: Pod>(&self, target: &mut DeviceBuffer<T>, start: usize, table: &[T]) -> Result<(), GpuError> {
        let mut ring = self.0.ring.lock().unwrap_or_else(PoisonError::into_inner);
        if !ring.has_room(size_of_val(table)) {
            // Rarely: whoever marks and waits makes room.
            self.count_wait();
            self.stream().synchronise()?;
            ring.empty(self.device(), size_of_val(table))?;
        }
        let staged = ring.write(table);
        // SAFETY: the ring overwrites what lies there when a mark behind this copy has been waited for, and no earlier.
        unsafe { target.upload_pinned(self.stream(), start, staged) }?;
        Ok(())
    }

    /// What weights come through.
    #[must_use]
    pub fn feed(&self) -> Arc<Feed> {
        let mut feed = self.0.common.feed.lock().unwrap_or_else(PoisonError::into_inner);
        feed.get_or_insert_with(|| Arc::new(Feed::new(self.device(), MAX_SLOTS))).clone()
    }

    /// Lets go of what only loading needs. More weights may still come, at the price of making it again.
    pub fn end_loading(&self) {
        *self.0.common.feed.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// A mark behind all that is queued.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn mark(&self) -> Result<Mark, GpuError> {
        let mut mark = Mark { event: Event::new(self.device())?, staged: 0 };
        self.move_mark(&mut mark)?;
        Ok(mark)
    }

    /// Moves a mark behind all that this lane has queued now.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn move_mark(&self, mark: &mut Mark) -> Result<(), GpuError> {
        mark.staged = self.0.ring.lock().unwrap_or_else(PoisonError::into_inner).head();
        Ok(mark.event.record(self.stream())?)
    }

    /// Lets what is queued from here on wait for a mark of any lane.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn follow(&self, mark: &Mark) -> Result<(), GpuError> {
        Ok(self.stream().wait_for(&mark.event)?)
    }

    /// Takes note of a mark of this lane that the device may have come to: what was staged before it is of no use any more.
    ///
    /// # Errors
    /// If something that was queued before it failed.
    pub fn note(&self, mark: &Mark) -> Result<(), GpuError> {
        if mark.event.is_done()? {
            self.0.ring.lock().unwrap_or_else(PoisonError::into_inner).release(mark.staged);
        }
        Ok(())
    }

    /// Waits until the device has come to a mark, under the limit of the phase: the work before it may wait for peers.
    ///
    /// # Errors
    /// If something that was queued before it failed.
    pub fn wait(&self, world: &World, operation: &str, mark: &Mark) -> Result<(), GpuError> {
        self.count_wait();
        self.wait_unless(world, operation, mark, || None)
    }

    /// The same, uncounted, unless something else comes first, which is the error then.
    ///
    /// # Errors
    /// What `ends` gives, or if something that was queued before it failed.
    pub fn wait_unless<E: From<GpuError>>(
        &self,
        world: &World,
        operation: &str,
        mark: &Mark,
        ends: impl Fn() -> Option<E>,
    ) -> Result<(), E> {
        world.poll(operation, || match mark.event.is_done() {
            Ok(false) => ends().map(Err),
            Ok(true) => Some(Ok(())),
            Err(error) => Some(Err(GpuError::from(error).into())),
        })?;
        self.0.ring.lock().unwrap_or_else(PoisonError::into_inner).release(mark.staged);
        Ok(())
    }

    /// How often this rank has waited for its device.
    #[must_use]
    pub fn num_waits(&self) -> u64 {
        self.0.common.num_waits.load(Ordering::Relaxed)
    }

    /// Counts a wait that is made elsewhere, such as that of a download.
    pub fn count_wait(&self) {
        self.0.common.num_waits.fetch_add(1, Ordering::Relaxed);
    }
}

/// Times that memory of steps has moved.
static NUM_GROWN: AtomicU64 = AtomicU64::new(0);

/// How often memory that steps share has been made larger, and so has moved: what was recorded before may point to where
/// nothing lies any more.
#[must_use]
pub fn num_grown() -> u64 {
    NUM_GROWN.load(Ordering::Relaxed)
}

/// Counts memory that moves elsewhere.
pub fn count_growth() {
    NUM_GROWN.fetch_add(1, Ordering::Relaxed);
}

/// Makes room for `len` values; what the buffer holds is lost if it grows. Work that uses it is ended first.
///
/// # Errors
/// If they do not fit.
pub fn grow<T: Pod>(buffer: &mut DeviceBuffer<T>, len: usize) -> Result<(), GpuError> {
    if buffer.len() < len {
        let device = buffer.device().clone();
        count_growth();
        // The old one goes first: two would not always fit.
        *buffer = DeviceBuffer::uninitialised(&device, 0)?;
        *buffer = DeviceBuffer::uninitialised(&device, len)?;
    }
    Ok(())
}
