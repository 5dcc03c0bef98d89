//! Continuous batching: what runs next, who is admitted, who is preempted.
//!
//! Running sequences are served in order of precedence. One token of the step's budget is set aside
//! for each decode, so that prompt chunks never stall them. A sequence that finds no block takes those
//! of the last in order, never of anybody before it, so the first of all always goes on; one that
//! still finds none keeps its blocks and sits the step out. In a step in which blocks were short
//! nobody is admitted, so a preempted sequence is not looked at again before the next step.

use super::DynamicBatchScheduler;
use super::micro_batch::{Pass, TokenBudget};
use super::sequences::SequenceRef;
use super::step::StepBuilder;
use super::waiting::Rank;
use crate::{KvLayout, PagedKvCache, PrefixHit};

impl DynamicBatchScheduler {
    pub(super) fn fill_continuous(&mut self, step: &mut StepBuilder, kv_cache: &mut PagedKvCache) {
        let pass = self.main_pass();
        self.fill_with(pass, step, kv_cache);
        if step.is_empty()
            && let Some(pass) = self.filler_pass(pass)
        {
            step.is_filler = true;
            self.fill_with(pass, step, kv_cache);
        }
    }

    fn fill_with(&mut self, pass: Pass, step: &mut StepBuilder, kv_cache: &mut PagedKvCache) {
        let mut budget = self.budget(pass);
        self.blocks_were_short = self.fill_running(pass, step, kv_cache, &mut budget);
        if !self.blocks_were_short {
            self.admit_waiting(pass, step, kv_cache, &mut budget);
        }
    }

    /// Schedules running sequences; whether anybody had to give up blocks or go without.
    fn fill_running(
        &mut self,
        pass: Pass,
        step: &mut StepBuilder,
        kv_cache: &mut PagedKvCache,
        budget: &mut TokenBudget,
    ) -> bool {
        let mut blocks_were_short = false;
        let mut at = 0;
        // Preemption removes only ranks behind `at`.
        while let Some(rank) = self.running.get(at).copied() {
            at += 1;
            if !pass.takes(rank) {
                continue;
            }
            let sequence = self.sequence(rank.place());
            let num_remaining = sequence.num_remaining();
            if num_remaining == 0 {
                continue;
            }
            let is_decode = sequence.is_decode();
            let chunk = budget.chunk(step.is_empty(), self.config.prefill_chunk_size);
            let limit = if is_decode { budget.decode } else { chunk };
            let num_tokens = num_remaining.min(limit);
            if num_tokens == 0 {
                continue;
            }
            let preemptions = self.counters.preemptions;
            let found = self.find_blocks(pass, at, rank.place(), num_tokens, step, kv_cache);
            blocks_were_short |= !found || self.counters.preemptions > preemptions;
            if found {
                step.push(self.sequence_mut(rank.place()), num_tokens, 0, kv_cache);
                if is_decode {
                    budget.decode -= num_tokens;
                } else {
                    budget.spend(num_tokens);
                }
            }
        }
        blocks_were_short
    }

    /// Makes the next tokens of a sequence writable, preempting sequences from the end of `running`
    /// down to index `first_victim` if need be.
    fn find_blocks(
        &mut self,
        pass: Pass,
        first_victim: usize,
        place: SequenceRef,
        num_tokens: usize,
        step: &mut StepBuilder,
        kv_cache: &mut PagedKvCache,
    ) -> bool {
        let sequence = self.sequence(place);
        let (start, in_flight, table) = (sequence.num_computed, sequence.num_in_flight > 0, sequence.table());
        let num_copies = step.copies.len();
        while kv_cache.extend_at(table, start, start + num_tokens, &mut step.copies).is_err() {
            // A step in flight may be about to give blocks back: wait for it rather than take others'.
            if in_flight || !self.preempt_last(pass, first_victim, kv_cache) {
                return false;
            }
        }
        if step.copies.len() > num_copies {
            self.sequence_mut(place).tables_since = step.step.get();
        }
        true
    }

    /// Preempts the last running sequence at or behind `first_victim` that no step in flight holds.
    fn preempt_last(&mut self, pass: Pass, first_victim: usize, kv_cache: &mut PagedKvCache) -> bool {
        let is_victim = |rank: Rank| pass.may_take_from(rank) && self.sequence(rank.place()).num_in_flight == 0;
        let at = (first_victim..self.running.len()).rev().find(|&at| is_victim(self.running[at]));
        let Some(at) = at else { return false };
        self.preempt(at, kv_cache);
        true
    }

    fn preempt(&mut self, at: usize, kv_cache: &mut PagedKvCache) {
        let rank = self.running.remove(at);
        kv_cache.free_sequence(rank.id);
        self.sequence_mut(rank.place()).reset_computed();
        self.waiting.insert(rank);
        self.counters.preemptions += 1;
    }

    /// Admits waiting sequences in order, never one past another, while there is room. Fillers behind a
    /// sequence make room for it.
    fn admit_waiting(
        &mut self,
        pass: Pass,
        step: &mut StepBuilder,
        kv_cache: &mut PagedKvCache,
        budget: &mut TokenBudget,
    ) {
        if self.waiting.is_empty() {
            return;
        }
        let mut promised = self.blocks_promised(kv_cache);
        while budget.prefill > 0 {
            let Some(rank) = self.waiting.iter().find(|rank| pass.takes(*rank)) else { break };
            let hit = self.look_up_prefix(rank.place(), kv_cache);
            while !self.has_room_for(rank.place(), &hit, promised, kv_cache) {
                if !self.displace_filler(pass, rank, &hit, promised, kv_cache) {
                    return;
                }
                promised = self.blocks_promised(kv_cache);
            }
            let Some(num_tokens) = self.start(rank.place(), hit, step, kv_cache, budget) else {
                break;
            };
            self.waiting.remove(&rank);
            self.insert_running(rank);
            promised += self.blocks_still_wanted(rank.place(), kv_cache);
            budget.spend(num_tokens);
        }
    }

    /// Preempts the last filler behind `rank`, if doing so to all of them makes room for it.
    fn displace_filler(
        &mut self,
        pass: Pass,
        rank: Rank,
        hit: &PrefixHit,
        promised: usize,
        kv_cache: &mut PagedKvCache,
    ) -> bool {
        if pass.is_for_fillers() {
            return false;
        }
        let is_victim = |victim: &Rank| {
            *victim > rank && pass.is_filler(*victim) && self.sequence(victim.place()).num_in_flight == 0
        };
        let victims: Vec<Rank> = self.running.iter().copied().filter(is_victim).collect();
        let num_held: usize = victims.iter().map(|victim| kv_cache.num_held(victim.id)).sum();
        let num_wanted = self.blocks_wanted(rank.place(), hit, promised, kv_cache);
        let slots = self.config.max_batch_size + victims.len();
        let Some(last) = victims.last().filter(|_| self.num_slots_taken() < slots) else { return false };
        if num_wanted > kv_cache.num_available() + num_held {
            return false;
        }
        let Ok(at) = self.running.binary_search(last) else { return false };
        self.preempt(at, kv_cache);
        true
    }

    fn blocks_promised(&self, kv_cache: &PagedKvCache) -> usize {
        self.running.iter().map(|rank| self.blocks_still_wanted(rank.place(), kv_cache)).sum()
    }

    /// Blocks that a running sequence still has to take before its known tokens are computed.
    fn blocks_still_wanted(&self, place: SequenceRef, kv_cache: &PagedKvCache) -> usize {
        let sequence = self.sequence(place);
        if sequence.num_remaining() == 0 {
            return 0;
        }
        let (num_computed, num_remaining) = (sequence.num_computed, sequence.num_remaining());
        let peak = kv_cache.blocks_to_reach(num_computed, num_computed + num_remaining);
        peak.saturating_sub(kv_cache.num_held(place.id()))
    }

    pub(super) fn look_up_prefix(&mut self, place: SequenceRef, kv_cache: &PagedKvCache) -> PrefixHit {
        let sequence = self.sequence_mut(place);
        if !sequence.may_read_prefixes() {
            return PrefixHit::default();
        }
        kv_cache.lookup_prefix(&mut sequence.chain, &sequence.tokens)
    }

    /// The batch has a place for it, and its blocks are there. A sequence that would run alone always has
    /// room.
    fn has_room_for(&self, place: SequenceRef, hit: &PrefixHit, promised: usize, kv_cache: &PagedKvCache) -> bool {
        if self.running.is_empty() {
            return true;
        }
        self.num_slots_taken() < self.config.max_batch_size
            && self.blocks_wanted(place, hit, promised, kv_cache) <= kv_cache.num_available()
    }

    /// Blocks for all of a sequence's known tokens beside what running prompts still want, and one for
    /// each running sequence (unless all is reserved anyway), so that admission does not cause the next
    /// preemption.
    fn blocks_wanted(&self, place: SequenceRef, hit: &PrefixHit, promised: usize, kv_cache: &PagedKvCache) -> usize {
        let peak = kv_cache.blocks_to_reach(hit.num_tokens, self.sequence(place).tokens.len());
        let wanted = peak.saturating_sub(hit.num_blocks) + hit.num_unowned;
        let watermark = if kv_cache.config().layout == KvLayout::Paged { self.running.len() } else { 0 };
        wanted + promised + watermark
    }

    /// Gives a waiting sequence its first blocks and schedules its first chunk. `None`, and nothing
    /// changed, if the blocks are not there (they may be held by sequences that ended in flight).
    fn start(
        &mut self,
        place: SequenceRef,
        hit: PrefixHit,
        step: &mut StepBuilder,
        kv_cache: &mut PagedKvCache,
        budget: &TokenBudget,
    ) -> Option<usize> {
        let (id, start) = (place.id(), hit.num_tokens);
        let chunk = budget.chunk(step.is_empty(), self.config.prefill_chunk_size);
        let num_tokens = (self.sequence(place).tokens.len() - start).min(chunk);
        kv_cache.start_sequence(id, hit).ok()?;
        let table = kv_cache.table_of(id);
        if kv_cache.extend_at(table, start, start + num_tokens, &mut step.copies).is_err() {
            kv_cache.free_sequence(id);
            return None;
        }
        let sequence = self.sequence_mut(place);
        sequence.begin(table, start, step.step.get());
        step.push(sequence, num_tokens, 0, kv_cache);
        Some(num_tokens)
    }
}
