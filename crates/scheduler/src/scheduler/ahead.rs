//! Planning ahead: while one plan is in flight, the next one takes for granted that every sequence gets one
//! token from it and goes on. Decides when that cannot be taken for granted; what the token is, whoever runs the
//! plans fills in (`docs/decisions/0013-planning-ahead.md`).
//!
//! A sequence whose length ends it is known to leave: it is not planned again, and its place in the batch is free
//! for the next plan. One that ends by surprise (stop token, failure, abort) has computed one token more, which is
//! thrown away; it keeps its blocks until that plan is applied, as any sequence that ends in flight.

use super::DynamicBatchScheduler;
use super::sequence::Draw;
use super::step::InFlightStep;
use super::waiting::Rank;

impl DynamicBatchScheduler {
    /// Whether nothing can be planned before the plan in flight is applied. Where blocks were short, the next plan
    /// takes them from others, which only sequences that no plan holds can give: ahead of it the one in need would
    /// be passed over for as long as others find blocks.
    ///
    /// # Panics
    /// When two plans are in flight already: a draw is named by its place in the one plan before.
    pub(super) fn must_wait_for_output(&self) -> bool {
        let num_in_flight = self.in_flight.len();
        assert!(!self.config.plan_ahead || num_in_flight < 2, "a plan ahead of the one that is ahead");
        self.config.plan_ahead && num_in_flight > 0 && self.blocks_were_short
    }

    /// Remembers which sequences' next tokens the plan draws, and as which of its draws.
    pub(super) fn note_draws(&mut self, plan: &InFlightStep) {
        if !self.config.plan_ahead {
            return;
        }
        let mut next_idx = 0;
        for entry in plan.entries.iter().filter(|entry| entry.num_sampled > 0) {
            self.sequence_mut(entry.place).draw = Some(Draw { step: plan.step, idx: next_idx });
            next_idx += u32::try_from(entry.num_sampled).unwrap_or(u32::MAX);
        }
    }

    /// Counts the sequences that leave with the plan in flight: their places are free for those that wait.
    pub(super) fn count_leaving(&mut self) {
        let may_admit = self.config.plan_ahead && !self.in_flight.is_empty() && !self.waiting.is_empty();
        let is_leaving = |rank: &&Rank| self.sequence(rank.place()).is_leaving();
        self.num_leaving = if may_admit { self.running.iter().filter(is_leaving).count() } else { 0 };
    }

    /// Places in the batch that running sequences take.
    pub(super) fn num_slots_taken(&self) -> usize {
        self.running.len() - self.num_leaving
    }
}
