//! Products with float weights for AVX-512: register blocks of 4 weight rows × up to 6 tokens.
//!
//! Each output has one register of sixteen partial sums over columns `16i + lane`, whatever the block
//! it is computed in; columns past the last count as zeros. So its bits depend on C only.

use super::float_linear::{BF16, Block, BlockKernel, F16, F32};
use std::arch::x86_64::*;

/// Lanes of a register.
const LANES: usize = 16;

/// AVX-512 F, BW, DQ and VL.
pub(crate) struct Avx512;

impl BlockKernel for Avx512 {
    const TOKENS_PER_PASS: usize = 96;

    unsafe fn run<const KIND: u8>(block: &Block, num_tokens: usize) -> usize {
        // SAFETY: as promised to this method.
        unsafe {
            match num_tokens {
                1 => Self::block::<KIND, 1>(block),
                2 => Self::block::<KIND, 2>(block),
                3 => Self::block::<KIND, 3>(block),
                4 | 5 => Self::block::<KIND, 4>(block),
                _ => Self::block::<KIND, 6>(block),
            }
        }
    }
}

impl Avx512 {
    /// Computes the block's first `T` tokens, which is also what it returns.
    ///
    /// # Safety
    /// `T` rows of x and `num_rows` weight rows of `cols` elements are valid, as is their output.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn block<const KIND: u8, const T: usize>(block: &Block) -> usize {
        let mut sums = [[_mm512_setzero_ps(); T]; 4];
        let whole = block.cols - block.cols % LANES;
        // SAFETY: only lanes below `cols` are read; outputs are inside the tile, by contract.
        unsafe {
            for col in (0..whole).step_by(LANES) {
                Self::step::<KIND, T>(block, col, !0, &mut sums);
            }
            if whole < block.cols {
                Self::step::<KIND, T>(block, whole, !(!0 << (block.cols - whole)), &mut sums);
            }
            for (i, sums) in sums.iter().enumerate().take(block.num_rows) {
                for (t, sum) in sums.iter().enumerate() {
                    *block.out.at(block.token + t, block.row + i) = _mm512_reduce_add_ps(*sum);
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
    unsafe fn step<const KIND: u8, const T: usize>(
        block: &Block,
        col: usize,
        lanes: __mmask16,
        sums: &mut [[__m512; T]; 4],
    ) {
        // SAFETY: by contract.
        unsafe {
            let x: [__m512; T] = std::array::from_fn(|t| widen::<F32>(block.x.add(t * block.cols).cast(), col, lanes));
            for (w, sums) in block.w.iter().zip(sums) {
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
