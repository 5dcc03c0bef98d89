//! Changes to single logits before sampling: bias, penalties, masks. Each touches only the ids it is
//! about, and all of them can be undone, so that the `n` choices of a request can share one row.
//!
//! Shape letters: `V` vocabulary.

use super::state::SequenceState;
use crate::SamplingParams;

/// Logit of a masked token: below any other, yet finite, so that a row masked as a whole still has a
/// valid (uniform) distribution.
const MASKED: f32 = f32::MIN;

/// The changes made to a row, latest last.
#[derive(Debug, Default)]
pub(crate) struct Edits {
    /// (id, logit before).
    undo: Vec<(u32, f32)>,
}

impl Edits {
    /// Applies everything `params` asks for in this sequence's state to `row` `[V]`; returns whether
    /// any logit was touched. Cost: the ids touched.
    ///
    /// Order: logit_bias; repetition (ids in prompt or output), presence and frequency (ids in the
    /// output); the mask of stop tokens while fewer than `min_tokens` were generated. Results are
    /// clamped to finite values.
    pub(crate) fn apply(&mut self, row: &mut [f32], params: &SamplingParams, state: &SequenceState) -> bool {
        self.undo.clear();
        for &(id, bias) in &params.logit_bias {
            self.edit(row, id, |logit| logit + bias);
        }
        if params.repetition_penalty != 1.0 {
            let penalty = params.repetition_penalty;
            let penalise = |logit: f32| if logit < 0.0 { logit * penalty } else { logit / penalty };
            for &id in state.prompt_ids() {
                self.edit(row, id, penalise);
            }
            for &(id, _) in state.output_counts() {
                if state.prompt_ids().binary_search(&id).is_err() {
                    self.edit(row, id, penalise);
                }
            }
        }
        if params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 {
            for &(id, count) in state.output_counts() {
                // Counts stay far below 2^24, where f32 is exact.
                let penalty = params.presence_penalty + params.frequency_penalty * count as f32;
                self.edit(row, id, |logit| logit - penalty);
            }
        }
        if state.output_len() < params.min_tokens {
            for &id in &params.stop_token_ids {
                self.edit(row, id, |_| MASKED);
            }
        }
        !self.undo.is_empty()
    }

    /// Puts every logit back as it was.
    pub(crate) fn undo(&mut self, row: &mut [f32]) {
        while let Some((id, logit)) = self.undo.pop() {
            if let Some(slot) = row.get_mut(id as usize) {
                *slot = logit;
            }
        }
    }

    /// Ids beyond the row are the validator's business; here they are no-ops rather than a panic.
    fn edit(&mut self, row: &mut [f32], id: u32, change: impl Fn(f32) -> f32) {
        if let Some(logit) = row.get_mut(id as usize) {
            self.undo.push((id, *logit));
            // Not `clamp`, which would let a NaN through.
            #[allow(clippy::manual_clamp)]
            let changed = change(*logit).max(f32::MIN).min(f32::MAX);
            *logit = changed;
        }
    }
}
