//! Kernels for AVX2 with FMA and F16C. A panel's 16 rows are two halves of 8 lanes.
//!
//! Integer products are `maddubs` (unsigned weight codes times signed activation codes into i16
//! pairs). Its saturation is never met: with the high plane codes of up to 4 bits allow eight pair sums in
//! i16 (8 * 2 * 15 * 127 = 30480), 5 bits four, 6 bits two; with the low plane all allow eight. 8-bit codes go
//! in as magnitudes with the weight's sign moved to the activation (2 * 128 * 127 = 32512). Adding the pairs up
//! to i32 multiplies those of the high plane by its step.

use super::activations::{ActRows, Codes, FINE_BITS};
use super::layout::{BLOCK_COLS, Format, ScaleKind};
use super::tile::{Chunk, FloatKernel, FloatRows, IntKernel, Minimum, OutRows, PANELS, Panel, Start, WidenedPanel};
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

/// AVX2, FMA, F16C.
pub(super) struct Avx2;

/// Blocks whose weights are held in f32 at once.
const FLOAT_BLOCKS: usize = 8;
/// Rows of activations of the largest micro-kernel.
const ROWS: usize = 4;
/// Up to this many rows take a panel as it is packed, in pieces, for which it lies in the first-level cache.
const FEW_ROWS: usize = 8;

/// Where a micro-kernel finds a panel's codes and scales.
trait Source {
    type F: Format;
    /// Operands of half `half` (rows 0..8 or 8..16) of a block.
    unsafe fn operands(&self, block: usize, half: usize) -> [__m256i; 8];
    /// Scale and centred minimum of half `half` of a group.
    unsafe fn scales(&self, group: usize, half: usize) -> (__m256, __m256);
}

/// A panel as it is packed.
struct Packed<F> {
    panel: Panel,
    format: PhantomData<F>,
}

/// A widened chunk.
struct Widened<'a, F> {
    chunk: &'a Chunk,
    format: PhantomData<F>,
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn load(base: *const u8, vector: usize, half: usize) -> __m256i {
    // SAFETY: the caller reads inside a block, whose vectors are aligned to 64.
    unsafe { _mm256_load_si256(base.add(64 * vector + 32 * half).cast()) }
}

/// Operands of a packed block of `BITS`-wide codes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn unpack<const BITS: usize>(block: *const u8, half: usize) -> [__m256i; 8] {
    let mut q = [_mm256_setzero_si256(); 8];
    // SAFETY: a block has 64 * BITS bytes.
    unsafe {
        if BITS == 8 {
            for (i, q) in q.iter_mut().enumerate() {
                *q = load(block, i, half);
            }
            return q;
        }
        if BITS >= 4 {
            let mask = _mm256_set1_epi8(15);
            for i in 0..4 {
                let v = load(block, i, half);
                q[i] = _mm256_and_si256(v, mask);
                q[i + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask);
            }
        } else {
            let v = [load(block, 0, half), load(block, 1, half)];
            two_bits(v, 0, &mut q);
        }
        match BITS {
            3 => one_bit(load(block, 2, half), 2, &mut q),
            5 => one_bit(load(block, 4, half), 4, &mut q),
            6 => two_bits([load(block, 4, half), load(block, 5, half)], 4, &mut q),
            _ => {}
        }
    }
    q
}

/// Ors a 2-bit plane into `q` at bit `at`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn two_bits(v: [__m256i; 2], at: i32, q: &mut [__m256i; 8]) {
    let mask = _mm256_set1_epi16(0x0303 << at);
    for (i, (from, q)) in [0, 2, 4, 6].into_iter().cycle().zip(q).enumerate() {
        *q = _mm256_or_si256(*q, _mm256_and_si256(shift_bits(v[i / 4], from, at), mask));
    }
}

/// Ors a 1-bit plane into `q` at bit `at`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn one_bit(v: __m256i, at: i32, q: &mut [__m256i; 8]) {
    let mask = _mm256_set1_epi16(0x0101 << at);
    for (from, q) in (0..8).zip(q) {
        *q = _mm256_or_si256(*q, _mm256_and_si256(shift_bits(v, from, at), mask));
    }
}

/// Moves bit `from` to bit `to`; bits of the neighbouring byte come along and are masked by the caller.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn shift_bits(v: __m256i, from: i32, to: i32) -> __m256i {
    if from >= to {
        _mm256_srl_epi16(v, _mm_cvtsi32_si128(from - to))
    } else {
        _mm256_sll_epi16(v, _mm_cvtsi32_si128(to - from))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn halves(at: *const u8, half: usize) -> __m256 {
    // SAFETY: the caller reads 16 f16 there.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.add(16 * half).cast())) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn bytes(at: *const u8, half: usize) -> __m256i {
    // SAFETY: the caller reads 16 bytes there.
    unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.add(8 * half).cast())) }
}

/// Scale and plain minimum of a packed group, exact.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn packed_scales<F: Format>(panel: Panel, group: usize, half: usize) -> (__m256, __m256) {
    let layout = F::LAYOUT;
    let negate = _mm256_set1_ps(-0.0);
    let minus_zero_code = _mm256_set1_ps(-((1u32 << layout.log2_zero) as f32));
    // SAFETY: the caller's group lies in the panel.
    unsafe {
        let record = panel.base.add(panel.shape.scales_at + group * layout.scale.bytes());
        let super_at = panel.shape.supers_at + group * layout.group / 256 * layout.scale.super_bytes();
        let supers = panel.base.add(super_at);
        match layout.scale {
            ScaleKind::Half => {
                let d = halves(record, half);
                (d, _mm256_mul_ps(d, minus_zero_code))
            }
            ScaleKind::HalfPair => (halves(record, half), halves(record.add(32), half)),
            ScaleKind::BytePair => {
                let (scale, min) = (bytes(record, half), bytes(record.add(16), half));
                let d = _mm256_mul_ps(halves(supers, half), _mm256_cvtepi32_ps(scale));
                let m = _mm256_mul_ps(halves(supers.add(32), half), _mm256_cvtepi32_ps(min));
                (d, _mm256_xor_ps(m, negate))
            }
            ScaleKind::NibblePair => {
                let pair = bytes(record, half);
                let scale = _mm256_and_si256(pair, _mm256_set1_epi32(15));
                let d = _mm256_mul_ps(halves(supers, half), _mm256_cvtepi32_ps(scale));
                let min = _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(pair));
                (d, _mm256_xor_ps(_mm256_mul_ps(halves(supers.add(32), half), min), negate))
            }
            ScaleKind::Signed => {
                let scale = _mm256_cvtepi8_epi32(_mm_loadl_epi64(record.add(8 * half).cast()));
                let d = _mm256_mul_ps(halves(supers, half), _mm256_cvtepi32_ps(scale));
                (d, _mm256_mul_ps(d, minus_zero_code))
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn packed_operands<F: Format>(panel: Panel, block: usize, half: usize) -> [__m256i; 8] {
    // SAFETY: the caller's block lies in the panel.
    unsafe {
        let at = panel.base.add(block * F::LAYOUT.block_bytes());
        match F::LAYOUT.bits {
            2 => unpack::<2>(at, half),
            3 => unpack::<3>(at, half),
            4 => unpack::<4>(at, half),
            5 => unpack::<5>(at, half),
            6 => unpack::<6>(at, half),
            _ => unpack::<8>(at, half),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn centred<F: Format>((d, m): (__m256, __m256)) -> (__m256, __m256) {
    (d, _mm256_fmadd_ps(d, _mm256_set1_ps((1u32 << F::LAYOUT.log2_zero) as f32), m))
}

impl<F: Format> Source for Packed<F> {
    type F = F;

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn operands(&self, block: usize, half: usize) -> [__m256i; 8] {
        // SAFETY: as promised to this method.
        unsafe { packed_operands::<F>(self.panel, block, half) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn scales(&self, group: usize, half: usize) -> (__m256, __m256) {
        // SAFETY: as promised to this method.
        unsafe { centred::<F>(packed_scales::<F>(self.panel, group, half)) }
    }
}

impl<F: Format> Source for Widened<'_, F> {
    type F = F;

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn operands(&self, block: usize, half: usize) -> [__m256i; 8] {
        // SAFETY: the chunk has this block.
        unsafe { unpack::<8>(self.chunk.q.as_ptr().add(8 * block).cast(), half) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn scales(&self, group: usize, half: usize) -> (__m256, __m256) {
        // SAFETY: the chunk has this group.
        unsafe {
            let d = _mm256_load_ps(self.chunk.d.as_ptr().add(group).cast::<f32>().add(8 * half));
            (d, _mm256_load_ps(self.chunk.m.as_ptr().add(group).cast::<f32>().add(8 * half)))
        }
    }
}

/// `sum` and `step` times the products of a group's operands with one plane of activation codes, each in its
/// lane; `in_i16` products at a time fit into i16.
///
/// # Safety
/// `codes` is a group's high codes or its low ones.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn add_dot(mut sum: __m256i, q: &[__m256i], codes: *const i8, in_i16: usize, step: __m256i) -> __m256i {
    // SAFETY: four codes an operand.
    let operand = |i: usize| unsafe { _mm256_set1_epi32(codes.add(Codes::at(4 * i)).cast::<i32>().read_unaligned()) };
    for (run, q) in q.chunks(in_i16).enumerate() {
        let mut pairs = _mm256_maddubs_epi16(q[0], operand(run * in_i16));
        for (i, &q) in q.iter().enumerate().skip(1) {
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(q, operand(run * in_i16 + i)));
        }
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, step));
    }
    sum
}

/// Exact sum over a group of `(q_w - zero) q_x` for row `t`; `q` are the group's operands, of fewer than 8 bits.
///
/// # Safety
/// The row has the block.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn dot<F: Format>(q: &[__m256i], acts: ActRows, t: usize, block: usize, g: usize) -> __m256i {
    let in_i16 = match F::LAYOUT.bits {
        5 => 4,
        6 => 2,
        _ => 8,
    };
    // SAFETY: the caller's promise; the groups' codes lie 32 apart where there are two.
    unsafe {
        let codes = acts.codes(t, block).add(32 * g);
        let start = _mm256_set1_epi32(acts.neg_sum_q::<F>(t, block, g) << F::LAYOUT.log2_zero);
        let high = add_dot(start, q, codes, in_i16, _mm256_set1_epi16(1 << FINE_BITS));
        add_dot(high, q, codes.add(Codes::LOW), 8, _mm256_set1_epi16(1))
    }
}

/// Exact products of a block of 8-bit codes with `T` rows: a weight vector is made ready once for all of them.
///
/// # Safety
/// The rows have the block.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn dots_of_bytes<const T: usize>(q: &[__m256i; 8], acts: ActRows, block: usize) -> [__m256i; T] {
    let (one, step) = (_mm256_set1_epi16(1), _mm256_set1_epi16(1 << FINE_BITS));
    let mut sums = [_mm256_setzero_si256(); T];
    // Low codes' pairs are at most 2 * 128 * 4: eight of them fit into i16.
    let mut low = [_mm256_setzero_si256(); T];
    for (i, &q) in q.iter().enumerate() {
        let w = _mm256_xor_si256(q, _mm256_set1_epi8(-128));
        let magnitude = _mm256_abs_epi8(w);
        for (t, (sum, low)) in sums.iter_mut().zip(&mut low).enumerate() {
            // SAFETY: row `t` has the block, which has four codes an operand in each plane.
            let [x, x_low] = unsafe {
                let codes = acts.codes(t, block).add(Codes::at(4 * i));
                [codes, codes.add(Codes::LOW)].map(|at| _mm256_set1_epi32(at.cast::<i32>().read_unaligned()))
            };
            let pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w));
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, step));
            *low = _mm256_add_epi16(*low, _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x_low, w)));
        }
    }
    std::array::from_fn(|t| _mm256_add_epi32(sums[t], _mm256_madd_epi16(low[t], one)))
}

/// One block of one half for `T` rows of activations.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn block_step<S: Source, const T: usize>(
    src: &S,
    block: usize,
    half: usize,
    acts: ActRows,
    acc: &mut [__m256; T],
) {
    let layout = S::F::LAYOUT;
    // SAFETY: source and activations have this block.
    unsafe {
        let q = src.operands(block, half);
        let of_bytes = (layout.bits == 8).then(|| dots_of_bytes::<T>(&q, acts, block));
        for g in 0..layout.groups() {
            let (d, m) = src.scales(block * layout.groups() + g, half);
            let q = &q[g * layout.group / 4..(g + 1) * layout.group / 4];
            for (t, acc) in acc.iter_mut().enumerate() {
                let dot = match &of_bytes {
                    Some(dots) => dots[t],
                    None => dot::<S::F>(q, acts, t, block, g),
                };
                let scale = _mm256_mul_ps(d, _mm256_set1_ps(acts.scale(t, block)));
                *acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, *acc);
                if layout.scale.has_min() {
                    *acc = _mm256_fmadd_ps(m, _mm256_set1_ps(acts.sum_x::<S::F>(t, block, g)), *acc);
                }
            }
        }
    }
}

/// Lanes of `half` that are inside a result of `width` columns.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn lane_mask(width: usize, half: usize) -> __m256i {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    #[allow(clippy::cast_possible_truncation)] // at most 16
    let valid = width.saturating_sub(8 * half) as i32;
    _mm256_cmpgt_epi32(_mm256_set1_epi32(valid), lanes)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn load_acc<const T: usize>(out: OutRows, half: usize, start: Start) -> [__m256; T] {
    let mut acc = [_mm256_setzero_ps(); T];
    if start == Start::FromOut {
        let mask = lane_mask(out.width, half);
        for (t, acc) in acc.iter_mut().enumerate() {
            // SAFETY: row `t` exists; lanes outside the width are not touched.
            *acc = unsafe { _mm256_maskload_ps(out.row(t).wrapping_add(8 * half), mask) };
        }
    }
    acc
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn store_acc<const T: usize>(out: OutRows, half: usize, acc: &[__m256; T]) {
    let mask = lane_mask(out.width, half);
    for (t, acc) in acc.iter().enumerate() {
        // SAFETY: row `t` exists; lanes outside the width are not touched.
        unsafe { _mm256_maskstore_ps(out.row(t).wrapping_add(8 * half), mask, *acc) };
    }
}

/// `T` rows over a packed panel, both halves in step so that memory is read front to back.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn few_rows<F: Format, const T: usize>(panel: Panel, acts: ActRows, out: OutRows) {
    let src = Packed::<F> { panel, format: PhantomData };
    // SAFETY: as promised to `IntKernel::few`.
    unsafe {
        let mut low = load_acc::<T>(out, 0, Start::Zero);
        let mut high = low;
        for block in 0..panel.shape.num_blocks {
            panel.prefetch::<F>(1, block);
            block_step(&src, block, 0, acts, &mut low);
            block_step(&src, block, 1, acts, &mut high);
        }
        store_acc(out, 0, &low);
        store_acc(out, 1, &high);
    }
}

/// `T` rows over a chunk, one half after the other.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn many_rows<F: Format, const T: usize>(
    chunk: &Chunk,
    num_blocks: usize,
    acts: ActRows,
    out: OutRows,
    start: Start,
) {
    let src = Widened::<F> { chunk, format: PhantomData };
    for half in 0..2 {
        // SAFETY: as promised to `IntKernel::many`.
        unsafe {
            let mut acc = load_acc::<T>(out, half, start);
            for block in 0..num_blocks {
                block_step(&src, block, half, acts, &mut acc);
            }
            store_acc(out, half, &acc);
        }
    }
}

/// Widens blocks of a panel.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen<F: Format>(panel: Panel, blocks: Range<usize>, minimum: Minimum, chunk: &mut Chunk) {
    let groups = F::LAYOUT.groups();
    for (at, block) in blocks.enumerate() {
        panel.prefetch::<F>(PANELS, block);
        for half in 0..2 {
            // SAFETY: the panel has the block; the chunk has room for it.
            unsafe {
                let q = packed_operands::<F>(panel, block, half);
                for (operand, q) in chunk.q[8 * at..].iter_mut().zip(q) {
                    _mm256_store_si256(operand.as_mut_ptr().add(32 * half).cast(), q);
                }
                for g in 0..groups {
                    let mut scales = packed_scales::<F>(panel, block * groups + g, half);
                    if minimum == Minimum::Centred {
                        scales = centred::<F>(scales);
                    }
                    _mm256_store_ps(chunk.d[at * groups + g].as_mut_ptr().add(8 * half), scales.0);
                    _mm256_store_ps(chunk.m[at * groups + g].as_mut_ptr().add(8 * half), scales.1);
                }
            }
        }
    }
}

impl IntKernel for Avx2 {
    const FEW: usize = FEW_ROWS;

    unsafe fn few<F: Format>(panel: Panel, acts: ActRows, num_t: usize, out: OutRows) {
        for t in (0..num_t).step_by(ROWS) {
            // SAFETY: as promised to this method; rows `t..` exist.
            unsafe {
                let (acts, out) = (acts.skip(t, 0), OutRows { ptr: out.row(t), ..out });
                match num_t - t {
                    1 => few_rows::<F, 1>(panel, acts, out),
                    2 => few_rows::<F, 2>(panel, acts, out),
                    3 => few_rows::<F, 3>(panel, acts, out),
                    _ => few_rows::<F, ROWS>(panel, acts, out),
                }
            }
        }
    }

    unsafe fn widen<F: Format>(panel: Panel, blocks: Range<usize>, chunk: &mut Chunk) {
        // SAFETY: as promised to this method.
        unsafe { widen::<F>(panel, blocks, Minimum::Centred, chunk) };
    }

    unsafe fn many<F: Format>(
        panels: &[WidenedPanel<'_>],
        num_blocks: usize,
        acts: ActRows,
        num_t: usize,
        start: Start,
    ) {
        for t in (0..num_t).step_by(ROWS) {
            for panel in panels {
                // SAFETY: rows `t..` exist; as promised to this method.
                unsafe {
                    let (chunk, acts) = (panel.chunk, acts.skip(t, 0));
                    let out = OutRows { ptr: panel.out.row(t), ..panel.out };
                    match num_t - t {
                        1 => many_rows::<F, 1>(chunk, num_blocks, acts, out, start),
                        2 => many_rows::<F, 2>(chunk, num_blocks, acts, out, start),
                        3 => many_rows::<F, 3>(chunk, num_blocks, acts, out, start),
                        _ => many_rows::<F, ROWS>(chunk, num_blocks, acts, out, start),
                    }
                }
            }
        }
    }
}

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
