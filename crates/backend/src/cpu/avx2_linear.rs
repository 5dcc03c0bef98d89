//! Products with float weights for AVX2: register blocks of 4 weight rows × up to 3 tokens.
//!
//! Each output has one register of eight partial sums over columns `8i + lane`, whatever the block it
//! is computed in; the last `C % 8` columns are loaded with zeros behind them. So its bits depend on C
//! only.

use super::avx2::{LANES, sum_lanes};
use super::float_linear::{BF16, Block, BlockKernel, F16, F32};
use std::arch::x86_64::*;

/// AVX2, FMA and F16C.
pub(crate) struct Avx2;

impl BlockKernel for Avx2 {
    const TOKENS_PER_PASS: usize = 48;

    unsafe fn run<const KIND: u8>(block: &Block, num_tokens: usize) -> usize {
        // SAFETY: as promised to this method.
        unsafe {
            match num_tokens {
                1 => Self::block::<KIND, 1>(block),
                2 => Self::block::<KIND, 2>(block),
                _ => Self::block::<KIND, 3>(block),
            }
        }
    }
}

impl Avx2 {
    /// Computes the block's first `T` tokens, which is also what it returns.
    ///
    /// # Safety
    /// `T` rows of x and `num_rows` weight rows of `cols` elements are valid, as is their output.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn block<const KIND: u8, const T: usize>(block: &Block) -> usize {
        let mut sums = [[_mm256_setzero_ps(); T]; 4];
        let whole = block.cols - block.cols % LANES;
        let mut col = 0;
        while col < whole {
            // SAFETY: `col + LANES <= cols`.
            unsafe {
                let x: [__m256; T] = std::array::from_fn(|t| _mm256_loadu_ps(block.x.add(t * block.cols + col)));
                for (w, sums) in block.w.iter().zip(&mut sums) {
                    let w = widen::<KIND>(*w, col);
                    for (sum, x) in sums.iter_mut().zip(&x) {
                        *sum = _mm256_fmadd_ps(w, *x, *sum);
                    }
                }
            }
            col += LANES;
        }
        if whole < block.cols {
            // SAFETY: only the `cols - whole` elements that exist are read.
            unsafe {
                let x: [__m256; T] =
                    std::array::from_fn(|t| rest::<F32>(block.x.add(t * block.cols).cast(), whole, block.cols));
                for (w, sums) in block.w.iter().zip(&mut sums) {
                    let w = rest::<KIND>(*w, whole, block.cols);
                    for (sum, x) in sums.iter_mut().zip(&x) {
                        *sum = _mm256_fmadd_ps(w, *x, *sum);
                    }
                }
            }
        }
        for (i, sums) in sums.iter().enumerate().take(block.num_rows) {
            for (t, sum) in sums.iter().enumerate() {
                // SAFETY: inside the tile, by contract.
                unsafe { *block.out.at(block.token + t, block.row + i) = sum_lanes(*sum) };
            }
        }
        T
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
