//! Prefill attention: which of the two kernels runs, and in which order tiles of query rows are worked on.
//! Knows nothing of where buffers lie. Kernels: `kernels/attention_prefill.cu` (Hopper, head sizes 64 and 128)
//! and `kernels/attention_prefill_any.cu`.

use super::{Half, Launch};

/// One sequence with new tokens, whose K and V are already in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefillSeq {
    /// Row of its first new token in q and out.
    pub(crate) q_row: u32,
    /// New tokens; at least 1.
    pub(crate) q_len: u32,
    /// Tokens in the cache, the new ones included.
    pub(crate) kv_len: u32,
    /// Where its table starts in the packed block tables.
    pub(crate) table_start: u32,
}

/// A tile of query rows: `PrefillTile` in the kernels. Row r of a sequence is new token `r / G`, head `r % G` of
/// the KV head's group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct PrefillTile {
    /// As in [`PrefillSeq`].
    pub(crate) q_row: u32,
    /// As in [`PrefillSeq`].
    pub(crate) q_len: u32,
    /// As in [`PrefillSeq`].
    pub(crate) kv_len: u32,
    /// As in [`PrefillSeq`].
    pub(crate) table_start: u32,
    /// The tile's first row.
    pub(crate) first: u32,
}

/// The kernels' argument: `PrefillParams`. Addresses are the device's.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct PrefillParams {
    /// `CUtensorMap` of the pool tensor, see [`KvMap`]; unread by the kernel for any chip.
    pub(crate) kv_map: [u64; 16],
    /// `[T, q_stride]`; head h of a row at `h * E`.
    pub(crate) q: u64,
    /// `[T, out_stride]`.
    pub(crate) out: u64,
    /// Pool tensor `[num_blocks, 2, K, block_size, E]`.
    pub(crate) kv: u64,
    /// `u32`, all sequences end to end.
    pub(crate) block_table: u64,
    /// [`PrefillTile`]s as [`fill_tiles`] orders them.
    pub(crate) tiles: u64,
    /// f32 `[H]`, or 0.
    pub(crate) sinks: u64,
    /// Multiplies q·k.
    pub(crate) scale: f32,
    /// 0: none.
    pub(crate) soft_cap: f32,
    /// Tokens; 0: none.
    pub(crate) window: u32,
    /// H.
    pub(crate) num_heads: u32,
    /// K.
    pub(crate) num_kv_heads: u32,
    /// Block sizes are powers of two.
    pub(crate) block_size_log2: u32,
    /// Elements from row to row of q.
    pub(crate) q_stride: u32,
    /// Elements from row to row of out.
    pub(crate) out_stride: u32,
    /// `ActivationType` of q.
    pub(crate) q_type: u32,
    /// `ActivationType` of out.
    pub(crate) out_type: u32,
    /// Tiles times K.
    pub(crate) num_work: u32,
}

const _: () = assert!(size_of::<PrefillTile>() == 20 && size_of::<PrefillParams>() == 256);

/// What `cuTensorMapEncodeTiled` is asked for: the pool tensor as rows of one token and head, read in boxes.
/// 16-bit elements, no interleave, 128-byte swizzle, 256-byte L2 promotion, zeros outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvMap {
    /// Elements of a row, rows.
    pub(crate) dims: [u64; 2],
    /// Bytes from row to row.
    pub(crate) stride_bytes: u64,
    /// Elements and rows of a box.
    pub(crate) box_dims: [u32; 2],
}

impl KvMap {
    /// The map of a pool tensor of `num_blocks` blocks.
    pub(crate) fn new(num_blocks: u64, num_kv_heads: u32, block_size: u32, head_dim: u32) -> Self {
        Self {
            dims: [u64::from(head_dim), num_blocks * 2 * u64::from(num_kv_heads) * u64::from(block_size)],
            stride_bytes: u64::from(head_dim) * 2,
            box_dims: [64, block_size.min(128)],
        }
    }
}

/// A compiled form of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefillVariant {
    kv: Half,
    head_dim: u32,
    /// Warpgroup products and the copy engine.
    hopper: bool,
}

impl PrefillVariant {
    /// The variant for a shape; `None` where there is no kernel. `hopper`: the chip runs sm_90a images.
    pub(crate) fn select(kv: Half, head_dim: u32, hopper: bool) -> Option<Self> {
        let hopper = hopper && matches!(head_dim, 64 | 128);
        matches!(head_dim, 64 | 80 | 96 | 128 | 256).then_some(Self { kv, head_dim, hopper })
    }

    /// Whether the kernel reads the pool through [`PrefillParams::kv_map`].
    pub(crate) fn needs_map(&self) -> bool {
        self.hopper
    }

    /// The kernel's name.
    pub(crate) fn name(&self) -> String {
        let any = if self.hopper { "" } else { "_any" };
        format!("attention_prefill{any}_{}_e{}", self.kv.name(), self.head_dim)
    }

    /// Rows of a tile.
    pub(crate) fn tile_rows(&self) -> u32 {
        if self.hopper { 128 } else { 64 }
    }

    /// The launch for `num_work` tiles times KV heads. The Hopper kernel's thread blocks stay and take several.
    pub(crate) fn launch(&self, num_work: u32, num_sms: u32) -> Launch {
        if self.hopper {
            Launch { grid: (num_work.min(num_sms), 1), threads: 384, shared_bytes: self.shared_bytes() }
        } else {
            Launch { grid: (num_work, 1), threads: 128, shared_bytes: self.shared_bytes() }
        }
    }

    fn shared_bytes(&self) -> u32 {
        if self.hopper {
            // Two tiles each of Q, K and V, the barriers' kilobyte, and one to start on a multiple of 1,024.
            6 * 128 * self.head_dim * 2 + 2048
        } else {
            let keys = if self.head_dim > 128 { 32 } else { 64 };
            (64 + 4 * keys) * (self.head_dim * 2 + 16)
        }
    }
}

/// Lists the tiles of all sequences, costliest first, so that the last ones to run are short. `group` is H / K,
/// `rows` [`PrefillVariant::tile_rows`]. Cost: a sort of the tiles.
pub(crate) fn fill_tiles(seqs: &[PrefillSeq], group: u32, rows: u32, window: Option<u32>, tiles: &mut Vec<PrefillTile>) {
    tiles.clear();
    for seq in seqs {
        let PrefillSeq { q_row, q_len, kv_len, table_start } = *seq;
        let starts = (0..q_len * group).step_by(rows as usize);
        tiles.extend(starts.map(|first| PrefillTile { q_row, q_len, kv_len, table_start, first }));
    }
    tiles.sort_by_key(|tile| std::cmp::Reverse(keys_of(tile, group, rows, window)));
}

/// Keys a tile walks over, not rounded.
fn keys_of(tile: &PrefillTile, group: u32, rows: u32, window: Option<u32>) -> u32 {
    let offset = tile.kv_len - tile.q_len;
    let first_token = tile.first / group;
    let last_token = ((tile.first + rows - 1) / group).min(tile.q_len - 1);
    let hidden = window.map_or(0, |w| (offset + first_token + 1).saturating_sub(w));
    offset + last_token + 1 - hidden
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_row_once_and_descend_in_cost() {
        let seqs = [
            PrefillSeq { q_row: 0, q_len: 17, kv_len: 17, table_start: 0 },
            PrefillSeq { q_row: 17, q_len: 300, kv_len: 1000, table_start: 2 },
            PrefillSeq { q_row: 317, q_len: 1, kv_len: 4097, table_start: 65 },
        ];
        for (group, rows, window) in [(4, 128, None), (1, 64, None), (7, 128, Some(100)), (24, 64, Some(4000))] {
            let mut tiles = Vec::new();
            fill_tiles(&seqs, group, rows, window, &mut tiles);
            for seq in &seqs {
                let mut firsts: Vec<u32> = tiles.iter().filter(|t| t.q_row == seq.q_row).map(|t| t.first).collect();
                firsts.sort_unstable();
                let expected: Vec<u32> = (0..seq.q_len * group).step_by(rows as usize).collect();
                assert_eq!(firsts, expected);
            }
            let costs: Vec<u32> = tiles.iter().map(|t| keys_of(t, group, rows, window)).collect();
            assert!(costs.windows(2).all(|w| w[0] >= w[1]), "{costs:?}");
        }
    }

    #[test]
    fn a_window_bounds_a_tiles_cost() {
        let tile = PrefillTile { q_row: 0, q_len: 1000, kv_len: 5000, table_start: 0, first: 128 };
        assert_eq!(keys_of(&tile, 4, 128, None), 4064);
        assert_eq!(keys_of(&tile, 4, 128, Some(512)), 512 + 31);
    }

    #[test]
    fn variants_and_their_launches() {
        let v = PrefillVariant::select(Half::Bf16, 128, true).unwrap();
        assert_eq!(v.name(), "attention_prefill_bf16_e128");
        assert_eq!(v.launch(5000, 132), Launch { grid: (132, 1), threads: 384, shared_bytes: 198_656 });
        let any = PrefillVariant::select(Half::F16, 256, true).unwrap();
        assert_eq!((any.name().as_str(), any.tile_rows(), any.needs_map()), ("attention_prefill_any_f16_e256", 64, false));
        assert_eq!(any.launch(7, 132), Launch { grid: (7, 1), threads: 128, shared_bytes: 101_376 });
        assert!(!PrefillVariant::select(Half::Bf16, 64, false).unwrap().needs_map());
        assert!(PrefillVariant::select(Half::Bf16, 72, true).is_none());
    }

    #[test]
    fn boxes_never_leave_a_block() {
        let map = KvMap::new(10, 8, 256, 128);
        assert_eq!(map, KvMap { dims: [128, 10 * 2 * 8 * 256], stride_bytes: 256, box_dims: [64, 128] });
        assert_eq!(KvMap::new(10, 8, 16, 64).box_dims, [64, 16]);
    }
}
