//! Hidden states from a stage to the next one: NCCL's send and receive on streams of their own, so that a stage
//! computes on while what it has made waits for its receiver. The receiver waits on the host, first for the sender's
//! word that something is on its way: nothing spins on its GPU meanwhile, and what it waited is known.

use super::nccl::{Communicator, DataType, Range};
use super::verdict::{PATIENCE, Verdict};
use crate::device::Device;
use crate::memory::{CudaBuffer, Workspace};
use cudarc::driver::{result, sys};
use pagemill_backend::{BackendError, Tensor};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Hidden states that may wait for their receiver.
const DEPTH: usize = 2;
/// How long a waiting thread spins before it naps.
const SPIN_FOR: Duration = Duration::from_millis(3);
const NAP: Duration = Duration::from_micros(50);

/// The sender's end. Its peer is rank 1 of the communicator.
pub(crate) struct Outgoing {
    end: End,
    slots: Mutex<Slots>,
}

/// The receiver's end. Its peer is rank 0 of the communicator.
pub(crate) struct Incoming {
    end: End,
    /// Recorded behind the last receive.
    landed: Event,
    num_received: AtomicUsize,
}

struct End {
    device: Arc<Device>,
    stream: SideStream,
    communicator: Arc<Communicator>,
    /// What the sender has begun to send.
    num_sent: Arc<AtomicUsize>,
    verdict: Arc<Verdict>,
}

struct Slots {
    workspace: Arc<Workspace>,
    slots: Vec<Slot>,
    next: usize,
}

/// Where hidden states wait.
struct Slot {
    buffer: Option<CudaBuffer>,
    len: usize,
    /// Recorded on the ops' stream behind the copy into it.
    filled: Event,
    /// Recorded on the side stream behind the send.
    sent: Event,
}

/// A rank's device, and where its temporaries come from.
pub(crate) struct Place<'a> {
    pub(crate) device: &'a Arc<Device>,
    pub(crate) workspace: &'a Arc<Workspace>,
}

/// Connects two ranks of neighbouring stages, one way.
pub(crate) fn connect(
    from: &Place<'_>,
    to: &Place<'_>,
    verdict: &Arc<Verdict>,
) -> Result<(Outgoing, Incoming, Vec<Arc<Communicator>>), BackendError> {
    let devices = [Arc::clone(from.device), Arc::clone(to.device)];
    let communicators: Vec<_> = Communicator::connect(&devices)?.into_iter().map(Arc::new).collect();
    let num_sent = Arc::new(AtomicUsize::new(0));
    let end = |at: usize| {
        Ok::<_, BackendError>(End {
            device: Arc::clone(&devices[at]),
            stream: SideStream::new(&devices[at])?,
            communicator: Arc::clone(&communicators[at]),
            num_sent: Arc::clone(&num_sent),
            verdict: Arc::clone(verdict),
        })
    };
    let slot = || {
        let (filled, sent) = (Event::new(from.device)?, Event::new(from.device)?);
        Ok::<_, BackendError>(Slot { buffer: None, len: 0, filled, sent })
    };
    let slots = (0..DEPTH).map(|_| slot()).collect::<Result<_, _>>()?;
    let slots = Mutex::new(Slots { workspace: Arc::clone(from.workspace), slots, next: 0 });
    let incoming = Incoming { end: end(1)?, landed: Event::new(to.device)?, num_received: AtomicUsize::new(0) };
    Ok((Outgoing { end: end(0)?, slots }, incoming, communicators))
}

impl Outgoing {
    /// Sends hidden states at `address` (f32), when what is on the ops' stream is done. The place may then be
    /// written again by later ops. A rehearsal only takes the slots.
    pub(crate) fn send(&self, x: &Tensor, address: u64) -> Result<(), BackendError> {
        let (device, count) = (&self.end.device, x.rows() * x.cols());
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if device.is_rehearsing() {
            return slots.grow(count * 4);
        }
        let fault = |error| device.fault("sending hidden states", error);
        device.bind()?;
        let slot = slots.take(count * 4)?;
        let to = slot.buffer.as_ref().map_or(0, CudaBuffer::address);
        // SAFETY: the slot holds `count` floats, and is written only when its last send is done.
        unsafe {
            slot.sent.hold(device.stream()).map_err(fault)?;
            result::memcpy_dtod_async(to, address, count * 4, device.stream()).map_err(fault)?;
            slot.filled.record(device.stream()).map_err(fault)?;
            slot.filled.hold(self.end.stream.0).map_err(fault)?;
        }
        self.end.num_sent.fetch_add(1, Ordering::Release);
        let range = Range { address: to, count, data_type: DataType::F32 };
        // SAFETY: the slot is not written again before `sent`.
        unsafe {
            self.end.communicator.send(range, 1, self.end.stream.0.cast())?;
            slot.sent.record(self.end.stream.0).map_err(fault)
        }
    }
}

impl Slots {
    fn grow(&mut self, len: usize) -> Result<(), BackendError> {
        for slot in &mut self.slots {
            if slot.len < len {
                // The smaller one goes back first: ops may have it.
                slot.buffer = None;
                slot.buffer = Some(self.workspace.take(len)?);
                slot.len = len;
            }
        }
        Ok(())
    }

    fn take(&mut self, len: usize) -> Result<&mut Slot, BackendError> {
        self.grow(len)?;
        self.next = (self.next + 1) % DEPTH;
        Ok(&mut self.slots[self.next])
    }
}

impl Incoming {
    /// Receives hidden states into `address` (f32), whose earlier ops are on the ops' stream. Waits until they are
    /// there. A rehearsal receives nothing.
    pub(crate) fn recv(&self, out: &Tensor, address: u64) -> Result<(), BackendError> {
        const OP: &str = "recv";
        let device = &self.end.device;
        if device.is_rehearsing() {
            return Ok(());
        }
        let sent = self.num_received.fetch_add(1, Ordering::Relaxed);
        self.end.wait_until(OP, None, || Ok(self.end.num_sent.load(Ordering::Acquire) > sent))?;
        let fault = |error| device.fault("receiving hidden states", error);
        device.bind()?;
        let stream = self.end.stream.0;
        let range = Range { address, count: out.rows() * out.cols(), data_type: DataType::F32 };
        // SAFETY: the tensor is held mutably, and nothing on the ops' stream uses its place any more when `landed`
        // lets the receive begin.
        unsafe {
            self.landed.record(device.stream()).map_err(fault)?;
            self.landed.hold(stream).map_err(fault)?;
            self.end.communicator.recv(range, 0, stream.cast())?;
            self.landed.record(stream).map_err(fault)?;
        }
        self.end.wait_until(OP, Some(PATIENCE), || self.landed.is_done().map_err(fault))
    }
}

impl End {
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
                self.verdict.pass(&format!("hidden states have been on their way for {seconds} s: a GPU hangs"));
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
