//! One step while it is being planned and while it is in flight. Decides the order of sequences in
//! a plan: decodes first, then prompt chunks, each in order of precedence.

use std::num::NonZeroU64;

use super::sequence::Sequence;
use super::sequences::SequenceRef;
use super::spent::SpentPlan;
use crate::{BlockCopy, PagedKvCache, ScheduledSequence, SequenceId, StepPlan, Time};

/// How far a decode looks for its share of an earlier plan: past those that have left since.
const LOOK_AHEAD: usize = 8;

/// A plan in the making.
#[derive(Debug)]
pub(super) struct StepBuilder {
    /// Its number.
    pub(super) step: NonZeroU64,
    /// Copies that `PagedKvCache::extend` asked for.
    pub(super) copies: Vec<BlockCopy>,
    /// Made of fillers only.
    pub(super) is_filler: bool,
    pub(super) num_padding: usize,
    num_tokens: usize,
    /// What it is made of: the first `num_decodes` sequences and all entries are the plan's, the other sequences what
    /// is left of an earlier plan, to be made use of.
    spent: SpentPlan,
    num_decodes: usize,
    chunks: Vec<ScheduledSequence>,
    chunk_entries: Vec<InFlightEntry>,
    chunk_tables_since: Vec<u64>,
}

/// What `apply` must know of a plan.
#[derive(Debug)]
pub(super) struct InFlightStep {
    pub(super) step: NonZeroU64,
    pub(super) record: StepRecord,
    pub(super) copies: Vec<BlockCopy>,
    pub(super) entries: Vec<InFlightEntry>,
}

/// What a step was made of, and when.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepRecord {
    /// Made of fillers only.
    pub(super) is_filler: bool,
    /// Without prompt tokens.
    pub(super) is_decode: bool,
    pub(super) num_tokens: usize,
    pub(super) planned_at: Time,
    /// A filling step was in flight at the same time as this one, which is none.
    pub(super) is_beside_filler: bool,
}

/// One sequence's share of a step in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlightEntry {
    pub(super) place: SequenceRef,
    /// Tokens in the cache once the step is done.
    pub(super) end: usize,
    /// Prompt tokens (or recomputed ones) of the step; 0 for a decode.
    pub(super) num_prompt_tokens: usize,
    /// Choices sampled.
    pub(super) num_sampled: usize,
    /// Prompt log-probabilities come with the output.
    pub(super) prompt_logprobs: bool,
}

impl StepBuilder {
    /// An empty plan, to be made of what `spent` has.
    pub(super) fn new(step: NonZeroU64, spent: SpentPlan) -> Self {
        Self {
            step,
            copies: Vec::new(),
            is_filler: false,
            num_padding: 0,
            num_tokens: 0,
            spent,
            num_decodes: 0,
            chunks: Vec::new(),
            chunk_entries: Vec::new(),
            chunk_tables_since: Vec::new(),
        }
    }

    /// What a plan that came to nothing was to be made of.
    pub(super) fn into_spent(self) -> SpentPlan {
        self.spent
    }

    /// Schedules the sequence's next `num_tokens` tokens, whose blocks it already holds.
    pub(super) fn push(
        &mut self,
        sequence: &mut Sequence,
        num_tokens: usize,
        num_padding: usize,
        kv_cache: &PagedKvCache,
    ) {
        let end = sequence.num_computed + num_tokens;
        let is_decode = sequence.is_decode();
        let scheduled = if is_decode {
            self.claim(sequence.id);
            &mut self.spent.sequences[self.num_decodes]
        } else {
            let at = self.chunks.len();
            self.chunks.push(ScheduledSequence::empty(sequence.id));
            &mut self.chunks[at]
        };
        write_share(scheduled, sequence, end, self.spent.step, kv_cache);
        scheduled.num_padding = num_padding;
        let (place, num_sampled) = (sequence.place(), scheduled.sample.len());
        let prompt_logprobs = scheduled.prompt_logprobs;
        if is_decode {
            self.num_decodes += 1;
            self.spent.tables_since.push(sequence.tables_since);
            self.spent.entries.push(InFlightEntry { place, end, num_prompt_tokens: 0, num_sampled, prompt_logprobs });
        } else {
            self.chunk_tables_since.push(sequence.tables_since);
            let num_prompt_tokens = num_tokens;
            self.chunk_entries.push(InFlightEntry { place, end, num_prompt_tokens, num_sampled, prompt_logprobs });
        }
        self.num_tokens += num_tokens;
        self.num_padding += num_padding;
        sequence.num_computed = end;
        sequence.num_in_flight += 1;
    }

    /// Makes `spent.sequences[num_decodes]` the next decode's: its share of the earlier plan if that is near, else an empty
    /// one. Both plans are in order of precedence, so it is, but for those that have left since.
    fn claim(&mut self, id: SequenceId) {
        let (at, sequences) = (self.num_decodes, &mut self.spent.sequences);
        match sequences[at..].iter().take(LOOK_AHEAD).position(|share| share.id == id) {
            Some(distance) => sequences.swap(at, at + distance),
            None => sequences.insert(at, ScheduledSequence::empty(id)),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.num_decodes == 0 && self.chunks.is_empty()
    }

    /// Whether it has prompt chunks beside decodes.
    pub(super) fn is_mixed(&self) -> bool {
        self.num_decodes > 0 && !self.chunks.is_empty()
    }

    /// Counts padding slots that belong to no scheduled sequence with the plan's first one.
    pub(super) fn add_padding(&mut self, num_slots: usize) {
        if let Some(first) = self.spent.sequences[..self.num_decodes].first_mut().or(self.chunks.first_mut()) {
            first.num_padding += num_slots;
            self.num_padding += num_slots;
        }
    }

    /// The plan, and what to remember of it.
    pub(super) fn finish(mut self, planned_at: Time) -> (StepPlan, InFlightStep) {
        let SpentPlan { mut sequences, mut entries, mut tables_since, .. } = self.spent;
        sequences.truncate(self.num_decodes);
        sequences.append(&mut self.chunks);
        entries.append(&mut self.chunk_entries);
        tables_since.append(&mut self.chunk_tables_since);
        let in_flight = InFlightStep {
            step: self.step,
            record: StepRecord {
                is_filler: self.is_filler,
                is_decode: sequences.len() == self.num_decodes,
                num_tokens: self.num_tokens,
                planned_at,
                is_beside_filler: false,
            },
            copies: self.copies.clone(),
            entries,
        };
        (StepPlan { step: self.step.get(), block_copies: self.copies, sequences, tables_since }, in_flight)
    }
}

/// Writes the sequence's tokens up to `end` into its share of a plan. What it holds is that of `spent_step`, or nothing:
/// of a decode only what has changed since is written then.
fn write_share(
    share: &mut ScheduledSequence,
    sequence: &Sequence,
    end: usize,
    spent_step: u64,
    kv_cache: &PagedKvCache,
) {
    let block_size = kv_cache.config().block_size;
    let num_kept = if share.token_ids.len() == 1 && spent_step >= sequence.tables_since { share.start + 1 } else { 0 };
    let awaited = sequence.awaited_at(end);
    if num_kept == 0 || share.drawn_idx.is_none() || awaited.is_none() {
        sequence.write_tokens_until(end, &mut share.token_ids);
    }
    share.drawn_idx = awaited;
    share.start = sequence.num_computed;
    if num_kept == 0 {
        kv_cache.write_block_tables(sequence.table(), end, &mut share.block_tables);
    } else if num_kept.div_ceil(block_size) < end.div_ceil(block_size) {
        kv_cache.append_block_tables(sequence.table(), end, &mut share.block_tables);
    }
    if num_kept == 0 || share.sample.len() != 1 || sequence.num_sampled_at(end) != 1 {
        sequence.write_choices_sampled_at(end, &mut share.sample);
    }
    share.prompt_logprobs = sequence.wants_prompt_logprobs(end);
}
