//! Prefill attention: which of the two kernels runs, and in which order tiles of query rows are worked on.
//! Knows nothing of where buffers lie. Kernels: `kernels/attention_prefill.cu` (Hopper, head sizes 64 and 128)
//! and `kernels/attention_prefill_any.cu`.

#![allow(clippy::cast_possible_truncation)] // counts of tiles and heads: the batch was checked to fit when it was uploaded

use super::{Half, Launch};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

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
    /// [`PrefillWork::tiles`].
    pub(crate) tiles: u64,
    /// [`PrefillWork::work`]; unread by the kernel for any chip.
    pub(crate) work: u64,
    /// [`PrefillWork::work_start`]; unread by the kernel for any chip.
    pub(crate) work_start: u64,
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
}

const _: () = assert!(size_of::<PrefillTile>() == TILE_WORDS * 4 && size_of::<PrefillParams>() == 256);

/// Words of a tile.
pub(crate) const TILE_WORDS: usize = 5;

impl PrefillTile {
    /// The fields in order, as they are uploaded.
    pub(crate) fn words(&self) -> [u32; TILE_WORDS] {
        let Self { q_row, q_len, kv_len, table_start, first } = *self;
        [q_row, q_len, kv_len, table_start, first]
    }
}

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
    /// Every variant there is; those that need a map only where the chip runs sm_90a images.
    pub(crate) fn all(hopper: bool) -> Vec<Self> {
        let mut all = Vec::new();
        for kv in [Half::Bf16, Half::F16] {
            for head_dim in [64, 80, 96, 128, 256] {
                let with_map = Self::select(kv, head_dim, hopper).filter(Self::needs_map);
                all.extend(Self::select(kv, head_dim, false).into_iter().chain(with_map));
            }
        }
        all
    }

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

    /// The launch for `num_work` tiles times KV heads. The Hopper kernel's thread blocks stay and take several:
    /// the grid's x is what [`PrefillWork::share_out`] shares among.
    pub(crate) fn launch(&self, num_work: u32, num_sms: u32) -> Launch {
        if self.hopper {
            Launch { grid: (num_work.min(num_sms), 1), threads: 384, shared_bytes: self.shared_bytes() }
        } else {
            Launch { grid: (num_work, 1), threads: 128, shared_bytes: self.shared_bytes() }
        }
    }

    /// Dynamic shared memory of a thread block.
    pub(crate) fn shared_bytes(&self) -> u32 {
        if self.hopper {
            // Two tiles each of Q, K and V, the barriers' kilobyte, and one to start on a multiple of 1,024.
            6 * 128 * self.head_dim * 2 + 2048
        } else {
            let keys = if self.head_dim > 128 { 32 } else { 64 };
            (64 + 4 * keys) * (self.head_dim * 2 + 16)
        }
    }
}

/// Steps of 128 keys that a tile costs beyond its keys: queries in, first step, output.
const TILE_OVERHEAD_STEPS: u64 = 3;
const STEP_KEYS: u32 = 128;
/// Tiles a thread block (of all, of one head) from which on heads follow each other.
const LONG_LIST: usize = 4;

/// Which thread block does what. Kept from step to step, so that its buffers grow only while warming up.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefillWork {
    /// Tiles of all sequences, costliest first, so that the last ones to run are short.
    pub(crate) tiles: Vec<PrefillTile>,
    /// `tile * K + KV head`, thread block after thread block.
    pub(crate) work: Vec<u32>,
    /// `[blocks + 1]` where each thread block's work starts.
    pub(crate) work_start: Vec<u32>,
    /// One KV head after the other, or one tile after the other.
    by_head: bool,
    /// Which thread block does what comes at an index of that order.
    owners: Vec<u32>,
    /// (load in steps, thread block), least first.
    loads: BinaryHeap<Reverse<(u64, u32)>>,
}

impl PrefillWork {
    /// Lists the tiles of all sequences. `group` is H / K, `rows` [`PrefillVariant::tile_rows`]. Cost: a sort.
    pub(crate) fn list(&mut self, seqs: &[PrefillSeq], group: u32, rows: u32, window: Option<u32>) {
        self.tiles.clear();
        for seq in seqs {
            let PrefillSeq { q_row, q_len, kv_len, table_start } = *seq;
            let starts = (0..q_len * group).step_by(rows as usize);
            self.tiles.extend(starts.map(|first| PrefillTile { q_row, q_len, kv_len, table_start, first }));
        }
        self.tiles.sort_by_key(|tile| Reverse(keys_of(tile, group, rows, window)));
    }

    /// Shares the listed tiles of all KV heads out over `blocks` thread blocks, each tile to the one with the
    /// least so far. Long lists go one head after the other, so that its K and V stay in the L2 cache; short ones
    /// go tile after tile, costliest first for all heads, which balances better. Cost: tiles times heads, times a
    /// logarithm.
    pub(crate) fn share_out(&mut self, group: u32, rows: u32, window: Option<u32>, num_kv_heads: u32, blocks: u32) {
        self.owners.clear();
        self.loads.clear();
        self.loads.extend((0..blocks).map(|block| Reverse((0, block))));
        self.work_start.clear();
        self.work_start.resize(blocks as usize + 1, 0);
        self.by_head = self.tiles.len() >= LONG_LIST * blocks as usize;
        let heads = num_kv_heads as usize;
        for index in 0..self.tiles.len() * heads {
            let tile = &self.tiles[self.head_and_tile(index, heads).1];
            let Some(mut least) = self.loads.peek_mut() else { return };
            let Reverse((load, block)) = *least;
            *least = Reverse((
                load + u64::from(keys_of(tile, group, rows, window) / STEP_KEYS) + TILE_OVERHEAD_STEPS,
                block,
            ));
            self.owners.push(block);
            self.work_start[block as usize + 1] += 1;
        }
        for block in 0..blocks as usize {
            self.work_start[block + 1] += self.work_start[block];
        }
        self.fill_work(num_kv_heads);
    }

    /// The KV head and tile that come at `index` of the order that work is shared out in.
    fn head_and_tile(&self, index: usize, heads: usize) -> (usize, usize) {
        if self.by_head { (index / self.tiles.len(), index % self.tiles.len()) } else { (index % heads, index / heads) }
    }

    /// Sorts the work by owner, keeping its order.
    fn fill_work(&mut self, num_kv_heads: u32) {
        self.work.clear();
        self.work.resize(self.owners.len(), 0);
        for (index, &owner) in self.owners.iter().enumerate() {
            let (head, tile) = self.head_and_tile(index, num_kv_heads as usize);
            let at = &mut self.work_start[owner as usize];
            self.work[*at as usize] = tile as u32 * num_kv_heads + head as u32;
            *at += 1;
        }
        // Every start has moved to its end, which is the next one's start.
        self.work_start.rotate_right(1);
        self.work_start[0] = 0;
    }
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
#[allow(clippy::unwrap_used)] // a failed unwrap is a failed test
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
            let mut work = PrefillWork::default();
            work.list(&seqs, group, rows, window);
            let tiles = &work.tiles;
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
    fn work_is_shared_out_once_and_evenly() {
        let seqs = [PrefillSeq { q_row: 0, q_len: 8192, kv_len: 8192, table_start: 0 }];
        let mut work = PrefillWork::default();
        for (num_kv_heads, blocks) in [(8, 132), (3, 7), (1, 500)] {
            work.list(&seqs, 4, 128, None);
            work.share_out(4, 128, None, num_kv_heads, blocks);
            let mut all = work.work.clone();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..work.tiles.len() as u32 * num_kv_heads));
            assert_eq!((work.work_start.len(), work.work_start[0]), (blocks as usize + 1, 0));
            assert_eq!(work.work_start[blocks as usize] as usize, work.work.len());
            let loads: Vec<u32> = work
                .work_start
                .windows(2)
                .map(|w| {
                    work.work[w[0] as usize..w[1] as usize]
                        .iter()
                        .map(|&w| work.tiles[(w / num_kv_heads) as usize].first / 512 + 4)
                        .sum()
                })
                .collect();
            let most = *loads.iter().max().unwrap();
            let least = *loads.iter().min().unwrap();
            if blocks < 256 {
                assert!(most - least < most / 20, "{least}..{most} steps");
            }
            if blocks == 7 {
                let heads: Vec<u32> =
                    work.work[..work.work_start[1] as usize].iter().map(|w| w % num_kv_heads).collect();
                assert!(heads.windows(2).all(|w| w[0] <= w[1]), "one head after the other: {heads:?}");
            }
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
        assert_eq!(
            (any.name().as_str(), any.tile_rows(), any.needs_map()),
            ("attention_prefill_any_f16_e256", 64, false)
        );
        assert_eq!(any.launch(7, 132), Launch { grid: (7, 1), threads: 128, shared_bytes: 101_376 });
        assert!(!PrefillVariant::select(Half::Bf16, 64, false).unwrap().needs_map());
        assert!(PrefillVariant::select(Half::Bf16, 72, true).is_none());
        assert_eq!((PrefillVariant::all(true).len(), PrefillVariant::all(false).len()), (14, 10));
    }

    #[test]
    fn boxes_never_leave_a_block() {
        let map = KvMap::new(10, 8, 256, 128);
        assert_eq!(map, KvMap { dims: [128, 10 * 2 * 8 * 256], stride_bytes: 256, box_dims: [64, 128] });
        assert_eq!(KvMap::new(10, 8, 16, 64).box_dims, [64, 16]);
    }
}
