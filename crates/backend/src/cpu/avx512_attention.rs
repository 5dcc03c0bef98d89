//! Attention spans for AVX-512: scores, softmax and weighted V of some rows over one span.
//!
//! A block of up to twelve rows runs through all three before the next begins, so that its scores stay
//! in the first-level cache. Orders that never change, whatever rows share a block: a score sums over E
//! in order, one lane a position; a row's exponentials are summed in sixteen lanes over its tiles in
//! order; an output element sums over positions in order. K of positions that a row does not see may be
//! loaded (its lanes are masked before they count); V of such positions is never multiplied.
//!
//! Scores are kept in units of ln 2 (queries are scaled by `scale * log2 e` once), so that an
//! exponential is a power of two; so are the maxima of a [`RowState`] made here.

use super::attention::{AttentionKernels, RowState, SPAN, SPAN_TILES, SpanInput};
use super::kv_layout::TILE;
use std::arch::x86_64::*;
use std::ops::Range;

/// Lanes of a register: one K tile.
const LANES: usize = TILE;
/// Greatest head size that these kernels take.
pub(crate) const MAX_HEAD_DIM: usize = 256;
/// Elements from one scaled query row to the next: a constant, so that one pointer reaches all rows of
/// a block; an odd number of cache lines, so that the rows do not compete for the same cache sets.
const Q_STRIDE: usize = MAX_HEAD_DIM + 16;
/// Most rows of a block.
const MAX_BLOCK_ROWS: usize = 12;

/// The table of this file.
pub(crate) static KERNELS: AttentionKernels = AttentionKernels {
    scratch_floats: |_| MAX_BLOCK_ROWS * (SPAN + Q_STRIDE),
    span: |input, scratch, state| {
        // SAFETY: the table's contract; it is only handed out for an Isa that this machine has.
        unsafe { if input.is_f16 { span::<true>(input, scratch, state) } else { span::<false>(input, scratch, state) } }
    },
    exp: |x| {
        // SAFETY: as above.
        unsafe { exp2_one(x) }
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

/// Consecutive rows that share each load of K and V.
#[derive(Clone, Copy)]
struct Block<'a> {
    input: &'a SpanInput,
    first_row: usize,
    /// `[rows, Q_STRIDE]`, scaled.
    q: *mut f32,
    /// `[rows, SPAN]`: scores, then exponentials.
    scores: *mut f32,
    /// `[rows, E]`.
    acc: *mut f32,
}

/// Rows of the next block when `left` are left: sizes that a kernel exists for, as even as can be.
fn block_rows(left: usize) -> usize {
    match left {
        0..=8 => left,
        9..=11 => 6,
        13..=16 => 8,
        _ => MAX_BLOCK_ROWS,
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn span<const HALF: bool>(input: &SpanInput, scratch: *mut f32, state: RowState) {
    let num_rows = input.num_rows();
    let mut first_row = 0;
    while first_row < num_rows {
        let rows = block_rows(num_rows - first_row);
        // SAFETY: this function's contract, passed on; a block takes what `scratch_floats` names.
        unsafe {
            let block = Block {
                input,
                first_row,
                q: scratch.add(MAX_BLOCK_ROWS * SPAN),
                scores: scratch,
                acc: state.acc.add(first_row * input.head_dim),
            };
            // More tiles at a time for fewer rows: sums enough to hide the latency of the multiply-add.
            match rows {
                1 => block.score::<HALF, 1, 8>(),
                2 => block.score::<HALF, 2, 8>(),
                3 => block.score::<HALF, 3, 8>(),
                4 => block.score::<HALF, 4, 4>(),
                5 => block.score::<HALF, 5, 4>(),
                6 => block.score::<HALF, 6, 4>(),
                7 => block.score::<HALF, 7, 2>(),
                8 => block.score::<HALF, 8, 2>(),
                _ => block.score::<HALF, MAX_BLOCK_ROWS, 2>(),
            }
            for row in 0..rows {
                let nth = first_row + row;
                softmax_row(block.scores.add(row * SPAN), block.visible(row), state.max.add(nth), state.sum.add(nth));
            }
            block.weigh::<HALF>(rows);
        }
        first_row += rows;
    }
}

/// Sixteen cache elements from `idx` as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn load16<const HALF: bool>(base: *const u8, idx: usize) -> __m512 {
    // SAFETY: the caller's elements exist.
    unsafe {
        if HALF {
            _mm512_cvtph_ps(_mm256_loadu_si256(base.add(idx * 2).cast()))
        } else {
            _mm512_loadu_ps(base.cast::<f32>().add(idx))
        }
    }
}

impl Block<'_> {
    /// Positions, relative to the span, that a row of the block sees.
    fn visible(&self, row: usize) -> Range<usize> {
        self.input.visible((self.first_row + row) / self.input.heads_per_kv)
    }

    /// q·k of `R` rows over all tiles that any of them sees, `N` tiles at a time.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn score<const HALF: bool, const R: usize, const N: usize>(&self) {
        let scale = _mm512_set1_ps(self.input.scale * std::f32::consts::LOG2_E);
        for row in 0..R {
            let (from, to) = (self.input.q_row(self.first_row + row), self.q.wrapping_add(row * Q_STRIDE));
            for e in (0..self.input.head_dim).step_by(LANES) {
                // SAFETY: a query row and its place in the scratch hold `head_dim` floats.
                unsafe { _mm512_storeu_ps(to.add(e), _mm512_mul_ps(_mm512_loadu_ps(from.add(e)), scale)) };
            }
        }
        // Rows are in order of position: the block sees from its first row's begin to its last's end.
        let mut tile = self.visible(0).start / TILE;
        let end = self.visible(R - 1).end.div_ceil(TILE);
        // SAFETY: those tiles are in the block table, and `scores` has SPAN places a row.
        unsafe {
            while tile + N <= end {
                self.score_tiles::<HALF, R, N>(tile);
                tile += N;
            }
            while tile < end {
                self.score_tiles::<HALF, R, 1>(tile);
                tile += 1;
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn score_tiles<const HALF: bool, const R: usize, const N: usize>(&self, tile: usize) {
        let input = self.input;
        let k: [*const u8; N] = std::array::from_fn(|n| input.k_tiles[tile + n]);
        let v: [*const u8; N] = std::array::from_fn(|n| input.v_tiles[tile + n]);
        // The next tiles may lie in any block: their lines are asked for while these are worked on.
        let next: [*const u8; N] = std::array::from_fn(|n| match input.k_tiles.get(tile + N + n) {
            Some(next) if !next.is_null() => *next,
            _ => k[n],
        });
        // The first block does it for all.
        let prefetch = self.first_row == 0;
        let elem_bytes = if HALF { 2 } else { 4 };
        let mut sums = [[_mm512_setzero_ps(); N]; R];
        for e in 0..input.head_dim {
            // SAFETY: `e < head_dim`; each tile holds `head_dim * TILE` elements. Prefetches of any
            // address are harmless.
            unsafe {
                if prefetch && (!HALF || e % 2 == 0) {
                    for n in 0..N {
                        _mm_prefetch::<_MM_HINT_T0>(next[n].wrapping_add(e * TILE * elem_bytes).cast());
                        _mm_prefetch::<_MM_HINT_T1>(v[n].wrapping_add(e * TILE * elem_bytes).cast());
                    }
                }
                let loaded: [__m512; N] = std::array::from_fn(|n| load16::<HALF>(k[n], e * TILE));
                for (row, sums) in sums.iter_mut().enumerate() {
                    let q = _mm512_set1_ps(*self.q.add(row * Q_STRIDE + e));
                    for (sum, k) in sums.iter_mut().zip(&loaded) {
                        *sum = _mm512_fmadd_ps(q, *k, *sum);
                    }
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (n, sum) in sums.iter().enumerate() {
                // SAFETY: tile `tile + n` of the row is inside the scores.
                unsafe { _mm512_storeu_ps(self.scores.add(row * SPAN + (tile + n) * TILE), *sum) };
            }
        }
    }

    /// Weighted V of the first `rows` rows: what all see in one go, the ragged ends (a few positions,
    /// as the rows are of neighbouring tokens) token by token before and after it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn weigh<const HALF: bool>(&self, rows: usize) {
        let shared = self.visible(rows - 1).start..self.visible(0).end;
        // SAFETY: passed on: every range is seen by all rows it is used for.
        unsafe {
            if self.visible(0) == self.visible(rows - 1) {
                self.weigh_rows::<HALF>(0, rows, shared, true);
            } else if shared.is_empty() {
                self.for_each_token(rows, |row, count, seen| self.weigh_rows::<HALF>(row, count, seen, true));
            } else {
                self.for_each_token(rows, |row, count, seen| {
                    self.weigh_rows::<HALF>(row, count, seen.start..shared.start, true);
                });
                self.weigh_rows::<HALF>(0, rows, shared.clone(), false);
                self.for_each_token(rows, |row, count, seen| {
                    self.weigh_rows::<HALF>(row, count, shared.end..seen.end, false);
                });
            }
        }
    }

    /// Calls `visit(first row, rows, positions)` for each token of the first `rows` rows.
    #[inline]
    fn for_each_token(&self, rows: usize, mut visit: impl FnMut(usize, usize, Range<usize>)) {
        let heads = self.input.heads_per_kv;
        let mut row = 0;
        while row < rows {
            let count = (heads - (self.first_row + row) % heads).min(rows - row);
            visit(row, count, self.visible(row));
            row += count;
        }
    }

    /// Adds weighted V at `positions`, which all `count` rows see, to their output; `fresh`: to zero.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn weigh_rows<const HALF: bool>(&self, row: usize, count: usize, positions: Range<usize>, fresh: bool) {
        if positions.is_empty() && !fresh {
            return;
        }
        let mut done = 0;
        while done < count {
            let rows = block_rows(count - done);
            let (row, seen) = (row + done, positions.clone());
            // SAFETY: passed on.
            unsafe {
                match rows {
                    1 => self.weigh_block::<HALF, 1, 8>(row, seen, fresh),
                    2 => self.weigh_block::<HALF, 2, 4>(row, seen, fresh),
                    3 => self.weigh_block::<HALF, 3, 4>(row, seen, fresh),
                    4 => self.weigh_block::<HALF, 4, 4>(row, seen, fresh),
                    5 => self.weigh_block::<HALF, 5, 4>(row, seen, fresh),
                    6 => self.weigh_block::<HALF, 6, 4>(row, seen, fresh),
                    7 => self.weigh_block::<HALF, 7, 2>(row, seen, fresh),
                    8 => self.weigh_block::<HALF, 8, 2>(row, seen, fresh),
                    _ => self.weigh_block::<HALF, MAX_BLOCK_ROWS, 2>(row, seen, fresh),
                }
            }
            done += rows;
        }
    }

    /// `R` rows, `W` registers of E at a time, the rest of E fewer at a time.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn weigh_block<const HALF: bool, const R: usize, const W: usize>(
        &self,
        row: usize,
        positions: Range<usize>,
        fresh: bool,
    ) {
        let head_dim = self.input.head_dim;
        let mut e = 0;
        // SAFETY: passed on; head sizes are multiples of 16.
        unsafe {
            while e + W * LANES <= head_dim {
                self.weigh_cols::<HALF, R, W>(row, e, positions.clone(), fresh);
                e += W * LANES;
            }
            if W > 4 && e + 4 * LANES <= head_dim {
                self.weigh_cols::<HALF, R, 4>(row, e, positions.clone(), fresh);
                e += 4 * LANES;
            }
            while e < head_dim {
                self.weigh_cols::<HALF, R, 1>(row, e, positions.clone(), fresh);
                e += LANES;
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn weigh_cols<const HALF: bool, const R: usize, const W: usize>(
        &self,
        row: usize,
        e: usize,
        positions: Range<usize>,
        fresh: bool,
    ) {
        let head_dim = self.input.head_dim;
        let acc = self.acc.wrapping_add(row * head_dim + e);
        let weights = self.scores.wrapping_add(row * SPAN);
        let mut sums = [[_mm512_setzero_ps(); W]; R];
        if !fresh {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (w, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: inside the row's `head_dim` places.
                    *sum = unsafe { _mm512_loadu_ps(acc.add(r * head_dim + w * LANES)) };
                }
            }
        }
        let elem_bytes = if HALF { 2 } else { 4 };
        let mut position = positions.start;
        while position < positions.end {
            let tile_end = (position - position % TILE + TILE).min(positions.end);
            let v = self.input.v_tiles[position / TILE];
            let next_k = self.input.next_k_tiles[position / TILE];
            // K of the next span is asked for now, as V was during the scores: memory is never idle.
            let prefetch = self.first_row == 0 && !next_k.is_null();
            for position in position..tile_end {
                // SAFETY: the position is visible, so its V row exists; its weight was filled. Prefetches
                // of any address are harmless.
                unsafe {
                    let base = (position % TILE) * head_dim + e;
                    if prefetch {
                        for offset in (0..W * LANES * elem_bytes).step_by(64) {
                            _mm_prefetch::<_MM_HINT_T1>(next_k.wrapping_add(base * elem_bytes + offset).cast());
                        }
                    }
                    let loaded: [__m512; W] = std::array::from_fn(|w| load16::<HALF>(v, base + w * LANES));
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let weight = _mm512_set1_ps(*weights.add(r * SPAN + position));
                        for (sum, v) in sums.iter_mut().zip(&loaded) {
                            *sum = _mm512_fmadd_ps(weight, *v, *sum);
                        }
                    }
                }
            }
            position = tile_end;
        }
        for (r, sums) in sums.iter().enumerate() {
            for (w, sum) in sums.iter().enumerate() {
                // SAFETY: inside the row's `head_dim` places.
                unsafe { _mm512_storeu_ps(acc.add(r * head_dim + w * LANES), *sum) };
            }
        }
    }
}

/// Turns the scores of `visible` into powers of two under their maximum; lanes outside become 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn softmax_row(scores: *mut f32, visible: Range<usize>, max: *mut f32, sum: *mut f32) {
    // SAFETY: `scores` has SPAN places; all tiles that touch `visible` were filled.
    unsafe {
        if visible.is_empty() {
            *max = f32::NEG_INFINITY;
            *sum = 0.0;
            return;
        }
        let tiles = visible.start / TILE..visible.end.div_ceil(TILE);
        let hidden = _mm512_set1_ps(f32::NEG_INFINITY);
        let mut greatest = [hidden; 4];
        for tile in tiles.clone() {
            let at = scores.add(tile * TILE);
            let mut value = _mm512_loadu_ps(at);
            if tile * TILE < visible.start || (tile + 1) * TILE > visible.end {
                value = _mm512_mask_mov_ps(hidden, lanes_inside(tile, &visible), value);
                _mm512_storeu_ps(at, value);
            }
            greatest[tile % 4] = _mm512_max_ps(greatest[tile % 4], value);
        }
        let pairs = (_mm512_max_ps(greatest[0], greatest[1]), _mm512_max_ps(greatest[2], greatest[3]));
        *max = _mm512_reduce_max_ps(_mm512_max_ps(pairs.0, pairs.1));
        let greatest = _mm512_set1_ps(*max);
        let mut total = _mm512_setzero_ps();
        for tile in tiles {
            let at = scores.add(tile * TILE);
            let value = exp2(_mm512_sub_ps(_mm512_loadu_ps(at), greatest));
            _mm512_storeu_ps(at, value);
            total = _mm512_add_ps(total, value);
        }
        *sum = _mm512_reduce_add_ps(total);
    }
}

/// The lanes of `tile` whose positions are in `visible`.
fn lanes_inside(tile: usize, visible: &Range<usize>) -> __mmask16 {
    let below = |position: usize| -> u32 { (1 << position.saturating_sub(tile * TILE).min(TILE)) - 1 };
    #[allow(clippy::cast_possible_truncation)] // sixteen bits at most
    let lanes = (below(visible.end) & !below(visible.start)) as __mmask16;
    lanes
}

/// `2^x` within about 1 ulp for -126 <= x < 128; 0 below; NaN stays NaN. Cephes' exp2f: a polynomial in
/// the fraction, the nearest whole number into the exponent.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn exp2(x: __m512) -> __m512 {
    let counts = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let r = _mm512_sub_ps(x, n);
    let mut p = _mm512_set1_ps(1.535_336_2e-4);
    for coefficient in [1.339_887_5e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(coefficient));
    }
    _mm512_maskz_scalef_ps(counts, p, n)
}

/// [`exp2`] of one number: the same bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn exp2_one(x: f32) -> f32 {
    _mm512_cvtss_f32(exp2(_mm512_set1_ps(x)))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn blend(a: *mut f32, scale_a: f32, b: *const f32, scale_b: f32, head_dim: usize) {
    let (scale_a, scale_b) = (_mm512_set1_ps(scale_a), _mm512_set1_ps(scale_b));
    for e in (0..head_dim).step_by(LANES) {
        // SAFETY: both hold `head_dim` floats, a multiple of 16.
        unsafe {
            let scaled = _mm512_mul_ps(_mm512_loadu_ps(b.add(e)), scale_b);
            _mm512_storeu_ps(a.add(e), _mm512_fmadd_ps(_mm512_loadu_ps(a.add(e)), scale_a, scaled));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn finish(acc: *const f32, sum: f32, out: *mut f32, head_dim: usize) {
    let inverse = _mm512_set1_ps(1.0 / sum);
    for e in (0..head_dim).step_by(LANES) {
        // SAFETY: both hold `head_dim` floats, a multiple of 16.
        unsafe { _mm512_storeu_ps(out.add(e), _mm512_mul_ps(_mm512_loadu_ps(acc.add(e)), inverse)) };
    }
}

const _: () = assert!(SPAN_TILES.is_multiple_of(8), "blocks of one row take eight tiles at a time");
