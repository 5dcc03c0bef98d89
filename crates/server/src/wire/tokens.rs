//! `/tokenize` and `/detokenize`.

use crate::wire::chat::Message;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Text or messages to be turned into ids: exactly one of `prompt` and `messages`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TokenizeRequest {
    pub(crate) model: Option<String>,
    pub(crate) prompt: Option<String>,
    pub(crate) messages: Option<Vec<Message>>,
    pub(crate) add_special_tokens: Option<bool>,
    pub(crate) add_generation_prompt: Option<bool>,
    pub(crate) continue_final_message: Option<bool>,
    pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
    pub(crate) return_token_strs: Option<bool>,
}

/// The ids.
#[derive(Debug, Serialize)]
pub(crate) struct TokenizeResponse {
    pub(crate) count: usize,
    pub(crate) max_model_len: usize,
    pub(crate) tokens: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_strs: Option<Vec<String>>,
}

/// Ids to be turned into text.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DetokenizeRequest {
    pub(crate) model: Option<String>,
    pub(crate) tokens: Vec<i64>,
    pub(crate) skip_special_tokens: Option<bool>,
}

/// The text.
#[derive(Debug, Serialize)]
pub(crate) struct DetokenizeResponse {
    pub(crate) prompt: String,
}
