//! Whose buffer it is and what its elements are: this device's part of the checks in front of every op. The rest
//! is `pagemill_backend::check`.

use crate::memory::CudaBuffer;
use crate::planes::PlanesView;
use pagemill_backend::check::shape_error;
use pagemill_backend::{BackendError, DType, Tensor};

/// Element types of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Elem {
    F32,
    Bf16,
}

impl Elem {
    /// As tensors name it.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Elem::F32 => DType::F32,
            Elem::Bf16 => DType::BF16,
        }
    }

    /// In kernel names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Elem::F32 => "f32",
            Elem::Bf16 => "bf16",
        }
    }

    /// Both, in the order of kernel tables.
    pub(crate) const ALL: [Elem; 2] = [Elem::F32, Elem::Bf16];
}

/// A tensor's place on this device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    pub(crate) address: u64,
    pub(crate) elem: Elem,
}

/// What is read once to be added: elements, or planes that the reader adds up.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Summand {
    Elements(View),
    Planes(PlanesView),
}

/// Where the tensor's elements lie, if it is a tensor of this device. Ops write through views of tensors that
/// they hold mutably. Planes that are pending are added up first: whoever has a view finds elements there.
pub(crate) fn view(op: &'static str, x: &Tensor) -> Result<View, BackendError> {
    let (buffer, place) = placed(op, x)?;
    buffer.settle(place)?;
    Ok(place)
}

/// As [`view`], for an op that adds pending planes up itself. They stay pending.
pub(crate) fn summand(op: &'static str, x: &Tensor) -> Result<Summand, BackendError> {
    let (buffer, place) = placed(op, x)?;
    Ok(buffer.planes().map_or(Summand::Elements(place), Summand::Planes))
}

/// The tensor's buffer, and where elements are in it once none are pending.
fn placed<'a>(op: &'static str, x: &'a Tensor) -> Result<(&'a CudaBuffer, View), BackendError> {
    let elem = match x.dtype() {
        DType::F32 => Elem::F32,
        DType::BF16 => Elem::Bf16,
        other => return Err(shape_error(op, "an F32 or BF16 tensor", other.to_string())),
    };
    let buffer = x.buffer().as_any().downcast_ref::<CudaBuffer>().ok_or_else(|| foreign(op))?;
    Ok((buffer, View { address: buffer.address(), elem }))
}

/// The tensor's buffer, to be changed.
pub(crate) fn cuda_buffer_mut<'a>(op: &'static str, x: &'a mut Tensor) -> Result<&'a mut CudaBuffer, BackendError> {
    x.buffer_mut().as_any_mut().downcast_mut::<CudaBuffer>().ok_or_else(|| foreign(op))
}

fn foreign(op: &'static str) -> BackendError {
    shape_error(op, "a tensor of the cuda device", "a tensor of another device")
}

/// The same of an f32 tensor.
pub(crate) fn view_f32(op: &'static str, x: &Tensor) -> Result<u64, BackendError> {
    pagemill_backend::check::ensure_f32(op, x)?;
    Ok(view(op, x)?.address)
}

/// A count as kernels take it.
pub(crate) fn to_u32(op: &'static str, what: &str, count: usize) -> Result<u32, BackendError> {
    u32::try_from(count).map_err(|_| shape_error(op, format!("{what} that fit 32 bits"), count.to_string()))
}
