//! What a step's output means: which tokens are computed, which sequences go on, part or end. Decides
//! nothing about what runs next.

use super::DynamicBatchScheduler;
use super::sequence::Sequence;
use super::sequences::SequenceRef;
use super::step::InFlightEntry;
use std::hint::black_box;
use std::num::NonZeroU64;

use crate::{Event, FinishReason, PagedKvCache, SampledToken, SequenceId, StepOutput, Time};

impl DynamicBatchScheduler {
    /// Takes a step's output; returns what happened, in order. Steps are applied in the order in which
    /// they were scheduled.
    ///
    /// # Panics
    /// When the output is not that of the oldest plan in flight, or samples other sequences than it
    /// asked for: going on could give one request's token to another.
    pub fn apply(&mut self, kv_cache: &mut PagedKvCache, output: StepOutput, _now: Time) -> Vec<Event> {
        let mut events = Vec::with_capacity(output.sampled.len());
        let Some(flight) = self.in_flight.pop_front_if(|flight| flight.step.get() == output.step) else {
            let oldest = self.in_flight.front().map(|flight| flight.step);
            panic!("output of step {} arrived; the oldest step in flight is {oldest:?}", output.step);
        };
        kv_cache.release_copies(&flight.copies);
        self.fetch(&flight.entries);
        let mut sampled = output.sampled.into_iter();
        let mut prompt_logprobs = output.prompt_logprobs;
        for entry in &flight.entries {
            let is_live = self.mark_applied(entry, flight.step, kv_cache);
            if is_live && entry.prompt_logprobs {
                self.report_prompt_logprobs(entry.place, &mut prompt_logprobs, &mut events);
            }
            // The samples are those that the plan asked for: the sequence itself, then the choices that part from it.
            let SequenceId { request, choice } = entry.place.id();
            let mut samples = (choice..).take(entry.num_sampled).map(|choice| {
                let next = sampled.next();
                let id = SequenceId { request, choice };
                next.filter(|sample| sample.id == id).unwrap_or_else(|| not_sampled(entry, output.step))
            });
            if is_live {
                self.apply_samples(entry, &mut samples, kv_cache, &mut events);
            }
            samples.for_each(drop);
        }
        assert!(sampled.next().is_none(), "step {} sampled more than it was asked for", output.step);
        self.finished_decode = Some(flight.record).filter(|step| !step.is_filler && step.is_decode);
        self.spent.put_entries(flight.entries);
        events
    }

    /// Reads where every sequence's next token goes. With hundreds of sequences the memory behind a step's device time
    /// is far: reads of it overlap, while writes wait one for the other.
    fn fetch(&self, entries: &[InFlightEntry]) {
        let newest = entries.iter().filter_map(|entry| self.sequence(entry.place).tokens.last());
        black_box(newest.fold(0, |seen, token| seen ^ token));
    }

    /// The entry's tokens are in the cache; whether its sequence is still live.
    fn mark_applied(&mut self, entry: &InFlightEntry, step: NonZeroU64, kv_cache: &mut PagedKvCache) -> bool {
        self.counters.prompt_tokens += entry.num_prompt_tokens as u64;
        let next_step = self.step + 1;
        let sequence = self.sequences.get_mut(entry.place);
        sequence.num_in_flight -= 1;
        if sequence.ended {
            if sequence.num_in_flight == 0 {
                self.sequences.remove(entry.place);
                self.num_ending -= 1;
                kv_cache.free_sequence(entry.place.id());
            }
            return false;
        }
        sequence.num_applied = entry.end;
        sequence.draw = sequence.draw.filter(|draw| draw.step != step);
        if kv_cache.mark_computed_at(sequence.table(), &mut sequence.chain, &sequence.tokens, entry.end) {
            sequence.tables_since = next_step;
        }
        true
    }

    /// Reports positions not reported before (a recomputed prompt gives them again).
    fn report_prompt_logprobs(
        &mut self,
        place: SequenceRef,
        outputs: &mut Vec<(SequenceId, usize, Vec<crate::TokenLogprobs>)>,
        events: &mut Vec<Event>,
    ) {
        let id = place.id();
        let Some(at) = outputs.iter().position(|(owner, _, _)| *owner == id) else {
            return;
        };
        let (_, first, mut logprobs) = outputs.remove(at);
        let sequence = self.sequence_mut(place);
        let start = first.max(sequence.logprobs_from);
        let end = (first + logprobs.len()).min(sequence.prompt_len);
        if start < end {
            logprobs.truncate(end - first);
            logprobs.drain(..start - first);
            sequence.logprobs_from = end;
            events.push(Event::PromptLogprobs { id, start, logprobs });
        }
    }

    /// Takes in what a live sequence's share of the step gave.
    fn apply_samples(
        &mut self,
        entry: &InFlightEntry,
        samples: &mut impl Iterator<Item = SampledToken>,
        kv_cache: &mut PagedKvCache,
        events: &mut Vec<Event>,
    ) {
        let place = entry.place;
        let sequence = self.sequence(place);
        let Some(first) = samples.next() else {
            if sequence.is_prompt_only() && entry.end == sequence.tokens.len() {
                self.finish_without_tokens(place, kv_cache, events);
            }
            return;
        };
        let parts = sequence.num_unforked > 0;
        let is_finished = self.extend_with(place, first, events);
        if parts {
            let mut siblings = Vec::new();
            for sampled in samples {
                siblings.extend(self.sibling_with(place, sampled, events));
            }
            self.sequence_mut(place).num_unforked = 0;
            self.place_siblings(place, siblings, is_finished, kv_cache);
        }
        if is_finished {
            self.end_sequence(place.id(), kv_cache);
        }
    }

    /// `max_tokens` is 0: the prompt is computed, which is all that every choice wanted.
    fn finish_without_tokens(&mut self, place: SequenceRef, kv_cache: &mut PagedKvCache, events: &mut Vec<Event>) {
        let (request, sequence) = (place.id().request, self.sequence(place));
        let num_cached_tokens = sequence.num_cached_tokens().unwrap_or(0);
        for choice in 0..=sequence.num_unforked {
            let id = SequenceId { request, choice };
            events.push(Event::Finished { id, reason: FinishReason::Length, num_cached_tokens });
        }
        self.abort(request, kv_cache);
    }

    /// Appends a token to a running sequence; whether it was the last.
    fn extend_with(&mut self, place: SequenceRef, sampled: SampledToken, events: &mut Vec<Event>) -> bool {
        let max_seq_len = self.config.max_seq_len;
        let (is_finished, num_new) = accept(self.sequences.get_mut(place), sampled, max_seq_len, events);
        self.counters.generated_tokens += num_new;
        is_finished
    }

    /// A choice that parts from `parent` with its first token; `None` if that was its last.
    fn sibling_with(
        &mut self,
        parent: SequenceRef,
        sampled: SampledToken,
        events: &mut Vec<Event>,
    ) -> Option<Sequence> {
        let mut sibling = self.sequence(parent).sibling(sampled.id, self.config.ageing_us);
        let (is_finished, num_new) = accept(&mut sibling, sampled, self.config.max_seq_len, events);
        self.counters.generated_tokens += num_new;
        if is_finished {
            self.count_ended(parent.id().request);
            return None;
        }
        Some(sibling)
    }

    /// Siblings share the parent's blocks where the batch has room for them; the others wait and
    /// recompute the prompt, most of which the prefix cache still has.
    fn place_siblings(
        &mut self,
        parent: SequenceRef,
        siblings: Vec<Sequence>,
        parent_finished: bool,
        kv_cache: &mut PagedKvCache,
    ) {
        let parent_seq = self.sequence(parent);
        let (num_computed, num_granted) = (parent_seq.num_applied, parent_seq.num_granted as usize);
        let room = self.config.max_batch_size + usize::from(parent_finished);
        // The parent's slot of a static batch stays taken even if it has ended.
        let mut num_placed = 1;
        for sibling in siblings {
            let rank = self.sequences.insert(sibling);
            if kv_cache.can_fork() && self.running.len() < room && num_placed < num_granted {
                kv_cache.fork(parent.id(), rank.id);
                let (table, next_step) = (kv_cache.table_of(rank.id), self.step + 1);
                self.sequence_mut(rank.place()).begin(table, num_computed, next_step);
                self.insert_running(rank);
                num_placed += 1;
                if let Some(batch) = &mut self.static_batch {
                    batch.num_slots += 1;
                }
            } else {
                self.waiting.insert(rank);
            }
        }
    }
}

#[cold]
fn not_sampled(entry: &InFlightEntry, step: u64) -> ! {
    let (num_sampled, id) = (entry.num_sampled, entry.place.id());
    panic!("step {step} asked for {num_sampled} samples from {id:?} on and got others");
}

/// Gives a sequence its sampled token and says so: the token, if there is one, and the end, if it is one. Whether it is
/// the end, and how many tokens were generated.
fn accept(sequence: &mut Sequence, sampled: SampledToken, max_seq_len: usize, events: &mut Vec<Event>) -> (bool, u64) {
    let SampledToken { id, token, logprobs } = sampled;
    let (reason, num_new) = match token {
        Ok(token) => {
            events.push(Event::Token { id, token, logprobs });
            (sequence.accept(token, max_seq_len), 1)
        }
        Err(why) => (Some(FinishReason::Failed(why)), 0),
    };
    let Some(reason) = reason else { return (false, num_new) };
    let num_cached_tokens = sequence.num_cached_tokens().unwrap_or(0);
    events.push(Event::Finished { id, reason, num_cached_tokens });
    (true, num_new)
}
