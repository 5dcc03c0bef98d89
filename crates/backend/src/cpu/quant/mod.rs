//! Quantised weights: their layout after load and the products over them. Knows the bytes of each
//! GGUF type and the instruction sets; does not know threads, tensors or ops: `cpu::linear` splits
//! the work and calls in here from many threads at once.
//!
//! Rule: each output element's summation order is a function of its weight row and activation row
//! only, never of `rows_t`, `rows_n` or T (batch invariance, bit for bit). `tile` states the order.

mod activations;
#[cfg(target_arch = "x86_64")]
mod activations_avx2;
#[cfg(target_arch = "x86_64")]
mod activations_avx512;
#[cfg(target_arch = "aarch64")]
mod activations_neon;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_float;
#[cfg(target_arch = "x86_64")]
mod avx2_panel;
#[cfg(target_arch = "x86_64")]
mod avx512vnni;
#[cfg(target_arch = "x86_64")]
mod avxvnni;
#[doc(hidden)]
pub mod bench_access;
mod layout;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "aarch64")]
mod neon_float;
#[cfg(target_arch = "aarch64")]
mod neon_panel;
mod scalar;
mod stored;
mod tile;

pub(crate) use activations::QuantizedActivations;

use super::isa::{Isa, Vectors};
use super::linear::OutMatrix;
use super::memory::{AlignedBytes, WeightMemory};
use super::pool::{SendPtr, ThreadPool};
use crate::{ActivationMode, BackendError, DType, WeightDesc};
use activations::{ActRows, TILE_ROWS};
use layout::{Layout, PANEL_ROWS, PanelShape, with_format};
use std::ops::Range;
use tile::{FloatKernel, FloatRows, IntKernel, Job};

/// One quantised weight `[N, C]`, packed in panels of 16 rows.
pub(crate) struct PackedWeight {
    dtype: DType,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    shape: PanelShape,
    isa: Isa,
    mode: ActivationMode,
    panels: AlignedBytes,
}

impl PackedWeight {
    /// An empty weight `[rows, cols]`, to be filled by [`Self::pack`]. `isa` must be available here.
    ///
    /// # Errors
    /// Float types, columns that are no whole number of blocks, no memory.
    pub(crate) fn new(
        memory: &WeightMemory,
        desc: &WeightDesc,
        isa: Isa,
        mode: ActivationMode,
    ) -> Result<Self, BackendError> {
        let WeightDesc { ref name, dtype, rows, cols } = *desc;
        let unsupported = |detail: String| BackendError::Unsupported {
            device: format!("cpu ({})", isa.name()),
            op: "linear",
            dtype,
            detail,
        };
        let layout = Layout::of(dtype).ok_or_else(|| unsupported(format!("{name}: not a quantised type")))?;
        if !isa.is_available() {
            return Err(unsupported(format!("{name}: this machine lacks the instruction set")));
        }
        let row_bytes = dtype.row_bytes(cols).filter(|&bytes| bytes > 0);
        let row_bytes =
            row_bytes.ok_or_else(|| unsupported(format!("{name}: {cols} columns are no whole number of blocks")))?;
        let shape = PanelShape::new(layout, cols);
        let sized = shape.and_then(|s| Some((s, s.bytes.checked_mul(rows.div_ceil(PANEL_ROWS))?)));
        let (shape, len) = sized.ok_or_else(|| unsupported(format!("{name}: [{rows}, {cols}] is too large")))?;
        Ok(Self { dtype, rows, cols, row_bytes, shape, isa, mode, panels: memory.take(len, name)? })
    }

    /// Packs the rows from `first_row` (a multiple of [`Self::row_tile`]) on, as they are in the file, on all
    /// threads. Once for each row; whole panels, but for the weight's last.
    ///
    /// # Errors
    /// Bytes of the wrong length.
    pub(crate) fn pack(&mut self, pool: &ThreadPool, first_row: usize, stored: &[u8]) -> Result<(), BackendError> {
        let (dtype, shape, panel_bytes) = (self.dtype, self.shape, PANEL_ROWS * self.row_bytes);
        let rows = stored.len() / self.row_bytes;
        let whole = stored.len().is_multiple_of(self.row_bytes) && first_row.is_multiple_of(PANEL_ROWS);
        let end = first_row.saturating_add(rows);
        if !whole || end > self.rows || !(end == self.rows || rows.is_multiple_of(PANEL_ROWS)) {
            return Err(BackendError::Shape {
                op: "load_weight",
                expected: format!("whole panels of {PANEL_ROWS} rows of {} bytes, below {}", self.row_bytes, self.rows),
                got: format!("{} bytes at row {first_row}", stored.len()),
            });
        }
        let panels = &mut self.panels.as_mut_slice()[first_row / PANEL_ROWS * shape.bytes..];
        let panels = &mut panels[..rows.div_ceil(PANEL_ROWS) * shape.bytes];
        let base = SendPtr(panels.as_mut_ptr());
        pool.run(panels.len() / shape.bytes.max(1), &|idx| {
            let stored = &stored[idx * panel_bytes..stored.len().min((idx + 1) * panel_bytes)];
            // SAFETY: panels of different chunks are disjoint and inside `panels`, which is borrowed until
            // all chunks are done.
            let panel = unsafe { std::slice::from_raw_parts_mut(base.get().add(idx * shape.bytes), shape.bytes) };
            with_format!(dtype, F => layout::pack_panel::<F>(shape, stored, panel), float => ());
        })
    }

    /// The exact values of one row, `out` `[C]`.
    pub(crate) fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols, "row {row} of [{}, {}]", self.rows, self.cols);
        let panel = &self.panels.as_slice()[row / PANEL_ROWS * self.shape.bytes..][..self.shape.bytes];
        with_format!(self.dtype, F => layout::dequantize_row::<F>(self.shape, panel, row % PANEL_ROWS, out), float => ());
    }

    /// Bytes held.
    pub(crate) fn len_bytes(&self) -> usize {
        self.panels.len()
    }

    /// Bytes of a row as it is stored.
    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Borders of `rows_n` in [`matmul_tile`] are multiples of this (the last range ends at N).
    pub(crate) fn row_tile(&self) -> usize {
        PANEL_ROWS
    }

    /// Whether [`matmul_tile`] reads the quantised activations (int8 mode) or the f32 rows.
    pub(crate) fn wants_quantized(&self) -> bool {
        self.mode == ActivationMode::Int8
    }
}

/// What a product reads: the rows as they are, and quantised when any weight of the op wants it.
#[derive(Clone, Copy)]
pub(crate) struct Activations<'a> {
    /// `[T, C]`.
    pub(crate) x: &'a [f32],
    /// Filled row by row (`quantize_row`) if `PackedWeight::wants_quantized`.
    pub(crate) quantized: &'a QuantizedActivations,
}

/// `out[t, n] = x[t] · weight[n]` for `t` in `rows_t`, `n` in `rows_n`.
///
/// Tiles of all of T and few of N read each weight once; many rows of N and few of T read each
/// activation once. No allocation: what is widened goes to memory of the thread.
///
/// # Safety
/// `out` is valid for rows `rows_t` and columns `rows_n`, and nobody else touches that tile now.
pub(crate) unsafe fn matmul_tile(
    weight: &PackedWeight,
    acts: Activations<'_>,
    rows_t: Range<usize>,
    rows_n: Range<usize>,
    out: OutMatrix,
) {
    if rows_t.is_empty() || rows_n.is_empty() {
        return;
    }
    assert!(rows_n.end <= weight.rows && rows_n.start.is_multiple_of(PANEL_ROWS), "tile {rows_n:?} of {}", weight.rows);
    assert!(rows_n.end == weight.rows || rows_n.end.is_multiple_of(PANEL_ROWS), "tile {rows_n:?} of {}", weight.rows);
    let job = Job {
        panels: weight.panels.as_ptr(),
        shape: weight.shape,
        num_t: rows_t.len(),
        first_n: rows_n.start,
        end_n: rows_n.end,
        // SAFETY: row `rows_t.start` is inside the tile that the caller vouched for.
        out: unsafe { out.at(rows_t.start, 0) },
        out_stride: out.row_stride(),
    };
    if weight.mode == ActivationMode::Int8 {
        let quantized = acts.quantized;
        assert!(
            rows_t.end <= quantized.rows() && quantized.blocks_per_row() == weight.shape.num_blocks,
            "activations were prepared for another shape"
        );
        let mut t = rows_t.start;
        while t < rows_t.end {
            // Kernels of many rows start at a tile's first; where a range does not, its head goes in small pieces.
            let in_tile = t % TILE_ROWS;
            let num_t = if in_tile == 0 { rows_t.end - t } else { (rows_t.end - t).min(TILE_ROWS - in_tile).min(8) };
            // SAFETY: shapes were checked above, `new` checked the instruction set, the caller vouched for `out`.
            unsafe { run_int(weight, &Job { num_t, out: out.at(t, 0), ..job }, quantized.rows_from(t)) };
            t += num_t;
        }
    } else {
        let x = &acts.x[rows_t.start * weight.cols..rows_t.end * weight.cols];
        let rows = FloatRows { ptr: x.as_ptr(), stride: weight.cols };
        // SAFETY: as above.
        unsafe { run_float(weight, &job, rows) };
    }
}

/// # Safety
/// As [`tile::run_int`], for `weight.isa`.
unsafe fn run_int(weight: &PackedWeight, job: &Job, acts: ActRows) {
    /// # Safety
    /// As [`tile::run_int`].
    #[allow(clippy::undocumented_unsafe_blocks)] // the comment is lost in the macro
    unsafe fn with<K: IntKernel>(dtype: DType, job: &Job, acts: ActRows) {
        with_format!(dtype, F => {
            // SAFETY: the caller's promise.
            unsafe { tile::run_int::<K, F>(job, acts) }
        }, float => ());
    }
    // SAFETY: the caller's promise.
    unsafe {
        match weight.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => with::<avx2::Avx2>(weight.dtype, job, acts),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => with::<avxvnni::AvxVnni>(weight.dtype, job, acts),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => with::<avx512vnni::Avx512Vnni>(weight.dtype, job, acts),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::Avx512Amx => with::<amx::Amx>(weight.dtype, job, acts),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => with::<neon::Neon>(weight.dtype, job, acts),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => with::<neon::NeonDot>(weight.dtype, job, acts),
            // The rest of the sets are another machine's: `new` refused them.
            _ => with::<scalar::Scalar>(weight.dtype, job, acts),
        }
    }
}

/// # Safety
/// As [`tile::run_float`], for `weight.isa`.
unsafe fn run_float(weight: &PackedWeight, job: &Job, x: FloatRows) {
    /// # Safety
    /// As [`tile::run_float`].
    #[allow(clippy::undocumented_unsafe_blocks)] // the comment is lost in the macro
    unsafe fn with<K: FloatKernel>(dtype: DType, job: &Job, x: FloatRows) {
        with_format!(dtype, F => {
            // SAFETY: the caller's promise.
            unsafe { tile::run_float::<K, F>(job, x) }
        }, float => ());
    }
    // SAFETY: the caller's promise.
    unsafe {
        match weight.isa.vectors() {
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => with::<avx2::Avx2>(weight.dtype, job, x),
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 => with::<avx512vnni::Avx512Vnni>(weight.dtype, job, x),
            #[cfg(target_arch = "aarch64")]
            Vectors::Neon => with::<neon::Neon>(weight.dtype, job, x),
            _ => with::<scalar::Scalar>(weight.dtype, job, x),
        }
    }
}
