//! Products with float weights for NEON: register blocks of 4 weight rows × up to 2 tokens.
//!
//! Each output has two registers of eight partial sums over columns `8i + lane`, whatever the block it
//! is computed in; the last `C % 8` columns are loaded with zeros behind them. So its bits depend on C
//! only.

use super::float_linear::FloatWeight;
use super::linear::OutMatrix;
use super::neon::sum_lanes;
use crate::DType;
use std::arch::aarch64::*;
use std::ops::Range;

/// Columns taken at a time: two registers.
const COLS: usize = 8;
/// Tokens whose x rows stay in the second-level cache while the tile's weight rows pass over them.
const TOKENS_PER_PASS: usize = 48;

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// `out[t, n] = x[t] · weight[n]` over the tile.
///
/// # Safety
/// The tile is inside `x`, `weight` and `out`, and nobody else touches it.
pub(crate) unsafe fn matmul_tile(
    weight: &FloatWeight,
    x: &[f32],
    cols: usize,
    tokens: Range<usize>,
    rows: Range<usize>,
    out: OutMatrix,
) {
    // SAFETY: this function's contract; NEON is part of the target.
    unsafe {
        match weight.dtype() {
            DType::F16 => tile::<F16>(weight, x, cols, tokens, rows, out),
            DType::BF16 => tile::<BF16>(weight, x, cols, tokens, rows, out),
            _ => tile::<F32>(weight, x, cols, tokens, rows, out),
        }
    }
}

#[target_feature(enable = "neon")]
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
                let block = Block { x: x[token * cols..].as_ptr(), w, cols, token, row, num_rows, out };
                // SAFETY: rows and tokens of the block are inside the tile.
                unsafe {
                    match end - token {
                        1 => block.run::<KIND, 1>(),
                        _ => block.run::<KIND, 2>(),
                    }
                }
                token += 2;
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
    #[target_feature(enable = "neon")]
    unsafe fn run<const KIND: u8, const T: usize>(&self) {
        let mut sums = [[[vdupq_n_f32(0.0); 2]; T]; 4];
        let whole = self.cols - self.cols % COLS;
        for col in (0..whole).step_by(COLS) {
            // SAFETY: `col + COLS <= cols`.
            unsafe {
                let x: [[float32x4_t; 2]; T] =
                    std::array::from_fn(|t| widen::<F32>(self.x.add(t * self.cols).cast(), col));
                for (w, sums) in self.w.iter().zip(&mut sums) {
                    add_products(widen::<KIND>(*w, col), &x, sums);
                }
            }
        }
        if whole < self.cols {
            // SAFETY: only the `cols - whole` elements that exist are read.
            unsafe {
                let x: [[float32x4_t; 2]; T] =
                    std::array::from_fn(|t| rest::<F32>(self.x.add(t * self.cols).cast(), whole, self.cols));
                for (w, sums) in self.w.iter().zip(&mut sums) {
                    add_products(rest::<KIND>(*w, whole, self.cols), &x, sums);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate().take(self.num_rows) {
            for (t, sum) in sums.iter().enumerate() {
                // SAFETY: inside the tile, by contract.
                unsafe { *self.out.at(self.token + t, self.row + i) = sum_lanes(vaddq_f32(sum[0], sum[1])) };
            }
        }
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
