//! A door to the quantised kernels for this crate's integration tests and measurements. Not an API:
//! everything else goes through `CpuBackend`.

use super::{Activations, PackedWeight, QuantizedActivations, matmul_tile};
use crate::cpu::linear::OutMatrix;
use crate::cpu::memory::WeightMemory;
use crate::cpu::pool::ThreadPool;
use crate::{ActivationMode, BackendError, DType, WeightDesc};
use std::ops::Range;

pub use crate::cpu::isa::Isa;

/// A packed weight.
pub struct Matrix(PackedWeight);

/// Rows of activations, quantised if a mode wants it.
pub struct Rows<'a> {
    x: &'a [f32],
    quantized: QuantizedActivations,
}

impl<'a> Rows<'a> {
    /// Quantises `x` `[rows, cols]`.
    ///
    /// # Errors
    /// Columns that are no whole number of blocks.
    pub fn new(x: &'a [f32], rows: usize, cols: usize) -> Result<Self, BackendError> {
        assert_eq!(x.len(), rows * cols);
        let mut quantized = QuantizedActivations::default();
        quantized.prepare(rows, cols)?;
        let rows = Self { x, quantized };
        rows.quantize_again();
        Ok(rows)
    }

    /// Quantises the same rows once more (to be timed).
    pub fn quantize_again(&self) {
        let cols = self.x.len() / self.quantized.rows();
        for (t, x) in self.x.chunks_exact(cols).enumerate() {
            // SAFETY: nothing else has this value's blocks, and `&self` of a type that is not Sync here
            // is used by one thread.
            unsafe { self.quantized.quantize_row(t, x) };
        }
    }
}

impl Matrix {
    /// Packs `stored`.
    ///
    /// # Errors
    /// As `PackedWeight::new` and `PackedWeight::pack`.
    pub fn new(
        dtype: DType,
        rows: usize,
        cols: usize,
        stored: &[u8],
        isa: Isa,
        mode: ActivationMode,
    ) -> Result<Self, BackendError> {
        let desc = WeightDesc { name: "test".into(), dtype, rows, cols };
        let mut weight = PackedWeight::new(&WeightMemory::default(), &desc, isa, mode)?;
        weight.pack(&ThreadPool::new(1)?, 0, stored)?;
        Ok(Self(weight))
    }

    /// Bytes held.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.0.len_bytes()
    }

    /// Exact values of a row.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        self.0.dequantize_row(row, out);
    }

    /// One tile of `out` `[T, out_cols]`.
    ///
    /// # Panics
    /// When the tile is outside `out`.
    pub fn multiply(&self, rows: &Rows<'_>, t: Range<usize>, n: Range<usize>, out: &mut [f32], out_cols: usize) {
        assert!(n.end <= out_cols && t.end * out_cols <= out.len());
        let acts = Activations { x: rows.x, quantized: &rows.quantized };
        // SAFETY: the tile was checked, and `out` is borrowed exclusively.
        unsafe { matmul_tile(&self.0, acts, t, n, OutMatrix::new(out, out_cols)) };
    }
}
