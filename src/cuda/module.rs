//! Machine code on a device, and the kernels in it.

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::NoUninit;
use cudarc::driver::sys;
use cudarc::driver::sys::CUfunction_attribute_enum as Attribute;

use super::device::Device;
use super::error::{CudaError, code, text};
use super::stream::Stream;

/// A loaded cubin. Copies are the same module, which goes with the last of them and the last of its functions.
#[derive(Debug, Clone)]
pub struct Module(Arc<Inner>);

/// Modules that this process has loaded so far.
static NUM_LOADED: AtomicU64 = AtomicU64::new(0);

/// How many modules this process has loaded, those counted that are gone again.
#[must_use]
pub fn num_modules_loaded() -> u64 {
    NUM_LOADED.load(Ordering::Relaxed)
}

#[derive(Debug)]
struct Inner {
    device: Device,
    name: String,
    handle: sys::CUmodule,
}

// SAFETY: the driver's handles may be used by any thread with the context current, which every call here sees to.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Module {
    /// Loads machine code. `name` and `arch` are for messages.
    ///
    /// # Errors
    /// If the driver refuses it: another architecture, a damaged file, no memory.
    pub fn load(device: &Device, name: &str, arch: &str, cubin: &[u8]) -> Result<Self, CudaError> {
        device.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is a place for one handle. The driver learns an ELF file's size from its header, so bytes that
        // are no cubin are kept out by whoever verifies artefacts; the copy is read during the call alone.
        let result = unsafe { sys::cuModuleLoadData(&raw mut handle, cubin.as_ptr().cast()) };
        if result != sys::CUresult::CUDA_SUCCESS {
            return Err(CudaError::Module {
                ordinal: device.ordinal(),
                module: name.to_owned(),
                code: code(result),
                text: text(result),
                wanted: arch.to_owned(),
            });
        }
        NUM_LOADED.fetch_add(1, Ordering::Relaxed);
        Ok(Self(Arc::new(Inner { device: device.clone(), name: name.to_owned(), handle })))
    }

    /// A kernel of it, by the name that its source gives it (`extern "C" __global__`).
    ///
    /// # Errors
    /// If there is none of that name.
    pub fn function(&self, name: &str) -> Result<Function, CudaError> {
        let missing = || CudaError::NoFunction { module: self.0.name.clone(), function: name.to_owned() };
        let c_name = CString::new(name).map_err(|_| missing())?;
        self.0.device.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is a place for one handle, and the module lives.
        let result = unsafe { sys::cuModuleGetFunction(&raw mut handle, self.0.handle, c_name.as_ptr()) };
        if result == sys::CUresult::CUDA_ERROR_NOT_FOUND {
            return Err(missing());
        }
        self.0.device.check(result, "looking up a kernel")?;
        Ok(Function { module: self.0.clone(), name: name.to_owned(), handle })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: loaded by `load` and unloaded here alone, when no function of it is left.
            let _ = unsafe { sys::cuModuleUnload(self.handle) };
        }
    }
}

/// A kernel. It takes exactly one argument: a struct, by value.
#[derive(Debug)]
pub struct Function {
    module: Arc<Inner>,
    name: String,
    handle: sys::CUfunction,
}

// SAFETY: as for modules.
unsafe impl Send for Function {}
// SAFETY: as for modules.
unsafe impl Sync for Function {}

/// What a kernel takes of a multiprocessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionAttributes {
    /// Registers a thread.
    pub num_registers: u32,
    /// Local memory a thread, in bytes: stack and spilled registers. A hot kernel has none.
    pub local_bytes: u32,
    /// Shared memory that its source declares, in bytes.
    pub static_shared_bytes: u32,
    /// Dynamic shared memory that a launch may ask for, in bytes.
    pub max_dynamic_shared_bytes: u32,
    /// Threads that a block may have.
    pub max_threads_per_block: u32,
}

/// How a kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Whether all blocks have to be resident at once (grid barriers).
    pub cooperative: bool,
    /// Whether blocks may come as soon as all blocks of the kernel before it in the stream have let them, or have ended
    /// (`kernels/turns.cuh`). Since Hopper; where a graph is recorded, on drivers of CUDA 12.3 and later.
    pub early: bool,
}

impl LaunchShape {
    /// So many blocks of so many threads, in a row, without dynamic shared memory.
    #[must_use]
    pub const fn rows(num_blocks: u32, num_threads: u32) -> Self {
        Self { grid: [num_blocks, 1, 1], block: [num_threads, 1, 1], shared_bytes: 0, cooperative: false, early: false }
    }
}

impl Function {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it takes of a multiprocessor.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn attributes(&self) -> Result<FunctionAttributes, CudaError> {
        Ok(FunctionAttributes {
            num_registers: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            static_shared_bytes: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            max_dynamic_shared_bytes: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?,
            max_threads_per_block: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        })
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32, CudaError> {
        self.module.device.enter()?;
        let mut value: c_int = 0;
        // SAFETY: `value` is a place for one integer, and the function's module lives.
        let result = unsafe { sys::cuFuncGetAttribute(&raw mut value, attribute, self.handle) };
        self.module.device.check(result, "asking for a kernel's attributes")?;
        Ok(value.unsigned_abs())
    }

    /// Lets launches ask for up to so much dynamic shared memory; more than 48 KiB has to be asked for like this. What was
    /// allowed before stays so: others may launch the same kernel.
    ///
    /// # Errors
    /// If a block can't have so much.
    pub fn allow_dynamic_shared(&self, bytes: u32) -> Result<(), CudaError> {
        let device = &self.module.device;
        let held = self.attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let limit_bytes = device.facts().max_shared_bytes_per_block.saturating_sub(held);
        if bytes > limit_bytes {
            return Err(CudaError::SharedMemory {
                ordinal: device.ordinal(),
                function: self.name.clone(),
                wanted_bytes: bytes,
                limit_bytes,
            });
        }
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        if bytes <= self.attribute(attribute)? {
            return Ok(());
        }
        // SAFETY: the function's module lives.
        let result = unsafe { sys::cuFuncSetAttribute(self.handle, attribute, bytes.cast_signed()) };
        device.check(result, "allowing shared memory")
    }

    /// Blocks of so many threads and bytes of dynamic shared memory that fit a multiprocessor at once.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn blocks_per_multiprocessor(&self, num_threads: u32, shared_bytes: u32) -> Result<u32, CudaError> {
        self.module.device.enter()?;
        let mut blocks: c_int = 0;
        // SAFETY: `blocks` is a place for one integer, and the function's module lives.
        let result = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                self.handle,
                num_threads.cast_signed(),
                shared_bytes as usize,
            )
        };
        self.module.device.check(result, "asking for a kernel's occupancy")?;
        Ok(blocks.unsigned_abs())
    }

    /// Queues the kernel. A grid without blocks queues nothing.
    ///
    /// # Errors
    /// If the driver refuses the launch. What fails in the kernel comes out of a later wait.
    ///
    /// # Safety
    /// `A` is the kernel's one parameter, size and layout alike; every address in it points to memory of this device that
    /// is large enough and lives until `stream` has come so far, and nothing else writes what the kernel reads.
    pub unsafe fn launch<A: NoUninit>(
        &self,
        stream: &Stream,
        shape: &LaunchShape,
        arguments: &A,
    ) -> Result<(), CudaError> {
        let LaunchShape { grid, block, shared_bytes, cooperative, early } = *shape;
        if grid.contains(&0) {
            return Ok(());
        }
        self.module.device.enter()?;
        // The driver copies the struct during the call, and only reads it.
        let mut parameters = [std::ptr::from_ref(arguments).cast_mut().cast::<c_void>()];
        let parameters = parameters.as_mut_ptr();
        let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
        let (function, queue) = (self.handle, stream.raw());
        let result = if early {
            let mut attribute = sys::CUlaunchAttribute {
                id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                pad: [0; 4],
                value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
            };
            let config = sys::CUlaunchConfig {
                gridDimX: gx,
                gridDimY: gy,
                gridDimZ: gz,
                blockDimX: bx,
                blockDimY: by,
                blockDimZ: bz,
                sharedMemBytes: shared_bytes,
                hStream: queue,
                attrs: &raw mut attribute,
                numAttrs: 1,
            };
            // SAFETY: handles live, and what is configured for the length of the call; the caller answers for the arguments.
            unsafe { sys::cuLaunchKernelEx(&raw const config, function, parameters, std::ptr::null_mut()) }
        } else if cooperative {
            // SAFETY: handles live; the caller answers for the arguments.
            unsafe { sys::cuLaunchCooperativeKernel(function, gx, gy, gz, bx, by, bz, shared_bytes, queue, parameters) }
        } else {
            let extra = std::ptr::null_mut();
            // SAFETY: handles live; the caller answers for the arguments.
            unsafe { sys::cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared_bytes, queue, parameters, extra) }
        };
        self.module.device.check(result, "launching a kernel")
    }
}
