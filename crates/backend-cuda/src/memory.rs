//! Device memory: ranges, the buffer type behind every tensor here, the workspace that recycles temporaries, and
//! pinned host memory. Knows nothing of shapes or ops.

use crate::check::View;
use crate::device::Device;
use crate::planes::{Planes, PlanesView};
use cudarc::driver::{result, sys};
use pagemill_backend::{BackendError, DType, DeviceBuffer, Tensor};
use std::any::Any;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError};

/// An owned range of device memory, 256-byte aligned.
pub(crate) struct DeviceMemory {
    device: Arc<Device>,
    address: u64,
    len: usize,
}

impl DeviceMemory {
    /// `len` bytes for `what` (named in the error when there are not so many), contents undefined.
    pub(crate) fn take(device: &Arc<Device>, len: usize, what: &str) -> Result<Self, BackendError> {
        device.bind()?;
        // SAFETY: allocates only; freed in `drop`.
        let address = unsafe { result::malloc_sync(len.max(1)) }.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                BackendError::OutOfMemory { device: device.label(), what: what.to_owned(), bytes: len }
            }
            _ => device.fault("allocating memory", error),
        })?;
        Ok(Self { device: Arc::clone(device), address, len })
    }

    /// The same, zeroed on the device's stream.
    pub(crate) fn zeroed(device: &Arc<Device>, len: usize, what: &str) -> Result<Self, BackendError> {
        let memory = Self::take(device, len, what)?;
        // SAFETY: the whole range and no more.
        unsafe { result::memset_d8_async(memory.address, 0, len, device.stream()) }
            .map_err(|error| device.fault("zeroing memory", error))?;
        Ok(memory)
    }

    /// Where it lies.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if !self.device.keeps(self.address) && self.device.bind().is_ok() {
            // SAFETY: allocated in `take`, freed once; the driver waits for kernels that still use it. A refusal
            // means that the context is gone, and the memory with it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// The buffer behind every tensor of this device. A temporary's range goes back to the workspace on drop. Its contents
/// may be pending: they are the sum of planes then, and get here when somebody asks for them.
pub(crate) struct CudaBuffer {
    /// `None` only while dropping.
    memory: Option<Arc<DeviceMemory>>,
    home: Option<Arc<Workspace>>,
    pending: Mutex<Option<Planes>>,
    /// What is only kept as long as the buffer.
    kept: Option<Tensor>,
}

impl CudaBuffer {
    /// A buffer over memory that others may hold too.
    pub(crate) fn over(memory: Arc<DeviceMemory>) -> Self {
        Self::of(memory, None)
    }

    fn of(memory: Arc<DeviceMemory>, home: Option<Arc<Workspace>>) -> Self {
        Self { memory: Some(memory), home, pending: Mutex::default(), kept: None }
    }

    /// Where it lies, whether its contents are there or not; 0 never happens outside drop. Tensors are asked through
    /// `check::view`.
    pub(crate) fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.address())
    }

    /// Its contents are the sum of `planes` from now on.
    pub(crate) fn hold(&mut self, planes: Planes) {
        *self.pending.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(planes);
    }

    /// Keeps `memory` as long as itself.
    pub(crate) fn keep(&mut self, memory: Tensor) {
        self.kept = Some(memory);
    }

    /// The planes whose sum its contents are, while that is pending.
    pub(crate) fn planes(&self) -> Option<PlanesView> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(Planes::view)
    }

    /// Adds pending planes up into `place`, which is this buffer's.
    pub(crate) fn settle(&self, place: View) -> Result<(), BackendError> {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner).take();
        pending.map_or(Ok(()), |planes| planes.settle(place))
    }
}

impl DeviceBuffer for CudaBuffer {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn len_bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.len())
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        if let (Some(memory), Some(home)) = (self.memory.take(), self.home.take()) {
            home.give_back(memory);
        }
    }
}

/// Recycles the ranges of temporaries: best fit among those given back, else a new range. All ops run on one
/// stream, so a range may be given to the next op before the last one has run. Ranges are never freed: recorded
/// forwards keep their addresses.
pub(crate) struct Workspace {
    device: Arc<Device>,
    state: Mutex<WorkspaceState>,
}

#[derive(Default)]
struct WorkspaceState {
    /// Sorted by length, then address: the same calls get the same ranges, whatever was given back first.
    free: Vec<Arc<DeviceMemory>>,
    total_bytes: usize,
    growths: u64,
}

impl Workspace {
    /// An empty workspace.
    pub(crate) fn new(device: &Arc<Device>) -> Arc<Self> {
        Arc::new(Self { device: Arc::clone(device), state: Mutex::default() })
    }

    /// A buffer of at least `len` bytes, contents undefined.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Result<CudaBuffer, BackendError> {
        // Near-equal sizes fit one another.
        let len = len.max(1).next_multiple_of(4096);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let fit = state.free.partition_point(|memory| memory.len() < len);
        // No upper bound on the fit: see the CPU's workspace, which has the same rule.
        let memory = if fit < state.free.len() {
            state.free.remove(fit)
        } else {
            let memory = Arc::new(DeviceMemory::take(&self.device, len, "workspace")?);
            state.total_bytes += len;
            state.growths += 1;
            memory
        };
        Ok(CudaBuffer::of(memory, Some(Arc::clone(self))))
    }

    fn give_back(&self, memory: Arc<DeviceMemory>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let key = |memory: &DeviceMemory| (memory.len(), memory.address());
        let at = state.free.partition_point(|held| key(held) < key(&memory));
        state.free.insert(at, memory);
    }

    /// Bytes held (in use or free), and how often it had to grow.
    pub(crate) fn held(&self) -> (usize, u64) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.total_bytes, state.growths)
    }
}

/// Host memory that the device reads and writes directly.
pub(crate) struct PinnedMemory {
    device: Arc<Device>,
    ptr: *mut u8,
    len: usize,
}

// SAFETY: the range is owned and reachable only through this value's borrows.
unsafe impl Send for PinnedMemory {}
// SAFETY: shared borrows only read.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// `len` zeroed bytes.
    pub(crate) fn take(device: &Arc<Device>, len: usize, what: &str) -> Result<Self, BackendError> {
        device.bind()?;
        // SAFETY: allocates only; freed in `drop`.
        let ptr = unsafe { result::malloc_host(len.max(1), 0) }
            .map_err(|error| device.fault(&format!("pinning {len} bytes of host memory for {what}"), error))?;
        let ptr = ptr.cast::<u8>();
        // SAFETY: just allocated with at least `len` bytes.
        unsafe { ptr.write_bytes(0, len) };
        Ok(Self { device: Arc::clone(device), ptr, len })
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bytes. The caller knows that no copy uses them now.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: initialised in `take`, valid as long as `self` lives, and `&mut self` makes this the only
        // borrow.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }

    /// Word `at`, which kernels write and read while the host does.
    pub(crate) fn word(&self, at: usize) -> &AtomicU32 {
        assert!((at + 1) * 4 <= self.len, "more words than were pinned");
        // SAFETY: aligned and inside the range by the line above, initialised in `take`, valid as long as `self`; all
        // accesses of a range used so go through here or through kernels.
        unsafe { AtomicU32::from_ptr(self.ptr.cast::<u32>().add(at)) }
    }

    /// Where kernels of any device find word `at`: host addresses are theirs too.
    pub(crate) fn word_address(&self, at: usize) -> u64 {
        self.ptr as u64 + at as u64 * 4
    }

    /// The first `count` floats. Page aligned, and every bit pattern is a float.
    pub(crate) fn floats_mut(&mut self, count: usize) -> &mut [f32] {
        assert!(count * 4 <= self.len, "more floats than were pinned");
        // SAFETY: page aligned by the driver, inside the range by the line above.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), count) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // Copies that still use it must end first.
        if self.device.synchronize().is_ok() {
            // SAFETY: allocated in `take`, freed once, no copy in flight.
            let _ = unsafe { result::free_host(self.ptr.cast()) };
        }
    }
}

/// Bytes of `rows x cols` elements, with checked arithmetic.
pub(crate) fn checked_bytes(what: &str, dtype: DType, rows: usize, cols: usize) -> Result<usize, BackendError> {
    dtype.row_bytes(cols).and_then(|row| row.checked_mul(rows)).filter(|&n| isize::try_from(n).is_ok()).ok_or_else(
        || BackendError::Shape {
            op: "size",
            expected: format!("{what}: whole blocks of {dtype} and a size that fits in memory"),
            got: format!("{rows} x {cols}"),
        },
    )
}
