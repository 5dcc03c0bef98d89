//! What is particular to `/v1/chat/completions`: messages, fields that are not supported yet.

use super::sampling::{self, EndpointFields};
use super::{ChatMessage, Conversation, LogprobsRequest, ModelFacts, PromptSource, ValidRequest};
use crate::config::Limits;
use crate::error::ApiError;
use crate::wire::chat::{ChatRequest, Message, Role};
use crate::wire::content::Content;
use crate::wire::is_filled;
use serde_json::{Map, Value};

/// Names that a template gets from the server: a request may not replace them.
const RESERVED_KWARGS: [&str; 8] = [
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "documents",
    "bos_token",
    "eos_token",
    "chat_template",
];

/// The priority of `service_tier` "batch" and "flex": offline work, which runs when nothing else does or
/// fills a pipeline's bubbles. At the default ageing of 5 s a level, everything that comes within 80
/// minutes goes first.
const OFFLINE_PRIORITY: i32 = -1000;

/// Judges a chat request.
///
/// # Errors
/// 400 naming the field.
pub(crate) fn validate(
    mut request: ChatRequest,
    facts: &ModelFacts,
    limits: &Limits,
) -> Result<ValidRequest, ApiError> {
    check_supported(&request)?;
    let max_tokens = max_tokens(&request)?;
    let logprobs = logprobs(&request, limits)?;
    let endpoint = EndpointFields { max_tokens, logprobs, echo: false };
    let is_offline = matches!(request.service_tier.as_deref(), Some("batch" | "flex"));
    let mut fields = request.take_sampling();
    if is_offline && fields.priority >= 0 {
        fields.priority = OFFLINE_PRIORITY;
    }
    let options = sampling::validate(fields, endpoint, facts, limits)?;
    let conversation = conversation(
        request.messages,
        request.add_generation_prompt,
        request.continue_final_message,
        request.chat_template_kwargs,
    )?;
    Ok(ValidRequest { prompt: PromptSource::Chat(conversation), options })
}

/// Fields of the API that this server does not support, unless they ask for nothing.
fn check_supported(request: &ChatRequest) -> Result<(), ApiError> {
    let is_text = |value: Option<&Value>| match value {
        Some(Value::Array(kinds)) => kinds.iter().all(|k| k == "text"),
        other => !is_filled(other),
    };
    let is_one_of = |value: Option<&Value>, allowed: &[&str]| match value {
        Some(Value::String(s)) => allowed.contains(&s.as_str()),
        other => !is_filled(other),
    };
    let refusals = [
        ("audio", is_filled(request.audio.as_ref())),
        ("chat_template", is_filled(request.chat_template.as_ref())),
        ("function_call", !is_one_of(request.function_call.as_ref(), &["none"])),
        ("functions", is_filled(request.functions.as_ref())),
        ("modalities", !is_text(request.modalities.as_ref())),
        ("prediction", is_filled(request.prediction.as_ref())),
        ("prompt_cache_retention", !is_one_of(request.prompt_cache_retention.as_ref(), &["in_memory"])),
        ("reasoning_effort", !is_one_of(request.reasoning_effort.as_ref(), &["none"])),
        ("tool_choice", !is_one_of(request.tool_choice.as_ref(), &["none"])),
        ("tools", is_filled(request.tools.as_ref())),
        ("verbosity", !is_one_of(request.verbosity.as_ref(), &["medium"])),
        ("web_search_options", is_filled(request.web_search_options.as_ref())),
        ("store", request.store == Some(true)),
        (
            "service_tier",
            !matches!(request.service_tier.as_deref(), None | Some("auto" | "default" | "batch" | "flex")),
        ),
    ];
    if let Some((name, _)) = refusals.iter().find(|(_, refused)| *refused) {
        return Err(ApiError::unsupported(name));
    }
    check_response_format(request.response_format.as_ref())
}

/// `response_format`: only text.
pub(super) fn check_response_format(format: Option<&Value>) -> Result<(), ApiError> {
    let is_text = match format {
        None | Some(Value::Null) => true,
        Some(Value::Object(fields)) => fields.len() == 1 && fields.get("type").is_some_and(|kind| kind == "text"),
        Some(_) => false,
    };
    if is_text { Ok(()) } else { Err(ApiError::unsupported("response_format")) }
}

fn max_tokens(request: &ChatRequest) -> Result<Option<usize>, ApiError> {
    let current = sampling::max_tokens("max_completion_tokens", request.max_completion_tokens, 1)?;
    let deprecated = sampling::max_tokens("max_tokens", request.max_tokens, 1)?;
    match (current, deprecated) {
        (Some(a), Some(b)) if a != b => {
            Err(ApiError::bad_field("max_tokens", "'max_tokens' and 'max_completion_tokens' contradict each other."))
        }
        (current, deprecated) => Ok(current.or(deprecated)),
    }
}

fn logprobs(request: &ChatRequest, limits: &Limits) -> Result<Option<LogprobsRequest>, ApiError> {
    let wanted = request.logprobs.unwrap_or(false);
    let top = request
        .top_logprobs
        .map(|top| sampling::integer("top_logprobs", top, 0, u64::from(limits.top_logprobs)))
        .transpose()?;
    if !wanted && top.is_some_and(|top| top > 0) {
        return Err(ApiError::bad_field("top_logprobs", "'top_logprobs' is only allowed with 'logprobs': true."));
    }
    Ok(wanted.then(|| LogprobsRequest { top: u32::try_from(top.unwrap_or(0)).unwrap_or(u32::MAX) }))
}

/// Judges messages and the options of rendering them, also for `/tokenize`.
///
/// # Errors
/// 400 naming the field.
pub(crate) fn conversation(
    sent: Vec<Message>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    template_kwargs: Option<Map<String, Value>>,
) -> Result<Conversation, ApiError> {
    if sent.is_empty() {
        return Err(ApiError::bad_field("messages", "'messages' must hold at least one message."));
    }
    let continue_final_message = continue_final_message.unwrap_or(false);
    let add_generation_prompt = add_generation_prompt.unwrap_or(!continue_final_message);
    if continue_final_message {
        if add_generation_prompt {
            return Err(ApiError::bad_field(
                "continue_final_message",
                "'continue_final_message' and 'add_generation_prompt' exclude each other.",
            ));
        }
        if sent.last().is_some_and(|m| m.role != Role::Assistant) {
            return Err(ApiError::bad_field(
                "continue_final_message",
                "'continue_final_message' needs an assistant message at the end.",
            ));
        }
    }
    let template_kwargs = template_kwargs.unwrap_or_default();
    if let Some(name) = RESERVED_KWARGS.iter().find(|name| template_kwargs.contains_key(**name)) {
        return Err(ApiError::bad_field(
            "chat_template_kwargs",
            format!("'chat_template_kwargs' must not set '{name}'."),
        ));
    }
    let messages = sent.into_iter().enumerate().map(|(i, m)| message(i, m)).collect::<Result<_, _>>()?;
    Ok(Conversation { messages, add_generation_prompt, continue_final_message, template_kwargs })
}

fn message(index: usize, sent: Message) -> Result<ChatMessage, ApiError> {
    let param = |field: &str| format!("messages[{index}].{field}");
    if is_filled(sent.audio.as_ref()) {
        return Err(ApiError::unsupported(&param("audio")));
    }
    let mut extra = Map::new();
    if let Some(name) = sent.name {
        extra.insert("name".to_owned(), name.into());
    }
    if let Some(id) = sent.tool_call_id {
        extra.insert("tool_call_id".to_owned(), id.into());
    }
    if let Some(text) = sent.reasoning_content {
        extra.insert("reasoning_content".to_owned(), text.into());
    }
    let mut calls = sent.tool_calls.unwrap_or_default();
    if let Some(call) = sent.function_call.filter(|c| !c.is_null()) {
        calls.push(serde_json::json!({ "type": "function", "function": call }));
    }
    let has_calls = !calls.is_empty();
    if has_calls {
        extra.insert("tool_calls".to_owned(), calls.into_iter().map(with_parsed_arguments).collect());
    }
    let role = match sent.role {
        // Templates know no developer: it is what the API renamed system to.
        Role::System | Role::Developer => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool | Role::Function => "tool",
    };
    let content = match sent.content {
        Some(content) => text_of(content, &param("content"))?,
        // What an assistant said may be nothing but calls, or a refusal (D27).
        None if sent.role == Role::Assistant => sent.refusal.unwrap_or_default(),
        None => {
            let param = param("content");
            return Err(ApiError::bad_field(&param, format!("Missing required parameter: '{param}'.")));
        }
    };
    Ok(ChatMessage { role, content, extra })
}

fn text_of(content: Content, param: &str) -> Result<String, ApiError> {
    match content {
        Content::Text(text) => Ok(text),
        Content::Parts(parts) => {
            let mut texts = Vec::with_capacity(parts.len());
            for (i, part) in parts.into_iter().enumerate() {
                let param = format!("{param}[{i}]");
                match (part.kind.as_str(), part.text) {
                    ("text", Some(text)) => texts.push(text),
                    ("text", None) => {
                        let param = format!("{param}.text");
                        return Err(ApiError::bad_field(&param, format!("Missing required parameter: '{param}'.")));
                    }
                    (kind, _) => {
                        let kind = crate::error::clip(kind, 64);
                        return Err(ApiError::bad_field(
                            &param,
                            format!("Content parts of type '{kind}' are not supported by this server."),
                        ));
                    }
                }
            }
            Ok(texts.join("\n"))
        }
    }
}

/// Templates expect a call's arguments as an object; the API carries them as JSON text.
fn with_parsed_arguments(mut call: Value) -> Value {
    if let Some(arguments) = call.pointer_mut("/function/arguments")
        && let Some(parsed) = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok())
        && parsed.is_object()
    {
        *arguments = parsed;
    }
    call
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::test_facts;
    use super::*;
    use crate::body::parse;

    const HI: &str = r#""messages":[{"role":"user","content":"hi"}]"#;

    fn judge(json: &str) -> Result<ValidRequest, ApiError> {
        validate(parse(json.as_bytes(), 64)?, &test_facts(), &Limits::default())
    }

    fn judged_messages(json: &str) -> Vec<ChatMessage> {
        match judge(json).unwrap().prompt {
            PromptSource::Chat(conversation) => conversation.messages,
            other => panic!("{other:?}"),
        }
    }

    fn refused_param(fields: &str) -> String {
        let error = judge(&format!("{{{HI},{fields}}}")).unwrap_err();
        assert_eq!(error.status(), 400, "{fields}");
        error.param().unwrap_or("").to_owned()
    }

    #[test]
    fn unsupported_fields_are_named() {
        for (name, value) in [
            ("tools", r#"[{"type":"function"}]"#),
            ("tool_choice", r#""auto""#),
            ("functions", "[{}]"),
            ("function_call", r#""auto""#),
            ("response_format", r#"{"type":"json_object"}"#),
            ("modalities", r#"["text","audio"]"#),
            ("audio", "{}"),
            ("prediction", "{}"),
            ("web_search_options", "{}"),
            ("reasoning_effort", r#""low""#),
            ("verbosity", r#""high""#),
            ("store", "true"),
            ("service_tier", r#""priority""#),
            ("chat_template", r#""{{ messages }}""#),
            ("best_of", "2"),
            ("guided_regex", r#""foo**""#),
        ] {
            assert_eq!(refused_param(&format!("\"{name}\":{value}")), name);
        }
    }

    #[test]
    fn fields_of_no_effect_are_accepted() {
        let fields = r#""user":"u","metadata":{"a":"b"},"store":false,"service_tier":"auto","parallel_tool_calls":true,
            "safety_identifier":"s","prompt_cache_key":"k","tools":null,"tool_choice":"none","response_format":{"type":"text"},
            "modalities":["text"],"functions":[],"verbosity":"medium","top_logprobs":null,"logprobs":false,"n":null"#;
        assert!(judge(&format!("{{{HI},{fields}}}")).is_ok());
    }

    #[test]
    fn offline_tiers_have_a_priority_of_their_own() {
        for (fields, priority) in [
            (r#""service_tier":"batch""#, OFFLINE_PRIORITY),
            (r#""service_tier":"flex","priority":3"#, OFFLINE_PRIORITY),
            (r#""service_tier":"batch","priority":-7"#, -7),
            (r#""service_tier":"default","priority":3"#, 3),
            (r#""service_tier":null"#, 0),
        ] {
            let options = judge(&format!("{{{HI},{fields}}}")).unwrap().options;
            assert_eq!(options.priority, priority, "{fields}");
        }
    }

    #[test]
    fn d08_top_logprobs_beyond_the_limit_are_refused() {
        for top in ["21", "1000000", "-1"] {
            assert_eq!(refused_param(&format!(r#""logprobs":true,"top_logprobs":{top}"#)), "top_logprobs");
        }
        assert_eq!(refused_param(r#""top_logprobs":2"#), "top_logprobs");
        let options = judge(&format!(r#"{{{HI},"logprobs":true,"top_logprobs":20}}"#)).unwrap().options;
        assert_eq!(options.sampling.logprobs, Some(20));
    }

    #[test]
    fn d18_chat_needs_room_for_one_token() {
        assert_eq!(refused_param(r#""max_tokens":0"#), "max_tokens");
        assert_eq!(refused_param(r#""max_completion_tokens":0"#), "max_completion_tokens");
        assert_eq!(refused_param(r#""max_completion_tokens":1,"max_tokens":2"#), "max_tokens");
        assert_eq!(judge(&format!("{{{HI}}}")).unwrap().options.max_tokens, None);
    }

    #[test]
    fn d20_empty_messages_are_refused() {
        let error = judge(r#"{"messages":[]}"#).unwrap_err();
        assert_eq!((error.status().as_u16(), error.param()), (400, Some("messages")));
        let error = judge("{}").unwrap_err();
        assert_eq!((error.status().as_u16(), error.param()), (400, Some("messages")));
    }

    #[test]
    fn d22_nul_is_kept() {
        let messages = judged_messages(r#"{"messages":[{"role":"user","content":"before\u0000after"}]}"#);
        assert_eq!(messages[0].content, "before\0after");
    }

    #[test]
    fn d27_assistant_content_may_be_null_or_absent() {
        let call = r#""tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"x\":1}"}}]"#;
        for content in [r#""content":null,"#, ""] {
            let messages = judged_messages(&format!(
                r#"{{"messages":[{{"role":"user","content":"a"}},{{"role":"assistant",{content}{call}}},
                    {{"role":"tool","tool_call_id":"c1","content":"1"}}]}}"#
            ));
            assert_eq!(messages[1].content, "");
            assert_eq!(messages[1].extra["tool_calls"][0]["function"]["arguments"]["x"], 1);
            assert_eq!(messages[2].extra["tool_call_id"], "c1");
        }
        assert!(judge(r#"{"messages":[{"role":"user","content":null}]}"#).is_err());
    }

    #[test]
    fn content_parts_are_joined_and_other_kinds_named() {
        let messages = judged_messages(
            r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}"#,
        );
        assert_eq!(messages[0].content, "a\nb");
        let image = r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#;
        assert_eq!(judge(image).unwrap_err().param(), Some("messages[0].content[0]"));
    }

    #[test]
    fn continuing_needs_an_assistant_message() {
        assert_eq!(refused_param(r#""continue_final_message":true"#), "continue_final_message");
        let open = r#"{"messages":[{"role":"assistant","content":"Sure"}],"continue_final_message":true"#;
        assert!(judge(&format!("{open}}}")).is_ok());
        assert!(judge(&format!("{open},\"add_generation_prompt\":true}}")).is_err());
        assert_eq!(refused_param(r#""chat_template_kwargs":{"messages":1}"#), "chat_template_kwargs");
    }
}
