//! What plans that are done leave to those that follow: memory, and a decode's share of a plan as it was a step or two
//! ago, most of which still holds. Decides nothing.

use super::step::InFlightEntry;
use crate::{ScheduledSequence, StepPlan};

/// Plans that are kept: where one is made ahead, two may come back before the next two are made.
const MAX_PLANS: usize = 2;

/// What the next plan is made of.
#[derive(Debug, Default)]
pub(super) struct SpentPlan {
    /// The step of a plan that is done.
    pub(super) step: u64,
    /// Its sequences, without the prompt chunks at its end.
    pub(super) sequences: Vec<ScheduledSequence>,
    /// Empty.
    pub(super) tables_since: Vec<u64>,
    /// Empty.
    pub(super) entries: Vec<InFlightEntry>,
}

/// Plans and lists of steps that are over.
#[derive(Debug, Default)]
pub(super) struct SpentMemory {
    /// The newest last.
    plans: Vec<SpentPlan>,
    entries: Vec<Vec<InFlightEntry>>,
}

impl SpentMemory {
    /// Takes a plan back.
    pub(super) fn put_plan(&mut self, plan: StepPlan) {
        let StepPlan { step, mut sequences, mut tables_since, .. } = plan;
        while sequences.pop_if(|last| last.token_ids.len() > 1).is_some() {}
        tables_since.clear();
        self.put(SpentPlan { step, sequences, tables_since, entries: Vec::new() });
    }

    /// Takes back the list of a step that is over.
    pub(super) fn put_entries(&mut self, mut entries: Vec<InFlightEntry>) {
        if self.entries.len() < MAX_PLANS {
            entries.clear();
            self.entries.push(entries);
        }
    }

    /// Takes back what came to no plan.
    pub(super) fn put(&mut self, plan: SpentPlan) {
        if self.plans.len() == MAX_PLANS {
            self.plans.remove(0);
        }
        self.plans.push(plan);
    }

    /// The newest plan, or nothing but memory.
    pub(super) fn take(&mut self) -> SpentPlan {
        let mut plan = self.plans.pop().unwrap_or_default();
        if plan.entries.capacity() == 0 {
            plan.entries = self.entries.pop().unwrap_or_default();
        }
        plan
    }
}
