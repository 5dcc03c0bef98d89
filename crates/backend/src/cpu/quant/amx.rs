//! Kernel for AMX int8 tiles: 16 rows of activations times 16 rows of weights at once. Few rows, and
//! everything that is no integer product, is `avx512vnni`'s.
//!
//! A tile product spans one group (16 or 32 columns), since scales change there. Both planes of the activations
//! go through it side by side: activations `[16, 2 group]` signed as they lie, weights `[group / 2, 64]` widened
//! to `8 w` for the high plane and `w` for the low one, results `[16, 16]` i32. Codes of 6 bits leave room for
//! `4 w` only, and the high plane is added twice; codes of 8 bits leave none, and the planes are multiplied
//! apart. Results go through memory into vector registers, where scales are applied in the order that `tile`
//! fixes, so the bits are those of the other kernels.
//!
//! A tile unit that multiplies, and stores what it multiplied before, works beside the vector units that scale
//! what was stored before that; three groups are under way at a time. Tile and vector instructions are
//! interleaved by hand, as the processor looks less far ahead than a group's instructions reach.
//!
//! Written with `asm!`, as the intrinsics are not stable. Tile registers are used only between `begin`
//! and `end` of one tile of work on one thread: `begin` loads a configuration, `end` releases it.

use super::activations::{ActRows, FINE_BITS, MAX_ROWS_IN_LINE, TILE_ROWS};
use super::avx512vnni::{self, Avx512Vnni};
use super::layout::{Format, Layout};
use super::tile::{CHUNK_BLOCKS, Chunk, IntKernel, MAX_OPERANDS, Minimum, OutRows, PANELS, Panel, Start};
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

/// AMX tiles and int8, with AVX-512.
pub(super) struct Amx;

/// How the planes of activations meet a type's codes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scheme {
    /// `high * 8w + low * w`, one product.
    Folded,
    /// `high * 4w + low * w` and `high * 4w` once more, into the same result.
    FoldedTwice,
    /// `high * w` and `low * w`, two results.
    Apart,
}

impl Scheme {
    const fn of(layout: Layout) -> Self {
        match layout.bits {
            ..=5 => Scheme::Folded,
            6 => Scheme::FoldedTwice,
            _ => Scheme::Apart,
        }
    }

    /// Operands (rows of 64 bytes) of a widened block.
    const fn operands(self) -> usize {
        match self {
            Scheme::Folded | Scheme::FoldedTwice => 16,
            Scheme::Apart => 32,
        }
    }
}

const _: () = assert!(Scheme::Apart.operands() <= MAX_OPERANDS);

/// Palette 1 configuration, as `ldtilecfg` reads it.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileConfig {
    /// Results in tiles 0..4, activations in 4 and 5, weights in 6 and 7.
    const fn new(layout: Layout) -> Self {
        let mut config = Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [64; 16], rows: [16; 16] };
        let mut unused = 8;
        while unused < 16 {
            config.row_bytes[unused] = 0;
            config.rows[unused] = 0;
            unused += 1;
        }
        #[allow(clippy::cast_possible_truncation)] // 16 or 32
        let (act_bytes, operands) = (2 * layout.group as u16, layout.group as u8 / 2);
        config.row_bytes[4] = act_bytes;
        config.row_bytes[5] = act_bytes;
        config.rows[6] = operands;
        config.rows[7] = operands;
        if matches!(Scheme::of(layout), Scheme::FoldedTwice) {
            config.row_bytes[5] = act_bytes / 2;
            config.rows[7] = operands / 2;
        }
        config
    }
}

/// Runs `$body` for the rows `$from..$to` that are below `$rows`, with `$t` a constant, so that sums indexed by it
/// stay in registers.
macro_rules! each_row {
    ($t:ident in $from:literal..$to:literal, < $rows:expr => $body:block) => {
        each_row!(@ $t, $from, $to, $rows, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $t:ident, $from:literal, $to:literal, $rows:expr, $body:block, $($n:literal)*) => {$(
        if $n >= $from && $n < $to && $n < $rows {
            let $t: usize = $n;
            $body
        }
    )*};
}

/// Products of 16 rows with one group; where the planes are multiplied apart, those of the high plane first.
#[repr(C, align(64))]
struct Dots([[[i32; 16]; TILE_ROWS]; 2]);

/// Groups between the product's store and its use, and one.
const SLOTS: usize = 4;

/// One tile of activations and one chunk of weights.
#[derive(Clone, Copy)]
struct Operands<'a> {
    acts: ActRows,
    chunk: &'a Chunk,
    /// Groups of the chunk.
    count: usize,
}

impl Operands<'_> {
    /// The codes of group `i` of the first row.
    ///
    /// # Safety
    /// The chunk has the group.
    #[inline(always)]
    unsafe fn codes<F: Format>(&self, i: usize) -> *const i8 {
        let groups = F::LAYOUT.groups();
        // SAFETY: the caller's promise; a block's groups lie 32 bytes apart.
        unsafe { self.acts.codes(0, i / groups).add(i % groups * 32) }
    }

    /// The operands of group `i`.
    ///
    /// # Safety
    /// The chunk has the group.
    #[inline(always)]
    unsafe fn weights<F: Format>(&self, i: usize) -> *const u8 {
        let operands = Scheme::of(F::LAYOUT).operands() / F::LAYOUT.groups();
        // SAFETY: the caller's promise.
        unsafe { self.chunk.q.as_ptr().add(i * operands).cast() }
    }

    /// Loads the activations of group `i`, for the products into result `P`.
    ///
    /// # Safety
    /// Tiles are configured for `F`; the chunk has the group; 16 rows of activations are readable.
    #[inline(always)]
    unsafe fn load_acts<F: Format, const P: usize>(&self, i: usize) {
        // SAFETY: reads 16 rows of codes, as the caller promised; touches only the tiles named.
        unsafe {
            let (codes, stride) = (self.codes::<F>(i), self.acts.codes_stride());
            if Scheme::of(F::LAYOUT) == Scheme::FoldedTwice {
                asm!("tileloadd tmm4, [{c} + {s}]", "tileloadd tmm5, [{c} + {s}]",
                    c = in(reg) codes, s = in(reg) stride, options(nostack, preserves_flags, readonly));
            } else if P == 0 {
                asm!("tileloadd tmm4, [{c} + {s}]",
                    c = in(reg) codes, s = in(reg) stride, options(nostack, preserves_flags, readonly));
            } else {
                asm!("tileloadd tmm5, [{c} + {s}]",
                    c = in(reg) codes, s = in(reg) stride, options(nostack, preserves_flags, readonly));
            }
        }
    }

    /// Loads the weights of group `i` and clears result `P`.
    ///
    /// # Safety
    /// As [`Self::load_acts`].
    #[inline(always)]
    unsafe fn load_weights<F: Format, const P: usize>(&self, i: usize) {
        // SAFETY: reads the group's operands; touches only the tiles named.
        unsafe {
            let (first, line) = (self.weights::<F>(i), 64usize);
            match (Scheme::of(F::LAYOUT), P) {
                (Scheme::Folded, 0) => asm!("tilezero tmm0", "tileloadd tmm6, [{w} + {l}]",
                    w = in(reg) first, l = in(reg) line, options(nostack, preserves_flags, readonly)),
                (Scheme::Folded, _) => asm!("tilezero tmm1", "tileloadd tmm7, [{w} + {l}]",
                    w = in(reg) first, l = in(reg) line, options(nostack, preserves_flags, readonly)),
                (Scheme::FoldedTwice, 0) => asm!(
                    "tilezero tmm0", "tileloadd tmm6, [{w} + {l}]", "tileloadd tmm7, [{w} + {l}]",
                    w = in(reg) first, l = in(reg) line, options(nostack, preserves_flags, readonly)),
                (Scheme::FoldedTwice, _) => asm!(
                    "tilezero tmm1", "tileloadd tmm6, [{w} + {l}]", "tileloadd tmm7, [{w} + {l}]",
                    w = in(reg) first, l = in(reg) line, options(nostack, preserves_flags, readonly)),
                (Scheme::Apart, 0) => asm!(
                    "tilezero tmm0", "tilezero tmm2", "tileloadd tmm6, [{w} + {l}]", "tileloadd tmm7, [{w} + {l} + 1024]",
                    w = in(reg) first, l = in(reg) line, options(nostack, preserves_flags, readonly)),
                (Scheme::Apart, _) => asm!(
                    "tilezero tmm1", "tilezero tmm3", "tileloadd tmm6, [{w} + {l}]", "tileloadd tmm7, [{w} + {l} + 1024]",
                    w = in(reg) first, l = in(reg) line, options(nostack, preserves_flags, readonly)),
            }
        }
    }
}

/// Multiplies what was loaded last into result `P`.
///
/// # Safety
/// Tiles are configured and loaded for `F`.
#[inline(always)]
unsafe fn multiply<F: Format, const P: usize>() {
    // SAFETY: touches only the tiles named.
    unsafe {
        match (Scheme::of(F::LAYOUT), P) {
            (Scheme::Folded, 0) => asm!("tdpbssd tmm0, tmm4, tmm6", options(nostack, nomem, preserves_flags)),
            (Scheme::Folded, _) => asm!("tdpbssd tmm1, tmm5, tmm7", options(nostack, nomem, preserves_flags)),
            (Scheme::FoldedTwice, 0) => {
                asm!("tdpbssd tmm0, tmm4, tmm6", "tdpbssd tmm0, tmm5, tmm7", options(nostack, nomem, preserves_flags))
            }
            (Scheme::FoldedTwice, _) => {
                asm!("tdpbssd tmm1, tmm4, tmm6", "tdpbssd tmm1, tmm5, tmm7", options(nostack, nomem, preserves_flags))
            }
            (Scheme::Apart, 0) => {
                asm!("tdpbssd tmm0, tmm4, tmm6", "tdpbssd tmm2, tmm4, tmm7", options(nostack, nomem, preserves_flags))
            }
            (Scheme::Apart, _) => {
                asm!("tdpbssd tmm1, tmm5, tmm6", "tdpbssd tmm3, tmm5, tmm7", options(nostack, nomem, preserves_flags))
            }
        }
    }
}

/// Stores result `P`.
///
/// # Safety
/// Tiles are configured for `F`; `dots` is writable.
#[inline(always)]
unsafe fn store<F: Format, const P: usize>(dots: *mut Dots) {
    // SAFETY: writes what `Dots` is.
    unsafe {
        match (Scheme::of(F::LAYOUT) == Scheme::Apart, P) {
            (false, 0) => asm!("tilestored [{d} + {l}], tmm0",
                d = in(reg) dots, l = in(reg) 64usize, options(nostack, preserves_flags)),
            (false, _) => asm!("tilestored [{d} + {l}], tmm1",
                d = in(reg) dots, l = in(reg) 64usize, options(nostack, preserves_flags)),
            (true, 0) => asm!("tilestored [{d} + {l}], tmm0", "tilestored [{d} + {l} + 1024], tmm2",
                d = in(reg) dots, l = in(reg) 64usize, options(nostack, preserves_flags)),
            (true, _) => asm!("tilestored [{d} + {l}], tmm1", "tilestored [{d} + {l} + 1024], tmm3",
                d = in(reg) dots, l = in(reg) 64usize, options(nostack, preserves_flags)),
        }
    }
}

/// Adds group `i`, whose products are in their slot; stores those of group `i + 1`, which are in result `1 - P`;
/// multiplies group `i + 2` into result `P`.
///
/// # Safety
/// As [`tile_of_rows`]; group `i` exists.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn step<F: Format, const R: usize, const P: usize>(
    operands: Operands<'_>,
    i: usize,
    slots: *mut [Dots; SLOTS],
    acc: &mut [__m512; R],
) {
    let groups = F::LAYOUT.groups();
    let (block, g) = (i / groups, i % groups);
    let acts = operands.acts;
    // SAFETY: as promised; group `i`'s products were stored two steps ago.
    unsafe {
        let dots = slots.cast::<Dots>().add(i % SLOTS).cast::<[i32; 16]>();
        let d = _mm512_load_ps(operands.chunk.d.as_ptr().add(i).cast());
        let m = _mm512_load_ps(operands.chunk.m.as_ptr().add(i).cast());
        macro_rules! add_rows {
            ($from:literal..$to:literal) => {
                each_row!(t in $from..$to, < R => {
                    let mut dot = _mm512_load_si512(dots.add(t).cast());
                    if Scheme::of(F::LAYOUT) == Scheme::Apart {
                        let low = _mm512_load_si512(dots.add(TILE_ROWS + t).cast());
                        dot = _mm512_add_epi32(_mm512_slli_epi32::<FINE_BITS>(dot), low);
                    }
                    let scale = _mm512_mul_ps(d, _mm512_set1_ps(acts.scale(t, block)));
                    acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, acc[t]);
                    if F::LAYOUT.scale.has_min() {
                        acc[t] = _mm512_fmadd_ps(m, _mm512_set1_ps(acts.sum_x::<F>(t, block, g)), acc[t]);
                    }
                });
            };
        }
        let more = i + 2 < operands.count;
        if more {
            operands.load_acts::<F, P>(i + 2);
        }
        add_rows!(0..4);
        if more {
            operands.load_weights::<F, P>(i + 2);
        }
        add_rows!(4..8);
        if i + 1 < operands.count {
            let to = slots.cast::<Dots>().add((i + 1) % SLOTS);
            if P == 0 { store::<F, 1>(to) } else { store::<F, 0>(to) }
        }
        if more {
            multiply::<F, P>();
        }
        add_rows!(8..16);
    }
}

/// Lanes of row `t` inside a result of `valid` rows.
fn lane_mask(out: OutRows, valid: usize, t: usize) -> u16 {
    if t < valid { u16::MAX >> (16 - out.width) } else { 0 }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn load_acc<const R: usize>(out: OutRows, valid: usize, start: Start) -> [__m512; R] {
    let mut acc = [_mm512_setzero_ps(); R];
    if start == Start::FromOut {
        each_row!(t in 0..16, < R => {
            let row = out.ptr.wrapping_add(t * out.stride);
            // SAFETY: rows below `valid` exist; masked lanes are not touched.
            acc[t] = unsafe { _mm512_maskz_loadu_ps(lane_mask(out, valid, t), row) };
        });
    }
    acc
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn store_acc<const R: usize>(out: OutRows, valid: usize, acc: &[__m512; R]) {
    each_row!(t in 0..16, < R => {
        // SAFETY: rows below `valid` exist; masked lanes are not touched.
        unsafe { _mm512_mask_storeu_ps(out.ptr.wrapping_add(t * out.stride), lane_mask(out, valid, t), acc[t]) };
    });
}

/// A tile of rows over a chunk, of which the first `valid` (at most `R`) have results. All 16 rows' activations
/// are readable (`QuantizedActivations` keeps whole tiles); the products of those from `R` on are not looked
/// at, the others' are dropped.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn tile_of_rows<F: Format, const R: usize>(
    chunk: &Chunk,
    num_blocks: usize,
    acts: ActRows,
    out: OutRows,
    valid: usize,
    start: Start,
) {
    let operands = Operands { acts, chunk, count: num_blocks * F::LAYOUT.groups() };
    let mut slots = MaybeUninit::<[Dots; SLOTS]>::uninit();
    let slots = slots.as_mut_ptr();
    // SAFETY: groups are below `count`; as promised to `IntKernel::rows`.
    unsafe {
        let mut acc = load_acc::<R>(out, valid, start);
        operands.load_acts::<F, 0>(0);
        operands.load_weights::<F, 0>(0);
        multiply::<F, 0>();
        store::<F, 0>(slots.cast());
        if operands.count > 1 {
            operands.load_acts::<F, 1>(1);
            operands.load_weights::<F, 1>(1);
            multiply::<F, 1>();
        }
        // One call of each, so that both become part of this function and sums stay in registers.
        for i in (0..operands.count).step_by(2) {
            step::<F, R, 0>(operands, i, slots, &mut acc);
            if i + 1 < operands.count {
                step::<F, R, 1>(operands, i + 1, slots, &mut acc);
            }
        }
        store_acc(out, valid, &acc);
    }
}

/// Widens a block's codes into the operands of `Scheme::of(F::LAYOUT)`.
///
/// # Safety
/// The panel has the block; `to` has room.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn widen_codes<F: Format>(panel: Panel, block: usize, to: *mut __m512i) {
    let scheme = Scheme::of(F::LAYOUT);
    #[allow(clippy::cast_possible_wrap)] // 128 becomes -128: the same bits are subtracted
    let middle = _mm512_set1_epi8((1u8 << F::LAYOUT.log2_zero) as i8);
    // SAFETY: the caller's promise.
    unsafe {
        let q = avx512vnni::packed_operands::<F>(panel, block);
        for (i, q) in q.into_iter().enumerate() {
            let w = _mm512_sub_epi8(q, middle);
            // Four operands of the high plane, four of the low one, then the same of the block's other half.
            let high = i / 4 * 8 + i % 4;
            match scheme {
                Scheme::Folded => {
                    let w8 = _mm512_and_si512(_mm512_slli_epi16::<3>(w), _mm512_set1_epi8(-8));
                    _mm512_store_si512(to.add(high), w8);
                    _mm512_store_si512(to.add(high + 4), w);
                }
                Scheme::FoldedTwice => {
                    let w4 = _mm512_and_si512(_mm512_slli_epi16::<2>(w), _mm512_set1_epi8(-4));
                    _mm512_store_si512(to.add(high), w4);
                    _mm512_store_si512(to.add(high + 4), w);
                }
                Scheme::Apart => {
                    let none = _mm512_setzero_si512();
                    _mm512_store_si512(to.add(high), w);
                    _mm512_store_si512(to.add(high + 4), none);
                    _mm512_store_si512(to.add(16 + high), none);
                    _mm512_store_si512(to.add(16 + high + 4), w);
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn widen<F: Format>(panel: Panel, blocks: Range<usize>, chunk: &mut Chunk) {
    let operands = Scheme::of(F::LAYOUT).operands();
    for (at, block) in blocks.enumerate() {
        panel.prefetch::<F>(PANELS, block);
        // SAFETY: the panel has the block; the chunk has room for it.
        unsafe {
            widen_codes::<F>(panel, block, chunk.q[operands * at..].as_mut_ptr().cast());
            avx512vnni::widen_scales::<F>(panel, block, Minimum::Centred, chunk, at);
        }
    }
}

impl IntKernel for Amx {
    const ROWS: usize = TILE_ROWS;

    // With fewer rows, a tile's time goes to rows that are not there, and one tile does not pay for widening where
    // the planes are multiplied apart: measured, at 12 and at 16 rows `few` takes as long or less.
    fn few_up_to<F: Format>() -> usize {
        if Scheme::of(F::LAYOUT) == Scheme::Apart { TILE_ROWS } else { MAX_ROWS_IN_LINE }
    }

    const CACHE_BYTES: usize = 1 << 20;

    fn chunk_blocks(num_t: usize) -> usize {
        // One or two tiles: what was widened is read from the first-level cache only if it is little.
        if num_t <= 2 * TILE_ROWS { 4 } else { CHUNK_BLOCKS }
    }

    unsafe fn begin<F: Format>() {
        let config = const { TileConfig::new(F::LAYOUT) };
        // SAFETY: the configuration is valid for palette 1, and the kernel granted this process the tiles
        // (`Isa::is_available`).
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly, preserves_flags)) };
    }

    unsafe fn end() {
        // SAFETY: gives the tiles up; nothing of them is needed any more.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }

    unsafe fn few<F: Format>(panel: Panel, acts: ActRows, num_t: usize, out: OutRows) {
        // SAFETY: as promised to this method.
        unsafe { Avx512Vnni::few::<F>(panel, acts, num_t, out) };
    }

    unsafe fn widen<F: Format>(panel: Panel, blocks: Range<usize>, chunk: &mut Chunk) {
        // SAFETY: as promised to this method.
        unsafe { widen::<F>(panel, blocks, chunk) };
    }

    unsafe fn rows<F: Format>(
        chunk: &Chunk,
        num_blocks: usize,
        acts: ActRows,
        num_t: usize,
        out: OutRows,
        start: Start,
    ) {
        // SAFETY: as promised to this method; activations start at a tile's first row.
        unsafe {
            if num_t <= 8 {
                tile_of_rows::<F, 8>(chunk, num_blocks, acts, out, num_t, start);
            } else {
                tile_of_rows::<F, TILE_ROWS>(chunk, num_blocks, acts, out, num_t, start);
            }
        }
    }
}
