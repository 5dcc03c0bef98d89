//! One client: what it was promised, what it has heard, and whether the two agree so far. Knows no
//! engine beyond the events that it is sent.

use super::{Coverage, Fault};
use crate::workload::{Fate, PlannedRequest};
use crate::{Expected, ExpectedChoice};
use pagemill_engine::{EngineEvent, EventSink, FinishReason, RequestId, SinkClosed, TokenLogprobs, Usage};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a sink has been told.
#[derive(Debug, Default)]
struct Inbox {
    events: Vec<EngineEvent>,
    /// Events that fit; `None`: all.
    room: Option<usize>,
    closed: bool,
    num_rejected: usize,
    cached_tokens: Option<usize>,
}

/// The sink of a simulated client.
pub(super) struct RecordingSink(Arc<Mutex<Inbox>>);

impl EventSink for RecordingSink {
    fn send(&mut self, event: EngineEvent) -> Result<(), SinkClosed> {
        let mut inbox = locked(&self.0);
        if inbox.closed || inbox.room.is_some_and(|room| inbox.events.len() >= room) {
            inbox.num_rejected += 1;
            return Err(SinkClosed);
        }
        inbox.events.push(event);
        Ok(())
    }

    fn is_closed(&self) -> bool {
        locked(&self.0).closed
    }

    fn prompt_computed(&mut self, cached_tokens: usize) {
        locked(&self.0).cached_tokens = Some(cached_tokens);
    }
}

fn locked(inbox: &Mutex<Inbox>) -> MutexGuard<'_, Inbox> {
    inbox.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How a choice stands.
#[derive(Clone, Copy, Debug, Default)]
struct HeardChoice {
    num_tokens: usize,
    /// It ended by itself, or its stop string was found.
    ended: bool,
}

/// A client whose request was taken.
pub(super) struct Listener {
    pub(super) id: RequestId,
    pub(super) request: PlannedRequest,
    pub(super) expected: Expected,
    /// Place in the order of precedence.
    pub(super) virtual_arrival: i128,
    /// Calls of the step loop, and steps run, when it was submitted.
    pub(super) submitted: (u64, u64),
    /// Steps within which it must end.
    pub(super) bound: u64,
    /// Nothing more may be heard.
    pub(super) over: bool,
    inbox: Arc<Mutex<Inbox>>,
    num_read: usize,
    choices: Vec<HeardChoice>,
    /// Prompt position whose log-probability comes next.
    next_prompt_logprob: usize,
    usage: Option<Usage>,
}

impl Listener {
    /// A client before its request is submitted, and its ear. `id` and the places are set afterwards.
    pub(super) fn new(request: PlannedRequest, expected: Expected) -> (Self, RecordingSink) {
        let inbox = Arc::new(Mutex::new(Inbox {
            room: match request.fate {
                Fate::FullAfter(room) => Some(room),
                _ => None,
            },
            ..Inbox::default()
        }));
        let listener = Self {
            id: RequestId(0),
            choices: vec![HeardChoice::default(); request.n as usize],
            request,
            expected,
            virtual_arrival: 0,
            submitted: (0, 0),
            bound: 0,
            over: false,
            inbox: Arc::clone(&inbox),
            num_read: 0,
            next_prompt_logprob: 1,
            usage: None,
        };
        (listener, RecordingSink(inbox))
    }

    /// Whether the engine has let go of the sink.
    pub(super) fn is_forgotten(&self) -> bool {
        Arc::strong_count(&self.inbox) == 1
    }

    pub(super) fn num_heard(&self) -> usize {
        self.num_read
    }

    pub(super) fn num_tokens(&self, choice: u32) -> usize {
        self.choices[choice as usize].num_tokens
    }

    pub(super) fn has_tokens(&self) -> bool {
        self.choices.iter().any(|choice| choice.num_tokens > 0)
    }

    pub(super) fn has_ended(&self, choice: u32) -> bool {
        self.choices[choice as usize].ended
    }

    /// Prompt tokens that it was told had been in the prefix cache.
    pub(super) fn cached_tokens(&self) -> usize {
        let told = locked(&self.inbox).cached_tokens;
        told.or(self.usage.map(|usage| usage.cached_tokens)).unwrap_or(0)
    }

    /// The client goes away.
    pub(super) fn close(&mut self) {
        locked(&self.inbox).closed = true;
        self.over = true;
    }

    /// A stop string was found: nothing more may come for this choice, nor for the request if it was
    /// the last, or if nothing has been generated yet.
    pub(super) fn stop(&mut self, choice: u32) {
        self.over |= !self.has_tokens();
        self.choices[choice as usize].ended = true;
        self.over |= self.choices.iter().all(|choice| choice.ended);
    }

    /// Reads what has come since the last time and compares it with what was promised.
    pub(super) fn listen(&mut self, coverage: &mut Coverage) -> Result<(), Fault> {
        let inbox = Arc::clone(&self.inbox);
        let inbox = locked(&inbox);
        for event in &inbox.events[self.num_read..] {
            self.num_read += 1;
            if self.over {
                return Err(self.wrong(format!("heard {event:?} although it was over")));
            }
            self.hear(event, inbox.cached_tokens, coverage)?;
        }
        let allowed = usize::from(matches!(self.request.fate, Fate::FullAfter(_)));
        if inbox.num_rejected > allowed {
            return Err(self.wrong(format!("{} events were sent to a deaf sink", inbox.num_rejected)));
        }
        if inbox.num_rejected > 0 && !self.over {
            self.over = true;
            coverage.full_sinks += 1;
        }
        Ok(())
    }

    /// Reads the last message of an engine that has stopped: every live client is told, once.
    pub(super) fn listen_to_failure(&mut self, coverage: &mut Coverage) -> Result<(), Fault> {
        let told = locked(&self.inbox).events.get(self.num_read).cloned();
        match told {
            Some(EngineEvent::Failed { .. }) if !self.over => {
                self.num_read += 1;
                self.over = true;
            }
            None if self.over || matches!(self.request.fate, Fate::FullAfter(_)) => self.over = true,
            told => return Err(self.wrong(format!("heard {told:?} when the engine stopped"))),
        }
        self.listen(coverage)
    }

    fn hear(&mut self, event: &EngineEvent, cached: Option<usize>, coverage: &mut Coverage) -> Result<(), Fault> {
        match event {
            EngineEvent::Token { choice, token, logprobs } => {
                coverage.tokens_heard += 1;
                if cached.is_none() {
                    return Err(self.wrong("a token came before the prompt was computed".to_owned()));
                }
                self.hear_token(*choice, *token, logprobs.as_ref())
            }
            EngineEvent::PromptLogprobs { start, logprobs } => {
                coverage.prompt_logprobs_heard += logprobs.len() as u64;
                self.hear_prompt_logprobs(*start, logprobs)
            }
            EngineEvent::Finished { choice, reason, usage } => {
                self.hear_end(*choice, reason, *usage, cached)?;
                coverage.stop_tokens += u64::from(matches!(reason, FinishReason::Stop(_)));
                coverage.failed_sequences += u64::from(matches!(reason, FinishReason::Failed(_)));
                coverage.sibling_choices_completed += u64::from(self.request.n > 1);
                coverage.requests_completed += u64::from(self.over);
                Ok(())
            }
            EngineEvent::Failed { message } => Err(self.wrong(format!("failed: {message}"))),
        }
    }

    fn hear_token(&mut self, choice: u32, token: u32, logprobs: Option<&TokenLogprobs>) -> Result<(), Fault> {
        let index = self.live_choice(choice)?.num_tokens;
        let ExpectedChoice { tokens, logprobs: expected_logprobs, .. } = &self.expected.choices[choice as usize];
        if tokens.get(index) != Some(&token) {
            return Err(Fault::WrongToken {
                request: self.id.0,
                choice,
                index,
                got: token,
                expected: tokens.get(index).copied(),
            });
        }
        let promised = self.request.sampling.logprobs.map(|_| expected_logprobs[index]);
        if logprobs.map(|entry| entry.logprob) != promised {
            return Err(self.wrong(format!("token {index} came with {logprobs:?}, not {promised:?}")));
        }
        if index == 0 {
            self.check_prompt_logprobs_complete()?;
        }
        self.choices[choice as usize].num_tokens += 1;
        Ok(())
    }

    fn live_choice(&self, choice: u32) -> Result<HeardChoice, Fault> {
        match self.choices.get(choice as usize) {
            Some(heard) if !heard.ended => Ok(*heard),
            Some(_) => Err(self.wrong(format!("choice {choice} goes on after its end"))),
            None => Err(self.wrong(format!("choice {choice} was not asked for"))),
        }
    }

    fn hear_prompt_logprobs(&mut self, start: usize, logprobs: &[TokenLogprobs]) -> Result<(), Fault> {
        if self.request.sampling.prompt_logprobs.is_none() || start != self.next_prompt_logprob {
            return Err(self.wrong(format!("prompt log-probabilities from {start}, not {}", self.next_prompt_logprob)));
        }
        let promised = self.expected.prompt_logprobs.iter().skip(start - 1);
        let num_right = promised.zip(logprobs).take_while(|(promised, entry)| **promised == entry.logprob).count();
        if num_right != logprobs.len() {
            return Err(self.wrong(format!("prompt log-probability {} is wrong", start + num_right)));
        }
        self.next_prompt_logprob += logprobs.len();
        Ok(())
    }

    fn check_prompt_logprobs_complete(&self) -> Result<(), Fault> {
        let wanted = self.request.sampling.prompt_logprobs.is_some();
        if wanted && self.next_prompt_logprob < self.request.prompt.len() {
            return Err(self.wrong(format!(
                "prompt log-probabilities end at {} of {}",
                self.next_prompt_logprob,
                self.request.prompt.len()
            )));
        }
        Ok(())
    }

    fn hear_end(
        &mut self,
        choice: u32,
        reason: &FinishReason,
        usage: Usage,
        cached: Option<usize>,
    ) -> Result<(), Fault> {
        let heard = self.live_choice(choice)?;
        let expected = &self.expected.choices[choice as usize];
        if heard.num_tokens != expected.tokens.len() || *reason != expected.reason {
            return Err(self.wrong(format!(
                "choice {choice} ended after {} tokens with {reason:?}; due: {} tokens, {:?}",
                heard.num_tokens,
                expected.tokens.len(),
                expected.reason
            )));
        }
        self.check_prompt_logprobs_complete()?;
        let told = Usage {
            prompt_tokens: self.request.prompt.len(),
            cached_tokens: cached.or(self.usage.map(|usage| usage.cached_tokens)).unwrap_or(usage.cached_tokens),
            completion_tokens: expected.tokens.len(),
        };
        if usage != told {
            return Err(self.wrong(format!("choice {choice} used {usage:?}, not {told:?}")));
        }
        self.usage = Some(usage);
        self.choices[choice as usize].ended = true;
        self.over = self.choices.iter().all(|choice| choice.ended);
        Ok(())
    }

    pub(super) fn wrong(&self, what: String) -> Fault {
        Fault::WrongAnswer { request: self.id.0, what }
    }
}
