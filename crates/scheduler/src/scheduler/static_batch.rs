//! The classic static batch, the baseline of `continuous_batching = false`: wait for a full batch, pad
//! prompts on the left to the longest, run until the longest answer ends, only then take the next.
//!
//! ```text
//! slot 0  . . . . p p p | g g g g g g g
//! slot 1  p p p p p p p | g g g . . . .      . padding: computed, counted, never read
//! slot 2  . . p p p p p | g g g g g . .
//!         prompt columns  decodes
//! ```
//!
//! Every member's whole need is reserved when the batch is formed, so nobody is preempted.

use super::sequences::SequenceRef;
use super::step::StepBuilder;
use super::waiting::Rank;
use super::{DynamicBatchScheduler, SchedulerConfig};
use crate::{PagedKvCache, Time};

/// The batch that runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct StaticBatch {
    /// Slots that every step computes: members, and choices once they have parted.
    pub(super) num_slots: usize,
}

impl DynamicBatchScheduler {
    pub(super) fn fill_static(&mut self, step: &mut StepBuilder, kv_cache: &mut PagedKvCache, now: Time) {
        if !self.in_flight.is_empty() {
            return;
        }
        if self.running.is_empty() {
            self.static_batch = None;
            let waits_too_long = self.static_batch_due().is_some_and(|due| due <= now);
            if !waits_too_long && self.num_waiting_choices() < self.config.max_batch_size {
                return;
            }
            self.form_static_batch(kv_cache);
        }
        if let Some(batch) = self.static_batch {
            self.fill_static_step(batch, step, kv_cache);
        }
    }

    /// When the sequence that has waited longest has waited long enough.
    pub(super) fn static_batch_due(&self) -> Option<Time> {
        let arrival = self.waiting.oldest_arrival()?;
        Some(Time(arrival.0.saturating_add(self.config.static_batch_wait_us)))
    }

    fn num_waiting_choices(&self) -> usize {
        self.waiting.iter().map(|rank| self.sequence(rank.place()).num_unforked as usize + 1).sum()
    }

    /// Starts the first of the queue and those nearest to it in length, as many as fit.
    fn form_static_batch(&mut self, kv_cache: &mut PagedKvCache) {
        let mut slots_left = self.config.max_batch_size;
        let mut blocks_left = kv_cache.num_available();
        let mut num_members = 0;
        for rank in self.candidates_of_similar_length() {
            if slots_left == 0 {
                break;
            }
            let sequence = self.sequence(rank.place());
            let whole_len = sequence.prompt_len.saturating_add(sequence.spec.max_tokens);
            let needed = kv_cache.blocks_needed(whole_len).max(1);
            if needed > blocks_left {
                continue;
            }
            let choices = if kv_cache.can_fork() { sequence.num_unforked as usize + 1 } else { 1 };
            let granted = choices.min(slots_left).min(blocks_left / needed);
            slots_left -= granted;
            blocks_left -= granted * needed;
            num_members += 1;
            self.start_member(rank, granted, kv_cache);
        }
        self.static_batch = (num_members > 0).then_some(StaticBatch { num_slots: num_members });
    }

    /// The queue, cut to a batch's worth of similar prompt lengths around the first of it (when more
    /// wait than fit), the first of the queue at the head.
    fn candidates_of_similar_length(&self) -> Vec<Rank> {
        let Some(first) = self.waiting.first() else {
            return Vec::new();
        };
        let mut by_len: Vec<(usize, Rank)> =
            self.waiting.iter().map(|rank| (self.sequence(rank.place()).tokens.len(), rank)).collect();
        by_len.sort_unstable();
        let size = self.config.max_batch_size.min(by_len.len());
        let first_at = by_len.iter().position(|(_, rank)| *rank == first).unwrap_or(0);
        let windows = first_at.saturating_sub(size - 1)..=first_at.min(by_len.len() - size);
        let spread = |start: &usize| by_len[start + size - 1].0 - by_len[*start].0;
        let start = windows.min_by_key(spread).unwrap_or(0);
        let mut chosen: Vec<Rank> = by_len[start..start + size].iter().map(|(_, rank)| *rank).collect();
        chosen.sort_unstable();
        chosen
    }

    fn start_member(&mut self, rank: Rank, granted: usize, kv_cache: &mut PagedKvCache) {
        let hit = self.look_up_prefix(rank.place(), kv_cache);
        let start = hit.num_tokens;
        if let Err(error) = kv_cache.start_sequence(rank.id, hit) {
            panic!("a static batch was formed of more than fits: {error}");
        }
        let next_step = self.step + 1;
        let sequence = self.sequence_mut(rank.place());
        sequence.num_granted = u32::try_from(granted).unwrap_or(u32::MAX);
        sequence.begin(kv_cache.table_of(rank.id), start, next_step);
        self.waiting.remove(&rank);
        self.insert_running(rank);
    }

    /// One step of all members: the next columns of their prompts, aligned on the right, or one token
    /// each. Slots of members that have ended, or whose prompt starts later, are padding.
    fn fill_static_step(&mut self, batch: StaticBatch, step: &mut StepBuilder, kv_cache: &mut PagedKvCache) {
        let SchedulerConfig { max_batch_tokens, prefill_chunk_size, .. } = self.config;
        let members: Vec<(SequenceRef, usize)> =
            self.running.iter().map(|rank| (rank.place(), self.sequence(rank.place()).num_remaining())).collect();
        let columns_left = members.iter().map(|(_, remaining)| *remaining).max().unwrap_or(0);
        let width = columns_left.min(max_batch_tokens / batch.num_slots).min(prefill_chunk_size).max(1);
        let columns_after = columns_left.saturating_sub(width);
        let mut padding_left = batch.num_slots * width;
        for (place, remaining) in members {
            let num_tokens = remaining.saturating_sub(columns_after);
            if num_tokens == 0 {
                continue;
            }
            let sequence = self.sequence_mut(place);
            let (start, num_copies) = (sequence.num_computed, step.copies.len());
            if let Err(error) = kv_cache.extend_at(sequence.table(), start, start + num_tokens, &mut step.copies) {
                panic!("a static batch outgrew its reservation: {error}");
            }
            if step.copies.len() > num_copies {
                sequence.tables_since = step.step.get();
            }
            step.push(sequence, num_tokens, width - num_tokens, kv_cache);
            padding_left -= width;
        }
        step.add_padding(padding_left);
    }
}
