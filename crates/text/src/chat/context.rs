//! What a template sees of a conversation.
//!
//! It decides the variables, the form of message content that each template is given, and how literals of control
//! tokens in them are marked and found again. It does not run templates.

use std::collections::HashSet;

use minijinja::Value as Jinja;
use serde_json::{Map, Value, json};

use super::{ChatInput, ChatTemplate, LocalTime, RenderedPrompt};
use crate::{LiteralGuard, TextError};

/// The form of message content that a template is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    /// Content is handed on as the caller wrote it.
    AsGiven,
    /// The template writes strings: text parts are joined to one string.
    String,
    /// The template loops over parts only: a string becomes one text part.
    Parts,
    /// The template understands both: content is handed on, but for the absent, which becomes an empty string.
    Either,
}

/// Marks are taken from here up: the private-use planes 15 and 16.
const FIRST_MARK: char = '\u{F0000}';

/// Marks literals of control tokens in what a caller passed, with a character that occurs nowhere else.
pub(super) struct Marker<'a> {
    guard: &'a LiteralGuard,
    mark: Option<char>,
}

impl<'a> Marker<'a> {
    /// A marker for `input`; without any literal in it, it does nothing.
    ///
    /// # Errors
    /// [`TextError::NoMarkLeft`] if no character is free to serve as the mark.
    pub fn new(guard: &'a LiteralGuard, input: &ChatInput<'_>, source: &str) -> Result<Self, TextError> {
        let mut needed = false;
        for_each_string(input, &mut |text| needed |= guard.is_needed(text));
        if !needed {
            return Ok(Self { guard, mark: None });
        }
        let mut used: HashSet<char> = HashSet::new();
        used.extend(source.chars().filter(|c| *c >= FIRST_MARK));
        for_each_string(input, &mut |text| used.extend(text.chars().filter(|c| *c >= FIRST_MARK)));
        let mark = (FIRST_MARK..=char::MAX).rev().find(|c| !used.contains(c)).ok_or(TextError::NoMarkLeft)?;
        Ok(Self { guard, mark: Some(mark) })
    }

    /// A marker that does nothing.
    pub fn idle(guard: &'a LiteralGuard) -> Self {
        Self { guard, mark: None }
    }

    fn text(&self, text: &str) -> Jinja {
        match self.mark {
            Some(mark) if self.guard.is_needed(text) => Jinja::from(self.guard.mark(text, mark)),
            _ => Jinja::from(text),
        }
    }

    fn value(&self, value: &Value) -> Jinja {
        match value {
            Value::Null => Jinja::from(()),
            Value::Bool(flag) => Jinja::from(*flag),
            Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
                (Some(integer), _, _) => Jinja::from(integer),
                (_, Some(integer), _) => Jinja::from(integer),
                (_, _, float) => Jinja::from(float.unwrap_or(f64::NAN)),
            },
            Value::String(text) => self.text(text),
            Value::Array(items) => Jinja::from(items.iter().map(|item| self.value(item)).collect::<Vec<_>>()),
            Value::Object(fields) => {
                Jinja::from_pairs(fields.iter().map(|(key, value)| (self.text(key), self.value(value))))
            }
        }
    }

    /// Takes the marks out of a rendered text and remembers where they were.
    pub fn take_out(&self, text: String) -> RenderedPrompt {
        let Some(mark) = self.mark else {
            return RenderedPrompt { text, guards: Vec::new() };
        };
        let mut clean = String::with_capacity(text.len());
        let mut guards = Vec::new();
        for part in text.split(mark) {
            clean.push_str(part);
            guards.push(clean.len());
        }
        guards.pop();
        RenderedPrompt { text: clean, guards }
    }
}

/// The template's variables.
pub(super) fn build(template: &ChatTemplate, input: &ChatInput<'_>, marker: &Marker<'_>) -> Jinja {
    let mut variables: Vec<(String, Jinja)> = Vec::new();
    let tokens = &template.tokens;
    for (name, token) in [
        ("bos_token", &tokens.bos),
        ("eos_token", &tokens.eos),
        ("unk_token", &tokens.unknown),
        ("pad_token", &tokens.pad),
    ] {
        if let Some(token) = token {
            variables.push((name.into(), Jinja::from(token.as_str())));
        }
    }
    let now = input.now;
    let strftime_now = move |format: &str| LocalTime::format(&now, format);
    variables.push(("strftime_now".into(), Jinja::from_function(strftime_now)));
    for (key, value) in input.extra.into_iter().flatten() {
        variables.push((key.clone(), marker.value(value)));
    }
    let messages = input.messages.iter().map(|message| marker.value(&shaped(message, template.content_format)));
    variables.push(("messages".into(), Jinja::from(messages.collect::<Vec<_>>())));
    let tools = input.tools.map(|tools| tools.iter().map(|tool| marker.value(tool)).collect::<Vec<_>>());
    variables.push(("tools".into(), tools.map_or(Jinja::from(()), Jinja::from)));
    if input.extra.is_none_or(|extra| !extra.contains_key("documents")) {
        variables.push(("documents".into(), Jinja::from(())));
    }
    variables.push(("add_generation_prompt".into(), Jinja::from(input.add_generation_prompt)));
    Jinja::from_pairs(variables)
}

/// `message` with its content in the form that the template wants, and the arguments of tool calls as objects.
fn shaped(message: &Value, format: ContentFormat) -> Value {
    let Value::Object(fields) = message else {
        return message.clone();
    };
    if format == ContentFormat::AsGiven {
        return message.clone();
    }
    let mut fields: Map<String, Value> = fields.clone();
    let content = fields.get("content").cloned().unwrap_or(Value::Null);
    let content = match (format, content) {
        (_, Value::Null) => Value::String(String::new()),
        (ContentFormat::String, Value::Array(parts)) => joined(parts),
        (_, content) => content,
    };
    let content = match content {
        Value::String(text) if format == ContentFormat::Parts => json!([{"type": "text", "text": text}]),
        content => content,
    };
    fields.insert("content".into(), content);
    for call in fields.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        parse_arguments(call);
    }
    Value::Object(fields)
}

/// The text parts joined as by `\n`; content with other parts stays as it is.
fn joined(parts: Vec<Value>) -> Value {
    let texts: Option<Vec<&str>> =
        parts.iter().map(|part| part.as_str().or_else(|| part.get("text").and_then(Value::as_str))).collect();
    match texts {
        Some(texts) => Value::String(texts.join("\n")),
        None => Value::Array(parts),
    }
}

/// Templates expect the arguments of a call as an object; the OpenAI form has them as a JSON string.
fn parse_arguments(call: &mut Value) {
    if let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments"))
        && let Some(text) = arguments.as_str()
        && let Ok(parsed @ Value::Object(_)) = serde_json::from_str(text)
    {
        *arguments = parsed;
    }
}

/// Tries the template on one short message in both forms.
pub(super) fn detect_content_format(template: &ChatTemplate) -> ContentFormat {
    const PROBE: &str = "pagemill-probe";
    let render = |content: Value| -> Result<String, TextError> {
        let messages = [json!({"role": "user", "content": content})];
        let now = LocalTime::from_unix_seconds(0);
        let input = ChatInput { messages: &messages, tools: None, add_generation_prompt: true, extra: None, now };
        let guard = LiteralGuard::none();
        let context = build(template, &input, &Marker::idle(&guard));
        template.run(context, PROBE.len() + template.source.len())
    };
    let from_string = render(json!(PROBE)).ok().filter(|text| text.contains(PROBE));
    let from_parts = render(json!([{"type": "text", "text": PROBE}])).ok().filter(|text| text.contains(PROBE));
    match (from_string, from_parts) {
        (Some(string), Some(parts)) if string == parts => ContentFormat::Either,
        (None, Some(_)) => ContentFormat::Parts,
        _ => ContentFormat::String,
    }
}

/// Bytes of text in `input`.
pub(super) fn input_len(input: &ChatInput<'_>) -> usize {
    let mut len = 0_usize;
    for_each_string(input, &mut |text| len = len.saturating_add(text.len() + 8));
    len
}

fn for_each_string<'a>(input: &ChatInput<'a>, found: &mut impl FnMut(&'a str)) {
    for value in input.messages.iter().chain(input.tools.into_iter().flatten()) {
        strings_of(value, found);
    }
    for (key, value) in input.extra.into_iter().flatten() {
        found(key);
        strings_of(value, found);
    }
}

fn strings_of<'a>(value: &'a Value, found: &mut impl FnMut(&'a str)) {
    match value {
        Value::String(text) => found(text),
        Value::Array(items) => items.iter().for_each(|item| strings_of(item, found)),
        Value::Object(fields) => {
            for (key, value) in fields {
                found(key);
                strings_of(value, found);
            }
        }
        _ => {}
    }
}
