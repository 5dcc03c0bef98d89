//! What a request is to the scheduler: ids, limits and priorities. Sampling parameters live in the
//! engine; text lives in the server.

/// A point in time in microseconds since the engine started. Only differences matter here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

/// Identity of a request, given by the engine, never reused, never taken from a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// One of the `n` choices of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    /// The request.
    pub request: RequestId,
    /// `0..n`.
    pub choice: u32,
}

/// A validated request as the scheduler sees it.
#[derive(Clone, Debug)]
pub struct RequestSpec {
    /// Its identity.
    pub id: RequestId,
    /// Prompt token ids, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate for each choice. 0: compute the prompt only (echo with log-probabilities).
    pub max_tokens: usize,
    /// Generated tokens before an end token may end the sequence (the sampler masks them until then).
    pub min_tokens: usize,
    /// Tokens that end a sequence with [`crate::FinishReason::Stop`]: the model's end tokens (unless
    /// ignored) and the request's own. Sorted. The token itself is part of the sequence.
    pub stop_token_ids: Vec<u32>,
    /// Choices to generate; they share the prompt's blocks and part on write.
    pub n: u32,
    /// Higher runs first. 0 is the default; negative values are for offline work.
    pub priority: i32,
    /// Mixed into the prefix cache's hashes, so that requests with different salts share nothing.
    pub cache_salt: Option<Vec<u8>>,
    /// Every prompt position's logits are wanted: the prefix cache is not read for this request.
    pub prompt_logprobs: bool,
    /// When it arrived.
    pub arrival: Time,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the variant names
pub enum Refusal {
    /// The caller's fault: it could never run. 400.
    #[error("the request needs {needed} KV blocks of {block_size} tokens; the pool has {available}")]
    NeverFits {
        /// Blocks that one of its choices holds at most.
        needed: usize,
        /// Blocks in the pool.
        available: usize,
        /// Tokens in a block.
        block_size: usize,
    },
    /// The caller's fault: prompt and generation exceed the context. 400.
    #[error("{tokens} tokens exceed the context of {max_seq_len} tokens")]
    TooLong {
        /// Tokens of the prompt and `max_tokens`.
        tokens: usize,
        /// The context.
        max_seq_len: usize,
    },
    /// More choices than a batch holds. 400.
    #[error("n = {n} exceeds the largest batch of {max_batch_size} sequences")]
    TooManyChoices {
        /// Choices asked for.
        n: u32,
        /// Sequences in a batch.
        max_batch_size: usize,
    },
    /// An empty prompt. 400.
    #[error("the prompt holds no tokens")]
    EmptyPrompt,
    /// The queue is full: try later. 429.
    #[error("the waiting queue is full ({limit} requests)")]
    QueueFull {
        /// Its bound.
        limit: usize,
    },
}

/// What became of a submission.
pub type Admission = Result<(), Refusal>;
