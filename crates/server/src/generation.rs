//! A generation in flight: submits a call's prompts to the engine, receives their events over one bounded
//! queue, and aborts what still runs when it is dropped: by a client that went away, a stop, an error.
//! Knows token ids; neither text nor JSON.

use crate::error::ApiError;
use crate::prompt::PreparedPrompt;
use crate::state::{InFlightGuard, ReadyModel};
use crate::validate::GenerationOptions;
use pagemill_engine::{EngineEvent, EngineHandle, EventSink, Request, RequestId, SequenceId, SinkClosed};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::task::{Context, Poll};
use tokio::sync::{mpsc, oneshot};

/// Events that may wait for a client that reads slowly, and for each choice as many again: past that the
/// engine aborts the request (D38). The queue takes memory only as it fills.
const QUEUE_BASE: usize = 256;

/// An event and the prompt it belongs to.
pub(crate) type PromptEvent = (usize, Heard);

/// What the engine says about a request.
#[derive(Debug, PartialEq)]
pub(crate) enum Heard {
    /// The prompt has been computed; so many of its tokens were cached.
    PromptComputed { cached_tokens: usize },
    /// Anything else.
    Event(EngineEvent),
}

struct ChannelSink {
    prompt_idx: usize,
    sender: mpsc::Sender<PromptEvent>,
}

impl EventSink for ChannelSink {
    fn send(&mut self, event: EngineEvent) -> Result<(), SinkClosed> {
        self.sender.try_send((self.prompt_idx, Heard::Event(event))).map_err(|_| SinkClosed)
    }

    fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    fn prompt_computed(&mut self, cached_tokens: usize) {
        // A full queue ends the request with its next event.
        let _ = self.sender.try_send((self.prompt_idx, Heard::PromptComputed { cached_tokens }));
    }
}

struct LiveRequest {
    id: RequestId,
    /// Choices that have not ended.
    num_running: u32,
}

/// One call's requests.
pub(crate) struct Generation {
    engine: EngineHandle,
    events: mpsc::Receiver<PromptEvent>,
    requests: Vec<LiveRequest>,
    _in_flight: InFlightGuard,
}

impl Generation {
    /// Submits all prompts; returns once the scheduler has taken every one. Dropping the future withdraws them.
    ///
    /// # Errors
    /// The first refusal; nothing stays queued then.
    pub(crate) async fn start(
        model: &ReadyModel,
        prompts: &[PreparedPrompt],
        options: &GenerationOptions,
        in_flight: InFlightGuard,
    ) -> Result<Self, ApiError> {
        let engine = model.served.engine.clone();
        let num_choices = prompts.len().saturating_mul(options.n as usize);
        let (sender, events) = mpsc::channel(QUEUE_BASE.saturating_mul(1 + num_choices).min(1 << 20));
        let mut generation =
            Self { engine, events, requests: Vec::with_capacity(prompts.len()), _in_flight: in_flight };
        let mut replies = Vec::with_capacity(prompts.len());
        for (prompt_idx, prompt) in prompts.iter().enumerate() {
            let (reply, answer) = oneshot::channel();
            let sink = Box::new(ChannelSink { prompt_idx, sender: sender.clone() });
            let request = request(prompt, options, model.served.facts.max_seq_len, sink);
            // A caller that is gone has dropped the queue as well: the engine sees a closed sink.
            generation.engine.submit_with(request, Box::new(move |result| drop(reply.send(result))));
            replies.push(answer);
        }
        drop(sender);
        let mut refusal = None;
        for answer in replies {
            match answer.await {
                Ok(Ok(id)) => generation.requests.push(LiveRequest { id, num_running: options.n }),
                Ok(Err(error)) => refusal = refusal.or(Some(ApiError::from(error))),
                Err(_) => refusal = refusal.or_else(|| Some(stopped())),
            }
        }
        match refusal {
            None => Ok(generation),
            Some(error) => Err(error),
        }
    }

    /// The next event; `None` when the engine let go of every request.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<PromptEvent>> {
        self.events.poll_recv(cx)
    }

    /// As [`Generation::poll_next`].
    pub(crate) async fn next(&mut self) -> Option<PromptEvent> {
        self.events.recv().await
    }

    /// Notes that a choice ended by itself.
    pub(crate) fn choice_ended(&mut self, prompt_idx: usize) {
        if let Some(request) = self.requests.get_mut(prompt_idx) {
            request.num_running = request.num_running.saturating_sub(1);
        }
    }

    /// Ends a choice whose stop string was found.
    pub(crate) fn finish_choice(&mut self, prompt_idx: usize, choice: u32) {
        if let Some(request) = self.requests.get(prompt_idx) {
            self.engine.finish_sequence(SequenceId { request: request.id, choice });
            self.choice_ended(prompt_idx);
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        // Closed first: should an abort be late, the engine still finds nobody listening.
        self.events.close();
        for request in self.requests.iter().filter(|r| r.num_running > 0) {
            self.engine.abort(request.id);
        }
    }
}

fn request(
    prompt: &PreparedPrompt,
    options: &GenerationOptions,
    max_seq_len: usize,
    sink: Box<dyn EventSink>,
) -> Request {
    let room = max_seq_len.saturating_sub(prompt.ids.len());
    let mut sampling = options.sampling.clone();
    sampling.seed = options.seed.unwrap_or_else(random_seed);
    Request {
        prompt: prompt.ids.clone(),
        max_tokens: options.max_tokens.unwrap_or(room).min(room),
        n: options.n,
        sampling,
        priority: options.priority,
        cache_salt: options.cache_salt.clone(),
        sink,
    }
}

/// A seed nobody chose. The standard library keys its hashers from the system's randomness.
fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// What a client hears when events stop without an end.
pub(crate) fn cut_short() -> ApiError {
    ApiError::internal("The engine gave this request up: its client read too slowly, or the engine stopped.")
}

fn stopped() -> ApiError {
    ApiError::unavailable("The engine has stopped.", "engine_stopped")
}
