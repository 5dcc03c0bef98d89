//! Memory of the CPU device: aligned byte ranges, the buffer type behind every CPU tensor, and the
//! workspace that recycles temporaries. Knows nothing of shapes or ops.

use crate::{BackendError, DType, DeviceBuffer};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// Alignment of every range: one cache line, one AVX-512 register.
pub(crate) const ALIGNMENT: usize = 64;

/// Ranges from this size on come straight from the OS, zeroed lazily and on huge pages if it can.
#[cfg(unix)]
const MAP_THRESHOLD_BYTES: usize = 4 << 20;

/// Where a range came from, and so how it goes back.
enum Origin {
    Heap(std::alloc::Layout),
    #[cfg(unix)]
    Mapped {
        len: usize,
    },
    /// A piece of a larger range, which lives as long as any of its pieces.
    Part {
        _whole: Arc<AlignedBytes>,
    },
    Empty,
}

/// An owned byte range, 64-byte aligned and zeroed when made. Ranges of 4 MiB or more are anonymous
/// mappings with huge pages advised: their pages cost nothing until they are touched.
pub(crate) struct AlignedBytes {
    ptr: NonNull<u8>,
    len: usize,
    origin: Origin,
}

// SAFETY: the range is owned and reachable only through this value's borrows.
unsafe impl Send for AlignedBytes {}
// SAFETY: shared borrows only read.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `len` zeroed bytes for `what` (named in the error when the OS refuses).
    pub(crate) fn zeroed(len: usize, what: &str) -> Result<Self, BackendError> {
        if len == 0 {
            let ptr = NonNull::new(std::ptr::without_provenance_mut(ALIGNMENT)).unwrap_or(NonNull::dangling());
            return Ok(Self { ptr, len, origin: Origin::Empty });
        }
        let refused = || BackendError::OutOfMemory { device: "cpu".into(), what: what.to_owned(), bytes: len };
        #[cfg(unix)]
        if len >= MAP_THRESHOLD_BYTES {
            return Self::mapped(len).ok_or_else(refused);
        }
        let layout = std::alloc::Layout::from_size_align(len, ALIGNMENT).map_err(|_| refused())?;
        // SAFETY: `layout` has a non-zero size (`len > 0`).
        let ptr = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or_else(refused)?;
        Ok(Self { ptr, len, origin: Origin::Heap(layout) })
    }

    #[cfg(unix)]
    fn mapped(len: usize) -> Option<Self> {
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no
        // memory that anyone else owns.
        let ptr = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if ptr == libc::MAP_FAILED {
            return None;
        }
        #[cfg(target_os = "linux")]
        // SAFETY: the range was just mapped by us; the advice changes no contents. A refusal only
        // costs speed, so the result is not looked at.
        unsafe {
            libc::madvise(ptr, len, libc::MADV_HUGEPAGE);
        }
        Some(Self { ptr: NonNull::new(ptr.cast())?, len, origin: Origin::Mapped { len } })
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bytes.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `len` initialised bytes as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// The bytes.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` makes this the only borrow.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }

    /// The bytes as f32 (the length is rounded down to whole elements).
    pub(crate) fn as_f32(&self) -> &[f32] {
        // SAFETY: 64-byte aligned, and every bit pattern is a valid f32.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast(), self.len / 4) }
    }

    /// The bytes as f32 (the length is rounded down to whole elements).
    pub(crate) fn as_f32_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `as_f32`, and `&mut self` makes this the only borrow.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast(), self.len / 4) }
    }

    /// The first byte, for kernels.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// The first byte, for kernels.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        match self.origin {
            // The whole goes with its last part.
            Origin::Part { .. } | Origin::Empty => {}
            // SAFETY: allocated with this very layout in `zeroed`.
            Origin::Heap(layout) => unsafe { std::alloc::dealloc(self.ptr.as_ptr(), layout) },
            #[cfg(unix)]
            // SAFETY: mapped with this very length in `mapped`, and not unmapped before.
            Origin::Mapped { len } => unsafe {
                libc::munmap(self.ptr.as_ptr().cast(), len);
            },
        }
    }
}

/// Where weights lie: one behind the other, in the order they are loaded (that in which a step reads them),
/// in ranges on huge pages. On small pages of their own, a step over a small model's weights would miss the
/// TLB and restart the hardware's prefetch at every 4 KiB.
#[derive(Default)]
pub(crate) struct WeightMemory {
    current: Mutex<Option<WeightRange>>,
}

struct WeightRange {
    whole: Arc<AlignedBytes>,
    used: usize,
}

/// Address space taken at a time; weights of more than half have a range of their own.
const WEIGHT_RANGE_BYTES: usize = 32 << 20;

impl WeightMemory {
    /// `len` zeroed bytes for `what`.
    pub(crate) fn take(&self, len: usize, what: &str) -> Result<AlignedBytes, BackendError> {
        if len == 0 || len > WEIGHT_RANGE_BYTES / 2 {
            return AlignedBytes::zeroed(len, what);
        }
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let range = match current.take().filter(|range| range.whole.len() - range.used >= len) {
            Some(range) => range,
            None => WeightRange { whole: Arc::new(AlignedBytes::zeroed(WEIGHT_RANGE_BYTES, what)?), used: 0 },
        };
        // SAFETY: `used + len` is inside the range.
        let ptr = unsafe { range.whole.ptr.add(range.used) };
        let whole = Arc::clone(&range.whole);
        *current = Some(WeightRange { used: (range.used + len).next_multiple_of(ALIGNMENT), ..range });
        Ok(AlignedBytes { ptr, len, origin: Origin::Part { _whole: whole } })
    }
}

/// The buffer behind every CPU tensor. A temporary's bytes go back to the workspace on drop.
pub(crate) struct CpuBuffer {
    /// `None` only while dropping.
    bytes: Option<AlignedBytes>,
    home: Option<Arc<Workspace>>,
}

impl CpuBuffer {
    /// A buffer that frees its bytes on drop.
    pub(crate) fn owned(bytes: AlignedBytes) -> Self {
        Self { bytes: Some(bytes), home: None }
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> &AlignedBytes {
        static EMPTY: AlignedBytes = AlignedBytes { ptr: NonNull::dangling(), len: 0, origin: Origin::Empty };
        self.bytes.as_ref().unwrap_or(&EMPTY)
    }

    /// The bytes; `None` never happens outside drop.
    pub(crate) fn bytes_mut(&mut self) -> Option<&mut AlignedBytes> {
        self.bytes.as_mut()
    }
}

impl DeviceBuffer for CpuBuffer {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn len_bytes(&self) -> usize {
        self.bytes().len()
    }
}

impl Drop for CpuBuffer {
    fn drop(&mut self) {
        if let (Some(bytes), Some(home)) = (self.bytes.take(), self.home.take()) {
            home.give_back(bytes);
        }
    }
}

/// Recycles the bytes of temporaries: best fit among those given back, else a new range. In a steady
/// state nothing grows; `growths` counts every new range since start.
#[derive(Default)]
pub(crate) struct Workspace {
    state: Mutex<WorkspaceState>,
}

#[derive(Default)]
struct WorkspaceState {
    /// Sorted by length, ascending.
    free: Vec<AlignedBytes>,
    total_bytes: usize,
    growths: u64,
}

impl Workspace {
    /// A buffer of at least `len` bytes, contents undefined.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Result<CpuBuffer, BackendError> {
        // Whole pages, so that near-equal sizes fit one another.
        let len = len.max(1).next_multiple_of(4096);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let fit = state.free.partition_point(|bytes| bytes.len() < len);
        // No upper bound on the fit: if each temporary of a step is at most as large as it was in the
        // warm-up, then taking another's smaller range leaves that other a larger one, so that a
        // recycled range always fits and nothing grows.
        let bytes = if fit < state.free.len() {
            state.free.remove(fit)
        } else {
            let bytes = AlignedBytes::zeroed(len, "workspace")?;
            state.total_bytes += len;
            state.growths += 1;
            bytes
        };
        Ok(CpuBuffer { bytes: Some(bytes), home: Some(Arc::clone(self)) })
    }

    fn give_back(&self, bytes: AlignedBytes) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let at = state.free.partition_point(|held| held.len() < bytes.len());
        state.free.insert(at, bytes);
    }

    /// Bytes held (in use or free), and how often it had to grow.
    pub(crate) fn held(&self) -> (usize, u64) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.total_bytes, state.growths)
    }
}

/// Elements of a float pool or weight as raw bytes, sized with checked arithmetic.
pub(crate) fn checked_bytes(what: &str, dtype: DType, rows: usize, cols: usize) -> Result<usize, BackendError> {
    dtype.row_bytes(cols).and_then(|row| row.checked_mul(rows)).filter(|&n| isize::try_from(n).is_ok()).ok_or_else(
        || BackendError::Shape {
            op: "size",
            expected: format!("{what}: whole blocks of {dtype} and a size that fits in memory"),
            got: format!("{rows} x {cols}"),
        },
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn weights_lie_apart_aligned_and_zeroed() {
        let memory = WeightMemory::default();
        let lens = [0, 1, 64, 100, 16 << 20, 16 << 20, 20 << 20, 7];
        let mut parts: Vec<AlignedBytes> = lens.iter().map(|&len| memory.take(len, "test").unwrap()).collect();
        drop(memory);
        for (byte, (part, len)) in (1..).zip(parts.iter_mut().zip(lens)) {
            assert_eq!((part.len(), part.as_ptr().addr() % ALIGNMENT), (len, 0));
            assert!(part.as_slice().iter().all(|&b| b == 0));
            part.as_mut_slice().fill(byte);
        }
        for (byte, part) in (1..).zip(&parts) {
            assert!(part.as_slice().iter().all(|&b| b == byte));
        }
        parts.remove(2);
        assert!(parts[2].as_slice().iter().all(|&b| b == 4));
    }
}
