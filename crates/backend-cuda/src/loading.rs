//! Weights on their way to the device, and the buffer they lie in. Decides in which form a weight is kept: as stored,
//! repacked for the tensor cores, or widened to f32 where everything is computed in f32.

use crate::device::Device;
use crate::kernels::linear_quant::{QuantFormat, TILE_ROWS, tile_launch};
use crate::linear::packed::{PackedKernels, StoredRows};
use crate::memory::{DeviceMemory, checked_bytes};
use crate::staging::{PIECE_BYTES, PieceUploader};
use cudarc::driver::result;
use pagemill_backend::check::shape_error;
use pagemill_backend::{BackendError, DType, DeviceBuffer, ReadRows, Weight, WeightDesc};
use std::any::Any;
use std::sync::Arc;

/// A weight matrix.
pub(crate) struct CudaWeight {
    memory: DeviceMemory,
    /// The type of its numbers.
    pub(crate) dtype: DType,
    /// `None`: rows of `dtype` behind one another. Else tiles of this format.
    pub(crate) packed: Option<QuantFormat>,
}

impl CudaWeight {
    /// A weight in memory that is filled, row behind row.
    pub(crate) fn new(memory: DeviceMemory, dtype: DType) -> Self {
        Self { memory, dtype, packed: None }
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

/// Reads a weight: with `packed` into the layout of those kernels if there is one for it, else as it is stored.
pub(crate) fn upload(
    device: &Arc<Device>,
    pieces: &mut PieceUploader,
    packed: Option<&PackedKernels>,
    desc: &WeightDesc,
    read: &mut ReadRows<'_>,
) -> Result<CudaWeight, BackendError> {
    match packed.zip(packing(desc)) {
        Some((kernels, format)) => upload_packed(kernels, device, pieces, desc, format, read),
        None => upload_stored(device, pieces, desc, read),
    }
}

/// The format that a weight is repacked to; `None`: it stays as it is stored. A tile's rows must come in one piece.
fn packing(desc: &WeightDesc) -> Option<QuantFormat> {
    let format = QuantFormat::of(desc.dtype)?;
    let row_bytes = desc.dtype.row_bytes(desc.cols)?;
    let tile_rows_bytes = row_bytes.checked_mul(TILE_ROWS)?;
    let fits = tile_rows_bytes <= PIECE_BYTES && tile_launch(desc.rows, desc.cols).is_some();
    (fits && format.matrix_bytes(desc.rows, desc.cols)? > 0).then_some(format)
}

/// Fills a piece with rows `first..first + rows`.
fn fill<'a>(
    desc: &'a WeightDesc,
    read: &'a mut ReadRows<'_>,
    first: usize,
    rows: usize,
) -> impl FnOnce(&mut [u8]) -> Result<(), BackendError> + 'a {
    move |bytes| read(first, rows, bytes).map_err(|source| BackendError::WeightRead { name: desc.name.clone(), source })
}

/// Reads a weight as it is stored, piece by piece.
fn upload_stored(
    device: &Arc<Device>,
    pieces: &mut PieceUploader,
    desc: &WeightDesc,
    read: &mut ReadRows<'_>,
) -> Result<CudaWeight, BackendError> {
    let total = checked_bytes(&desc.name, desc.dtype, desc.rows, desc.cols)?;
    let memory = DeviceMemory::take(device, total, &desc.name)?;
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
        // SAFETY: rows `first..first + rows` lie inside the range, which nobody else knows yet.
        unsafe { pieces.upload(address, rows * row_bytes, fill(desc, read, first, rows)) }?;
    }
    Ok(CudaWeight::new(memory, desc.dtype))
}

/// Reads a weight piece by piece, each of which is repacked on the device behind its copy: beside the weight itself,
/// one piece of device memory is all that this takes.
fn upload_packed(
    kernels: &PackedKernels,
    device: &Arc<Device>,
    pieces: &mut PieceUploader,
    desc: &WeightDesc,
    format: QuantFormat,
    read: &mut ReadRows<'_>,
) -> Result<CudaWeight, BackendError> {
    let stored_bytes = checked_bytes(&desc.name, desc.dtype, desc.rows, desc.cols)?;
    let too_large = || shape_error("load_weight", "a size that fits in memory", desc.name.clone());
    let total = format.matrix_bytes(desc.rows, desc.cols).ok_or_else(too_large)?;
    let memory = DeviceMemory::take(device, total, &desc.name)?;
    let row_bytes = stored_bytes / desc.rows.max(1);
    let rows_per_piece = rows_per_packed_piece(row_bytes);
    for first in (0..desc.rows).step_by(rows_per_piece) {
        let rows = rows_per_piece.min(desc.rows - first);
        let landing = pieces.landing()?;
        // SAFETY: a piece's rows fit the landing, which the stream orders: the last piece was repacked before.
        unsafe { pieces.upload(landing, rows * row_bytes, fill(desc, read, first, rows)) }?;
        let stored = StoredRows { address: landing, row_bytes, rows, cols: desc.cols };
        let tiles = memory.address() + format.matrix_bytes(first, desc.cols).ok_or_else(too_large)? as u64;
        // SAFETY: the tiles of rows `first..first + rows` lie inside the range, which nobody else knows yet.
        unsafe { kernels.repack(format, stored, tiles) }?;
    }
    Ok(CudaWeight { memory, dtype: desc.dtype, packed: Some(format) })
}

/// Rows of a piece that is repacked: whole tiles of them, at least one.
fn rows_per_packed_piece(row_bytes: usize) -> usize {
    (PIECE_BYTES / row_bytes.max(1) / TILE_ROWS).max(1) * TILE_ROWS
}

/// A weight whose bytes are `supply` over and over: it comes from the host once, and doubles on the device.
pub(crate) fn upload_repeated(
    device: &Arc<Device>,
    pieces: &mut PieceUploader,
    desc: &WeightDesc,
    supply: &[u8],
) -> Result<CudaWeight, BackendError> {
    let total = checked_bytes(&desc.name, desc.dtype, desc.rows, desc.cols)?;
    let memory = DeviceMemory::take(device, total, &desc.name)?;
    let address = memory.address();
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
    Ok(CudaWeight::new(memory, desc.dtype))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packing_of(dtype: DType, rows: usize, cols: usize) -> Option<QuantFormat> {
        packing(&WeightDesc { name: "w".into(), dtype, rows, cols })
    }

    #[test]
    fn quantised_weights_are_repacked_where_there_is_a_layout() {
        assert_eq!(packing_of(DType::Q4_0, 1, 32), Some(QuantFormat::Q4_0));
        assert_eq!(packing_of(DType::Q4_K, 128_256, 4096), Some(QuantFormat::Q4K));
        assert_eq!(packing_of(DType::Q6_K, 151_936, 896 * 2), Some(QuantFormat::Q6K));
        assert_eq!(packing_of(DType::Q5_0, 16, 32), None);
        assert_eq!(packing_of(DType::BF16, 16, 32), None);
        assert_eq!(packing_of(DType::Q8_0, 0, 32), None);
    }

    #[test]
    fn a_tiles_rows_come_in_one_piece() {
        let widest = PIECE_BYTES / TILE_ROWS / 34 * 32; // 34 bytes are 32 elements of Q8_0
        assert_eq!(packing_of(DType::Q8_0, 16, widest), Some(QuantFormat::Q8_0));
        assert_eq!(packing_of(DType::Q8_0, 16, widest + 32), None);
        assert_eq!(rows_per_packed_piece(widest / 32 * 34), TILE_ROWS);
    }

    #[test]
    fn pieces_are_whole_tiles() {
        for row_bytes in [18, 34 * 18, 2304, 8064, 1 << 20] {
            let rows = rows_per_packed_piece(row_bytes);
            assert!(rows.is_multiple_of(TILE_ROWS) && rows * row_bytes <= PIECE_BYTES, "{row_bytes}");
            assert!((rows + TILE_ROWS) * row_bytes > PIECE_BYTES, "{row_bytes}: no larger ones fit");
        }
    }
}
