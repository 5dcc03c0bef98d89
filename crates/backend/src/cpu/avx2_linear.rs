//! Products with float weights for AVX2: register blocks of 4 weight rows × up to 3 tokens.
//!
//! Each output has one register of eight partial sums over columns `8i + lane`, whatever the block it
//! is computed in; the last `C % 8` columns are loaded with zeros behind them. So its bits depend on C
//! only.

use super::avx2::{LANES, sum_lanes};
use super::float_linear::FloatWeight;
use super::linear::OutMatrix;
use crate::DType;
use std::arch::x86_64::*;
use std::ops::Range;

/// Tokens whose x rows stay in the second-level cache while the tile's weight rows pass over them.
const TOKENS_PER_PASS: usize = 48;

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// `out[t, n] = x[t] · weight[n]` over the tile.
///
/// # Safety
/// The machine has AVX2, FMA and F16C; the tile is inside `x`, `weight` and `out`, and nobody else
/// touches it.
pub(crate) unsafe fn matmul_tile(
    weight: &FloatWeight,
    x: &[f32],
    cols: usize,
    tokens: Range<usize>,
    rows: Range<usize>,
    out: OutMatrix,
) {
    // SAFETY: this function's contract.
    unsafe {
        match weight.dtype() {
            DType::F16 => tile::<F16>(weight, x, cols, tokens, rows, out),
            DType::BF16 => tile::<BF16>(weight, x, cols, tokens, rows, out),
            _ => tile::<F32>(weight, x, cols, tokens, rows, out),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const KIND: u8>(
    weight: &FloatWeight,
    x: &[f32],
    cols: usize,
    tokens: Range<usize>,
    rows: Range<usize>,
    out: OutMatrix,
) {
    let mut first = tokens.start;
    while first < tokens.end {
        let end = (first + TOKENS_PER_PASS).min(tokens.end);
        let mut row = rows.start;
        while row < rows.end {
            let num_rows = (rows.end - row).min(4);
            // A missing row is the last one again; its result is not stored.
            let w: [*const u8; 4] = std::array::from_fn(|i| weight.row(row + i.min(num_rows - 1)).as_ptr());
            let mut token = first;
            while token < end {
                let x = x[token * cols..].as_ptr();
                let block = Block { x, w, cols, token, row, num_rows, out };
                // SAFETY: rows and tokens of the block are inside the tile.
                unsafe {
                    match end - token {
                        1 => block.run::<KIND, 1>(),
                        2 => block.run::<KIND, 2>(),
                        _ => block.run::<KIND, 3>(),
                    }
                }
                token += 3;
            }
            row += 4;
        }
        first = end;
    }
}

/// One register block.
struct Block {
    x: *const f32,
    w: [*const u8; 4],
    cols: usize,
    token: usize,
    row: usize,
    num_rows: usize,
    out: OutMatrix,
}

impl Block {
    /// # Safety
    /// `T` rows of x and `num_rows` weight rows of `cols` elements are valid, as is their output.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run<const KIND: u8, const T: usize>(&self) {
        let mut sums = [[_mm256_setzero_ps(); T]; 4];
        let whole = self.cols - self.cols % LANES;
        let mut col = 0;
        while col < whole {
            // SAFETY: `col + LANES <= cols`.
            unsafe {
                let x: [__m256; T] = std::array::from_fn(|t| _mm256_loadu_ps(self.x.add(t * self.cols + col)));
                for (w, sums) in self.w.iter().zip(&mut sums) {
                    let w = widen::<KIND>(*w, col);
                    for (sum, x) in sums.iter_mut().zip(&x) {
                        *sum = _mm256_fmadd_ps(w, *x, *sum);
                    }
                }
            }
            col += LANES;
        }
        if whole < self.cols {
            // SAFETY: only the `cols - whole` elements that exist are read.
            unsafe {
                let x: [__m256; T] =
                    std::array::from_fn(|t| rest::<F32>(self.x.add(t * self.cols).cast(), whole, self.cols));
                for (w, sums) in self.w.iter().zip(&mut sums) {
                    let w = rest::<KIND>(*w, whole, self.cols);
                    for (sum, x) in sums.iter_mut().zip(&x) {
                        *sum = _mm256_fmadd_ps(w, *x, *sum);
                    }
                }
            }
        }
        for (i, sums) in sums.iter().enumerate().take(self.num_rows) {
            for (t, sum) in sums.iter().enumerate() {
                // SAFETY: inside the tile, by contract.
                unsafe { *self.out.at(self.token + t, self.row + i) = sum_lanes(*sum) };
            }
        }
    }
}

/// Eight elements from `col` as f32.
///
/// # Safety
/// They exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen<const KIND: u8>(row: *const u8, col: usize) -> __m256 {
    // SAFETY: by contract.
    unsafe {
        match KIND {
            F16 => _mm256_cvtph_ps(_mm_loadu_si128(row.add(col * 2).cast())),
            BF16 => {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(row.add(col * 2).cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            }
            _ => _mm256_loadu_ps(row.cast::<f32>().add(col)),
        }
    }
}

/// The elements `col..cols` (fewer than eight) as f32, zeros behind.
///
/// # Safety
/// They exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rest<const KIND: u8>(row: *const u8, col: usize, cols: usize) -> __m256 {
    let elem_bytes = if KIND == F32 { 4 } else { 2 };
    let mut padded = [0_u8; 4 * LANES];
    // SAFETY: by contract, and at most 28 bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(row.add(col * elem_bytes), padded.as_mut_ptr(), (cols - col) * elem_bytes);
        widen::<KIND>(padded.as_ptr(), 0)
    }
}
