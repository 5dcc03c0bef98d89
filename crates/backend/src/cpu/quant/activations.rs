//! Activations as 11-bit integers: how rows are quantised and laid out for every integer kernel.
//!
//! Each 32 columns of a row become a block with one f32 scale `d = amax / 1019` and codes
//! `q = round(x / d)` (ties to even), kept as two int8 **planes**: `q = 8 high + low`, `low` in -4..=3. Language
//! models have rows with a few huge values, and a block with one of them would keep little of its other 31 in
//! 8 bits. With weight codes of up to 5 bits, `8 w` is an int8 too, so that tile units multiply both planes in
//! one product over twice the columns: `high * 8w + low * w`.
//!
//! Weights' minima multiply the sum of the *quantised* values, so that rounding errors meet the whole
//! weight `d q + m`, which is small, and not its parts, which cancel.
//!
//! Codes of one block lie together; what goes with them lies in arrays of their own. A few rows lie one after
//! the other (a kernel reads a row front to back); many rows lie in tiles of 16, block by block, so that a
//! tile unit's operand is one contiguous piece and 16 rows' scales are one vector.
//!
//! `docs/decisions/0002-activation-planes.md` has what else was measured.
//!
//! The arithmetic order is fixed: every path gives the same bits. A block with an infinity or NaN gets a
//! scale of that kind and zero codes, so that its products are NaN; a block whose largest magnitude is
//! below 1e-30 counts as zero.

use super::layout::{BLOCK_COLS, Format};
use crate::BackendError;
use crate::cpu::isa::{Isa, Vectors};
use crate::cpu::memory::AlignedBytes;

/// Below this, `MAX_CODE / amax` could overflow.
const TINY: f32 = 1e-30;

/// The high plane counts in steps of `1 << FINE_BITS`.
pub(super) const FINE_BITS: u32 = 3;

/// The largest code whose high plane is an int8: `127 * 8 + 3`.
const MAX_CODE: f32 = 1019.0;

/// Rows of a tile.
pub(super) const TILE_ROWS: usize = 16;

/// Up to this many rows lie one after the other; more in tiles.
pub(super) const MAX_ROWS_IN_LINE: usize = 12;

/// Both planes of 32 columns: high of columns 0..16, low of the same, high of 16..32, low of the same.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Codes(pub(super) [i8; 64]);

impl Codes {
    const ZERO: Self = Self([0; 64]);
    /// From a high code to its low one.
    pub(super) const LOW: usize = 16;

    /// Where the high code of column `k` lies.
    pub(super) const fn at(k: usize) -> usize {
        k / 16 * 32 + k % 16
    }
}

/// What goes with a block's codes.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockSums {
    /// Value of a step.
    d: f32,
    /// Sums of the codes of both halves.
    sum_q: [i32; 2],
}

/// How a block is to be quantised: steps a unit (0: all codes are zero), and the value of a step.
#[derive(Clone, Copy)]
pub(super) struct BlockScale {
    pub(super) inverse: f32,
    pub(super) d: f32,
}

impl BlockScale {
    /// For a block with this largest magnitude (bits of a non-negative float or NaN).
    pub(super) fn new(amax_bits: u32) -> Self {
        let amax = f32::from_bits(amax_bits);
        if amax < TINY {
            Self { inverse: 0.0, d: 0.0 }
        } else if amax.is_finite() {
            Self { inverse: MAX_CODE / amax, d: amax / MAX_CODE }
        } else {
            Self { inverse: 0.0, d: amax }
        }
    }

    /// With the sums of the codes that it led to.
    pub(super) fn with_sums(self, sum_q: [i32; 2]) -> BlockSums {
        BlockSums { d: self.d, sum_q }
    }
}

/// Quantises a block: the reference for the vector code.
fn quantize_block(x: &[f32], codes: &mut Codes) -> BlockSums {
    // Magnitudes as integers order like the floats, with NaN above infinity.
    let amax_bits = x.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
    let scale = BlockScale::new(amax_bits);
    let mut sum_q = [0i32; 2];
    *codes = Codes::ZERO;
    if scale.inverse > 0.0 {
        for (k, &v) in x.iter().enumerate() {
            #[allow(clippy::cast_possible_truncation)] // in -1019..=1019
            let code = (v * scale.inverse).round_ties_even() as i32;
            let high = (code + 4) >> FINE_BITS;
            #[allow(clippy::cast_possible_truncation)] // in -127..=127 and -4..=3
            let (high, low) = (high as i8, (code - (high << FINE_BITS)) as i8);
            codes.0[Codes::at(k)] = high;
            codes.0[Codes::at(k) + Codes::LOW] = low;
            sum_q[k / 16] += code;
        }
    }
    scale.with_sums(sum_q)
}

/// Arrays that go with the codes, one entry a block: scales, then sums of quantised values (of the block, of its
/// halves), then negated sums of codes (likewise).
const ARRAYS: usize = 7;
const SUM_X: usize = 1;
const NEG_SUM_Q: usize = 4;

/// Where the parts of `[rows, cols]` lie.
#[derive(Clone, Copy, Default)]
struct Shape {
    rows: usize,
    blocks_per_row: usize,
    /// Blocks of all rows, with those to spare.
    num_blocks: usize,
    /// Blocks from a row to the next of its tile, from a block to the next of its row, and from a tile to the next.
    row_stride: usize,
    block_stride: usize,
    tile_stride: usize,
    len: usize,
}

impl Shape {
    fn new(rows: usize, cols: usize) -> Option<Self> {
        let blocks_per_row = cols.is_multiple_of(BLOCK_COLS).then_some(cols / BLOCK_COLS)?;
        let (num_blocks, row_stride, block_stride) = if rows <= MAX_ROWS_IN_LINE {
            (rows * blocks_per_row, blocks_per_row, 1)
        } else {
            (rows.checked_next_multiple_of(TILE_ROWS)?.checked_mul(blocks_per_row)?, 1, TILE_ROWS)
        };
        let len = num_blocks.checked_mul(size_of::<Codes>() + ARRAYS * 4)?;
        let tile_stride = TILE_ROWS * blocks_per_row;
        Some(Self { rows, blocks_per_row, num_blocks, row_stride, block_stride, tile_stride, len })
    }
}

/// Quantised rows, from some block of some row on.
#[derive(Clone, Copy)]
pub(super) struct ActRows {
    codes: *const Codes,
    /// The scale of that block.
    scales: *const f32,
    /// Entries from one array to the next.
    array_stride: usize,
    row_stride: usize,
    block_stride: usize,
    tile_stride: usize,
}

impl ActRows {
    fn index(self, t: usize, block: usize) -> usize {
        t * self.row_stride + block * self.block_stride
    }

    /// Codes of block `block` of row `t`. Rows count from these rows' first and stay inside its tile.
    ///
    /// # Safety
    /// Row and block exist.
    #[inline(always)]
    pub(super) unsafe fn codes(self, t: usize, block: usize) -> *const i8 {
        // SAFETY: the caller's promise.
        unsafe { self.codes.add(self.index(t, block)).cast() }
    }

    /// Bytes from one row's codes to those of the next in its tile.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // for tile units
    #[inline(always)]
    pub(super) fn codes_stride(self) -> usize {
        self.row_stride * size_of::<Codes>()
    }

    /// Value of a step of a block.
    ///
    /// # Safety
    /// As [`Self::codes`].
    #[inline(always)]
    pub(super) unsafe fn scale(self, t: usize, block: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { *self.scales.add(self.index(t, block)) }
    }

    /// Sum of the quantised values of group `g` of a block.
    ///
    /// # Safety
    /// As [`Self::codes`].
    #[inline(always)]
    pub(super) unsafe fn sum_x<F: Format>(self, t: usize, block: usize, g: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { *self.scales.add((SUM_X + Self::array_of::<F>(g)) * self.array_stride + self.index(t, block)) }
    }

    /// Sum of the codes of group `g` of a block, negated.
    ///
    /// # Safety
    /// As [`Self::codes`].
    #[inline(always)]
    pub(super) unsafe fn neg_sum_q<F: Format>(self, t: usize, block: usize, g: usize) -> i32 {
        let at = (NEG_SUM_Q + Self::array_of::<F>(g)) * self.array_stride + self.index(t, block);
        // SAFETY: the caller's promise.
        unsafe { *self.scales.add(at).cast::<i32>() }
    }

    #[inline(always)]
    fn array_of<F: Format>(g: usize) -> usize {
        if F::LAYOUT.groups() == 1 { 0 } else { 1 + g }
    }

    /// The same rows without the first `t` of them and without their first `blocks`. Where `t` is no multiple of
    /// 16, what is left counts as one tile only up to the end of its first.
    ///
    /// # Safety
    /// Row `t` and block `blocks` exist.
    #[inline(always)]
    pub(super) unsafe fn skip(self, t: usize, blocks: usize) -> Self {
        let ahead = t / TILE_ROWS * self.tile_stride + self.index(t % TILE_ROWS, blocks);
        // SAFETY: the caller's promise.
        unsafe { Self { codes: self.codes.add(ahead), scales: self.scales.add(ahead), ..self } }
    }
}

/// Activations `[T, C]` as blocks of codes, in memory that is kept and reused: one instance a backend.
pub(crate) struct QuantizedActivations {
    /// `None` until the first `prepare`.
    bytes: Option<AlignedBytes>,
    shape: Shape,
    /// What rows are quantised with: all give the same bits.
    vectors: Vectors,
}

impl Default for QuantizedActivations {
    fn default() -> Self {
        Self { bytes: None, shape: Shape::default(), vectors: Isa::detect().vectors() }
    }
}

/// Quantises row 0 of `acts`, block by block.
///
/// # Safety
/// `x` holds whole blocks, as many as the row has at most; nobody else touches the row now.
#[inline(always)]
pub(super) unsafe fn quantize_row_with(acts: ActRows, x: &[f32], block: impl Fn(&[f32], &mut Codes) -> BlockSums) {
    for (b, x) in x.chunks_exact(BLOCK_COLS).enumerate() {
        // SAFETY: the caller's promise makes this the only reference to the block. The memory is initialised
        // (zeroed), aligned to 64, and any bit pattern is valid for the type.
        let sums = unsafe { block(x, &mut *acts.codes(0, b).cast::<Codes>().cast_mut()) };
        // SAFETY: as above, in the arrays behind the codes.
        unsafe { acts.store_sums(b, sums) };
    }
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

    /// Quantises row `t`, `x` `[C]` (of the shape given to `prepare`).
    ///
    /// # Safety
    /// Called from several threads at once with different `t`, and not together with a reader.
    pub(crate) unsafe fn quantize_row(&self, t: usize, x: &[f32]) {
        assert!(x.len() == self.shape.blocks_per_row * BLOCK_COLS, "a row of another shape than was prepared");
        let acts = self.rows_from(t);
        // SAFETY: the row is inside the range that `prepare` sized for this shape; the caller keeps rows disjoint
        // between threads. The processor has what the quantiser was picked for.
        unsafe {
            match self.vectors {
                #[cfg(target_arch = "x86_64")]
                Vectors::Avx512 => super::activations_avx512::quantize_row(acts, x),
                #[cfg(target_arch = "x86_64")]
                Vectors::Avx2 => super::activations_avx2::quantize_row(acts, x),
                #[cfg(target_arch = "aarch64")]
                Vectors::Neon => super::activations_neon::quantize_row(acts, x),
                _ => quantize_row_with(acts, x, quantize_block),
            }
        }
    }

    /// The rows from `t` on.
    pub(super) fn rows_from(&self, t: usize) -> ActRows {
        let Shape { rows, num_blocks, row_stride, block_stride, tile_stride, .. } = self.shape;
        assert!(t < rows);
        let base = self.bytes.as_ref().map_or(std::ptr::dangling(), AlignedBytes::as_ptr);
        // SAFETY: the parts of row `t` start inside the range that `prepare` sized.
        unsafe {
            ActRows {
                codes: base.cast(),
                scales: base.add(num_blocks * size_of::<Codes>()).cast(),
                array_stride: num_blocks,
                row_stride,
                block_stride,
                tile_stride,
            }
            .skip(t, 0)
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

impl ActRows {
    /// Writes what goes with block `block` of the first row.
    ///
    /// # Safety
    /// The block exists and nobody else touches it now.
    unsafe fn store_sums(self, block: usize, BlockSums { d, sum_q: [low, high] }: BlockSums) {
        // SAFETY: the caller's promise; the arrays lie in memory that is written through this pointer only here.
        unsafe {
            let at = |array: usize| self.scales.add(array * self.array_stride + self.index(0, block)).cast_mut();
            at(0).write(d);
            for (i, sum) in [low + high, low, high].into_iter().enumerate() {
                at(SUM_X + i).write(d * sum as f32);
                at(NEG_SUM_Q + i).cast::<i32>().write(-sum);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::layout::formats::{Q2_K, Q4_0};
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

    fn code(codes: &Codes, k: usize) -> i32 {
        (i32::from(codes.0[Codes::at(k)]) << FINE_BITS) + i32::from(codes.0[Codes::at(k) + Codes::LOW])
    }

    #[test]
    fn both_layouts_hold_what_the_scalar_code_says() {
        for num_rows in [1, MAX_ROWS_IN_LINE, MAX_ROWS_IN_LINE + 1, 16, 40] {
            let cols = 1120;
            let mut x = rows(7, cols * num_rows);
            x[32..64].fill(0.0);
            x[64..96].fill(1e-38);
            x[130] = f32::NAN;
            x[164] = f32::INFINITY;
            x[200] = f32::NEG_INFINITY;
            x[230] = f32::MAX;
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                let mut vector = QuantizedActivations { vectors: isa.vectors(), ..Default::default() };
                vector.prepare(num_rows, cols).unwrap();
                for (t, x) in x.chunks_exact(cols).enumerate() {
                    // SAFETY: one thread.
                    unsafe { vector.quantize_row(t, x) };
                }
                check_against_scalar(&vector, &x, cols);
            }
        }
    }

    fn check_against_scalar(vector: &QuantizedActivations, x: &[f32], cols: usize) {
        for (t, x) in x.chunks_exact(cols).enumerate() {
            for (b, x) in x.chunks_exact(32).enumerate() {
                let mut codes = Codes::ZERO;
                let BlockSums { d, sum_q } = quantize_block(x, &mut codes);
                let acts = vector.rows_from(t / 16 * 16);
                // SAFETY: the row is in the tile, the block in the row.
                unsafe {
                    assert_eq!(*acts.codes(t % 16, b).cast::<Codes>(), codes, "row {t} block {b}");
                    assert_eq!(acts.scale(t % 16, b).to_bits(), d.to_bits(), "row {t} block {b}");
                    let whole = acts.skip(t % 16, b);
                    assert_eq!(whole.neg_sum_q::<Q4_0>(0, 0, 0), -sum_q[0] - sum_q[1]);
                    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                    assert!(same(whole.sum_x::<Q4_0>(0, 0, 0), d * (sum_q[0] + sum_q[1]) as f32));
                    for (g, sum_q) in sum_q.into_iter().enumerate() {
                        assert_eq!(whole.neg_sum_q::<Q2_K>(0, 0, g), -sum_q);
                        assert!(same(whole.sum_x::<Q2_K>(0, 0, g), d * sum_q as f32));
                    }
                }
            }
        }
    }

    #[test]
    fn codes_are_within_half_a_step_beside_a_huge_value() {
        let mut x = [0.5f32; 32];
        x[8] = -100.0;
        x[9] = -0.123;
        x[20] = 99.9;
        let mut codes = Codes::ZERO;
        let sums = quantize_block(&x, &mut codes);
        for (k, &x) in x.iter().enumerate() {
            let got = code(&codes, k) as f32 * sums.d;
            assert!((got - x).abs() <= 0.501 * 100.0 / 1019.0, "element {k}: {got} for {x}");
        }
        assert_eq!(code(&codes, 8), -1019);
    }

    #[test]
    fn codes_are_the_nearest_and_sums_are_theirs() {
        let mut x = [0.0f32; 32];
        x[3] = -1019.0;
        x[4] = 2.5; // halfway: to even
        x[5] = 3.5;
        x[20] = 1018.6;
        x[31] = -4.0;
        let mut codes = Codes::ZERO;
        let sums = quantize_block(&x, &mut codes);
        let got = [3, 4, 5, 20, 31].map(|k| code(&codes, k));
        assert_eq!((sums.d, got), (1.0, [-1019, 2, 4, 1019, -4]));
        assert_eq!(sums.sum_q, [-1013, 1015]);
        assert!(codes.0.iter().all(|&c| c >= -127));
    }

    #[test]
    fn non_finite_blocks_have_non_finite_scales() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0f32; 32];
            x[9] = bad;
            let mut codes = Codes([1; 64]);
            assert!(!quantize_block(&x, &mut codes).d.is_finite());
            assert_eq!(codes, Codes::ZERO);
        }
    }

    #[test]
    fn memory_grows_only_past_the_largest_shape() {
        let mut quantized = QuantizedActivations::default();
        quantized.prepare(13, 64).unwrap();
        let held = quantized.len_bytes();
        assert_eq!(held, 16 * 2 * (64 + 4 * ARRAYS));
        quantized.prepare(3, 64).unwrap();
        quantized.prepare(12, 64).unwrap();
        quantized.prepare(20, 32).unwrap();
        assert_eq!(quantized.len_bytes(), held);
        assert!(quantized.prepare(1, 33).is_err());
        assert!(quantized.prepare(usize::MAX / 2, 64).is_err());
    }
}
