//! The product in f32 mode for AVX2: widened weights become f32 vectors once and meet many rows.

use super::avx2::Avx2;
use super::avx2_panel::{Source, Widened, load_acc, store_acc, widen};
use super::layout::{BLOCK_COLS, Format};
use super::tile::{Chunk, FloatKernel, FloatRows, Minimum, OutRows, Panel, Start};
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

/// Blocks whose weights are held in f32 at once.
const FLOAT_BLOCKS: usize = 8;

/// A block's weights in f32: 32 columns of 8 rows.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn block_weights<F: Format>(chunk: &Chunk, block: usize, half: usize, w: &mut [__m256; BLOCK_COLS]) {
    let src = Widened::<F> { chunk, format: PhantomData };
    // SAFETY: the chunk has the block.
    unsafe {
        let q = src.operands(block, half);
        for g in 0..F::LAYOUT.groups() {
            let (d, m) = src.scales(block * F::LAYOUT.groups() + g, half);
            for i in g * F::LAYOUT.group / 4..(g + 1) * F::LAYOUT.group / 4 {
                let byte = _mm256_set1_epi32(255);
                let codes = [
                    _mm256_and_si256(q[i], byte),
                    _mm256_and_si256(_mm256_srli_epi32::<8>(q[i]), byte),
                    _mm256_and_si256(_mm256_srli_epi32::<16>(q[i]), byte),
                    _mm256_srli_epi32::<24>(q[i]),
                ];
                for (j, code) in codes.into_iter().enumerate() {
                    w[4 * i + j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(code), d, m);
                }
            }
        }
    }
}

/// `T` rows over `num_blocks` blocks of f32 weights.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn float_rows<const T: usize>(
    w: &[[__m256; BLOCK_COLS]],
    x: FloatRows,
    out: OutRows,
    half: usize,
    start: Start,
) {
    // SAFETY: as promised to `FloatKernel::many_f32`.
    unsafe {
        let mut acc = load_acc::<T>(out, half, start);
        for (block, w) in w.iter().enumerate() {
            let mut part = [_mm256_setzero_ps(); T];
            for (k, &w) in w.iter().enumerate() {
                for (t, part) in part.iter_mut().enumerate() {
                    let x = _mm256_set1_ps(*x.ptr.add(t * x.stride + block * BLOCK_COLS + k));
                    *part = _mm256_fmadd_ps(w, x, *part);
                }
            }
            for (acc, part) in acc.iter_mut().zip(part) {
                *acc = _mm256_add_ps(*acc, part);
            }
        }
        store_acc(out, half, &acc);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn many_f32<F: Format>(
    chunk: &Chunk,
    num_blocks: usize,
    x: FloatRows,
    num_t: usize,
    out: OutRows,
    start: Start,
) {
    let mut w = [[_mm256_setzero_ps(); BLOCK_COLS]; FLOAT_BLOCKS];
    for half in 0..2 {
        for first in (0..num_blocks).step_by(FLOAT_BLOCKS) {
            let blocks = FLOAT_BLOCKS.min(num_blocks - first);
            let start = if first == 0 { start } else { Start::FromOut };
            // SAFETY: as promised to `FloatKernel::many_f32`; rows `t..` exist.
            unsafe {
                for (i, w) in w[..blocks].iter_mut().enumerate() {
                    block_weights::<F>(chunk, first + i, half, w);
                }
                let mut t = 0;
                while t < num_t {
                    let x = FloatRows { ptr: x.ptr.add(t * x.stride + first * BLOCK_COLS), ..x };
                    let out = OutRows { ptr: out.row(t), ..out };
                    if num_t - t >= 8 {
                        float_rows::<8>(&w[..blocks], x, out, half, start);
                        t += 8;
                    } else {
                        float_rows::<1>(&w[..blocks], x, out, half, start);
                        t += 1;
                    }
                }
            }
        }
    }
}

impl FloatKernel for Avx2 {
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
