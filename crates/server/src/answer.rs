//! All choices of a call: routes the engine's events to them, adds up usage, measures latencies. What comes
//! out is the same whether it is streamed or collected. Knows no JSON.

use crate::choice::{Choice, Delta, Finish, TokenEntry};
use crate::error::ApiError;
use crate::generation::{Generation, Heard, PromptEvent, cut_short};
use crate::metrics::ModelMetrics;
use crate::prompt::PreparedPrompt;
use crate::state::ReadyModel;
use crate::validate::GenerationOptions;
use crate::wire::{PromptTokensDetails, Usage};
use pagemill_engine::{EngineEvent, TokenLogprobs};
use pagemill_text::StopMatcher;
use std::sync::Arc;
use std::time::Instant;

/// What the client is to hear about one choice.
#[derive(Debug, PartialEq)]
pub(crate) struct Output {
    /// Prompt × n + choice (D21).
    pub(crate) index: usize,
    /// What is added.
    pub(crate) delta: Delta,
    /// Set once, in a choice's last output.
    pub(crate) finish: Option<Finish>,
}

struct PromptState {
    prepared: PreparedPrompt,
    logprobs: Vec<TokenLogprobs>,
    cached_tokens: usize,
}

struct ChoiceState {
    choice: Choice,
    /// Whether the echoed prompt has been shown.
    echoed: bool,
    last_token: Option<Instant>,
}

/// The answer to one call, as far as it has come.
pub(crate) struct Answer {
    n: usize,
    prompts: Vec<PromptState>,
    choices: Vec<ChoiceState>,
    wants_entries: bool,
    num_running: usize,
    metrics: ModelMetrics,
    arrival: Instant,
    first_token: Option<Instant>,
}

impl Answer {
    /// An answer of which nothing has come.
    ///
    /// # Errors
    /// 400 for stop strings that cannot be matched.
    pub(crate) fn new(
        model: &ReadyModel,
        prompts: Vec<PreparedPrompt>,
        options: &GenerationOptions,
        arrival: Instant,
    ) -> Result<Self, ApiError> {
        let stops = StopMatcher::new(&options.stop).map_err(|error| ApiError::bad_field("stop", error.to_string()))?;
        let stop_token_ids: Arc<[u32]> = options.sampling.stop_token_ids.clone().into();
        let n = options.n as usize;
        let mut choices = Vec::with_capacity(prompts.len() * n);
        for prompt in &prompts {
            choices.extend((0..n).map(|_| ChoiceState {
                choice: Choice::new(
                    &model.served.tokenizer,
                    options,
                    stops.clone(),
                    Arc::clone(&stop_token_ids),
                    prompt.echo.as_ref(),
                ),
                echoed: prompt.echo.is_none(),
                last_token: None,
            }));
        }
        let prompts =
            prompts.into_iter().map(|prepared| PromptState { prepared, logprobs: Vec::new(), cached_tokens: 0 });
        Ok(Self {
            n,
            prompts: prompts.collect(),
            num_running: choices.len(),
            choices,
            wants_entries: options.logprobs.is_some(),
            metrics: model.metrics.clone(),
            arrival,
            first_token: None,
        })
    }

    /// Number of choices.
    pub(crate) fn num_choices(&self) -> usize {
        self.choices.len()
    }

    /// Whether every choice has ended.
    pub(crate) fn is_complete(&self) -> bool {
        self.num_running == 0
    }

    /// The ids of the prompt that a choice continues.
    pub(crate) fn prompt_ids(&self, index: usize) -> &[u32] {
        self.prompts.get(index / self.n.max(1)).map_or(&[], |p| &p.prepared.ids)
    }

    /// Takes an event; tells `generation` when a stop string ended a choice.
    ///
    /// # Errors
    /// 500 when the engine failed: the whole call is over.
    pub(crate) fn apply(
        &mut self,
        (prompt_idx, heard): PromptEvent,
        generation: &mut Generation,
    ) -> Result<Option<Output>, ApiError> {
        let event = match heard {
            Heard::Event(event) => event,
            Heard::PromptComputed { cached_tokens } => {
                self.note_cached(prompt_idx, cached_tokens);
                return Ok(None);
            }
        };
        match event {
            EngineEvent::Token { choice, token, logprobs } => {
                let Some(index) = self.running(prompt_idx, choice) else {
                    return Ok(None);
                };
                self.measure_token(index);
                let mut delta = self.echo(index, prompt_idx);
                let state = &mut self.choices[index];
                delta.append(state.choice.on_token(token, logprobs));
                let finish = state.choice.finish();
                if finish.is_some() {
                    generation.finish_choice(prompt_idx, choice);
                }
                Ok(self.output(index, delta, finish))
            }
            EngineEvent::Finished { choice, reason, usage } => {
                self.note_cached(prompt_idx, usage.cached_tokens);
                let Some(index) = self.running(prompt_idx, choice) else {
                    return Ok(None);
                };
                generation.choice_ended(prompt_idx);
                let mut delta = self.echo(index, prompt_idx);
                delta.append(self.choices[index].choice.on_finished(reason)?);
                let finish = self.choices[index].choice.finish();
                Ok(self.output(index, delta, finish))
            }
            EngineEvent::PromptLogprobs { logprobs, .. } => {
                if let Some(prompt) = self.prompts.get_mut(prompt_idx) {
                    prompt.logprobs.extend(logprobs);
                }
                Ok(None)
            }
            EngineEvent::Failed { message } => Err(ApiError::engine_stopped(&message)),
        }
    }

    /// Waits for the whole answer: one delta and one end for each choice, in order.
    ///
    /// # Errors
    /// 503 when the engine has stopped.
    pub(crate) async fn collect(&mut self, mut generation: Generation) -> Result<Vec<(Delta, Finish)>, ApiError> {
        let mut collected: Vec<(Delta, Finish)> =
            (0..self.num_choices()).map(|_| (Delta::default(), Finish::Length)).collect();
        while !self.is_complete() {
            let event = generation.next().await.ok_or_else(cut_short)?;
            if let Some(output) = self.apply(event, &mut generation)? {
                let (delta, finish) = &mut collected[output.index];
                delta.append(output.delta);
                *finish = output.finish.unwrap_or(*finish);
            }
        }
        Ok(collected)
    }

    /// Tokens in and out. A prompt counts once, however many choices continue it.
    pub(crate) fn usage(&self) -> Usage {
        let prompt_tokens = self.prompts.iter().map(|p| p.prepared.ids.len()).sum();
        let completion_tokens = self.choices.iter().map(|c| c.choice.num_tokens()).sum();
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails {
                cached_tokens: self.prompts.iter().map(|p| p.cached_tokens).sum(),
            },
        }
    }

    /// The index of a choice that still runs.
    fn running(&self, prompt_idx: usize, choice: u32) -> Option<usize> {
        let index = prompt_idx.checked_mul(self.n)?.checked_add(choice as usize)?;
        self.choices.get(index).filter(|c| c.choice.finish().is_none()).map(|_| index)
    }

    fn output(&mut self, index: usize, delta: Delta, finish: Option<Finish>) -> Option<Output> {
        if let Some(finish) = finish {
            self.num_running -= 1;
            self.metrics.choice_ended(finish.as_str());
            if self.num_running == 0 {
                let usage = self.usage();
                let decoding = self.first_token.map(|first| first.elapsed()).unwrap_or_default();
                let latency = self.arrival.elapsed();
                self.metrics.request_ended(latency, decoding, usage.prompt_tokens, usage.completion_tokens);
            }
        }
        (finish.is_some() || !delta.is_empty()).then_some(Output { index, delta, finish })
    }

    /// The echoed prompt, before a choice's first output. By then the engine has told all of the prompt's
    /// log-probabilities.
    fn echo(&mut self, index: usize, prompt_idx: usize) -> Delta {
        let state = &mut self.choices[index];
        if std::mem::replace(&mut state.echoed, true) {
            return Delta::default();
        }
        let prompt = &self.prompts[prompt_idx];
        let Some(echo) = &prompt.prepared.echo else {
            return Delta::default();
        };
        let mut entries = Vec::new();
        if self.wants_entries {
            let after_first = prompt.logprobs.iter().cloned().map(Some);
            let logprobs = std::iter::once(None).chain(after_first).chain(std::iter::repeat(None));
            let tokens = prompt.prepared.ids.iter().zip(&echo.token_offsets).zip(logprobs);
            entries.extend(tokens.map(|((&token, &text_offset), logprobs)| TokenEntry {
                token,
                text_offset,
                logprobs,
            }));
        }
        Delta { text: echo.text.clone(), entries, token_ids: Vec::new() }
    }

    fn note_cached(&mut self, prompt_idx: usize, cached_tokens: usize) {
        if let Some(prompt) = self.prompts.get_mut(prompt_idx) {
            prompt.cached_tokens = prompt.cached_tokens.max(cached_tokens);
        }
    }

    fn measure_token(&mut self, index: usize) {
        let now = Instant::now();
        if self.first_token.is_none() {
            self.first_token = Some(now);
            self.metrics.first_token(now - self.arrival);
        }
        if let Some(last) = self.choices[index].last_token.replace(now) {
            self.metrics.next_token(now - last);
        }
    }
}
