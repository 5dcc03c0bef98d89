//! What the fast attention kernels are told about a batch: which sequences go to which kernel, and the words that
//! are uploaded with the batch. Sequences with one new token go to `attention_decode`, those with more to
//! `attention_prefill`; both write into the same output. Knows nothing of where buffers lie.
//!
//! A recorded step reruns its launches with what lies at the same addresses. So for batches of decodes, grid and number
//! of words follow from the number of sequences and from the decode kernel alone, and lengths choose the latter: it is
//! part of what a record is found by (`graphs.rs`). All else that follows from lengths is in the words' contents.

// Counts of tiles and pieces: the batch was checked to fit when it was uploaded.
#![allow(clippy::cast_possible_truncation)]

use super::Half;
use super::attention_decode::{DecodePlan, DecodeSeq, PIECE_WORDS, max_pieces};
use super::attention_prefill::{PrefillSeq, PrefillVariant, PrefillWork, TILE_WORDS};
use super::decode_forms::{DecodeShape, DecodeVariant, HeadCounts};
use pagemill_backend::BatchLayout;

/// Heads of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Heads {
    /// H.
    pub(crate) num_heads: u32,
    /// K; divides H.
    pub(crate) num_kv_heads: u32,
    /// K of the rank that has most.
    pub(crate) num_kv_heads_max: u32,
    /// E.
    pub(crate) head_dim: u32,
}

impl Heads {
    /// Without their size.
    pub(crate) fn counts(&self) -> HeadCounts {
        HeadCounts { query: self.num_heads, kv: self.num_kv_heads }
    }

    /// Those of the rank that has most. Decode forms are chosen by these: a form is part of what makes two steps one
    /// record, and ranks must record and replay the same steps, since NCCL wants a sum recorded on all ranks or none.
    fn chosen_by(&self) -> HeadCounts {
        let group = self.num_heads / self.num_kv_heads;
        HeadCounts { query: self.num_kv_heads_max * group, kv: self.num_kv_heads_max }
    }
}

/// Attention layers that share a plan, and their kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerKind {
    /// The cache group.
    pub(crate) group_idx: usize,
    /// Tokens that a token sees, itself included; `None`: all before it.
    pub(crate) window: Option<u32>,
    /// Heads.
    pub(crate) heads: Heads,
    /// For sequences with one new token; `None`: they are the prefill kernel's, too.
    pub(crate) decode: Option<DecodeShape>,
    /// For the others.
    pub(crate) prefill: PrefillVariant,
}

impl LayerKind {
    /// The kind of such a layer; `None` where there is no fast kernel. `hopper`: the pool has maps for the copy
    /// engine.
    pub(crate) fn select(
        group_idx: usize,
        window: Option<u32>,
        heads: Heads,
        kv: Half,
        block_size: u32,
        hopper: bool,
    ) -> Option<Self> {
        let Heads { num_heads, num_kv_heads, head_dim, .. } = heads;
        if !supports_block_size(block_size) {
            return None;
        }
        let decode = DecodeShape::select(kv, head_dim, num_heads / num_kv_heads, hopper)?;
        let prefill = PrefillVariant::select(kv, head_dim, hopper)?;
        Some(Self { group_idx, window, heads, decode: Some(decode), prefill })
    }

    /// The kind whose every row has sums that do not depend on the others: prefill kernels walk over keys in steps at
    /// multiples of their own length, and a step that a row does not see leaves its sums as they are; where decode
    /// cuts a sequence follows from the lengths of all.
    pub(crate) fn batch_invariant(self) -> Self {
        Self { decode: None, ..self }
    }

    /// The most slots that a decode plan has for any sequences.
    pub(crate) fn max_decode_slots(&self, num_sms: u32) -> u32 {
        self.decode.map_or(0, |shape| shape.max_slots(self.heads.chosen_by(), num_sms))
    }
}

/// Whether blocks of that many tokens are whole tiles that an index is shifted to.
pub(crate) fn supports_block_size(block_size: u32) -> bool {
    block_size.is_power_of_two() && block_size >= super::attention_decode::TILE_TOKENS
}

/// Where a kind's decode plan lies on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DecodePlace {
    /// Whom it is made for.
    pub(crate) variant: DecodeVariant,
    /// `[units + 1]`.
    pub(crate) piece_start: u64,
    /// `DecodePiece`s.
    pub(crate) pieces: u64,
    /// Of one KV head.
    pub(crate) units: u32,
}

/// Where a kind's prefill work lies on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefillPlace {
    /// `PrefillTile`s.
    pub(crate) tiles: u64,
    /// `[blocks + 1]`.
    pub(crate) work_start: u64,
    /// Tiles times KV heads, `num_work` of them.
    pub(crate) work: u64,
    /// Tiles times KV heads.
    pub(crate) num_work: u32,
}

/// Where a batch's plan for a kind of layers lies on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanPlace {
    /// Whose plan it is.
    pub(crate) kind: LayerKind,
    /// `None`: no sequence has one new token.
    pub(crate) decode: Option<DecodePlace>,
    /// `None`: no sequence has more.
    pub(crate) prefill: Option<PrefillPlace>,
}

/// A batch's plan for a kind of layers. Kept from step to step, so that its buffers grow only while warming up.
pub(crate) struct LayerPlan {
    kind: LayerKind,
    num_sms: u32,
    decode_seqs: Vec<DecodeSeq>,
    /// The kernel for them, and how many units of one KV head it has; `None`: there are none.
    decode_form: Option<(DecodeVariant, u32)>,
    prefill_seqs: Vec<PrefillSeq>,
    decode: DecodePlan,
    prefill: PrefillWork,
    /// `piece_start`, then pieces, filled up to the most there can be.
    decode_words: Vec<u32>,
    /// Tiles, then (for the kernel that reads them) `work_start` and `work`.
    prefill_words: Vec<u32>,
}

impl LayerPlan {
    /// An empty plan.
    pub(crate) fn new(kind: LayerKind, num_sms: u32) -> Self {
        Self {
            kind,
            num_sms,
            decode_seqs: Vec::new(),
            decode_form: None,
            prefill_seqs: Vec::new(),
            decode: DecodePlan::default(),
            prefill: PrefillWork::default(),
            decode_words: Vec::new(),
            prefill_words: Vec::new(),
        }
    }

    /// Whose plan it is.
    pub(crate) fn kind(&self) -> &LayerKind {
        &self.kind
    }

    /// Plans for a batch; `table_start[s]` is where sequence `s`'s table starts in the packed block tables.
    pub(crate) fn make(&mut self, layout: &BatchLayout, table_start: &[u32]) {
        self.clear();
        let tokens = layout.query_start.windows(2);
        for ((tokens, &kv_len), &table_start) in tokens.zip(&layout.seq_lens).zip(table_start) {
            let (q_row, q_len) = (tokens[0], tokens[1] - tokens[0]);
            match q_len {
                0 => {}
                1 if self.kind.decode.is_some() => self.decode_seqs.push(DecodeSeq { q_row, table_start, kv_len }),
                _ => self.prefill_seqs.push(PrefillSeq { q_row, q_len, kv_len, table_start }),
            }
        }
        if let (Some(shape), false) = (self.kind.decode, self.decode_seqs.is_empty()) {
            self.make_decode(shape);
        }
        if !self.prefill_seqs.is_empty() {
            self.make_prefill();
        }
    }

    /// Nothing to do for any sequence.
    pub(crate) fn clear(&mut self) {
        self.decode_seqs.clear();
        self.decode_form = None;
        self.prefill_seqs.clear();
        self.decode_words.clear();
        self.prefill_words.clear();
    }

    fn make_decode(&mut self, shape: DecodeShape) {
        let LayerKind { window, heads, .. } = self.kind;
        let (variant, units) = shape.choose(&self.decode_seqs, window, heads.chosen_by(), self.num_sms);
        self.decode_form = Some((variant, units));
        self.decode.make(&self.decode_seqs, window, variant, units);
        self.decode_words.extend_from_slice(&self.decode.piece_start);
        self.decode_words.extend(self.decode.pieces.iter().flat_map(|piece| piece.words()));
        let most = max_pieces(self.decode_seqs.len() as u32, units) as usize;
        self.decode_words.resize(units as usize + 1 + most * PIECE_WORDS, 0);
    }

    fn make_prefill(&mut self) {
        let LayerKind { window, heads, prefill, .. } = self.kind;
        let (group, rows) = (heads.num_heads / heads.num_kv_heads, prefill.tile_rows());
        self.prefill.list(&self.prefill_seqs, group, rows, window);
        self.prefill_words.extend(self.prefill.tiles.iter().flat_map(|tile| tile.words()));
        if prefill.needs_map() {
            let blocks = prefill.launch(self.num_work(), self.num_sms).grid.0;
            self.prefill.share_out(group, rows, window, heads.num_kv_heads, blocks);
            self.prefill_words.extend_from_slice(&self.prefill.work_start);
            self.prefill_words.extend_from_slice(&self.prefill.work);
        }
    }

    fn num_work(&self) -> u32 {
        self.prefill.tiles.len() as u32 * self.kind.heads.num_kv_heads
    }

    /// The kernel for the sequences with one new token, if there are any.
    pub(crate) fn decode_variant(&self) -> Option<DecodeVariant> {
        self.decode_form.map(|(variant, _)| variant)
    }

    /// What [`LayerPlan::place`] calls decode words.
    pub(crate) fn decode_words(&self) -> &[u32] {
        &self.decode_words
    }

    /// What [`LayerPlan::place`] calls prefill words.
    pub(crate) fn prefill_words(&self) -> &[u32] {
        &self.prefill_words
    }

    /// Where everything lies once the words were uploaded to these addresses.
    pub(crate) fn place(&self, decode_words: u64, prefill_words: u64) -> PlanPlace {
        let decode = self.decode_form.map(|(variant, units)| DecodePlace {
            variant,
            piece_start: decode_words,
            pieces: decode_words + 4 * (u64::from(units) + 1),
            units,
        });
        let prefill = (!self.prefill_words.is_empty()).then(|| {
            let work_start = prefill_words + 4 * (self.prefill.tiles.len() * TILE_WORDS) as u64;
            // The kernel for any chip reads neither.
            let num_starts = if self.kind.prefill.needs_map() { self.prefill.work_start.len() } else { 0 };
            PrefillPlace {
                tiles: prefill_words,
                work_start,
                work: work_start + 4 * num_starts as u64,
                num_work: self.num_work(),
            }
        });
        PlanPlace { kind: self.kind, decode, prefill }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap is a failed test
mod tests {
    use super::*;

    const HEADS: Heads = Heads { num_heads: 32, num_kv_heads: 8, num_kv_heads_max: 8, head_dim: 128 };

    fn kind(window: Option<u32>, hopper: bool) -> LayerKind {
        LayerKind::select(0, window, HEADS, Half::Bf16, 16, hopper).unwrap()
    }

    /// Sequences of (new tokens, tokens in the cache).
    fn layout(seqs: &[(u32, u32)]) -> BatchLayout {
        let mut layout = BatchLayout { query_start: vec![0], ..Default::default() };
        for &(q_len, kv_len) in seqs {
            layout.positions.extend(kv_len - q_len..kv_len);
            layout.query_start.push(layout.positions.len() as u32);
            layout.seq_lens.push(kv_len);
        }
        layout
    }

    #[test]
    fn what_no_fast_kernel_takes_has_no_kind() {
        let select = |head_dim, block_size| {
            LayerKind::select(0, None, Heads { head_dim, ..HEADS }, Half::F16, block_size, false)
        };
        assert!(select(128, 16).is_some() && select(64, 256).is_some());
        assert!(select(32, 16).is_none() && select(112, 16).is_none() && select(512, 16).is_none());
        assert!(select(128, 8).is_none() && select(128, 48).is_none());
        assert!(kind(None, true).prefill.needs_map() && !kind(None, false).prefill.needs_map());
    }

    #[test]
    fn decodes_of_equal_number_and_kernel_have_equal_words_and_places() {
        let mut plan = LayerPlan::new(kind(None, true), 132);
        let mut place = |lens: [u32; 3]| {
            plan.make(&layout(&lens.map(|len| (1, len))), &[0, 10, 20]);
            assert!(plan.prefill_words().is_empty());
            let place = plan.place(1000, 0).decode.unwrap();
            assert_eq!(Some(place.variant), plan.decode_variant());
            (place, plan.decode_words().len())
        };
        let long = [[32_768, 17, 400], [1, 131_072, 131_072], [1, 1, 2049]].map(&mut place);
        assert!(long.iter().all(|other| *other == long[0]));
        assert_eq!((long[0].0.pieces, long[0].0.units, long[0].1), (1200, 49, 50 + (3 + 49) * 8));
        let short = [[1, 1, 1], [300, 300, 300], [2048, 17, 400]].map(&mut place);
        assert!(short.iter().all(|other| *other == short[0]));
        assert_eq!((short[0].0.pieces, short[0].0.units, short[0].1), (1016, 3, 4 + (3 + 3) * 8));
        assert_ne!(long[0].0.variant, short[0].0.variant);
    }

    /// Of three KV heads the first of two ranks has two.
    #[test]
    fn ranks_of_unlike_numbers_of_heads_choose_alike() {
        let plan = |num_kv_heads, num_kv_heads_max| {
            let heads = Heads { num_heads: 3 * num_kv_heads, num_kv_heads, num_kv_heads_max, head_dim: 64 };
            LayerPlan::new(LayerKind::select(0, None, heads, Half::Bf16, 16, true).unwrap(), 132)
        };
        let (mut first, mut second, mut alone) = (plan(2, 2), plan(1, 2), plan(1, 1));
        let mut differed = 0;
        for (num_seqs, len) in (1..=256).flat_map(|num_seqs| [17, 600, 1500, 3000].map(|len| (num_seqs, len))) {
            let step = layout(&vec![(1, len); num_seqs]);
            let starts: Vec<u32> = (0..num_seqs as u32).collect();
            for plan in [&mut first, &mut second, &mut alone] {
                plan.make(&step, &starts);
            }
            assert_eq!(first.decode_variant(), second.decode_variant(), "{num_seqs} sequences of {len}");
            assert_eq!(first.decode_words(), second.decode_words(), "{num_seqs} sequences of {len}");
            differed += usize::from(second.decode_variant() != alone.decode_variant());
        }
        assert!(differed > 100, "by its own heads the second rank would choose others");
    }

    #[test]
    fn decode_words_are_starts_and_then_pieces() {
        let mut plan = LayerPlan::new(kind(None, true), 132);
        plan.make(&layout(&[(1, 40), (1, 2049)]), &[5, 8]);
        let words = plan.decode_words();
        assert_eq!(words[..3], [0, 1, 2], "the first piece for the first thread block");
        assert!(words[18..50].iter().all(|&start| start == 18));
        // q_row, table_start, kv_len, tile_begin, tile_end, slot, first_slot, num_slots
        assert_eq!(words[50..58], [0, 5, 40, 0, 3, 0, 0, 1]);
        assert_eq!(words[58..66], [1, 8, 2049, 0, 7, 0, 0, 17]);
        assert!(words[50 + 18 * 8..].iter().all(|&word| word == 0));
        plan.make(&layout(&[(1, 40), (1, 17)]), &[5, 8]);
        assert_eq!(plan.decode_words()[..11], [0, 1, 2, 0, 5, 40, 0, 3, 0, 0, 1], "whole sequences");
    }

    #[test]
    fn a_window_leaves_out_what_lies_behind_it() {
        let mut plan = LayerPlan::new(kind(Some(20), true), 132);
        plan.make(&layout(&[(1, 100)]), &[0]);
        assert_eq!(plan.decode_words()[2..10], [0, 0, 100, 5, 7, 0, 0, 1], "positions 80..100");
    }

    #[test]
    fn a_batch_invariant_kind_leaves_nothing_to_decode() {
        let mut plan = LayerPlan::new(kind(None, true).batch_invariant(), 132);
        let words = |plan: &mut LayerPlan, lens: [u32; 2]| {
            plan.make(&layout(&lens.map(|len| (1, len))), &[0, 40]);
            let place = plan.place(0, 4000);
            assert!(place.decode.is_none() && plan.decode_words().is_empty() && plan.decode_variant().is_none());
            (place.prefill.unwrap(), plan.prefill_words().len())
        };
        let short = words(&mut plan, [1, 30]);
        assert_eq!(short.0.num_work, 2 * 8);
        assert_eq!(short, words(&mut plan, [4000, 500]), "a recorded step finds all at the same places");
    }

    #[test]
    fn a_mixed_batch_is_parted_by_new_tokens() {
        for hopper in [true, false] {
            let mut plan = LayerPlan::new(kind(None, hopper), 132);
            let mixed = layout(&[(1, 9), (40, 40), (0, 7), (1, 3), (2, 130)]);
            plan.make(&mixed, &[0, 1, 4, 5, 6]);
            let place = plan.place(0, 4000);
            let (decode, prefill) = (place.decode.unwrap(), place.prefill.unwrap());
            let pieces = &plan.decode_words()[decode.pieces as usize / 4..];
            assert_eq!((pieces[..3].to_vec(), pieces[8..11].to_vec()), (vec![0, 0, 9], vec![41, 5, 3]));
            // 160 and 8 rows in tiles of 128 or 64, the costliest first.
            let tiles = if hopper { 3 } else { 4 };
            assert_eq!(prefill.num_work, tiles * 8);
            // q_row, q_len, kv_len, table_start, first
            assert_eq!(plan.prefill_words()[..5], [42, 2, 130, 6, 0]);
            assert_eq!((prefill.tiles, prefill.work_start), (4000, 4000 + u64::from(tiles) * 20));
            let num_starts = if hopper { tiles as usize * 8 + 1 } else { 0 };
            assert_eq!(prefill.work, prefill.work_start + num_starts as u64 * 4);
            let num_shared = if hopper { num_starts + tiles as usize * 8 } else { 0 };
            assert_eq!(plan.prefill_words().len(), tiles as usize * 5 + num_shared);
        }
    }

    #[test]
    fn a_batch_without_prompts_has_no_work_for_them() {
        let mut plan = LayerPlan::new(kind(None, true), 132);
        plan.make(&layout(&[(3, 3)]), &[0]);
        assert!(plan.place(0, 0).decode.is_none() && plan.place(0, 0).prefill.is_some());
        plan.make(&layout(&[(1, 3)]), &[0]);
        assert!(plan.place(0, 0).decode.is_some() && plan.place(0, 0).prefill.is_none());
        plan.clear();
        assert!(plan.place(0, 0).decode.is_none() && plan.place(0, 0).prefill.is_none());
    }
}
