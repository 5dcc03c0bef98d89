//! The loops around the kernels: which panels, chunks of columns and rows of activations are taken
//! together. Knows the shapes; the instruction sets implement [`IntKernel`] and [`FloatKernel`].
//!
//! Every kernel of every loop below makes the same sum for an output element, in this order:
//!
//! ```text
//! int8: for each block of 32 columns, for each of its groups:
//!           dot = sum over the group of (q_w - zero) * q_x          exact, i32
//!           acc = fma(f32(dot), d_w * d_x, acc)
//!           acc = fma(m_w + zero * d_w, sum_x, acc)                 types with minima
//! f32:  for each block: part = fma(w, x, part) from column 0 up; acc = acc + part
//! ```
//!
//! so that the result does not depend on how the work was cut. In int8 mode it does not even depend
//! on the instruction set.

use super::activations::{ActRows, Codes, TILE_ROWS};
use super::layout::{BLOCK_COLS, Format, PANEL_ROWS, PanelShape};
use std::cell::RefCell;
use std::ops::Range;

/// Blocks that are widened together: 768 columns of one panel, 18 KiB (up to 54 for tile units).
pub(super) const CHUNK_BLOCKS: usize = 24;

/// Operands that a widened block may have.
pub(super) const MAX_OPERANDS: usize = 32;

/// Panels that pass together over rows of activations, which are then read half as often.
pub(super) const PANELS: usize = 2;

/// Part of a panel, widened: codes as bytes, scales as f32.
#[repr(C, align(64))]
pub(super) struct Chunk {
    /// Operands of one block after the other: eight each (see `layout`), or what the kernel makes of them, up to
    /// [`MAX_OPERANDS`] each.
    pub(super) q: [[u8; 64]; MAX_OPERANDS * CHUNK_BLOCKS],
    /// Scale of each group.
    pub(super) d: [[f32; PANEL_ROWS]; 2 * CHUNK_BLOCKS],
    /// What multiplies the sum of activations (int8) or is added to `d q` (f32).
    pub(super) m: [[f32; PANEL_ROWS]; 2 * CHUNK_BLOCKS],
}

impl Chunk {
    const ZERO: Self = Self {
        q: [[0; 64]; MAX_OPERANDS * CHUNK_BLOCKS],
        d: [[0.0; PANEL_ROWS]; 2 * CHUNK_BLOCKS],
        m: [[0.0; PANEL_ROWS]; 2 * CHUNK_BLOCKS],
    };
}

/// A panel where it lies.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    /// First byte; `shape.bytes` are valid, aligned to 64.
    pub(super) base: *const u8,
    /// Its regions.
    pub(super) shape: PanelShape,
}

impl Panel {
    /// Asks for what the panel `ahead` of this one has for `block`: a panel is far enough to hide memory, and
    /// the hardware's own streams would have to start anew at each region. A hint; past the end it does nothing.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    #[inline(always)]
    pub(super) fn prefetch<F: Format>(self, ahead: usize, block: usize) {
        let layout = F::LAYOUT;
        let next = self.base.wrapping_add(ahead * self.shape.bytes);
        let scale_bytes = layout.groups() * layout.scale.bytes();
        let codes = next.wrapping_add(block * layout.block_bytes());
        let scales = next.wrapping_add(self.shape.scales_at + block * scale_bytes);
        for line in 0..layout.bits {
            prefetch_line(codes.wrapping_add(64 * line));
        }
        prefetch_line(scales);
    }

    /// The bytes, for code that is not after speed.
    ///
    /// # Safety
    /// The panel's memory lives and is not written as long as the slice.
    pub(super) unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: by the field's definition and the caller's promise.
        unsafe { std::slice::from_raw_parts(self.base, self.shape.bytes) }
    }
}

#[cfg(target_arch = "aarch64")]
use crate::cpu::neon::prefetch as prefetch_line;

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch_line(at: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: SSE is part of the baseline; a prefetch reads nothing that a program can see.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
}

/// Plain rows, from some column of some row on.
#[derive(Clone, Copy)]
pub(super) struct FloatRows {
    /// The column of the first row.
    pub(super) ptr: *const f32,
    /// Elements from one row to the next.
    pub(super) stride: usize,
}

/// Where a panel's results go: rows of `width` (at most 16) elements.
#[derive(Clone, Copy)]
pub(super) struct OutRows {
    /// The panel's first column in the first row.
    pub(super) ptr: *mut f32,
    /// Elements from one row to the next.
    pub(super) stride: usize,
    /// Columns that may be touched.
    pub(super) width: usize,
}

impl OutRows {
    /// # Safety
    /// Row `t` exists.
    #[inline(always)]
    pub(super) unsafe fn row(self, t: usize) -> *mut f32 {
        // SAFETY: the caller's promise.
        unsafe { self.ptr.add(t * self.stride) }
    }
}

/// Whether a chunk is a row's first: sums start at zero, else at what `out` holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    Zero,
    FromOut,
}

/// What a widened chunk's `m` holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Minimum {
    /// `m + zero d`: codes count from the middle.
    Centred,
    /// `m` (`-zero d` in symmetric types).
    Plain,
}

/// Integer kernels of one instruction set.
///
/// # Safety
/// All methods: the processor has the instruction set; pointers are valid for what the arguments say.
pub(super) trait IntKernel {
    /// Up to this many rows, `few` reads the panel as it is packed.
    fn few_up_to<F: Format>() -> usize;
    /// Rows of activations that `rows` takes at most, a divisor of a tile's.
    const ROWS: usize;
    /// Bytes of quantised rows that pass over widened panels before the next are widened, so that they stay in
    /// the second-level cache.
    const CACHE_BYTES: usize = 256 << 10;

    /// Blocks that are widened together for so many rows, at most [`CHUNK_BLOCKS`].
    fn chunk_blocks(_num_t: usize) -> usize {
        CHUNK_BLOCKS
    }

    /// Once before a series of `rows`.
    unsafe fn begin<F: Format>() {}
    /// Once after it.
    unsafe fn end() {}
    /// `num_t` (1 to `few_up_to`) rows over a whole panel.
    unsafe fn few<F: Format>(panel: Panel, acts: ActRows, num_t: usize, out: OutRows);
    /// Widens `blocks` of a panel, with centred minima.
    unsafe fn widen<F: Format>(panel: Panel, blocks: Range<usize>, chunk: &mut Chunk);
    /// `num_t` (1 to `ROWS`) rows over the first `num_blocks` blocks of a widened chunk. `acts` starts at a multiple
    /// of `ROWS` of its tile.
    unsafe fn rows<F: Format>(
        chunk: &Chunk,
        num_blocks: usize,
        acts: ActRows,
        num_t: usize,
        out: OutRows,
        start: Start,
    );
}

/// f32 kernels of one instruction set.
///
/// # Safety
/// As [`IntKernel`].
pub(super) trait FloatKernel {
    /// Widens `blocks` of a panel, with plain minima.
    unsafe fn widen_plain<F: Format>(panel: Panel, blocks: Range<usize>, chunk: &mut Chunk);
    /// Any number of rows over the first `num_blocks` blocks of a chunk.
    unsafe fn many_f32<F: Format>(
        chunk: &Chunk,
        num_blocks: usize,
        x: FloatRows,
        num_t: usize,
        out: OutRows,
        start: Start,
    );
}

/// The panels of a weight and the tile of the result that is wanted.
#[derive(Clone, Copy)]
pub(super) struct Job {
    /// First byte of the first panel.
    pub(super) panels: *const u8,
    /// Their shape.
    pub(super) shape: PanelShape,
    /// Rows of activations.
    pub(super) num_t: usize,
    /// First weight row, a multiple of 16.
    pub(super) first_n: usize,
    /// End of the weight rows.
    pub(super) end_n: usize,
    /// Result of the first row of activations and weight row 0.
    pub(super) out: *mut f32,
    /// Elements from one result row to the next.
    pub(super) out_stride: usize,
}

impl Job {
    fn panel(&self, idx: usize) -> Panel {
        // SAFETY: `idx` comes from `panel_range`, inside the weight.
        let base = unsafe { self.panels.add(idx * self.shape.bytes) };
        Panel { base, shape: self.shape }
    }

    fn panel_range(&self) -> Range<usize> {
        self.first_n / PANEL_ROWS..self.end_n.div_ceil(PANEL_ROWS)
    }

    fn out(&self, panel_idx: usize, t: usize) -> OutRows {
        let col = panel_idx * PANEL_ROWS;
        // SAFETY: inside the tile that the caller of `matmul_tile` vouched for.
        let ptr = unsafe { self.out.add(t * self.out_stride + col) };
        OutRows { ptr, stride: self.out_stride, width: PANEL_ROWS.min(self.end_n - col) }
    }

    /// Columns that are widened together, about equally many each time.
    fn chunks(&self, at_most: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let num_blocks = self.shape.num_blocks;
        let size = num_blocks.div_ceil(num_blocks.div_ceil(at_most).max(1));
        (0..num_blocks).step_by(size.max(1)).map(move |at| at..(at + size).min(num_blocks))
    }

    /// Rows taken together, in whole tiles.
    fn rows_together(&self, cache_bytes: usize) -> usize {
        let row_bytes = self.shape.num_blocks.max(1) * size_of::<Codes>();
        (cache_bytes / row_bytes).clamp(TILE_ROWS, 512) / TILE_ROWS * TILE_ROWS
    }
}

/// The product in int8 mode.
///
/// # Safety
/// The processor has `K`'s instruction set; `job` and `acts` are valid for its shape.
pub(super) unsafe fn run_int<K: IntKernel, F: Format>(job: &Job, acts: ActRows) {
    if job.num_t <= K::few_up_to::<F>() {
        for panel_idx in job.panel_range() {
            // SAFETY: the caller's promise.
            unsafe { K::few::<F>(job.panel(panel_idx), acts, job.num_t, job.out(panel_idx, 0)) };
        }
        return;
    }
    // SAFETY: the caller's promise.
    CHUNKS.with_borrow_mut(|chunks| unsafe { run_many::<K, F>(job, acts, chunks) });
}

thread_local! {
    /// Where panels are widened. Kept: to clear it anew would take a good part of a small tile's time.
    static CHUNKS: RefCell<[Chunk; PANELS]> = const { RefCell::new([const { Chunk::ZERO }; PANELS]) };
}

/// [`run_int`] for more rows than [`IntKernel::few_up_to`].
///
/// # Safety
/// As [`run_int`].
unsafe fn run_many<K: IntKernel, F: Format>(job: &Job, acts: ActRows, chunks: &mut [Chunk; PANELS]) {
    let rows_together = job.rows_together(K::CACHE_BYTES);
    // SAFETY: the caller's promise; blocks and rows stay inside the shapes.
    unsafe {
        K::begin::<F>();
        for first_t in (0..job.num_t).step_by(rows_together) {
            let num_t = rows_together.min(job.num_t - first_t);
            for first_panel in job.panel_range().step_by(PANELS) {
                let num_panels = PANELS.min(job.panel_range().end - first_panel);
                for blocks in job.chunks(K::chunk_blocks(job.num_t)) {
                    let start = if blocks.start == 0 { Start::Zero } else { Start::FromOut };
                    for (i, chunk) in chunks[..num_panels].iter_mut().enumerate() {
                        K::widen::<F>(job.panel(first_panel + i), blocks.clone(), chunk);
                    }
                    let acts = acts.skip(first_t, blocks.start);
                    for t in (0..num_t).step_by(K::ROWS) {
                        let (acts, rows) = (acts.skip(t, 0), K::ROWS.min(num_t - t));
                        for (i, chunk) in chunks[..num_panels].iter().enumerate() {
                            let out = job.out(first_panel + i, first_t + t);
                            K::rows::<F>(chunk, blocks.len(), acts, rows, out, start);
                        }
                    }
                }
            }
        }
        K::end();
    }
}

/// The product in f32 mode; `x` has `32 * num_blocks` columns.
///
/// # Safety
/// As [`run_int`].
pub(super) unsafe fn run_float<K: FloatKernel, F: Format>(job: &Job, x: FloatRows) {
    CHUNKS.with_borrow_mut(|[chunk, ..]| {
        for panel_idx in job.panel_range() {
            for blocks in job.chunks(CHUNK_BLOCKS) {
                let start = if blocks.start == 0 { Start::Zero } else { Start::FromOut };
                // SAFETY: the caller's promise; blocks stay inside the shapes.
                unsafe {
                    K::widen_plain::<F>(job.panel(panel_idx), blocks.clone(), chunk);
                    let x = FloatRows { ptr: x.ptr.add(blocks.start * BLOCK_COLS), stride: x.stride };
                    K::many_f32::<F>(chunk, blocks.len(), x, job.num_t, job.out(panel_idx, 0), start);
                }
            }
        }
    });
}
