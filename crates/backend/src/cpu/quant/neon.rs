//! Integer kernels for NEON. The sets differ in how bytes are multiplied ([`Products`]): `sdot` where there is
//! one, else products in i16 that are added up in pairs. The i16 sums never overflow: codes of up to 6 bits allow
//! four (4 * 63 * 127 = 32004), those of 8 bits, counted from their middle, two (2 * 128 * 127 = 32512).
//!
//! `sdot` is written with `asm!`, as its intrinsic is not stable.

use super::activations::{ActRows, Codes, FINE_BITS};
use super::layout::Format;
use super::neon_panel::{Packed, QUARTERS, Source, Widened, load_acc, store_acc, widen};
use super::tile::{Chunk, IntKernel, Minimum, OutRows, Panel, Start};
use std::arch::aarch64::*;
use std::arch::asm;
use std::marker::PhantomData;
use std::ops::Range;

/// NEON.
pub(super) struct Neon;

/// NEON with the dot product of bytes.
pub(super) struct NeonDot;

/// Rows of activations of the largest micro-kernel. With eight the compiler keeps their loop and the sums in memory.
const ROWS: usize = 4;
/// Up to this many rows take a panel as it is packed, in pieces, for which it lies in the first-level cache.
const FEW_ROWS: usize = 8;

/// The byte products of one instruction set.
///
/// # Safety
/// All methods: the processor has the set.
pub(super) trait Products {
    /// `sum` and four operands times 16 codes of one plane, each in its lane; `in_i16` products at a time fit into
    /// i16.
    unsafe fn add(sum: int32x4_t, q: [int8x16_t; 4], x: int8x16_t, in_i16: usize) -> int32x4_t;
}

impl Products for NeonDot {
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn add(sum: int32x4_t, [q0, q1, q2, q3]: [int8x16_t; 4], x: int8x16_t, _: usize) -> int32x4_t {
        let mut sum = sum;
        // SAFETY: works on the registers named; the processor has the instruction, by this method's contract.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {s:v}.4s, {q0:v}.16b, {x:v}.4b[0]",
                "sdot {s:v}.4s, {q1:v}.16b, {x:v}.4b[1]",
                "sdot {s:v}.4s, {q2:v}.16b, {x:v}.4b[2]",
                "sdot {s:v}.4s, {q3:v}.16b, {x:v}.4b[3]",
                s = inout(vreg) sum, x = in(vreg) x,
                q0 = in(vreg) q0, q1 = in(vreg) q1, q2 = in(vreg) q2, q3 = in(vreg) q3,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sum
    }
}

impl Products for Neon {
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn add(sum: int32x4_t, q: [int8x16_t; 4], x: int8x16_t, in_i16: usize) -> int32x4_t {
        let x = vreinterpretq_s32_s8(x);
        let x = [vdupq_laneq_s32::<0>(x), vdupq_laneq_s32::<1>(x), vdupq_laneq_s32::<2>(x), vdupq_laneq_s32::<3>(x)];
        let mut sum = sum;
        // Lanes 0 and 1 of the result are in the products' low halves, 2 and 3 in the high ones.
        for (q, x) in q.chunks(in_i16).zip(x.chunks(in_i16)) {
            let mut products = [vdupq_n_s16(0); 2];
            for (&q, &x) in q.iter().zip(x) {
                let x = vreinterpretq_s8_s32(x);
                products[0] = vmlal_s8(products[0], vget_low_s8(q), vget_low_s8(x));
                products[1] = vmlal_high_s8(products[1], q, x);
            }
            sum = vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(products[0]), vpaddlq_s16(products[1])));
        }
        sum
    }
}

/// Exact sum over group `g` of a block of `(q_w - zero) q_x` for row `t`; `q` are the block's operands.
///
/// # Safety
/// The processor has `P`'s set; the row has the block.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn dot<P: Products, F: Format>(
    q: &[int8x16_t; 8],
    acts: ActRows,
    t: usize,
    block: usize,
    g: usize,
) -> int32x4_t {
    let is_centred = F::LAYOUT.bits == 8;
    // SAFETY: the caller's promise; 16 columns' codes of both planes lie together.
    unsafe {
        let codes = acts.codes(t, block);
        let mut high = vdupq_n_s32(0);
        let mut low = high;
        if !is_centred {
            low = vdupq_n_s32(acts.neg_sum_q::<F>(t, block, g) << F::LAYOUT.log2_zero);
        }
        for i in g * F::LAYOUT.group / 16..(g + 1) * F::LAYOUT.group / 16 {
            let q = [q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3]];
            let x = codes.add(Codes::at(16 * i));
            high = P::add(high, q, vld1q_s8(x), if is_centred { 2 } else { 4 });
            // Low codes are small.
            low = P::add(low, q, vld1q_s8(x.add(Codes::LOW)), 4);
        }
        vaddq_s32(vshlq_n_s32::<{ FINE_BITS as i32 }>(high), low)
    }
}

/// One block of one quarter for `T` rows of activations.
///
/// # Safety
/// The processor has `P`'s set; source and activations have the block.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn block_step<P: Products, S: Source, const T: usize>(
    src: &S,
    block: usize,
    quarter: usize,
    acts: ActRows,
    acc: &mut [float32x4_t; T],
) {
    let layout = S::F::LAYOUT;
    // SAFETY: the caller's promise.
    unsafe {
        let q = src.operands(block, quarter);
        for g in 0..layout.groups() {
            let (d, m) = src.scales(block * layout.groups() + g, quarter);
            for (t, acc) in acc.iter_mut().enumerate() {
                let dot = vcvtq_f32_s32(dot::<P, S::F>(&q, acts, t, block, g));
                *acc = vfmaq_f32(*acc, dot, vmulq_n_f32(d, acts.scale(t, block)));
                if layout.scale.has_min() {
                    *acc = vfmaq_n_f32(*acc, m, acts.sum_x::<S::F>(t, block, g));
                }
            }
        }
    }
}

/// `T` rows over a packed panel, its quarters in step so that memory is read front to back.
///
/// # Safety
/// The processor has `P`'s set; as promised to [`IntKernel::few`].
#[target_feature(enable = "neon")]
unsafe fn few_rows<P: Products, F: Format, const T: usize>(panel: Panel, acts: ActRows, out: OutRows) {
    let src = Packed::<F> { panel, format: PhantomData };
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [load_acc::<T>(out, 0, Start::Zero); QUARTERS];
        for block in 0..panel.shape.num_blocks {
            panel.prefetch::<F>(1, block);
            for (quarter, acc) in acc.iter_mut().enumerate() {
                block_step::<P, _, T>(&src, block, quarter, acts, acc);
            }
        }
        for (quarter, acc) in acc.iter().enumerate() {
            store_acc(out, quarter, acc);
        }
    }
}

/// `T` rows over a chunk, one quarter after the other.
///
/// # Safety
/// The processor has `P`'s set; as promised to [`IntKernel::rows`].
#[target_feature(enable = "neon")]
unsafe fn many_rows<P: Products, F: Format, const T: usize>(
    chunk: &Chunk,
    num_blocks: usize,
    acts: ActRows,
    out: OutRows,
    start: Start,
) {
    let src = Widened::<F> { chunk, format: PhantomData };
    for quarter in 0..QUARTERS {
        // SAFETY: the caller's promise.
        unsafe {
            let mut acc = load_acc::<T>(out, quarter, start);
            for block in 0..num_blocks {
                block_step::<P, _, T>(&src, block, quarter, acts, &mut acc);
            }
            store_acc(out, quarter, &acc);
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
                    1 => few_rows::<P, F, 1>(panel, acts, out),
                    2 => few_rows::<P, F, 2>(panel, acts, out),
                    3 => few_rows::<P, F, 3>(panel, acts, out),
                    _ => few_rows::<P, F, ROWS>(panel, acts, out),
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
                1 => many_rows::<P, F, 1>(chunk, num_blocks, acts, out, start),
                2 => many_rows::<P, F, 2>(chunk, num_blocks, acts, out, start),
                3 => many_rows::<P, F, 3>(chunk, num_blocks, acts, out, start),
                _ => many_rows::<P, F, ROWS>(chunk, num_blocks, acts, out, start),
            }
        }
    }
}
