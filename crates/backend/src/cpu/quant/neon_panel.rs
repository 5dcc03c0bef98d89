//! A panel in NEON vectors: its 16 rows are four quarters of 4 lanes. Codes as operands (16 bytes, as the byte dot
//! product takes them), scales as f32, and the results' lanes, for every NEON kernel. Knows no product.

use super::layout::{Format, ScaleKind};
use super::tile::{Chunk, Minimum, OutRows, PANELS, Panel, Start};
use std::arch::aarch64::*;
use std::marker::PhantomData;
use std::ops::Range;

/// Quarters of a panel.
pub(super) const QUARTERS: usize = 4;
/// Lanes of a quarter.
pub(super) const LANES: usize = 4;

/// Where a micro-kernel finds a panel's codes and scales.
///
/// # Safety
/// All methods: the source has the block or group; quarters are below 4.
pub(super) trait Source {
    /// The weight's type.
    type F: Format;
    /// Signed operands of quarter `quarter` (rows `4 quarter..`) of a block: codes of 8 bits count from their
    /// middle, the others from zero.
    unsafe fn operands(&self, block: usize, quarter: usize) -> [int8x16_t; 8];
    /// Scale and centred minimum of a quarter of a group.
    unsafe fn scales(&self, group: usize, quarter: usize) -> (float32x4_t, float32x4_t);
}

/// A panel as it is packed.
pub(super) struct Packed<F> {
    /// The panel.
    pub(super) panel: Panel,
    /// Its type.
    pub(super) format: PhantomData<F>,
}

/// A chunk that was widened for integer products.
pub(super) struct Widened<'a, F> {
    /// The chunk.
    pub(super) chunk: &'a Chunk,
    /// Its weight's type.
    pub(super) format: PhantomData<F>,
}

#[target_feature(enable = "neon")]
#[inline]
unsafe fn load(base: *const u8, vector: usize, quarter: usize) -> uint8x16_t {
    // SAFETY: the caller reads inside a block.
    unsafe { vld1q_u8(base.add(64 * vector + 16 * quarter)) }
}

/// Operands of a packed block of `BITS`-wide codes.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn unpack<const BITS: usize>(block: *const u8, quarter: usize) -> [uint8x16_t; 8] {
    let mut q = [vdupq_n_u8(0); 8];
    // SAFETY: a block has 64 * BITS bytes.
    unsafe {
        if BITS == 8 {
            for (i, q) in q.iter_mut().enumerate() {
                *q = load(block, i, quarter);
            }
            return q;
        }
        if BITS >= 4 {
            for i in 0..4 {
                let v = load(block, i, quarter);
                q[i] = vandq_u8(v, vdupq_n_u8(15));
                q[i + 4] = vshrq_n_u8::<4>(v);
            }
        } else {
            two_bits([load(block, 0, quarter), load(block, 1, quarter)], 0, &mut q);
        }
        match BITS {
            3 => one_bit(load(block, 2, quarter), 2, &mut q),
            5 => one_bit(load(block, 4, quarter), 4, &mut q),
            6 => two_bits([load(block, 4, quarter), load(block, 5, quarter)], 4, &mut q),
            _ => {}
        }
    }
    q
}

/// Ors a 2-bit plane into `q` at bit `at`.
#[target_feature(enable = "neon")]
#[inline]
fn two_bits(v: [uint8x16_t; 2], at: i8, q: &mut [uint8x16_t; 8]) {
    let mask = vdupq_n_u8(3 << at);
    for (i, (from, q)) in [0, 2, 4, 6].into_iter().cycle().zip(q).enumerate() {
        *q = vorrq_u8(*q, vandq_u8(vshlq_u8(v[i / 4], vdupq_n_s8(at - from)), mask));
    }
}

/// Ors a 1-bit plane into `q` at bit `at`.
#[target_feature(enable = "neon")]
#[inline]
fn one_bit(v: uint8x16_t, at: i8, q: &mut [uint8x16_t; 8]) {
    let mask = vdupq_n_u8(1 << at);
    for (from, q) in (0..8).zip(q) {
        *q = vorrq_u8(*q, vandq_u8(vshlq_u8(v, vdupq_n_s8(at - from)), mask));
    }
}

#[target_feature(enable = "neon")]
#[inline]
unsafe fn halves(at: *const u8, quarter: usize) -> float32x4_t {
    // SAFETY: the caller reads 16 f16 there, aligned to 2.
    unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at.add(8 * quarter).cast()))) }
}

#[target_feature(enable = "neon")]
#[inline]
unsafe fn bytes(at: *const u8, quarter: usize) -> uint32x4_t {
    // SAFETY: the caller reads 16 bytes there.
    let four = unsafe { at.add(4 * quarter).cast::<u32>().read_unaligned() };
    vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(u64::from(four)))))
}

/// Scale and plain minimum of a packed group, exact.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn packed_scales<F: Format>(panel: Panel, group: usize, quarter: usize) -> (float32x4_t, float32x4_t) {
    let layout = F::LAYOUT;
    let minus_zero_code = vdupq_n_f32(-((1u32 << layout.log2_zero) as f32));
    // SAFETY: the caller's group lies in the panel.
    unsafe {
        let record = panel.base.add(panel.shape.scales_at + group * layout.scale.bytes());
        let super_at = panel.shape.supers_at + group * layout.group / 256 * layout.scale.super_bytes();
        let supers = panel.base.add(super_at);
        match layout.scale {
            ScaleKind::Half => {
                let d = halves(record, quarter);
                (d, vmulq_f32(d, minus_zero_code))
            }
            ScaleKind::HalfPair => (halves(record, quarter), halves(record.add(32), quarter)),
            ScaleKind::BytePair => {
                let d = vmulq_f32(halves(supers, quarter), vcvtq_f32_u32(bytes(record, quarter)));
                let m = vmulq_f32(halves(supers.add(32), quarter), vcvtq_f32_u32(bytes(record.add(16), quarter)));
                (d, vnegq_f32(m))
            }
            ScaleKind::NibblePair => {
                let pair = bytes(record, quarter);
                let scale = vcvtq_f32_u32(vandq_u32(pair, vdupq_n_u32(15)));
                let min = vcvtq_f32_u32(vshrq_n_u32::<4>(pair));
                let d = vmulq_f32(halves(supers, quarter), scale);
                (d, vnegq_f32(vmulq_f32(halves(supers.add(32), quarter), min)))
            }
            ScaleKind::Signed => {
                // The byte to the top and back extends its sign.
                let scale = vshrq_n_s32::<24>(vreinterpretq_s32_u32(vshlq_n_u32::<24>(bytes(record, quarter))));
                let d = vmulq_f32(halves(supers, quarter), vcvtq_f32_s32(scale));
                (d, vmulq_f32(d, minus_zero_code))
            }
        }
    }
}

#[target_feature(enable = "neon")]
#[inline]
unsafe fn packed_codes<F: Format>(panel: Panel, block: usize, quarter: usize) -> [uint8x16_t; 8] {
    // SAFETY: the caller's block lies in the panel.
    unsafe {
        let at = panel.base.add(block * F::LAYOUT.block_bytes());
        match F::LAYOUT.bits {
            2 => unpack::<2>(at, quarter),
            3 => unpack::<3>(at, quarter),
            4 => unpack::<4>(at, quarter),
            5 => unpack::<5>(at, quarter),
            6 => unpack::<6>(at, quarter),
            _ => unpack::<8>(at, quarter),
        }
    }
}

/// Codes as signed operands (see [`Source::operands`]).
#[target_feature(enable = "neon")]
#[inline]
fn signed<F: Format>(mut q: [uint8x16_t; 8]) -> [int8x16_t; 8] {
    let mut operands = [vdupq_n_s8(0); 8];
    for (operand, q) in operands.iter_mut().zip(&mut q) {
        if F::LAYOUT.bits == 8 {
            *q = veorq_u8(*q, vdupq_n_u8(0x80));
        }
        *operand = vreinterpretq_s8_u8(*q);
    }
    operands
}

#[target_feature(enable = "neon")]
#[inline]
fn centred<F: Format>((d, m): (float32x4_t, float32x4_t)) -> (float32x4_t, float32x4_t) {
    (d, vfmaq_f32(m, d, vdupq_n_f32((1u32 << F::LAYOUT.log2_zero) as f32)))
}

impl<F: Format> Source for Packed<F> {
    type F = F;

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn operands(&self, block: usize, quarter: usize) -> [int8x16_t; 8] {
        // SAFETY: as promised to this method.
        signed::<F>(unsafe { packed_codes::<F>(self.panel, block, quarter) })
    }

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn scales(&self, group: usize, quarter: usize) -> (float32x4_t, float32x4_t) {
        // SAFETY: as promised to this method.
        centred::<F>(unsafe { packed_scales::<F>(self.panel, group, quarter) })
    }
}

impl<F: Format> Source for Widened<'_, F> {
    type F = F;

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn operands(&self, block: usize, quarter: usize) -> [int8x16_t; 8] {
        let mut q = [vdupq_n_s8(0); 8];
        for (i, q) in q.iter_mut().enumerate() {
            // SAFETY: the chunk has this block.
            *q = unsafe { vld1q_s8(self.chunk.q.as_ptr().add(8 * block + i).cast::<i8>().add(16 * quarter)) };
        }
        q
    }

    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn scales(&self, group: usize, quarter: usize) -> (float32x4_t, float32x4_t) {
        // SAFETY: the chunk has this group.
        unsafe { widened_scales(self.chunk, group, quarter) }
    }
}

/// What a chunk holds as scale and minimum of a quarter of a group.
///
/// # Safety
/// The chunk has the group.
#[target_feature(enable = "neon")]
#[inline]
pub(super) unsafe fn widened_scales(chunk: &Chunk, group: usize, quarter: usize) -> (float32x4_t, float32x4_t) {
    // SAFETY: the caller's promise.
    unsafe {
        let d = vld1q_f32(chunk.d.as_ptr().add(group).cast::<f32>().add(LANES * quarter));
        (d, vld1q_f32(chunk.m.as_ptr().add(group).cast::<f32>().add(LANES * quarter)))
    }
}

/// Lanes of `quarter` that are inside a result of `width` columns.
fn lanes_inside(width: usize, quarter: usize) -> usize {
    width.saturating_sub(LANES * quarter).min(LANES)
}

/// The sums of a quarter of `T` rows, to go on with.
///
/// # Safety
/// `T` rows of `out` exist.
#[target_feature(enable = "neon")]
#[inline]
pub(super) unsafe fn load_acc<const T: usize>(out: OutRows, quarter: usize, start: Start) -> [float32x4_t; T] {
    let mut acc = [vdupq_n_f32(0.0); T];
    let inside = lanes_inside(out.width, quarter);
    if start == Start::FromOut && inside > 0 {
        for (t, acc) in acc.iter_mut().enumerate() {
            // SAFETY: row `t` exists; lanes outside the width are not touched.
            unsafe {
                let from = out.row(t).add(LANES * quarter);
                if inside == LANES {
                    *acc = vld1q_f32(from);
                } else {
                    let mut lanes = [0.0; LANES];
                    std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), inside);
                    *acc = vld1q_f32(lanes.as_ptr());
                }
            }
        }
    }
    acc
}

/// Stores them.
///
/// # Safety
/// As [`load_acc`].
#[target_feature(enable = "neon")]
#[inline]
pub(super) unsafe fn store_acc<const T: usize>(out: OutRows, quarter: usize, acc: &[float32x4_t; T]) {
    let inside = lanes_inside(out.width, quarter);
    if inside == 0 {
        return;
    }
    for (t, acc) in acc.iter().enumerate() {
        // SAFETY: row `t` exists; lanes outside the width are not touched.
        unsafe {
            let to = out.row(t).add(LANES * quarter);
            if inside == LANES {
                vst1q_f32(to, *acc);
            } else {
                let mut lanes = [0.0; LANES];
                vst1q_f32(lanes.as_mut_ptr(), *acc);
                std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, inside);
            }
        }
    }
}

/// Widens blocks of a panel: with centred minima for integer products (codes as signed operands), with plain ones
/// for f32 (codes as they are).
///
/// # Safety
/// The panel has the blocks, the chunk room for them.
#[target_feature(enable = "neon")]
pub(super) unsafe fn widen<F: Format>(panel: Panel, blocks: Range<usize>, minimum: Minimum, chunk: &mut Chunk) {
    let groups = F::LAYOUT.groups();
    for (at, block) in blocks.enumerate() {
        panel.prefetch::<F>(PANELS, block);
        for quarter in 0..QUARTERS {
            // SAFETY: the panel has the block; the chunk has room for it.
            unsafe {
                let codes = packed_codes::<F>(panel, block, quarter);
                let int = signed::<F>(codes);
                for (i, operand) in chunk.q[8 * at..][..8].iter_mut().enumerate() {
                    let to = operand.as_mut_ptr().add(16 * quarter);
                    match minimum {
                        Minimum::Centred => vst1q_s8(to.cast(), int[i]),
                        Minimum::Plain => vst1q_u8(to, codes[i]),
                    }
                }
                for g in 0..groups {
                    let mut scales = packed_scales::<F>(panel, block * groups + g, quarter);
                    if minimum == Minimum::Centred {
                        scales = centred::<F>(scales);
                    }
                    vst1q_f32(chunk.d[at * groups + g].as_mut_ptr().add(LANES * quarter), scales.0);
                    vst1q_f32(chunk.m[at * groups + g].as_mut_ptr().add(LANES * quarter), scales.1);
                }
            }
        }
    }
}
