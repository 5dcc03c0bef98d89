//! Integer kernels with 256-bit vectors. What differs between the sets that have them is how bytes are multiplied
//! ([`Products`]); this file has that of plain AVX2, `avxvnni` that of AVX-VNNI.
//!
//! AVX2's products are `maddubs` (unsigned weight codes times signed activation codes into i16
//! pairs). Its saturation is never met: with the high plane codes of up to 4 bits allow eight pair sums in
//! i16 (8 * 2 * 15 * 127 = 30480), 5 bits four, 6 bits two; with the low plane all allow eight. 8-bit codes go
//! in as magnitudes with the weight's sign moved to the activation (2 * 128 * 127 = 32512). Adding the pairs up
//! to i32 multiplies those of the high plane by its step.

use super::activations::{ActRows, Codes, FINE_BITS};
use super::avx2_panel::{Packed, Source, Widened, load_acc, store_acc, widen};
use super::layout::Format;
use super::tile::{Chunk, IntKernel, Minimum, OutRows, Panel, Start};
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

/// AVX2, FMA, F16C.
pub(super) struct Avx2;

/// Rows of activations of the largest micro-kernel.
const ROWS: usize = 4;
/// Up to this many rows take a panel as it is packed, in pieces, for which it lies in the first-level cache.
const FEW_ROWS: usize = 8;

/// The byte products of one instruction set, and its entries into the loops that all sets share: those are
/// `inline(always)`, so that they are compiled for the set of the function that they are called from.
///
/// # Safety
/// All methods: the processor has the set; pointers are valid for what the arguments say.
pub(super) trait Products {
    /// Exact sums over group `g` of a block of `(q_w - zero) q_x` for rows `0..T`, each in its lane; `q` are the
    /// block's operands.
    unsafe fn dots<F: Format, const T: usize>(q: &[__m256i; 8], acts: ActRows, block: usize, g: usize) -> [__m256i; T];
    /// [`few_rows`], compiled for this set.
    unsafe fn few_rows<F: Format, const T: usize>(panel: Panel, acts: ActRows, out: OutRows);
    /// [`many_rows`], compiled for this set.
    unsafe fn many_rows<F: Format, const T: usize>(
        chunk: &Chunk,
        num_blocks: usize,
        acts: ActRows,
        out: OutRows,
        start: Start,
    );
}

impl Products for Avx2 {
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn dots<F: Format, const T: usize>(q: &[__m256i; 8], acts: ActRows, block: usize, g: usize) -> [__m256i; T] {
        // SAFETY: as promised to this method.
        unsafe {
            if F::LAYOUT.bits == 8 {
                return dots_of_bytes::<T>(q, acts, block);
            }
            let q = &q[g * F::LAYOUT.group / 4..(g + 1) * F::LAYOUT.group / 4];
            let mut dots = [_mm256_setzero_si256(); T];
            for (t, sum) in dots.iter_mut().enumerate() {
                *sum = dot::<F>(q, acts, t, block, g);
            }
            dots
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn few_rows<F: Format, const T: usize>(panel: Panel, acts: ActRows, out: OutRows) {
        // SAFETY: as promised to this method.
        unsafe { few_rows::<Self, F, T>(panel, acts, out) };
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn many_rows<F: Format, const T: usize>(
        chunk: &Chunk,
        num_blocks: usize,
        acts: ActRows,
        out: OutRows,
        start: Start,
    ) {
        // SAFETY: as promised to this method.
        unsafe { many_rows::<Self, F, T>(chunk, num_blocks, acts, out, start) };
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
///
/// # Safety
/// The processor has `P`'s set; source and activations have the block. No closures here and in the callers: they
/// would be compiled without the set.
#[inline(always)]
unsafe fn block_step<P: Products, S: Source, const T: usize>(
    src: &S,
    block: usize,
    half: usize,
    acts: ActRows,
    acc: &mut [__m256; T],
) {
    let layout = S::F::LAYOUT;
    // SAFETY: the caller's promise.
    unsafe {
        let q = src.operands(block, half);
        for g in 0..layout.groups() {
            let (d, m) = src.scales(block * layout.groups() + g, half);
            let dots = P::dots::<S::F, T>(&q, acts, block, g);
            for (t, (acc, dot)) in acc.iter_mut().zip(dots).enumerate() {
                let scale = _mm256_mul_ps(d, _mm256_set1_ps(acts.scale(t, block)));
                *acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, *acc);
                if layout.scale.has_min() {
                    *acc = _mm256_fmadd_ps(m, _mm256_set1_ps(acts.sum_x::<S::F>(t, block, g)), *acc);
                }
            }
        }
    }
}

/// `T` rows over a packed panel, both halves in step so that memory is read front to back.
///
/// # Safety
/// The processor has `P`'s set; as promised to [`IntKernel::few`].
#[inline(always)]
pub(super) unsafe fn few_rows<P: Products, F: Format, const T: usize>(panel: Panel, acts: ActRows, out: OutRows) {
    let src = Packed::<F> { panel, format: PhantomData };
    // SAFETY: the caller's promise.
    unsafe {
        let mut low = load_acc::<T>(out, 0, Start::Zero);
        let mut high = low;
        for block in 0..panel.shape.num_blocks {
            panel.prefetch::<F>(1, block);
            block_step::<P, _, T>(&src, block, 0, acts, &mut low);
            block_step::<P, _, T>(&src, block, 1, acts, &mut high);
        }
        store_acc(out, 0, &low);
        store_acc(out, 1, &high);
    }
}

/// `T` rows over a chunk, one half after the other.
///
/// # Safety
/// The processor has `P`'s set; as promised to [`IntKernel::rows`].
#[inline(always)]
pub(super) unsafe fn many_rows<P: Products, F: Format, const T: usize>(
    chunk: &Chunk,
    num_blocks: usize,
    acts: ActRows,
    out: OutRows,
    start: Start,
) {
    let src = Widened::<F> { chunk, format: PhantomData };
    for half in 0..2 {
        // SAFETY: the caller's promise.
        unsafe {
            let mut acc = load_acc::<T>(out, half, start);
            for block in 0..num_blocks {
                block_step::<P, _, T>(&src, block, half, acts, &mut acc);
            }
            store_acc(out, half, &acc);
        }
    }
}

impl<P: Products> IntKernel for P {
    const ROWS: usize = ROWS;

    fn few_up_to<F: Format>() -> usize {
        FEW_ROWS
    }

    unsafe fn few<F: Format>(panel: Panel, acts: ActRows, num_t: usize, out: OutRows) {
        for t in (0..num_t).step_by(ROWS) {
            // SAFETY: as promised to this method; rows `t..` exist.
            unsafe {
                let (acts, out) = (acts.skip(t, 0), OutRows { ptr: out.row(t), ..out });
                match num_t - t {
                    1 => P::few_rows::<F, 1>(panel, acts, out),
                    2 => P::few_rows::<F, 2>(panel, acts, out),
                    3 => P::few_rows::<F, 3>(panel, acts, out),
                    _ => P::few_rows::<F, ROWS>(panel, acts, out),
                }
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
                1 => P::many_rows::<F, 1>(chunk, num_blocks, acts, out, start),
                2 => P::many_rows::<F, 2>(chunk, num_blocks, acts, out, start),
                3 => P::many_rows::<F, 3>(chunk, num_blocks, acts, out, start),
                _ => P::many_rows::<F, ROWS>(chunk, num_blocks, acts, out, start),
            }
        }
    }
}
