//! Products with float weights for NEON: register blocks of 4 weight rows × up to 2 tokens.
//!
//! Each output has two registers of eight partial sums over columns `8i + lane`, whatever the block it
//! is computed in; the last `C % 8` columns are loaded with zeros behind them. So its bits depend on C
//! only.

use super::float_linear::{BF16, Block, BlockKernel, F16, F32};
use super::neon::sum_lanes;
use std::arch::aarch64::*;

/// Columns taken at a time: two registers.
const COLS: usize = 8;

/// NEON, part of the target.
pub(crate) struct Neon;

impl BlockKernel for Neon {
    const TOKENS_PER_PASS: usize = 48;

    unsafe fn run<const KIND: u8>(block: &Block, num_tokens: usize) -> usize {
        // SAFETY: as promised to this method.
        unsafe {
            match num_tokens {
                1 => Self::block::<KIND, 1>(block),
                _ => Self::block::<KIND, 2>(block),
            }
        }
    }
}

impl Neon {
    /// Computes the block's first `T` tokens, which is also what it returns.
    ///
    /// # Safety
    /// `T` rows of x and `num_rows` weight rows of `cols` elements are valid, as is their output.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn block<const KIND: u8, const T: usize>(block: &Block) -> usize {
        let mut sums = [[[vdupq_n_f32(0.0); 2]; T]; 4];
        let whole = block.cols - block.cols % COLS;
        for col in (0..whole).step_by(COLS) {
            // SAFETY: `col + COLS <= cols`.
            unsafe {
                let x: [[float32x4_t; 2]; T] =
                    std::array::from_fn(|t| widen::<F32>(block.x.add(t * block.cols).cast(), col));
                for (w, sums) in block.w.iter().zip(&mut sums) {
                    add_products(widen::<KIND>(*w, col), &x, sums);
                }
            }
        }
        if whole < block.cols {
            // SAFETY: only the `cols - whole` elements that exist are read.
            unsafe {
                let x: [[float32x4_t; 2]; T] =
                    std::array::from_fn(|t| rest::<F32>(block.x.add(t * block.cols).cast(), whole, block.cols));
                for (w, sums) in block.w.iter().zip(&mut sums) {
                    add_products(rest::<KIND>(*w, whole, block.cols), &x, sums);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate().take(block.num_rows) {
            for (t, sum) in sums.iter().enumerate() {
                // SAFETY: inside the tile, by contract.
                unsafe { *block.out.at(block.token + t, block.row + i) = sum_lanes(vaddq_f32(sum[0], sum[1])) };
            }
        }
        T
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn add_products<const T: usize>(w: [float32x4_t; 2], x: &[[float32x4_t; 2]; T], sums: &mut [[float32x4_t; 2]; T]) {
    for (sum, x) in sums.iter_mut().zip(x) {
        sum[0] = vfmaq_f32(sum[0], w[0], x[0]);
        sum[1] = vfmaq_f32(sum[1], w[1], x[1]);
    }
}

/// Eight elements from `col` as f32.
///
/// # Safety
/// They exist.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn widen<const KIND: u8>(row: *const u8, col: usize) -> [float32x4_t; 2] {
    // SAFETY: by contract.
    unsafe {
        match KIND {
            F16 => {
                let halves = vreinterpretq_f16_u8(vld1q_u8(row.add(col * 2)));
                [vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)]
            }
            BF16 => {
                let halves = vreinterpretq_u16_u8(vld1q_u8(row.add(col * 2)));
                let (low, high) = (vshll_n_u16::<16>(vget_low_u16(halves)), vshll_high_n_u16::<16>(halves));
                [vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high)]
            }
            _ => {
                let at = row.add(col * 4);
                [vreinterpretq_f32_u8(vld1q_u8(at)), vreinterpretq_f32_u8(vld1q_u8(at.add(16)))]
            }
        }
    }
}

/// The elements `col..cols` (fewer than eight) as f32, zeros behind.
///
/// # Safety
/// They exist.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn rest<const KIND: u8>(row: *const u8, col: usize, cols: usize) -> [float32x4_t; 2] {
    let elem_bytes = if KIND == F32 { 4 } else { 2 };
    let mut padded = [0_u8; 4 * COLS];
    // SAFETY: by contract, and at most 28 bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(row.add(col * elem_bytes), padded.as_mut_ptr(), (cols - col) * elem_bytes);
        widen::<KIND>(padded.as_ptr(), 0)
    }
}
