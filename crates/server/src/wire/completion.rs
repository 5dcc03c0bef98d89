//! `/v1/completions`: request, answer, stream chunks (which have the answer's shape).

use crate::wire::{Prompt, Usage, generation_request};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

generation_request! {
    /// A completion request.
    CompletionRequest {
        prompt: Prompt,
        echo: Option<bool>,
        logprobs: Option<i64>,
        add_special_tokens: Option<bool>,
        // Known and refused unless they ask for nothing.
        best_of: Option<i64>,
        suffix: Option<String>,
        response_format: Option<Value>,
    }
}

/// A whole answer, or one event of a stream.
#[derive(Debug, Serialize)]
pub(crate) struct Completion<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<CompletionChoice<'a>>,
    /// Outer `None`: absent. Inner `None`: `null`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Option<Usage>>,
}

/// One choice, or its share of a stream event.
#[derive(Debug, Serialize)]
pub(crate) struct CompletionChoice<'a> {
    pub(crate) text: String,
    pub(crate) index: usize,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<&'a [u32]>,
}

/// `logprobs` of a completion choice: four lists of equal length.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CompletionLogprobs {
    pub(crate) tokens: Vec<String>,
    /// `null` for a prompt's first token.
    pub(crate) token_logprobs: Vec<Option<f32>>,
    pub(crate) top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Characters of all text before the token, an echoed prompt included.
    pub(crate) text_offset: Vec<usize>,
}
