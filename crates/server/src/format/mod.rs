//! How an answer is written down: one implementation for chat, one for text completions. Decides field
//! names and which chunk carries what; knows neither engine nor sockets.

mod chat;
mod completion;

pub(crate) use chat::ChatFormat;
pub(crate) use completion::CompletionFormat;

use crate::answer::{Answer, Output};
use crate::choice::{Delta, Finish};
use crate::validate::GenerationOptions;
use crate::wire::Usage;
use bytes::BytesMut;
use pagemill_text::Tokenizer;
use serde::Serialize;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Writes one call's answer.
pub(crate) trait AnswerFormat: Send + Unpin + 'static {
    /// The whole answer as JSON.
    fn whole(&self, answer: &Answer, choices: Vec<(Delta, Finish)>) -> serde_json::Result<String>;

    /// The events of one output.
    fn events(&mut self, answer: &Answer, output: Output, out: &mut BytesMut) -> serde_json::Result<()>;

    /// The event before the end that carries the usage.
    fn usage_event(&self, usage: Usage, out: &mut BytesMut) -> serde_json::Result<()>;
}

/// What every object of an answer repeats.
#[derive(Debug, Clone)]
pub(crate) struct AnswerMeta {
    /// Unique, made here: a client's ids are never used (D62).
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// The name the client used.
    pub(crate) model: String,
    /// Whether stream events have a `usage` field.
    pub(crate) include_usage: bool,
    /// Whether log-probabilities were asked for, and how many rivals.
    pub(crate) top_logprobs: Option<u32>,
    /// Whether token ids were asked for.
    pub(crate) return_token_ids: bool,
}

impl AnswerMeta {
    /// For an answer that begins now.
    pub(crate) fn new(id_prefix: &str, model: &str, options: &GenerationOptions) -> Self {
        Self {
            id: unique_id(id_prefix),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            model: model.to_owned(),
            include_usage: options.delivery == crate::validate::Delivery::Stream { include_usage: true },
            top_logprobs: options.logprobs.map(|l| l.top),
            return_token_ids: options.return_token_ids,
        }
    }

    /// `usage` of an event that carries none: `null` when usage was asked for, else absent.
    fn no_usage(&self) -> Option<Option<Usage>> {
        self.include_usage.then_some(None)
    }
}

/// 128 bits that nobody chose. The standard library keys its hashers from the system's randomness, and
/// differently each time.
pub(crate) fn unique_id(prefix: &str) -> String {
    let half = || RandomState::new().build_hasher().finish();
    format!("{prefix}{:016x}{:016x}", half(), half())
}

/// Appends one server-sent event. JSON text never holds a raw line break, so one line is enough (D57).
fn write_event(out: &mut BytesMut, value: &impl Serialize) -> serde_json::Result<()> {
    let json = serde_json::to_vec(value)?;
    out.reserve(json.len() + 8);
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(&json);
    out.extend_from_slice(b"\n\n");
    Ok(())
}

/// A token as log-probabilities show it: its text, or its bytes spelled out when they are no text alone.
fn token_text(tokenizer: &Arc<Tokenizer>, token: u32) -> String {
    let bytes = tokenizer.token_bytes(token);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| format!("{text}\\x{byte:02x}")),
    }
}
