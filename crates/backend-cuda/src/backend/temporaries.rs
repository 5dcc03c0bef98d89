//! Tensors that live for an op or a step, and floats on their way to the device.

use super::CudaBackend;
use crate::check::{Elem, view};
use crate::memory::{CudaBuffer, DeviceMemory, checked_bytes};
use cudarc::driver::result;
use pagemill_backend::{BackendError, DType, Tensor};

impl CudaBackend {
    pub(super) fn temporary(&self, rows: usize, cols: usize, elem: Elem) -> Result<Tensor, BackendError> {
        let dtype = elem.dtype();
        let buffer = self.workspace.take(checked_bytes("temporary", dtype, rows, cols)?)?;
        Ok(Tensor::from_buffer(rows, cols, dtype, Box::new(buffer)))
    }

    /// `x` in f32: itself, or a converted copy.
    pub(super) fn in_f32(&self, op: &'static str, x: &Tensor) -> Result<(u64, Option<CudaBuffer>), BackendError> {
        let place = view(op, x)?;
        if place.elem == Elem::F32 {
            return Ok((place.address, None));
        }
        let count = x.rows() * x.cols();
        let wide = self.workspace.take(count * 4)?;
        self.rows.convert(place, DType::F32, wide.address(), count)?;
        Ok((wide.address(), Some(wide)))
    }

    /// Uploads small floats to a range of their own.
    pub(super) fn upload_floats(&self, name: &str, data: &[f32]) -> Result<DeviceMemory, BackendError> {
        let memory = DeviceMemory::take(&self.device, data.len() * 4, name)?;
        self.write_floats(data, memory.address())?;
        Ok(memory)
    }

    /// Copies floats of the host to `address`. Waits for the device: the copy lies on the ops' own stream, as one
    /// on the default stream may still be under way when a kernel starts.
    pub(super) fn write_floats(&self, data: &[f32], address: u64) -> Result<(), BackendError> {
        self.device.bind()?;
        // SAFETY: the callers' ranges hold `data.len()` floats, and `data` outlives the copy: it is waited for.
        unsafe { result::memcpy_htod_async(address, data, self.device.stream()) }
            .map_err(|error| self.device.fault("copying to the device", error))?;
        self.device.synchronize()
    }
}
