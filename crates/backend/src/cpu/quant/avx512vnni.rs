//! Kernels for AVX-512 with VNNI: a panel's 16 rows are one vector's lanes, and `vpdpbusd` multiplies
//! unsigned weight codes with signed activation codes straight into i32 (no saturation).

use super::activations::{ActRows, Codes, FINE_BITS};
use super::layout::{BLOCK_COLS, Format, ScaleKind};
use super::tile::{Chunk, FloatKernel, FloatRows, IntKernel, Minimum, OutRows, PANELS, Panel, Start};
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

/// AVX-512 F, BW, DQ, VL, VNNI.
pub(super) struct Avx512Vnni;

/// Up to this many rows take a panel as it is packed: in pieces, for which it lies in the first-level cache.
/// To unpack it again for each costs less than to write it out wide.
const FEW_ROWS: usize = 16;
/// Blocks whose weights are held in f32 at once.
const FLOAT_BLOCKS: usize = 8;
/// Rows of activations of the largest micro-kernel.
const ROWS: usize = 8;

/// Where a micro-kernel finds a panel's codes and scales.
trait Source {
    type F: Format;
    /// Operands of a block.
    unsafe fn operands(&self, block: usize) -> [__m512i; 8];
    /// Scale and centred minimum of a group.
    unsafe fn scales(&self, group: usize) -> (__m512, __m512);
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

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn load(base: *const u8, vector: usize) -> __m512i {
    // SAFETY: the caller reads inside a block, whose vectors are aligned to 64.
    unsafe { _mm512_load_si512(base.add(64 * vector).cast()) }
}

/// Operands of a packed block of `BITS`-wide codes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn unpack<const BITS: usize>(block: *const u8) -> [__m512i; 8] {
    let mut q = [_mm512_setzero_si512(); 8];
    // SAFETY: a block has 64 * BITS bytes.
    unsafe {
        if BITS == 8 {
            for (i, q) in q.iter_mut().enumerate() {
                *q = load(block, i);
            }
            return q;
        }
        if BITS >= 4 {
            let mask = _mm512_set1_epi8(15);
            for i in 0..4 {
                let v = load(block, i);
                q[i] = _mm512_and_si512(v, mask);
                q[i + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(v), mask);
            }
        } else {
            two_bits([load(block, 0), load(block, 1)], 0, &mut q);
        }
        match BITS {
            3 => one_bit(load(block, 2), 2, &mut q),
            5 => one_bit(load(block, 4), 4, &mut q),
            6 => two_bits([load(block, 4), load(block, 5)], 4, &mut q),
            _ => {}
        }
    }
    q
}

/// Ors a 2-bit plane into `q` at bit `at`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn two_bits(v: [__m512i; 2], at: i32, q: &mut [__m512i; 8]) {
    let mask = _mm512_set1_epi16(0x0303 << at);
    for (i, (from, q)) in [0, 2, 4, 6].into_iter().cycle().zip(q).enumerate() {
        *q = or_masked(*q, shift_bits(v[i / 4], from, at), mask);
    }
}

/// Ors a 1-bit plane into `q` at bit `at`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn one_bit(v: __m512i, at: i32, q: &mut [__m512i; 8]) {
    let mask = _mm512_set1_epi16(0x0101 << at);
    for (from, q) in (0..8).zip(q) {
        *q = or_masked(*q, shift_bits(v, from, at), mask);
    }
}

/// `q | (v & mask)`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn or_masked(q: __m512i, v: __m512i, mask: __m512i) -> __m512i {
    _mm512_ternarylogic_epi64::<0b1111_1000>(q, v, mask)
}

/// Moves bit `from` to bit `to`; bits of the neighbouring byte come along and are masked by the caller.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn shift_bits(v: __m512i, from: i32, to: i32) -> __m512i {
    if from >= to {
        _mm512_srl_epi16(v, _mm_cvtsi32_si128(from - to))
    } else {
        _mm512_sll_epi16(v, _mm_cvtsi32_si128(to - from))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: the caller reads 16 f16 there.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn bytes(at: *const u8) -> __m512i {
    // SAFETY: the caller reads 16 bytes there.
    unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())) }
}

/// Scale and plain minimum of a packed group, exact.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn packed_scales<F: Format>(panel: Panel, group: usize) -> (__m512, __m512) {
    let layout = F::LAYOUT;
    let negate = _mm512_set1_ps(-0.0);
    let minus_zero_code = _mm512_set1_ps(-((1u32 << layout.log2_zero) as f32));
    // SAFETY: the caller's group lies in the panel.
    unsafe {
        let record = panel.base.add(panel.shape.scales_at + group * layout.scale.bytes());
        let super_at = panel.shape.supers_at + group * layout.group / 256 * layout.scale.super_bytes();
        let supers = panel.base.add(super_at);
        match layout.scale {
            ScaleKind::Half => {
                let d = halves(record);
                (d, _mm512_mul_ps(d, minus_zero_code))
            }
            ScaleKind::HalfPair => (halves(record), halves(record.add(32))),
            ScaleKind::BytePair => {
                let d = _mm512_mul_ps(halves(supers), _mm512_cvtepi32_ps(bytes(record)));
                let m = _mm512_mul_ps(halves(supers.add(32)), _mm512_cvtepi32_ps(bytes(record.add(16))));
                (d, _mm512_xor_ps(m, negate))
            }
            ScaleKind::NibblePair => {
                let pair = bytes(record);
                let scale = _mm512_and_si512(pair, _mm512_set1_epi32(15));
                let d = _mm512_mul_ps(halves(supers), _mm512_cvtepi32_ps(scale));
                let min = _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(pair));
                (d, _mm512_xor_ps(_mm512_mul_ps(halves(supers.add(32)), min), negate))
            }
            ScaleKind::Signed => {
                let scale = _mm512_cvtepi8_epi32(_mm_loadu_si128(record.cast()));
                let d = _mm512_mul_ps(halves(supers), _mm512_cvtepi32_ps(scale));
                (d, _mm512_mul_ps(d, minus_zero_code))
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
pub(super) unsafe fn packed_operands<F: Format>(panel: Panel, block: usize) -> [__m512i; 8] {
    // SAFETY: the caller's block lies in the panel.
    unsafe {
        let at = panel.base.add(block * F::LAYOUT.block_bytes());
        match F::LAYOUT.bits {
            2 => unpack::<2>(at),
            3 => unpack::<3>(at),
            4 => unpack::<4>(at),
            5 => unpack::<5>(at),
            6 => unpack::<6>(at),
            _ => unpack::<8>(at),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn centred<F: Format>((d, m): (__m512, __m512)) -> (__m512, __m512) {
    (d, _mm512_fmadd_ps(d, _mm512_set1_ps((1u32 << F::LAYOUT.log2_zero) as f32), m))
}

impl<F: Format> Source for Packed<F> {
    type F = F;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn operands(&self, block: usize) -> [__m512i; 8] {
        // SAFETY: as promised to this method.
        unsafe { packed_operands::<F>(self.panel, block) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn scales(&self, group: usize) -> (__m512, __m512) {
        // SAFETY: as promised to this method.
        centred::<F>(unsafe { packed_scales::<F>(self.panel, group) })
    }
}

impl<F: Format> Source for Widened<'_, F> {
    type F = F;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn operands(&self, block: usize) -> [__m512i; 8] {
        // SAFETY: the chunk has this block.
        unsafe { unpack::<8>(self.chunk.q.as_ptr().add(8 * block).cast()) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn scales(&self, group: usize) -> (__m512, __m512) {
        // SAFETY: the chunk has this group.
        unsafe {
            let d = _mm512_load_ps(self.chunk.d.as_ptr().add(group).cast());
            (d, _mm512_load_ps(self.chunk.m.as_ptr().add(group).cast()))
        }
    }
}

/// `sum` and the products of a group's operands with one plane of activation codes, each in its lane.
///
/// # Safety
/// `codes` is a block's high codes or its low ones.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn add_dot<F: Format>(mut sum: __m512i, q: &[__m512i; 8], g: usize, codes: *const i8) -> __m512i {
    let first = g * F::LAYOUT.group / 4;
    for (i, &q) in q.iter().enumerate().skip(first).take(F::LAYOUT.group / 4) {
        // SAFETY: four codes an operand.
        let operand = unsafe { _mm512_set1_epi32(codes.add(Codes::at(4 * i)).cast::<i32>().read_unaligned()) };
        sum = _mm512_dpbusd_epi32(sum, q, operand);
    }
    sum
}

/// Exact sum over a group of `(q_w - zero) q_x` for row `t`.
///
/// # Safety
/// The row has the block.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn dot<F: Format>(q: &[__m512i; 8], acts: ActRows, t: usize, block: usize, g: usize) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let codes = acts.codes(t, block);
        let start = _mm512_set1_epi32(acts.neg_sum_q::<F>(t, block, g) << F::LAYOUT.log2_zero);
        let high = add_dot::<F>(_mm512_setzero_si512(), q, g, codes);
        let low = add_dot::<F>(start, q, g, codes.add(Codes::LOW));
        _mm512_add_epi32(_mm512_slli_epi32::<FINE_BITS>(high), low)
    }
}

/// One block for `T` rows of activations.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn block_step<S: Source, const T: usize>(src: &S, block: usize, acts: ActRows, acc: &mut [__m512; T]) {
    let layout = S::F::LAYOUT;
    // SAFETY: source and activations have this block.
    unsafe {
        let q = src.operands(block);
        for g in 0..layout.groups() {
            let (d, m) = src.scales(block * layout.groups() + g);
            for (t, acc) in acc.iter_mut().enumerate() {
                let dot = _mm512_cvtepi32_ps(dot::<S::F>(&q, acts, t, block, g));
                *acc = _mm512_fmadd_ps(dot, _mm512_mul_ps(d, _mm512_set1_ps(acts.scale(t, block))), *acc);
                if layout.scale.has_min() {
                    *acc = _mm512_fmadd_ps(m, _mm512_set1_ps(acts.sum_x::<S::F>(t, block, g)), *acc);
                }
            }
        }
    }
}

/// Lanes inside a result of `width` columns.
fn lane_mask(width: usize) -> u16 {
    u16::MAX >> (16 - width)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn load_acc<const T: usize>(out: OutRows, start: Start) -> [__m512; T] {
    let mut acc = [_mm512_setzero_ps(); T];
    if start == Start::FromOut {
        let mask = lane_mask(out.width);
        for (t, acc) in acc.iter_mut().enumerate() {
            // SAFETY: row `t` exists; lanes outside the width are not touched.
            *acc = unsafe { _mm512_maskz_loadu_ps(mask, out.row(t)) };
        }
    }
    acc
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn store_acc<const T: usize>(out: OutRows, acc: &[__m512; T]) {
    let mask = lane_mask(out.width);
    for (t, acc) in acc.iter().enumerate() {
        // SAFETY: row `t` exists; lanes outside the width are not touched.
        unsafe { _mm512_mask_storeu_ps(out.row(t), mask, *acc) };
    }
}

/// `T` rows over a packed panel; returns `T`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn few_rows<F: Format, const T: usize>(panel: Panel, acts: ActRows, out: OutRows) -> usize {
    let src = Packed::<F> { panel, format: PhantomData };
    // SAFETY: as promised to `IntKernel::few`.
    unsafe {
        let mut acc = load_acc::<T>(out, Start::Zero);
        for block in 0..panel.shape.num_blocks {
            panel.prefetch::<F>(1, block);
            block_step(&src, block, acts, &mut acc);
        }
        store_acc(out, &acc);
    }
    T
}

/// `T` rows over a chunk.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn many_rows<F: Format, const T: usize>(
    chunk: &Chunk,
    num_blocks: usize,
    acts: ActRows,
    out: OutRows,
    start: Start,
) {
    let src = Widened::<F> { chunk, format: PhantomData };
    // SAFETY: as promised to `IntKernel::rows`.
    unsafe {
        let mut acc = load_acc::<T>(out, start);
        for block in 0..num_blocks {
            block_step(&src, block, acts, &mut acc);
        }
        store_acc(out, &acc);
    }
}

/// Widens the scales of a panel's block `block` into the chunk's groups of block `at`.
///
/// # Safety
/// The panel has the block, the chunk room for it.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
pub(super) unsafe fn widen_scales<F: Format>(
    panel: Panel,
    block: usize,
    minimum: Minimum,
    chunk: &mut Chunk,
    at: usize,
) {
    let groups = F::LAYOUT.groups();
    for g in 0..groups {
        // SAFETY: the caller's promise.
        unsafe {
            let mut scales = packed_scales::<F>(panel, block * groups + g);
            if minimum == Minimum::Centred {
                scales = centred::<F>(scales);
            }
            _mm512_store_ps(chunk.d[at * groups + g].as_mut_ptr(), scales.0);
            _mm512_store_ps(chunk.m[at * groups + g].as_mut_ptr(), scales.1);
        }
    }
}

/// Widens blocks of a panel.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn widen<F: Format>(panel: Panel, blocks: Range<usize>, minimum: Minimum, chunk: &mut Chunk) {
    for (at, block) in blocks.enumerate() {
        // SAFETY: the panel has the block; the chunk has room for it.
        unsafe {
            panel.prefetch::<F>(PANELS, block);
            let q = packed_operands::<F>(panel, block);
            for (operand, q) in chunk.q[8 * at..].iter_mut().zip(q) {
                _mm512_store_si512(operand.as_mut_ptr().cast(), q);
            }
            widen_scales::<F>(panel, block, minimum, chunk, at);
        }
    }
}

impl IntKernel for Avx512Vnni {
    const ROWS: usize = ROWS;

    fn few_up_to<F: Format>() -> usize {
        FEW_ROWS
    }

    unsafe fn few<F: Format>(panel: Panel, acts: ActRows, num_t: usize, out: OutRows) {
        let mut t = 0;
        while t < num_t {
            // SAFETY: as promised to this method; rows `t..` exist.
            unsafe {
                let (acts, out) = (acts.skip(t, 0), OutRows { ptr: out.row(t), ..out });
                t += match num_t - t {
                    1 => few_rows::<F, 1>(panel, acts, out),
                    2 => few_rows::<F, 2>(panel, acts, out),
                    3 => few_rows::<F, 3>(panel, acts, out),
                    4..ROWS => few_rows::<F, 4>(panel, acts, out),
                    _ => few_rows::<F, ROWS>(panel, acts, out),
                };
            }
        }
    }

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
        // SAFETY: as promised to this method.
        unsafe {
            match num_t {
                1 => many_rows::<F, 1>(chunk, num_blocks, acts, out, start),
                2 => many_rows::<F, 2>(chunk, num_blocks, acts, out, start),
                3 => many_rows::<F, 3>(chunk, num_blocks, acts, out, start),
                4 => many_rows::<F, 4>(chunk, num_blocks, acts, out, start),
                5 => many_rows::<F, 5>(chunk, num_blocks, acts, out, start),
                6 => many_rows::<F, 6>(chunk, num_blocks, acts, out, start),
                7 => many_rows::<F, 7>(chunk, num_blocks, acts, out, start),
                _ => many_rows::<F, ROWS>(chunk, num_blocks, acts, out, start),
            }
        }
    }
}

/// A block's weights in f32: 32 columns of 16 rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn block_weights<F: Format>(chunk: &Chunk, block: usize, w: &mut [__m512; BLOCK_COLS]) {
    let src = Widened::<F> { chunk, format: PhantomData };
    // SAFETY: the chunk has the block.
    unsafe {
        let q = src.operands(block);
        for g in 0..F::LAYOUT.groups() {
            let (d, m) = src.scales(block * F::LAYOUT.groups() + g);
            for i in g * F::LAYOUT.group / 4..(g + 1) * F::LAYOUT.group / 4 {
                let byte = _mm512_set1_epi32(255);
                let codes = [
                    _mm512_and_si512(q[i], byte),
                    _mm512_and_si512(_mm512_srli_epi32::<8>(q[i]), byte),
                    _mm512_and_si512(_mm512_srli_epi32::<16>(q[i]), byte),
                    _mm512_srli_epi32::<24>(q[i]),
                ];
                for (j, code) in codes.into_iter().enumerate() {
                    w[4 * i + j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), d, m);
                }
            }
        }
    }
}

/// `T` rows over `num_blocks` blocks of f32 weights.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn float_rows<const T: usize>(w: &[[__m512; BLOCK_COLS]], x: FloatRows, out: OutRows, start: Start) {
    // SAFETY: as promised to `FloatKernel::many_f32`.
    unsafe {
        let mut acc = load_acc::<T>(out, start);
        for (block, w) in w.iter().enumerate() {
            let mut part = [_mm512_setzero_ps(); T];
            for (k, &w) in w.iter().enumerate() {
                for (t, part) in part.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*x.ptr.add(t * x.stride + block * BLOCK_COLS + k));
                    *part = _mm512_fmadd_ps(w, x, *part);
                }
            }
            for (acc, part) in acc.iter_mut().zip(part) {
                *acc = _mm512_add_ps(*acc, part);
            }
        }
        store_acc(out, &acc);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn many_f32<F: Format>(
    chunk: &Chunk,
    num_blocks: usize,
    x: FloatRows,
    num_t: usize,
    out: OutRows,
    start: Start,
) {
    let mut w = [[_mm512_setzero_ps(); BLOCK_COLS]; FLOAT_BLOCKS];
    for first in (0..num_blocks).step_by(FLOAT_BLOCKS) {
        let blocks = FLOAT_BLOCKS.min(num_blocks - first);
        let start = if first == 0 { start } else { Start::FromOut };
        // SAFETY: as promised to `FloatKernel::many_f32`; rows `t..` exist.
        unsafe {
            for (i, w) in w[..blocks].iter_mut().enumerate() {
                block_weights::<F>(chunk, first + i, w);
            }
            let mut t = 0;
            while t < num_t {
                let x = FloatRows { ptr: x.ptr.add(t * x.stride + first * BLOCK_COLS), ..x };
                let out = OutRows { ptr: out.row(t), ..out };
                if num_t - t >= 8 {
                    float_rows::<8>(&w[..blocks], x, out, start);
                    t += 8;
                } else {
                    float_rows::<1>(&w[..blocks], x, out, start);
                    t += 1;
                }
            }
        }
    }
}

impl FloatKernel for Avx512Vnni {
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
