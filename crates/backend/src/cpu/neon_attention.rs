//! Attention spans for NEON: scores, softmax and weighted V of some rows over one span.
//!
//! Orders that never change, whatever rows share a register block: a score sums over E in order, one
//! lane a position; a row's exponentials are summed in the 16 lanes of a tile over its tiles in order; an output
//! element sums over positions in order. K of positions that a row does not see may be loaded (its
//! lanes are masked before they count); V of such positions is never multiplied.

use super::attention::{AttentionKernels, RowState, SPAN, SpanInput};
use super::kv_layout::TILE;
use super::neon::{LANES, exp, exp_one, prefetch, sum_lanes};
use std::arch::aarch64::*;
use std::ops::Range;

/// Registers of a tile's positions.
const TILE_REGS: usize = TILE / LANES;
/// Rows of the largest register block.
const ROWS: usize = 4;

/// The table of this file.
pub(crate) static KERNELS: AttentionKernels = AttentionKernels {
    scratch_floats: |rows| rows * SPAN,
    span: |input, scores, state| {
        // SAFETY: the table's contract; NEON is part of the target.
        unsafe { if input.is_f16 { span::<true>(input, scores, state) } else { span::<false>(input, scores, state) } }
    },
    exp: |x| {
        // SAFETY: as above.
        unsafe { exp_one(x) }
    },
    blend: |a, scale_a, b, scale_b, head_dim| {
        // SAFETY: as above.
        unsafe { blend(a, scale_a, b, scale_b, head_dim) }
    },
    finish: |acc, sum, out, head_dim| {
        // SAFETY: as above.
        unsafe { finish(acc, sum, out, head_dim) }
    },
};

#[target_feature(enable = "neon")]
unsafe fn span<const HALF: bool>(input: &SpanInput, scores: *mut f32, state: RowState) {
    // SAFETY: this function's contract, passed on.
    unsafe {
        score_rows::<HALF>(input, scores);
        for row in 0..input.num_rows() {
            let visible = input.visible(row / input.heads_per_kv);
            softmax_row(input.scale, scores.add(row * SPAN), visible, state.max.add(row), state.sum.add(row));
        }
        weigh_rows::<HALF>(input, scores, state.acc);
    }
}

/// Eight cache elements from `idx` as f32.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load8<const HALF: bool>(base: *const u8, idx: usize) -> [float32x4_t; 2] {
    // SAFETY: the caller's elements exist.
    unsafe {
        if HALF {
            let halves = vreinterpretq_f16_u16(vld1q_u16(base.cast::<u16>().add(idx)));
            [vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)]
        } else {
            let at = base.cast::<f32>().add(idx);
            [vld1q_f32(at), vld1q_f32(at.add(LANES))]
        }
    }
}

/// q·k of all rows over all tiles that any of a block's rows sees.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn score_rows<const HALF: bool>(input: &SpanInput, scores: *mut f32) {
    let num_rows = input.num_rows();
    let mut row = 0;
    while row < num_rows {
        let block_rows = (num_rows - row).min(ROWS);
        let first = input.visible(row / input.heads_per_kv);
        let last = input.visible((row + block_rows - 1) / input.heads_per_kv);
        // Rows are in order of position: the block sees from its first row's begin to its last's end.
        let tiles = first.start / TILE..last.end.div_ceil(TILE);
        // SAFETY: those tiles are in the block table, and `scores` has SPAN places a row.
        unsafe {
            match block_rows {
                1 => score_block::<HALF, 1, 4>(input, row, tiles, scores),
                2 => score_block::<HALF, 2, 2>(input, row, tiles, scores),
                3 => score_block::<HALF, 3, 1>(input, row, tiles, scores),
                _ => score_block::<HALF, ROWS, 1>(input, row, tiles, scores),
            }
        }
        row += block_rows;
    }
}

/// `R` rows over `tiles`, `N` tiles at a time.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn score_block<const HALF: bool, const R: usize, const N: usize>(
    input: &SpanInput,
    row: usize,
    tiles: Range<usize>,
    scores: *mut f32,
) {
    let q: [*const f32; R] = std::array::from_fn(|r| input.q_row(row + r));
    let mut tile = tiles.start;
    while tile < tiles.end {
        let count = (tiles.end - tile).min(N);
        // SAFETY: passed on from the caller.
        unsafe {
            if count == N {
                score_tiles::<HALF, R, N>(input, &q, row, tile, scores);
            } else {
                for tile in tile..tile + count {
                    score_tiles::<HALF, R, 1>(input, &q, row, tile, scores);
                }
            }
        }
        tile += count;
    }
}

#[inline]
#[target_feature(enable = "neon")]
unsafe fn score_tiles<const HALF: bool, const R: usize, const N: usize>(
    input: &SpanInput,
    q: &[*const f32; R],
    row: usize,
    tile: usize,
    scores: *mut f32,
) {
    let k: [*const u8; N] = std::array::from_fn(|n| input.k_tiles[tile + n]);
    let mut sums = [[[vdupq_n_f32(0.0); TILE_REGS]; N]; R];
    // The next tile may lie in any block: its lines are asked for while this one is worked on.
    // The first rows do it for all.
    let is_first = row == 0;
    let next = input.k_tiles.get(tile + N).copied().unwrap_or(input.next_k_tiles[0]);
    let v = input.v_tiles[tile];
    let line_elems = if HALF { 2 } else { 1 };
    for e in 0..input.head_dim {
        if is_first && e % line_elems == 0 {
            let offset = e * TILE * if HALF { 2 } else { 4 };
            prefetch(next.wrapping_add(offset));
            prefetch(v.wrapping_add(offset));
        }
        let mut loaded = [[vdupq_n_f32(0.0); TILE_REGS]; N];
        for (loaded, k) in loaded.iter_mut().zip(&k) {
            // SAFETY: `e < head_dim`; each tile holds `head_dim * TILE` elements.
            let [a, b] = unsafe { [load8::<HALF>(*k, e * TILE), load8::<HALF>(*k, e * TILE + 2 * LANES)] };
            *loaded = [a[0], a[1], b[0], b[1]];
        }
        for (q, sums) in q.iter().zip(&mut sums) {
            // SAFETY: a query row has `head_dim` elements.
            let q = unsafe { *q.add(e) };
            for (sums, k) in sums.iter_mut().zip(&loaded) {
                for (sum, k) in sums.iter_mut().zip(k) {
                    *sum = vfmaq_n_f32(*sum, *k, q);
                }
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (n, sums) in sums.iter().enumerate() {
            for (i, sum) in sums.iter().enumerate() {
                // SAFETY: tile `tile + n` of row `row + r` is inside the scores.
                unsafe { vst1q_f32(scores.add((row + r) * SPAN + (tile + n) * TILE + i * LANES), *sum) };
            }
        }
    }
}

/// Turns the scores of `visible` into exponentials under their maximum; lanes outside become 0.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn softmax_row(scale: f32, scores: *mut f32, visible: Range<usize>, max: *mut f32, sum: *mut f32) {
    // SAFETY: `scores` has SPAN places; all tiles that touch `visible` were filled.
    unsafe {
        if visible.is_empty() {
            *max = f32::NEG_INFINITY;
            *sum = 0.0;
            return;
        }
        let tiles = visible.start / TILE..visible.end.div_ceil(TILE);
        let hidden = vdupq_n_f32(f32::NEG_INFINITY);
        let lanes = [0u32, 1, 2, 3];
        let lane_idx = vld1q_u32(lanes.as_ptr());
        // Small numbers: positions within a span.
        #[allow(clippy::cast_possible_truncation)]
        let (begin, end) = (vdupq_n_u32(visible.start as u32), vdupq_n_u32(visible.end as u32));
        let mut greatest = [hidden; TILE_REGS];
        for tile in tiles.clone() {
            let is_whole = tile * TILE >= visible.start && (tile + 1) * TILE <= visible.end;
            for (i, greatest) in greatest.iter_mut().enumerate() {
                let first = tile * TILE + i * LANES;
                let mut value = vmulq_n_f32(vld1q_f32(scores.add(first)), scale);
                if !is_whole {
                    #[allow(clippy::cast_possible_truncation)]
                    let idx = vaddq_u32(lane_idx, vdupq_n_u32(first as u32));
                    value = vbslq_f32(vandq_u32(vcgeq_u32(idx, begin), vcltq_u32(idx, end)), value, hidden);
                }
                vst1q_f32(scores.add(first), value);
                *greatest = vmaxq_f32(*greatest, value);
            }
        }
        let [a, b, c, d] = greatest;
        *max = vmaxvq_f32(vmaxq_f32(vmaxq_f32(a, b), vmaxq_f32(c, d)));
        let greatest = vdupq_n_f32(*max);
        let mut total = [vdupq_n_f32(0.0); TILE_REGS];
        for tile in tiles {
            for (i, total) in total.iter_mut().enumerate() {
                let at = scores.add(tile * TILE + i * LANES);
                let value = exp(vsubq_f32(vld1q_f32(at), greatest));
                vst1q_f32(at, value);
                *total = vaddq_f32(*total, value);
            }
        }
        let [a, b, c, d] = total;
        *sum = sum_lanes(vaddq_f32(vaddq_f32(a, b), vaddq_f32(c, d)));
    }
}

/// Weighted V of all rows: blocks of rows that see the same positions.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn weigh_rows<const HALF: bool>(input: &SpanInput, weights: *const f32, acc: *mut f32) {
    let num_rows = input.num_rows();
    let mut row = 0;
    while row < num_rows {
        let visible = input.visible(row / input.heads_per_kv);
        let mut block_rows = 1;
        while block_rows < ROWS
            && row + block_rows < num_rows
            && input.visible((row + block_rows) / input.heads_per_kv) == visible
        {
            block_rows += 1;
        }
        // SAFETY: passed on: `visible` positions have V tiles, `acc` has `head_dim` places a row.
        unsafe {
            match block_rows {
                1 => weigh_block::<HALF, 1, 8>(input, row, visible, weights, acc),
                2 => weigh_block::<HALF, 2, 4>(input, row, visible, weights, acc),
                3 => weigh_block::<HALF, 3, 2>(input, row, visible, weights, acc),
                _ => weigh_block::<HALF, ROWS, 2>(input, row, visible, weights, acc),
            }
        }
        row += block_rows;
    }
}

/// `R` rows, `W` pairs of registers of E at a time, the rest of E two pairs at a time.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn weigh_block<const HALF: bool, const R: usize, const W: usize>(
    input: &SpanInput,
    row: usize,
    visible: Range<usize>,
    weights: *const f32,
    acc: *mut f32,
) {
    let mut e = 0;
    // SAFETY: passed on from the caller; head sizes are multiples of 16.
    unsafe {
        while e + W * 2 * LANES <= input.head_dim {
            weigh_cols::<HALF, R, W>(input, row, e, visible.clone(), weights, acc);
            e += W * 2 * LANES;
        }
        while e < input.head_dim {
            weigh_cols::<HALF, R, 2>(input, row, e, visible.clone(), weights, acc);
            e += 4 * LANES;
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
unsafe fn weigh_cols<const HALF: bool, const R: usize, const W: usize>(
    input: &SpanInput,
    row: usize,
    e: usize,
    visible: Range<usize>,
    weights: *const f32,
    acc: *mut f32,
) {
    let mut sums = [[[vdupq_n_f32(0.0); 2]; W]; R];
    let mut position = visible.start;
    while position < visible.end {
        let tile_end = (position - position % TILE + TILE).min(visible.end);
        let v = input.v_tiles[position / TILE];
        for position in position..tile_end {
            // SAFETY: `position` is visible, so its V row exists; its weight was filled.
            unsafe {
                let base = (position % TILE) * input.head_dim + e;
                let mut loaded = [[vdupq_n_f32(0.0); 2]; W];
                for (w, loaded) in loaded.iter_mut().enumerate() {
                    *loaded = load8::<HALF>(v, base + w * 2 * LANES);
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let weight = *weights.add((row + r) * SPAN + position);
                    for (sum, v) in sums.iter_mut().zip(&loaded) {
                        sum[0] = vfmaq_n_f32(sum[0], v[0], weight);
                        sum[1] = vfmaq_n_f32(sum[1], v[1], weight);
                    }
                }
            }
        }
        position = tile_end;
    }
    for (r, sums) in sums.iter().enumerate() {
        for (i, sum) in sums.iter().flatten().enumerate() {
            // SAFETY: inside the row's `head_dim` places.
            unsafe { vst1q_f32(acc.add((row + r) * input.head_dim + e + i * LANES), *sum) };
        }
    }
}

#[target_feature(enable = "neon")]
unsafe fn blend(a: *mut f32, scale_a: f32, b: *const f32, scale_b: f32, head_dim: usize) {
    for e in (0..head_dim).step_by(LANES) {
        // SAFETY: both hold `head_dim` floats, a multiple of 16.
        unsafe {
            let scaled = vmulq_n_f32(vld1q_f32(b.add(e)), scale_b);
            vst1q_f32(a.add(e), vfmaq_n_f32(scaled, vld1q_f32(a.add(e)), scale_a));
        }
    }
}

#[target_feature(enable = "neon")]
unsafe fn finish(acc: *const f32, sum: f32, out: *mut f32, head_dim: usize) {
    let inverse = 1.0 / sum;
    for e in (0..head_dim).step_by(LANES) {
        // SAFETY: both hold `head_dim` floats, a multiple of 16.
        unsafe { vst1q_f32(out.add(e), vmulq_n_f32(vld1q_f32(acc.add(e)), inverse)) };
    }
}
