//! What plans that are done leave to those that follow: memory, and a decode's share of a plan as it was two steps ago,
//! most of which still holds. Decides nothing.

use super::step::InFlightEntry;
use crate::{ScheduledSequence, StepPlan};

/// The plan that came back last, and lists of steps that are over.
#[derive(Debug, Default)]
pub(super) struct SpentMemory {
    /// Its step.
    pub(super) step: u64,
    pub(super) sequences: Vec<ScheduledSequence>,
    /// Empty.
    pub(super) tables_since: Vec<u64>,
    /// Empty.
    pub(super) entries: Vec<InFlightEntry>,
}

impl SpentMemory {
    /// Takes a plan back, without the prompt chunks at its end.
    pub(super) fn take_plan(&mut self, plan: StepPlan) {
        let StepPlan { step, mut sequences, mut tables_since, .. } = plan;
        while sequences.pop_if(|last| last.token_ids.len() > 1).is_some() {}
        tables_since.clear();
        (self.step, self.sequences, self.tables_since) = (step, sequences, tables_since);
    }

    /// Takes back the list of a step that is over.
    pub(super) fn take_entries(&mut self, mut entries: Vec<InFlightEntry>) {
        entries.clear();
        self.entries = entries;
    }
}
