//! A panel in AVX2 vectors: its 16 rows are two halves of 8 lanes. Codes as operands (32 bytes, as the byte dot
//! products take them), scales as f32, and the results' lanes, for every kernel with 256-bit vectors. Knows no
//! product.

use super::layout::{Format, ScaleKind};
use super::tile::{Chunk, Minimum, OutRows, PANELS, Panel, Start};
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

/// Where a micro-kernel finds a panel's codes and scales.
///
/// # Safety
/// All methods: the processor has AVX2, FMA and F16C; the source has the block or group.
pub(super) trait Source {
    /// The weight's type.
    type F: Format;
    /// Operands of half `half` (rows 0..8 or 8..16) of a block.
    unsafe fn operands(&self, block: usize, half: usize) -> [__m256i; 8];
    /// Scale and centred minimum of half `half` of a group.
    unsafe fn scales(&self, group: usize, half: usize) -> (__m256, __m256);
}

/// A panel as it is packed.
pub(super) struct Packed<F> {
    /// The panel.
    pub(super) panel: Panel,
    /// Its type.
    pub(super) format: PhantomData<F>,
}

/// A widened chunk.
pub(super) struct Widened<'a, F> {
    /// The chunk.
    pub(super) chunk: &'a Chunk,
    /// Its weight's type.
    pub(super) format: PhantomData<F>,
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
/// Lanes of `half` that are inside a result of `width` columns.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn lane_mask(width: usize, half: usize) -> __m256i {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    #[allow(clippy::cast_possible_truncation)] // at most 16
    let valid = width.saturating_sub(8 * half) as i32;
    _mm256_cmpgt_epi32(_mm256_set1_epi32(valid), lanes)
}

/// The sums of half `half` of `T` rows, to go on with.
///
/// # Safety
/// The processor has AVX2, FMA and F16C; `T` rows of `out` exist.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) unsafe fn load_acc<const T: usize>(out: OutRows, half: usize, start: Start) -> [__m256; T] {
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

/// Stores them.
///
/// # Safety
/// As [`load_acc`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) unsafe fn store_acc<const T: usize>(out: OutRows, half: usize, acc: &[__m256; T]) {
    let mask = lane_mask(out.width, half);
    for (t, acc) in acc.iter().enumerate() {
        // SAFETY: row `t` exists; lanes outside the width are not touched.
        unsafe { _mm256_maskstore_ps(out.row(t).wrapping_add(8 * half), mask, *acc) };
    }
}

/// Widens blocks of a panel.
///
/// # Safety
/// The processor has AVX2, FMA and F16C; the panel has the blocks, the chunk room for them.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn widen<F: Format>(panel: Panel, blocks: Range<usize>, minimum: Minimum, chunk: &mut Chunk) {
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
