//! Whose buffer it is: the CPU device's part of the checks in front of every op. The rest is
//! [`crate::check`]. Kernels behind these may index without asking again.

use super::memory::CpuBuffer;
pub(crate) use crate::check::{
    ensure, ensure_attention, ensure_f32, ensure_rope, ensure_shape, ensure_slots, shape_error,
};
use crate::{BackendError, DeviceBuffer, Tensor};

/// The tensor's elements, if it is an f32 tensor of the CPU device: for collectives that move them
/// elsewhere. Free.
///
/// # Errors
/// A tensor of another device or type; names `op`.
pub fn elements<'a>(op: &'static str, x: &'a Tensor) -> Result<&'a [f32], BackendError> {
    let buffer = cpu_buffer(op, x.buffer())?;
    ensure_f32(op, x)?;
    Ok(&buffer.bytes().as_f32()[..x.rows() * x.cols()])
}

/// As [`elements`], to be written.
///
/// # Errors
/// As [`elements`].
pub fn elements_mut<'a>(op: &'static str, x: &'a mut Tensor) -> Result<&'a mut [f32], BackendError> {
    ensure_f32(op, x)?;
    let len = x.rows() * x.cols();
    let buffer = x.buffer_mut().as_any_mut().downcast_mut::<CpuBuffer>().and_then(CpuBuffer::bytes_mut);
    match buffer {
        Some(bytes) => Ok(&mut bytes.as_f32_mut()[..len]),
        None => Err(foreign(op)),
    }
}

/// The buffer, if it is one of this device.
pub(crate) fn cpu_buffer<'a>(op: &'static str, buffer: &'a dyn DeviceBuffer) -> Result<&'a CpuBuffer, BackendError> {
    buffer.as_any().downcast_ref::<CpuBuffer>().ok_or_else(|| foreign(op))
}

fn foreign(op: &'static str) -> BackendError {
    shape_error(op, "a buffer of the cpu device", "a buffer of another device")
}
