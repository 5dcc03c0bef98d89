//! Sums that are not added up yet. A product whose thread blocks share an output's columns of C leaves f32 planes, one
//! a share, and saves the pass that would add them up: who reads the tensor does it on the way (the norm behind a
//! residual, the addition to one), or has it done first (everybody else, through `check::view`). Decides how planes
//! become elements; knows no op.
//!
//! P planes, T rows, N columns. The sum is `((plane 0 + plane 1) + plane 2) + …` in f32; as elements it is rounded to
//! the tensor's type.

use crate::check::{Elem, View};
use crate::device::Device;
use crate::images::Kernels;
use crate::rows::{ByElem, by_elem};
use pagemill_backend::{BackendError, Tensor};
use std::sync::Arc;

/// `SumPlanesArgs` in planes.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct SumPlanesArgs {
    planes: u64,
    residual: u64,
    out: u64,
    count: u64,
    num_planes: u32,
}

/// `SUM_THREADS` in planes.cu.
const SUM_THREADS: u32 = 256;

/// Planes on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanesView {
    /// f32 `[P, T, N]`.
    pub(crate) address: u64,
    /// `P`; at least 1.
    pub(crate) num_planes: u32,
    /// `T * N`.
    pub(crate) count: usize,
}

/// The kernels that add planes up.
pub(crate) struct PlaneOps {
    device: Arc<Device>,
    /// By the sum's type.
    sum: ByElem,
}

impl PlaneOps {
    /// Looks the kernels up.
    pub(crate) fn new(device: &Arc<Device>, kernels: &Kernels) -> Result<Arc<Self>, BackendError> {
        Ok(Arc::new(Self { device: Arc::clone(device), sum: by_elem(kernels, "sum_planes")? }))
    }

    /// `out` becomes the sum.
    pub(crate) fn settle(&self, planes: PlanesView, out: View) -> Result<(), BackendError> {
        self.run(planes, 0, out)
    }

    /// `residual += sum`; f32.
    pub(crate) fn add(&self, planes: PlanesView, residual: u64) -> Result<(), BackendError> {
        self.run(planes, residual, View { address: residual, elem: Elem::F32 })
    }

    fn run(&self, planes: PlanesView, residual: u64, out: View) -> Result<(), BackendError> {
        let PlanesView { address, num_planes, count } = planes;
        let args = SumPlanesArgs { planes: address, residual, out: out.address, count: count as u64, num_planes };
        let blocks = count.div_ceil(4 * SUM_THREADS as usize);
        let blocks =
            u32::try_from(blocks).map_err(|_| self.device.broken("planes of more elements than a launch takes"))?;
        // SAFETY: the struct is the kernel's; planes hold `count` elements each and `out` as many of the type that
        // picked the kernel (`CudaBackend::hold_planes` checked both). It waits first and lets its successor begin
        // then.
        unsafe { self.device.launch_overlapped(self.sum[out.elem as usize].0, (blocks, 1), SUM_THREADS, 0, &args) }
    }
}

/// What a tensor holds instead of its elements.
pub(crate) struct Planes {
    /// Keeps the planes' memory.
    _memory: Tensor,
    view: PlanesView,
    ops: Arc<PlaneOps>,
}

impl Planes {
    /// Planes that `memory` holds at `view`.
    pub(crate) fn new(memory: Tensor, view: PlanesView, ops: &Arc<PlaneOps>) -> Self {
        Self { _memory: memory, view, ops: Arc::clone(ops) }
    }

    /// Where they lie.
    pub(crate) fn view(&self) -> PlanesView {
        self.view
    }

    /// `out` becomes the sum, and the memory goes back: the stream orders who takes it next behind the sum.
    pub(crate) fn settle(self, out: View) -> Result<(), BackendError> {
        self.ops.settle(self.view, out)
    }
}
