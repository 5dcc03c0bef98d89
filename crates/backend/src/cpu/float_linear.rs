//! Weights stored as F32, F16 or BF16 and their products. Bytes stay as in the file; a kernel widens
//! them to f32 in registers. Each output is one running sum in an order that depends only on C.

use super::isa::{Isa, Vectors};
use super::linear::OutMatrix;
use super::memory::AlignedBytes;
use super::reference;
use crate::DType;
use half::{bf16, f16};
use std::ops::Range;

/// One float weight `[N, C]`, row-major as stored.
pub(crate) struct FloatWeight {
    bytes: AlignedBytes,
    dtype: DType,
    cols: usize,
    isa: Isa,
}

impl FloatWeight {
    /// Row borders of tiles: the register block of the vector kernels.
    pub(crate) const ROW_TILE: usize = 4;

    /// Takes `bytes`, `rows * dtype.row_bytes(cols)` long.
    pub(crate) fn new(dtype: DType, cols: usize, bytes: AlignedBytes, isa: Isa) -> Self {
        debug_assert!(!dtype.is_quantized());
        Self { bytes, dtype, cols, isa }
    }

    /// Bytes held.
    pub(crate) fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Element type as stored.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The row's bytes.
    pub(crate) fn row(&self, row: usize) -> &[u8] {
        let row_bytes = self.cols * self.dtype.block_bytes();
        &self.bytes.as_slice()[row * row_bytes..(row + 1) * row_bytes]
    }

    /// The row's values, `out` `[C]`.
    pub(crate) fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        out.iter_mut().zip(self.values(row)).for_each(|(out, value)| *out = value);
    }

    fn values(&self, row: usize) -> Box<dyn Iterator<Item = f32> + '_> {
        let bytes = self.row(row);
        match self.dtype {
            DType::F16 => Box::new(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())),
            DType::BF16 => Box::new(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())),
            _ => Box::new(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        }
    }

    /// `out[t, n] = x[t] · weight[n]` over the tile; `x` `[T, C]`.
    ///
    /// # Safety
    /// The tile is inside `out` and nobody else touches it.
    pub(crate) unsafe fn matmul_tile(
        &self,
        x: &[f32],
        cols: usize,
        tokens: Range<usize>,
        rows: Range<usize>,
        out: OutMatrix,
    ) {
        debug_assert_eq!(cols, self.cols);
        // SAFETY: this function's contract, and the machine has the set (`CpuBackend::new`).
        unsafe {
            match self.isa.vectors() {
                #[cfg(target_arch = "x86_64")]
                Vectors::Avx512 => super::avx512_linear::matmul_tile(self, x, cols, tokens, rows, out),
                #[cfg(target_arch = "x86_64")]
                Vectors::Avx2 => super::avx2_linear::matmul_tile(self, x, cols, tokens, rows, out),
                #[cfg(target_arch = "aarch64")]
                Vectors::Neon => super::neon_linear::matmul_tile(self, x, cols, tokens, rows, out),
                _ => self.matmul_tile_scalar(x, cols, tokens, rows, out),
            }
        }
    }

    /// [`Self::matmul_tile`] in plain Rust.
    ///
    /// # Safety
    /// As there.
    unsafe fn matmul_tile_scalar(
        &self,
        x: &[f32],
        cols: usize,
        tokens: Range<usize>,
        rows: Range<usize>,
        out: OutMatrix,
    ) {
        for row in rows {
            for token in tokens.clone() {
                let dot = reference::dot(&x[token * cols..(token + 1) * cols], self.values(row));
                // SAFETY: this function's contract.
                unsafe { *out.at(token, row) = dot };
            }
        }
    }
}
