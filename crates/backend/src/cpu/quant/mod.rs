//! Quantised weights: their layout after load and the products over them. Knows the bytes of each
//! GGUF type and the instruction sets; does not know threads, tensors or ops: `cpu::linear` splits
//! the work and calls in here from many threads at once.
//!
//! Rule: each output element's summation order is a function of its weight row and activation row
//! only, never of `rows_t`, `rows_n` or T (batch invariance, bit for bit). `tile` states the order.

mod activations;
#[cfg(target_arch = "x86_64")]
mod activations_avx2;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512vnni;
#[doc(hidden)]
pub mod bench_access;
mod layout;
mod scalar;
mod stored;
mod tile;

pub(crate) use activations::QuantizedActivations;

use super::isa::Isa;
use super::linear::OutMatrix;
use super::memory::AlignedBytes;
use crate::{ActivationMode, BackendError, DType};
use layout::{Layout, PANEL_ROWS, PanelShape, with_format};
use std::ops::Range;
use tile::{ActRows, FloatKernel, FloatRows, IntKernel, Job};

/// One quantised weight `[N, C]`, packed in panels of 16 rows.
pub(crate) struct PackedWeight {
    dtype: DType,
    rows: usize,
    cols: usize,
    shape: PanelShape,
    isa: Isa,
    mode: ActivationMode,
    panels: AlignedBytes,
}

impl PackedWeight {
    /// Packs `stored` (rows of `dtype.row_bytes(cols)`, as in the file). `isa` must be available here.
    ///
    /// # Errors
    /// Float types, columns that are no whole number of blocks, bytes of the wrong length, no memory.
    pub(crate) fn new(
        name: &str,
        dtype: DType,
        rows: usize,
        cols: usize,
        stored: AlignedBytes,
        isa: Isa,
        mode: ActivationMode,
    ) -> Result<Self, BackendError> {
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
        if row_bytes.checked_mul(rows) != Some(stored.len()) {
            return Err(BackendError::Shape {
                op: "load_weight",
                expected: format!("{name}: {rows} rows of {row_bytes} bytes"),
                got: format!("{} bytes", stored.len()),
            });
        }
        let shape = PanelShape::new(layout, cols);
        let sized = shape.and_then(|s| Some((s, s.bytes.checked_mul(rows.div_ceil(PANEL_ROWS))?)));
        let (shape, len) = sized.ok_or_else(|| unsupported(format!("{name}: [{rows}, {cols}] is too large")))?;
        let mut panels = AlignedBytes::zeroed(len, name)?;
        let stored_rows: Vec<&[u8]> = stored.as_slice().chunks_exact(row_bytes).collect();
        for (rows, panel) in stored_rows.chunks(PANEL_ROWS).zip(panels.as_mut_slice().chunks_exact_mut(shape.bytes)) {
            layout::pack_panel(dtype, layout, shape, rows, panel);
        }
        Ok(Self { dtype, rows, cols, shape, isa, mode, panels })
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
    /// Filled by `quantize_rows` if `PackedWeight::wants_quantized`.
    pub(crate) quantized: &'a QuantizedActivations,
}

/// `out[t, n] = x[t] · weight[n]` for `t` in `rows_t`, `n` in `rows_n`.
///
/// Tiles of all of T and few of N read each weight once; many rows of N and few of T read each
/// activation once. No allocation; about 40 KiB of stack.
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
        let rows = quantized.rows_from(rows_t.start);
        // SAFETY: shapes were checked above, `new` checked the instruction set, the caller vouched for `out`.
        unsafe { run_int(weight, &job, rows) };
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
            Isa::Scalar => with::<scalar::Scalar>(weight.dtype, job, acts),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => with::<avx2::Avx2>(weight.dtype, job, acts),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::Avx512Amx => with::<amx::Amx>(weight.dtype, job, acts),
            #[cfg(target_arch = "x86_64")]
            _ => with::<avx512vnni::Avx512Vnni>(weight.dtype, job, acts),
            #[cfg(not(target_arch = "x86_64"))]
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
        match weight.isa {
            Isa::Scalar => with::<scalar::Scalar>(weight.dtype, job, x),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => with::<avx2::Avx2>(weight.dtype, job, x),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::Avx512Amx => with::<avx512vnni::Avx512Vnni>(weight.dtype, job, x),
            #[cfg(target_arch = "x86_64")]
            _ => with::<avx512vnni::Avx512Vnni>(weight.dtype, job, x),
            #[cfg(not(target_arch = "x86_64"))]
            _ => with::<scalar::Scalar>(weight.dtype, job, x),
        }
    }
}
