//! What plans that are done leave to those that follow: memory, and a decode's share of a plan as it was two steps ago,
//! most of which still holds. Decides nothing.

use super::step::{InFlightEntry, StepBuilder};
use crate::{ScheduledSequence, StepPlan};

/// The plan that came back last, and lists of steps that are over.
#[derive(Debug, Default)]
pub(super) struct SpentMemory {
    sequences: Vec<ScheduledSequence>,
    /// The step of the plan that `sequences` were part of.
    step: u64,
    entries: Vec<InFlightEntry>,
}

impl SpentMemory {
    /// Takes a plan back, without the prompt chunks at its end.
    pub(super) fn take_plan(&mut self, plan: StepPlan) {
        let StepPlan { step, mut sequences, .. } = plan;
        while sequences.pop_if(|last| last.token_ids.len() > 1).is_some() {}
        (self.sequences, self.step) = (sequences, step);
    }

    /// Takes back the list of a step that is over.
    pub(super) fn take_entries(&mut self, mut entries: Vec<InFlightEntry>) {
        entries.clear();
        self.entries = entries;
    }

    /// Takes back what a plan that came to nothing was to be made of.
    pub(super) fn keep(&mut self, unused: StepBuilder) {
        (self.sequences, self.step, self.entries) = unused.into_spares();
    }

    /// All that there is: shares of a plan with its step, and an empty list.
    pub(super) fn hand_out(&mut self) -> (Vec<ScheduledSequence>, u64, Vec<InFlightEntry>) {
        (std::mem::take(&mut self.sequences), self.step, std::mem::take(&mut self.entries))
    }
}
