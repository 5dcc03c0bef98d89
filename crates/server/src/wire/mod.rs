//! The JSON that crosses the wire, field by field as the OpenAI API spells it. Structs only: what a value
//! may be is decided in [`crate::validate`], what it means elsewhere.
//!
//! Every field of the API is listed, supported or not, so that nothing is dropped silently: a field that is
//! listed nowhere is refused by serde, one that is listed and not supported by validation.

pub(crate) mod chat;
pub(crate) mod completion;
pub(crate) mod content;
pub(crate) mod prompt;
pub(crate) mod tokens;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

pub(crate) use prompt::{Prompt, StringOrList};

/// A request struct: its own fields, then those that chat and completion requests share.
macro_rules! generation_request {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct $name {
            $($(#[$field_meta])* pub(crate) $field: $type,)*
            pub(crate) model: Option<String>,
            pub(crate) stream: Option<bool>,
            pub(crate) stream_options: Option<$crate::wire::StreamOptions>,
            pub(crate) n: Option<i64>,
            pub(crate) max_tokens: Option<i64>,
            pub(crate) temperature: Option<f64>,
            pub(crate) top_p: Option<f64>,
            pub(crate) presence_penalty: Option<f64>,
            pub(crate) frequency_penalty: Option<f64>,
            pub(crate) logit_bias: Option<std::collections::BTreeMap<String, f64>>,
            pub(crate) seed: Option<i64>,
            pub(crate) stop: Option<$crate::wire::StringOrList>,
            #[serde(rename = "user")]
            pub(crate) _user: Option<String>,
            pub(crate) top_k: Option<i64>,
            pub(crate) min_p: Option<f64>,
            pub(crate) repetition_penalty: Option<f64>,
            pub(crate) min_tokens: Option<i64>,
            pub(crate) stop_token_ids: Option<Vec<i64>>,
            pub(crate) ignore_eos: Option<bool>,
            pub(crate) include_stop_str_in_output: Option<bool>,
            pub(crate) skip_special_tokens: Option<bool>,
            pub(crate) priority: Option<i32>,
            pub(crate) cache_salt: Option<String>,
            pub(crate) request_id: Option<String>,
            pub(crate) return_token_ids: Option<bool>,
        }

        impl $name {
            /// The shared fields, taken out of the request.
            pub(crate) fn take_sampling(&mut self) -> $crate::wire::SamplingFields {
                $crate::wire::SamplingFields {
                    n: self.n,
                    temperature: self.temperature,
                    top_p: self.top_p,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    logit_bias: self.logit_bias.take().unwrap_or_default(),
                    seed: self.seed,
                    stop: self.stop.take(),
                    top_k: self.top_k,
                    min_p: self.min_p,
                    repetition_penalty: self.repetition_penalty,
                    min_tokens: self.min_tokens,
                    stop_token_ids: self.stop_token_ids.take().unwrap_or_default(),
                    ignore_eos: self.ignore_eos.unwrap_or(false),
                    include_stop_str_in_output: self.include_stop_str_in_output.unwrap_or(false),
                    skip_special_tokens: self.skip_special_tokens.unwrap_or(true),
                    priority: self.priority.unwrap_or(0),
                    cache_salt: self.cache_salt.take(),
                    request_id: self.request_id.take(),
                    return_token_ids: self.return_token_ids.unwrap_or(false),
                    stream: self.stream.unwrap_or(false),
                    stream_options: self.stream_options.take(),
                }
            }
        }
    };
}
pub(crate) use generation_request;

/// The fields that chat and completion requests share, as they were sent.
#[derive(Debug, Default)]
pub(crate) struct SamplingFields {
    pub(crate) n: Option<i64>,
    pub(crate) temperature: Option<f64>,
    pub(crate) top_p: Option<f64>,
    pub(crate) presence_penalty: Option<f64>,
    pub(crate) frequency_penalty: Option<f64>,
    pub(crate) logit_bias: BTreeMap<String, f64>,
    pub(crate) seed: Option<i64>,
    pub(crate) stop: Option<StringOrList>,
    pub(crate) top_k: Option<i64>,
    pub(crate) min_p: Option<f64>,
    pub(crate) repetition_penalty: Option<f64>,
    pub(crate) min_tokens: Option<i64>,
    pub(crate) stop_token_ids: Vec<i64>,
    pub(crate) ignore_eos: bool,
    pub(crate) include_stop_str_in_output: bool,
    pub(crate) skip_special_tokens: bool,
    pub(crate) priority: i32,
    pub(crate) cache_salt: Option<String>,
    pub(crate) request_id: Option<String>,
    pub(crate) return_token_ids: bool,
    pub(crate) stream: bool,
    pub(crate) stream_options: Option<StreamOptions>,
}

/// `stream_options`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
    pub(crate) include_obfuscation: Option<bool>,
}

/// `usage`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
    pub(crate) prompt_tokens_details: PromptTokensDetails,
}

/// `usage.prompt_tokens_details`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct PromptTokensDetails {
    pub(crate) cached_tokens: usize,
}

/// `/v1/models`.
#[derive(Debug, Serialize)]
pub(crate) struct ModelList {
    pub(crate) object: &'static str,
    pub(crate) data: Vec<ModelCard>,
}

/// One model.
#[derive(Debug, Serialize)]
pub(crate) struct ModelCard {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) owned_by: &'static str,
    pub(crate) max_model_len: usize,
}

/// Whether a field that only matters when it holds something holds something.
pub(crate) fn is_filled(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null) => false,
        Some(Value::Array(items)) => !items.is_empty(),
        Some(_) => true,
    }
}
