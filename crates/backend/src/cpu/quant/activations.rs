//! Activations as int8: how rows are quantised and laid out for every integer kernel.
//!
//! Each 32 columns of a row become a block: codes `q = round(x * 127 / amax)` (ties to even) and the f32
//! scale `amax / 127`. Language models have rows with a few huge values, and a block with one of them would
//! keep little of its other 31. Such **outlier blocks** (`amax > 2 rms(row)`) get a second plane of codes,
//! 256 times finer, for what the first left over; the kernels multiply both and add exactly in i32. A
//! block's treatment depends on its own row only.
//!
//! Weights' minima multiply the sum of the *quantised* values, so that rounding errors meet the whole
//! weight `d q + m`, which is small, and not its parts, which cancel.
//!
//! What was weighed, on SmolLM2-135M Q4_1 in f32 simulation (error of the ten best log-probabilities after
//! 350 tokens: root mean square; largest after the three reference prompts):
//!
//! | activations | rms | largest |
//! |---|---|---|
//! | f16 scales, as llama.cpp | 0.137 | 0.31 |
//! | one plane, blocks of 32 | 0.131 | 0.29 |
//! | the same with sums of the original values times `m` | 0.338 | 0.89 |
//! | the same with those sums times `m + 8 d`, codes centred | 0.152 | 0.27 |
//! | one plane, blocks of 16 | 0.095 | 0.18 |
//! | outlier blocks above 4 rms (17 % of all) | 0.056 | 0.11 |
//! | outlier blocks above 3 rms (26 %) | 0.045 | 0.10 |
//!
//! In the engine, with the real kernels, the largest error is chaotic: at 4 rms it was 0.17 and 0.13 in two builds
//! on SmolLM2 that differ in the order of attention's sums, and 0.10 and 0.26 on Gemma 3 270M. At **2 rms** it is
//! 0.08 and 0.09, so that is the limit.
//!
//! The arithmetic order is fixed: every path gives the same bits. A block with an infinity or NaN gets a
//! scale of that kind and zero codes, so that its products are NaN; a block whose largest magnitude is
//! below 1e-30 counts as zero.

use super::layout::BLOCK_COLS;
use super::tile::ActRows;
use crate::BackendError;
use crate::cpu::memory::AlignedBytes;
use std::ops::Range;

/// Below this, `127 / amax` could overflow.
const TINY: f32 = 1e-30;

/// Blocks whose largest magnitude is above this many times the row's root mean square get two planes.
const OUTLIER_RMS: f32 = 2.0;

/// Rows behind the last one that kernels of 16 rows may read (their products are dropped).
const SPARE_ROWS: usize = 15;

/// How many bits finer the second plane is.
pub(super) const FINE_BITS: u32 = 8;

/// 32 columns of one row: 64 bytes.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(super) struct ActBlock {
    /// Codes, -127..=127.
    pub(super) q: [i8; 32],
    /// Value of one step of the finest plane.
    pub(super) d: f32,
    /// [`FINE_BITS`] in outlier blocks, else 0: `q << shift` counts in steps of `d`.
    pub(super) shift: u32,
    /// Sum of all codes in steps of `d`, negated.
    pub(super) neg_sum_q: i32,
    /// Sum of the quantised values.
    pub(super) sum_x: f32,
    /// The same of each half.
    pub(super) neg_sum_q_half: [i32; 2],
    /// The same of each half.
    pub(super) sum_x_half: [f32; 2],
}

/// Codes of the second plane of 32 columns, -127..=127; zeros where there is none.
pub(super) type FineBlock = [i8; 32];

/// How a block is to be quantised.
#[derive(Clone, Copy)]
pub(super) struct BlockScale {
    /// Codes a unit; 0: all codes are zero.
    pub(super) inverse: f32,
    /// Value of a step of the finest plane.
    d: f32,
    /// As [`ActBlock::shift`].
    pub(super) shift: u32,
}

impl BlockScale {
    /// For a block with this largest magnitude (bits of a non-negative float or NaN) in a row whose
    /// outlier limit is `limit`.
    pub(super) fn new(amax_bits: u32, limit: f32) -> Self {
        let amax = f32::from_bits(amax_bits);
        if amax < TINY {
            Self { inverse: 0.0, d: 0.0, shift: 0 }
        } else if !amax.is_finite() {
            Self { inverse: 0.0, d: amax, shift: 0 }
        } else if amax > limit {
            Self { inverse: 127.0 / amax, d: amax / 127.0 / (1u32 << FINE_BITS) as f32, shift: FINE_BITS }
        } else {
            Self { inverse: 127.0 / amax, d: amax / 127.0, shift: 0 }
        }
    }
}

impl ActBlock {
    /// Sets what goes with codes that are written already: `sum_q` of each half, in steps of the finest plane.
    pub(super) fn set_scale(&mut self, scale: BlockScale, sum_q: [i32; 2]) {
        self.d = scale.d;
        self.shift = scale.shift;
        self.neg_sum_q_half = sum_q.map(|sum| -sum);
        self.neg_sum_q = -(sum_q[0] + sum_q[1]);
        self.sum_x_half = sum_q.map(|sum| scale.d * sum as f32);
        self.sum_x = scale.d * (sum_q[0] + sum_q[1]) as f32;
    }
}

/// The limit of a row, from its sums of squares in 32 interleaved lanes.
pub(super) fn outlier_limit(mut lanes: [f32; 32], cols: usize) -> f32 {
    for width in [16, 8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    OUTLIER_RMS * (lanes[0] / cols as f32).sqrt()
}

/// Quantises a row: the reference for the vector code.
fn quantize_row(x: &[f32], blocks: &mut [ActBlock], fine: &mut [FineBlock]) {
    let mut squares = [0.0f32; 32];
    for x in x.chunks_exact(BLOCK_COLS) {
        squares.iter_mut().zip(x).for_each(|(sum, v)| *sum += v * v);
    }
    let limit = outlier_limit(squares, x.len());
    for ((x, block), fine) in x.chunks_exact(BLOCK_COLS).zip(blocks).zip(fine) {
        // Magnitudes as integers order like the floats, with NaN above infinity.
        let amax_bits = x.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
        let scale = BlockScale::new(amax_bits, limit);
        let mut sum_q = [0i32; 2];
        block.q = [0; 32];
        *fine = [0; 32];
        if scale.inverse > 0.0 {
            for (i, &v) in x.iter().enumerate() {
                let steps = v * scale.inverse;
                let code = steps.round_ties_even();
                let rest = (steps - code) * (1u32 << FINE_BITS) as f32;
                let rest = if scale.shift == 0 { 0.0 } else { rest.round_ties_even().clamp(-127.0, 127.0) };
                #[allow(clippy::cast_possible_truncation)] // in -127..=127
                let (code, rest) = (code as i8, rest as i8);
                block.q[i] = code;
                fine[i] = rest;
                sum_q[i / 16] += (i32::from(code) << scale.shift) + i32::from(rest);
            }
        }
        block.set_scale(scale, sum_q);
    }
}

/// Where the parts of `[rows, cols]` lie.
#[derive(Clone, Copy, Default)]
struct Shape {
    rows: usize,
    blocks_per_row: usize,
    /// Blocks from one row to the next: odd, so that a column of blocks spreads over a cache's sets.
    row_stride: usize,
    /// Start of the second plane.
    fine_at: usize,
    /// Start of the rows' outlier bits.
    bits_at: usize,
    /// Words of a row's outlier bits: two may be read from any of the first.
    words_per_row: usize,
    len: usize,
}

impl Shape {
    fn new(rows: usize, cols: usize) -> Option<Self> {
        let blocks_per_row = cols.is_multiple_of(BLOCK_COLS).then_some(cols / BLOCK_COLS)?;
        let row_stride = blocks_per_row | 1;
        let blocks = rows.checked_add(SPARE_ROWS)?.checked_mul(row_stride)?;
        let fine_at = blocks.checked_mul(size_of::<ActBlock>())?;
        let bits_at = blocks.checked_mul(size_of::<FineBlock>())?.checked_add(fine_at)?;
        let words_per_row = blocks_per_row / 32 + 2;
        let len = rows.checked_mul(words_per_row)?.checked_mul(4)?.checked_add(bits_at)?;
        Some(Self { rows, blocks_per_row, row_stride, fine_at, bits_at, words_per_row, len })
    }
}

/// Activations `[T, C]` as int8 blocks, in memory that is kept and reused: one instance a backend.
pub(crate) struct QuantizedActivations {
    /// `None` until the first `prepare`.
    bytes: Option<AlignedBytes>,
    shape: Shape,
    has_avx2: bool,
}

impl Default for QuantizedActivations {
    fn default() -> Self {
        Self { bytes: None, shape: Shape::default(), has_avx2: has_avx2() }
    }
}

fn has_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

impl QuantizedActivations {
    /// Makes room for `[rows, cols]` (`cols` in whole blocks of 32); allocates only when larger than
    /// ever before.
    pub(crate) fn prepare(&mut self, rows: usize, cols: usize) -> Result<(), BackendError> {
        let shape = Shape::new(rows, cols).ok_or_else(|| BackendError::Shape {
            op: "quantize",
            expected: "columns in whole blocks of 32 and a size that fits in memory".into(),
            got: format!("[{rows}, {cols}]"),
        })?;
        if shape.len > self.len_bytes() {
            self.bytes = Some(AlignedBytes::zeroed(shape.len, "quantised activations")?);
        }
        self.shape = shape;
        Ok(())
    }

    /// Quantises `rows` of `x` `[T, C]` (the shape given to `prepare`).
    ///
    /// # Safety
    /// Called from several threads at once with disjoint `rows`, and not together with a reader.
    pub(crate) unsafe fn quantize_rows(&self, x: &[f32], rows: Range<usize>) {
        assert!(rows.end <= self.shape.rows && rows.start <= rows.end, "rows outside the prepared shape");
        let cols = self.shape.blocks_per_row * BLOCK_COLS;
        for t in rows {
            let acts = self.rows_from(t);
            // SAFETY: inside the range that `prepare` sized for this shape; the caller keeps rows disjoint
            // between threads, so these are the only references to these blocks. The memory is initialised
            // (zeroed), aligned to 64, and any bit pattern is valid for each of the types.
            let (blocks, fine, bits) = unsafe {
                let num_blocks = self.shape.blocks_per_row;
                let blocks = std::slice::from_raw_parts_mut(acts.ptr.cast_mut(), num_blocks);
                let fine = std::slice::from_raw_parts_mut(acts.fine.cast_mut(), num_blocks);
                (blocks, fine, std::slice::from_raw_parts_mut(acts.bits.cast_mut(), self.shape.words_per_row))
            };
            self.quantize_row(&x[t * cols..(t + 1) * cols], blocks, fine);
            bits.fill(0);
            for (b, block) in blocks.iter().enumerate() {
                bits[b / 32] |= u32::from(block.shift > 0) << (b % 32);
            }
        }
    }

    fn quantize_row(&self, x: &[f32], blocks: &mut [ActBlock], fine: &mut [FineBlock]) {
        #[cfg(target_arch = "x86_64")]
        if self.has_avx2 {
            // SAFETY: the processor has AVX2 (`has_avx2`); `x` holds 32 values a block.
            unsafe { super::activations_avx2::quantize_row(x, blocks, fine) };
            return;
        }
        quantize_row(x, blocks, fine);
    }

    /// The rows from `t` on.
    pub(super) fn rows_from(&self, t: usize) -> ActRows {
        let Shape { rows, row_stride, fine_at, bits_at, words_per_row, .. } = self.shape;
        assert!(t < rows);
        let base = self.bytes.as_ref().map_or(std::ptr::dangling(), AlignedBytes::as_ptr);
        // SAFETY: the parts of row `t` start inside the range that `prepare` sized.
        unsafe {
            ActRows {
                ptr: base.cast::<ActBlock>().add(t * row_stride),
                fine: base.add(fine_at).cast::<FineBlock>().add(t * row_stride),
                stride: row_stride,
                #[allow(clippy::cast_ptr_alignment)] // `bits_at` is a multiple of 32
                bits: base.add(bits_at).cast::<u32>().add(t * words_per_row),
                bits_stride: words_per_row,
                first_block: 0,
            }
        }
    }

    /// Rows of the shape given to `prepare`.
    pub(super) fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Blocks of a row.
    pub(super) fn blocks_per_row(&self) -> usize {
        self.shape.blocks_per_row
    }

    /// Bytes held (counted as workspace).
    pub(crate) fn len_bytes(&self) -> usize {
        self.bytes.as_ref().map_or(0, AlignedBytes::len)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn rows(seed: u64, n: usize) -> Vec<f32> {
        let mut state = seed;
        (0..n)
            .map(|i| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let unit = (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
                if i % 137 == 5 { unit * 100.0 } else { unit }
            })
            .collect()
    }

    const EMPTY: ActBlock = ActBlock {
        q: [0; 32],
        d: 0.0,
        shift: 0,
        neg_sum_q: 0,
        sum_x: 0.0,
        neg_sum_q_half: [0; 2],
        sum_x_half: [0.0; 2],
    };

    fn quantized(x: &[f32]) -> (Vec<ActBlock>, Vec<FineBlock>) {
        let (mut blocks, mut fine) = (vec![EMPTY; x.len() / 32], vec![[1; 32]; x.len() / 32]);
        quantize_row(x, &mut blocks, &mut fine);
        (blocks, fine)
    }

    #[test]
    fn the_vector_path_gives_the_bits_of_the_scalar_one() {
        let mut vector = QuantizedActivations::default();
        if !vector.has_avx2 {
            println!("skipped: this machine has no AVX2");
            return;
        }
        let mut x = rows(7, 1120 * 40);
        x[32..64].fill(0.0);
        x[64..96].fill(1e-38);
        x[1120] = f32::NAN;
        x[2 * 1120 + 130] = f32::INFINITY;
        x[3 * 1120 + 164] = f32::NEG_INFINITY;
        x[4 * 1120 + 200] = f32::MAX;
        vector.prepare(40, 1120).unwrap();
        // SAFETY: one thread.
        unsafe { vector.quantize_rows(&x, 0..40) };
        let mut outliers = 0;
        for (t, x) in x.chunks_exact(1120).enumerate() {
            let (blocks, fine) = quantized(x);
            let acts = vector.rows_from(t);
            for (b, (block, fine)) in blocks.iter().zip(&fine).enumerate() {
                // SAFETY: 40 rows of 35 blocks, all filled.
                let (got, got_fine, bit) =
                    unsafe { (*acts.at(0, b), *acts.fine_at(0, b), acts.skip(0, b).outliers(1) & 1) };
                assert_eq!((got.q, got_fine, got.shift), (block.q, *fine, block.shift), "row {t} block {b}");
                assert_eq!(got.d.to_bits(), block.d.to_bits(), "row {t} block {b}");
                assert_eq!((got.neg_sum_q, got.neg_sum_q_half), (block.neg_sum_q, block.neg_sum_q_half));
                assert!(got.sum_x == block.sum_x || block.d.is_nan() || block.d.is_infinite());
                assert!(got.sum_x_half == block.sum_x_half || block.d.is_nan() || block.d.is_infinite());
                assert_eq!(bit == 1, block.shift > 0);
                outliers += u32::from(block.shift > 0);
            }
        }
        assert!(outliers > 40, "{outliers}");
    }

    #[test]
    fn outlier_blocks_keep_their_small_values() {
        let mut x = vec![0.5f32; 256];
        x[40] = 100.0;
        x[41] = -0.123;
        let (blocks, fine) = quantized(&x);
        assert_eq!(blocks.iter().map(|b| b.shift).collect::<Vec<_>>(), [0, FINE_BITS, 0, 0, 0, 0, 0, 0]);
        for i in 32..64 {
            let block = &blocks[1];
            let steps = (i32::from(block.q[i - 32]) << block.shift) + i32::from(fine[1][i - 32]);
            assert!((steps as f32 * block.d - x[i]).abs() <= 100.0 / 127.0 / 256.0 * 0.51, "element {i}");
        }
        let sum: f32 = x[32..64].iter().sum();
        assert!((blocks[1].sum_x - sum).abs() < 32.0 * 100.0 / 127.0 / 256.0 * 0.51, "{} {sum}", blocks[1].sum_x);
    }

    #[test]
    fn codes_are_the_nearest_and_sums_are_theirs() {
        let mut x = [0.0f32; 32];
        x[3] = -127.0;
        x[4] = 2.5; // halfway: to even
        x[5] = 3.5;
        x[20] = 100.4;
        x[21..].fill(100.0); // no outliers: 2 rms is 130
        let block = quantized(&x).0[0];
        assert_eq!((block.d, block.q[3], block.q[4], block.q[5], block.q[20]), (1.0, -127, 2, 4, 100));
        assert_eq!((block.neg_sum_q_half, block.neg_sum_q), ([121, -1200], -1079));
        assert_eq!((block.sum_x_half, block.sum_x), ([-121.0, 1200.0], 1079.0));
    }

    #[test]
    fn non_finite_blocks_have_non_finite_scales() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0f32; 32];
            x[9] = bad;
            let block = quantized(&x).0[0];
            assert!(!block.d.is_finite());
            assert_eq!(block.q, [0; 32]);
        }
    }

    #[test]
    fn memory_grows_only_past_the_largest_shape() {
        let mut quantized = QuantizedActivations::default();
        quantized.prepare(4, 64).unwrap();
        let held = quantized.len_bytes();
        assert_eq!(held, (4 + SPARE_ROWS) * 3 * 96 + 4 * 2 * 4);
        quantized.prepare(3, 64).unwrap();
        quantized.prepare(20, 32).unwrap();
        assert_eq!(quantized.len_bytes(), held);
        assert!(quantized.prepare(1, 33).is_err());
        assert!(quantized.prepare(usize::MAX / 2, 64).is_err());
    }
}
