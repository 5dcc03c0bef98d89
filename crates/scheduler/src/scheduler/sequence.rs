//! What the scheduler knows about one sequence, and when a sequence ends. Does not know its blocks.

use std::sync::Arc;

use super::waiting::Rank;
use crate::{BlockHashChain, FinishReason, RequestSpec, SampledToken, SequenceId};

/// A live sequence: waiting, running, or ended with steps still in flight.
///
/// ```text
/// [0 ......... num_applied ......... num_computed ......... tokens.len())
///   done                 in flight                still to schedule
/// ```
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) rank: Rank,
    /// The request, without its prompt (which is the head of `tokens`).
    pub(super) spec: Arc<RequestSpec>,
    pub(super) prompt_len: usize,
    /// Prompt and generated tokens.
    pub(super) tokens: Vec<u32>,
    /// Tokens that are in the cache once every step in flight is done.
    pub(super) num_computed: usize,
    /// Tokens that are in the cache now.
    pub(super) num_applied: usize,
    /// Steps in flight that hold it.
    pub(super) num_in_flight: usize,
    /// Ended while a step in flight held it: gives its blocks back when that step is applied.
    pub(super) ended: bool,
    pub(super) chain: BlockHashChain,
    /// Tokens that the first prefill found in the prefix cache.
    pub(super) num_cached_tokens: Option<usize>,
    /// First prompt position whose log-probabilities have not been reported.
    pub(super) logprobs_from: usize,
    /// Choices that do not exist yet: they part from this sequence when its prompt is computed.
    pub(super) num_unforked: u32,
    /// Choices of this request that may run at once (a static batch grants them when it is formed).
    pub(super) num_granted: u32,
}

impl Sequence {
    /// The first choice of a new request.
    pub(super) fn first_choice(mut spec: RequestSpec, ageing_us: u64) -> Self {
        let id = SequenceId { request: spec.id, choice: 0 };
        let tokens = std::mem::take(&mut spec.prompt);
        Self {
            id,
            rank: Rank::of(&spec, id, ageing_us),
            prompt_len: tokens.len(),
            tokens,
            num_computed: 0,
            num_applied: 0,
            num_in_flight: 0,
            ended: false,
            chain: BlockHashChain::with_salt(spec.cache_salt.as_deref()),
            num_cached_tokens: None,
            logprobs_from: if spec.prompt_logprobs { 1 } else { usize::MAX },
            num_unforked: spec.n - 1,
            num_granted: u32::MAX,
            spec: Arc::new(spec),
        }
    }

    /// Another choice of the same request, parting after the prompt. Holds nothing yet.
    pub(super) fn sibling(&self, id: SequenceId, ageing_us: u64) -> Self {
        Self {
            id,
            rank: Rank::of(&self.spec, id, ageing_us),
            spec: Arc::clone(&self.spec),
            prompt_len: self.prompt_len,
            tokens: self.tokens[..self.prompt_len].to_vec(),
            num_computed: 0,
            num_applied: 0,
            num_in_flight: 0,
            ended: false,
            chain: self.chain.clone(),
            num_cached_tokens: self.num_cached_tokens,
            logprobs_from: usize::MAX,
            num_unforked: 0,
            num_granted: u32::MAX,
        }
    }

    /// Tokens known and not yet scheduled.
    pub(super) fn num_remaining(&self) -> usize {
        self.tokens.len() - self.num_computed
    }

    /// Its prompt is computed and exactly its newest token is not.
    pub(super) fn is_decode(&self) -> bool {
        self.num_remaining() == 1 && self.num_computed >= self.prompt_len
    }

    /// Whether a step that computes up to `end` must say something about prompt positions not yet
    /// reported: position `p` is read from the logits of `p - 1`.
    pub(super) fn wants_prompt_logprobs(&self, end: usize) -> bool {
        self.logprobs_from < self.prompt_len && self.logprobs_from <= end
    }

    /// Whether the prefix cache may serve it: not while its prompt's logits are still wanted.
    pub(super) fn may_read_prefixes(&self) -> bool {
        self.logprobs_from >= self.prompt_len
    }

    /// Choices whose next token comes from the logits at `end - 1`.
    pub(super) fn choices_sampled_at(&self, end: usize) -> Vec<SequenceId> {
        if end < self.tokens.len() || self.spec.max_tokens == 0 {
            return Vec::new();
        }
        let request = self.id.request;
        let siblings = (1..=self.num_unforked).map(|choice| SequenceId { request, choice });
        std::iter::once(self.id).chain(siblings).collect()
    }

    /// Takes a sampled token; the reason, if it is the last one.
    pub(super) fn accept(&mut self, sampled: &SampledToken, max_seq_len: usize) -> Option<FinishReason> {
        let token = match &sampled.token {
            Ok(token) => *token,
            Err(reason) => return Some(FinishReason::Failed(reason.clone())),
        };
        self.tokens.push(token);
        let num_generated = self.tokens.len() - self.prompt_len;
        if num_generated >= self.spec.min_tokens && self.spec.stop_token_ids.binary_search(&token).is_ok() {
            return Some(FinishReason::Stop(token));
        }
        let full = num_generated >= self.spec.max_tokens || self.tokens.len() >= max_seq_len;
        full.then_some(FinishReason::Length)
    }

    /// Forgets what was computed; the tokens stay.
    pub(super) fn reset_computed(&mut self) {
        assert!(self.num_in_flight == 0, "{:?} was preempted with a step in flight", self.id);
        self.num_computed = 0;
        self.num_applied = 0;
    }
}
