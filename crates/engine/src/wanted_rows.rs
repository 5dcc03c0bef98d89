//! Which rows of a step's hidden states are read, known from the plan before the layers run: the model's last layer
//! need not be computed for the others. Every rank decides alike, by its plan alone. Knows no tensor.

use pagemill_model::OutputRows;
use pagemill_scheduler::StepPlan;

/// The rows that a step wants; all of them by default.
#[derive(Debug, Default)]
pub(crate) struct WantedRows {
    /// Places in the plan of the sequences that sample.
    sampling: Vec<u32>,
    /// Whether these sequences' last rows are all that is wanted.
    are_last_rows: bool,
}

impl WantedRows {
    /// Decides for a plan of `num_tokens` tokens. A decode wants all rows, which is known without a look at the plan;
    /// so does a step in which fewer than half could be left out, and one with log-probabilities of a prompt, which are
    /// rows in the middle of a sequence.
    pub(crate) fn choose(&mut self, plan: &StepPlan, num_tokens: usize) {
        let sequences = &plan.sequences;
        self.are_last_rows = false;
        if num_tokens == sequences.len() || sequences.iter().any(|sequence| sequence.prompt_logprobs) {
            return;
        }
        self.sampling.clear();
        let sampling = (0..).zip(sequences).filter(|(_, sequence)| !sequence.sample.is_empty());
        self.sampling.extend(sampling.map(|(place, _)| place));
        self.are_last_rows = 2 * self.sampling.len() <= num_tokens;
    }

    /// As the model takes it.
    pub(crate) fn output(&self) -> OutputRows<'_> {
        if self.are_last_rows { OutputRows::LastOf(&self.sampling) } else { OutputRows::All }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill_scheduler::{RequestId, ScheduledSequence, SequenceId};

    /// A plan of sequences of (tokens, choices that sample).
    fn plan(sequences: &[(usize, u32)]) -> StepPlan {
        let sequence = |&(num_tokens, num_choices): &(usize, u32)| {
            let id = |choice| SequenceId { request: RequestId(1), choice };
            ScheduledSequence {
                id: id(0),
                token_ids: vec![0; num_tokens],
                start: 0,
                block_tables: Vec::new(),
                drawn_idx: None,
                sample: (0..num_choices).map(id).collect(),
                prompt_logprobs: false,
                num_padding: 0,
            }
        };
        StepPlan { sequences: sequences.iter().map(sequence).collect(), ..StepPlan::default() }
    }

    #[track_caller]
    fn check(sequences: &[(usize, u32)], expected: OutputRows<'_>) {
        let plan = plan(sequences);
        let mut wanted = WantedRows::default();
        // Whatever it held.
        wanted.choose(&self::plan(&[(9, 1), (9, 1)]), 18);
        wanted.choose(&plan, plan.num_tokens());
        assert_eq!(wanted.output(), expected, "{sequences:?}");
    }

    #[test]
    fn a_prompt_leaves_out_all_but_last_rows() {
        check(&[(9, 1)], OutputRows::LastOf(&[0]));
        check(&[(1, 1), (9, 0), (5, 3)], OutputRows::LastOf(&[0, 2]));
        check(&[(2, 0)], OutputRows::LastOf(&[]));
        check(&[(2, 1)], OutputRows::LastOf(&[0]));
    }

    #[test]
    fn a_step_that_wants_most_rows_gets_all() {
        check(&[(1, 1), (1, 1)], OutputRows::All);
        check(&[(1, 0)], OutputRows::All);
        check(&[(2, 1), (1, 1)], OutputRows::All);
        check(&[], OutputRows::All);
    }

    #[test]
    fn logprobs_of_a_prompt_want_all_rows() {
        let mut plan = plan(&[(9, 1), (9, 0)]);
        plan.sequences[1].prompt_logprobs = true;
        let mut wanted = WantedRows::default();
        wanted.choose(&plan, 18);
        assert_eq!(wanted.output(), OutputRows::All);
    }
}
