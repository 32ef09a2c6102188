//! Products with a weight: one algorithm, any number of rows.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use super::super::buffer::DeviceBuffer;
use super::super::device::Device;
use super::super::stream::Stream;
use super::error::BlasError;
use super::library::{Algorithm, Candidate, Code, Library, Object, SUCCESS};

/// `CUBLAS_COMPUTE_32F`: sums in f32, never in TF32 or less.
const COMPUTE_F32: c_int = 68;
/// `CUDA_R_32F`
const F32: c_int = 0;
/// `CUDA_R_16BF`
const BF16: c_int = 14;
/// `CUBLASLT_MATMUL_DESC_TRANSA`
const TRANSPOSE_A: c_int = 3;
/// `CUBLAS_OP_T`
const TRANSPOSED: c_int = 1;
/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`
const MAX_WORKSPACE_BYTES: c_int = 1;
/// `CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK`
const REDUCTION_SCHEMES: c_int = 3;
/// `CUBLASLT_ALGO_CONFIG_SPLITK_NUM`
const NUM_SPLITS: c_int = 2;
/// Every way of splitting sums.
const ALL_SCHEMES: u32 = 7;
/// What cuBLAS itself takes on Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;
/// `CUBLAS_STATUS_NOT_SUPPORTED`: there is no algorithm.
const NOT_SUPPORTED: Code = 15;
/// Algorithms that are looked at.
const NUM_CANDIDATES: u8 = 16;

/// `out[t, n] = sum over k of x[t, k] * weight[n, k]`, all matrices row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatmulShape {
    /// Rows of the weight, columns of the output.
    pub out_features: usize,
    /// What is summed.
    pub in_features: usize,
    /// The number of rows of `x` that the algorithm is chosen for; it serves any other.
    pub num_rows: usize,
}

impl fmt::Display for MatmulShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a weight of [{}, {}]", self.out_features, self.in_features)
    }
}

/// cublasLt on a device; copies of it are the same.
#[derive(Clone)]
pub struct Blas(Arc<Handle>);

struct Handle {
    library: Library,
    device: Device,
    handle: Object,
}

// SAFETY: a handle may be used by any thread with the context current, which every call here sees to; it holds no stream.
unsafe impl Send for Handle {}
// SAFETY: cublasLt's functions may be called by several threads with one handle.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: made by `Blas::new` and destroyed here alone.
            let _ = unsafe { (self.library.functions().destroy)(self.handle) };
        }
    }
}

impl Blas {
    /// Starts the library on a device.
    ///
    /// # Errors
    /// If the library does not start there.
    pub fn new(library: &Library, device: &Device) -> Result<Self, BlasError> {
        device.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is a place for one handle; it is destroyed once, by `drop`.
        let result = unsafe { (library.functions().create)(&raw mut handle) };
        library.check(result, "starting cublasLt")?;
        Ok(Self(Arc::new(Handle { library: library.clone(), device: device.clone(), handle })))
    }

    /// The library.
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.0.library
    }

    /// Prepares a product; none where no algorithm computes it for every number of rows without splitting sums.
    ///
    /// # Errors
    /// If the library fails.
    pub fn matmul(&self, shape: MatmulShape) -> Result<Option<Matmul>, BlasError> {
        let mut matmul = self.described(shape, F32, None)?;
        let Some(algorithm) = matmul.choose()? else { return Ok(None) };
        matmul.algorithm = algorithm;
        Ok(Some(matmul))
    }

    /// Prepares what a bench compares with: bf16 rows out, and the library's first choice for just so many rows, whose sums it
    /// may split, with a workspace. None where it has no algorithm.
    ///
    /// # Errors
    /// If the library fails, or there is no memory.
    pub fn baseline(&self, shape: MatmulShape) -> Result<Option<Matmul>, BlasError> {
        let workspace = DeviceBuffer::uninitialised(&self.0.device, WORKSPACE_BYTES)?;
        let mut matmul = self.described(shape, BF16, Some(workspace))?;
        let Some(algorithm) = matmul.candidates(&matmul.rows(shape.num_rows)?)?.first().copied() else {
            return Ok(None);
        };
        matmul.algorithm = algorithm;
        Ok(Some(matmul))
    }

    /// A product without an algorithm, whose rows are of the format `out`.
    fn described(
        &self,
        shape: MatmulShape,
        out: c_int,
        workspace: Option<DeviceBuffer<u8>>,
    ) -> Result<Matmul, BlasError> {
        self.0.device.enter()?;
        let library = self.library();
        let functions = library.functions();
        let description = Owned::new(
            library,
            "describing a product",
            // SAFETY: the place is one for one object.
            |place| unsafe { (functions.desc_create)(place, COMPUTE_F32, F32) },
            functions.desc_destroy,
        )?;
        let operation = TRANSPOSED;
        // SAFETY: the attribute is an i32, and it is read during the call.
        let result = unsafe {
            (functions.desc_set)(description.object, TRANSPOSE_A, (&raw const operation).cast(), size_of::<c_int>())
        };
        library.check(result, "describing a product")?;
        // Column by column, as the library reads it, a weight `[n, k]` is `[k, n]`, to be transposed.
        let weight = self.layout(BF16, shape.in_features, shape.out_features)?;
        let algorithm = Algorithm([0; 8]);
        Ok(Matmul { blas: self.clone(), shape, description, weight, algorithm, out, workspace })
    }

    /// A matrix of `num_rows` contiguous columns of `len` values.
    fn layout(&self, kind: c_int, len: usize, num_columns: usize) -> Result<Owned, BlasError> {
        let functions = self.library().functions();
        let stride = i64::try_from(len).unwrap_or(i64::MAX);
        Owned::new(
            self.library(),
            "describing a matrix",
            // SAFETY: the place is one for one object.
            |place| unsafe { (functions.layout_create)(place, kind, len as u64, num_columns as u64, stride) },
            functions.layout_destroy,
        )
    }
}

/// What the library has made, destroyed when it goes.
struct Owned {
    object: Object,
    destroy: unsafe extern "C" fn(Object) -> Code,
}

// SAFETY: such an object is host memory that belongs to whoever holds it.
unsafe impl Send for Owned {}
// SAFETY: nothing writes it after it was set up.
unsafe impl Sync for Owned {}

impl Owned {
    fn new(
        library: &Library,
        operation: &'static str,
        make: impl FnOnce(*mut Object) -> Code,
        destroy: unsafe extern "C" fn(Object) -> Code,
    ) -> Result<Self, BlasError> {
        let mut object = ptr::null_mut();
        library.check(make(&raw mut object), operation)?;
        Ok(Self { object, destroy })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made by the library's function that goes with `destroy`, and destroyed here alone.
        let _ = unsafe { (self.destroy)(self.object) };
    }
}

/// A product with weights of one shape, ready to be queued.
pub struct Matmul {
    blas: Blas,
    shape: MatmulShape,
    description: Owned,
    weight: Owned,
    algorithm: Algorithm,
    out: c_int,
    /// Products in one stream wait for each other, and so share it.
    workspace: Option<DeviceBuffer<u8>>,
}

/// The layouts of what differs from call to call.
struct Rows {
    x: Owned,
    out: Owned,
}

impl Matmul {
    /// What computes it.
    #[must_use]
    pub fn library(&self) -> &Library {
        self.blas.library()
    }

    /// A short name of the algorithm, which follows from all that it is made of.
    #[must_use]
    pub fn algorithm(&self) -> String {
        // FNV-1a over the words: a name to compare, not a secret.
        let name = self
            .algorithm
            .0
            .iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, word| (hash ^ word).wrapping_mul(0x0100_0000_01b3));
        format!("{name:016x}")
    }

    /// Queues the product of `num_rows` rows; 0 rows queue nothing.
    ///
    /// # Errors
    /// If the library refuses it.
    ///
    /// # Safety
    /// `x` is the address of bf16 `[num_rows, in_features]`, `out` of `[num_rows, out_features]`, f32 or, of a baseline, bf16;
    /// on the stream's device and aligned to 16 bytes. Both live until `stream` has come so far, and a baseline does too and is
    /// queued in no other stream meanwhile.
    ///
    /// # Panics
    /// If `weight` is not of the shape.
    pub unsafe fn queue(
        &self,
        stream: &Stream,
        weight: &DeviceBuffer<u16>,
        x: u64,
        (num_rows, out): (usize, u64),
    ) -> Result<(), BlasError> {
        assert_eq!(weight.len(), self.shape.out_features * self.shape.in_features, "the weight is of the shape");
        if num_rows == 0 {
            return Ok(());
        }
        self.blas.0.device.enter()?;
        let layouts = self.rows(num_rows)?;
        let (one, zero) = (1f32, 0f32);
        let workspace = self.workspace.as_ref().map_or(ptr::null_mut(), |workspace| address(workspace.address()));
        let (weight, x, out) = (address(weight.address()), address(x), address(out));
        // SAFETY: the objects live; both scalars are read during the call, being on the host; the caller answers for the
        // addresses, and the assertion above for the weight's.
        let result = unsafe {
            (self.blas.library().functions().matmul)(
                self.blas.0.handle,
                self.description.object,
                (&raw const one).cast(),
                weight,
                self.weight.object,
                x,
                layouts.x.object,
                (&raw const zero).cast(),
                out,
                layouts.out.object,
                out,
                layouts.out.object,
                &raw const self.algorithm,
                workspace,
                self.workspace_bytes(),
                stream.handle(),
            )
        };
        self.blas.library().check(result, "multiplying")
    }

    fn rows(&self, num_rows: usize) -> Result<Rows, BlasError> {
        let x = self.blas.layout(BF16, self.shape.in_features, num_rows)?;
        Ok(Rows { x, out: self.blas.layout(self.out, self.shape.out_features, num_rows)? })
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace.as_ref().map_or(0, DeviceBuffer::num_bytes)
    }

    /// The library's first choice, for the shape's number of rows or else for fewer, that splits no sum and serves a single
    /// row too.
    fn choose(&self) -> Result<Option<Algorithm>, BlasError> {
        let most = self.shape.num_rows.max(1);
        let (one, many) = (self.rows(1)?, self.rows(most)?);
        for num_rows in [most, most.min(256), most.min(16), 1] {
            let candidates = self.candidates(&self.rows(num_rows)?)?;
            let found = candidates.into_iter().find(|algorithm| {
                let serves = [self.checks(algorithm, &one), self.checks(algorithm, &many)];
                tracing::debug!(shape = %self.shape, num_rows, ?algorithm, splits = self.splits(algorithm), ?serves);
                self.splits(algorithm) <= 1 && serves == [true; 2]
            });
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// What the library would take for so many rows, the best first: without a workspace and whole sums alone, but for a
    /// baseline.
    fn candidates(&self, rows: &Rows) -> Result<Vec<Algorithm>, BlasError> {
        let library = self.blas.library();
        let functions = library.functions();
        let preference = Owned::new(
            library,
            "asking for algorithms",
            // SAFETY: the place is one for one object.
            |place| unsafe { (functions.preference_create)(place) },
            functions.preference_destroy,
        )?;
        let most_bytes = self.workspace_bytes();
        let (bytes, schemes) = (most_bytes as u64, if most_bytes == 0 { 0_u32 } else { ALL_SCHEMES });
        let (bytes, schemes): (*const c_void, *const c_void) = ((&raw const bytes).cast(), (&raw const schemes).cast());
        let settings = [(MAX_WORKSPACE_BYTES, bytes, size_of::<u64>()), (REDUCTION_SCHEMES, schemes, size_of::<u32>())];
        for (name, value, len) in settings {
            // SAFETY: the attribute is of that size, and read during the call.
            let result = unsafe { (functions.preference_set)(preference.object, name, value, len) };
            library.check(result, "asking for algorithms")?;
        }
        let none = Candidate {
            algorithm: Algorithm([0; 8]),
            workspace_bytes: 0,
            state: SUCCESS,
            num_waves: 0.0,
            reserved: [0; 4],
        };
        let mut candidates = [none; NUM_CANDIDATES as usize];
        let mut num_found: c_int = 0;
        // SAFETY: the objects live; there is room for as many candidates as are asked for, and for their number.
        let result = unsafe {
            (functions.heuristic)(
                self.blas.0.handle,
                self.description.object,
                self.weight.object,
                rows.x.object,
                rows.out.object,
                rows.out.object,
                preference.object,
                c_int::from(NUM_CANDIDATES),
                candidates.as_mut_ptr(),
                &raw mut num_found,
            )
        };
        if result == NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        library.check(result, "asking for algorithms")?;
        let found = candidates.into_iter().take(usize::try_from(num_found).unwrap_or(0));
        let found = found.filter(|candidate| candidate.state == SUCCESS && candidate.workspace_bytes <= most_bytes);
        Ok(found.map(|candidate| candidate.algorithm).collect())
    }

    /// In how many parts an algorithm sums; as many as there can be where it does not say.
    fn splits(&self, algorithm: &Algorithm) -> c_int {
        let (mut splits, mut written): (c_int, usize) = (c_int::MAX, 0);
        // SAFETY: `splits` is a place for the attribute, an i32, and `written` for one size.
        let result = unsafe {
            (self.blas.library().functions().config_get)(
                algorithm,
                NUM_SPLITS,
                (&raw mut splits).cast(),
                size_of::<c_int>(),
                &raw mut written,
            )
        };
        if result == SUCCESS { splits } else { c_int::MAX }
    }

    /// Whether an algorithm computes so many rows, without a workspace.
    fn checks(&self, algorithm: &Algorithm, rows: &Rows) -> bool {
        let mut found = std::mem::MaybeUninit::<Candidate>::zeroed();
        // SAFETY: the objects live, and `found` is a place for one result.
        let result = unsafe {
            (self.blas.library().functions().check)(
                self.blas.0.handle,
                self.description.object,
                self.weight.object,
                rows.x.object,
                rows.out.object,
                rows.out.object,
                algorithm,
                found.as_mut_ptr(),
            )
        };
        // SAFETY: zeroed bytes are a valid result, and the library wrote nothing else than one.
        let found = unsafe { found.assume_init() };
        result == SUCCESS && found.state == SUCCESS && found.workspace_bytes == 0
    }
}

fn address(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}
