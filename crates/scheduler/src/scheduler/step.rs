//! One step while it is being planned and while it is in flight. Decides the order of sequences in
//! a plan: decodes first, then prompt chunks, each in order of precedence.

use super::sequence::Sequence;
use crate::{BlockCopy, PagedKvCache, ScheduledSequence, SequenceId, StepPlan, Time};

/// A plan in the making.
#[derive(Debug, Default)]
pub(super) struct StepBuilder {
    /// Copies that `PagedKvCache::extend` asked for.
    pub(super) copies: Vec<BlockCopy>,
    /// Made of fillers only.
    pub(super) is_filler: bool,
    /// Decodes of plans that are done, whose memory is used again.
    pub(super) spares: Vec<ScheduledSequence>,
    decodes: Vec<ScheduledSequence>,
    chunks: Vec<ScheduledSequence>,
}

/// What `apply` must know of a plan.
#[derive(Debug)]
pub(super) struct InFlightStep {
    pub(super) step: u64,
    /// Made of fillers only.
    pub(super) is_filler: bool,
    pub(super) num_tokens: usize,
    pub(super) planned_at: Time,
    /// A filling step was in flight at the same time as this one, which is none.
    pub(super) is_beside_filler: bool,
    pub(super) copies: Vec<BlockCopy>,
    pub(super) entries: Vec<InFlightEntry>,
}

/// One sequence's share of a step in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlightEntry {
    pub(super) id: SequenceId,
    /// Tokens in the cache once the step is done.
    pub(super) end: usize,
    /// Prompt tokens (or recomputed ones) of the step; 0 for a decode.
    pub(super) num_prompt_tokens: usize,
    /// Choices sampled.
    pub(super) num_sampled: usize,
    /// Prompt log-probabilities come with the output.
    pub(super) prompt_logprobs: bool,
}

impl InFlightStep {
    /// Whether it has no prompt tokens.
    pub(super) fn is_decode(&self) -> bool {
        self.entries.iter().all(|entry| entry.num_prompt_tokens == 0)
    }
}

impl StepBuilder {
    /// An empty plan, made in the memory of `spares` as far as they go.
    pub(super) fn with_spares(spares: Vec<ScheduledSequence>) -> Self {
        Self { spares, ..Self::default() }
    }

    /// Schedules the sequence's next `num_tokens` tokens, whose blocks it already holds.
    pub(super) fn push(
        &mut self,
        sequence: &mut Sequence,
        num_tokens: usize,
        num_padding: usize,
        kv_cache: &PagedKvCache,
    ) {
        let (start, end) = (sequence.num_computed, sequence.num_computed + num_tokens);
        let mut scheduled = self.spares.pop().unwrap_or_else(|| ScheduledSequence::empty(sequence.id));
        scheduled.id = sequence.id;
        scheduled.drawn_idx = sequence.write_tokens_until(end, &mut scheduled.token_ids);
        scheduled.start = start;
        kv_cache.write_block_tables(sequence.id, end, &mut scheduled.block_tables);
        sequence.write_choices_sampled_at(end, &mut scheduled.sample);
        scheduled.prompt_logprobs = sequence.wants_prompt_logprobs(end);
        scheduled.num_padding = num_padding;
        let is_decode = sequence.is_decode();
        sequence.num_computed = end;
        sequence.num_in_flight += 1;
        if is_decode {
            self.decodes.push(scheduled);
        } else {
            self.chunks.push(scheduled);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.decodes.is_empty() && self.chunks.is_empty()
    }

    /// Whether it has prompt chunks beside decodes.
    pub(super) fn is_mixed(&self) -> bool {
        !self.decodes.is_empty() && !self.chunks.is_empty()
    }

    pub(super) fn num_padding(&self) -> usize {
        self.decodes.iter().chain(&self.chunks).map(|sequence| sequence.num_padding).sum()
    }

    /// Counts padding slots that belong to no scheduled sequence with the plan's first one.
    pub(super) fn add_padding(&mut self, num_slots: usize) {
        if let Some(first) = self.decodes.first_mut().or(self.chunks.first_mut()) {
            first.num_padding += num_slots;
        }
    }

    /// The plan, and what to remember of it.
    pub(super) fn finish(self, step: u64, planned_at: Time) -> (StepPlan, InFlightStep) {
        let num_decodes = self.decodes.len();
        let mut sequences = self.decodes;
        sequences.extend(self.chunks);
        let entry = |(at, sequence): (usize, &ScheduledSequence)| InFlightEntry {
            id: sequence.id,
            end: sequence.start + sequence.token_ids.len(),
            num_prompt_tokens: if at < num_decodes { 0 } else { sequence.token_ids.len() },
            num_sampled: sequence.sample.len(),
            prompt_logprobs: sequence.prompt_logprobs,
        };
        let entries = sequences.iter().enumerate().map(entry).collect();
        let plan = StepPlan { step, block_copies: self.copies, sequences };
        let in_flight = InFlightStep {
            step,
            is_filler: self.is_filler,
            num_tokens: plan.num_tokens(),
            planned_at,
            is_beside_filler: false,
            copies: plan.block_copies.clone(),
            entries,
        };
        (plan, in_flight)
    }
}
