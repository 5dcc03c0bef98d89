//! Weights stored as F32, F16 or BF16 and their products. Bytes stay as in the file; a kernel widens
//! them to f32 in registers. Each output is one running sum in an order that depends only on C.

use super::isa::{Isa, Vectors};
use super::linear::OutMatrix;
use super::memory::AlignedBytes;
use super::reference;
use crate::DType;
use half::{bf16, f16};
use std::ops::Range;

/// Kinds of elements, as types tell kernels apart.
pub(crate) const F32: u8 = 0;
pub(crate) const F16: u8 = 1;
pub(crate) const BF16: u8 = 2;

/// One register block: weight rows and tokens whose products are made together.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
pub(crate) struct Block {
    /// The first token's x `[C]`; the others' follow.
    pub(crate) x: *const f32,
    /// Weight rows.
    pub(crate) w: [*const u8; FloatWeight::ROW_TILE],
    pub(crate) cols: usize,
    /// The first token.
    pub(crate) token: usize,
    /// The first weight row.
    pub(crate) row: usize,
    /// Weight rows whose results are wanted.
    pub(crate) num_rows: usize,
    pub(crate) out: OutMatrix,
}

/// Register blocks of one instruction set.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
pub(crate) trait BlockKernel {
    /// Tokens whose x rows stay in the second-level cache while the tile's weight rows pass over them.
    const TOKENS_PER_PASS: usize;

    /// Computes the first of a block's `num_tokens` tokens, as many as the registers hold; returns how many.
    ///
    /// # Safety
    /// The machine has the set; `num_tokens` rows of x and the weight rows hold `cols` elements of kind `KIND`, and
    /// nobody else touches their output.
    unsafe fn run<const KIND: u8>(block: &Block, num_tokens: usize) -> usize;
}

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
                Vectors::Avx512 => self.tile_in_blocks::<super::avx512_linear::Avx512>(x, cols, tokens, rows, out),
                #[cfg(target_arch = "x86_64")]
                Vectors::Avx2 => self.tile_in_blocks::<super::avx2_linear::Avx2>(x, cols, tokens, rows, out),
                #[cfg(target_arch = "aarch64")]
                Vectors::Neon => self.tile_in_blocks::<super::neon_linear::Neon>(x, cols, tokens, rows, out),
                _ => self.matmul_tile_scalar(x, cols, tokens, rows, out),
            }
        }
    }

    /// [`Self::matmul_tile`] in register blocks.
    ///
    /// # Safety
    /// As there; the machine has `K`'s instruction set.
    #[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
    unsafe fn tile_in_blocks<K: BlockKernel>(
        &self,
        x: &[f32],
        cols: usize,
        tokens: Range<usize>,
        rows: Range<usize>,
        out: OutMatrix,
    ) {
        let run = match self.dtype {
            DType::F16 => K::run::<F16>,
            DType::BF16 => K::run::<BF16>,
            _ => K::run::<F32>,
        };
        for first in tokens.clone().step_by(K::TOKENS_PER_PASS) {
            let end = (first + K::TOKENS_PER_PASS).min(tokens.end);
            for row in rows.clone().step_by(Self::ROW_TILE) {
                let num_rows = (rows.end - row).min(Self::ROW_TILE);
                // A missing row is the last one again; its result is not stored.
                let w = std::array::from_fn(|i| self.row(row + i.min(num_rows - 1)).as_ptr());
                let mut token = first;
                while token < end {
                    let block = Block { x: x[token * cols..].as_ptr(), w, cols, token, row, num_rows, out };
                    // SAFETY: rows and tokens of the block are inside the tile.
                    token += unsafe { run(&block, end - token) };
                }
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
