//! What crosses the door: a request going in, events coming out. Plain data, and the record that the
//! engine keeps of each live request in between.

use crate::SamplingParams;
use pagemill_scheduler::{Event, FinishReason, TokenLogprobs};
use std::sync::Arc;

/// A validated request. The engine gives it its [`crate::RequestId`].
pub struct Request {
    /// Prompt token ids, each `< vocab_size`, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens for each choice; prompt + max_tokens ≤ max_seq_len. 0: compute the prompt only.
    pub max_tokens: usize,
    /// Choices.
    pub n: u32,
    /// How tokens are chosen; `stop_token_ids` in it also end a sequence.
    pub sampling: SamplingParams,
    /// Higher runs first; 0 is the default.
    pub priority: i32,
    /// Separates prefix caches.
    pub cache_salt: Option<Vec<u8>>,
    /// Where events go. Called on a thread of the engine's: must not block.
    pub sink: Box<dyn EventSink>,
}

/// Tokens of a request, for the answer's `usage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Of these, found in the prefix cache by the first prefill.
    pub cached_tokens: usize,
    /// Generated tokens of this choice, the end token included.
    pub completion_tokens: usize,
}

/// What happens to a request.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the fields are what the variant names
pub enum EngineEvent {
    /// A token was generated.
    Token {
        /// Of which choice.
        choice: u32,
        /// Its id.
        token: u32,
        /// When the request asked for them.
        logprobs: Option<TokenLogprobs>,
    },
    /// Log-probabilities of prompt tokens; the one at position 0 has none.
    PromptLogprobs {
        /// Position of the first.
        start: usize,
        /// One for each position from `start` on.
        logprobs: Vec<TokenLogprobs>,
    },
    /// A choice ended; nothing more comes for it.
    Finished {
        /// Which choice.
        choice: u32,
        /// Why.
        reason: FinishReason,
        /// What it cost.
        usage: Usage,
    },
    /// The whole request ended because of us (engine failure, shutdown): nothing more comes.
    Failed {
        /// Why, in words.
        message: String,
    },
}

/// The receiver is gone, or too slow: the engine aborts the request and frees its blocks at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SinkClosed;

/// Where a request's events go. Implementations buffer within a bound and never block.
pub trait EventSink: Send {
    /// Hands over one event.
    ///
    /// # Errors
    /// [`SinkClosed`] when nobody listens any more or the buffer is full.
    fn send(&mut self, event: EngineEvent) -> Result<(), SinkClosed>;

    /// Asked once a step: whether the listener is gone although nothing was sent.
    fn is_closed(&self) -> bool;

    /// Told before a request's first token: prompt tokens that the prefix cache held. Only `Finished`
    /// tells it otherwise, and a choice that [`crate::EngineHandle::finish_sequence`] ends has none.
    fn prompt_computed(&mut self, cached_tokens: usize) {
        let _ = cached_tokens;
    }
}

/// What the engine keeps of a live request.
pub(crate) struct LiveRequest {
    /// Prompt token ids.
    pub(crate) prompt: Arc<[u32]>,
    /// How its tokens are chosen.
    pub(crate) sampling: Arc<SamplingParams>,
    /// Whether a plan has named it, so that the executor knows it.
    pub(crate) started: bool,
    /// Choices that have not ended.
    num_live: u32,
    /// Whether any choice has a token.
    has_tokens: bool,
    /// Here, since most requests have no other.
    first: Choice,
    others: Vec<Choice>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Choice {
    num_tokens: usize,
    ended: bool,
}

impl LiveRequest {
    /// A request that waits for `n` choices, at least one.
    pub(crate) fn new(prompt: Arc<[u32]>, sampling: Arc<SamplingParams>, n: u32) -> Self {
        Self {
            prompt,
            sampling,
            started: false,
            num_live: n,
            has_tokens: false,
            first: Choice::default(),
            others: vec![Choice::default(); (n as usize).saturating_sub(1)],
        }
    }

    /// Whether a choice has not ended.
    pub(crate) fn is_live(&self) -> bool {
        self.num_live > 0
    }

    /// Whether any choice has a token.
    pub(crate) fn has_tokens(&self) -> bool {
        self.has_tokens
    }

    fn choice_mut(&mut self, choice: u32) -> Option<&mut Choice> {
        match choice.checked_sub(1) {
            None => Some(&mut self.first),
            Some(at) => self.others.get_mut(at as usize),
        }
    }

    /// Marks a choice as ended; false when it already was, or does not exist.
    pub(crate) fn end_choice(&mut self, choice: u32) -> bool {
        let ends = self.choice_mut(choice).is_some_and(|choice| !std::mem::replace(&mut choice.ended, true));
        self.num_live -= u32::from(ends);
        ends
    }

    /// Takes note of an event and puts it in the listener's words.
    pub(crate) fn record(&mut self, event: Event) -> EngineEvent {
        match event {
            Event::Token { id, token, logprobs } => {
                if let Some(choice) = self.choice_mut(id.choice) {
                    choice.num_tokens += 1;
                }
                self.has_tokens = true;
                EngineEvent::Token { choice: id.choice, token, logprobs }
            }
            Event::PromptLogprobs { start, logprobs, .. } => EngineEvent::PromptLogprobs { start, logprobs },
            Event::Finished { id, reason, num_cached_tokens } => {
                self.end_choice(id.choice);
                let completion_tokens = self.choice_mut(id.choice).map_or(0, |choice| choice.num_tokens);
                let usage =
                    Usage { prompt_tokens: self.prompt.len(), cached_tokens: num_cached_tokens, completion_tokens };
                EngineEvent::Finished { choice: id.choice, reason, usage }
            }
        }
    }
}
