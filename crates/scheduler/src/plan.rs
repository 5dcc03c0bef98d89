//! The plain structs that pass between the scheduler and whoever runs its plans.

use crate::{BlockId, SequenceId};

/// Copy one whole block, before anything else in the step (copy on write).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Block read.
    pub src: BlockId,
    /// Block written.
    pub dst: BlockId,
}

/// One sequence's share of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduledSequence {
    /// Whose tokens these are.
    pub id: SequenceId,
    /// The tokens to compute, at least one: positions `[start, start + token_ids.len())`.
    pub token_ids: Vec<u32>,
    /// `Some(i)`: the last of `token_ids` is not known yet and stands as 0. It is token `i` of those that the
    /// plan before this one draws (its [`StepOutput::sampled`]); whoever runs plans fills it in.
    pub drawn_idx: Option<u32>,
    /// Tokens already in the cache before this step (`num_computed_tokens`).
    pub start: usize,
    /// One block table for each cache group. Entry `j` holds positions
    /// `[j * block_size, (j + 1) * block_size)`; [`BlockId::NONE`] where a block behind a sliding
    /// window went back to the pool. Covers at least `start + token_ids.len()` positions.
    pub block_tables: Vec<Vec<BlockId>>,
    /// Choices to sample from the last token's logits: empty while a prompt is unfinished, one for a
    /// decode, all `n` when a prompt has just been computed.
    pub sample: Vec<SequenceId>,
    /// Log-probabilities of the prompt tokens at positions `start + 1 ..= start + len` are wanted
    /// (those that exist).
    pub prompt_logprobs: bool,
    /// Padding slots of a static batch: computed like tokens, counted, never read. Zero under
    /// continuous batching.
    pub num_padding: usize,
}

impl ScheduledSequence {
    /// Nothing of a sequence yet.
    pub(crate) fn empty(id: SequenceId) -> Self {
        Self {
            id,
            token_ids: Vec::new(),
            drawn_idx: None,
            start: 0,
            block_tables: Vec::new(),
            sample: Vec::new(),
            prompt_logprobs: false,
            num_padding: 0,
        }
    }
}

/// What one step computes. Decodes come first, then prompt chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Counts from 1.
    pub step: u64,
    /// Block copies to make first, in order.
    pub block_copies: Vec<BlockCopy>,
    /// Sequences, end to end.
    pub sequences: Vec<ScheduledSequence>,
    /// For each of them the first step since which its block tables have only grown: those of a plan from there on,
    /// the sequence being part of it, are the beginning of this one's. Empty where nothing is known.
    pub tables_since: Vec<u64>,
}

impl StepPlan {
    /// Real tokens in the step (padding not counted).
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.sequences.iter().map(|s| s.token_ids.len()).sum()
    }

    /// Nothing to run.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }
}

/// Log-probabilities at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Natural logarithm of the chosen token's probability, finite.
    pub logprob: f32,
    /// Rank of the chosen token, 1 for the likeliest.
    pub rank: u32,
    /// The likeliest tokens, best first, ties by lower id; finite values only.
    pub top: Vec<(u32, f32)>,
}

/// A token that a step produced.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Which choice it extends.
    pub id: SequenceId,
    /// The token, or the reason why this sequence cannot go on (NaN logits): it alone ends.
    pub token: Result<u32, String>,
    /// When the request asked for them.
    pub logprobs: Option<TokenLogprobs>,
}

/// What running a plan gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// The plan's step.
    pub step: u64,
    /// One for each entry of each `sample`, in the plan's order.
    pub sampled: Vec<SampledToken>,
    /// Prompt log-probabilities: (sequence, position of the first, one entry for each position).
    /// A prompt's first token has none.
    pub prompt_logprobs: Vec<(SequenceId, usize, Vec<TokenLogprobs>)>,
}

/// Why a sequence ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token or one of the request's stop tokens: which.
    Stop(u32),
    /// `max_tokens`, or the context is full.
    Length,
    /// The executor could not go on with this sequence; the text says why.
    Failed(String),
}

/// What happened to a request in a step, in the order it happened.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the fields are what the variant names
pub enum Event {
    /// A token was generated.
    Token {
        /// The choice that it extends.
        id: SequenceId,
        /// The token.
        token: u32,
        /// When the request asked for them.
        logprobs: Option<TokenLogprobs>,
    },
    /// Prompt log-probabilities from position `start` on (never repeated after a preemption).
    PromptLogprobs {
        /// The request's first choice.
        id: SequenceId,
        /// Position of the first entry.
        start: usize,
        /// One entry for each position from `start` on.
        logprobs: Vec<TokenLogprobs>,
    },
    /// The sequence ended; its blocks are free or cached. `num_cached_tokens`: prompt tokens that the
    /// first prefill found in the prefix cache.
    Finished {
        /// The choice that ended.
        id: SequenceId,
        /// Why.
        reason: FinishReason,
        /// Prompt tokens that did not have to be computed; the same for every choice of a request.
        num_cached_tokens: usize,
    },
}
