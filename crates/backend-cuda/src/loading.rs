//! Weights on their way to the device, and the buffer they lie in. Decides in which type a weight is kept: as
//! stored, or widened to f32 where everything is computed in f32.

use crate::device::Device;
use crate::memory::{DeviceMemory, checked_bytes};
use crate::staging::{PIECE_BYTES, PieceUploader};
use cudarc::driver::result;
use pagemill_backend::check::shape_error;
use pagemill_backend::{BackendError, DType, DeviceBuffer, ReadRows, Weight, WeightDesc};
use std::any::Any;
use std::sync::Arc;

/// A weight matrix, rows behind one another.
pub(crate) struct CudaWeight {
    memory: DeviceMemory,
    /// The type it is kept in.
    pub(crate) dtype: DType,
}

impl CudaWeight {
    /// A weight in memory that is filled.
    pub(crate) fn new(memory: DeviceMemory, dtype: DType) -> Self {
        Self { memory, dtype }
    }

    /// Where it lies.
    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }
}

impl DeviceBuffer for CudaWeight {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn len_bytes(&self) -> usize {
        self.memory.len()
    }
}

/// The weight's buffer, if it is one of this device.
pub(crate) fn cuda_weight<'a>(op: &'static str, weight: &'a Weight) -> Result<&'a CudaWeight, BackendError> {
    weight
        .buffer()
        .as_any()
        .downcast_ref()
        .ok_or_else(|| shape_error(op, "a weight of the cuda device", format!("{} of another device", weight.name())))
}

/// Reads a weight as it is stored, piece by piece.
pub(crate) fn upload_stored(
    device: &Arc<Device>,
    pieces: &mut PieceUploader,
    desc: &WeightDesc,
    read: &mut ReadRows<'_>,
) -> Result<DeviceMemory, BackendError> {
    let memory = take_stored(device, desc)?;
    let total = memory.len();
    let row_bytes = total / desc.rows.max(1);
    if row_bytes > PIECE_BYTES {
        return Err(BackendError::Unsupported {
            device: device.label(),
            op: "load_weight",
            dtype: desc.dtype,
            detail: format!("{}: a row of {row_bytes} bytes; at most {PIECE_BYTES}", desc.name),
        });
    }
    let rows_per_piece = (PIECE_BYTES / row_bytes.max(1)).max(1);
    for first in (0..desc.rows).step_by(rows_per_piece) {
        let rows = rows_per_piece.min(desc.rows - first);
        let address = memory.address() + (first * row_bytes) as u64;
        let mut fill = |bytes: &mut [u8]| {
            read(first, rows, bytes).map_err(|source| BackendError::WeightRead { name: desc.name.clone(), source })
        };
        // SAFETY: rows `first..first + rows` lie inside the range, which nobody else knows yet.
        unsafe { pieces.upload(address, rows * row_bytes, &mut fill) }?;
    }
    Ok(memory)
}

/// A weight whose bytes are `supply` over and over: it comes from the host once, and doubles on the device.
pub(crate) fn upload_repeated(
    device: &Arc<Device>,
    pieces: &mut PieceUploader,
    desc: &WeightDesc,
    supply: &[u8],
) -> Result<DeviceMemory, BackendError> {
    let memory = take_stored(device, desc)?;
    let (address, total) = (memory.address(), memory.len());
    let from_host = supply.len().min(total);
    for (at, piece) in supply[..from_host].chunks(PIECE_BYTES).enumerate() {
        let address = address + (at * PIECE_BYTES) as u64;
        let fill = |bytes: &mut [u8]| {
            bytes.copy_from_slice(piece);
            Ok(())
        };
        // SAFETY: the piece lies inside the first `from_host` bytes of the range, which nobody else knows yet.
        unsafe { pieces.upload(address, piece.len(), fill) }?;
    }
    // [0, filled) holds whole supplies, and is copied to [filled, filled + count).
    let mut filled = from_host;
    while filled > 0 && filled < total {
        let count = filled.min(total - filled);
        // SAFETY: both ranges lie inside the weight and do not overlap.
        unsafe { result::memcpy_dtod_async(address + filled as u64, address, count, device.stream()) }
            .map_err(|error| device.fault("repeating a weight", error))?;
        filled += count;
    }
    Ok(memory)
}

/// Memory for a weight in the type it is stored in.
fn take_stored(device: &Arc<Device>, desc: &WeightDesc) -> Result<DeviceMemory, BackendError> {
    let total = checked_bytes(&desc.name, desc.dtype, desc.rows, desc.cols)?;
    DeviceMemory::take(device, total, &desc.name)
}
