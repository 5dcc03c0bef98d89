//! NCCL, loaded when ranks on several GPUs are first asked for: the dozen calls that are used, and communicators
//! that can be aborted while others wait in them. Knows no tensor, and no rank's thread or process.
//!
//! The library is looked for by the name that packages install at run time, `libnccl.so.2`, which cudarc does not
//! try; and a symbol that is missing is an error here, where cudarc panics.

use crate::device::Device;
use libloading::Library;
use pagemill_backend::BackendError;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// `ncclResult_t`.
type Status = c_int;
/// `ncclSuccess`.
const SUCCESS: Status = 0;
/// `ncclInProgress`.
const IN_PROGRESS: Status = 7;
/// `ncclSum`.
const SUM: c_int = 0;

/// `ncclDataType_t`, those that are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum DataType {
    F32 = 7,
    Bf16 = 9,
}

/// `ncclComm_t`.
type Handle = *mut c_void;
type Stream = *mut c_void;

/// Bytes of a [`UniqueId`].
pub(crate) const ID_BYTES: usize = 128;

/// `ncclUniqueId`: by which processes find each other for one communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct UniqueId(pub(crate) [u8; ID_BYTES]);

/// The library's functions.
struct Nccl {
    init_all: unsafe extern "C" fn(*mut Handle, c_int, *const c_int) -> Status,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    init_rank: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> Status,
    destroy: unsafe extern "C" fn(Handle) -> Status,
    abort: unsafe extern "C" fn(Handle) -> Status,
    async_error: unsafe extern "C" fn(Handle, *mut Status) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    last_error: unsafe extern "C" fn(Handle) -> *const c_char,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> Status,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, Stream) -> Status,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, Stream) -> Status,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, Stream) -> Status,
    /// Keeps the functions where they are.
    _library: Library,
}

fn fault(detail: impl Into<String>) -> BackendError {
    BackendError::Collective { op: "nccl", detail: detail.into() }
}

/// The library, loaded once; or one sentence about why it is not there.
fn nccl() -> Result<&'static Nccl, BackendError> {
    static NCCL: OnceLock<Result<Nccl, String>> = OnceLock::new();
    NCCL.get_or_init(Nccl::load).as_ref().map_err(fault)
}

/// Keeps NCCL from NVLink's multicast, unless the environment says otherwise: setting it up can take a whole host's
/// links down where the fabric is shared.
fn leave_multicast_alone() {
    const SWITCH: &str = "NCCL_NVLS_ENABLE";
    if std::env::var_os(SWITCH).is_none() {
        // SAFETY: called once, before NCCL is loaded. What else reads the environment in this process goes through
        // the standard library's lock; the driver read its part when it was loaded.
        unsafe { std::env::set_var(SWITCH, "0") };
    }
}

impl Nccl {
    fn load() -> Result<Self, String> {
        leave_multicast_alone();
        // SAFETY: NCCL's initialisers only fill its own tables.
        let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok()).ok_or(
            "several ranks on GPUs need NCCL, and there is no libnccl.so.2 on the loader's path (install NCCL, or add \
             its folder to LD_LIBRARY_PATH)",
        )?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the field's type is the function's, as NCCL 2 has had it since its send and receive.
                *unsafe { library.get($name) }.map_err(|error| format!("libnccl is too old or broken: {error}"))?
            };
        }
        Ok(Self {
            init_all: symbol!(b"ncclCommInitAll\0"),
            unique_id: symbol!(b"ncclGetUniqueId\0"),
            init_rank: symbol!(b"ncclCommInitRank\0"),
            destroy: symbol!(b"ncclCommDestroy\0"),
            abort: symbol!(b"ncclCommAbort\0"),
            async_error: symbol!(b"ncclCommGetAsyncError\0"),
            error_string: symbol!(b"ncclGetErrorString\0"),
            last_error: symbol!(b"ncclGetLastError\0"),
            all_reduce: symbol!(b"ncclAllReduce\0"),
            all_gather: symbol!(b"ncclAllGather\0"),
            send: symbol!(b"ncclSend\0"),
            recv: symbol!(b"ncclRecv\0"),
            _library: library,
        })
    }

    /// What NCCL said while it did `what`.
    fn fault(&self, what: &str, status: Status, handle: Handle) -> BackendError {
        // SAFETY: static texts; a null communicator is allowed.
        let texts = unsafe { [(self.error_string)(status), (self.last_error)(handle)] };
        let texts = texts.map(|text| match text.is_null() {
            true => String::new(),
            // SAFETY: ends with a zero, and is not written while it is read.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned(),
        });
        let [error, last] = texts;
        fault(if last.is_empty() { format!("{what}: {error}") } else { format!("{what}: {error} ({last})") })
    }
}

impl UniqueId {
    /// A new one. This process has to live until all who were given it are connected: NCCL listens here for them.
    ///
    /// # Errors
    /// There is no NCCL, or it finds no network.
    pub(crate) fn make() -> Result<Self, BackendError> {
        let nccl = nccl()?;
        let mut id = Self([0; ID_BYTES]);
        // SAFETY: fills the id.
        match unsafe { (nccl.unique_id)(&raw mut id) } {
            SUCCESS => Ok(id),
            status => Err(nccl.fault("making an id for ranks", status, std::ptr::null_mut())),
        }
    }
}

/// One rank's end of a communicator.
pub(crate) struct Communicator {
    nccl: &'static Nccl,
    device: Arc<Device>,
    /// Null once aborted.
    handle: Mutex<CommHandle>,
}

struct CommHandle(Handle);

// SAFETY: NCCL lets any thread use a communicator, one at a time: the lock sees to that.
unsafe impl Send for CommHandle {}

/// Elements at a device address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) address: u64,
    pub(crate) count: usize,
    pub(crate) data_type: DataType,
}

impl Communicator {
    /// Communicators between `devices`, in rank order. Blocks until all are connected.
    ///
    /// # Errors
    /// There is no NCCL, or it cannot connect the devices.
    pub(crate) fn connect(devices: &[Arc<Device>]) -> Result<Vec<Self>, BackendError> {
        let nccl = nccl()?;
        let ordinals: Vec<c_int> = devices.iter().map(|device| device.ordinal()).collect();
        let mut handles = vec![std::ptr::null_mut(); devices.len()];
        let count = c_int::try_from(devices.len()).map_err(|_| fault("too many ranks"))?;
        // SAFETY: both hold `count` elements.
        let status = unsafe { (nccl.init_all)(handles.as_mut_ptr(), count, ordinals.as_ptr()) };
        if status != SUCCESS {
            return Err(nccl.fault("connecting the GPUs", status, std::ptr::null_mut()));
        }
        let ends = handles.into_iter().zip(devices);
        Ok(ends
            .map(|(handle, device)| Self { nccl, device: Arc::clone(device), handle: Mutex::new(CommHandle(handle)) })
            .collect())
    }

    /// Rank `rank` of a communicator of `num_ranks` ranks in as many processes, all of which were given `id`. Blocks
    /// until all have come, without a limit.
    ///
    /// # Errors
    /// There is no NCCL, or it cannot connect the GPUs.
    pub(crate) fn join(
        device: &Arc<Device>,
        id: UniqueId,
        rank: usize,
        num_ranks: usize,
    ) -> Result<Self, BackendError> {
        let nccl = nccl()?;
        let number = |value: usize| c_int::try_from(value).map_err(|_| fault("too many ranks"));
        let (rank, num_ranks) = (number(rank)?, number(num_ranks)?);
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: fills the handle; the device of the rank is this thread's.
        match unsafe { (nccl.init_rank)(&raw mut handle, num_ranks, id, rank) } {
            SUCCESS => Ok(Self { nccl, device: Arc::clone(device), handle: Mutex::new(CommHandle(handle)) }),
            status => Err(nccl.fault("connecting the GPUs", status, std::ptr::null_mut())),
        }
    }

    /// Calls `enqueue` with the communicator, the device bound to this thread.
    fn enqueue(&self, what: &'static str, enqueue: impl FnOnce(&Nccl, Handle) -> Status) -> Result<(), BackendError> {
        self.device.bind()?;
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        if handle.0.is_null() {
            return Err(fault(format!("{what}: the communicator was aborted")));
        }
        match enqueue(self.nccl, handle.0) {
            SUCCESS | IN_PROGRESS => Ok(()),
            status => Err(self.nccl.fault(what, status, handle.0)),
        }
    }

    /// `x` becomes the sum of all ranks' `x`, on `stream`.
    ///
    /// # Safety
    /// `x` is memory of this device that only work on `stream` uses until then.
    pub(crate) unsafe fn all_reduce(&self, x: Range, stream: Stream) -> Result<(), BackendError> {
        self.enqueue("all-reduce", |nccl, handle| {
            let (from, to) = (x.address as *const c_void, x.address as *mut c_void);
            // SAFETY: this function's contract.
            unsafe { (nccl.all_reduce)(from, to, x.count, x.data_type as c_int, SUM, handle, stream) }
        })
    }

    /// All ranks' `x` one after the other at `out`, on `stream`.
    ///
    /// # Safety
    /// As for [`Self::all_reduce`]; `out` has room for `x.count` elements of every rank.
    pub(crate) unsafe fn all_gather(&self, x: Range, out: u64, stream: Stream) -> Result<(), BackendError> {
        self.enqueue("all-gather", |nccl, handle| {
            let (from, to) = (x.address as *const c_void, out as *mut c_void);
            // SAFETY: this function's contract.
            unsafe { (nccl.all_gather)(from, to, x.count, x.data_type as c_int, handle, stream) }
        })
    }

    /// Sends `x` to rank `peer` of the communicator, on `stream`.
    ///
    /// # Safety
    /// As for [`Self::all_reduce`].
    pub(crate) unsafe fn send(&self, x: Range, peer: usize, stream: Stream) -> Result<(), BackendError> {
        let peer = c_int::try_from(peer).unwrap_or(c_int::MAX);
        self.enqueue("send", |nccl, handle| {
            // SAFETY: this function's contract.
            unsafe { (nccl.send)(x.address as *const c_void, x.count, x.data_type as c_int, peer, handle, stream) }
        })
    }

    /// Receives into `x` from rank `peer` of the communicator, on `stream`.
    ///
    /// # Safety
    /// As for [`Self::all_reduce`].
    pub(crate) unsafe fn recv(&self, x: Range, peer: usize, stream: Stream) -> Result<(), BackendError> {
        let peer = c_int::try_from(peer).unwrap_or(c_int::MAX);
        self.enqueue("receive", |nccl, handle| {
            // SAFETY: this function's contract.
            unsafe { (nccl.recv)(x.address as *mut c_void, x.count, x.data_type as c_int, peer, handle, stream) }
        })
    }

    /// A fault that came after a call had returned. Does not wait for a thread that is in a call.
    pub(crate) fn async_fault(&self) -> Option<BackendError> {
        let handle = self.handle.try_lock().ok().filter(|handle| !handle.0.is_null())?;
        let mut status = SUCCESS;
        // SAFETY: the communicator lives: nobody aborts it while it is locked.
        let asked = unsafe { (self.nccl.async_error)(handle.0, &raw mut status) };
        let status = if asked == SUCCESS { status } else { asked };
        (status != SUCCESS && status != IN_PROGRESS).then(|| self.nccl.fault("a collective", status, handle.0))
    }

    /// Begins to end every kernel of the communicator, finished or not. False, and nothing done, while a thread is in a
    /// call. NCCL ends the kernels at once, but comes back only when no recorded step refers to the communicator any
    /// more: a thread of its own waits for that.
    pub(crate) fn try_abort(&self) -> bool {
        let Ok(mut handle) = self.handle.try_lock() else { return false };
        let taken = CommHandle(std::mem::replace(&mut handle.0, std::ptr::null_mut()));
        if !taken.0.is_null() {
            let (nccl, device) = (self.nccl, Arc::clone(&self.device));
            let abort = move || {
                // The whole of it, not its pointer alone.
                let taken = taken;
                if device.bind().is_ok() {
                    // SAFETY: the communicator lives, and nobody has it any more.
                    let _ = unsafe { (nccl.abort)(taken.0) };
                }
            };
            // Without a thread its kernels run on until the process ends.
            let _ = std::thread::Builder::new().name("pagemill-abort".into()).spawn(abort);
        }
        true
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let handle = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !handle.0.is_null() && self.device.bind().is_ok() {
            // SAFETY: made in `connect` or `join`, destroyed once, used by nobody any more. NCCL waits until no recorded
            // step refers to it: `CudaCollective` forgets them first.
            let _ = unsafe { (self.nccl.destroy)(handle.0) };
        }
    }
}
