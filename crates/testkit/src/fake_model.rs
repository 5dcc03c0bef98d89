//! What the fake executor computes, and the oracle: the same function over a sequence's tokens alone,
//! without blocks, tables or batches. Decides what the right tokens of a request are.
//!
//! The state of a position mixes its token, its number and the states of all positions that it reads,
//! in every cache group: as in a real model, one wrong state spoils every later one. The next token is
//! drawn from all states that the last position reads, its own included.

use crate::draw::mix;
use crate::workload::PlannedRequest;
use pagemill_engine::{FinishReason, SamplingParams};
use pagemill_scheduler::CacheGroup;

/// Token ids are below this.
pub const VOCAB_SIZE: u64 = 32_000;

/// A deterministic stand-in for a model.
#[derive(Clone, Debug)]
pub struct FakeModel {
    /// Its cache groups.
    pub groups: Vec<CacheGroup>,
    /// One token in so many cannot be drawn (as if its logits were NaN); `None`: all can.
    pub fails_one_in: Option<u64>,
}

/// What a request must be told.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// Log-probabilities of prompt positions `1..prompt_len`.
    pub prompt_logprobs: Vec<f32>,
    /// One for each of the `n` choices.
    pub choices: Vec<ExpectedChoice>,
}

/// What one choice must be told.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpectedChoice {
    /// Its tokens, the end token included.
    pub tokens: Vec<u32>,
    /// One for each token.
    pub logprobs: Vec<f32>,
    /// Why it ends.
    pub reason: FinishReason,
}

/// First position that `position` reads in a group.
#[must_use]
pub fn first_read(group: CacheGroup, position: usize) -> usize {
    match group {
        CacheGroup::Full => 0,
        CacheGroup::SlidingWindow { window } => (position + 1).saturating_sub(window),
    }
}

/// The state of a position, given the digest of what it reads before itself.
#[must_use]
pub fn state_of(token: u32, position: usize, read: u64) -> u64 {
    mix(mix(u64::from(token), position as u64), read)
}

/// What a group keeps of a state: groups never mistake one another's blocks for their own.
#[must_use]
pub fn kept_by(group_idx: usize, state: u64) -> u64 {
    mix(state, group_idx as u64 + 1)
}

/// A kept state's share in the sum over one group's positions: sums are quick, and the weight tells
/// positions apart.
#[must_use]
pub fn weighed(position: usize, kept: u64) -> u64 {
    kept.wrapping_mul(2 * position as u64 + 1)
}

/// The digest of one sum for each group.
#[must_use]
pub fn digest(sums: impl IntoIterator<Item = u64>) -> u64 {
    sums.into_iter().fold(0, mix)
}

/// A log-probability drawn from a digest: finite, exactly representable.
#[must_use]
pub fn logprob_of(digest: u64) -> f32 {
    -f32::from(u16::try_from(digest >> 48).unwrap_or(0)) / 4096.0
}

impl FakeModel {
    /// The token drawn from what the last position reads, as the `generated`-th (from 0) of a choice.
    ///
    /// # Errors
    /// Why no token can be drawn.
    pub fn next_token(
        &self,
        visible: u64,
        params: &SamplingParams,
        choice: u32,
        generated: usize,
    ) -> Result<u32, String> {
        let mut drawn = mix(mix(visible, params.seed), u64::from(choice));
        if self.fails_one_in.is_some_and(|n| drawn.is_multiple_of(n)) {
            return Err(format!("token {generated} has no finite logits"));
        }
        loop {
            drawn = mix(drawn, 1);
            let token = u32::try_from(drawn % VOCAB_SIZE).unwrap_or(0);
            if generated >= params.min_tokens || !params.stop_token_ids.contains(&token) {
                return Ok(token);
            }
        }
    }

    /// What a request must be told when it runs to its end.
    #[must_use]
    pub fn expected(&self, request: &PlannedRequest, max_seq_len: usize) -> Expected {
        let mut past = Past::new(self);
        let mut prompt_logprobs = Vec::new();
        for (position, &token) in request.prompt.iter().enumerate() {
            if position > 0 {
                prompt_logprobs.push(logprob_of(past.last_state));
            }
            past.push(token);
        }
        let choices = (0..request.n).map(|choice| past.clone().run(request, choice, max_seq_len)).collect();
        Expected { prompt_logprobs, choices }
    }
}

/// A sequence's states and, for each group, the sum over those that its newest position reads.
#[derive(Clone)]
struct Past<'a> {
    model: &'a FakeModel,
    states: Vec<u64>,
    sums: Vec<u64>,
    last_state: u64,
}

impl<'a> Past<'a> {
    fn new(model: &'a FakeModel) -> Self {
        Self { model, states: Vec::new(), sums: vec![0; model.groups.len()], last_state: 0 }
    }

    fn push(&mut self, token: u32) {
        let position = self.states.len();
        for (group_idx, (&group, sum)) in self.model.groups.iter().zip(&mut self.sums).enumerate() {
            let first = first_read(group, position);
            if position > 0 && first > first_read(group, position - 1) {
                *sum = sum.wrapping_sub(weighed(first - 1, kept_by(group_idx, self.states[first - 1])));
            }
        }
        let state = state_of(token, position, digest(self.sums.iter().copied()));
        for (group_idx, sum) in self.sums.iter_mut().enumerate() {
            *sum = sum.wrapping_add(weighed(position, kept_by(group_idx, state)));
        }
        self.states.push(state);
        self.last_state = state;
    }

    fn run(mut self, request: &PlannedRequest, choice: u32, max_seq_len: usize) -> ExpectedChoice {
        let mut told = ExpectedChoice { tokens: Vec::new(), logprobs: Vec::new(), reason: FinishReason::Length };
        let sampling = &request.sampling;
        while told.tokens.len() < request.max_tokens && self.states.len() < max_seq_len {
            let visible = digest(self.sums.iter().copied());
            let token = match self.model.next_token(visible, sampling, choice, told.tokens.len()) {
                Ok(token) => token,
                Err(why) => {
                    told.reason = FinishReason::Failed(why);
                    break;
                }
            };
            told.tokens.push(token);
            told.logprobs.push(logprob_of(visible));
            if told.tokens.len() >= sampling.min_tokens && sampling.stop_token_ids.contains(&token) {
                told.reason = FinishReason::Stop(token);
                break;
            }
            self.push(token);
        }
        told
    }
}
