//! The Jinja environment that chat templates run in.
//!
//! It decides where templates written for Jinja2 as set up by `transformers` differ from the engine's own ways:
//! white-space control, Python's string methods and way of writing values, `tojson`, `raise_exception`, the
//! `generation` tag. It knows neither messages nor tokens.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};
use regex::Regex;

use super::python::{self, JsonLayout};
use crate::TextError;

/// The one template's name in its environment.
pub(super) const NAME: &str = "chat_template";

/// The message that a template passed to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub String);

/// An environment with `source` compiled in it.
pub(super) fn build(source: &str) -> Result<Environment<'static>, TextError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|error| syntax_error(&error))?);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, _, value| python::write_str(out, value));
    environment.add_function("raise_exception", raise_exception);
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", string);
    environment.add_filter("indent", indent);
    environment.add_test("iterable", is_iterable);
    environment.add_template_owned(NAME, without_generation_tags(source)).map_err(|error| syntax_error(&error))?;
    Ok(environment)
}

fn syntax_error(error: &Error) -> TextError {
    let detail = error.detail().map_or_else(|| error.to_string(), str::to_owned);
    TextError::TemplateSyntax { line: error.line().unwrap_or(0), detail }
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()).with_source(Raised(message.to_owned())))
}

fn string(value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    python::write_str(&mut text, value)?;
    Ok(text)
}

/// Unlike the engine's own test, this one says no to `none`.
fn is_iterable(value: &Value) -> bool {
    value.is_undefined() || value.as_str().is_some() || (!value.is_none() && value.try_iter().is_ok())
}

/// `indent(text, width=4, first=False, blank=False)`. Unlike the engine's own filter, it keeps a line break at the
/// end of the text.
fn indent(text: &str, positional: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let option = |name: &str, index: usize| -> Result<Option<Value>, Error> {
        positional.get(index).cloned().map_or_else(|| options.get::<Option<Value>>(name), |value| Ok(Some(value)))
    };
    let width = match option("width", 0)? {
        None => "    ".to_owned(),
        Some(text) if text.as_str().is_some() => text.to_string(),
        Some(count) => " ".repeat(usize::try_from(count)?.min(64)),
    };
    let first = option("first", 1)?.is_some_and(|value| value.is_true());
    let blank = option("blank", 2)?.is_some_and(|value| value.is_true());
    options.assert_all_used()?;
    let mut indented = String::with_capacity(text.len() + width.len());
    for (index, line) in text.split('\n').enumerate() {
        indented.push_str(if index == 0 { "" } else { "\n" });
        if if index == 0 { first } else { blank || !line.is_empty() } {
            indented.push_str(&width);
        }
        indented.push_str(line);
    }
    Ok(indented)
}

/// `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn tojson(value: &Value, positional: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let option = |name: &str, index: usize| -> Result<Option<Value>, Error> {
        let given = positional.get(index).cloned().map_or_else(|| options.get::<Option<Value>>(name), |v| Ok(Some(v)));
        Ok(given?.filter(|value| !value.is_none()))
    };
    let ensure_ascii = option("ensure_ascii", 0)?.is_some_and(|value| value.is_true());
    let indent = match option("indent", 1)? {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(count) => Some(" ".repeat(usize::try_from(count)?.min(64))),
    };
    let default_separator = if indent.is_some() { "," } else { ", " };
    let (item_separator, key_separator) = match option("separators", 2)? {
        None => (default_separator.to_owned(), ": ".to_owned()),
        Some(pair) => (pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string()),
    };
    let sort_keys = option("sort_keys", 3)?.is_some_and(|value| value.is_true());
    options.assert_all_used()?;
    python::to_json(value, &JsonLayout { indent, item_separator, key_separator, ensure_ascii, sort_keys })
}

/// `{% generation %}` only marks the assistant's words for training; its block renders as it stands.
fn without_generation_tags(source: &str) -> String {
    if !source.contains("generation") {
        return source.to_owned();
    }
    let Ok(tag) = Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}") else {
        return source.to_owned();
    };
    let as_if = |found: &regex::Captures<'_>| {
        let word = if found.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {word} {}%}}", &found[1], &found[3])
    };
    tag.replace_all(source, as_if).into_owned()
}
