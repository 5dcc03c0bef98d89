//! Hidden states from a stage to the next one, on streams of their own, so that a stage computes on while what it has
//! made waits for its receiver: by NCCL's send and receive, or as copies where both stages are on one GPU. The
//! receiver waits on the host, so that what it waited is known: first for the sender's word that something is on its
//! way, so that nothing spins on its GPU meanwhile. Processes have no such word: there NCCL's receive begins at once.

use super::nccl::{Communicator, DataType, Range};
use super::verdict::{PATIENCE, Verdict};
use crate::device::Device;
use crate::memory::{CudaBuffer, Workspace};
use cudarc::driver::{result, sys};
use pagemill_backend::{BackendError, Tensor};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Hidden states that may wait for their receiver.
const DEPTH: usize = 2;
/// How long a waiting thread spins before it naps.
const SPIN_FOR: Duration = Duration::from_millis(3);
const NAP: Duration = Duration::from_micros(50);

/// The sender's end. Its peer is rank 1 of the communicator.
pub(crate) struct Outgoing(End);

/// The receiver's end. Its peer is rank 0 of the communicator.
pub(crate) struct Incoming {
    end: End,
    sender: Sender,
    /// Recorded behind the last receive.
    landed: Event,
}

/// Where hidden states come from.
enum Sender {
    /// A rank of this process, which says when something is on its way.
    Near,
    /// Another process, which may take so long to send it.
    Far(Duration),
}

struct End {
    device: Arc<Device>,
    stream: SideStream,
    /// `None`: both ends are on one GPU.
    communicator: Option<Arc<Communicator>>,
    shared: Arc<Shared>,
}

/// What both ends see; between processes each has its own.
struct Shared {
    /// What the sender has begun to send, and what the receiver has begun to receive.
    num_sent: AtomicUsize,
    num_received: AtomicUsize,
    slots: Mutex<Slots>,
    verdict: Arc<Verdict>,
}

struct Slots {
    workspace: Arc<Workspace>,
    slots: Vec<Slot>,
}

/// Where hidden states wait.
struct Slot {
    buffer: Option<CudaBuffer>,
    len: usize,
    /// Recorded on the ops' stream behind the copy into it.
    filled: Event,
    /// Recorded on a side stream behind the last use.
    sent: Event,
}

/// A rank's device, and where its temporaries come from.
pub(crate) struct Place<'a> {
    pub(crate) device: &'a Arc<Device>,
    pub(crate) workspace: &'a Arc<Workspace>,
}

/// Connects two ranks of neighbouring stages, one way. Gives the communicators, too.
pub(crate) fn connect(
    from: &Place<'_>,
    to: &Place<'_>,
    verdict: &Arc<Verdict>,
) -> Result<(Outgoing, Incoming, Vec<Arc<Communicator>>), BackendError> {
    let devices = [Arc::clone(from.device), Arc::clone(to.device)];
    let communicators: Vec<_> = match from.device.ordinal() == to.device.ordinal() {
        true => Vec::new(),
        false => Communicator::connect(&devices)?.into_iter().map(Arc::new).collect(),
    };
    let shared = Arc::new(Shared::new(from, verdict)?);
    let end = |at: usize| End::new(&devices[at], communicators.get(at).cloned(), &shared);
    let outgoing = Outgoing(end(0)?);
    let incoming = Incoming { end: end(1)?, sender: Sender::Near, landed: Event::new(to.device)? };
    Ok((outgoing, incoming, communicators))
}

/// This process's end towards a rank of another one.
pub(crate) fn to_process(
    from: &Place<'_>,
    communicator: &Arc<Communicator>,
    verdict: &Arc<Verdict>,
) -> Result<Outgoing, BackendError> {
    let shared = Arc::new(Shared::new(from, verdict)?);
    End::new(from.device, Some(Arc::clone(communicator)), &shared).map(Outgoing)
}

/// This process's end towards a rank of another one, which may take as long as `patience` to send.
pub(crate) fn from_process(
    to: &Place<'_>,
    communicator: &Arc<Communicator>,
    verdict: &Arc<Verdict>,
    patience: Duration,
) -> Result<Incoming, BackendError> {
    let shared = Arc::new(Shared::new(to, verdict)?);
    let end = End::new(to.device, Some(Arc::clone(communicator)), &shared)?;
    Ok(Incoming { end, sender: Sender::Far(patience), landed: Event::new(to.device)? })
}

impl End {
    fn new(
        device: &Arc<Device>,
        communicator: Option<Arc<Communicator>>,
        shared: &Arc<Shared>,
    ) -> Result<Self, BackendError> {
        let (device, stream) = (Arc::clone(device), SideStream::new(device)?);
        Ok(Self { device, stream, communicator, shared: Arc::clone(shared) })
    }
}

impl Outgoing {
    /// Sends hidden states at `address` (f32), when what is on the ops' stream is done. The place may then be
    /// written again by later ops. Waits where as many as fit are waiting for their receiver. A rehearsal only takes
    /// the slots.
    pub(crate) fn send(&self, x: &Tensor, address: u64) -> Result<(), BackendError> {
        let End { device, stream, communicator, shared } = &self.0;
        let count = x.rows() * x.cols();
        device.bind()?;
        if device.is_rehearsing() {
            return (0..DEPTH).try_for_each(|at| shared.lock_slots().grow(at, count * 4, device));
        }
        let serial = shared.num_sent.load(Ordering::Relaxed);
        let fault = |error| device.fault("sending hidden states", error);
        shared.wait_until("send", None, || match communicator {
            Some(_) => shared.lock_slots().slots[serial % DEPTH].sent.is_done().map_err(fault),
            // The receiver copies, and may not have begun.
            None => Ok(shared.num_received.load(Ordering::Acquire) + DEPTH > serial),
        })?;
        let mut slots = shared.lock_slots();
        slots.grow(serial % DEPTH, count * 4, device)?;
        let slot = &slots.slots[serial % DEPTH];
        let to = slot.buffer.as_ref().map_or(0, CudaBuffer::address);
        // SAFETY: the slot holds `count` floats, and is written only when its last use is done.
        unsafe {
            slot.sent.hold(device.stream()).map_err(fault)?;
            result::memcpy_dtod_async(to, address, count * 4, device.stream()).map_err(fault)?;
            slot.filled.record(device.stream()).map_err(fault)?;
        }
        // Before NCCL is called: it may wait for the receiver's call.
        shared.num_sent.store(serial + 1, Ordering::Release);
        let Some(communicator) = communicator else { return Ok(()) };
        let range = Range { address: to, count, data_type: DataType::F32 };
        // SAFETY: the slot is not written again before `sent`.
        unsafe {
            slot.filled.hold(stream.0).map_err(fault)?;
            communicator.send(range, 1, stream.0.cast())?;
            slot.sent.record(stream.0).map_err(fault)
        }
    }
}

impl Slots {
    /// Makes slot `at` hold `len` bytes.
    fn grow(&mut self, at: usize, len: usize, device: &Device) -> Result<(), BackendError> {
        let slot = &mut self.slots[at];
        if slot.len < len {
            // SAFETY: the stream lives. The smaller buffer goes back to the ops, after its last use.
            unsafe { slot.sent.hold(device.stream()) }.map_err(|error| device.fault("holding a stream", error))?;
            slot.buffer = None;
            slot.buffer = Some(self.workspace.take(len)?);
            slot.len = len;
        }
        Ok(())
    }
}

impl Incoming {
    /// Receives hidden states into `address` (f32), whose earlier ops are on the ops' stream. Waits until they are
    /// there. A rehearsal receives nothing.
    pub(crate) fn recv(&self, out: &Tensor, address: u64) -> Result<(), BackendError> {
        const OP: &str = "recv";
        let End { device, stream, communicator, shared } = &self.end;
        if device.is_rehearsing() {
            return Ok(());
        }
        let serial = shared.num_received.load(Ordering::Relaxed);
        let patience = match self.sender {
            Sender::Near => {
                shared.wait_until(OP, None, || Ok(shared.num_sent.load(Ordering::Acquire) > serial))?;
                PATIENCE
            }
            Sender::Far(patience) => patience,
        };
        let fault = |error| device.fault("receiving hidden states", error);
        device.bind()?;
        let count = out.rows() * out.cols();
        // SAFETY: the tensor is held mutably, and nothing on the ops' stream uses its place any more when `landed`
        // lets the receive begin.
        unsafe {
            self.landed.record(device.stream()).map_err(fault)?;
            self.landed.hold(stream.0).map_err(fault)?;
        }
        match communicator {
            Some(communicator) => {
                let range = Range { address, count, data_type: DataType::F32 };
                // SAFETY: as above.
                unsafe { communicator.recv(range, 0, stream.0.cast()) }?;
            }
            None => {
                let slots = shared.lock_slots();
                let slot = &slots.slots[serial % DEPTH];
                let from = slot.buffer.as_ref().filter(|_| slot.len >= count * 4).map_or(0, CudaBuffer::address);
                pagemill_backend::check::ensure(OP, from != 0, || {
                    (format!("at most the {} bytes that were sent", slot.len), (count * 4).to_string())
                })?;
                // SAFETY: as above; the slot was filled with that much, and is not filled again before `sent`.
                unsafe {
                    slot.filled.hold(stream.0).map_err(fault)?;
                    result::memcpy_dtod_async(address, from, count * 4, stream.0).map_err(fault)?;
                    slot.sent.record(stream.0).map_err(fault)?;
                }
            }
        }
        shared.num_received.store(serial + 1, Ordering::Release);
        // SAFETY: the stream lives as long as its end.
        unsafe { self.landed.record(stream.0) }.map_err(fault)?;
        shared.wait_until(OP, Some(patience), || self.landed.is_done().map_err(fault))
    }
}

impl Shared {
    /// For a sender at `place`; what only receives there takes none of the slots.
    fn new(place: &Place<'_>, verdict: &Arc<Verdict>) -> Result<Self, BackendError> {
        let slot = || {
            let (filled, sent) = (Event::new(place.device)?, Event::new(place.device)?);
            Ok::<_, BackendError>(Slot { buffer: None, len: 0, filled, sent })
        };
        let slots = (0..DEPTH).map(|_| slot()).collect::<Result<_, _>>()?;
        Ok(Self {
            num_sent: AtomicUsize::new(0),
            num_received: AtomicUsize::new(0),
            slots: Mutex::new(Slots { workspace: Arc::clone(place.workspace), slots }),
            verdict: Arc::clone(verdict),
        })
    }

    fn lock_slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Comes back when `is_done`, or with the verdict; one is passed when that takes longer than `patience`.
    fn wait_until(
        &self,
        op: &'static str,
        patience: Option<Duration>,
        mut is_done: impl FnMut() -> Result<bool, BackendError>,
    ) -> Result<(), BackendError> {
        let started = Instant::now();
        while !is_done()? {
            self.verdict.check(op)?;
            let waited = started.elapsed();
            if patience.is_some_and(|patience| waited > patience) {
                let seconds = waited.as_secs();
                self.verdict.pass(&format!(
                    "hidden states have been on their way for {seconds} s: a GPU hangs, or what connects it"
                ));
            }
            if waited < SPIN_FOR {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(NAP);
            }
        }
        self.verdict.check(op)
    }
}

/// A stream beside the ops'.
struct SideStream(sys::CUstream);

// SAFETY: a handle that any thread may use; see `Device`.
unsafe impl Send for SideStream {}
// SAFETY: as for Send.
unsafe impl Sync for SideStream {}

impl SideStream {
    fn new(device: &Device) -> Result<Self, BackendError> {
        device.bind()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        stream.map(Self).map_err(|error| device.fault("creating a stream", error))
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once; the driver keeps it until what is on it is done.
        let _ = unsafe { result::stream::destroy(self.0) };
    }
}

/// A point in a stream that another one, or the host, waits for.
struct Event(sys::CUevent);

// SAFETY: a handle that any thread may use; see `Device`.
unsafe impl Send for Event {}
// SAFETY: as for Send.
unsafe impl Sync for Event {}

impl Event {
    fn new(device: &Device) -> Result<Self, BackendError> {
        device.bind()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        event.map(Self).map_err(|error| device.fault("creating an event", error))
    }

    /// # Safety
    /// `stream` lives, and is of the event's device.
    unsafe fn record(&self, stream: sys::CUstream) -> Result<(), result::DriverError> {
        // SAFETY: this function's contract.
        unsafe { result::event::record(self.0, stream) }
    }

    /// What comes later on `stream` waits for the event.
    ///
    /// # Safety
    /// `stream` lives.
    unsafe fn hold(&self, stream: sys::CUstream) -> Result<(), result::DriverError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: this function's contract.
        unsafe { result::stream::wait_event(stream, self.0, flags) }
    }

    fn is_done(&self) -> Result<bool, result::DriverError> {
        // SAFETY: the event lives.
        match unsafe { result::event::query(self.0) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once; the driver keeps it until nothing waits for it.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
