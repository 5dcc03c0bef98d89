//! What the scheduler knows about one sequence, and when a sequence ends. Does not know its blocks.

use std::num::NonZeroU64;
use std::sync::Arc;

use super::sequences::SequenceRef;
use super::waiting::Rank;
use crate::kv_cache::{TableRef, TableSlot};
use crate::{BlockHashChain, FinishReason, RequestSpec, SequenceId};

/// A token that a plan in flight draws.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draw {
    /// The plan.
    pub(super) step: NonZeroU64,
    /// The token's place among those that the plan draws.
    pub(super) idx: u32,
}

/// A live sequence: waiting, running, or ended with steps still in flight.
///
/// ```text
/// [0 ......... num_applied ......... num_computed ......... tokens.len())
///   done                 in flight                still to schedule
/// ```
///
/// Planned ahead, `num_computed` is one more than `tokens.len()`: the plan in flight before draws that token.
///
/// In this order, so that what every step reads and writes of a decode lies in the first 128 bytes: with hundreds of
/// sequences a step's cost is the memory that it fetches.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    /// Prompt and generated tokens.
    pub(super) tokens: Vec<u32>,
    /// Tokens that are in the cache once every step in flight is done.
    pub(super) num_computed: usize,
    /// Tokens that are in the cache now.
    pub(super) num_applied: usize,
    /// Where its next token comes from while a plan in flight draws it; under `plan_ahead` only.
    pub(super) draw: Option<Draw>,
    pub(super) prompt_len: usize,
    /// Tokens with which it ends, if nothing ends it before: prompt and `max_tokens`.
    len_limit: usize,
    /// Tokens from which on a stop token ends it.
    stops_from: usize,
    /// The first step whose plan showed its tables as they are but for entries behind; plans may say so before the step
    /// is made.
    pub(super) tables_since: u64,
    /// Where its block tables are, while it holds any.
    table: Option<TableSlot>,
    /// Bit `token % 32` of each stop token, so that most tokens need no further look.
    stop_bits: u32,
    /// Choices that do not exist yet: they part from this sequence when its prompt is computed.
    pub(super) num_unforked: u32,
    /// Steps in flight that hold it.
    pub(super) num_in_flight: u32,
    /// Ended while a step in flight held it: gives its blocks back when that step is applied.
    pub(super) ended: bool,
    pub(super) rank: Rank,
    pub(super) chain: BlockHashChain,
    /// The request, without its prompt (which is the head of `tokens`).
    pub(super) spec: Arc<RequestSpec>,
    /// First prompt position whose log-probabilities have not been reported.
    pub(super) logprobs_from: usize,
    /// Tokens that the first prefill found in the prefix cache.
    num_cached_tokens: Option<u32>,
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
            len_limit: tokens.len().saturating_add(spec.max_tokens),
            stops_from: tokens.len().saturating_add(spec.min_tokens),
            stop_bits: spec.stop_token_ids.iter().fold(0, |bits, &token| bits | stop_bit(token)),
            tokens,
            num_computed: 0,
            num_applied: 0,
            num_in_flight: 0,
            draw: None,
            tables_since: 0,
            table: None,
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
            len_limit: self.len_limit,
            stops_from: self.stops_from,
            stop_bits: self.stop_bits,
            tokens: self.tokens[..self.prompt_len].to_vec(),
            num_computed: 0,
            num_applied: 0,
            num_in_flight: 0,
            draw: None,
            tables_since: 0,
            table: None,
            ended: false,
            chain: self.chain.clone(),
            num_cached_tokens: self.num_cached_tokens,
            logprobs_from: usize::MAX,
            num_unforked: 0,
            num_granted: u32::MAX,
        }
    }

    /// Tokens that the first prefill found in the prefix cache; `None` before it.
    pub(super) fn num_cached_tokens(&self) -> Option<usize> {
        self.num_cached_tokens.map(|num_tokens| num_tokens as usize)
    }

    /// Where it is among the live sequences.
    pub(super) fn place(&self) -> SequenceRef {
        self.rank.place()
    }

    /// It has begun to hold blocks, `num_tokens` of its tokens in them; the next plan is that of `step`.
    pub(super) fn begin(&mut self, table: TableRef, num_tokens: usize, step: u64) {
        self.table = Some(table.slot());
        self.num_computed = num_tokens;
        self.num_applied = num_tokens;
        self.num_cached_tokens.get_or_insert(u32::try_from(num_tokens).unwrap_or(u32::MAX));
        self.tables_since = step;
    }

    /// Where its block tables are.
    ///
    /// # Panics
    /// While it holds none.
    pub(super) fn table(&self) -> TableRef {
        let Some(slot) = self.table else { panic!("{:?} holds no blocks", self.id) };
        TableRef::new(self.id, slot)
    }

    /// Tokens that can be scheduled: known ones, or one that a plan in flight draws.
    pub(super) fn num_remaining(&self) -> usize {
        let awaited = self.draw.is_some() && self.num_computed == self.tokens.len() && self.goes_on();
        self.tokens.len().saturating_sub(self.num_computed) + usize::from(awaited)
    }

    /// Whether it goes on by itself after the token that a plan in flight draws, for all that is known without
    /// the token.
    fn goes_on(&self) -> bool {
        self.num_unforked == 0 && !self.is_last_token(self.tokens.len() + 1)
    }

    /// Whether it ends with the token that a plan in flight draws, whatever that is.
    pub(super) fn is_leaving(&self) -> bool {
        self.draw.is_some() && self.num_unforked == 0 && self.is_last_token(self.tokens.len() + 1)
    }

    /// Whether `max_tokens` are generated with `num_tokens` in all. That `max_seq_len` has room for them was asked
    /// when the request came.
    fn is_last_token(&self, num_tokens: usize) -> bool {
        num_tokens >= self.len_limit
    }

    /// Whether it generates nothing: its prompt is all that is wanted.
    pub(super) fn is_prompt_only(&self) -> bool {
        self.len_limit == self.prompt_len
    }

    /// Tokens `[num_computed, end)` into `tokens`, with 0 for one that is not known yet.
    pub(super) fn write_tokens_until(&self, end: usize, tokens: &mut Vec<u32>) {
        let known = self.num_computed.min(self.tokens.len())..end.min(self.tokens.len());
        tokens.clear();
        tokens.extend_from_slice(&self.tokens[known]);
        tokens.resize(end - self.num_computed, 0);
    }

    /// Where the last token before `end` is not known yet: its place among those that the plan in flight draws.
    pub(super) fn awaited_at(&self, end: usize) -> Option<u32> {
        self.draw.filter(|_| end > self.tokens.len()).map(|draw| draw.idx)
    }

    /// Its prompt is computed and exactly its newest token is not.
    pub(super) fn is_decode(&self) -> bool {
        self.num_remaining() == 1 && self.num_computed >= self.prompt_len
    }

    /// Whether a step that computes up to `end` must say something about prompt positions not yet
    /// reported: position `p` is read from the logits of `p - 1`.
    pub(super) fn wants_prompt_logprobs(&self, end: usize) -> bool {
        self.num_computed < self.prompt_len && self.logprobs_from < self.prompt_len && self.logprobs_from <= end
    }

    /// Whether the prefix cache may serve it: not while its prompt's logits are still wanted.
    pub(super) fn may_read_prefixes(&self) -> bool {
        self.logprobs_from >= self.prompt_len
    }

    /// Number of choices whose next token comes from the logits at `end - 1`.
    pub(super) fn num_sampled_at(&self, end: usize) -> usize {
        if end < self.tokens.len() || self.is_prompt_only() { 0 } else { 1 + self.num_unforked as usize }
    }

    /// Those choices, into `choices`.
    pub(super) fn write_choices_sampled_at(&self, end: usize, choices: &mut Vec<SequenceId>) {
        choices.clear();
        if self.num_sampled_at(end) == 0 {
            return;
        }
        let request = self.id.request;
        choices.push(self.id);
        choices.extend((1..=self.num_unforked).map(|choice| SequenceId { request, choice }));
    }

    /// Takes a sampled token; the reason, if it is the last one.
    pub(super) fn accept(&mut self, token: u32, max_seq_len: usize) -> Option<FinishReason> {
        self.tokens.push(token);
        let len = self.tokens.len();
        let may_stop = self.stop_bits & stop_bit(token) != 0 && len >= self.stops_from;
        if may_stop && self.spec.stop_token_ids.binary_search(&token).is_ok() {
            return Some(FinishReason::Stop(token));
        }
        (self.is_last_token(len) || len >= max_seq_len).then_some(FinishReason::Length)
    }

    /// Forgets what was computed, and where; the tokens stay.
    pub(super) fn reset_computed(&mut self) {
        assert!(self.num_in_flight == 0, "{:?} was preempted with a step in flight", self.id);
        self.table = None;
        self.num_computed = 0;
        self.num_applied = 0;
    }
}

/// A token's bit in [`Sequence::stop_bits`].
fn stop_bit(token: u32) -> u32 {
    1 << (token % 32)
}
