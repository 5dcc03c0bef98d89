//! Event sinks for callers in this process: a bounded channel, and everything a request said gathered
//! into one value. The server brings its own sinks.

use crate::{EngineEvent, EventSink, SinkClosed, Usage};
pub use crossbeam_channel::RecvTimeoutError;
use crossbeam_channel::{Receiver, Sender, bounded};
use pagemill_scheduler::{FinishReason, TokenLogprobs};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Sends a request's events into a bounded channel. Full or abandoned, it closes.
pub struct ChannelSink {
    sender: Sender<EngineEvent>,
    receiver_alive: Weak<()>,
}

/// The other end of a [`ChannelSink`]. Dropping it aborts the request within one step.
pub struct EventReceiver {
    receiver: Receiver<EngineEvent>,
    _alive: Arc<()>,
}

impl ChannelSink {
    /// A channel that holds `capacity` events (at least 1) that nobody has read yet.
    #[must_use]
    pub fn new(capacity: usize) -> (Self, EventReceiver) {
        let (sender, receiver) = bounded(capacity.max(1));
        let alive = Arc::new(());
        let sink = Self { sender, receiver_alive: Arc::downgrade(&alive) };
        (sink, EventReceiver { receiver, _alive: alive })
    }
}

impl EventSink for ChannelSink {
    fn send(&mut self, event: EngineEvent) -> Result<(), SinkClosed> {
        self.sender.try_send(event).map_err(|_| SinkClosed)
    }

    fn is_closed(&self) -> bool {
        self.receiver_alive.strong_count() == 0
    }
}

impl EventReceiver {
    /// The next event; waits for it. `None`: the request is over, nothing more comes.
    #[must_use]
    pub fn recv(&self) -> Option<EngineEvent> {
        self.receiver.recv().ok()
    }

    /// The next event; waits for it no longer than `timeout`.
    ///
    /// # Errors
    /// None came in time, or the request is over.
    pub fn recv_timeout(&self, timeout: Duration) -> Result<EngineEvent, RecvTimeoutError> {
        self.receiver.recv_timeout(timeout)
    }

    /// The next event if one is there.
    #[must_use]
    pub fn try_recv(&self) -> Option<EngineEvent> {
        self.receiver.try_recv().ok()
    }

    /// Waits for the end of a request with `n` choices and gathers what it said.
    ///
    /// # Errors
    /// The engine's message when the whole request failed, or that it was aborted.
    pub fn gather(&self, n: u32) -> Result<Generation, String> {
        let mut generation = Generation { choices: vec![Completion::default(); n as usize], ..Generation::default() };
        let mut live = n;
        while live > 0 {
            match self.recv() {
                Some(EngineEvent::Token { choice, token, logprobs }) => {
                    if let Some(choice) = generation.choices.get_mut(choice as usize) {
                        choice.tokens.push(token);
                        choice.logprobs.extend(logprobs);
                    }
                }
                Some(EngineEvent::PromptLogprobs { logprobs, .. }) => generation.prompt_logprobs.extend(logprobs),
                Some(EngineEvent::Finished { choice, reason, usage }) => {
                    if let Some(choice) = generation.choices.get_mut(choice as usize) {
                        choice.finish = Some((reason, usage));
                    }
                    live -= 1;
                }
                Some(EngineEvent::Failed { message }) => return Err(message),
                None => return Err("the request was aborted".into()),
            }
        }
        Ok(generation)
    }
}

/// Everything a request said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// One for each choice.
    pub choices: Vec<Completion>,
    /// Of the prompt's tokens from position 1 on, when asked for.
    pub prompt_logprobs: Vec<TokenLogprobs>,
}

/// One choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    /// Its tokens, the end token included.
    pub tokens: Vec<u32>,
    /// One for each token, when asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Why it ended and what it cost; always there once a generation is complete.
    pub finish: Option<(FinishReason, Usage)>,
}
