//! The way between host and device: a ring of pinned memory for the small uploads of a step, pieces with several
//! copies in flight for weights, and one buffer for what comes back. Decides when the host waits.

use crate::device::Device;
use crate::images::Kernels;
use crate::memory::{DeviceMemory, PinnedMemory};
use crate::rows::Function;
use cudarc::driver::{result, sys};
use pagemill_backend::BackendError;
use std::sync::Arc;

/// The ring's size at first; one upload that is larger makes it grow.
const RING_BYTES: usize = 8 << 20;

/// Uploads up to so many bytes are brought by a kernel that reads the host's memory: the copy engines would take 5 us
/// between two kernels.
const BROUGHT_BYTES: usize = 256 << 10;
const BRING_THREADS: u32 = 256;
/// Bytes of the packs that `bring_words` copies.
const PACK_BYTES: usize = 16;

/// `BringArgs` in step.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct BringArgs {
    from: u64,
    to: u64,
    num_packs: u32,
}

/// Pinned memory handed out round and round. Before it is handed out again the stream is waited for, once in hundreds
/// of steps.
pub(crate) struct UploadRing {
    device: Arc<Device>,
    bring_words: Function,
    pinned: PinnedMemory,
    used: usize,
}

impl UploadRing {
    /// Pins the ring.
    pub(crate) fn new(device: &Arc<Device>, kernels: &Kernels) -> Result<Self, BackendError> {
        let pinned = PinnedMemory::take(device, RING_BYTES, "uploads")?;
        Ok(Self { device: Arc::clone(device), bring_words: Function(kernels.get("bring_words")?), pinned, used: 0 })
    }

    /// Copies `parts`, one behind the other, to `address` on the stream; returns at once.
    ///
    /// # Safety
    /// At `address` is device memory that nobody but this stream uses, as many bytes as the parts have and up to the
    /// next multiple of 16.
    pub(crate) unsafe fn upload(&mut self, parts: &[&[u32]], address: u64) -> Result<(), BackendError> {
        let (from, len) = self.fill(parts)?;
        if len == 0 {
            return Ok(());
        }
        if len > BROUGHT_BYTES {
            let piece = &self.pinned.bytes_mut()[from..from + len];
            // SAFETY: the piece is not handed out again before the stream was waited for; the rest is the caller's.
            return unsafe { result::memcpy_htod_async(address, piece, self.device.stream()) }
                .map_err(|error| self.device.fault("copying to the device", error));
        }
        let num_packs = u32::try_from(len.div_ceil(PACK_BYTES)).unwrap_or(0);
        let args = BringArgs { from: self.pinned.word_address(from / 4), to: address, num_packs };
        let grid = (num_packs.div_ceil(BRING_THREADS), 1);
        // SAFETY: the struct is the kernel's, which writes behind its wait only; pieces are whole packs, and are not
        // handed out again before the stream was waited for. The rest is this function's contract.
        unsafe { self.device.launch_overlapped(self.bring_words.0, grid, BRING_THREADS, 0, &args) }
    }

    /// Leaves `parts` where kernels of the stream may read them: where the first one lies.
    pub(crate) fn stage(&mut self, parts: &[&[u32]]) -> Result<u64, BackendError> {
        let (from, _) = self.fill(parts)?;
        Ok(self.pinned.word_address(from / 4))
    }

    /// Hands out a piece with `parts` in it: where it begins in the ring, and their bytes.
    fn fill(&mut self, parts: &[&[u32]]) -> Result<(usize, usize), BackendError> {
        let len = parts.iter().map(|part| part.len() * 4).sum::<usize>();
        let piece_len = len.next_multiple_of(PACK_BYTES);
        self.device.bind()?;
        if self.used + piece_len > self.pinned.len() {
            self.device.synchronize()?;
            self.used = 0;
            if piece_len > self.pinned.len() {
                self.pinned = PinnedMemory::take(&self.device, piece_len.next_power_of_two(), "uploads")?;
            }
        }
        let from = self.used;
        let mut rest = &mut self.pinned.bytes_mut()[from..from + len];
        for part in parts {
            let (bytes, behind) = rest.split_at_mut(part.len() * 4);
            // Part by part, so that it becomes a copy of memory.
            for (bytes, word) in bytes.chunks_exact_mut(4).zip(*part) {
                bytes.copy_from_slice(&word.to_ne_bytes());
            }
            rest = behind;
        }
        self.used += piece_len;
        Ok((from, len))
    }
}

/// Bytes of one piece of a weight on its way.
pub(crate) const PIECE_BYTES: usize = 16 << 20;
const PIECES: usize = 4;

/// Pinned pieces for weights: while one is filled from the file, the others are being copied.
pub(crate) struct PieceUploader {
    device: Arc<Device>,
    pieces: Vec<Piece>,
    next: usize,
    /// Made at the first weight that is repacked.
    landing: Option<DeviceMemory>,
}

struct Piece {
    pinned: PinnedMemory,
    /// Recorded behind the piece's last copy.
    copied: sys::CUevent,
}

// SAFETY: an event is a handle that any thread may use; see `Device`.
unsafe impl Send for PieceUploader {}

impl PieceUploader {
    /// Pins the pieces.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, BackendError> {
        let mut pieces = Vec::with_capacity(PIECES);
        for _ in 0..PIECES {
            let pinned = PinnedMemory::take(device, PIECE_BYTES, "weights on their way")?;
            let copied = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
                .map_err(|error| device.fault("creating an event", error))?;
            pieces.push(Piece { pinned, copied });
        }
        Ok(Self { device: Arc::clone(device), pieces, next: 0, landing: None })
    }

    /// Device memory for one piece on its way into another layout. Uses of it follow each other on the stream.
    pub(crate) fn landing(&mut self) -> Result<u64, BackendError> {
        if let Some(landing) = &self.landing {
            return Ok(landing.address());
        }
        let landing = DeviceMemory::take(&self.device, PIECE_BYTES, "weights on their way")?;
        Ok(self.landing.insert(landing).address())
    }

    /// Has `fill` fill `len ≤ PIECE_BYTES` bytes and copies them to `address`; returns when they are on their way.
    ///
    /// # Safety
    /// `len` bytes at `address` are device memory that nobody but this stream uses.
    pub(crate) unsafe fn upload(
        &mut self,
        address: u64,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let piece = &mut self.pieces[self.next];
        self.next = (self.next + 1) % PIECES;
        self.device.bind()?;
        // SAFETY: the event lives as long as the piece. One that was never recorded is done.
        unsafe { result::event::synchronize(piece.copied) }
            .map_err(|error| self.device.fault("waiting for a copy", error))?;
        let bytes = &mut piece.pinned.bytes_mut()[..len];
        fill(bytes)?;
        let stream = self.device.stream();
        // SAFETY: the piece is not filled again before its event; the rest is the caller's.
        unsafe { result::memcpy_htod_async(address, bytes, stream) }
            .and_then(|()| unsafe { result::event::record(piece.copied, stream) })
            .map_err(|error| self.device.fault("copying a weight to the device", error))
    }
}

impl Drop for PieceUploader {
    fn drop(&mut self) {
        let bound = self.device.bind().is_ok();
        for piece in &self.pieces {
            if bound {
                // SAFETY: made in `new`, destroyed once; the driver keeps it until its copy is done.
                let _ = unsafe { result::event::destroy(piece.copied) };
            }
        }
    }
}

/// Pinned memory for results; grows to the largest one.
pub(crate) struct Readback {
    device: Arc<Device>,
    pinned: Option<PinnedMemory>,
}

impl Readback {
    /// Empty.
    pub(crate) fn new(device: &Arc<Device>) -> Self {
        Self { device: Arc::clone(device), pinned: None }
    }

    /// `count` words from `address`, as floats. Waits for the device.
    ///
    /// # Safety
    /// `count` words at `address` are device memory that this stream has written.
    pub(crate) unsafe fn read(&mut self, address: u64, count: usize) -> Result<&mut [f32], BackendError> {
        let len = count * 4;
        if self.pinned.as_ref().is_none_or(|pinned| pinned.len() < len) {
            self.pinned = Some(PinnedMemory::take(&self.device, len.next_multiple_of(1 << 16), "results")?);
        }
        let Some(pinned) = self.pinned.as_mut() else {
            return Err(self.device.broken("no memory for results"));
        };
        let floats = pinned.floats_mut(count);
        self.device.bind()?;
        // SAFETY: the buffer is waited for below before anyone reads it; the rest is the caller's.
        unsafe { result::memcpy_dtoh_async(floats, address, self.device.stream()) }
            .map_err(|error| self.device.fault("copying from the device", error))?;
        self.device.synchronize()?;
        Ok(floats)
    }
}
