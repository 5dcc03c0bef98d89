//! Decode attention: how the sequences' keys are cut over thread blocks. Decides the split; which form of the kernel
//! runs is `decode_forms`' choice. Knows nothing of where buffers lie. Kernel: `kernels/attention_decode.cu`.
//!
//! Every KV head has the same cuts, so a plan speaks of *units* of one KV head (the grid's x): thread blocks, or
//! clusters of them. Cuts are counted in tiles of 16 tokens.

#![allow(clippy::cast_possible_truncation)] // counts of tiles, pieces and slots: the batch was checked to fit when it was uploaded

use super::decode_forms::DecodeVariant;

/// Tokens of a tile; the smallest block size.
pub(crate) const TILE_TOKENS: u32 = 16;
/// The least that a warp is given where there is a choice, in tiles.
const MIN_TILES_A_WARP: u32 = 2;
/// Where no sequence is longer than this, one tile a warp: few pieces then have to be combined.
const SHORT_TILES: u32 = 32;
/// A second piece in a thread block costs about as much as this many tiles for each of its warps (its merge, its slot,
/// the arrival).
const PIECE_COST_TILES_A_WARP: u32 = 2;
/// One sequence with one new token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DecodeSeq {
    /// Row of the token in q and out.
    pub(crate) q_row: u32,
    /// Where its table starts in the packed block tables.
    pub(crate) table_start: u32,
    /// Tokens in the cache, this step's included; at least 1.
    pub(crate) kv_len: u32,
}

/// A run of tiles of one sequence: `DecodePiece` in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct DecodePiece {
    /// As in [`DecodeSeq`].
    pub(crate) q_row: u32,
    /// As in [`DecodeSeq`].
    pub(crate) table_start: u32,
    /// As in [`DecodeSeq`].
    pub(crate) kv_len: u32,
    /// First tile.
    pub(crate) tile_begin: u32,
    /// One past the last tile.
    pub(crate) tile_end: u32,
    /// Where this piece leaves its partial result.
    pub(crate) slot: u32,
    /// First slot of the sequence.
    pub(crate) first_slot: u32,
    /// Pieces of the sequence; 1: the output is written at once and no slot is used.
    pub(crate) num_slots: u32,
}

/// The kernel's argument: `DecodeParams`. Addresses are the device's.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct DecodeParams {
    /// `[T, q_stride]`; head h of a row at `h * E`.
    pub(crate) q: u64,
    /// `[T, out_stride]`.
    pub(crate) out: u64,
    /// Pool tensor `[num_blocks, 2, K, block_size, E]`.
    pub(crate) kv: u64,
    /// `u32`, all sequences end to end.
    pub(crate) block_table: u64,
    /// [`DecodePlan::pieces`].
    pub(crate) pieces: u64,
    /// [`DecodePlan::piece_start`].
    pub(crate) piece_start: u64,
    /// f32 `[slots, H, E]`.
    pub(crate) partial_out: u64,
    /// Two f32 each, `[slots, H]`.
    pub(crate) partial_max_sum: u64,
    /// `u32` `[slots, grid.y]`: zeroed once, zero again after every launch.
    pub(crate) arrivals: u64,
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

const _: () = assert!(size_of::<DecodePiece>() == PIECE_WORDS * 4 && size_of::<DecodeParams>() == 120);

/// Words of a piece.
pub(crate) const PIECE_WORDS: usize = 8;

impl DecodePiece {
    /// The fields in order, as they are uploaded.
    pub(crate) fn words(&self) -> [u32; PIECE_WORDS] {
        let Self { q_row, table_start, kv_len, tile_begin, tile_end, slot, first_slot, num_slots } = *self;
        [q_row, table_start, kv_len, tile_begin, tile_end, slot, first_slot, num_slots]
    }
}

/// Which unit does what. Kept from step to step, so that its buffers grow only while warming up.
#[derive(Clone, Debug, Default)]
pub(crate) struct DecodePlan {
    /// All pieces, grouped by unit.
    pub(crate) pieces: Vec<DecodePiece>,
    /// `[units + 1]` where each unit's pieces start.
    pub(crate) piece_start: Vec<u32>,
    /// Slots used for partial results.
    pub(crate) num_slots: u32,
}

/// The most slots a plan uses: every cut between two units ends one piece and starts another, and a plan with one
/// piece a unit has no more pieces than units.
pub(crate) fn max_slots(units: u32) -> u32 {
    2 * units
}

/// The most pieces a plan has: every sequence ends one, and so does every cut between two units.
pub(crate) fn max_pieces(num_seqs: u32, units: u32) -> u32 {
    num_seqs + units
}

/// The visible tiles `[first, end)` of a sequence.
pub(crate) fn tiles_of(seq: &DecodeSeq, window: Option<u32>) -> (u32, u32) {
    let first = window.map_or(0, |w| seq.kv_len.saturating_sub(w)) / TILE_TOKENS;
    (first, seq.kv_len.div_ceil(TILE_TOKENS))
}

fn share(total: u64, index: u32, count: u32) -> u64 {
    total * u64::from(index) / u64::from(count)
}

impl DecodePlan {
    /// A plan for `units` units of a form.
    pub(crate) fn make(&mut self, seqs: &[DecodeSeq], window: Option<u32>, variant: DecodeVariant, units: u32) {
        if variant.is_whole() {
            self.clear();
            self.one_piece_a_unit(seqs, window, u32::MAX);
            self.piece_start.resize(units as usize + 1, self.num_pieces());
        } else {
            self.balance(seqs, window, units, variant.warps());
        }
    }

    /// Fills the units evenly. With few keys every piece has its own unit, since a second piece costs more than the
    /// uneven load; with many, the sequences' tiles lie end to end and are cut into equal shares. Cost: linear in
    /// sequences and units.
    fn balance(&mut self, seqs: &[DecodeSeq], window: Option<u32>, units: u32, warps: u32) {
        self.clear();
        let total: u64 = seqs.iter().map(|s| tiles_of(s, window)).map(|(first, end)| u64::from(end - first)).sum();
        let even = total.div_ceil(u64::from(units)).max(u64::from(MIN_TILES_A_WARP * warps));
        match longest_piece(seqs, window, units, warps) {
            Some(longest) if u64::from(longest) <= even + u64::from(PIECE_COST_TILES_A_WARP * warps) => {
                self.one_piece_a_unit(seqs, window, longest);
            }
            _ => self.equal_shares(seqs, window, units, total, warps),
        }
        self.piece_start.resize(units as usize + 1, self.num_pieces());
    }

    fn clear(&mut self) {
        self.pieces.clear();
        self.piece_start.clear();
        self.num_slots = 0;
    }

    fn num_pieces(&self) -> u32 {
        self.pieces.len() as u32
    }

    /// Equal pieces of at most `longest` tiles.
    fn one_piece_a_unit(&mut self, seqs: &[DecodeSeq], window: Option<u32>, longest: u32) {
        for seq in seqs {
            let (first, end) = tiles_of(seq, window);
            let pieces = (end - first).div_ceil(longest);
            let cuts = (1..pieces).map(|i| first + share(u64::from(end - first), i, pieces) as u32);
            self.push_pieces(seq, first, cuts, end);
        }
        self.piece_start.extend(0..self.num_pieces());
    }

    /// Tiles end to end, cut into equal shares.
    fn equal_shares(&mut self, seqs: &[DecodeSeq], window: Option<u32>, units: u32, total: u64, warps: u32) {
        let used = u64::from(units).min(total / u64::from(MIN_TILES_A_WARP * warps)).max(1) as u32;
        let (mut at, mut next) = (0, 1);
        self.piece_start.push(0);
        for seq in seqs {
            let (first, end) = tiles_of(seq, window);
            let base = self.num_pieces();
            let from = next;
            let tiles = u64::from(end - first);
            let mut cuts_inside = 0;
            while next < used && share(total, next, used) < at + tiles {
                // A share that begins where the sequence does cuts nothing.
                cuts_inside += u32::from(share(total, next, used) > at);
                self.piece_start.push(base + cuts_inside);
                next += 1;
            }
            let cuts = (from..next)
                .map(|i| share(total, i, used))
                .filter(|&cut| cut > at)
                .map(|cut| first + (cut - at) as u32);
            self.push_pieces(seq, first, cuts, end);
            at += tiles;
        }
    }

    /// The pieces between the cuts, which ascend strictly inside `(first, end)`.
    fn push_pieces(&mut self, seq: &DecodeSeq, first: u32, cuts: impl Iterator<Item = u32> + Clone, end: u32) {
        let num_slots = cuts.clone().count() as u32 + 1;
        let mut tile_begin = first;
        for (slot, tile_end) in (self.num_slots..).zip(cuts.chain(std::iter::once(end))) {
            let DecodeSeq { q_row, table_start, kv_len } = *seq;
            let first_slot = self.num_slots;
            self.pieces.push(DecodePiece {
                q_row,
                table_start,
                kv_len,
                tile_begin,
                tile_end,
                slot,
                first_slot,
                num_slots,
            });
            tile_begin = tile_end;
        }
        if num_slots > 1 {
            self.num_slots += num_slots;
        }
    }
}

/// The shortest length, not below one or two tiles a warp, such that there are no more pieces of at most that length
/// than units; `None` where there are more sequences than units.
fn longest_piece(seqs: &[DecodeSeq], window: Option<u32>, units: u32, warps: u32) -> Option<u32> {
    if seqs.len() > units as usize {
        return None;
    }
    let lengths = || seqs.iter().map(|s| tiles_of(s, window)).map(|(first, end)| end - first);
    let most = lengths().max()?;
    let least = if most <= SHORT_TILES { warps } else { MIN_TILES_A_WARP * warps };
    let (mut low, mut high) = (least, most.max(least));
    while low < high {
        let middle = low + (high - low) / 2;
        if lengths().map(|tiles| u64::from(tiles.div_ceil(middle))).sum::<u64>() <= u64::from(units) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Some(low)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap is a failed test
pub(crate) mod tests {
    use super::*;

    pub(crate) fn seqs(lens: &[u32]) -> Vec<DecodeSeq> {
        (0..).zip(lens).map(|(i, &kv_len)| DecodeSeq { q_row: i, table_start: i * 1000, kv_len }).collect()
    }

    /// Every visible tile once, slots in order, thread blocks in order.
    pub(crate) fn check(plan: &DecodePlan, seqs: &[DecodeSeq], window: Option<u32>, blocks: u32) {
        assert_eq!(plan.piece_start.len(), blocks as usize + 1);
        assert!(plan.piece_start.windows(2).all(|w| w[0] <= w[1]), "{:?}", plan.piece_start);
        assert_eq!(plan.piece_start[0], 0);
        assert_eq!(plan.piece_start[blocks as usize] as usize, plan.pieces.len());
        let mut pieces = plan.pieces.iter();
        let mut next_slot = 0;
        for seq in seqs {
            let (first, end) = tiles_of(seq, window);
            let mut at = first;
            let mut seen = 0;
            let mut num_slots = 1;
            while at < end {
                let piece = pieces.next().expect("a piece for every tile");
                assert_eq!((piece.q_row, piece.table_start, piece.kv_len), (seq.q_row, seq.table_start, seq.kv_len));
                assert_eq!(piece.tile_begin, at);
                assert!(piece.tile_end > at && piece.tile_end <= end);
                num_slots = piece.num_slots;
                if num_slots > 1 {
                    assert_eq!((piece.slot, piece.first_slot), (next_slot + seen, next_slot));
                }
                seen += 1;
                at = piece.tile_end;
            }
            assert_eq!(seen, num_slots);
            next_slot += if num_slots > 1 { num_slots } else { 0 };
        }
        assert!(pieces.next().is_none());
        assert_eq!(plan.num_slots, next_slot);
    }

    fn load(plan: &DecodePlan, block: usize) -> u32 {
        let range = plan.piece_start[block] as usize..plan.piece_start[block + 1] as usize;
        plan.pieces[range].iter().map(|p| p.tile_end - p.tile_begin).sum()
    }

    #[test]
    fn every_tile_once_for_random_lengths() {
        let mut state = 7u64;
        let mut random = move |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        let mut plan = DecodePlan::default();
        for round in 0..400 {
            let count = 1 + random(300) as usize;
            let longest = [20, 300, 5000, 40_000][round % 4];
            let lens: Vec<u32> = (0..count).map(|_| 1 + random(longest) as u32).collect();
            let seqs = seqs(&lens);
            let window = (round % 3 == 0).then(|| 1 + random(600) as u32);
            let blocks = 1 + random(280) as u32;
            plan.balance(&seqs, window, blocks, [4, 2, 1][round / 4 % 3]);
            check(&plan, &seqs, window, blocks);
            assert!(plan.num_slots <= max_slots(blocks));
            assert!(plan.pieces.len() <= max_pieces(count as u32, blocks) as usize);
        }
    }

    #[test]
    fn many_keys_are_shared_evenly() {
        let mut plan = DecodePlan::default();
        plan.balance(&seqs(&[4096; 64]), None, 49, 4);
        let loads: Vec<u32> = (0..49).map(|b| load(&plan, b)).collect();
        assert!(loads.iter().all(|&l| l == 334 || l == 335), "{loads:?}");
    }

    #[test]
    fn short_sequences_are_not_cut() {
        let mut plan = DecodePlan::default();
        plan.balance(&seqs(&[256; 32]), None, 49, 4);
        assert_eq!((plan.pieces.len(), plan.num_slots), (32, 0));
    }

    #[test]
    fn one_long_sequence_fills_the_chip() {
        let mut plan = DecodePlan::default();
        plan.balance(&seqs(&[32_768]), None, 49, 4);
        assert_eq!((plan.pieces.len(), plan.num_slots), (49, 49));
        assert!((0..49).all(|b| (41..=42).contains(&load(&plan, b))));
        plan.balance(&seqs(&[1000]), None, 49, 4);
        assert_eq!(plan.pieces.len(), 8, "63 tiles in pieces of at least 8");
    }
}
