//! Dense products of more than 128 tokens on Hopper: when our kernel is taken, how its tiles are shared out, and the
//! launch. Knows nothing of where buffers lie. Kernel: `kernels/linear_big.cu`.

use super::{Half, Launch};

/// Products of one x that a launch takes at most.
pub(crate) const MAX_PARTS: usize = 3;
/// Tokens of a tile.
pub(crate) const TILE_TOKENS: u32 = 128;
/// Elements of C in a box that the copy engine brings, and features in one that it stores.
pub(crate) const PANEL_COLS: u32 = 64;
/// Tokens in a box that the copy engine stores.
pub(crate) const STORED_TOKENS: u32 = 64;
/// Features of a tile.
const TILE_FEATURES: u32 = 128;
/// Thread blocks of a cluster: tiles along the tokens that share W.
pub(crate) const RANKS: u32 = 2;
/// Rows of a box of W: each of a cluster brings its share.
pub(crate) const W_ROWS: u32 = TILE_FEATURES / RANKS;
const STAGES: u32 = 6;
/// Tokens for which the kernel was measured faster.
const FASTER: std::ops::RangeInclusive<usize> = 129..=256;
const THREADS: u32 = 384;
/// Rows of y lie on multiples of so many bytes, as those of the weights and x.
const ALIGNMENT: u64 = 16;
/// Groups of tokens that are taken side by side.
pub(crate) const STRIP: u32 = 8;

/// The kernel's argument: `LinearBigParams`. Addresses are the device's.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct LinearBigParams {
    /// `CUtensorMap` of x `[T, C]`, boxes of [`PANEL_COLS`] and [`TILE_TOKENS`].
    pub(crate) x_map: [u64; 16],
    /// Of each part's weight `[N, C]`, boxes of [`PANEL_COLS`] and [`W_ROWS`].
    pub(crate) w_map: [[u64; 16]; MAX_PARTS],
    /// Of each part's y `[T, N]`, boxes of [`PANEL_COLS`] and [`STORED_TOKENS`]; read where y is BF16.
    pub(crate) y_map: [[u64; 16]; MAX_PARTS],
    /// Behind the last, no tiles.
    pub(crate) parts: [LinearBigPart; MAX_PARTS],
    /// T.
    pub(crate) num_tokens: u32,
    /// [`Tiles::feature_groups`].
    pub(crate) num_feature_groups: u32,
    /// Of C.
    pub(crate) num_panels: u32,
    /// [`STRIP`].
    pub(crate) strip: u32,
    /// `ActivationType` of every y: F32 or BF16.
    pub(crate) y_type: u32,
    /// Of gated forms, which are for comparison only.
    pub(crate) activation: u32,
}

/// A product of x: `LinearBigPart` of the kernel.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct LinearBigPart {
    /// f32 `[N]`, or 0.
    pub(crate) bias: u64,
    /// `[T, N]`.
    pub(crate) y: u64,
    /// Output features.
    pub(crate) n: u32,
    /// Of [`Tiles::of_parts`].
    pub(crate) num_tiles: u32,
}

const _: () = assert!(size_of::<LinearBigPart>() == 24 && size_of::<LinearBigParams>() == 1024);
const _: () = assert!(std::mem::offset_of!(LinearBigParams, num_tokens) == 968);

/// Whether the copy engine can read a weight `[n, c]` at this address, and write such a y; x lies on a multiple of 16 in
/// any case, as all temporaries.
pub(crate) fn is_reachable(weight: u64, n: usize, c: usize) -> bool {
    let is_aligned = |elements: usize| (elements as u64 * 2).is_multiple_of(ALIGNMENT);
    weight.is_multiple_of(ALIGNMENT) && is_aligned(n) && is_aligned(c)
}

/// The kernel for weights of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearBigVariant {
    /// The weights' type.
    pub(crate) weight: Half,
}

/// How products are cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiles {
    /// Along the features of each part.
    pub(crate) of_parts: [u32; MAX_PARTS],
    /// Along the features of all parts.
    pub(crate) feature_groups: u32,
    /// Clusters' tiles along the tokens.
    pub(crate) token_groups: u32,
}

impl Tiles {
    /// The tiles of outputs (unused ones are 0) for so many tokens.
    pub(crate) fn new(num_tokens: u32, outputs: [u32; MAX_PARTS]) -> Self {
        let of_parts = outputs.map(|n| n.div_ceil(TILE_FEATURES));
        Self {
            of_parts,
            feature_groups: of_parts.iter().fold(0, |sum, &tiles| sum.saturating_add(tiles)),
            token_groups: num_tokens.div_ceil(TILE_TOKENS * RANKS),
        }
    }

    /// Clusters' tiles.
    pub(crate) fn count(&self) -> u32 {
        self.feature_groups.saturating_mul(self.token_groups)
    }
}

impl LinearBigVariant {
    /// Every compiled form.
    pub(crate) const ALL: [Self; 2] = [Self { weight: Half::Bf16 }, Self { weight: Half::F16 }];

    /// The kernel's name.
    pub(crate) fn name(self) -> String {
        format!("linear_big_{}", self.weight.name())
    }
}

/// The launch over so many clusters' tiles, at most `max_clusters` clusters of thread blocks at once.
pub(crate) fn launch(num_tiles: u32, max_clusters: u32) -> Launch {
    // Bytes of `BigShared`, and room to align it.
    let stage = (TILE_TOKENS + TILE_FEATURES) * PANEL_COLS * 2 + 2 * 8;
    let shared_bytes = STAGES * stage + 4 * STORED_TOKENS * PANEL_COLS * 2 + 1024;
    Launch { grid: (RANKS * num_tiles.min(max_clusters), 1), threads: THREADS, shared_bytes }
}

/// Whether this kernel takes less time than the library for products of one x, of these outputs (unused ones are 0): the
/// library has a launch for each. Measured where each cluster has a tile at most; a single product is the library's, which
/// splits C where tiles are few.
pub(crate) fn is_faster(num_tokens: usize, outputs: [u32; MAX_PARTS], max_clusters: u32) -> bool {
    let tiles = Tiles::new(TILE_TOKENS * RANKS, outputs);
    FASTER.contains(&num_tokens) && outputs[1] > 0 && tiles.count() <= max_clusters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_shared_out() {
        // q, k and v of an 8B Llama.
        let tiles = Tiles::new(256, [4096, 1024, 1024]);
        assert_eq!((tiles.of_parts, tiles.feature_groups, tiles.token_groups), ([32, 8, 8], 48, 1));
        assert_eq!(launch(tiles.count(), 66).grid, (96, 1));
        assert_eq!(Tiles::new(129, [8, 0, 0]).count(), 1);
        assert_eq!(launch(1, 66).grid, (2, 1), "no cluster is without work");
        assert_eq!(Tiles::new(257, [257, 8, 0]).of_parts, [3, 1, 0], "a tile belongs to one part");
        assert_eq!(Tiles::new(257, [257, 8, 0]).count(), 8);
        let huge = Tiles::new(u32::MAX, [u32::MAX; MAX_PARTS]);
        assert_eq!(launch(huge.count(), 66).grid, (132, 1), "counts do not overflow");
        assert!(launch(1, 1).shared_bytes <= 227 << 10);
    }

    #[test]
    fn taken_where_it_is_the_fastest() {
        let of_three = |tokens| is_faster(tokens, [4096, 1024, 1024], 66);
        assert!(!of_three(128) && of_three(129) && of_three(256) && !of_three(257));
        assert!(!is_faster(256, [4096, 0, 0], 66), "one product");
        assert!(!is_faster(256, [8192, 1024, 1024], 66), "two tiles for some clusters");
    }

    #[test]
    fn what_the_copy_engine_reaches() {
        assert!(is_reachable(0x210, 8, 104) && is_reachable(0x100, 1000, 8));
        assert!(!is_reachable(0x210, 8, 100) && !is_reachable(0x208, 8, 64) && !is_reachable(0x210, 12, 64));
    }
}
