//! The sampler: from one row of raw logits to a token, its log-probabilities, or the reason why there
//! is none. Knows requests' parameters and pasts; does not know plans, blocks or devices.
//!
//! A row's result depends on the row, the request's parameters and the sequence's own past only: rows
//! may be sampled in any order and on any thread. Read `edits` (bias, penalties, masks) → `select`
//! (top_k, top_p, min_p without sorting the vocabulary) → `draw` (the random number) → `logprobs`; and `tasks`, for
//! devices that sample themselves.
//!
//! Shape letters: `V` vocabulary.

mod draw;
mod edits;
mod logprobs;
mod select;
mod softmax;
mod state;
mod tasks;
#[cfg(test)]
mod tests;

pub(crate) use state::{RequestState, RequestTable};
pub(crate) use tasks::{choice_task, drawn, prompt_logprobs, prompt_task};

use crate::SamplingParams;
use edits::Edits;
use logprobs::RowLogprobs;
use pagemill_scheduler::TokenLogprobs;
use select::{Candidate, Kept, NO_CUT, Softmax, top_k_cut, top_p_cut};
use softmax::row_max;

/// Why a sequence whose row holds a NaN cannot go on.
const NAN_LOGITS: &str = "the model produced NaN logits";

/// Temperatures below this are greedy: the division would only overflow.
const GREEDY_BELOW: f32 = 1e-5;

/// Buffers of one thread, reused from row to row.
#[derive(Debug, Default)]
pub(crate) struct RowScratch {
    edits: Edits,
    candidates: Vec<Candidate>,
}

impl RowScratch {
    /// Room for a whole vocabulary: the pages are only touched if a flat distribution needs them.
    pub(crate) fn with_vocab(vocab_size: usize) -> Self {
        Self { edits: Edits::default(), candidates: Vec::with_capacity(vocab_size) }
    }
}

/// What one choice draws from a row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Drawn {
    /// The token, or why the sequence cannot go on.
    pub(crate) token: Result<u32, String>,
    /// When the request asked for them.
    pub(crate) logprobs: Option<TokenLogprobs>,
}

fn is_greedy(params: &SamplingParams) -> bool {
    params.temperature.is_nan() || params.temperature < GREEDY_BELOW
}

/// Samples the next token of every choice in `choices` from one `row` `[V]`, which is raw again
/// afterwards. Cost: one pass for greedy, two to five with sampling filters, three more with
/// log-probabilities; penalties cost the ids they touch.
pub(crate) fn sample_row(
    row: &mut [f32],
    request: &RequestState,
    choices: impl Iterator<Item = u32>,
    scratch: &mut RowScratch,
) -> Vec<Drawn> {
    let params = request.params.as_ref();
    let Ok(max) = row_max(row) else {
        let token = Err(NAN_LOGITS.to_owned());
        return choices.map(|_| Drawn { token: token.clone(), logprobs: None }).collect();
    };
    let reported = params.logprobs.map(|num_top| RowLogprobs::new(row, max, num_top, &mut scratch.candidates));
    choices
        .map(|choice| {
            let state = request.choice(choice);
            let edited = scratch.edits.apply(row, params, state);
            // Edited logits are finite, so an edited row always has a largest one.
            let max = if edited { row_max(row).unwrap_or(max) } else { max };
            let token = choose(row, max, params, choice, state.output_len(), &mut scratch.candidates);
            scratch.edits.undo(row);
            Drawn { token: Ok(token), logprobs: reported.as_ref().map(|reported| reported.of(row, token)) }
        })
        .collect()
}

/// Chooses from a row whose edits are made and whose largest logit is `max`.
fn choose(
    row: &[f32],
    max: f32,
    params: &SamplingParams,
    choice: u32,
    position: usize,
    candidates: &mut Vec<Candidate>,
) -> u32 {
    if is_greedy(params) {
        let first = row.iter().position(|&logit| logit == max).unwrap_or(0);
        return u32::try_from(first).unwrap_or(u32::MAX);
    }
    let softmax = Softmax { max, inv_t: 1.0 / params.temperature };
    let mut cut = params.top_k.map_or(NO_CUT, |k| top_k_cut(row, k as usize, candidates));
    if params.top_p < 1.0 {
        cut = top_p_cut(row, cut, params.top_p, softmax, candidates);
    }
    let kept = Kept { cut, min_weight: params.min_p, softmax };
    kept.draw(row, draw::uniform(params.seed, choice, position))
}

/// Log-probabilities of a prompt token from the row `[V]` before it.
pub(crate) fn prompt_row(row: &[f32], token: u32, num_top: u32, scratch: &mut RowScratch) -> TokenLogprobs {
    match row_max(row) {
        Ok(max) => RowLogprobs::new(row, max, num_top, &mut scratch.candidates).of(row, token),
        Err(_) => logprobs::unknown(),
    }
}
