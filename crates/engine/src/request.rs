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
    /// Where events go. Called on the engine's thread: must not block.
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
    /// Where its events go.
    pub(crate) sink: Box<dyn EventSink>,
    /// Whether a plan has named it, so that the executor knows it.
    pub(crate) started: bool,
    choices: Vec<Choice>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Choice {
    num_tokens: usize,
    ended: bool,
}

impl LiveRequest {
    /// A request that waits.
    pub(crate) fn new(prompt: Arc<[u32]>, sampling: Arc<SamplingParams>, n: u32, sink: Box<dyn EventSink>) -> Self {
        Self { prompt, sampling, sink, started: false, choices: vec![Choice::default(); n as usize] }
    }

    /// Whether a choice has not ended.
    pub(crate) fn is_live(&self) -> bool {
        self.choices.iter().any(|choice| !choice.ended)
    }

    /// Whether any choice has a token.
    pub(crate) fn has_tokens(&self) -> bool {
        self.choices.iter().any(|choice| choice.num_tokens > 0)
    }

    /// Marks a choice as ended; false when it already was, or does not exist.
    pub(crate) fn end_choice(&mut self, choice: u32) -> bool {
        self.choices.get_mut(choice as usize).is_some_and(|choice| !std::mem::replace(&mut choice.ended, true))
    }

    /// Takes note of an event and puts it in the listener's words.
    pub(crate) fn record(&mut self, event: Event) -> EngineEvent {
        match event {
            Event::Token { id, token, logprobs } => {
                if let Some(choice) = self.choices.get_mut(id.choice as usize) {
                    choice.num_tokens += 1;
                }
                EngineEvent::Token { choice: id.choice, token, logprobs }
            }
            Event::PromptLogprobs { start, logprobs, .. } => EngineEvent::PromptLogprobs { start, logprobs },
            Event::Finished { id, reason, num_cached_tokens } => {
                self.end_choice(id.choice);
                let completion_tokens = self.choices.get(id.choice as usize).map_or(0, |choice| choice.num_tokens);
                let usage =
                    Usage { prompt_tokens: self.prompt.len(), cached_tokens: num_cached_tokens, completion_tokens };
                EngineEvent::Finished { choice: id.choice, reason, usage }
            }
        }
    }
}
