//! Log-probabilities that are reported: those of the model's own distribution (raw logits, before
//! bias, penalties and temperature). All finite: what is impossible gets [`IMPOSSIBLE`].
//!
//! Shape letters: `V` vocabulary.

use super::select::{Candidate, best_first, top_k_cut};
use super::softmax::log_sum_exp;
use pagemill_scheduler::TokenLogprobs;

/// The value that the OpenAI API gives to tokens that are not among the likely ones; a floor here.
const IMPOSSIBLE: f32 = -9999.0;

/// What a row says about all its tokens, made once a row.
#[derive(Debug)]
pub(crate) struct RowLogprobs {
    log_sum: f64,
    top: Vec<Candidate>,
}

impl RowLogprobs {
    /// Reads `row` `[V]`, whose largest logit is `max`, for the `num_top` likeliest tokens. Two passes.
    pub(crate) fn new(row: &[f32], max: f32, num_top: u32, scratch: &mut Vec<Candidate>) -> Self {
        let log_sum = log_sum_exp(row, max);
        let num_top = (num_top as usize).min(row.len());
        let mut top = Vec::with_capacity(num_top);
        if num_top > 0 {
            let cut = top_k_cut(row, num_top, scratch);
            top.extend(
                (0u32..)
                    .zip(row)
                    .filter(|&(id, &logit)| cut.keeps(logit, id))
                    .map(|(id, &logit)| Candidate { logit, id }),
            );
            top.sort_unstable_by(best_first);
        }
        Self { log_sum, top }
    }

    /// The entry of `token`. One pass for its rank.
    pub(crate) fn of(&self, row: &[f32], token: u32) -> TokenLogprobs {
        let logit = row.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let at = Candidate { logit, id: token };
        let better = (0u32..).zip(row).filter(|&(id, &x)| x > at.logit || (x == at.logit && id < at.id)).count();
        TokenLogprobs {
            logprob: logprob(logit, self.log_sum),
            rank: u32::try_from(better + 1).unwrap_or(u32::MAX),
            top: self.top.iter().map(|c| (c.id, logprob(c.logit, self.log_sum))).collect(),
        }
    }
}

/// The log-probability of a logit, given `ln Σ exp` of its row.
#[allow(clippy::cast_possible_truncation)] // f64 to f32 rounds
pub(crate) fn logprob(logit: f32, log_sum: f64) -> f32 {
    let logprob = (f64::from(logit) - log_sum) as f32;
    // Never NaN: `log_sum` is finite. A probability cannot exceed 1, whatever rounding says.
    logprob.clamp(IMPOSSIBLE, 0.0)
}

/// What stands for a row without a distribution (NaN logits).
pub(crate) fn unknown() -> TokenLogprobs {
    TokenLogprobs { logprob: IMPOSSIBLE, rank: u32::MAX, top: Vec::new() }
}
