//! A pipeline's shares: how much of what is ready one step may take when several are in flight, and who
//! only fills a pipeline's bubbles. Pure arithmetic over ranks and counts.
//!
//! A *filler* is a sequence of negative priority behind some live sequence of another priority. It runs
//! when nobody else can and a stage would idle, in steps no longer than the others bear (`filler_governor`).
//! Once it is the first in order it is no filler any more, so that it ends for all that others do.

use super::filler_governor::{FIRST_TOKENS, TimedStep};
use super::step::StepRecord;
use super::waiting::Rank;
use super::{DynamicBatchScheduler, SchedulerConfig};
use crate::Time;

/// Prompt tokens of a step that are not cut further for the sake of equal micro-batches: below, a step
/// costs about as much whatever it computes.
const PREFILL_SHARE_MIN: usize = 64;

/// Tokens that may still be scheduled in this step.
pub(super) struct TokenBudget {
    pub(super) decode: usize,
    pub(super) prefill: usize,
    /// Of the sequence that comes first in the step. It may be more: the others go without then.
    pub(super) first_chunk: usize,
}

/// Whom one look at the sequences is about.
#[derive(Clone, Copy)]
pub(super) struct Pass {
    /// Sequences of negative priority behind this one are fillers; `None`: nobody is.
    behind: Option<Rank>,
    fillers: bool,
}

impl TokenBudget {
    /// Prompt tokens that the next sequence of the step may have.
    pub(super) fn chunk(&self, is_first: bool, chunk_size: usize) -> usize {
        if is_first { self.first_chunk } else { self.prefill.min(chunk_size) }
    }

    /// Takes the prompt tokens that a sequence has.
    pub(super) fn spend(&mut self, num_tokens: usize) {
        self.prefill = self.prefill.saturating_sub(num_tokens);
    }
}

impl Pass {
    /// Whether it is about this sequence.
    pub(super) fn takes(self, rank: Rank) -> bool {
        self.is_filler(rank) == self.fillers
    }

    /// Whether a sequence only fills bubbles.
    pub(super) fn is_filler(self, rank: Rank) -> bool {
        rank.is_offline && self.behind.is_some_and(|first| first < rank)
    }

    /// Whether `victim` may lose its blocks to a sequence of this pass that comes before it: fillers take
    /// from fillers only.
    pub(super) fn may_take_from(self, victim: Rank) -> bool {
        !self.fillers || self.is_filler(victim)
    }

    /// Whether it is the one about fillers.
    pub(super) fn is_for_fillers(self) -> bool {
        self.fillers
    }
}

impl DynamicBatchScheduler {
    /// The pass about everybody but fillers.
    pub(super) fn main_pass(&self) -> Pass {
        let running = self.running.iter().find(|rank| !rank.is_offline).copied();
        let waiting = self.waiting.iter().find(|rank| !rank.is_offline);
        let first = running.into_iter().chain(waiting).min();
        let behind = first.filter(|_| self.config.num_stages > 1);
        Pass { behind, fillers: false }
    }

    /// The pass about fillers, if a stage would idle, fewer steps in flight than stages, and the others
    /// bear it.
    pub(super) fn filler_pass(&self, main: Pass) -> Option<Pass> {
        let would_idle = self.in_flight.len() < self.config.num_stages;
        (main.behind.is_some() && would_idle && self.filler_tokens() > 0).then_some(Pass { fillers: true, ..main })
    }

    /// What a step of this pass may take: of decodes and of prompt tokens about the part that leaves as
    /// much to each of the other micro-batches. One token is set aside for each decode, so that prompt
    /// chunks never stall them.
    pub(super) fn budget(&self, pass: Pass) -> TokenBudget {
        let SchedulerConfig { max_batch_tokens, mixed_batch_tokens, prefill_chunk_size, micro_batches, .. } =
            self.config;
        let (mut num_decoding, mut num_ready, mut num_prompt_tokens) = (0usize, 0usize, 0usize);
        for rank in self.running.iter().filter(|rank| pass.takes(**rank)) {
            let sequence = self.sequence(rank.place());
            if sequence.num_computed >= sequence.prompt_len && sequence.num_remaining() <= 1 {
                num_decoding += 1;
                num_ready += sequence.num_remaining();
            } else {
                num_prompt_tokens += sequence.num_remaining();
            }
        }
        let most = match mixed_batch_tokens {
            _ if pass.fillers => self.filler_tokens(),
            Some(mixed) => mixed.min(max_batch_tokens),
            None => max_batch_tokens,
        };
        let decode = num_ready.min(num_decoding.div_ceil(micro_batches.max(1))).min(most);
        let mut prefill = most - decode;
        if micro_batches > 1 {
            let enough = prefill.saturating_mul(micro_batches);
            for rank in self.waiting.iter().filter(|rank| pass.takes(*rank)) {
                if num_prompt_tokens >= enough {
                    break;
                }
                num_prompt_tokens += self.sequence(rank.place()).tokens.len();
            }
            prefill = prefill.min(num_prompt_tokens.div_ceil(micro_batches).max(PREFILL_SHARE_MIN));
        }
        let is_alone = num_decoding == 0 && micro_batches <= 1 && !pass.fillers;
        let first_chunk =
            if is_alone { self.config.largest_chunk().min(max_batch_tokens) } else { prefill_chunk_size.min(prefill) };
        TokenBudget { decode, prefill, first_chunk }
    }

    /// What the others bear beside a decode. Behind a prompt chunk a filling step may be as long as that:
    /// it has left a stage when the chunk's successor comes. Where the others cannot go on although nothing is
    /// in flight, they wait for blocks that fillers hold, and what those take delays nobody.
    fn filler_tokens(&self) -> usize {
        let borne = if self.in_flight.is_empty() { FIRST_TOKENS } else { 0 }.max(self.governor.num_tokens());
        let newest = self.in_flight.iter().rev().map(|step| step.record).find(|step| !step.is_filler);
        let chunk = newest.filter(|step| borne > 0 && !step.is_decode).map_or(0, |step| step.num_tokens);
        borne.max(chunk).min(self.config.max_batch_tokens)
    }

    /// Tells the governor of the decode step that came home last: it was under way until `now`.
    pub(super) fn time_decode(&mut self, now: Time) {
        if let Some(step) = self.finished_decode.take() {
            let us = now.0.saturating_sub(step.planned_at.0);
            let StepRecord { num_tokens, is_beside_filler, .. } = step;
            self.governor.record(TimedStep { us, num_tokens, is_beside_filler });
        }
    }
}
