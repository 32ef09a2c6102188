//! A communicator: ranks whose GPUs send each other bytes.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::mpsc;
use std::time::Duration;

use super::error::NcclError;
use super::library::{Code, Config, Handle, IN_PROGRESS, Library, RawId, SUCCESS, UINT8};
use crate::cuda::{DeviceBuffer, Stream};

/// How long giving up a communicator may take: NCCL's own threads may hang in it.
const ABORT_LIMIT: Duration = Duration::from_secs(10);

/// `NCCL_CONFIG_UNDEF_INT`: as NCCL sees fit.
const UNDEFINED: c_int = c_int::MIN;

/// What makes ranks find each other: made by one rank, told to the others by another way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// A new one. The rank that makes it takes part in the communicator, and listens from now on.
    ///
    /// # Errors
    /// If NCCL finds no network interface to listen on, or fails otherwise.
    pub fn new(library: &Library) -> Result<Self, NcclError> {
        let mut id = RawId([0; 128]);
        // SAFETY: `id` is a place for one id.
        let result = unsafe { (library.functions().unique_id)(&raw mut id) };
        library.check(result, "making an id for the ranks' communicator")?;
        Ok(Self(id.0))
    }

    /// Its bytes, for the way to the other ranks.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; 128] {
        &self.0
    }

    /// The id of which these are the bytes; absent if they are too many or too few.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

/// Where this process is in a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Its number in it.
    pub rank: usize,
    /// How many there are.
    pub num_ranks: usize,
    /// Multiprocessors that its transfers take at most, the same for all; absent: as NCCL sees fit.
    pub max_multiprocessors: Option<u32>,
}

/// How far something that was started has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// It goes on.
    Pending,
    /// It is done.
    Done,
}

/// Bytes of a buffer that go to a rank or come from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// The other rank.
    pub peer: usize,
    /// Where they lie in the buffer of this side.
    pub bytes: Range<usize>,
}

/// This rank's end of a communicator. One thread uses it at a time.
///
/// Dropping it touches no peer: its memory stays with NCCL until the process ends. [`Communicator::abort`] gives it up,
/// which is right once all ranks are through with it, or one has failed.
#[derive(Debug)]
pub struct Communicator {
    library: Library,
    handle: Handle,
}

impl Communicator {
    /// Begins to join the ranks that have the same `id`, with the device of `stream`. It is ready once
    /// [`Communicator::progress`] says so; until then nothing else may be asked of it but [`Communicator::abort`].
    ///
    /// # Errors
    /// If NCCL refuses at once.
    pub fn begin(library: &Library, id: UniqueId, place: Place, stream: &Stream) -> Result<Self, NcclError> {
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: library.raw_version(),
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: place.max_multiprocessors.and_then(|most| c_int::try_from(most).ok()).unwrap_or(UNDEFINED),
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        };
        let (rank, num_ranks) = (count(place.rank), count(place.num_ranks));
        // NCCL goes by the device that is current on this thread.
        stream.device().enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is a place for one handle, and `config` is read before the call returns.
        let result =
            unsafe { (library.functions().init)(&raw mut handle, num_ranks, RawId(id.0), rank, &raw mut config) };
        let communicator = Self { library: library.clone(), handle };
        match library.check(result, "joining the ranks' GPUs") {
            Ok(()) => Ok(communicator),
            Err(error) => {
                communicator.abort();
                Err(error)
            }
        }
    }

    /// How far what was last begun, an `operation` for messages, has come: joining, or handing transfers to the stream.
    ///
    /// # Errors
    /// If it failed, here or at a peer that NCCL can tell of.
    pub fn progress(&self, operation: &'static str) -> Result<Progress, NcclError> {
        let mut state: Code = SUCCESS;
        // SAFETY: the handle is NCCL's, and `state` a place for one result.
        let result = unsafe { (self.library.functions().async_error)(self.handle, &raw mut state) };
        self.library.check(result, "asking for NCCL's progress")?;
        if state == IN_PROGRESS {
            return Ok(Progress::Pending);
        }
        self.library.check(state, operation)?;
        Ok(Progress::Done)
    }

    /// Begins all `sends` and `receives` as one group behind the work of `stream`: they don't wait for each other. Two ranks'
    /// transfers meet in the order in which they were begun. The stream has them once [`Communicator::progress`] says so.
    ///
    /// # Errors
    /// If a range reaches beyond its buffer, or NCCL refuses.
    pub fn begin_transfers(
        &self,
        stream: &Stream,
        (source, sends): (&DeviceBuffer<u8>, &[Transfer]),
        (target, receives): (&mut DeviceBuffer<u8>, &[Transfer]),
    ) -> Result<(), NcclError> {
        let functions = self.library.functions();
        let of = |buffer: &DeviceBuffer<u8>, transfer: &Transfer| -> Result<(u64, usize, c_int), NcclError> {
            Ok((buffer.address_of(transfer.bytes.clone())?, transfer.bytes.len(), count(transfer.peer)))
        };
        // Looked up before the group is opened: an open group that is left behind would take in whatever comes next.
        let sends: Vec<_> = sends.iter().map(|transfer| of(source, transfer)).collect::<Result<_, _>>()?;
        let receives: Vec<_> = receives.iter().map(|transfer| of(target, transfer)).collect::<Result<_, _>>()?;
        stream.device().enter()?;
        // SAFETY: takes nothing.
        let opened = unsafe { (functions.group_start)() };
        self.library.check(opened, "opening a group of transfers")?;
        let mut first = SUCCESS;
        for (address, len, peer) in sends {
            // SAFETY: the range lies in `source`, whose memory goes only when the device is done with it.
            let result =
                unsafe { (functions.send)(address as *const _, len, UINT8, peer, self.handle, stream.handle()) };
            first = first_failure(first, result);
        }
        for (address, len, peer) in receives {
            // SAFETY: the range lies in `target`, borrowed mutably; as above.
            let result =
                unsafe { (functions.receive)(address as *mut _, len, UINT8, peer, self.handle, stream.handle()) };
            first = first_failure(first, result);
        }
        // SAFETY: closes the group opened above, whatever was put into it.
        let closed = unsafe { (functions.group_end)() };
        self.library.check(first_failure(first, closed), "sending and receiving between GPUs")
    }

    /// Gives the communicator up: this rank's transfers end, done or not. Peers that still wait for this rank wait on.
    ///
    /// Returns within a bounded time; where NCCL hangs in it, a thread is left behind with it.
    pub fn abort(self) {
        struct Owned(Library, Handle);
        // SAFETY: the handle is used by the thread that it is given to and by no other: `self` is consumed.
        unsafe impl Send for Owned {}
        if self.handle.is_null() {
            return;
        }
        let owned = Owned(self.library.clone(), self.handle);
        let (done, wait) = mpsc::channel();
        std::thread::spawn(move || {
            let Owned(library, handle) = { owned };
            // SAFETY: the handle is NCCL's and is not used again.
            let result = unsafe { (library.functions().abort)(handle) };
            // Nobody listens once the limit has passed.
            let _ = done.send(library.check(result, "giving up the ranks' communicator"));
        });
        match wait.recv_timeout(ABORT_LIMIT) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!("{error}"),
            Err(_) => tracing::warn!("NCCL does not let go of its communicator; it is left behind"),
        }
    }
}

/// The first result that is a failure.
fn first_failure(first: Code, next: Code) -> Code {
    if first == SUCCESS || first == IN_PROGRESS { next } else { first }
}

/// A rank or a number of ranks: MPI counted them in as many bits.
fn count(ranks: usize) -> c_int {
    c_int::try_from(ranks).unwrap_or(c_int::MAX)
}
