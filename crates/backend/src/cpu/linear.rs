//! The product op: splits `x · weightᵀ` into tiles over the pool and adds biases. The split is a pure
//! function; what a tile computes is the business of `float_linear` and `quant`, which both keep the
//! order of each sum free of the split.

use super::float_linear::FloatWeight;
use super::pool::ThreadPool;
use super::quant::{self, Activations, PackedWeight};
use crate::{BackendError, DeviceBuffer};
use std::any::Any;
use std::ops::Range;

/// Products handled by one job; ops with more parts run several jobs.
pub(crate) const MAX_PARTS: usize = 8;
/// A tile reads at least this much weight, so that claiming it costs nothing beside it.
const MIN_TILE_BYTES: usize = 24 << 10;
/// And at most this much: a thread that is late by a tile must not keep the others waiting for long.
const MAX_TILE_BYTES: usize = 512 << 10;
/// A tile has at most this many output features when many tokens share the weights.
const MAX_TILE_FEATURES: usize = 128;
/// Tokens are split only into pieces of at least this many: each piece reads the weights again.
const MIN_TILE_TOKENS: usize = 32;
/// Tiles wanted for each thread, so that an unlucky last tile costs little.
const TILES_PER_THREAD: usize = 8;

/// A matrix being written by several threads, each its own tile.
#[derive(Clone, Copy)]
pub(crate) struct OutMatrix {
    ptr: *mut f32,
    num_cols: usize,
}

// SAFETY: the view only carries the address; whoever writes through it owns its tile.
unsafe impl Send for OutMatrix {}
// SAFETY: as for Send.
unsafe impl Sync for OutMatrix {}

impl OutMatrix {
    /// A view of `out`, rows of `num_cols`.
    pub(crate) fn new(out: &mut [f32], num_cols: usize) -> Self {
        Self { ptr: out.as_mut_ptr(), num_cols }
    }

    /// Elements from one row to the next.
    pub(crate) fn row_stride(self) -> usize {
        self.num_cols
    }

    /// The element `[row, col]`.
    ///
    /// # Safety
    /// Inside the matrix.
    pub(crate) unsafe fn at(self, row: usize, col: usize) -> *mut f32 {
        // SAFETY: inside the matrix by contract.
        unsafe { self.ptr.add(row * self.num_cols + col) }
    }

    /// The elements `[row, cols]`.
    ///
    /// # Safety
    /// Inside the matrix, and nobody else touches them while the slice lives.
    pub(crate) unsafe fn row_mut<'a>(self, row: usize, cols: Range<usize>) -> &'a mut [f32] {
        // SAFETY: inside the matrix and unshared, by contract.
        unsafe { std::slice::from_raw_parts_mut(self.at(row, cols.start), cols.len()) }
    }
}

/// A loaded weight.
pub(crate) enum CpuWeight {
    Float(FloatWeight),
    Quantized(PackedWeight),
}

impl DeviceBuffer for CpuWeight {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn len_bytes(&self) -> usize {
        match self {
            CpuWeight::Float(weight) => weight.len_bytes(),
            CpuWeight::Quantized(weight) => weight.len_bytes(),
        }
    }
}

impl CpuWeight {
    /// One row's exact values.
    pub(crate) fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        match self {
            CpuWeight::Float(weight) => weight.dequantize_row(row, out),
            CpuWeight::Quantized(weight) => weight.dequantize_row(row, out),
        }
    }

    fn row_tile(&self) -> usize {
        match self {
            CpuWeight::Float(_) => FloatWeight::ROW_TILE,
            CpuWeight::Quantized(weight) => weight.row_tile(),
        }
    }

    /// Whether its product reads quantised rows (else f32 rows).
    pub(crate) fn wants_quantized(&self) -> bool {
        matches!(self, CpuWeight::Quantized(weight) if weight.wants_quantized())
    }
}

/// One product with its shapes checked.
pub(crate) struct CheckedPart<'a> {
    pub(crate) weight: &'a CpuWeight,
    pub(crate) rows: usize,
    /// `[N]`.
    pub(crate) bias: Option<&'a [f32]>,
    /// `[T, N]`.
    pub(crate) out: OutMatrix,
}

/// How one part is cut into tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TileGrid {
    num_rows: usize,
    num_tokens: usize,
    tile_rows: usize,
    tile_tokens: usize,
}

impl TileGrid {
    /// Cuts a weight of `num_rows` rows of `row_bytes` for `num_tokens` tokens, where the whole op
    /// reads `op_bytes` of weights. Row borders are multiples of `row_tile`.
    pub(crate) fn plan(
        num_rows: usize,
        row_bytes: usize,
        row_tile: usize,
        num_tokens: usize,
        op_bytes: usize,
        num_threads: usize,
    ) -> Self {
        let row_tile = row_tile.max(1);
        let wanted_tiles = num_threads * TILES_PER_THREAD;
        let target_bytes =
            if num_threads == 1 { usize::MAX } else { (op_bytes / wanted_tiles).clamp(MIN_TILE_BYTES, MAX_TILE_BYTES) };
        let mut tile_rows = (target_bytes / row_bytes.max(1)).max(1);
        if num_tokens >= MIN_TILE_TOKENS {
            tile_rows = tile_rows.min(MAX_TILE_FEATURES);
        }
        let tile_rows = tile_rows.min(num_rows.max(1)).next_multiple_of(row_tile);
        let row_tiles = num_rows.div_ceil(tile_rows).max(1);
        let token_tiles = if num_threads == 1 { 1 } else { wanted_tiles.div_ceil(row_tiles) };
        let tile_tokens = num_tokens.div_ceil(token_tiles).next_multiple_of(MIN_TILE_TOKENS).min(num_tokens.max(1));
        Self { num_rows, num_tokens, tile_rows, tile_tokens }
    }

    /// Tiles in the grid.
    pub(crate) fn num_tiles(&self) -> usize {
        self.num_rows.div_ceil(self.tile_rows.max(1)) * self.num_tokens.div_ceil(self.tile_tokens.max(1))
    }

    /// Tile `idx` as (tokens, rows).
    pub(crate) fn tile(&self, idx: usize) -> (Range<usize>, Range<usize>) {
        let token_tiles = self.num_tokens.div_ceil(self.tile_tokens);
        let (row_idx, token_idx) = (idx / token_tiles, idx % token_tiles);
        let cut = |idx: usize, size: usize, end: usize| idx * size..((idx + 1) * size).min(end);
        (cut(token_idx, self.tile_tokens, self.num_tokens), cut(row_idx, self.tile_rows, self.num_rows))
    }
}

/// Runs up to [`MAX_PARTS`] products over `num_tokens` rows of `cols`.
pub(crate) fn run(
    pool: &ThreadPool,
    acts: Activations<'_>,
    num_tokens: usize,
    cols: usize,
    parts: &[Option<CheckedPart<'_>>; MAX_PARTS],
) -> Result<(), BackendError> {
    if num_tokens == 0 {
        return Ok(());
    }
    let op_bytes = parts.iter().flatten().map(|part| part.weight.len_bytes()).sum();
    let mut grids = [TileGrid::default(); MAX_PARTS];
    for (grid, part) in grids.iter_mut().zip(parts.iter().flatten()) {
        let row_bytes = part.weight.len_bytes() / part.rows.max(1);
        *grid = TileGrid::plan(part.rows, row_bytes, part.weight.row_tile(), num_tokens, op_bytes, pool.num_threads());
    }
    let total_tiles = grids.iter().map(TileGrid::num_tiles).sum();
    pool.run(total_tiles, &|mut tile_idx| {
        for (grid, part) in grids.iter().zip(parts.iter().flatten()) {
            let num_tiles = grid.num_tiles();
            if tile_idx < num_tiles {
                let (tokens, rows) = grid.tile(tile_idx);
                // SAFETY: tiles of one grid are disjoint and inside the part's output (its shape was
                // checked); outputs of different parts are different tensors.
                unsafe { product_tile(part, acts, cols, tokens, rows) };
                return;
            }
            tile_idx -= num_tiles;
        }
    })
}

/// # Safety
/// The tile is inside `part.out` and nobody else touches it.
unsafe fn product_tile(
    part: &CheckedPart<'_>,
    acts: Activations<'_>,
    cols: usize,
    tokens: Range<usize>,
    rows: Range<usize>,
) {
    match part.weight {
        // SAFETY: this function's contract.
        CpuWeight::Float(weight) => unsafe {
            weight.matmul_tile(acts.x, cols, tokens.clone(), rows.clone(), part.out);
        },
        // SAFETY: this function's contract.
        CpuWeight::Quantized(weight) => unsafe {
            quant::matmul_tile(weight, acts, tokens.clone(), rows.clone(), part.out);
        },
    }
    if let Some(bias) = part.bias {
        for token in tokens {
            // SAFETY: this function's contract.
            let out = unsafe { part.out.row_mut(token, rows.clone()) };
            out.iter_mut().zip(&bias[rows.clone()]).for_each(|(out, bias)| *out += bias);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_output_once() {
        for num_threads in [1, 2, 64] {
            for num_rows in [1, 15, 576, 49_152] {
                for num_tokens in [1, 2, 31, 33, 512] {
                    for row_tile in [1, 16] {
                        let grid = TileGrid::plan(num_rows, 360, row_tile, num_tokens, num_rows * 400, num_threads);
                        let mut seen = vec![0_u8; num_rows * num_tokens];
                        for idx in 0..grid.num_tiles() {
                            let (tokens, rows) = grid.tile(idx);
                            assert!(rows.start.is_multiple_of(row_tile) && !tokens.is_empty() && !rows.is_empty());
                            for token in tokens {
                                rows.clone().for_each(|row| seen[token * num_rows + row] += 1);
                            }
                        }
                        assert!(seen.iter().all(|&n| n == 1), "{grid:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn decode_splits_large_weights_and_leaves_small_ones_whole() {
        let grid =
            |num_rows, tokens, threads| TileGrid::plan(num_rows, 360, 4, tokens, num_rows * 360, threads).num_tiles();
        assert_eq!(grid(64, 1, 2), 1);
        assert_eq!(grid(1536, 1, 1), 1);
        assert!(grid(49_152, 1, 2) >= 16);
        assert!(grid(192, 512, 2) >= 4);
    }
}
