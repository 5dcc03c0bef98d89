//! The product in f32 mode for NEON: widened weights become f32 vectors once and meet many rows.

use super::layout::{BLOCK_COLS, Format};
use super::neon::Neon;
use super::neon_panel::{QUARTERS, load_acc, store_acc, widen, widened_scales};
use super::tile::{Chunk, FloatKernel, FloatRows, Minimum, OutRows, Panel, Start};
use std::arch::aarch64::*;
use std::ops::Range;

/// Blocks whose weights are held in f32 at once.
const FLOAT_BLOCKS: usize = 8;

/// A block's weights in f32: 32 columns of 4 rows.
///
/// # Safety
/// The chunk has the block.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn block_weights<F: Format>(chunk: &Chunk, block: usize, quarter: usize, w: &mut [float32x4_t; BLOCK_COLS]) {
    let byte = vdupq_n_u32(255);
    for g in 0..F::LAYOUT.groups() {
        // SAFETY: the caller's promise.
        let (d, m) = unsafe { widened_scales(chunk, block * F::LAYOUT.groups() + g, quarter) };
        for i in g * F::LAYOUT.group / 4..(g + 1) * F::LAYOUT.group / 4 {
            // SAFETY: likewise; lanes are rows, bytes of a lane are columns.
            let q = unsafe { vld1q_u8(chunk.q.as_ptr().add(8 * block + i).cast::<u8>().add(16 * quarter)) };
            let q = vreinterpretq_u32_u8(q);
            let codes = [
                vandq_u32(q, byte),
                vandq_u32(vshrq_n_u32::<8>(q), byte),
                vandq_u32(vshrq_n_u32::<16>(q), byte),
                vshrq_n_u32::<24>(q),
            ];
            for (j, code) in codes.into_iter().enumerate() {
                w[4 * i + j] = vfmaq_f32(m, vcvtq_f32_u32(code), d);
            }
        }
    }
}

/// `T` rows over some blocks of f32 weights.
///
/// # Safety
/// As promised to `FloatKernel::many_f32`.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn float_rows<const T: usize>(
    w: &[[float32x4_t; BLOCK_COLS]],
    x: FloatRows,
    out: OutRows,
    quarter: usize,
    start: Start,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = load_acc::<T>(out, quarter, start);
        for (block, w) in w.iter().enumerate() {
            let mut part = [vdupq_n_f32(0.0); T];
            for (k, &w) in w.iter().enumerate() {
                for (t, part) in part.iter_mut().enumerate() {
                    *part = vfmaq_n_f32(*part, w, *x.ptr.add(t * x.stride + block * BLOCK_COLS + k));
                }
            }
            for (acc, part) in acc.iter_mut().zip(part) {
                *acc = vaddq_f32(*acc, part);
            }
        }
        store_acc(out, quarter, &acc);
    }
}

#[target_feature(enable = "neon")]
unsafe fn many_f32<F: Format>(
    chunk: &Chunk,
    num_blocks: usize,
    x: FloatRows,
    num_t: usize,
    out: OutRows,
    start: Start,
) {
    let mut w = [[vdupq_n_f32(0.0); BLOCK_COLS]; FLOAT_BLOCKS];
    for quarter in 0..QUARTERS {
        for first in (0..num_blocks).step_by(FLOAT_BLOCKS) {
            let blocks = FLOAT_BLOCKS.min(num_blocks - first);
            let start = if first == 0 { start } else { Start::FromOut };
            // SAFETY: as promised to `FloatKernel::many_f32`; rows `t..` exist.
            unsafe {
                for (i, w) in w[..blocks].iter_mut().enumerate() {
                    block_weights::<F>(chunk, first + i, quarter, w);
                }
                let mut t = 0;
                while t < num_t {
                    let x = FloatRows { ptr: x.ptr.add(t * x.stride + first * BLOCK_COLS), ..x };
                    let out = OutRows { ptr: out.row(t), ..out };
                    if num_t - t >= 8 {
                        float_rows::<8>(&w[..blocks], x, out, quarter, start);
                        t += 8;
                    } else {
                        float_rows::<1>(&w[..blocks], x, out, quarter, start);
                        t += 1;
                    }
                }
            }
        }
    }
}

impl FloatKernel for Neon {
    unsafe fn widen_plain<F: Format>(panel: Panel, blocks: Range<usize>, chunk: &mut Chunk) {
        // SAFETY: as promised to this method.
        unsafe { widen::<F>(panel, blocks, Minimum::Plain, chunk) };
    }

    unsafe fn many_f32<F: Format>(
        chunk: &Chunk,
        num_blocks: usize,
        x: FloatRows,
        num_t: usize,
        out: OutRows,
        start: Start,
    ) {
        // SAFETY: as promised to this method.
        unsafe { many_f32::<F>(chunk, num_blocks, x, num_t, out, start) };
    }
}
