//! Kernel for AMX int8 tiles: 16 rows of activations times 16 rows of weights at once. Few rows, and
//! everything that is no integer product, is `avx512vnni`'s.
//!
//! A tile product spans one group (16 or 32 columns), since scales change there: activations
//! `[16, group]` signed, weights `[group / 4, 64]` as the panel's operands already lie (codes made signed
//! while widening, so that no correction is needed), results `[16, 16]` i32. They go through memory
//! into vector registers, where scales are applied in the order that `tile` fixes, so the bits are those
//! of the other kernels. Two result tiles alternate, so that one's products run while the other's
//! results are scaled.
//!
//! Written with `asm!`, as the intrinsics are not stable. Tile registers are used only between `begin`
//! and `end` of one tile of work on one thread: `begin` loads a configuration, `end` releases it.

use super::activations::{ActBlock, FineBlock};
use super::avx512vnni::{self, Avx512Vnni};
use super::layout::{BLOCK_COLS, Format};
use super::tile::{ActRows, Chunk, IntKernel, Minimum, OutRows, Panel, Start, WidenedPanel};
use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

/// AMX tiles and int8, with AVX-512.
pub(super) struct Amx;

/// Rows of activations of a tile.
const ROWS: usize = 16;

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
    const fn new(group: usize) -> Self {
        let mut config = Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [64; 16], rows: [16; 16] };
        #[allow(clippy::cast_possible_truncation)] // 16 or 32
        let (group_bytes, group_rows) = (group as u16, group as u8 / 4);
        config.row_bytes[4] = group_bytes;
        config.row_bytes[5] = group_bytes;
        config.rows[6] = group_rows;
        config.rows[7] = group_rows;
        let mut unused = 8;
        while unused < 16 {
            config.row_bytes[unused] = 0;
            config.rows[unused] = 0;
            unused += 1;
        }
        config
    }
}

/// Runs `$body` for each row below `$rows` with `$t` a constant, so that sums indexed by it stay in registers.
macro_rules! each_row {
    ($t:ident < $rows:expr => $body:block) => {
        each_row!(@ $t, $rows, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $t:ident, $rows:expr, $body:block, $($n:literal)*) => {$(
        if $n < $rows {
            let $t: usize = $n;
            $body
        }
    )*};
}

/// Integer products of 16 rows with one group.
#[repr(C, align(64))]
struct Dots([[i32; 16]; ROWS]);

/// Groups whose products are issued together.
const BATCH: usize = 4;

/// A chunk's groups: where their operands lie, and which of them have activations in two planes.
#[derive(Clone, Copy)]
struct Groups {
    acts: ActRows,
    /// Operands of the chunk's first block.
    operands: *const u8,
    /// Columns of a group.
    group: usize,
    /// Groups of the chunk.
    count: usize,
    /// Bit `b`: block `b` is an outlier block in some row.
    outliers: u32,
}

/// One plane of a group's activation codes.
#[derive(Clone, Copy)]
struct Codes {
    /// The first row's.
    first: *const i8,
    /// Bytes from one row to the next.
    stride: usize,
}

impl Groups {
    /// # Safety
    /// The chunk has group `i`.
    #[inline(always)]
    unsafe fn codes(self, i: usize) -> Codes {
        let per_block = BLOCK_COLS / self.group;
        // SAFETY: the caller's promise.
        let first = unsafe { (*self.acts.at(0, i / per_block)).q.as_ptr().add(i % per_block * self.group) };
        Codes { first, stride: self.acts.stride * size_of::<ActBlock>() }
    }

    /// # Safety
    /// The chunk has group `i`.
    #[inline(always)]
    unsafe fn fine_codes(self, i: usize) -> Codes {
        let per_block = BLOCK_COLS / self.group;
        // SAFETY: the caller's promise.
        let first = unsafe { self.acts.fine_at(0, i / per_block).cast::<i8>().add(i % per_block * self.group) };
        Codes { first, stride: self.acts.stride * size_of::<FineBlock>() }
    }

    /// # Safety
    /// The chunk has group `i`.
    #[inline(always)]
    unsafe fn operands(self, i: usize) -> *const u8 {
        // SAFETY: the caller's promise; a group's operands are 16 bytes a column.
        unsafe { self.operands.add(i * 16 * self.group) }
    }

    /// Whether group `i` has a second plane in some row.
    #[inline(always)]
    fn has_fine(self, i: usize) -> bool {
        (self.outliers >> (i * self.group / BLOCK_COLS)) & 1 == 1
    }
}

/// Products of a batch of groups, with the second plane's where there is one.
struct Batch {
    coarse: [Dots; BATCH],
    fine: [Dots; BATCH],
}

impl Batch {
    const ZERO: Self =
        Self { coarse: [const { Dots([[0; 16]; ROWS]) }; BATCH], fine: [const { Dots([[0; 16]; ROWS]) }; BATCH] };

    /// Fills it with the groups from `first` on, four or those that are left.
    ///
    /// # Safety
    /// Tiles are configured; 16 rows of activations are readable.
    #[inline(always)]
    unsafe fn fill(&mut self, groups: Groups, first: usize) {
        // SAFETY: groups below `count` exist; the caller's promise.
        unsafe {
            let whole = first + BATCH <= groups.count;
            if whole {
                product_batch::<false>(groups, first, &mut self.coarse);
            } else {
                for (i, dots) in (first..groups.count).zip(&mut self.coarse) {
                    product(groups.codes(i), groups.operands(i), dots);
                }
            }
            if whole && (first..first + BATCH).filter(|&i| groups.has_fine(i)).count() > 1 {
                // Four in a pipeline take less than two one by one.
                product_batch::<true>(groups, first, &mut self.fine);
                return;
            }
            for (i, dots) in (first..groups.count).zip(&mut self.fine) {
                if groups.has_fine(i) {
                    product(groups.fine_codes(i), groups.operands(i), dots);
                }
            }
        }
    }
}

thread_local! {
    /// Kept, as clearing them takes long beside the products of few rows.
    static BATCHES: RefCell<[Batch; 2]> = const { RefCell::new([const { Batch::ZERO }; 2]) };
}

/// Multiplies a group and stores the result.
///
/// # Safety
/// Tiles are configured for the group's width; 16 rows of codes and the operands are readable.
#[inline(always)]
unsafe fn product(codes: Codes, operands: *const u8, dots: &mut Dots) {
    // SAFETY: reads 16 rows of codes and the operands, writes the 16 rows of `dots`, as the caller
    // promised; touches only the tiles named.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tileloadd tmm4, [{codes} + {act_stride}]",
            "tileloadd tmm6, [{operands} + {line}]",
            "tdpbssd tmm0, tmm4, tmm6",
            "tilestored [{dots} + {line}], tmm0",
            codes = in(reg) codes.first,
            act_stride = in(reg) codes.stride,
            operands = in(reg) operands,
            line = in(reg) 64usize,
            dots = in(reg) dots,
            options(nostack, preserves_flags),
        );
    }
}

/// Multiplies groups `i..i + 4`; `FINE`: the second plane's codes.
///
/// # Safety
/// As [`product`], for each.
#[inline(always)]
unsafe fn product_batch<const FINE: bool>(groups: Groups, i: usize, dots: &mut [Dots; BATCH]) {
    // SAFETY: as in `product`.
    unsafe {
        let codes = |i: usize| if FINE { groups.fine_codes(i) } else { groups.codes(i) };
        asm!(
            "tilezero tmm0",
            "tileloadd tmm4, [{codes0} + {act_stride}]",
            "tileloadd tmm6, [{operands0} + {line}]",
            "tdpbssd tmm0, tmm4, tmm6",
            "tilezero tmm1",
            "tileloadd tmm5, [{codes1} + {act_stride}]",
            "tileloadd tmm7, [{operands1} + {line}]",
            "tdpbssd tmm1, tmm5, tmm7",
            "tilezero tmm2",
            "tileloadd tmm4, [{codes2} + {act_stride}]",
            "tileloadd tmm6, [{operands2} + {line}]",
            "tdpbssd tmm2, tmm4, tmm6",
            "tilezero tmm3",
            "tileloadd tmm5, [{codes3} + {act_stride}]",
            "tileloadd tmm7, [{operands3} + {line}]",
            "tdpbssd tmm3, tmm5, tmm7",
            "tilestored [{dots} + {line}], tmm0",
            "tilestored [{dots} + {line} + 1024], tmm1",
            "tilestored [{dots} + {line} + 2048], tmm2",
            "tilestored [{dots} + {line} + 3072], tmm3",
            codes0 = in(reg) codes(i).first,
            codes1 = in(reg) codes(i + 1).first,
            codes2 = in(reg) codes(i + 2).first,
            codes3 = in(reg) codes(i + 3).first,
            act_stride = in(reg) codes(i).stride,
            operands0 = in(reg) groups.operands(i),
            operands1 = in(reg) groups.operands(i + 1),
            operands2 = in(reg) groups.operands(i + 2),
            operands3 = in(reg) groups.operands(i + 3),
            line = in(reg) 64usize,
            dots = in(reg) dots,
            options(nostack, preserves_flags),
        );
    }
}

/// Scales a group's products and adds them. `FINE`: those of the second plane belong to it, in rows whose
/// block is no outlier all zeros.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn add_scaled<F: Format, const FINE: bool, const R: usize>(
    chunk: &Chunk,
    i: usize,
    acts: ActRows,
    (coarse, fine): (&Dots, &Dots),
    acc: &mut [__m512; R],
) {
    let groups = F::LAYOUT.groups();
    let (block, g) = (i / groups, i % groups);
    // SAFETY: the chunk has the group; 16 rows have the block.
    unsafe {
        let d = _mm512_load_ps(chunk.d.as_ptr().add(i).cast());
        let m = _mm512_load_ps(chunk.m.as_ptr().add(i).cast());
        each_row!(t < R => {
            let a = &*acts.at(t, block);
            let mut dot = _mm512_load_si512(coarse.0.as_ptr().add(t).cast());
            if FINE {
                let shifted = _mm512_sllv_epi32(dot, _mm512_set1_epi32(a.shift.cast_signed()));
                dot = _mm512_add_epi32(shifted, _mm512_load_si512(fine.0.as_ptr().add(t).cast()));
            }
            acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(d, _mm512_set1_ps(a.d)), acc[t]);
            if F::LAYOUT.scale.has_min() {
                let sum_x = if groups == 1 { a.sum_x } else { a.sum_x_half[g] };
                acc[t] = _mm512_fmadd_ps(m, _mm512_set1_ps(sum_x), acc[t]);
            }
        });
    }
}

/// Adds the products of a batch, whose first group is `first`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn add_batch<F: Format, const R: usize>(
    chunk: &Chunk,
    groups: Groups,
    first: usize,
    batch: &Batch,
    acc: &mut [__m512; R],
) {
    for (i, dots) in (first..groups.count).zip(batch.coarse.iter().zip(&batch.fine)) {
        // SAFETY: the chunk has the groups below `count`.
        unsafe {
            if groups.has_fine(i) {
                add_scaled::<F, true, R>(chunk, i, groups.acts, dots, acc);
            } else {
                add_scaled::<F, false, R>(chunk, i, groups.acts, dots, acc);
            }
        }
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
        each_row!(t < R => {
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
    each_row!(t < R => {
        // SAFETY: rows below `valid` exist; masked lanes are not touched.
        unsafe { _mm512_mask_storeu_ps(out.ptr.wrapping_add(t * out.stride), lane_mask(out, valid, t), acc[t]) };
    });
}

/// A tile of rows over a chunk, of which the first `valid` (at most `R`) have results. All 16 rows' activations
/// are readable (`QuantizedActivations` keeps rows to spare); the products of those from `R` on are not looked
/// at, the others' are dropped.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn tile_of_rows<F: Format, const R: usize>(
    chunk: &Chunk,
    num_blocks: usize,
    acts: ActRows,
    out: OutRows,
    valid: usize,
    start: Start,
    batches: &mut [Batch; 2],
) {
    let layout = F::LAYOUT;
    let groups = Groups {
        acts,
        operands: chunk.q.as_ptr().cast(),
        group: layout.group,
        count: num_blocks * layout.groups(),
        // SAFETY: the first `valid` rows exist.
        outliers: unsafe { acts.outliers(valid) },
    };
    let [mut now, mut ahead] = batches.each_mut();
    // SAFETY: groups are below `count`; as promised to `IntKernel::many`.
    unsafe {
        let mut acc = load_acc::<R>(out, valid, start);
        now.fill(groups, 0);
        for first in (0..groups.count).step_by(BATCH) {
            ahead.fill(groups, first + BATCH);
            add_batch::<F, R>(chunk, groups, first, now, &mut acc);
            std::mem::swap(&mut now, &mut ahead);
        }
        store_acc(out, valid, &acc);
    }
}

/// Makes a chunk's codes signed.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn subtract_middle<F: Format>(chunk: &mut Chunk, num_blocks: usize) {
    #[allow(clippy::cast_possible_wrap)] // 128 becomes -128: the same bits are subtracted
    let middle = _mm512_set1_epi8((1u8 << F::LAYOUT.log2_zero) as i8);
    for operand in chunk.q[..num_blocks].as_flattened_mut() {
        // SAFETY: an operand is 64 bytes, aligned.
        unsafe {
            let at = operand.as_mut_ptr().cast::<__m512i>();
            _mm512_store_si512(at, _mm512_sub_epi8(_mm512_load_si512(at), middle));
        }
    }
}

impl IntKernel for Amx {
    // With fewer, a tile's time goes to rows that are not there: measured, 12 rows of `few` take as long.
    const FEW: usize = 12;

    unsafe fn begin<F: Format>() {
        let config = const { TileConfig::new(F::LAYOUT.group) };
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
        let num_blocks = blocks.len();
        // SAFETY: as promised to this method.
        unsafe {
            avx512vnni::widen::<F>(panel, blocks, Minimum::Centred, chunk);
            subtract_middle::<F>(chunk, num_blocks);
        }
    }

    unsafe fn many<F: Format>(
        panels: &[WidenedPanel<'_>],
        num_blocks: usize,
        acts: ActRows,
        num_t: usize,
        start: Start,
    ) {
        BATCHES.with_borrow_mut(|batches| {
            for t in (0..num_t).step_by(ROWS) {
                for panel in panels {
                    // SAFETY: rows `t..` exist; as promised to this method.
                    unsafe {
                        let (chunk, acts) = (panel.chunk, acts.skip(t, 0));
                        let out = OutRows { ptr: panel.out.row(t), ..panel.out };
                        match num_t - t {
                            valid @ ..=8 => tile_of_rows::<F, 8>(chunk, num_blocks, acts, out, valid, start, batches),
                            left => {
                                tile_of_rows::<F, ROWS>(chunk, num_blocks, acts, out, left.min(ROWS), start, batches);
                            }
                        }
                    }
                }
            }
        });
    }
}
