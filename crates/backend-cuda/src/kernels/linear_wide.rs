//! Dense gated products of some hundred tokens on Hopper: when our kernel is taken, how its tiles are shared out, and the
//! launch. Knows nothing of where buffers lie. Kernel: `kernels/linear_wide.cu`.

use super::{Half, Launch};

/// Elements of C in a box that the copy engine brings.
pub(crate) const PANEL_COLS: u32 = 64;
/// Rows of the gate, and of up, in a tile.
pub(crate) const TILE_FEATURES: u32 = 112;
/// Tokens of a tile.
const TILE_TOKENS: u32 = 256;
/// Thread blocks of a cluster: neighbouring tiles, which share x.
pub(crate) const RANKS: u32 = 2;
const SLOTS: u32 = 3;
const THREADS: u32 = 256;
/// `STAGED_STRIDE` of 16 tokens, of each warp.
const STAGED_BYTES: u32 = THREADS / 32 * 16 * 144;
/// Tokens for which the kernel was measured faster: nearly whole tiles, or one that ends early.
const FASTER: [std::ops::RangeInclusive<usize>; 2] = [129..=256, 416..=512];
/// The same of the part of the chip's multiprocessors that have a tile, in the mean over the rounds that it takes.
const LEAST_BUSY_PERCENT: u64 = 90;
/// Rows of y lie on multiples of so many bytes, as those of the weights and x.
const ALIGNMENT: u64 = 16;

/// The kernel's argument: `LinearWideParams`. Addresses are the device's.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct LinearWideParams {
    /// `CUtensorMap` of x `[T, C]`, boxes of [`PANEL_COLS`] and [`shared_tokens`].
    pub(crate) x_map: [u64; 16],
    /// Of gate and up `[N, C]`, boxes of [`PANEL_COLS`] and [`TILE_FEATURES`].
    pub(crate) w_map: [[u64; 16]; 2],
    /// `[T, N]`.
    pub(crate) y: u64,
    /// N.
    pub(crate) n: u32,
    /// T.
    pub(crate) num_tokens: u32,
    /// [`token_tiles`].
    pub(crate) num_token_tiles: u32,
    /// [`shared_tokens`].
    pub(crate) x_rows: u32,
    /// Of C.
    pub(crate) num_panels: u32,
    /// `ActivationType` of y: F32 or BF16.
    pub(crate) y_type: u32,
    /// `GateActivation`.
    pub(crate) activation: u32,
    /// The kernel's own.
    pub(crate) unused: [u32; 23],
}

const _: () = assert!(size_of::<LinearWideParams>() == 512);
const _: () = assert!(std::mem::offset_of!(LinearWideParams, activation) == 416);

/// The kernel for weights of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearWideVariant {
    /// The weights' type.
    pub(crate) weight: Half,
}

impl LinearWideVariant {
    /// Every compiled form.
    pub(crate) const ALL: [Self; 2] = [Self { weight: Half::Bf16 }, Self { weight: Half::F16 }];

    /// The kernel's name.
    pub(crate) fn name(self) -> String {
        format!("linear_wide_{}", self.weight.name())
    }
}

/// Whether the copy engine can read a weight `[n, c]` at this address, and 16 bytes be stored at once to such a y; x and y
/// lie on a multiple of 16 in any case, as all temporaries.
pub(crate) fn is_reachable(weight: u64, n: usize, c: usize) -> bool {
    let is_aligned = |elements: usize| (elements as u64 * 2).is_multiple_of(ALIGNMENT);
    weight.is_multiple_of(ALIGNMENT) && is_aligned(n) && is_aligned(c)
}

/// Tokens of x that each of a cluster brings for both: whole groups of 8, few of them behind the last token, where a box
/// takes long.
pub(crate) fn shared_tokens(num_tokens: u32) -> u32 {
    num_tokens.min(TILE_TOKENS).div_ceil(RANKS).next_multiple_of(8)
}

/// Tiles along the tokens.
pub(crate) fn token_tiles(num_tokens: u32) -> u32 {
    num_tokens.div_ceil(TILE_TOKENS)
}

/// Clusters for so many features.
fn clusters(n: u32) -> u32 {
    n.div_ceil(TILE_FEATURES).div_ceil(RANKS)
}

/// The launch for so many tokens and features.
pub(crate) fn launch(num_tokens: u32, n: u32) -> Launch {
    // Bytes of `WideShared`: three barriers a slot, each part on a multiple of 1,024 at most.
    let slot = (TILE_TOKENS + 2 * TILE_FEATURES) * PANEL_COLS * 2 + 3 * 8;
    let shared_bytes = (SLOTS * slot + STAGED_BYTES).next_multiple_of(1024);
    Launch { grid: (clusters(n).saturating_mul(RANKS * token_tiles(num_tokens)), 1), threads: THREADS, shared_bytes }
}

/// Whether this kernel takes less time than the library for gate and up of `n` rows each, and what is between them. Tiles
/// are high: where they do not fill the chip the library's smaller ones do better.
pub(crate) fn is_faster(num_tokens: usize, n: u32, max_clusters: u32) -> bool {
    let Some(tokens) = FASTER.iter().find(|tokens| tokens.contains(&num_tokens)) else { return false };
    let tiles = tokens.end().div_ceil(TILE_TOKENS as usize) as u64;
    let rounds = (u64::from(clusters(n)) * tiles).div_ceil(u64::from(max_clusters.max(1)));
    let room = rounds * u64::from(max_clusters) * u64::from(RANKS * TILE_FEATURES);
    n > 0 && u64::from(n) * tiles * 100 >= room * LEAST_BUSY_PERCENT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tile_has_a_thread_block() {
        assert_eq!(launch(256, 14_336).grid, (128, 1), "an 8B Llama's");
        assert_eq!(launch(129, 8).grid, (2, 1), "clusters are whole");
        assert_eq!(launch(200, 225).grid, (4, 1));
        assert_eq!(launch(257, 225).grid, (8, 1));
        assert_eq!(launch(256, 14_336).shared_bytes, 203_776);
    }

    #[test]
    fn both_of_a_cluster_bring_all_tokens() {
        for (tokens, shared) in [(129, 72), (136, 72), (145, 80), (192, 96), (255, 128), (256, 128)] {
            assert_eq!(shared_tokens(tokens), shared, "{tokens}");
            assert!(RANKS * shared >= tokens && RANKS * shared < tokens + 16);
        }
    }

    #[test]
    fn taken_where_it_is_the_fastest() {
        let of_llama = |tokens| is_faster(tokens, 14_336, 66);
        assert!(!of_llama(128) && of_llama(129) && of_llama(256) && !of_llama(257));
        assert!(!of_llama(415) && of_llama(416) && of_llama(512) && !of_llama(513));
        assert!(is_faster(200, 28_672, 66), "two full rounds");
        assert!(!is_faster(200, 18_944, 66), "the second round is half empty");
        assert!(!is_faster(256, 7168, 66) && is_faster(512, 7168, 66), "half a round, and a full one");
        assert!(!is_faster(200, 4864, 66) && !is_faster(200, 0, 66));
        assert!(is_faster(200, u32::MAX, 66), "counts do not overflow");
    }

    #[test]
    fn what_the_copy_engine_reaches() {
        assert!(is_reachable(0x210, 8, 104) && is_reachable(0x100, 1000, 8));
        assert!(!is_reachable(0x210, 8, 100) && !is_reachable(0x208, 8, 64) && !is_reachable(0x210, 12, 64));
    }
}
