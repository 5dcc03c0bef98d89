//! One answer from a running engine to the terminal: encodes, streams text as it comes, stops on Ctrl-C.
//! Shared by `run` and `chat`.

use crate::loading::LoadedModel;
use anyhow::{Result, bail};
use pagemill_engine::{ChannelSink, EngineEvent, FinishReason, RecvTimeoutError, Request, SamplingParams, Usage};
use pagemill_text::{ChatInput, Detokenizer, LocalTime, TextPosition};
use serde_json::{Value, json};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Set by Ctrl-C; a generation that sees it stops and clears it.
pub static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// How an answer is generated.
#[derive(clap::Args, Clone, Debug)]
pub struct GenerationArgs {
    /// Tokens to generate at most [default: what fits]
    #[arg(short = 'n', long, visible_alias = "n-predict", value_name = "TOKENS")]
    max_tokens: Option<usize>,
    /// 0 is greedy [default: the model's, else 0.7]
    #[arg(long, visible_alias = "temp")]
    temperature: Option<f32>,
    /// Keep the K likeliest tokens; 0: all
    #[arg(long)]
    top_k: Option<u32>,
    /// Keep the smallest set of tokens of this probability
    #[arg(long)]
    top_p: Option<f32>,
    /// Drop tokens less likely than this share of the likeliest
    #[arg(long)]
    min_p: Option<f32>,
    /// Repetition penalty; 1: off
    #[arg(long, visible_alias = "repeat-penalty")]
    repetition_penalty: Option<f32>,
    /// Same seed, same answer [default: a new one each time]
    #[arg(short, long)]
    seed: Option<u64>,
}

impl GenerationArgs {
    /// Checks ranges.
    ///
    /// # Errors
    /// The flag and its range.
    pub fn validate(&self) -> Result<()> {
        let in_range = |value: Option<f32>, low: f32, high: f32| value.is_none_or(|v| v >= low && v <= high);
        if !in_range(self.temperature, 0.0, 2.0) {
            bail!("--temperature: must lie in 0 to 2");
        }
        if !in_range(self.top_p, f32::MIN_POSITIVE, 1.0) {
            bail!("--top-p: must lie above 0 and not above 1");
        }
        if !in_range(self.min_p, 0.0, 1.0) {
            bail!("--min-p: must lie in 0 to 1");
        }
        if !in_range(self.repetition_penalty, f32::MIN_POSITIVE, f32::MAX) {
            bail!("--repetition-penalty: must be above 0");
        }
        if self.max_tokens == Some(0) {
            bail!("--max-tokens: must be at least 1");
        }
        Ok(())
    }

    fn sampling(&self, model: &LoadedModel) -> SamplingParams {
        let defaults = &model.text.defaults;
        SamplingParams {
            temperature: self.temperature.or(defaults.temperature).unwrap_or(0.7),
            top_k: self.top_k.or(defaults.top_k).filter(|&k| k > 0),
            top_p: self.top_p.or(defaults.top_p).unwrap_or(1.0),
            min_p: self.min_p.or(defaults.min_p).unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
            seed: self.seed.unwrap_or_else(clock_seed),
            stop_token_ids: model.text.eos_token_ids.clone(),
            ..SamplingParams::default()
        }
    }
}

#[allow(clippy::cast_possible_truncation)] // any bits will do
fn clock_seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
}

/// Ctrl-C sets [`INTERRUPTED`] from now on instead of ending the program.
///
/// # Errors
/// The handler cannot be installed.
pub fn catch_interrupts() -> Result<()> {
    ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::SeqCst))?;
    Ok(())
}

/// The ids of a conversation, through the model's template.
///
/// # Errors
/// The template's own refusal.
pub fn encode_chat(model: &LoadedModel, messages: &[Value]) -> Result<Vec<u32>> {
    let Some(template) = &model.text.template else {
        bail!("this model has no chat template: it continues text (pagemill run --raw), it does not chat");
    };
    #[allow(clippy::cast_possible_wrap)] // seconds since 1970
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64);
    let input = ChatInput {
        messages,
        tools: None,
        add_generation_prompt: true,
        extra: None,
        now: LocalTime::from_unix_seconds(seconds),
    };
    let rendered = template.render(&input, model.text.tokenizer.guard())?;
    Ok(model.text.tokenizer.encode_prompt(&rendered)?)
}

/// A message in the OpenAI form.
pub fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// What an answer was and cost.
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Tokens.
    pub usage: Usage,
    /// Why it ended; `None`: Ctrl-C.
    pub reason: Option<FinishReason>,
    /// Seconds until the first token.
    pub first_token_s: f64,
    /// Seconds from the first token to the last.
    pub decode_s: f64,
}

/// Generates one answer and writes it to standard output as it comes.
///
/// # Errors
/// A prompt that does not fit, a failed engine, a closed output.
pub fn answer(model: &LoadedModel, prompt: Vec<u32>, args: &GenerationArgs) -> Result<Answer> {
    let max_seq_len = model.engine.plan.max_seq_len;
    let room = max_seq_len.saturating_sub(prompt.len());
    if prompt.is_empty() {
        bail!("the prompt is empty: this model needs at least one token to continue");
    }
    if room == 0 {
        bail!("the prompt has {} tokens; the context holds {max_seq_len}, answer included", prompt.len());
    }
    let max_tokens = args.max_tokens.unwrap_or(room).min(room);
    let (sink, events) = ChannelSink::new(max_tokens + 16);
    let started = Instant::now();
    model.engine.handle.submit(Request {
        prompt,
        max_tokens,
        n: 1,
        sampling: args.sampling(model),
        priority: 0,
        cache_salt: None,
        sink: Box::new(sink),
    })?;
    let mut detokenizer = Detokenizer::new(model.text.tokenizer.clone(), TextPosition::Middle);
    let mut answer =
        Answer { text: String::new(), usage: Usage::default(), reason: None, first_token_s: 0.0, decode_s: 0.0 };
    loop {
        if INTERRUPTED.swap(false, Ordering::SeqCst) {
            // Dropping the receiver aborts the request.
            return Ok(answer);
        }
        match events.recv_timeout(Duration::from_millis(50)) {
            Ok(EngineEvent::Token { token, .. }) => {
                if answer.usage.completion_tokens == 0 {
                    answer.first_token_s = started.elapsed().as_secs_f64();
                }
                answer.usage.completion_tokens += 1;
                answer.decode_s = started.elapsed().as_secs_f64() - answer.first_token_s;
                emit(&mut answer.text, &detokenizer.push(token))?;
            }
            Ok(EngineEvent::Finished { reason, usage, .. }) => {
                emit(&mut answer.text, &detokenizer.flush())?;
                if let FinishReason::Failed(why) = &reason {
                    bail!("{why}");
                }
                answer.usage = usage;
                answer.reason = Some(reason);
                return Ok(answer);
            }
            Ok(EngineEvent::PromptLogprobs { .. }) | Err(RecvTimeoutError::Timeout) => {}
            Ok(EngineEvent::Failed { message }) => bail!("{message}"),
            Err(RecvTimeoutError::Disconnected) => bail!("the engine has stopped"),
        }
    }
}

fn emit(text: &mut String, piece: &str) -> Result<()> {
    if !piece.is_empty() {
        text.push_str(piece);
        let mut out = std::io::stdout().lock();
        out.write_all(piece.as_bytes())?;
        out.flush()?;
    }
    Ok(())
}
