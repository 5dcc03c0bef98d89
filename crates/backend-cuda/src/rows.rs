//! Row-wise ops: norms, additions, activations, conversions, gathering. Decides block and grid sizes; the
//! arithmetic is in `kernels/rows.cu`. Callers have checked shapes.

use crate::check::{Elem, Summand, View};
use crate::device::Device;
use crate::images::Kernels;
use crate::planes::PlanesView;
use cudarc::driver::sys::CUfunction;
use pagemill_backend::{Activation, BackendError, DType};
use std::sync::Arc;

/// Kernels by the element type of their input, in the order of `Elem::ALL`.
pub(crate) type ByElem = [Function; 2];

/// A handle that any thread may use.
#[derive(Clone, Copy)]
pub(crate) struct Function(pub(crate) CUfunction);

// SAFETY: the driver lets any thread launch a loaded function; see `Device`.
unsafe impl Send for Function {}
// SAFETY: as for Send.
unsafe impl Sync for Function {}

/// The kernel `name` for each element type: `{name}_f32`, `{name}_bf16`.
pub(crate) fn by_elem(kernels: &Kernels, name: &str) -> Result<ByElem, BackendError> {
    let [f32, bf16] = Elem::ALL.map(|elem| kernels.get(&format!("{name}_{}", elem.name())).map(Function));
    Ok([f32?, bf16?])
}

/// `NormArgs` in rows.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct NormArgs {
    x: u64,
    residual: u64,
    weight: u64,
    out: u64,
    cols: u32,
    eps: f32,
}

/// `NormPlanesArgs` in planes.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct NormPlanesArgs {
    planes: u64,
    residual: u64,
    weight: u64,
    out: u64,
    plane_stride: u64,
    num_planes: u32,
    cols: u32,
    eps: f32,
}

/// `ElementArgs` in rows.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct ElementArgs {
    x: u64,
    y: u64,
    out: u64,
    count: u64,
    factor: f32,
    cols: u32,
}

/// `GatherArgs` in rows.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct GatherArgs {
    x: u64,
    rows: u64,
    out: u64,
    row_bytes: u64,
}

/// What a norm works on: `[rows, cols]` each.
pub(crate) struct NormTask {
    /// Planes only with a residual, and where [`RowOps::norm_adds_planes`].
    pub(crate) x: Summand,
    /// f32; `x` is added to it first.
    pub(crate) residual: Option<u64>,
    /// f32 `[cols]`.
    pub(crate) weight: u64,
    pub(crate) out: View,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    pub(crate) eps: f32,
}

/// The row-wise kernels of one device.
pub(crate) struct RowOps {
    device: Arc<Device>,
    /// By input, then output.
    rms_norm: [ByElem; 2],
    /// By output.
    norm_planes: ByElem,
    add: ByElem,
    silu: ByElem,
    gelu: ByElem,
    scale: ByElem,
    soft_cap: ByElem,
    add_bias: ByElem,
    gather_rows: Function,
    f32_to_bf16: Function,
    f32_to_f16: Function,
    bf16_to_f32: Function,
    bf16_to_f16: Function,
}

/// Threads for rows of so many columns, four of them at a time: enough that each has a few, in whole warps.
pub(crate) fn norm_threads(cols: u32) -> u32 {
    (cols.div_ceil(4)).next_multiple_of(32).clamp(32, 512)
}

/// `PLANES_CLUSTER` in planes.cu: thread blocks of a row.
const PLANES_CLUSTER: u32 = 2;
/// `PLANES_ITEMS` in planes.cu: times four columns of a thread at most.
const PLANES_ITEMS: u32 = 2;

/// Threads of each thread block of a row whose norm adds planes up; `None` where rows are not even enough, or longer
/// than threads hold.
///
/// 256 of them find room beside a thread block of `linear_mid`, which has weights on their way meanwhile.
fn planes_threads(cols: u32) -> Option<u32> {
    let columns_of = |threads: u32| threads * 4 * PLANES_ITEMS * PLANES_CLUSTER;
    let most = if cols <= columns_of(256) { 256 } else { 512 };
    let threads = (cols / (4 * PLANES_CLUSTER)).next_multiple_of(32).clamp(32, most);
    (cols.is_multiple_of(4 * PLANES_CLUSTER) && cols <= columns_of(threads)).then_some(threads)
}

/// Blocks for so many elements, each thread eight of them; more than fill a device only stride on.
fn element_blocks(count: u64, num_multiprocessors: usize) -> u32 {
    let most = u64::try_from(num_multiprocessors).unwrap_or(1) * 16;
    u32::try_from(count.div_ceil(u64::from(ELEMENT_THREADS) * 8).clamp(1, most)).unwrap_or(1)
}

const ELEMENT_THREADS: u32 = 256;

impl RowOps {
    /// Looks the kernels up.
    pub(crate) fn new(device: &Arc<Device>, kernels: &Kernels) -> Result<Self, BackendError> {
        let function = |name: &str| kernels.get(name).map(Function);
        Ok(Self {
            device: Arc::clone(device),
            rms_norm: [by_elem(kernels, "rms_norm_f32")?, by_elem(kernels, "rms_norm_bf16")?],
            norm_planes: by_elem(kernels, "norm_planes")?,
            add: by_elem(kernels, "add")?,
            silu: by_elem(kernels, "silu")?,
            gelu: by_elem(kernels, "gelu")?,
            scale: by_elem(kernels, "scale")?,
            soft_cap: by_elem(kernels, "soft_cap")?,
            add_bias: by_elem(kernels, "add_bias")?,
            gather_rows: function("gather_rows")?,
            f32_to_bf16: function("convert_f32_bf16")?,
            f32_to_f16: function("convert_f32_f16")?,
            bf16_to_f32: function("convert_bf16_f32")?,
            bf16_to_f16: function("convert_bf16_f16")?,
        })
    }

    /// `out = rms_norm(x)`, or of `residual += x`.
    pub(crate) fn norm(&self, task: &NormTask) -> Result<(), BackendError> {
        let NormTask { x, residual, weight, out, rows, cols, eps } = *task;
        let x = match x {
            Summand::Elements(x) => x,
            Summand::Planes(planes) => return self.norm_of_planes(planes, task),
        };
        let args = NormArgs { x: x.address, residual: residual.unwrap_or(0), weight, out: out.address, cols, eps };
        let function = self.rms_norm[x.elem as usize][out.elem as usize];
        // SAFETY: the struct is the kernel's; the op checked that every tensor has `rows x cols` elements of
        // the type that picked the kernel, which reads nothing but weights before its wait.
        unsafe { self.device.launch_overlapped(function.0, (rows, 1), norm_threads(cols), 0, &args) }
    }

    /// Whether a norm of rows of so many columns adds planes up itself.
    pub(crate) fn norm_adds_planes(&self, cols: u32) -> bool {
        self.device.capability().0 == 9 && planes_threads(cols).is_some()
    }

    fn norm_of_planes(&self, planes: PlanesView, task: &NormTask) -> Result<(), BackendError> {
        let NormTask { residual, weight, out, rows, cols, eps, .. } = *task;
        let missing = || self.device.broken("planes for a norm that does not add them up");
        let (residual, threads) = residual.zip(planes_threads(cols)).ok_or_else(missing)?;
        let PlanesView { address, num_planes, count } = planes;
        let (out_at, plane_stride) = (out.address, count as u64);
        let args =
            NormPlanesArgs { planes: address, residual, weight, out: out_at, plane_stride, num_planes, cols, eps };
        let grid = (rows * PLANES_CLUSTER, 1);
        // SAFETY: the struct is the kernel's, whose clusters are a row each; the op checked that every tensor has
        // `rows x cols` elements, as each plane has, of the type that picked the kernel, which reads nothing but
        // weights before its wait.
        unsafe { self.device.launch_overlapped(self.norm_planes[out.elem as usize].0, grid, threads, 0, &args) }
    }

    fn elements(&self, function: Function, args: ElementArgs) -> Result<(), BackendError> {
        if args.count == 0 {
            return Ok(());
        }
        let blocks = element_blocks(args.count, self.device.num_multiprocessors());
        // SAFETY: the struct is the kernel's; the op checked that every operand has `count` elements of the type
        // that picked the kernel, which waits before it reads one.
        unsafe { self.device.launch_overlapped(function.0, (blocks, 1), ELEMENT_THREADS, 0, &args) }
    }

    /// `residual += x`; `residual` in f32.
    pub(crate) fn add(&self, residual: u64, x: View, count: usize) -> Result<(), BackendError> {
        let args = ElementArgs { x: x.address, y: residual, out: residual, count: count as u64, factor: 0.0, cols: 0 };
        self.elements(self.add[x.elem as usize], args)
    }

    /// `out = act(gate) * up`, all of one type.
    pub(crate) fn gated(
        &self,
        act: Activation,
        gate: View,
        up: View,
        out: View,
        count: usize,
    ) -> Result<(), BackendError> {
        let table = match act {
            Activation::Silu => &self.silu,
            Activation::GeluTanh => &self.gelu,
        };
        let args =
            ElementArgs { x: gate.address, y: up.address, out: out.address, count: count as u64, factor: 0.0, cols: 0 };
        self.elements(table[gate.elem as usize], args)
    }

    /// `x *= factor`.
    pub(crate) fn scale(&self, x: View, factor: f32, count: usize) -> Result<(), BackendError> {
        self.elements(self.scale[x.elem as usize], in_place(x, factor, count))
    }

    /// `x = cap * tanh(x / cap)`.
    pub(crate) fn soft_cap(&self, x: View, cap: f32, count: usize) -> Result<(), BackendError> {
        self.elements(self.soft_cap[x.elem as usize], in_place(x, cap, count))
    }

    /// `out[row] += bias`; `bias` in f32.
    pub(crate) fn add_bias(&self, bias: u64, out: View, rows: u32, cols: u32) -> Result<(), BackendError> {
        let args = ElementArgs { x: bias, y: 0, out: out.address, count: 0, factor: 0.0, cols };
        // SAFETY: the struct is the kernel's; the op checked `bias [cols]` and `out [rows, cols]`.
        unsafe { self.device.launch(self.add_bias[out.elem as usize].0, (rows, 1), ELEMENT_THREADS, 0, &args) }
    }

    /// Converts `count` elements to the float type `to` at `out`.
    ///
    /// # Errors
    /// There is no such conversion: a fault of this crate.
    pub(crate) fn convert(&self, x: View, to: DType, out: u64, count: usize) -> Result<(), BackendError> {
        let function = match (x.elem, to) {
            (Elem::F32, DType::BF16) => self.f32_to_bf16,
            (Elem::F32, DType::F16) => self.f32_to_f16,
            (Elem::Bf16, DType::F32) => self.bf16_to_f32,
            (Elem::Bf16, DType::F16) => self.bf16_to_f16,
            _ => return Err(self.device.broken(format!("no conversion from {} to {to}", x.elem.name()))),
        };
        let args = ElementArgs { x: x.address, y: 0, out, count: count as u64, factor: 0.0, cols: 0 };
        self.elements(function, args)
    }

    /// `out[i] = x[rows[i]]`; `rows` are on the device.
    pub(crate) fn gather(&self, x: View, rows: u64, num_rows: u32, cols: usize, out: View) -> Result<(), BackendError> {
        if num_rows == 0 {
            return Ok(());
        }
        let row_bytes = (cols * x.elem.dtype().block_bytes()) as u64;
        let args = GatherArgs { x: x.address, rows, out: out.address, row_bytes };
        // SAFETY: the struct is the kernel's; the op checked the row numbers and both shapes.
        unsafe { self.device.launch(self.gather_rows.0, (num_rows, 1), ELEMENT_THREADS, 0, &args) }
    }
}

fn in_place(x: View, factor: f32, count: usize) -> ElementArgs {
    ElementArgs { x: x.address, y: 0, out: x.address, count: count as u64, factor, cols: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_use_whole_warps() {
        for (cols, threads) in [(1, 32), (64, 32), (128, 32), (129, 64), (4096, 512), (100_000, 512)] {
            assert_eq!(norm_threads(cols), threads, "{cols}");
        }
    }

    #[test]
    fn a_row_of_planes_is_shared_evenly_by_its_thread_blocks() {
        for (cols, threads) in [(8, 32), (896, 128), (2048, 256), (4096, 256), (4104, 512), (8192, 512)] {
            assert_eq!(planes_threads(cols), Some(threads), "{cols}");
        }
        for cols in [4, 4092, 8200] {
            assert_eq!(planes_threads(cols), None, "{cols}");
        }
    }

    #[test]
    fn small_tensors_take_few_blocks() {
        assert_eq!(element_blocks(1, 132), 1);
        assert_eq!(element_blocks(4096, 132), 2);
        assert_eq!(element_blocks(1 << 40, 132), 132 * 16);
    }
}
