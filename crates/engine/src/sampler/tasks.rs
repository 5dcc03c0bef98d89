//! Sampling where the logits are: a request's parameters and past as a task for the device, and the device's answer as
//! what a choice draws. Same semantics as sampling on the host; weights are summed as integers there
//! (`pagemill_backend::sampling`), so that a draw within rounding of a boundary may fall on its other side.

use super::draw::uniform;
use super::logprobs::{logprob, unknown};
use super::state::RequestState;
use super::{Drawn, NAN_LOGITS, is_greedy};
use pagemill_backend::sampling::{Choice, Draw, LogitEdits, RowOutcome, RowReport, RowTask};
use pagemill_scheduler::TokenLogprobs;

/// The next token of `choice`, from row `row`. `num_awaited` tokens before it are not in its past yet: parameters that
/// [`crate::SamplingParams::chooses_unaware`] do not ask which.
pub(crate) fn choice_task(row: usize, request: &RequestState, choice: u32, num_awaited: usize) -> RowTask<'_> {
    let (params, state) = (request.params.as_ref(), request.choice(choice));
    let output_len = state.output_len() + num_awaited;
    let how = if is_greedy(params) {
        Choice::Largest
    } else {
        Choice::Draw(Draw {
            inv_temperature: 1.0 / params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            uniform: uniform(params.seed, choice, output_len),
        })
    };
    let masked: &[u32] = if output_len < params.min_tokens { &params.stop_token_ids } else { &[] };
    let edits = LogitEdits {
        bias: &params.logit_bias,
        repetition_penalty: params.repetition_penalty,
        prompt_ids: state.prompt_ids(),
        output_counts: state.output_counts(),
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        masked,
    };
    RowTask { row, choice: how, edits, num_top: params.logprobs }
}

/// What row `row` says of the prompt token that it predicts.
pub(crate) fn prompt_task(row: usize, request: &RequestState, token: u32) -> RowTask<'_> {
    let num_top = Some(request.params.prompt_logprobs.unwrap_or(0));
    RowTask { row, choice: Choice::Given(token), edits: LogitEdits::default(), num_top }
}

/// What a choice gets.
pub(crate) fn drawn(outcome: Option<RowOutcome>) -> Drawn {
    match outcome {
        Some(RowOutcome { token, report }) => Drawn { token: Ok(token), logprobs: report.map(|r| logprobs(&r)) },
        None => Drawn { token: Err(NAN_LOGITS.to_owned()), logprobs: None },
    }
}

/// What a prompt token gets.
pub(crate) fn prompt_logprobs(outcome: Option<RowOutcome>) -> TokenLogprobs {
    outcome.and_then(|outcome| outcome.report).map_or_else(unknown, |report| logprobs(&report))
}

fn logprobs(report: &RowReport) -> TokenLogprobs {
    TokenLogprobs {
        logprob: logprob(report.logit, report.log_sum),
        rank: report.rank,
        top: report.top.iter().map(|&(id, logit)| (id, logprob(logit, report.log_sum))).collect(),
    }
}
