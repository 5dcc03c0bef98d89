//! Attention spans for AVX2 + FMA + F16C: scores, softmax and weighted V of some rows over one span.
//!
//! Orders that never change, whatever rows share a register block: a score sums over E in order, one
//! lane a position; a row's exponentials are summed in eight lanes over its tiles in order; an output
//! element sums over positions in order. K of positions that a row does not see may be loaded (its
//! lanes are masked before they count); V of such positions is never multiplied.

use super::attention::{AttentionKernels, RowState, SPAN, SpanInput};
use super::avx2::{LANES, exp, exp_one, max_lane, sum_lanes};
use super::kv_layout::TILE;
use std::arch::x86_64::*;
use std::ops::Range;

/// The table of this file.
pub(crate) static KERNELS: AttentionKernels = AttentionKernels {
    scratch_floats: |rows| rows * SPAN,
    span: |input, scores, state| {
        // SAFETY: the table's contract; it is only handed out for an Isa that this machine has.
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

#[target_feature(enable = "avx2,fma,f16c")]
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
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load8<const HALF: bool>(base: *const u8, idx: usize) -> __m256 {
    // SAFETY: the caller's elements exist.
    unsafe {
        if HALF {
            _mm256_cvtph_ps(_mm_loadu_si128(base.add(idx * 2).cast()))
        } else {
            _mm256_loadu_ps(base.cast::<f32>().add(idx))
        }
    }
}

/// q·k of all rows over all tiles that any of a block's rows sees.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn score_rows<const HALF: bool>(input: &SpanInput, scores: *mut f32) {
    let num_rows = input.num_rows();
    let mut row = 0;
    while row < num_rows {
        let block_rows = (num_rows - row).min(6);
        let first = input.visible(row / input.heads_per_kv);
        let last = input.visible((row + block_rows - 1) / input.heads_per_kv);
        // Rows are in order of position: the block sees from its first row's begin to its last's end.
        let tiles = first.start / TILE..last.end.div_ceil(TILE);
        // SAFETY: those tiles are in the block table, and `scores` has SPAN places a row.
        unsafe {
            match block_rows {
                1 => score_block::<HALF, 1, 4>(input, row, tiles, scores),
                2 => score_block::<HALF, 2, 2>(input, row, tiles, scores),
                3 => score_block::<HALF, 3, 2>(input, row, tiles, scores),
                4 => score_block::<HALF, 4, 1>(input, row, tiles, scores),
                5 => score_block::<HALF, 5, 1>(input, row, tiles, scores),
                _ => score_block::<HALF, 6, 1>(input, row, tiles, scores),
            }
        }
        row += block_rows;
    }
}

/// `R` rows over `tiles`, `N` tiles at a time.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
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
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn score_tiles<const HALF: bool, const R: usize, const N: usize>(
    input: &SpanInput,
    q: &[*const f32; R],
    row: usize,
    tile: usize,
    scores: *mut f32,
) {
    let k: [*const u8; N] = std::array::from_fn(|n| input.k_tiles[tile + n]);
    let mut sums = [[[_mm256_setzero_ps(); 2]; N]; R];
    // The next tile may lie in any block: its lines are asked for while this one is worked on.
    // The first rows do it for all.
    let prefetch = row == 0;
    let next = input.k_tiles.get(tile + N).copied().unwrap_or(std::ptr::null());
    let v = input.v_tiles[tile];
    let line_elems = if HALF { 2 } else { 1 };
    for e in 0..input.head_dim {
        // SAFETY: `e < head_dim`; each tile holds `head_dim * TILE` elements. Prefetches of any
        // address are harmless.
        unsafe {
            if prefetch && e % line_elems == 0 {
                let offset = e * TILE * if HALF { 2 } else { 4 };
                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(offset).cast());
                _mm_prefetch::<_MM_HINT_T0>(v.wrapping_add(offset).cast());
            }
            let mut loaded = [[_mm256_setzero_ps(); 2]; N];
            for (loaded, k) in loaded.iter_mut().zip(&k) {
                *loaded = [load8::<HALF>(*k, e * TILE), load8::<HALF>(*k, e * TILE + LANES)];
            }
            for (q, sums) in q.iter().zip(&mut sums) {
                let q = _mm256_broadcast_ss(&*q.add(e));
                for (sums, k) in sums.iter_mut().zip(&loaded) {
                    sums[0] = _mm256_fmadd_ps(q, k[0], sums[0]);
                    sums[1] = _mm256_fmadd_ps(q, k[1], sums[1]);
                }
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (n, sums) in sums.iter().enumerate() {
            // SAFETY: tile `tile + n` of row `row + r` is inside the scores.
            unsafe {
                let to = scores.add((row + r) * SPAN + (tile + n) * TILE);
                _mm256_storeu_ps(to, sums[0]);
                _mm256_storeu_ps(to.add(LANES), sums[1]);
            }
        }
    }
}

/// Turns the scores of `visible` into exponentials under their maximum; lanes outside become 0.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn softmax_row(scale: f32, scores: *mut f32, visible: Range<usize>, max: *mut f32, sum: *mut f32) {
    // SAFETY: `scores` has SPAN places; all tiles that touch `visible` were filled.
    unsafe {
        if visible.is_empty() {
            *max = f32::NEG_INFINITY;
            *sum = 0.0;
            return;
        }
        let groups = visible.start / LANES..visible.end.div_ceil(LANES);
        let scale = _mm256_set1_ps(scale);
        let hidden = _mm256_set1_ps(f32::NEG_INFINITY);
        let lane_idx = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        // Small non-negative numbers: positions within a span.
        #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]
        let (begin, end) = (_mm256_set1_epi32(visible.start as i32 - 1), _mm256_set1_epi32(visible.end as i32));
        let mut greatest = hidden;
        for group in groups.clone() {
            let at = scores.add(group * LANES);
            let mut value = _mm256_mul_ps(_mm256_loadu_ps(at), scale);
            if group * LANES < visible.start || (group + 1) * LANES > visible.end {
                #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]
                let idx = _mm256_add_epi32(lane_idx, _mm256_set1_epi32((group * LANES) as i32));
                let seen = _mm256_and_si256(_mm256_cmpgt_epi32(idx, begin), _mm256_cmpgt_epi32(end, idx));
                value = _mm256_blendv_ps(hidden, value, _mm256_castsi256_ps(seen));
            }
            _mm256_storeu_ps(at, value);
            greatest = _mm256_max_ps(greatest, value);
        }
        *max = max_lane(greatest);
        let greatest = _mm256_set1_ps(*max);
        let mut total = _mm256_setzero_ps();
        for group in groups {
            let at = scores.add(group * LANES);
            let value = exp(_mm256_sub_ps(_mm256_loadu_ps(at), greatest));
            _mm256_storeu_ps(at, value);
            total = _mm256_add_ps(total, value);
        }
        *sum = sum_lanes(total);
    }
}

/// Weighted V of all rows: blocks of rows that see the same positions.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn weigh_rows<const HALF: bool>(input: &SpanInput, weights: *const f32, acc: *mut f32) {
    let num_rows = input.num_rows();
    let mut row = 0;
    while row < num_rows {
        let visible = input.visible(row / input.heads_per_kv);
        let mut block_rows = 1;
        while block_rows < 6
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
                3 => weigh_block::<HALF, 3, 4>(input, row, visible, weights, acc),
                4 => weigh_block::<HALF, 4, 2>(input, row, visible, weights, acc),
                5 => weigh_block::<HALF, 5, 2>(input, row, visible, weights, acc),
                _ => weigh_block::<HALF, 6, 2>(input, row, visible, weights, acc),
            }
        }
        row += block_rows;
    }
}

/// `R` rows, `W` registers of E at a time, the rest of E two at a time.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
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
        while e + W * LANES <= input.head_dim {
            weigh_cols::<HALF, R, W>(input, row, e, visible.clone(), weights, acc);
            e += W * LANES;
        }
        while e < input.head_dim {
            weigh_cols::<HALF, R, 2>(input, row, e, visible.clone(), weights, acc);
            e += 2 * LANES;
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn weigh_cols<const HALF: bool, const R: usize, const W: usize>(
    input: &SpanInput,
    row: usize,
    e: usize,
    visible: Range<usize>,
    weights: *const f32,
    acc: *mut f32,
) {
    let mut sums = [[_mm256_setzero_ps(); W]; R];
    let mut position = visible.start;
    while position < visible.end {
        let tile_end = (position - position % TILE + TILE).min(visible.end);
        let v = input.v_tiles[position / TILE];
        for position in position..tile_end {
            // SAFETY: `position` is visible, so its V row exists; its weight was filled.
            unsafe {
                let base = (position % TILE) * input.head_dim + e;
                let mut loaded = [_mm256_setzero_ps(); W];
                for (w, loaded) in loaded.iter_mut().enumerate() {
                    *loaded = load8::<HALF>(v, base + w * LANES);
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let weight = _mm256_broadcast_ss(&*weights.add((row + r) * SPAN + position));
                    for (sum, v) in sums.iter_mut().zip(&loaded) {
                        *sum = _mm256_fmadd_ps(weight, *v, *sum);
                    }
                }
            }
        }
        position = tile_end;
    }
    for (r, sums) in sums.iter().enumerate() {
        for (w, sum) in sums.iter().enumerate() {
            // SAFETY: inside the row's `head_dim` places.
            unsafe { _mm256_storeu_ps(acc.add((row + r) * input.head_dim + e + w * LANES), *sum) };
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn blend(a: *mut f32, scale_a: f32, b: *const f32, scale_b: f32, head_dim: usize) {
    let (scale_a, scale_b) = (_mm256_set1_ps(scale_a), _mm256_set1_ps(scale_b));
    for e in (0..head_dim).step_by(LANES) {
        // SAFETY: both hold `head_dim` floats, a multiple of 16.
        unsafe {
            let scaled = _mm256_mul_ps(_mm256_loadu_ps(b.add(e)), scale_b);
            _mm256_storeu_ps(a.add(e), _mm256_fmadd_ps(_mm256_loadu_ps(a.add(e)), scale_a, scaled));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn finish(acc: *const f32, sum: f32, out: *mut f32, head_dim: usize) {
    let inverse = _mm256_set1_ps(1.0 / sum);
    for e in (0..head_dim).step_by(LANES) {
        // SAFETY: both hold `head_dim` floats, a multiple of 16.
        unsafe { _mm256_storeu_ps(out.add(e), _mm256_mul_ps(_mm256_loadu_ps(acc.add(e)), inverse)) };
    }
}
