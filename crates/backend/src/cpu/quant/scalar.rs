//! The kernels in plain Rust: the reference for the others, and what machines run that no others were written for.

use super::activations::{ActRows, Codes, FINE_BITS};
use super::layout::{BLOCK_COLS, Format, PANEL_ROWS, code_at, scale_at};
use super::tile::{Chunk, FloatKernel, FloatRows, IntKernel, Minimum, OutRows, Panel, Start};
use std::ops::Range;

/// Plain Rust.
pub(super) struct Scalar;

/// Widens blocks of a panel.
///
/// # Safety
/// `panel` is valid.
pub(super) unsafe fn widen<F: Format>(panel: Panel, blocks: Range<usize>, minimum: Minimum, chunk: &mut Chunk) {
    let layout = F::LAYOUT;
    // SAFETY: the caller's promise; the slice ends with this call.
    let bytes = unsafe { panel.bytes() };
    for (at, block_idx) in blocks.enumerate() {
        let block = &bytes[block_idx * layout.block_bytes()..][..layout.block_bytes()];
        for (i, operand) in chunk.q[8 * at..][..8].iter_mut().enumerate() {
            for (b, code) in operand.iter_mut().enumerate() {
                *code = code_at(layout.bits, block, i, b);
            }
        }
        for g in 0..layout.groups() {
            for r in 0..PANEL_ROWS {
                let (d, m) = scale_at(layout, panel.shape, bytes, block_idx * layout.groups() + g, r);
                let to = at * layout.groups() + g;
                chunk.d[to][r] = d;
                chunk.m[to][r] = match minimum {
                    Minimum::Plain => m,
                    Minimum::Centred => d.mul_add((1u32 << layout.log2_zero) as f32, m),
                };
            }
        }
    }
}

impl IntKernel for Scalar {
    const ROWS: usize = 1;

    fn few_up_to<F: Format>() -> usize {
        0
    }

    unsafe fn few<F: Format>(_: Panel, _: ActRows, _: usize, _: OutRows) {}

    unsafe fn widen<F: Format>(panel: Panel, blocks: Range<usize>, chunk: &mut Chunk) {
        // SAFETY: as promised to this method.
        unsafe { widen::<F>(panel, blocks, Minimum::Centred, chunk) };
    }

    unsafe fn rows<F: Format>(
        chunk: &Chunk,
        num_blocks: usize,
        acts: ActRows,
        num_t: usize,
        out: OutRows,
        start: Start,
    ) {
        for t in 0..num_t {
            // SAFETY: row `t` exists and `width` of its elements are ours.
            let out = unsafe { std::slice::from_raw_parts_mut(out.row(t), out.width) };
            for (r, out) in out.iter_mut().enumerate() {
                let acc = if start == Start::Zero { 0.0 } else { *out };
                // SAFETY: row `t` has the chunk's blocks.
                *out = unsafe { add_products::<F>(chunk, num_blocks, r, acts.skip(t, 0), acc) };
            }
        }
    }
}

/// `acc` and the products of the first row of activations with row `r` of a chunk.
///
/// # Safety
/// The row has the chunk's blocks.
unsafe fn add_products<F: Format>(chunk: &Chunk, num_blocks: usize, r: usize, acts: ActRows, acc: f32) -> f32 {
    let layout = F::LAYOUT;
    let zero = 1i32 << layout.log2_zero;
    let mut acc = acc;
    for b in 0..num_blocks {
        // SAFETY: the caller's promise; 64 codes a block.
        let (codes, d) = unsafe { (std::slice::from_raw_parts(acts.codes(0, b), 64), acts.scale(0, b)) };
        for g in 0..layout.groups() {
            let w = |k: usize| i32::from(chunk.q[8 * b + k / 4][4 * r + k % 4]) - zero;
            let x =
                |k: usize| (i32::from(codes[Codes::at(k)]) << FINE_BITS) + i32::from(codes[Codes::at(k) + Codes::LOW]);
            let dot: i32 = (g * layout.group..(g + 1) * layout.group).map(|k| w(k) * x(k)).sum();
            let at = b * layout.groups() + g;
            acc = (dot as f32).mul_add(chunk.d[at][r] * d, acc);
            if layout.scale.has_min() {
                // SAFETY: the caller's promise.
                acc = chunk.m[at][r].mul_add(unsafe { acts.sum_x::<F>(0, b, g) }, acc);
            }
        }
    }
    acc
}

impl FloatKernel for Scalar {
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
        let layout = F::LAYOUT;
        for t in 0..num_t {
            // SAFETY: row `t` exists, `out.width` of its elements are ours, and its x has the chunk's columns.
            let (x, out) = unsafe {
                let x = std::slice::from_raw_parts(x.ptr.add(t * x.stride), num_blocks * BLOCK_COLS);
                (x, std::slice::from_raw_parts_mut(out.row(t), out.width))
            };
            for (r, out) in out.iter_mut().enumerate() {
                let mut acc = if start == Start::Zero { 0.0 } else { *out };
                for (b, x) in x.chunks_exact(BLOCK_COLS).enumerate() {
                    let mut part = 0.0f32;
                    for (k, &x) in x.iter().enumerate() {
                        let at = b * layout.groups() + k / layout.group;
                        // No fused operation: without the instruction it is slow. `d q` is exact anyhow.
                        let w = chunk.d[at][r] * f32::from(chunk.q[8 * b + k / 4][4 * r + k % 4]) + chunk.m[at][r];
                        part += w * x;
                    }
                    acc += part;
                }
                *out = acc;
            }
        }
    }
}
