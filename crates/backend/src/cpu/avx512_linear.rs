//! Products with float weights for AVX-512: register blocks of 4 weight rows × up to 6 tokens.
//!
//! Each output has one register of sixteen partial sums over columns `16i + lane`, whatever the block
//! it is computed in; columns past the last count as zeros. So its bits depend on C only.

use super::float_linear::FloatWeight;
use super::linear::OutMatrix;
use crate::DType;
use std::arch::x86_64::*;
use std::ops::Range;

/// Lanes of a register.
const LANES: usize = 16;
/// Tokens whose x rows stay in the second-level cache while the tile's weight rows pass over them.
const TOKENS_PER_PASS: usize = 96;

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// `out[t, n] = x[t] · weight[n]` over the tile.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL; the tile is inside `x`, `weight` and `out`, and nobody else
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

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn tile<const KIND: u8>(
    weight: &FloatWeight,
    x: &[f32],
    cols: usize,
    tokens: Range<usize>,
    rows: Range<usize>,
    out: OutMatrix,
) {
    for first in tokens.clone().step_by(TOKENS_PER_PASS) {
        let end = (first + TOKENS_PER_PASS).min(tokens.end);
        for row in rows.clone().step_by(4) {
            let num_rows = (rows.end - row).min(4);
            // A missing row is the last one again; its result is not stored.
            let w: [*const u8; 4] = std::array::from_fn(|i| weight.row(row + i.min(num_rows - 1)).as_ptr());
            let mut token = first;
            while token < end {
                let x = x[token * cols..].as_ptr();
                let block = Block { x, w, cols, token, row, num_rows, out };
                // SAFETY: rows and tokens of the block are inside the tile.
                token += unsafe {
                    match end - token {
                        1 => block.run::<KIND, 1>(),
                        2 => block.run::<KIND, 2>(),
                        3 => block.run::<KIND, 3>(),
                        4 | 5 => block.run::<KIND, 4>(),
                        _ => block.run::<KIND, 6>(),
                    }
                };
            }
        }
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
    /// Computes the block's first `T` tokens, which is also what it returns.
    ///
    /// # Safety
    /// `T` rows of x and `num_rows` weight rows of `cols` elements are valid, as is their output.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn run<const KIND: u8, const T: usize>(&self) -> usize {
        let mut sums = [[_mm512_setzero_ps(); T]; 4];
        let whole = self.cols - self.cols % LANES;
        // SAFETY: only lanes below `cols` are read; outputs are inside the tile, by contract.
        unsafe {
            for col in (0..whole).step_by(LANES) {
                self.step::<KIND, T>(col, !0, &mut sums);
            }
            if whole < self.cols {
                self.step::<KIND, T>(whole, !(!0 << (self.cols - whole)), &mut sums);
            }
            for (i, sums) in sums.iter().enumerate().take(self.num_rows) {
                for (t, sum) in sums.iter().enumerate() {
                    *self.out.at(self.token + t, self.row + i) = _mm512_reduce_add_ps(*sum);
                }
            }
        }
        T
    }

    /// Adds the products of the columns from `col` whose bits are set in `lanes`.
    ///
    /// # Safety
    /// As for `run`; those columns exist.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn step<const KIND: u8, const T: usize>(&self, col: usize, lanes: __mmask16, sums: &mut [[__m512; T]; 4]) {
        // SAFETY: by contract.
        unsafe {
            let x: [__m512; T] = std::array::from_fn(|t| widen::<F32>(self.x.add(t * self.cols).cast(), col, lanes));
            for (w, sums) in self.w.iter().zip(sums) {
                let w = widen::<KIND>(*w, col, lanes);
                for (sum, x) in sums.iter_mut().zip(&x) {
                    *sum = _mm512_fmadd_ps(w, *x, *sum);
                }
            }
        }
    }
}

/// The elements from `col` whose bits are set in `lanes` as f32, zeros elsewhere.
///
/// # Safety
/// They exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn widen<const KIND: u8>(row: *const u8, col: usize, lanes: __mmask16) -> __m512 {
    // SAFETY: by contract; masked lanes are not read.
    unsafe {
        match KIND {
            F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, row.cast::<i16>().add(col))),
            BF16 => {
                let halves = _mm256_maskz_loadu_epi16(lanes, row.cast::<i16>().add(col));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
            }
            _ => _mm512_maskz_loadu_ps(lanes, row.cast::<f32>().add(col)),
        }
    }
}
