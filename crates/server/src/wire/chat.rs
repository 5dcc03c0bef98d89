//! `/v1/chat/completions`: request, answer, stream chunks.

use crate::wire::content::Content;
use crate::wire::{Usage, generation_request};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

generation_request! {
    /// A chat request.
    ChatRequest {
        messages: Vec<Message>,
        max_completion_tokens: Option<i64>,
        logprobs: Option<bool>,
        top_logprobs: Option<i64>,
        add_generation_prompt: Option<bool>,
        continue_final_message: Option<bool>,
        chat_template_kwargs: Option<Map<String, Value>>,
        // Known and of no effect here.
        #[serde(rename = "metadata")]
        _metadata: Option<IgnoredAny>,
        #[serde(rename = "safety_identifier")]
        _safety_identifier: Option<String>,
        #[serde(rename = "prompt_cache_key")]
        _prompt_cache_key: Option<String>,
        #[serde(rename = "parallel_tool_calls")]
        _parallel_tool_calls: Option<bool>,
        store: Option<bool>,
        service_tier: Option<String>,
        // Known and refused unless they ask for nothing.
        audio: Option<Value>,
        chat_template: Option<Value>,
        function_call: Option<Value>,
        functions: Option<Value>,
        modalities: Option<Value>,
        prediction: Option<Value>,
        prompt_cache_retention: Option<Value>,
        reasoning_effort: Option<Value>,
        response_format: Option<Value>,
        tool_choice: Option<Value>,
        tools: Option<Value>,
        verbosity: Option<Value>,
        web_search_options: Option<Value>,
    }
}

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
    Function,
}

/// One message of a conversation. Fields that clients send back from an earlier answer are known.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Message {
    pub(crate) role: Role,
    pub(crate) content: Option<Content>,
    pub(crate) name: Option<String>,
    pub(crate) tool_calls: Option<Vec<Value>>,
    pub(crate) tool_call_id: Option<String>,
    pub(crate) refusal: Option<String>,
    pub(crate) function_call: Option<Value>,
    pub(crate) reasoning_content: Option<String>,
    #[serde(rename = "annotations")]
    pub(crate) _annotations: Option<IgnoredAny>,
    pub(crate) audio: Option<Value>,
}

/// A whole answer.
#[derive(Debug, Serialize)]
pub(crate) struct ChatCompletion<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<&'a [u32]>,
}

/// One choice of an answer.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    pub(crate) message: AnswerMessage,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
}

/// What the assistant said.
#[derive(Debug, Serialize)]
pub(crate) struct AnswerMessage {
    pub(crate) role: &'static str,
    pub(crate) content: String,
    pub(crate) refusal: Option<String>,
}

/// `logprobs` of a chat choice.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatTokenLogprob>,
    pub(crate) refusal: Option<Vec<ChatTokenLogprob>>,
}

/// One token's log-probability and its likeliest rivals.
#[derive(Debug, Serialize)]
pub(crate) struct ChatTokenLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
    pub(crate) top_logprobs: Vec<ChatTopLogprob>,
}

/// One likely token.
#[derive(Debug, Serialize)]
pub(crate) struct ChatTopLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
}

/// One event of a stream.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChunk<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<ChatChunkChoice>,
    /// Outer `None`: usage was not asked for. Inner `None`: `null`, as the API has it before the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<&'a [u32]>,
}

/// One choice's share of a stream event.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: usize,
    pub(crate) delta: ChatDelta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
}

/// What a stream event adds.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
}
