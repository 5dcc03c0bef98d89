//! The one place where a request's values are judged, before anything is tokenised or queued, against the
//! model's real vocabulary and limits. What passes here, the engine may trust. Knows no HTTP, no engine.
//!
//! `chat` and `completion` judge what is particular to an endpoint, `sampling` what both share.

mod chat;
mod completion;
mod sampling;

pub(crate) use chat::{conversation as validate_conversation, validate as validate_chat};
pub(crate) use completion::validate as validate_completion;

use crate::config::SamplingDefaults;
use crate::error::ApiError;
use pagemill_engine::SamplingParams;
use serde_json::{Map, Value};

/// What validation needs to know of the served model.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    /// Rows of the embedding: token ids are below it.
    pub vocab_size: usize,
    /// Tokens in a sequence at most, prompt and answer together.
    pub max_seq_len: usize,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// Sampling values where a request names none.
    pub defaults: SamplingDefaults,
}

/// A request that may run.
#[derive(Debug)]
pub(crate) struct ValidRequest {
    /// What to continue.
    pub(crate) prompt: PromptSource,
    /// How.
    pub(crate) options: GenerationOptions,
}

/// A prompt before tokenising.
#[derive(Debug)]
pub(crate) enum PromptSource {
    /// A conversation.
    Chat(Conversation),
    /// Plain texts, one request each.
    Texts { texts: Vec<String>, add_special_tokens: bool },
    /// Token ids, each below the vocabulary size.
    Ids(Vec<Vec<u32>>),
}

impl PromptSource {
    /// The field that a complaint about the prompt names.
    pub(crate) fn param(&self) -> &'static str {
        match self {
            Self::Chat(_) => "messages",
            Self::Texts { .. } | Self::Ids(_) => "prompt",
        }
    }
}

/// A conversation to be rendered with the model's template.
#[derive(Debug)]
pub(crate) struct Conversation {
    /// At least one.
    pub(crate) messages: Vec<ChatMessage>,
    /// Whether the template opens the assistant's turn.
    pub(crate) add_generation_prompt: bool,
    /// Whether the last message is left open, to be continued.
    pub(crate) continue_final_message: bool,
    /// Further variables of the template.
    pub(crate) template_kwargs: Map<String, Value>,
}

/// A message as templates see it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool`.
    pub(crate) role: &'static str,
    /// Text; empty where none was sent.
    pub(crate) content: String,
    /// Further keys: `name`, `tool_calls`, `tool_call_id`, `reasoning_content`.
    pub(crate) extra: Map<String, Value>,
}

/// Log-probabilities that were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogprobsRequest {
    /// Likeliest tokens beside the chosen one.
    pub(crate) top: u32,
}

/// Everything about a request but its prompt.
#[derive(Debug)]
pub(crate) struct GenerationOptions {
    /// Choices of each prompt.
    pub(crate) n: u32,
    /// As asked; `None`: what the context leaves.
    pub(crate) max_tokens: Option<usize>,
    /// As asked; `None`: each prompt draws its own.
    pub(crate) seed: Option<u64>,
    /// For the engine, but for the seed. `stop_token_ids` holds the model's end tokens unless they are ignored.
    pub(crate) sampling: SamplingParams,
    /// Stop strings, none of them empty.
    pub(crate) stop: Vec<String>,
    /// Whether what stopped an answer is part of its text.
    pub(crate) include_stop_str_in_output: bool,
    /// Whether control tokens have no text.
    pub(crate) skip_special_tokens: bool,
    /// Higher runs first.
    pub(crate) priority: i32,
    /// Separates prefix caches.
    pub(crate) cache_salt: Option<Vec<u8>>,
    /// Wanted log-probabilities.
    pub(crate) logprobs: Option<LogprobsRequest>,
    /// Whether answers begin with the prompt.
    pub(crate) echo: bool,
    /// Whether token ids are part of the answer.
    pub(crate) return_token_ids: bool,
    /// How the answer travels.
    pub(crate) delivery: Delivery,
}

/// How an answer travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// In one piece.
    Whole,
    /// As server-sent events.
    Stream { include_usage: bool },
}

/// Token ids as sent, checked against the vocabulary (D16).
pub(crate) fn token_ids(ids: &[i64], vocab_size: usize, param: &str) -> Result<Vec<u32>, ApiError> {
    ids.iter()
        .map(|&id| match u32::try_from(id) {
            Ok(valid) if (valid as usize) < vocab_size => Ok(valid),
            _ => Err(ApiError::bad_field(
                param,
                format!("Token id {id} in '{param}' is outside the vocabulary of {vocab_size} tokens."),
            )
            .with_code("invalid_value")),
        })
        .collect()
}

#[cfg(test)]
pub(crate) fn test_facts() -> ModelFacts {
    ModelFacts { vocab_size: 512, max_seq_len: 256, eos_token_ids: vec![2], defaults: SamplingDefaults::default() }
}
